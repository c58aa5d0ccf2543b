"""Laws of several inputs: model size and compute, data or tokens.

    tan            log10 L(N, X) = -k(N) log10 X + E(N),  k(N) = k_max / (1 + N0 / N)
    tan_plateau    L(N, X) = ((N0 / N)^beta + B(N) / (X + C(N)))^alpha
    kaplan_one     L(X) = (X_c / X)^alpha
    kaplan         L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D
    chinchilla     L(N, D) = E + A / N^alpha + B / D^beta

The first two are of the error 1 - pass rate after reinforcement learning: Tan et al.,
https://arxiv.org/abs/2509.25300, equations 1 and 2, and their code's "postopenai".  The
others, for comparison, are of pre-training loss in nats per token: Kaplan et al.,
https://arxiv.org/abs/2001.08361, and Hoffmann et al., https://arxiv.org/abs/2203.15556.

Parameters are positive.  They are searched as logarithms, from many starts; intervals
are the t-intervals of the linearised fit, on the logarithms.  Only `tan` has a search
and profile intervals of its own: 10^E enters linearly and is projected out, in place of
the authors' CMA-ES; as in their code, the error itself is fitted by least squares, and
every model size has equal weight.

One file above 400 lines: five laws with one result.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.records import (
    OPEN,
    Array,
    CurveError,
    Interval,
    Parameter,
    Record,
    r_squared,
)
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR, student_quantile

# A parameter whose logarithm is less certain than this is not fixed by the data.
LARGEST_LOG_ERROR = 2.0
HUGE_RESIDUAL = 1e6
NUM_STARTS = 3  # starts that are searched from: those with the least sum of squares
LOG_LIMIT = 500.0  # exp overflows past 709
TOLERANCES = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-15)
# Limits of k_max for Tan et al.'s law, and of N0 in units of the smallest and of the
# largest model; the authors' are k_max in [0, 2], and N0 in [1e8, 1e11] for models of
# 5e8 to 7.2e10 parameters.
_K_MAX_LIMITS, _N0_BELOW, _N0_ABOVE = (1e-3, 2.0), 1e-2, 1e3
ALPHA_STARTS = (0.1, 0.2, 0.4, 0.8)  # of the law with a plateau
OFFSET_STARTS = np.geomspace(1e-3, 1e3, 61)  # of its C, in units of the largest x
FLOPS_PER_PARAMETER_TOKEN = 6.0
TAN_SOURCE = "https://arxiv.org/abs/2509.25300"
KAPLAN_SOURCE = "https://arxiv.org/abs/2001.08361"
OF_SIZE, OF_DATA = ("exponent of model size", ""), ("exponent of data", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurfaceLaw(Record):
    """A law of several inputs, with positive parameters."""

    law: str  # its name
    formula: str
    source: str
    input_names: tuple[str, ...]  # with units
    output_name: str
    # By parameter: meaning, unit.
    meanings: dict[str, tuple[str, str]] = dataclasses.field(repr=False)
    # (parameter values by name, *inputs) -> output
    function: Callable[..., Array] = dataclasses.field(repr=False)
    # Residuals are of the output's logarithm; `huber` is where Huber's loss turns
    # linear.
    logarithmic: bool = dataclasses.field(repr=False, default=False)
    huber: float | None = dataclasses.field(repr=False, default=None)

    def check(
        self, inputs: Sequence[ArrayLike], output: ArrayLike
    ) -> tuple[list[Array], Array]:
        """Return inputs and output as [n] arrays, checked: finite, above 0, enough."""
        arrays = [np.asarray(given, np.float64) for given in (*inputs, output)]
        for array, name in zip(
            arrays, (*self.input_names, self.output_name), strict=True
        ):
            if array.ndim != 1 or array.shape != arrays[-1].shape:
                raise CurveError(
                    f"{name} has shape {array.shape} and {self.output_name} "
                    f"{arrays[-1].shape}; give lists of the same length"
                )
            bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
            if bad.size:
                raise CurveError(
                    f"point {bad[0] + 1}: {name} = {array[bad[0]]:g}; the law is a "
                    "power law, so every value must be a number above 0"
                )
        count = len(self.meanings)
        if arrays[-1].size <= count:
            raise CurveError(
                f"{arrays[-1].size} points cannot fix {count} parameters; at least "
                f"{count + 1} are needed"
            )
        return arrays[:-1], arrays[-1]

    def named(
        self, values: dict[str, float], intervals: Sequence[Interval | None]
    ) -> dict[str, Parameter]:
        """Return the parameters with these values and intervals."""
        return {
            name: Parameter(
                name=name,
                meaning=meaning,
                unit=unit,
                value=values[name],
                interval=interval,
                source="fitted",
            )
            for (name, (meaning, unit)), interval in zip(
                self.meanings.items(), intervals, strict=True
            )
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurfaceFit(SurfaceLaw):
    """A fitted law of several inputs; `predict` takes them in `input_names`' order."""

    num_points: int
    level: float
    parameters: dict[str, Parameter]
    converged: bool
    identified: bool  # every parameter is fixed by the data
    r_squared: float
    sigma: float  # of the residuals, in the unit of the output
    warnings: tuple[str, ...] = ()
    # The largest value of each input that was fitted.
    largest: tuple[float, ...] = dataclasses.field(repr=False, default=())

    def predict(self, *inputs: ArrayLike) -> Array:
        """Return the output at the inputs, which broadcast."""
        if len(inputs) != len(self.input_names):
            raise ValueError(
                f"{len(inputs)} inputs; the law takes {', '.join(self.input_names)}"
            )
        values = {name: p.value for name, p in self.parameters.items()}
        arrays = [np.asarray(given, np.float64) for given in inputs]
        return self.function(values, *arrays)

    def noted(self, notes: Sequence[str]) -> Self:
        """Return the fit with the reader's notes among its warnings."""
        return dataclasses.replace(self, warnings=(*notes, *self.warnings))


def fit_surface(
    law: SurfaceLaw,
    inputs: Sequence[Array],
    output: Array,
    starts: Sequence[dict[str, float]],
    *,
    level: float,
) -> SurfaceFit:
    """Fit by least squares over log parameters; the best result is kept.

    Args:
        inputs: [n] each, checked by `SurfaceLaw.check`.
        output: [n].
        starts: parameter values to begin at; the best of them are searched from.
    """
    best = _least_squares(law, inputs, output, starts)
    degrees = output.size - len(law.meanings)
    errors = _log_errors(best.jac, best.cost, degrees)
    errors = np.where(np.abs(best.x) < LOG_LIMIT, errors, np.inf)  # it diverged
    reach = student_quantile(level, degrees) * errors
    fixed = errors < LARGEST_LOG_ERROR
    with np.errstate(over="ignore", invalid="ignore"):  # of those that are not fixed
        ends = np.exp(best.x - reach).tolist(), np.exp(best.x + reach).tolist()
    intervals = [
        Interval(low, high) if sure else OPEN
        for low, high, sure in zip(*ends, fixed, strict=True)
    ]
    loose = [name for name, sure in zip(law.meanings, fixed, strict=True) if not sure]
    values = _values(law, best.x)
    with np.errstate(over="ignore"):
        misfit = output - law.function(values, *inputs)
    return SurfaceFit(
        **vars(law),
        num_points=output.size,
        largest=tuple(float(each.max()) for each in inputs),
        level=level,
        parameters=law.named(values, intervals),
        converged=best.status > 0,
        identified=best.status > 0 and not loose,
        r_squared=r_squared(output, misfit),
        sigma=float(np.sqrt((misfit**2).sum() / degrees)),
        warnings=(f"not fixed by the data: {', '.join(loose)}",) if loose else (),
    )


def _values(law: SurfaceLaw, logs: Array) -> dict[str, float]:
    """Return parameter values by name, of their logarithms."""
    bounded = np.clip(logs, -LOG_LIMIT, LOG_LIMIT)
    return dict(zip(law.meanings, np.exp(bounded).tolist(), strict=True))


def _least_squares(
    law: SurfaceLaw,
    inputs: Sequence[Array],
    output: Array,
    starts: Sequence[dict[str, float]],
) -> Any:
    """Return SciPy's result from the best of the starts."""
    from scipy.optimize import least_squares

    target = np.log(output) if law.logarithmic else output

    def residuals(logs: Array) -> Array:
        with np.errstate(over="ignore", divide="ignore"):  # far off: a huge residual
            predicted = law.function(_values(law, logs), *inputs)
            if law.logarithmic:
                predicted = np.log(predicted)
        return np.clip(target - predicted, -HUGE_RESIDUAL, HUGE_RESIDUAL)

    logs = [np.log([start[name] for name in law.meanings]) for start in starts]
    logs.sort(key=lambda start: float((residuals(start) ** 2).sum()))
    ends = [
        least_squares(
            residuals,
            start,
            jac="3-point",
            x_scale="jac",
            loss="linear" if law.huber is None else "huber",
            f_scale=law.huber or 1.0,
            max_nfev=200,
            **TOLERANCES,
        )
        for start in logs[:NUM_STARTS]
    ]
    return min(ends, key=lambda end: end.cost)


def _log_errors(jacobian: Array, cost: float, degrees: int) -> Array:
    """Return standard errors of the log parameters; infinite where nothing is known."""
    _, singular, basis = np.linalg.svd(jacobian, full_matrices=False)
    known = singular > 1e-10 * singular[0]
    inverse = np.where(known, 1.0 / np.where(known, singular, 1.0), 1e12)
    spread = np.sqrt(2.0 * cost / degrees)
    return spread * np.sqrt(((basis * inverse[:, None]) ** 2).sum(axis=0))


# ---- Tan et al., without a plateau


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanFit(SurfaceFit):
    """The law over all model sizes together: k_max, N0, and E[N] of each size."""

    x_name: str
    sizes: list[float]  # N, parameters

    def slope(self, model_size: ArrayLike) -> Array:
        """Return k(N)."""
        k_max, n0 = self.parameters["k_max"].value, self.parameters["N0"].value
        return k_max / (1.0 + n0 / np.asarray(model_size, np.float64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanExtrapolation(Record):
    """Errors of the law on held-out points."""

    protocol: str  # "intra-model" or "inter-model"
    num_fitted: int
    num_held_out: int
    r_squared: float  # over the held-out points
    mean_absolute_error: float
    intercept_from: int  # points of the held-out size that gave its E; 0 for intra
    fit: TanFit


def _labels(sizes: Array) -> list[str]:
    """Return model sizes [S] as written in names of parameters: 7B.

    Six digits, or more where two sizes have the same six.
    """
    found: list[str] = []
    for digits in (6, 12, 17):
        found = [f"{size / 1e9:.{digits}g}B" for size in sizes]
        if len({*found}) == len(found):
            break
    return found


def _at_sizes(p: dict[str, float], letter: str, sizes: Array, size: Array) -> Array:
    """Return the parameters letter[N] of known sizes [S], in the shape of `size`."""
    values = np.array([p[f"{letter}[{label}]"] for label in _labels(sizes)])
    return values[np.searchsorted(sizes, size)]


def _tan_law(sizes: Array, x_name: str) -> SurfaceLaw:
    """Return the law for these model sizes [S], in parameters, increasing."""

    def function(p: dict[str, float], size: Array, x: Array) -> Array:
        if not np.isin(size, sizes).all():
            raise ValueError(
                f"E is known for the sizes {sizes.tolist()} only; for another one give "
                "its first points to a fit of all"
            )
        slope = p["k_max"] / (1.0 + p["N0"] / size)
        return 10.0 ** (_at_sizes(p, "E", sizes, size) - slope * np.log10(x))

    by_size = ("log10 of the error at x = 1", "log10(error)")
    return SurfaceLaw(
        law="tan",
        formula="log10 L(N, X) = -k(N) log10 X + E(N), k(N) = k_max / (1 + N0 / N)",
        source=f"{TAN_SOURCE}, equations 1 and 2",
        input_names=("model_size", x_name),
        output_name="error",
        meanings={
            "k_max": ("slope of an infinitely large model", ""),
            "N0": ("model size at half of k_max", "parameters"),
            **{f"E[{label}]": by_size for label in _labels(sizes)},
        },
        function=function,
    )


@dataclasses.dataclass(frozen=True)
class _Data:
    """Points of all sizes, with E projected out."""

    size: Array  # [n]
    log_x: Array  # [n] natural logarithm, less its mean
    error: Array  # [n]
    weights: Array  # [n], of mean 1, with an equal sum for every size
    member: Array  # [sizes, n]
    centre: float  # the mean of log x

    @functools.cached_property
    def limits(self) -> Array:
        """Return the limits of log k_max and log N0, [2, 2]."""
        of_size = self.size.min() * _N0_BELOW, self.size.max() * _N0_ABOVE
        return np.log([_K_MAX_LIMITS, of_size])

    def solve(self, logs: Array) -> tuple[Array, Array]:
        """Return 10^E of each size (at the mean log x) and scaled residuals [n]."""
        k_max, n0 = np.exp(logs)
        decay = np.exp(-k_max / (1.0 + n0 / self.size) * self.log_x)
        scale = (self.member @ (self.weights * self.error * decay)) / (
            self.member @ (self.weights * decay**2)
        )
        predicted = (scale @ self.member) * decay
        return scale, np.sqrt(self.weights) * (self.error - predicted)

    def cost(self, logs: Array) -> float:
        """Return the weighted sum of squares."""
        return float((self.solve(logs)[1] ** 2).sum())


def fit_tan(
    model_size: ArrayLike,
    x: ArrayLike,
    error: ArrayLike,
    *,
    x_name: str = "x",
    level: float = 0.9,
) -> TanFit:
    """Fit the law to points of several model sizes.

    Args:
        model_size: [n] parameters; at least two different sizes.
        x: [n] compute or data, above 0.
        error: [n] 1 - pass rate, in (0, 1].
        x_name: what x is, with its unit.
        level: of the profile-likelihood intervals of k_max and N0.
    """
    sizes = np.unique(np.asarray(model_size, np.float64))
    law = _tan_law(sizes, x_name)
    data = _checked(law, sizes, model_size, x, error)
    best, converged = _search(data)
    scale, z = data.solve(best)
    degrees = data.error.size - 2 - len(sizes)
    variance = max(float((z**2).sum()) / degrees, SIGMA_FLOOR**2)
    excess = student_quantile(level, degrees) ** 2 * variance
    intervals = [_profile(data, best, which, excess) for which in (0, 1)]
    k_max, n0 = np.exp(best)
    slopes = k_max / (1.0 + n0 / sizes)
    intercepts = (np.log(scale) + slopes * data.centre) / np.log(10.0)
    values = dict(zip(law.meanings, map(float, (k_max, n0, *intercepts)), strict=True))
    loose = any(None in (i.low, i.high) for i in intervals)
    return TanFit(
        **vars(law),
        x_name=x_name,
        sizes=sizes.tolist(),
        num_points=data.error.size,
        level=level,
        parameters=law.named(values, [*intervals, *[None] * len(sizes)]),
        converged=converged,
        identified=converged and not loose,
        r_squared=r_squared(data.error, z / np.sqrt(data.weights)),
        sigma=float(np.sqrt(variance)),
        warnings=("k_max and N0 are not both fixed by these sizes",) * loose,
    )


def _checked(
    law: SurfaceLaw,
    sizes: Array,
    model_size: ArrayLike,
    x: ArrayLike,
    error: ArrayLike,
) -> _Data:
    """Return the points for a fit; raise CurveError if the law cannot be fitted."""
    (size, compute), errors = law.check((model_size, x), error)
    if len(sizes) < 2:
        raise CurveError(
            f"one model size ({sizes[0]:g}): k(N) needs at least two; fit the law "
            "error_power to one"
        )
    if errors.max() > 1:
        raise CurveError(
            f"error = {errors.max():g} is above 1; give 1 - pass rate, as a fraction"
        )
    if np.ptp(errors) == 0:
        raise CurveError(
            f"constant curves: error is {errors[0]:g} everywhere, so there is no "
            "scaling to fit"
        )
    member = (size == sizes[:, None]).astype(np.float64)
    weights = (1.0 / member.sum(axis=1)) @ member
    logs = np.log(compute)
    centre = float(logs.mean())
    weights /= weights.mean()
    return _Data(size, logs - centre, errors, weights, member, centre)


def _search(data: _Data) -> tuple[Array, bool]:
    """Find log k_max and log N0 of the least squares: a grid, then refinement."""
    from scipy.optimize import least_squares

    axes = [np.linspace(low, high, 40) for low, high in data.limits]
    nodes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    found = least_squares(
        lambda logs: data.solve(logs)[1],
        min(nodes, key=data.cost),
        bounds=data.limits.T,
        jac="3-point",
        x_scale="jac",
        max_nfev=500,
        **TOLERANCES,
    )
    return found.x, found.status > 0


def _profile(data: _Data, best: Array, which: int, excess: float) -> Interval:
    """Find the profile-likelihood interval of k_max (0) or N0 (1)."""
    from scipy.optimize import brentq, minimize_scalar

    low_other, high_other = data.limits[1 - which]
    grid = np.linspace(low_other, high_other, 60)
    least = data.cost(best)

    def growth(held: float) -> float:
        def cost(other: float) -> float:
            return data.cost(np.array([held, other] if which == 0 else [other, held]))

        node = int(np.argmin([cost(value) for value in grid]))
        around = grid[max(node - 1, 0)], grid[min(node + 1, 59)]
        found = minimize_scalar(cost, bounds=around, method="bounded")
        return float(found.fun) - least - excess

    ends: list[float | None] = []
    for limit in data.limits[which]:
        if growth(limit) <= 0:
            ends.append(None)
        else:
            end = brentq(growth, float(best[which]), float(limit), xtol=1e-4)
            ends.append(math.exp(cast(float, end)))
    return Interval(*ends)


def extrapolate_intra(
    model_size: ArrayLike,
    x: ArrayLike,
    error: ArrayLike,
    *,
    num_first: int = 25,
    x_name: str = "x",
) -> TanExtrapolation:
    """Fit all sizes on their first points together, and predict the rest.

    The paper's intra-model protocol: 25 of 105 evaluations of the base models.
    """
    size, compute, errors = (np.asarray(a, np.float64) for a in (model_size, x, error))
    first = np.zeros(size.shape, bool)
    for n in np.unique(size):
        places = np.flatnonzero(size == n)
        first[places[np.argsort(compute[places], kind="stable")][:num_first]] = True
    if first.all():
        raise CurveError(
            f"num_first = {num_first} leaves no points to predict; give fewer"
        )
    fit = fit_tan(size[first], compute[first], errors[first], x_name=x_name)
    predicted = fit.predict(size[~first], compute[~first])
    return _extrapolation("intra-model", fit, errors[~first], predicted, 0)


def extrapolate_inter(
    model_size: ArrayLike,
    x: ArrayLike,
    error: ArrayLike,
    *,
    num_intercept: int | None = None,
    x_name: str = "x",
) -> TanExtrapolation:
    """Fit all sizes but the largest, and predict the largest.

    The paper's inter-model protocol.  Only the slope k(N) is predicted: E of the
    largest model comes from its own points, in the paper from ALL of them, which is
    the default here (`num_intercept` None); with fewer, only the points after them
    are judged.
    """
    size, compute, errors = (np.asarray(a, np.float64) for a in (model_size, x, error))
    sizes = np.unique(size)
    _checked(_tan_law(sizes, x_name), sizes, size, compute, errors)
    largest = size == size.max()
    fit = fit_tan(size[~largest], compute[~largest], errors[~largest], x_name=x_name)
    order = np.argsort(compute[largest], kind="stable")
    its_x, its_error = compute[largest][order], errors[largest][order]
    used = its_x.size if num_intercept is None else num_intercept
    if not 1 <= used <= its_x.size or (num_intercept and used == its_x.size):
        raise CurveError(
            f"num_intercept = {num_intercept} of {its_x.size} points of the largest "
            "model; leave some to predict"
        )
    k = float(fit.slope(size.max()))
    intercept = float((np.log10(its_error) + k * np.log10(its_x))[:used].mean())
    judged = slice(None) if num_intercept is None else slice(used, None)
    predicted = 10.0 ** (intercept - k * np.log10(its_x[judged]))
    return _extrapolation("inter-model", fit, its_error[judged], predicted, used)


def _extrapolation(
    protocol: str, fit: TanFit, measured: Array, predicted: Array, used: int
) -> TanExtrapolation:
    """Return the errors over held-out points."""
    return TanExtrapolation(
        protocol=protocol,
        num_fitted=fit.num_points,
        num_held_out=measured.size,
        r_squared=r_squared(measured, measured - predicted),
        mean_absolute_error=float(np.abs(measured - predicted).mean()),
        intercept_from=used,
        fit=fit,
    )


# ---- Tan et al., with a plateau


def plateau_law(sizes: Array) -> SurfaceLaw:
    """Return the law of Kaplan's form for these model sizes [S], increasing.

    B and C have one value per model size.  As X grows without limit, the error tends to
    (N0 / N)^(alpha beta).
    """

    def function(p: dict[str, float], size: Array, x: Array) -> Array:
        if not np.isin(size, sizes).all():
            raise ValueError(f"B and C are known for the sizes {sizes.tolist()} only")
        scale, offset = (_at_sizes(p, letter, sizes, size) for letter in "BC")
        floor = (p["N0"] / size) ** p["beta"]
        return (floor + scale / (x + offset)) ** p["alpha"]

    by_size = {}
    for label in _labels(sizes):
        by_size[f"B[{label}]"] = ("scale of what training removes", "x")
        by_size[f"C[{label}]"] = ("offset of x", "x")
    return SurfaceLaw(
        law="tan_plateau",
        formula="L(N, X) = ((N0 / N)^beta + B(N) / (X + C(N)))^alpha",
        source=f"{TAN_SOURCE}, code",
        input_names=("model_size", "x"),
        output_name="error",
        meanings={
            "N0": ("model size whose error never falls below 1", "parameters"),
            "beta": OF_SIZE,
            "alpha": ("outer exponent", ""),
            **by_size,
        },
        function=function,
    )


def fit_plateau(
    model_size: ArrayLike, x: ArrayLike, error: ArrayLike, *, level: float = 0.9
) -> SurfaceFit:
    """Fit the law with a plateau to points [n] of at least three model sizes.

    At a given alpha, L^(1/alpha) of one size is a level plus B / (x + C), which gives
    the starts; then everything is fitted together by least squares of the error.
    """
    sizes = np.unique(np.asarray(model_size, np.float64))
    law = plateau_law(sizes)
    inputs, errors = law.check((model_size, x), error)
    if len(sizes) < 3:
        raise CurveError(
            f"{len(sizes)} model sizes; the law needs three, as N0, beta and alpha are "
            "shared by all"
        )
    size, compute = inputs
    starts = [
        _plateau_start(sizes, size, compute, errors, alpha) for alpha in ALPHA_STARTS
    ]
    return fit_surface(law, inputs, errors, starts, level=level)


def _plateau_start(
    sizes: Array, size: Array, x: Array, error: Array, alpha: float
) -> dict[str, float]:
    """Return parameters near the best ones at a given alpha."""
    floors, start = [], {"alpha": alpha}
    for known, label in zip(sizes, _labels(sizes), strict=True):
        here, target = x[size == known], error[size == known] ** (1.0 / alpha)
        fits = []
        for offset in OFFSET_STARTS * x.max():
            basis = np.stack([np.ones_like(here), 1.0 / (here + offset)], axis=1)
            (floor, scale), *_ = np.linalg.lstsq(basis, target, rcond=None)
            floor, scale = max(floor, 1e-3 * target.min()), max(scale, 1e-6 * offset)
            misfit = target - basis @ np.array([floor, scale])
            fits.append((float((misfit**2).sum()), floor, scale, offset))
        _, floor, scale, offset = min(fits)
        floors.append(floor)
        start[f"B[{label}]"], start[f"C[{label}]"] = float(scale), float(offset)
    slope, intercept = np.polyfit(np.log(sizes), np.log(floors), 1)
    beta = max(-float(slope), 0.05)
    return start | {"beta": beta, "N0": float(np.exp(intercept / beta))}


# ---- pre-training loss

KAPLAN_ONE = SurfaceLaw(
    law="kaplan_one",
    formula="L(X) = (X_c / X)^alpha",
    source=f"{KAPLAN_SOURCE}, equations 1.1 to 1.3",
    input_names=("x",),
    output_name="loss",
    meanings={"X_c": ("x at which the loss is 1", "x"), "alpha": ("exponent", "")},
    function=lambda p, x: (p["X_c"] / x) ** p["alpha"],
    logarithmic=True,
)
KAPLAN = SurfaceLaw(
    law="kaplan",
    formula="L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D",
    source=f"{KAPLAN_SOURCE}, equation 1.5",
    input_names=("model_size", "tokens"),
    output_name="loss",
    meanings={
        "N_c": ("scale of model size", "parameters"),
        "alpha_N": OF_SIZE,
        "D_c": ("scale of data", "tokens"),
        "alpha_D": OF_DATA,
    },
    function=lambda p, n, d: (
        ((p["N_c"] / n) ** (p["alpha_N"] / p["alpha_D"]) + p["D_c"] / d) ** p["alpha_D"]
    ),
    logarithmic=True,
)
CHINCHILLA = SurfaceLaw(
    law="chinchilla",
    formula="L(N, D) = E + A / N^alpha + B / D^beta",
    source="https://arxiv.org/abs/2203.15556, equation 2",
    input_names=("model_size", "tokens"),
    output_name="loss",
    meanings={
        "E": ("irreducible loss", "nats per token"),
        "A": ("scale of the model-size term", "nats * parameters^alpha"),
        "alpha": OF_SIZE,
        "B": ("scale of the data term", "nats * tokens^beta"),
        "beta": OF_DATA,
    },
    function=lambda p, n, d: (
        p["E"] + p["A"] / n ** p["alpha"] + p["B"] / d ** p["beta"]
    ),
    logarithmic=True,
    huber=1e-3,  # Hoffmann et al., section 3.3
)


def fit_kaplan_one(x: ArrayLike, loss: ArrayLike, *, level: float = 0.9) -> SurfaceFit:
    """Fit Kaplan's law of one quantity (size, data or compute), in log-log."""
    inputs, losses = KAPLAN_ONE.check((x,), loss)
    slope, level_at_one = np.polyfit(np.log(inputs[0]), np.log(losses), 1)
    if slope >= 0.0:
        raise CurveError(
            f"the loss does not fall as x grows, from {losses[inputs[0].argmin()]:g} "
            f"to {losses[inputs[0].argmax()]:g}, as Kaplan's law does: check --y; a "
            "pass rate is fitted without --law"
        )
    alpha = max(-float(slope), 1e-3)
    log_scale = np.clip(level_at_one / alpha, -LOG_LIMIT, LOG_LIMIT)
    start = {"X_c": float(np.exp(log_scale)), "alpha": alpha}
    return fit_surface(KAPLAN_ONE, inputs, losses, [start], level=level)


def fit_kaplan(
    model_size: ArrayLike, tokens: ArrayLike, loss: ArrayLike, *, level: float = 0.9
) -> SurfaceFit:
    """Fit Kaplan's law of model size and data [n] each, in log loss."""
    inputs, losses = KAPLAN.check((model_size, tokens), loss)
    starts = []
    for alpha_n, alpha_d in itertools.product((0.05, 0.1, 0.3), repeat=2):
        # L^(1/alpha_D) is linear in N^-(alpha_N/alpha_D) and 1/D.
        ratio = alpha_n / alpha_d
        basis = np.stack([inputs[0] ** -ratio, 1.0 / inputs[1]], axis=1)
        by_size, by_data = _positive_scales(basis, losses ** (1.0 / alpha_d))
        scales = {"N_c": by_size ** (1.0 / ratio), "D_c": by_data}
        starts.append(scales | {"alpha_N": alpha_n, "alpha_D": alpha_d})
    return fit_surface(KAPLAN, inputs, losses, starts, level=level)


def fit_chinchilla(
    model_size: ArrayLike, tokens: ArrayLike, loss: ArrayLike, *, level: float = 0.9
) -> SurfaceFit:
    """Fit Chinchilla's law of model size and data [n] each.

    Huber's loss on log residuals, summed: averaged, as in the paper's code, it stops
    early (Besiroglu et al., https://arxiv.org/abs/2404.10102).
    """
    inputs, losses = CHINCHILLA.check((model_size, tokens), loss)
    starts = []
    for alpha, beta in itertools.product((0.2, 0.35, 0.5), repeat=2):
        basis = np.stack(
            [np.ones_like(losses), inputs[0] ** -alpha, inputs[1] ** -beta], axis=1
        )
        e, a, b = _positive_scales(basis, losses)
        starts.append({"E": e, "A": a, "alpha": alpha, "B": b, "beta": beta})
    return fit_surface(CHINCHILLA, inputs, losses, starts, level=level)


def _positive_scales(basis: Array, target: Array) -> list[float]:
    """Return least squares of target [n] on basis [n, m], kept above 0: a start."""
    norms = np.linalg.norm(basis, axis=0)
    scales = np.linalg.lstsq(basis / norms, target, rcond=None)[0] / norms
    least = 1e-3 * np.linalg.norm(target) / norms
    return np.maximum(scales, least).tolist()


def compute_optimal(fit: SurfaceFit, flops: ArrayLike) -> tuple[Array, Array]:
    """Return model size and tokens of least loss for a budget, by a Chinchilla fit.

        N = G (C / 6)^(beta / (alpha + beta)),  D = C / (6 N),
        G = (alpha A / (beta B))^(1 / (alpha + beta))

    Hoffmann et al., equation 4, with C = 6 N D.
    """
    if fit.law != CHINCHILLA.law:
        raise ValueError(f"the allocation is of a chinchilla fit, not of {fit.law}")
    p = {name: parameter.value for name, parameter in fit.parameters.items()}
    total = p["alpha"] + p["beta"]
    scale = (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1.0 / total)
    pairs = np.asarray(flops, np.float64) / FLOPS_PER_PARAMETER_TOKEN
    size = scale * pairs ** (p["beta"] / total)
    return size, pairs / size
