"""The verdict on a fit: does the curve climb, and do the data fix its asymptote?

Three tests with stated rates of false alarms come first; none needs a particular law.
They test for a collapse (a fall beyond the noise, compared with a constant curve: of
all curves that never fall, it is the one that noise makes fall most easily), for a
climb (isotonic regression against a constant), and for residuals that correlate more
than independent noise does: the noise wanders, or the law does not follow the curve.

One file above 400 lines: the verdict combines its tests.
"""

import dataclasses
import functools

import numpy as np

from scalerl_jax.scaling.laws import Law
from scalerl_jax.scaling.records import OPEN, Array, Curve, Interval, amount
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import R0, SHAPE_U, SHAPE_V, A, Problem
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR, Profiles

# Median of the absolute value of normal noise -> its standard deviation.
MAD_TO_SIGMA = 1.4826
AT_ONE = 1e-6  # a fitted A this close to 1 was stopped by that limit
DOUBTFUL_ERRORS = 2.0  # standard errors of step 0, beyond R0's interval without it
# The paper's margin between equal recipes, from three runs of one of them.
ASYMPTOTE_MARGIN = 0.02
# Data to this many C_mid fixed A in simulations with noise of 0.003 to 0.012.
USUAL_REACH = 2.4
# Neighbouring residuals of independent noise correlate by less than this many 1/sqrt n.
AUTOCORRELATION_ERRORS = 2.0
LONGEST_BLOCK = 32  # evaluations
# A fall by a smaller share of the curve's range is a dent, even if it is significant.
LEAST_SHARE = 0.25
# Fewer points do not show how noisy they are; the noise of an evaluation is then taken
# to be LARGEST_NOISE at most (25 completions at a pass rate of one half).
FEW_POINTS = 12
LARGEST_NOISE = 0.1
MOST_COUNTED = 4096  # completions of an evaluation that `_errors_of_shares` considers
# Values that the score of a constant curve with normal noise exceeds in 0.5 % of 20,000
# draws (of 2,000 points 6,000, of 10,000 2,000), with the noise known, and estimated by
# `point_noise` (`benchmarks/scaling.py --only=collapse` prints both).  Between these
# numbers of points it is interpolated.
NUM_POINTS = (4, 5, 6, 8, 10, 12, 16, 24, 32, 50, 100, 200, 500, 1000, 2000, 10_000)
CRITICAL_KNOWN = (
    *(1.76, 2.19, 2.33, 2.65, 2.95, 3.19, 3.39),
    *(3.76, 3.96, 4.35, 4.91, 5.35, 5.84, 6.28, 6.59, 7.19),
)
CRITICAL_ESTIMATED = (
    *(2.63, 4.39, 4.46, 5.14, 5.47, 5.07, 5.29),
    *(5.26, 5.26, 5.32, 5.52, 5.73, 6.01, 6.34, 6.68, 7.21),
)
# Share of flat curves with independent normal noise that the test says climb.
FALSE_CLIMBS = 0.05
MOST_LEVELS = 64  # distinct levels that chance alone can give
FALSE_WARNINGS = 0.05  # share of curves of the law with independent noise
LEAST_SLOPE = 1e-9  # of the steepest; below, the points do not depend on the parameter


@dataclasses.dataclass(frozen=True)
class FitVerdict:
    """Findings on a fit."""

    climbs: bool
    flat: bool
    asymptote_interval: Interval
    reason: str | None  # why A is not identified
    warnings: tuple[str, ...] = ()
    bounded: bool = False  # A has an upper limit and half of the gain was passed


def identify(
    curve: Curve,
    law: Law,
    best: Array,
    profiles: Profiles,
    quantile: float,
    *,
    p_value: float,
) -> FitVerdict:
    """Return the verdict on the best row theta [4] with the profiles of its columns.

    A is identified under two conditions.  Its interval must have an upper limit below
    1, the largest possible pass rate.  And the data must surely have passed half of the
    gain: before that, the height of the plateau follows from the law's symmetry alone,
    and noise that bends the curve a little too early would look like a low asymptote.

    Args:
        profiles: the intervals, and the evidence for both conditions.
        quantile: standard errors that an interval of this level reaches.
        p_value: of the test for a climb (`climb_p_value`).
    """
    fall = find_collapse(curve)
    if fall is not None:
        return FitVerdict(False, False, OPEN, fall)
    if p_value > FALSE_CLIMBS or best[A] <= best[R0]:
        reason = (
            "flat: the curve does not climb by more than its noise explains: of "
            f"constant curves {100 * p_value:.0f} % climb as much"
        )
        if best[R0] > max(curve.y):  # only if it was given or measured
            reason = (
                f"flat: it does not climb from R0 = {best[R0]:.4g}, which is above all "
                f"pass rates ({min(curve.y):.4g} to {max(curve.y):.4g})"
            )
        return FitVerdict(False, True, OPEN, reason)
    warnings = _at_limits(law, best, curve)
    if A not in profiles.intervals:
        reason = None
        if law.held_asymptote is not None:
            reason = (
                f"the law has no plateau to identify: it ends at {law.held_asymptote:g}"
            )
        return FitVerdict(True, False, OPEN, reason, warnings)
    interval = profiles.intervals[A]
    bounded = profiles.margin > quantile
    if interval.high is not None and bounded:
        return FitVerdict(True, False, interval, None, warnings, bounded)
    reason = open_limit(curve, law, best, profiles, quantile)
    interval = Interval(interval.low, None)
    return FitVerdict(True, False, interval, reason, warnings, bounded)


def open_limit(
    curve: Curve, law: Law, best: Array, profiles: Profiles, quantile: float
) -> str:
    """Name the limit of A that the data leave open, why, and how far they reach."""
    name = "C_mid" if law.name == "sigmoid" else "compute at half of the gain"
    none_low = profiles.intervals[A].low is None
    side = "limit on either side" if none_low else "upper limit"
    if best[A] >= 1.0 - AT_ONE:
        cause = "A = 1, the largest pass rate there is, fits best"
    elif profiles.against_one <= quantile:
        cause = "A = 1 fits about as well"
    elif profiles.against_half <= quantile:
        cause = f"{name} has none inside the data"
    elif profiles.against_power <= quantile:
        cause = "a power law of the error, which has no plateau, fits about as well"
    else:
        cause = (
            f"A = 1, or {name} beyond the data, or a power law without a plateau, is "
            f"only {profiles.margin:.1f} standard errors away, which noise that bends "
            "a curve early does too"
        )
    end = f"the data end at {curve.x_name} = {amount(curve.x[-1])}"
    advice = "noise, or too few points, leave it open"
    if law.half_gain is not None:
        reach = 1.0 / float(law.half_gain(best[SHAPE_U], best[SHAPE_V]))
        end += f", {reach:.3g} times the fitted {name}"
        if reach < USUAL_REACH:
            advice = f"more than {USUAL_REACH} times is usually needed"
    return f"A has no {side}: {cause}; {end}; {advice}"


def _at_limits(law: Law, best: Array, curve: Curve) -> tuple[str, ...]:
    """Name the shape parameters for which the search stopped at an end of its range."""
    limits = law.limits(float(np.log(curve.x[0] / curve.x[-1])))
    names = {kind.column: kind.name for kind in law.kinds}
    columns = (SHAPE_U, SHAPE_V) if law.has_v else (SHAPE_U,)
    return tuple(
        f"{names[column]} is at the end of its search range: the data do not fix it"
        for column, (low, high) in zip(columns, limits, strict=False)
        if not low + 1e-9 < best[column] < high - 1e-9
    )


def significant_correlation(num_points: int) -> float:
    """Return the largest correlation of neighbours that independent noise explains."""
    return AUTOCORRELATION_ERRORS / float(np.sqrt(num_points))


def late_warnings(result: Fit) -> tuple[str, ...]:
    """Return warnings on a fit's numbers, besides the verdict on A."""
    if not result.climbs:
        return ()
    found = []
    measured = result.curve.r0
    if "R0" in result.parameters and result.definition.starts_at_r0:
        if result.initial_reward_source == "free" and measured is None:
            found.append(
                "R0 was not measured (no point at zero compute) and is a free "
                "parameter; A and the rest depend on it: give --r0 if you know it"
            )
        elif result.initial_reward_source == "given" and measured is not None:
            if result.initial_reward != measured:
                found.append(
                    f"R0 = {result.initial_reward:.4g} is used as given, although the "
                    f"curve starts at {measured:.4g}"
                )
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


def doubtful_start(result: Fit) -> tuple[str, ...]:
    """Warn if R0 is off the value of the other points by more than the noise."""
    free = result.r0_free
    if not result.climbs or free is None or not free.climbs:
        return ()
    limits, r0, noise = free.interval("R0"), result.initial_reward, 0.0
    if result.problem.observes_zero:
        assert result.curve.r0 is not None, "it is observed"
        r0 = result.curve.r0
        noise = DOUBTFUL_ERRORS * free.sigma / np.sqrt(result.problem.weights[0])
    above = limits.high is not None and r0 > limits.high + noise
    below = limits.low is not None and r0 < limits.low - noise
    if not (above or below):
        return ()
    return (
        f"R0 = {r0:.4g} may be wrong: the points after it, fitted alone, say "
        f"{free.initial_reward:.4g} and A {free.asymptote:.4g}; an error of R0 that "
        "large makes the intervals of A and B too narrow: give --r0 free to leave it "
        "out",
    )


def find_collapse(curve: Curve) -> str | None:
    """Describe the fall of a curve; None for one that climbs or stays.

        score = max over w, i, j of sqrt(w / 2) (lower median of y[i : i + w]
                                                 - upper median of y[j : j + w])

    over blocks of w = 2, 4, 8, .. evaluations with j >= i + w: at least half of w
    evaluations in a row are below half of w earlier ones, so that a single bad
    evaluation is no collapse.  A fall is a collapse if the score exceeds the critical
    value times the noise, and the fall exceeds LEAST_SHARE of the curve's range.

    The noise is that of `y_se`, or binomial noise if the rates are counts of N
    completions; from FEW_POINTS on it is at least the noise that the points show
    (`point_noise`).  Without either it is the noise that the points show.
    """
    y = curve.y
    if y.size < 4:
        return None
    score, i, j, width = largest_fall(y)
    top, bottom = y[i : i + width], y[j : j + width]
    fall = float(np.median(top) - np.median(bottom))
    if score <= _threshold(curve) or fall < LEAST_SHARE * float(np.ptp(y)):
        return None
    counted = _errors_of_shares(y) if curve.y_se is None else np.zeros(0)
    if counted.size and score <= _threshold(dataclasses.replace(curve, y_se=counted)):
        return None
    high, low = i + int(np.argmax(top)), j + int(np.argmin(bottom))
    return (
        f"collapse: the curve falls from {y[high]:.3f} near x = "
        f"{amount(curve.x[high])} to {y[low]:.3f} near x = {amount(curve.x[low])}, and "
        "the law can only climb; fit the part before the fall"
    )


def point_noise(y: Array) -> float:
    """Return the noise of one point of a slow curve y [n], by its second differences.

    It uses their median, which a jump does not move.  It is at least the least step
    between two values: rates of few completions are often equal in spite of noise.
    """
    # The variance of a second difference is 6.
    noise = MAD_TO_SIGMA * float(np.median(np.abs(np.diff(y, 2)))) / np.sqrt(6.0)
    steps = np.diff(np.unique(y))
    return max(noise, float(steps.min()) if steps.size else 0.0)


def largest_fall(y: Array) -> tuple[float, int, int, int]:
    """Return `find_collapse`'s score of y [n], n >= 4, and its blocks: i, j and w."""
    found = []
    width = 2
    while width <= min(y.size // 2, LONGEST_BLOCK):
        blocks = np.lib.stride_tricks.sliding_window_view(y, width)
        middle = np.partition(blocks, (width // 2 - 1, width // 2), axis=1)
        lower, upper = middle[:, width // 2 - 1], middle[:, width // 2]
        highest = np.maximum.accumulate(lower)[: y.size - 2 * width + 1]
        falls = highest - upper[width:]
        j = int(np.argmax(falls))
        i = int(np.argmax(lower[: j + 1]))
        score = float(falls[j]) * float(np.sqrt(width / 2.0))
        found.append((score, i, j + width, width))
        width *= 2
    return max(found)


def _errors_of_shares(y: Array) -> Array:
    """Return binomial standard errors of rates that are counts k / N; otherwise empty.

    N is the least number, up to MOST_COUNTED, for which every N * rate is whole.  A
    power of ten only shows the number of decimals that were written.
    """
    for count in range(8, MOST_COUNTED + 1):
        if np.abs(y * count - np.round(y * count)).max() < 1e-6 * count:
            if count in (10, 100, 1000, 10_000):
                break
            share = (y * count + 1.0) / (count + 2.0)
            return np.sqrt(share * (1.0 - share) / count)
    return np.zeros(0)


def _threshold(curve: Curve) -> float:
    """Return the score above which a fall of the curve counts."""
    n = curve.y.size
    known, estimated = (
        float(np.interp(np.log(n), np.log(NUM_POINTS), critical))
        for critical in (CRITICAL_KNOWN, CRITICAL_ESTIMATED)
    )
    shown = point_noise(curve.y)
    errors = np.zeros(0) if curve.y_se is None else curve.y_se
    errors = errors[np.isfinite(errors) & (errors > 0)]
    if errors.size:
        noise = float(np.sqrt((errors**2).mean()))
        return known * (noise if n < FEW_POINTS else max(noise, shown))
    if n < FEW_POINTS:
        return min(estimated * shown, known * LARGEST_NOISE)
    return estimated * shown


def climb_p_value(y: Array, weights: Array, start: float | None = None) -> float:
    """Return the chance that noise makes a constant curve climb as far as y [n] does.

        E = sum w (iso - level)^2 / sum w (y - level)^2

    with iso the best nondecreasing curve and level the best constant, or a known
    `start`, at which iso then begins.  For a constant with normal noise of any size,

        P(E >= e) = sum_l p(l) P(Beta(l / 2, (m - l) / 2) >= e)

    where l counts the levels of iso beyond the constant's and p(l) are the coefficients
    of prod_k (z + k) / (1 + k): over k = 1, 2, .. m with m = n - 1, or over k = 1, 3,
    .. 2 m - 1 with m = n when the start is known.  Barlow, Bartholomew, Bremner and
    Brunk, Statistical Inference under Order Restrictions, theorem 3.2; p(l) is exact
    for equal weights.
    """
    from scipy.optimize import isotonic_regression  # here: half of the import time
    from scipy.special import betainc

    level = float(y @ weights / weights.sum()) if start is None else start
    climb = np.asarray(isotonic_regression(y, weights=weights).x) - level
    if start is not None:
        climb = np.maximum(climb, 0.0)
    total = float(weights @ (y - level) ** 2)
    if total == 0.0:
        return 1.0
    explained = min(float(weights @ climb**2) / total, 1.0)
    spare = y.size - (start is None)
    chances = level_chances(spare, 1.0 if start is None else 2.0)
    levels = np.arange(chances.size)
    # Beta(0, b) is always 0 and Beta(a, 0) always 1: so is E without levels, and with
    # as many levels as points.
    beyond = np.where(levels == spare, 1.0, float(explained <= 0.0))
    inner = (levels > 0) & (levels < spare)
    half = levels[inner] / 2.0
    beyond[inner] = betainc(spare / 2.0 - half, half, 1.0 - explained)
    return float(chances @ beyond)


@functools.lru_cache(maxsize=32)  # a report asks for the same 40 times
def level_chances(count: int, step: float) -> Array:
    """Return p(l) for l = 0, 1, ..: coefficients of prod_k (z + k) / (1 + k).

    k = 1, 1 + step, ..: `count` of them; l stops at MOST_LEVELS.
    """
    chances = np.zeros(min(count, MOST_LEVELS) + 1)
    chances[0] = 1.0
    for k in 1.0 + step * np.arange(count):
        chances[1:] = (chances[:-1] + k * chances[1:]) / (1.0 + k)
        chances[0] *= k / (1.0 + k)
    chances.flags.writeable = False  # it is cached
    return chances


def durbin_watson(problem: Problem, best: Array) -> float:
    """Return the chance that independent noise leaves residuals correlated as much.

        d = sum_i (z_i - z_(i-1))^2 / sum_i z_i^2

    is near 2 for independent residuals and less for correlated ones.  The slopes of the
    law by its parameters determine what a fit does to noise, and so the mean and
    variance of d; its distribution is that of 4 times a beta variable with these.
    Durbin and Watson, Biometrika 38 (1951), sections 2 and 4.
    """
    from scipy.special import betainc

    problem = problem.points
    z = problem.scaled_residuals(best[None])[0]
    lower, upper = problem.limits
    inside = [c for c in problem.free if lower[c] < best[c] < upper[c]]
    basis, sizes, _ = np.linalg.svd(
        problem.slopes(best[None])[0][:, inside], full_matrices=False
    )
    basis = basis[:, sizes > LEAST_SLOPE * sizes.max(initial=0.0)]
    spare, total = z.size - basis.shape[1], float((z**2).sum())
    if spare < 2 or total == 0.0:
        return 1.0
    # D'D times the basis, with D the differences of neighbouring rows.
    moved = -np.diff(np.pad(np.diff(basis, axis=0), ((1, 1), (0, 0))), axis=0)
    inner = basis.T @ moved
    # D'D has 2 on its diagonal, 1 at both ends, -1 beside it.
    trace = 2.0 * (z.size - 1) - np.trace(inner)
    squares = 6.0 * z.size - 8.0 - 2.0 * (moved**2).sum() + (inner**2).sum()
    mean = trace / spare
    variance = 2.0 * (squares - trace * mean) / (spare * (spare + 2.0))
    if variance <= 0.0:
        return 1.0
    mean, variance = mean / 4.0, variance / 16.0
    scale = mean * (1.0 - mean) / variance - 1.0
    d = float((np.diff(z) ** 2).sum()) / total
    return float(betainc(mean * scale, (1.0 - mean) * scale, min(d / 4.0, 1.0)))
