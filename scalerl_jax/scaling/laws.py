"""Scaling laws of one run: pass rate as a function of compute.

This module holds formulas only: a law neither reads files nor fits itself, and its
compute may have any unit (chip-hours, FLOPs, tokens, rollouts or steps).

Every law here can be written with two levels and a share between them,

    R(x) = R0 + (A - R0) * share(t; u, v),    t = log(x / x_last),

so that it is linear in R0 and A, and one search (`search.py`) serves all.  The
shape parameters u and v are dimensionless; `Law.public` turns them into the law's
own parameters.  Laws over model size too are in `laws_over_sizes.py`.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.records import Array

Number = Array | float
Ends = tuple[float, float]

LARGEST_EXPONENT = 700.0  # exp overflows past 709
# Far outside the data nothing can be learned: C_mid from x_first / 30 to 30 x_last.
REACH = math.log(30.0)
SCALERL = "https://arxiv.org/abs/2510.13786"


def gained_share(log_x: Number, exponent: Number, log_midpoint: Number) -> Array:
    """Return the share of the gain A - R0 reached at x, in [0, 1].

        share = 1 / (1 + (C_mid / x)^B)

    Arguments broadcast against each other; log_x is -inf at x = 0, where the share
    is 0.  Written with tanh, which cannot overflow far from the midpoint.
    """
    return 0.5 * (1.0 + np.tanh(0.5 * exponent * (log_x - log_midpoint)))


def sigmoid(
    x: ArrayLike,
    *,
    initial_reward: float,
    asymptote: float,
    exponent: float,
    midpoint: float,
) -> Array:
    """Return the pass rate after compute x, by ScaleRL's sigmoid.

        R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B)

    with R0 = initial_reward, A = asymptote, B = exponent and C_mid = midpoint, the
    compute at which half of the gain is reached.  https://arxiv.org/abs/2510.13786,
    equation 1.

    Args:
        x: compute, any shape, at least 0, in the unit of `midpoint`.

    Returns:
        Pass rates in the shape of x.
    """
    share = gained_share(log_compute(x), exponent, math.log(midpoint))
    return initial_reward + (asymptote - initial_reward) * share


def log_compute(x: ArrayLike) -> Array:
    """Return the logarithm of compute, -inf at 0; negative compute is refused."""
    compute = np.asarray(x, dtype=np.float64)
    if np.any(compute < 0):
        raise ValueError(
            f"compute x = {compute.min():g} is below its limit 0; "
            "pass the compute spent since the start of the run"
        )
    with np.errstate(divide="ignore"):  # log 0 = -inf gives a share of exactly 0
        return np.log(compute)


@dataclasses.dataclass(frozen=True)
class ParameterKind:
    """Name, meaning and unit of a parameter of a law."""

    name: str
    meaning: str
    unit: str  # "{x}" stands for the unit of x
    column: int | None  # of theta, if it is a monotonic function of one column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """One law, in the form that the search needs.

    `share` and `slopes` take t = log(x / x_last), u and v, which broadcast; `slopes`
    returns the share's derivatives by u and v.
    """

    name: str
    title: str
    formula: str
    source: str
    kinds: tuple[ParameterKind, ...]
    share: Callable[[Array, Number, Number], Array]
    slopes: Callable[[Array, Number, Number], tuple[Array, Array]]
    limits: Callable[[float], tuple[Ends, Ends]]  # t of the first point -> of u and v
    public: Callable[[Array, float], tuple[Array, ...]]  # see `values`
    # x over x_last where half of the gain is reached; None: the law has no such x
    half_gain: Callable[[Number, Number], Number] | None = None
    has_v: bool = True
    starts_at_r0: bool = True  # R(0) = R0, so that a given R0 can be held
    known_at_zero: bool = True  # R(0) is a number, so that step 0 is an observation
    held_asymptote: float | None = None  # A is not a parameter of this law

    def rates(self, theta: Array, t: Array) -> Array:
        """Return the pass rates [K, n] of rows theta [K, 4] at t, [n] or [K, n]."""
        r0, asymptote, u, v = theta.T[:, :, None]
        return r0 + (asymptote - r0) * self.share(t, u, v)

    def values(self, theta: Array, log_x_last: float) -> Array:
        """Return the law's own parameters [K, kinds] of rows theta [K, 4]."""
        return np.stack(self.public(theta.T, log_x_last), axis=1)


def _sigmoid_slopes(t: Array, u: Number, v: Number) -> tuple[Array, Array]:
    exponent = np.exp(u)
    share = gained_share(t, exponent, v)
    steepness = share * (1.0 - share) * exponent
    with np.errstate(invalid="ignore"):
        return steepness * (t - v), -steepness


def _exponential_slopes(t: Array, u: Number, v: Number) -> tuple[Array, Array]:
    ratio = np.exp(np.minimum(t - u, LARGEST_EXPONENT))
    return -ratio * np.exp(-ratio) + 0.0 * v, np.zeros_like(ratio)


def _power_share(t: Array, u: Number, v: Number) -> Array:
    return -np.expm1(np.minimum(-np.exp(u) * t, LARGEST_EXPONENT)) + 0.0 * v


def _power_slopes(t: Array, u: Number, v: Number) -> tuple[Array, Array]:
    decay = -np.exp(u) * t
    slope = -decay * np.exp(np.minimum(decay, LARGEST_EXPONENT)) + 0.0 * v
    return slope, np.zeros_like(slope)


def _plateauless_share(t: Array, u: Number, v: Number) -> Array:
    return -np.expm1(-np.exp(u) * np.logaddexp(0.0, t - v))


def _plateauless_slopes(t: Array, u: Number, v: Number) -> tuple[Array, Array]:
    exponent, log_ratio = np.exp(u), np.logaddexp(0.0, t - v)
    left = exponent * np.exp(-exponent * log_ratio)
    return left * log_ratio, -left * np.exp(t - v - log_ratio)


def _error_public(theta: Array, log_x_last: float) -> tuple[Array, Array]:
    slope = np.exp(theta[2])
    error = np.log10(np.maximum(1.0 - theta[0], 1e-300))  # R0's column: at x_last
    return slope, error + slope * log_x_last / math.log(10.0)


_R0 = ParameterKind("R0", "pass rate at zero compute", "pass rate", 0)
_A = ParameterKind("A", "asymptotic pass rate", "pass rate", 1)

SIGMOID = Law(
    name="sigmoid",
    title="ScaleRL's sigmoid",
    formula="R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B)",
    source=f"{SCALERL}, equation 1",
    kinds=(
        _R0,
        _A,
        ParameterKind("B", "exponent: how fast A is approached", "", 2),
        ParameterKind("C_mid", "compute at half of the gain", "{x}", 3),
    ),
    share=lambda t, u, v: gained_share(t, np.exp(u), v),
    slopes=_sigmoid_slopes,
    # B is 1.1 to 2.4 in the paper; 16 is a step.
    limits=lambda first: ((math.log(0.1), math.log(16.0)), (first - REACH, REACH)),
    public=lambda p, end: (p[0], p[1], np.exp(p[2]), np.exp(p[3] + end)),
    half_gain=lambda u, v: np.exp(v),
)
POWER = Law(
    name="power",
    title="power law",
    formula="R(x) = A - D / x^B",
    source=f"{SCALERL}, appendix A.4",
    kinds=(
        _A,
        ParameterKind("D", "distance from A at x = 1", "pass rate * {x}^B", None),
        ParameterKind("B", "exponent", "", 2),
    ),
    share=_power_share,
    slopes=_power_slopes,
    limits=lambda first: ((math.log(0.01), math.log(8.0)), (0.0, 0.0)),
    # R0's column is the rate at x_last.
    public=lambda p, end: (
        p[1],
        (p[1] - p[0]) * np.exp(np.exp(p[2]) * end),
        np.exp(p[2]),
    ),
    has_v=False,
    starts_at_r0=False,
    known_at_zero=False,
)
LOGISTIC = Law(
    name="logistic",
    title="logistic in raw compute",
    formula="R(x) = R0 + (A - R0) / (1 + exp(-k (x - x_mid)))",
    source="summaries of ScaleRL; not the paper's form",
    kinds=(
        ParameterKind("R0", "lower level", "pass rate", 0),
        _A,
        ParameterKind("k", "steepness", "1 / {x}", 2),
        ParameterKind("x_mid", "compute halfway between the levels", "{x}", 3),
    ),
    # The sigmoid's form, in x / x_last instead of its logarithm.
    share=lambda t, u, v: gained_share(np.exp(t), np.exp(u), v),
    slopes=lambda t, u, v: _sigmoid_slopes(np.exp(t), u, v),
    limits=lambda first: ((math.log(0.3), math.log(300.0)), (-1.0, 4.0)),
    public=lambda p, end: (
        p[0],
        p[1],
        np.exp(p[2]) / math.exp(end),
        p[3] * math.exp(end),
    ),
    half_gain=lambda u, v: v,
    starts_at_r0=False,
)
EXPONENTIAL = Law(
    name="exponential",
    title="exponential saturation",
    formula="R(x) = R0 + (A - R0) (1 - exp(-x / tau))",
    source="https://arxiv.org/abs/2507.18014, without its model-size term",
    kinds=(
        _R0,
        _A,
        ParameterKind("tau", "compute in which the gap to A falls e-fold", "{x}", 2),
    ),
    share=lambda t, u, v: -np.expm1(-np.exp(t - u)) + 0.0 * v,
    slopes=_exponential_slopes,
    limits=lambda first: ((first - REACH, REACH), (0.0, 0.0)),
    public=lambda p, end: (p[0], p[1], np.exp(p[2] + end)),
    half_gain=lambda u, v: math.log(2.0) * np.exp(u),
    has_v=False,
)
ERROR_POWER = dataclasses.replace(
    POWER,
    name="error_power",
    title="Tan et al.'s power law of the error",
    formula="log10(1 - R(x)) = E - k log10(x)",
    source="https://arxiv.org/abs/2509.25300, for one model size",
    kinds=(
        ParameterKind("k", "slope of the log error", "", 2),
        ParameterKind("E", "log10 of the error at x = 1", "log10(1 - pass rate)", None),
    ),
    public=_error_public,
    held_asymptote=1.0,
)
# The power law of the error that starts at R0.  It is not offered for fitting: it tests
# whether a plateau that another law found is more than an artefact of that law's form.
PLATEAULESS = dataclasses.replace(
    SIGMOID,
    name="plateauless",
    title="power law of the error, from R0 on",
    formula="R(x) = 1 - (1 - R0) (1 + x / c)^-k",
    source="`power` with A = 1, moved along x so that R(0) is finite",
    share=_plateauless_share,
    slopes=_plateauless_slopes,
    limits=lambda first: ((math.log(0.01), math.log(8.0)), (first - REACH, REACH)),
    half_gain=None,
    held_asymptote=1.0,
)
LAWS: dict[str, Law] = {
    law.name: law for law in (SIGMOID, POWER, LOGISTIC, EXPONENTIAL, ERROR_POWER)
}
