"""Fitting the sigmoid to one curve: the numbers, their intervals, and their verdict.

A `Fit` always says whether its asymptote is identified.  Points count alike, as in
the paper; weights, other laws and comparisons of runs are not here.
"""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_jax.scaling.curves import (
    DEFAULT_X,
    DEFAULT_Y,
    Curve,
    CurveError,
    make_curve,
)
from scalerl_jax.scaling.laws import sigmoid
from scalerl_jax.scaling.search import LOG_B, LOG_C, R0, A, Array, Grid, Problem
from scalerl_jax.scaling.search import minimise as search_minimum
from scalerl_jax.scaling.uncertainty import (
    Interval,
    Profile,
    allowed_excess,
    find_fall,
    profile,
)

# An A this close below 1, the largest pass rate there is, needs no other upper limit.
NEAR_ONE = 0.05
# The paper's margin between equal recipes, from three runs of one of them.
ASYMPTOTE_MARGIN = 0.02
# Data to this many C_mid fixed A in simulations with noise of 0.003 to 0.012.
USUAL_REACH = 2.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The last evaluation, predicted from the first half of the compute."""

    fit_until: float  # compute of the last point that was fitted
    predicted: float  # pass rate
    actual: float  # pass rate
    error: float  # predicted - actual


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The sigmoid that fits a curve best.

    R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B); x is in the unit of `x_name`.
    """

    x_name: str
    y_name: str
    x_last: float  # the compute that the data reach
    num_points: int  # fitted: without the zero-compute point
    level: float  # of the intervals, 0.9 for 90 %

    initial_reward: float  # R0
    initial_reward_source: Literal["measured", "given", "free"]  # free: fitted
    asymptote: float  # A, in [0, 1]
    exponent: float  # B
    midpoint: float  # C_mid, in the unit of x
    initial_reward_interval: Interval | None  # None unless free
    asymptote_interval: Interval
    exponent_interval: Interval
    midpoint_interval: Interval

    climbs: bool  # False when the curve falls or stays: the law does not describe it
    identified: bool  # the data bound A from above; else its interval's high is None
    reason: str | None  # why not
    r_squared: float  # over the fitted points, without the zero-compute one
    sigma: float  # noise, sqrt(squared error / (n - parameters)), in pass rate
    warnings: tuple[str, ...] = ()
    r0_free: "Fit | None" = None  # the same with R0 free, where n allows
    half_forecast: Forecast | None = None  # None: too few points, or they fall
    accepted: Array = dataclasses.field(repr=False)  # [K, 4] R0, A, log B, log C_mid

    @property
    def initial_reward_free(self) -> bool:
        """True when R0 was fitted, False when it was measured or given."""
        return self.initial_reward_source == "free"

    def predict(self, x: ArrayLike) -> NDArray[np.float64]:
        """Pass rate at compute x, in the shape of x."""
        return sigmoid(
            x,
            initial_reward=self.initial_reward,
            asymptote=self.asymptote,
            exponent=self.exponent,
            midpoint=self.midpoint,
        )

    def band(self, x: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lowest and highest pass rate at x among the fits inside the intervals.

        The envelope of the profiles' curves, each in the shape of x.  It bounds the
        curve, not single noisy evaluations.
        """
        curves = np.stack(
            [
                sigmoid(
                    x,
                    initial_reward=theta[R0],
                    asymptote=theta[A],
                    exponent=np.exp(theta[LOG_B]),
                    midpoint=np.exp(theta[LOG_C]),
                )
                for theta in self.accepted
            ]
        )
        return curves.min(axis=0), curves.max(axis=0)


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    r0: float | None = None,
    start: float | None = None,
    x_name: str = DEFAULT_X,
    y_name: str = DEFAULT_Y,
    level: float = 0.9,
) -> Fit:
    """Fit ScaleRL's sigmoid by unweighted least squares.

        R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B),  0 <= A <= 1

    https://arxiv.org/abs/2510.13786, equation 1, with the grid of appendix A.7
    replaced by variable projection and descent.  R0 is `r0`; else the pass rate of a
    first point at x = 0; else a fourth parameter.

    Args:
        x: [n] compute, increasing, any unit.
        y: [n] pass rates in [0, 1].
        r0: pass rate at zero compute.
        start: points with 0 < x < start are left out (the paper: 1.5k GPU-hours).
        x_name: what x is, with its unit, for messages and reports.
        y_name: what y is.
        level: of the profile-likelihood intervals, in (0, 1).

    Raises:
        CurveError: the input cannot be fitted; the message says how to mend it.
    """
    curve = make_curve(x, y, start=start, names=(x_name, y_name))
    return fit_curve(curve, r0=r0, level=level)


def fit_curve(curve: Curve, *, r0: float | None = None, level: float = 0.9) -> Fit:
    """`fit`, for a curve that is already checked; `r0` overrides its own."""
    if not 0 < level < 1:
        raise CurveError(f"level = {level:g}; give a share in (0, 1), such as 0.9")
    if r0 is not None and not 0 <= r0 <= 1:
        raise CurveError(
            f"--r0 = {r0:g} is outside [0, 1], where pass rates lie; divide percent "
            "by 100, map a reward in [-1, 1] by (reward + 1) / 2"
        )
    initial_reward = curve.r0 if r0 is None else r0
    num_parameters = 4 if initial_reward is None else 3
    if curve.x.size <= num_parameters:
        remedy = ", lower --from" if curve.num_left_out else ""
        remedy += ", or give --r0 to fit one less" if initial_reward is None else ""
        raise CurveError(
            f"{curve.x.size} points with {curve.x_name} > 0 cannot fix "
            f"{num_parameters} parameters; at least {num_parameters + 1} are needed: "
            f"evaluate more often{remedy}"
        )
    free = _fit_one(curve, None, level) if curve.x.size > 4 else None
    if initial_reward is None:
        assert free is not None, "4 parameters had enough points"
        result = free
    else:
        result = dataclasses.replace(
            _fit_one(curve, initial_reward, level),
            initial_reward_source="measured" if r0 is None else "given",
            r0_free=free,
        )
    return dataclasses.replace(
        result,
        warnings=(*curve.warnings, *_warnings(curve, result)),
        half_forecast=_forecast_from_half(curve, initial_reward),
    )


def _fit_one(curve: Curve, r0: float | None, level: float) -> Fit:
    """The fit with R0 fixed, or free when it is None."""
    problem = Problem(log_x=np.log(curve.x), y=curve.y, r0=r0)
    grid = Grid(problem)
    best, squared_error = search_minimum(problem, grid)
    degrees = curve.x.size - len(problem.free)
    excess = allowed_excess(squared_error, curve.x.size, len(problem.free), level)
    profiles = {
        column: profile(
            problem,
            grid,
            best,
            column=column,
            squared_error=squared_error,
            excess=excess,
        )
        for column in problem.free
    }
    obstacle = find_fall(curve.x, curve.y) or _find_no_gain(best)
    if obstacle is None:
        interval, reason = _judge(curve, best, profiles)
        exponent, midpoint = profiles[LOG_B].interval, profiles[LOG_C].interval
    else:
        interval = exponent = midpoint = Interval(None, None)
        reason = obstacle
    return Fit(
        x_name=curve.x_name,
        y_name=curve.y_name,
        x_last=float(curve.x[-1]),
        num_points=curve.x.size,
        level=level,
        initial_reward=float(best[R0]),
        initial_reward_source="free" if r0 is None else "measured",
        asymptote=float(best[A]),
        exponent=float(np.exp(best[LOG_B])),
        midpoint=float(np.exp(best[LOG_C])),
        initial_reward_interval=profiles[R0].interval if r0 is None else None,
        asymptote_interval=interval,
        exponent_interval=_exponential(exponent),
        midpoint_interval=_exponential(midpoint),
        climbs=obstacle is None,
        identified=reason is None,
        reason=reason,
        r_squared=1.0 - squared_error / float(((curve.y - curve.y.mean()) ** 2).sum()),
        sigma=float(np.sqrt(squared_error / degrees)),
        accepted=np.vstack([found.inside for found in profiles.values()]),
    )


def _find_no_gain(best: Array) -> str | None:
    """Says that the best fit does not rise above R0; None if it does."""
    if best[A] > best[R0]:
        return None
    return (
        f"the curve does not climb: the fitted A = {best[A]:.3f} is not above "
        f"R0 = {best[R0]:.3f}"
    )


def _exponential(interval: Interval) -> Interval:
    """An interval of a logarithm, on the natural scale."""
    low, high = interval.low, interval.high
    return Interval(
        None if low is None else float(np.exp(low)),
        None if high is None else float(np.exp(high)),
    )


def _judge(
    curve: Curve, best: Array, profiles: dict[int, Profile]
) -> tuple[Interval, str | None]:
    """The interval of A, and the reason why it is not identified, if it is not.

    Two things must hold.  The profile of A must have an upper limit; one within
    NEAR_ONE of 1 needs none, as no pass rate is larger.  And the data must have
    passed the midpoint, at the upper limit of C_mid: before that, the height of the
    plateau follows from the law's symmetry alone, and noise that bends the curve
    a little too early would pass for a low asymptote.
    """
    low, high = profiles[A].interval.low, profiles[A].interval.high
    if high is None and low is not None and low >= 1.0 - NEAR_ONE:
        high = 1.0
    reach = float(curve.x[-1] / np.exp(best[LOG_C]))
    data_end = (
        f"the data end at {curve.x_name} = {curve.x[-1]:.4g}, {reach:.2g} times the "
        "fitted C_mid"
    )
    if high is None:
        cause, short = "A = 1 fits about as well", reach < USUAL_REACH
    else:
        latest = _exponential(profiles[LOG_C].interval).high
        if latest is not None and latest <= curve.x[-1]:
            return Interval(low, high), None
        cause, short = "the curve may not have passed its midpoint yet", True
    advice = (
        f"more than {USUAL_REACH} times is usually needed"
        if short
        else "noise, or too few points, leave the plateau open"
    )
    return Interval(low, None), f"{cause}: {data_end}; {advice}"


def _warnings(curve: Curve, result: Fit) -> tuple[str, ...]:
    """What a reader of the numbers should know besides the verdict."""
    found = []
    free = result.r0_free
    if result.initial_reward_free:
        found.append(
            "R0 was not measured (no point at zero compute) and is a free parameter; "
            "A, B and C_mid depend on it: give --r0 if you know it"
        )
    elif curve.r0 is not None and result.initial_reward != curve.r0:
        found.append(
            f"R0 = {result.initial_reward:.4g} is used as given, although the curve "
            f"starts at {curve.r0:.4g}"
        )
    if free is not None and result.identified and free.identified:
        difference = abs(free.asymptote - result.asymptote)
        if difference > ASYMPTOTE_MARGIN:
            found.append(
                f"with R0 free A moves by {difference:.3f}, more than the margin of "
                f"{ASYMPTOTE_MARGIN} between equal recipes: R0 may be wrong"
            )
    return tuple(found)


def _forecast_from_half(curve: Curve, r0: float | None) -> Forecast | None:
    """Fit the points up to half of the last compute, and predict the last point."""
    half = curve.x <= 0.5 * curve.x[-1]
    num_parameters = 4 if r0 is None else 3
    if half.sum() <= num_parameters or np.ptp(curve.y[half]) == 0:
        return None
    problem = Problem(log_x=np.log(curve.x[half]), y=curve.y[half], r0=r0)
    (initial_reward, asymptote, log_b, log_c), _ = search_minimum(
        problem, Grid(problem)
    )
    if asymptote < initial_reward:  # possible with R0 free, on a half that falls
        return None
    predicted = float(
        sigmoid(
            curve.x[-1],
            initial_reward=initial_reward,
            asymptote=asymptote,
            exponent=float(np.exp(log_b)),
            midpoint=float(np.exp(log_c)),
        )
    )
    actual = float(curve.y[-1])
    return Forecast(
        fit_until=float(curve.x[half][-1]),
        predicted=predicted,
        actual=actual,
        error=predicted - actual,
    )
