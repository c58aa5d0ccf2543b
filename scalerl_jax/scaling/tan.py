"""Tan et al.'s laws over model sizes: the error falls as a power of compute or data.

    log10 L(N, X) = -k(N) log10 X + E(N),  k(N) = K_max / (1 + N0 / N)

L = 1 - pass rate, N model parameters, X compute or data; E is one number per model
size.  https://arxiv.org/abs/2509.25300, equations 1 and 2.  As in the authors' code,
the error itself (not its logarithm) is fitted by least squares, and every model size
weighs alike; in place of CMA-ES, E is projected out: 10^E enters linearly.
"""

import dataclasses
import math
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.records import Interval, Record
from scalerl_jax.scaling.result import Parameter
from scalerl_jax.scaling.surfaces import check_inputs
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR, student_quantile

# Of the search; the authors' bounds are k_max in [0, 2] and N0 in [1e8, 1e11].
LOG_LIMITS = np.log([[1e-3, 2.0], [1e7, 1e13]])  # k_max, N0 in parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanFit(Record):
    """The law over all model sizes together."""

    formula: str
    x_name: str
    sizes: list[float]  # N, parameters
    num_points: int
    level: float
    parameters: dict[str, Parameter]  # k_max, N0, and E[N] of each size
    converged: bool
    identified: bool  # k_max and N0 both have two limits
    r_squared: float  # of the error rate
    sigma: float
    warnings: tuple[str, ...]

    def slope(self, model_size: ArrayLike) -> Array:
        """k(N)."""
        size = np.asarray(model_size, np.float64)
        k_max, n0 = self.parameters["k_max"].value, self.parameters["N0"].value
        return k_max / (1.0 + n0 / size)

    def predict(self, model_size: ArrayLike, x: ArrayLike) -> Array:
        """The error rate 1 - pass rate of fitted model sizes at x; both broadcast."""
        size = np.asarray(model_size, np.float64)
        intercept = np.full(size.shape, np.nan)
        for known in self.sizes:
            intercept[size == known] = self.parameters[size_label(known)].value
        if np.isnan(intercept).any():
            raise ValueError(
                f"E is known for the sizes {self.sizes} only; for another one give "
                "its first points to a fit of all"
            )
        return 10.0 ** (intercept - self.slope(size) * np.log10(np.asarray(x)))

    def residuals(self, model_size: ArrayLike, x: ArrayLike, error: ArrayLike) -> Array:
        """Measured minus predicted error rate."""
        return np.asarray(error, np.float64) - self.predict(model_size, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanExtrapolation(Record):
    """How well the law foretells what it was not fitted to."""

    protocol: str  # "intra-model" or "inter-model"
    num_fitted: int
    num_held_out: int
    r_squared: float  # over the held-out points
    mean_absolute_error: float
    intercept_from: int  # held-out size's own points behind its E; 0 for intra
    fit: TanFit


def size_label(size: float) -> str:
    """A model size in names of parameters: E[7B]."""
    return f"E[{size / 1e9:g}B]"


@dataclasses.dataclass(frozen=True)
class _Data:
    """Points of all sizes, with E projected out."""

    size: Array  # [n]
    log_x: Array  # [n] natural logarithm, less its mean
    error: Array  # [n]
    weights: Array  # [n], every size alike, of mean 1
    member: Array  # [sizes, n]

    def solve(self, logs: Array) -> tuple[Array, Array]:
        """10^E of each size (at the mean log x) and scaled residuals [n]."""
        k_max, n0 = np.exp(logs)
        decay = np.exp(-k_max / (1.0 + n0 / self.size) * self.log_x)
        scale = (self.member @ (self.weights * self.error * decay)) / (
            self.member @ (self.weights * decay**2)
        )
        predicted = (scale @ self.member) * decay
        return scale, np.sqrt(self.weights) * (self.error - predicted)

    def cost(self, logs: Array) -> float:
        """Weighted sum of squares."""
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
    sizes, data, centre = _checked(model_size, x, error, x_name)
    best, converged = _search(data)
    scale, z = data.solve(best)
    degrees = data.error.size - 2 - len(sizes)
    variance = max(float((z**2).sum()) / degrees, SIGMA_FLOOR**2)
    excess = student_quantile(level, degrees) ** 2 * variance
    intervals = [_profile(data, best, which, excess) for which in (0, 1)]
    k_max, n0 = np.exp(best)
    slopes = k_max / (1.0 + n0 / sizes)
    intercepts = (np.log(scale) + slopes * centre) / np.log(10.0)
    values = [
        ("k_max", "slope of an infinitely large model", "", float(k_max), intervals[0]),
        ("N0", "model size at half of k_max", "parameters", float(n0), intervals[1]),
    ] + [
        (size_label(n), "log10 of the error at x = 1", "log10(error)", float(e), None)
        for n, e in zip(sizes, intercepts, strict=True)
    ]
    open_ended = any(None in (i.low, i.high) for i in intervals)
    return TanFit(
        formula="log10 L(N, X) = -k(N) log10 X + E(N), k(N) = k_max / (1 + N0 / N)",
        x_name=x_name,
        sizes=sizes.tolist(),
        num_points=data.error.size,
        level=level,
        parameters={
            name: Parameter(
                name=name,
                meaning=meaning,
                unit=unit,
                value=value,
                interval=interval,
                source="fitted",
            )
            for name, meaning, unit, value, interval in values
        },
        converged=converged,
        identified=converged and not open_ended,
        r_squared=_r_squared(data.error, z / np.sqrt(data.weights)),
        sigma=float(np.sqrt(variance)),
        warnings=("k_max and N0 are not both fixed by these sizes",)
        if open_ended
        else (),
    )


def _checked(
    model_size: ArrayLike, x: ArrayLike, error: ArrayLike, x_name: str
) -> tuple[Array, _Data, float]:
    """The different sizes, the points, and the mean of log x that they are without."""
    sizes = np.unique(np.asarray(model_size, np.float64))
    (size, compute), errors = check_inputs(
        [model_size, x], ["model_size", x_name], error, "error", 2 + len(sizes)
    )
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
    centre = float(np.log(compute).mean())
    data = _Data(
        size, np.log(compute) - centre, errors, weights / weights.mean(), member
    )
    return sizes, data, centre


def _search(data: _Data) -> tuple[Array, bool]:
    """log k_max and log N0 of the least squares: a grid, then refinement."""
    from scipy.optimize import least_squares

    (k_low, k_high), (n_low, n_high) = LOG_LIMITS
    axes = np.linspace(k_low, k_high, 40), np.linspace(n_low, n_high, 40)
    nodes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    start = min(nodes, key=data.cost)
    found = least_squares(
        lambda logs: data.solve(logs)[1],
        start,
        bounds=LOG_LIMITS.T,
        jac="3-point",
        x_scale="jac",
        ftol=1e-15,
        xtol=1e-15,
        gtol=1e-15,
        max_nfev=500,
    )
    return found.x, found.status > 0


def _profile(data: _Data, best: Array, which: int, excess: float) -> Interval:
    """Profile-likelihood interval of k_max (0) or N0 (1)."""
    from scipy.optimize import brentq, minimize_scalar

    low_other, high_other = LOG_LIMITS[1 - which]
    least = data.cost(best)

    def growth(held: float) -> float:
        def cost(other: float) -> float:
            return data.cost(np.array([held, other] if which == 0 else [other, held]))

        grid = np.linspace(low_other, high_other, 60)
        node = int(np.argmin([cost(value) for value in grid]))
        around = grid[max(node - 1, 0)], grid[min(node + 1, 59)]
        found = minimize_scalar(cost, bounds=around, method="bounded")
        return float(found.fun) - least - excess

    ends: list[float | None] = []
    for limit in LOG_LIMITS[which]:
        if growth(limit) <= 0:
            ends.append(None)
        else:
            end = brentq(growth, float(best[which]), float(limit), xtol=1e-4)
            ends.append(math.exp(cast(float, end)))
    return Interval(*ends)


def _r_squared(values: Array, residuals: Array) -> float:
    """Share of the variance that is explained."""
    spread = float(((values - values.mean()) ** 2).sum())
    return 1.0 - float((residuals**2).sum()) / spread if spread else 0.0


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

    The paper's inter-model protocol.  Only the slope k(N) is foretold: E of the
    largest model comes from its own points, in the paper from ALL of them, which is
    the default here (`num_intercept` None); with fewer, only the points after them
    are judged.
    """
    size, compute, errors = (np.asarray(a, np.float64) for a in (model_size, x, error))
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
    """The errors over held-out points."""
    return TanExtrapolation(
        protocol=protocol,
        num_fitted=fit.num_points,
        num_held_out=measured.size,
        r_squared=_r_squared(measured, measured - predicted),
        mean_absolute_error=float(np.abs(measured - predicted).mean()),
        intercept_from=used,
        fit=fit,
    )
