"""The verdict on a fit: does the curve climb, and do the data fix its asymptote."""

import dataclasses

import numpy as np

from scalerl_jax.scaling.curves import Curve
from scalerl_jax.scaling.falls import find_fall
from scalerl_jax.scaling.laws import Array, Law
from scalerl_jax.scaling.records import Interval
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import R0, SHAPE_U, SHAPE_V, A
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR

# An A this close below 1, the largest pass rate there is, needs no other upper limit.
NEAR_ONE = 0.05
AT_ONE = 1e-6  # a fitted A this close to 1 was stopped there
# The paper's margin between equal recipes, from three runs of one of them.
ASYMPTOTE_MARGIN = 0.02
# Data to this many C_mid fixed A in simulations with noise of 0.003 to 0.012.
USUAL_REACH = 2.4
# Neighbouring residuals of independent noise correlate by less than this many 1/sqrt n.
AUTOCORRELATION_ERRORS = 2.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What can be said of a fit."""

    climbs: bool
    asymptote_interval: Interval
    reason: str | None  # why A is not identified
    warnings: tuple[str, ...] = ()


def judge(
    curve: Curve, law: Law, best: Array, intervals: dict[int, Interval]
) -> Verdict:
    """The verdict on the best row theta [4] with the intervals of its columns.

    For A to be identified two things must hold.  Its profile must have an upper
    limit; one within NEAR_ONE of 1 needs none, as no pass rate is larger.  And the
    data must have passed the half of the gain, at the upper limit of where that is:
    before, the height of the plateau follows from the law's symmetry alone, and noise
    that bends the curve a little too early would pass for a low asymptote.
    """
    obstacle = find_fall(curve) or _no_gain(best)
    if obstacle is not None:
        return Verdict(False, Interval(None, None), obstacle)
    warnings = _at_limits(law, best, curve)
    if A not in intervals:
        reason = None
        if law.held_asymptote is not None:
            reason = (
                f"the law has no plateau to identify: it ends at {law.held_asymptote:g}"
            )
        return Verdict(True, Interval(None, None), reason, warnings)
    low, high = intervals[A].low, intervals[A].high
    if high is None and low is not None and low >= 1.0 - NEAR_ONE:
        high = 1.0
    half, latest = _half_of_gain(law, best, intervals)
    if high is not None and (latest is None or latest <= 1.0):
        return Verdict(True, Interval(low, high), None, warnings)
    reason = open_limit(law, best, curve, Interval(low, high), half)
    return Verdict(True, Interval(low, None), reason, warnings)


def open_limit(
    law: Law, best: Array, curve: Curve, limits: Interval, half: float | None
) -> str:
    """Say which limit of A the data leave open, why, and how far they reach.

    `limits` are those of A's profile, `half` is x over x_last at half of the gain.
    """
    name = "C_mid" if law.name == "sigmoid" else "compute at half of the gain"
    side = "limit on either side" if limits.low is None else "upper limit"
    if limits.high is not None:
        cause = f"{name} has none inside the data"
    elif best[A] >= 1.0 - AT_ONE:
        cause = "A = 1, the largest pass rate there is, fits best"
    else:
        cause = "A = 1 fits about as well"
    end = f"the data end at {curve.x_name} = {curve.x[-1]:.4g}"
    advice = "noise, or too few points, leave it open"
    if half is not None:
        end += f", {1.0 / half:.3g} times the fitted {name}"
        if 1.0 / half < USUAL_REACH:
            advice = f"more than {USUAL_REACH} times is usually needed"
    return f"A has no {side}: {cause}; {end}; {advice}"


def _half_of_gain(
    law: Law, best: Array, intervals: dict[int, Interval]
) -> tuple[float | None, float | None]:
    """x over x_last at half of the gain, fitted and at its upper limit."""
    if law.half_gain is None:
        return None, None
    column = SHAPE_V if law.has_v else SHAPE_U
    high, moved = intervals[column].high, best.copy()
    moved[column] = np.inf if high is None else high
    half = float(law.half_gain(best[SHAPE_U], best[SHAPE_V]))
    return half, float(law.half_gain(moved[SHAPE_U], moved[SHAPE_V]))


def _no_gain(best: Array) -> str | None:
    """Says that the best fit does not rise above R0; None if it does."""
    if best[A] > best[R0]:
        return None
    return (
        f"the curve does not climb: the fitted A = {best[A]:.3f} is not above "
        f"R0 = {best[R0]:.3f}"
    )


def _at_limits(law: Law, best: Array, curve: Curve) -> tuple[str, ...]:
    """Says which shape parameter the search stopped at the end of."""
    limits = law.limits(float(np.log(curve.x[0] / curve.x[-1])))
    names = {kind.column: kind.name for kind in law.kinds}
    columns = (SHAPE_U, SHAPE_V) if law.has_v else (SHAPE_U,)
    return tuple(
        f"{names[column]} is at the end of its search range: the data do not fix it"
        for column, (low, high) in zip(columns, limits, strict=False)
        if not low + 1e-9 < best[column] < high - 1e-9
    )


def significant_correlation(num_points: int) -> float:
    """The largest correlation of neighbours that independent noise explains."""
    return AUTOCORRELATION_ERRORS / float(np.sqrt(num_points))


def late_warnings(result: Fit, free: Fit | None) -> tuple[str, ...]:
    """What a reader of the numbers should know besides the verdict."""
    if not result.climbs:
        return ()
    found = []
    measured = result.curve.r0
    if "R0" in result.parameters and result.definition.starts_at_r0:
        if result.initial_reward_free and measured is None:
            found.append(
                "R0 was not measured (no point at zero compute) and is a free "
                "parameter; A and the rest depend on it: give --r0 if you know it"
            )
        elif not result.initial_reward_free and measured is not None:
            if result.initial_reward != measured:
                found.append(
                    f"R0 = {result.initial_reward:.4g} is used as given, although the "
                    f"curve starts at {measured:.4g}"
                )
    if free is not None and result.identified and free.identified:
        difference = abs(free.asymptote - result.asymptote)
        if difference > ASYMPTOTE_MARGIN:
            found.append(
                f"with R0 free A moves by {difference:.3f}, more than the margin of "
                f"{ASYMPTOTE_MARGIN} between equal recipes: R0 may be wrong"
            )
    noisy = result.sigma > 2.0 * SIGMA_FLOOR  # a smoother curve has rounding errors
    limit = significant_correlation(result.num_points)
    if noisy and result.autocorrelation > limit:
        found.append(
            f"neighbouring residuals correlate ({result.autocorrelation:.2f}): the "
            "intervals are widened for it, but from one run that is a rough guess; "
            "several seeds say more"
        )
    return tuple(found)
