"""The verdict on a fit: does the curve climb, and do the data fix its asymptote."""

import dataclasses

import numpy as np

from scalerl_jax.scaling.curves import Curve
from scalerl_jax.scaling.falls import find_fall
from scalerl_jax.scaling.flat import FALSE_CLIMBS
from scalerl_jax.scaling.independence import FALSE_WARNINGS
from scalerl_jax.scaling.laws import Array, Law
from scalerl_jax.scaling.records import Interval
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import R0, SHAPE_U, SHAPE_V, A
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR, Profiles

AT_ONE = 1e-6  # a fitted A this close to 1 was stopped there
DOUBTFUL_ERRORS = 2.0  # of the noise of step 0, beyond the interval from other points
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
    flat: bool
    asymptote_interval: Interval
    reason: str | None  # why A is not identified
    warnings: tuple[str, ...] = ()
    bounded: bool = False  # A has an upper limit and half of the gain was passed


def judge(
    curve: Curve,
    law: Law,
    best: Array,
    profiles: Profiles,
    quantile: float,
    *,
    p_value: float,
) -> Verdict:
    """The verdict on the best row theta [4] with the profiles of its columns.

    For A to be identified two things must hold.  Its interval must have an upper limit
    below 1, the largest pass rate there is.  And the data must have passed the half of
    the gain for certain: before, the height of the plateau follows from the law's
    symmetry alone, and noise that bends the curve a little too early would pass for a
    low asymptote.

    Args:
        curve: what was fitted.
        law: by which law.
        best: the fit.
        profiles: its intervals, and what speaks for the two.
        quantile: standard errors that an interval of this level reaches.
        p_value: of the test for a climb (`flat.climb_p_value`).
    """
    fall, flat = find_fall(curve), _flat(best, p_value)
    if fall or flat:
        return Verdict(False, not fall, Interval(None, None), fall or flat)
    warnings = _at_limits(law, best, curve)
    if A not in profiles.intervals:
        reason = None
        if law.held_asymptote is not None:
            reason = (
                f"the law has no plateau to identify: it ends at {law.held_asymptote:g}"
            )
        return Verdict(True, False, Interval(None, None), reason, warnings)
    interval = profiles.intervals[A]
    bounded = min(profiles.against_one, profiles.against_half) > quantile
    if interval.high is not None and bounded:
        return Verdict(True, False, interval, None, warnings, bounded)
    reason = open_limit(curve, law, best, profiles, quantile)
    interval = Interval(interval.low, None)
    return Verdict(True, False, interval, reason, warnings, bounded)


def open_limit(
    curve: Curve, law: Law, best: Array, profiles: Profiles, quantile: float
) -> str:
    """Say which limit of A the data leave open, why, and how far they reach."""
    name = "C_mid" if law.name == "sigmoid" else "compute at half of the gain"
    none_low = profiles.intervals[A].low is None
    side = "limit on either side" if none_low else "upper limit"
    if best[A] >= 1.0 - AT_ONE:
        cause = "A = 1, the largest pass rate there is, fits best"
    elif profiles.against_one <= quantile:
        cause = "A = 1 fits about as well"
    elif profiles.against_half <= quantile:
        cause = f"{name} has none inside the data"
    else:
        weaker = min(profiles.against_one, profiles.against_half)
        cause = (
            f"A = 1, or {name} beyond the data, is only {weaker:.1f} standard errors "
            "away, which noise that bends a curve early does too"
        )
    end = f"the data end at {curve.x_name} = {curve.x[-1]:.4g}"
    advice = "noise, or too few points, leave it open"
    if law.half_gain is not None:
        reach = 1.0 / float(law.half_gain(best[SHAPE_U], best[SHAPE_V]))
        end += f", {reach:.3g} times the fitted {name}"
        if reach < USUAL_REACH:
            advice = f"more than {USUAL_REACH} times is usually needed"
    return f"A has no {side}: {cause}; {end}; {advice}"


def _flat(best: Array, p_value: float) -> str | None:
    """Says that the curve climbs by no more than its noise; None if it does."""
    if p_value <= FALSE_CLIMBS and best[A] > best[R0]:
        return None
    return (
        "flat: the curve does not climb by more than its noise explains: of constant "
        f"curves {100 * p_value:.0f} % climb as much"
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


def late_warnings(result: Fit) -> tuple[str, ...]:
    """What a reader of the numbers should know besides the verdict."""
    if not result.climbs:
        return ()
    found = []
    measured, free = result.curve.r0, result.r0_free
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
    if free is not None and free.climbs:
        found += _doubtful_start(result, free)
    noisy = result.sigma > 2.0 * SIGMA_FLOOR  # a smoother curve has rounding errors
    if noisy and result.residual_p_value < FALSE_WARNINGS:
        found.append(
            f"neighbouring residuals correlate ({result.autocorrelation:.2f}; "
            f"Durbin-Watson, p = {result.residual_p_value:.2g}): noise that wanders, "
            "for which intervals are widened by a guess, or a climb in more than one "
            "phase, which no law of one phase foretells; look at the picture, and at "
            "several seeds"
        )
    return tuple(found)


def _doubtful_start(result: Fit, free: Fit) -> list[str]:
    """Says that R0 is not where the other points would have it, within the noise."""
    limits, r0, noise = free.interval("R0"), result.initial_reward, 0.0
    if result.problem.observes_zero:
        assert result.curve.r0 is not None, "it is observed"
        r0 = result.curve.r0
        noise = DOUBTFUL_ERRORS * result.sigma / np.sqrt(result.problem.weights[0])
    above = limits.high is not None and r0 > limits.high + noise
    below = limits.low is not None and r0 < limits.low - noise
    if not (above or below):
        return []
    return [
        f"R0 = {r0:.4g} may be wrong: the points after it, fitted alone, say "
        f"{free.initial_reward:.4g} and A {free.asymptote:.4g}"
    ]
