"""What the data cannot say: profile intervals, and curves that the law cannot describe.

Noise is taken as independent from one evaluation to the next and of one size, so an
interval here leaves out what a second seed, or other prompts, would change.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from scalerl_jax.scaling.search import Array, Grid, Problem, descend

# Noise assumed when a curve is smoother: one in 10,000, less than any evaluation has.
# It keeps the intervals of noise-free curves from shrinking to rounding errors.
SIGMA_FLOOR = 1e-4
# Distances from the best fit, as shares of the way to the limit of the search.
PROFILE_STEPS = np.geomspace(2e-3, 1.0, 14)
BRACKET_STEPS = np.linspace(0.0, 1.0, 8)[1:-1]
# A curve falls if it loses more than this share of its range, and more than this
# many standard errors.
FALL_SHARE = 0.25
FALL_ERRORS = 6.0


@dataclasses.dataclass(frozen=True)
class Interval:
    """Limits of a parameter; None where the data set no limit."""

    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """An interval of one column of theta, and the fits found inside it."""

    interval: Interval  # on the scale of theta (log B, log C_mid)
    inside: Array  # [K, 4] parameter rows as likely as the interval asks


def allowed_excess(
    squared_error: float, num_points: int, num_parameters: int, level: float
) -> float:
    """How much squared error an acceptable fit may have above the best one.

        excess = t^2 * sigma^2,  sigma^2 = squared_error / (n - p)

    with t the two-sided quantile of Student's t at n - p degrees of freedom: the
    F(1, n - p) test of one parameter, which is wider than the chi-squared one on few
    points.  sigma is at least SIGMA_FLOOR.
    """
    from scipy.special import stdtrit  # here: it is most of the package's import time

    degrees = num_points - num_parameters
    variance = max(squared_error / degrees, SIGMA_FLOOR**2)
    return float(stdtrit(degrees, 0.5 + level / 2) ** 2 * variance)


def profile(
    problem: Problem,
    grid: Grid,
    best: Array,
    *,
    column: int,
    squared_error: float,
    excess: float,
) -> Profile:
    """Profile-likelihood interval of one parameter.

    Holds the parameter at values on both sides of the best fit, fits all others
    again, and finds where the squared error has grown by `excess`.  A side has no
    limit when the error at the very end of the search (A = 1, say) is still
    acceptable, even if it was not on the way there.
    """
    centre = best[column]
    limits = [limit[column] for limit in problem.limits]
    values = np.concatenate([centre + (end - centre) * PROFILE_STEPS for end in limits])
    starts = np.stack([grid.start_with(column, value) for value in values])
    near = np.tile(best, (len(values), 1))
    near[:, column] = values
    starts = _cheaper(problem, starts, near)
    tolerance = 1e-3 * excess
    theta, errors = descend(problem, starts, tolerance=tolerance, held=column)
    excesses = np.maximum(errors - squared_error, 0.0)
    inside = [best[None], theta[excesses <= excess]]

    ends: list[float | None] = []
    half = len(PROFILE_STEPS)
    for side, end in enumerate(limits):
        part = slice(side * half, (side + 1) * half)
        walk = np.vstack([best, theta[part]])
        walk_excess = np.concatenate([[0.0], excesses[part]])
        if end == centre or walk_excess[-1] <= excess:
            ends.append(None)
            continue
        last = int(np.flatnonzero(walk_excess <= excess)[-1])
        inner, outer = walk[last], walk[last + 1]
        between = inner + (outer - inner) * BRACKET_STEPS[:, None]
        theta_between, errors = descend(
            problem, between, tolerance=tolerance, held=column
        )
        between_excess = np.maximum(errors - squared_error, 0.0)
        inside.append(theta_between[between_excess <= excess])
        ends.append(
            _crossing(
                np.concatenate([[inner[column]], between[:, column], [outer[column]]]),
                np.concatenate(
                    [walk_excess[[last]], between_excess, walk_excess[[last + 1]]]
                ),
                excess,
            )
        )
    return Profile(interval=Interval(*ends), inside=np.vstack(inside))


def _cheaper(problem: Problem, one: Array, other: Array) -> Array:
    """Of two starts for each row, the one with the smaller squared error: [K, 4]."""
    errors = [
        (problem.residuals(theta, problem.share(theta)) ** 2).sum(axis=1)
        for theta in (one, other)
    ]
    return np.where((errors[0] <= errors[1])[:, None], one, other)


def _crossing(values: Array, excesses: Array, excess: float) -> float:
    """Where the excess is passed for the last time; its root is close to linear."""
    last = int(np.flatnonzero(excesses <= excess)[-1])
    roots = np.sqrt(excesses[last : last + 2])
    share = (np.sqrt(excess) - roots[0]) / (roots[1] - roots[0])
    return float(values[last] + share * (values[last + 1] - values[last]))


def find_fall(x: NDArray[np.float64], y: NDArray[np.float64]) -> str | None:
    """Says where a curve falls; None for one that climbs or stays.

    The largest drop of a running mean must exceed FALL_SHARE of the running mean's
    range and FALL_ERRORS of its standard errors.  Noise is measured from second
    differences, which a slow trend does not enter.  x and y are [n].
    """
    width = max(1, y.size // 10)
    kernel = np.full(width, 1.0 / width)
    smooth = np.convolve(y, kernel, mode="valid")
    smooth_x = np.convolve(x, kernel, mode="valid")
    drops = np.maximum.accumulate(smooth) - smooth
    bottom = int(np.argmax(drops))
    top = int(np.argmax(smooth[: bottom + 1]))
    # 1.4826: median to standard deviation; 6: variance of a second difference.
    noise = 1.4826 * np.median(np.abs(np.diff(y, 2))) / np.sqrt(6.0)
    threshold = max(
        FALL_SHARE * float(np.ptp(smooth)),
        FALL_ERRORS * float(noise) / np.sqrt(width),
    )
    if drops[bottom] <= threshold:
        return None
    return (
        f"the curve falls from {smooth[top]:.3f} near x = {smooth_x[top]:.4g} to "
        f"{smooth[bottom]:.3f} near x = {smooth_x[bottom]:.4g}, and the sigmoid can "
        "only climb; fit the part before the fall"
    )
