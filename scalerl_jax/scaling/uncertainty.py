"""What the data cannot say: profile intervals and regions.

An interval here leaves out what a second seed, or other prompts, would change
(`seeds.py`, `bootstrap.py`).
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.laws import Array, Places
from scalerl_jax.scaling.records import Interval
from scalerl_jax.scaling.search import SHAPE_U, SHAPE_V, A, Grid, Problem, descend

# Noise assumed when a curve is smoother: one in 10,000, less than any evaluation has.
# It keeps the intervals of noise-free curves from shrinking to rounding errors.
SIGMA_FLOOR = 1e-4
# Distances from the best fit, as shares of the way to the limit of the search.
PROFILE_STEPS = np.geomspace(2e-3, 1.0, 14)
BRACKET_STEPS = np.linspace(0.0, 1.0, 8)[1:-1]
NUM_RAYS = 96
# How much of its distance to the edge of what is called identified a curve would lose
# if the truth were at the upper limit of A; 1 for a mean of normal noise.  Calibrated
# (`benchmarks/scaling.py --only=selection`): profiles flatten towards A = 1.
SHARE_OF_MARGIN = 0.35
FARTHEST_QUANTILE = 30.0  # standard errors; the normal's tail ends at 38
Side = tuple[int, bool]  # a column of theta, and whether it is moved upwards
RAY_STEPS = 12


def noise_variance(
    problem: Problem, best: Array, num_parameters: int
) -> tuple[float, float]:
    """Variance of one scaled residual, and that of the objective's growth.

        variance = sum_i psi_i^2 / (n - p)
        growth = variance / mean_i psi'_i

    with psi the derivative of half the loss; for plain squares both are the usual
    s^2, and with Huber's loss growth is the factor of the likelihood-ratio type test
    (Huber and Ronchetti, Robust Statistics, 2nd ed., section 13.6).  At least
    SIGMA_FLOOR^2.
    """
    z = problem.scaled_residuals(best[None], problem.share(best[None]))[0]
    inside = 1.0
    if problem.huber is not None:
        inside = max(float(np.mean(np.abs(z) <= problem.huber)), 1.0 / z.size)
        z = np.clip(z, -problem.huber, problem.huber)
    variance = max(float((z**2).sum()) / (z.size - num_parameters), SIGMA_FLOOR**2)
    return variance, variance / inside


def student_quantile(level: float, degrees: int | None) -> float:
    """Two-sided quantile of Student's t, of the normal when degrees is None."""
    from scipy.special import ndtri, stdtrit  # here: most of the import time

    if degrees is None:
        return float(ndtri(0.5 + level / 2))
    return float(stdtrit(degrees, 0.5 + level / 2))


def region_quantile(level: float, degrees: int | None) -> float:
    """2 F(level; 2, degrees), or chi-squared with 2 degrees of freedom."""
    tail = 1.0 - level
    if degrees is None:
        return float(-2.0 * np.log(tail))
    return float(degrees * (tail ** (-2.0 / degrees) - 1.0))


@dataclasses.dataclass(frozen=True)
class Noise:
    """How much noise moves the objective, and how sure an interval is to be."""

    growth: float  # of the objective, for one standard error of a parameter
    degrees: int | None  # of freedom behind it; None: known
    level: float  # of the intervals

    @property
    def quantile(self) -> float:
        """Standard errors to either end of an interval, of normal noise."""
        return student_quantile(self.level, None)

    @property
    def excess(self) -> float:
        """What the objective may exceed its minimum by."""
        return student_quantile(self.level, self.degrees) ** 2 * self.growth

    def excess_at(self, errors: float) -> float:
        """What it exceeds it by, that many standard errors of normal noise away."""
        from scipy.special import ndtr, stdtrit

        if self.degrees is not None and np.isfinite(errors):
            errors = -float(stdtrit(self.degrees, ndtr(-errors)))
        return errors**2 * self.growth

    def errors_at(self, excess: float) -> float:
        """Standard errors of normal noise that are as rare as an excess."""
        from scipy.special import ndtri, stdtr

        errors = float(np.sqrt(excess / self.growth))
        if self.degrees is None:
            return errors
        return -float(ndtri(stdtr(self.degrees, -errors)))


@dataclasses.dataclass(frozen=True)
class Profiles:
    """Intervals of theta's columns, and the fits found inside them."""

    intervals: dict[int, Interval]
    inside: Array  # [K, 4] parameter rows as likely as the intervals ask
    against_one: float  # standard errors that A = 1 is away
    against_half: float  # and that it is away that half of the gain is still to come


def profile(
    problem: Problem,
    grid: Grid,
    best: Array,
    *,
    cost: float,
    noise: Noise,
    selected: bool = False,
) -> Profiles:
    """Profile-likelihood intervals of every free parameter.

    Holds a parameter at values on both sides of the best fit, fits all others
    again, and finds where the objective has grown by `noise.excess`.  A side has no
    limit when the value at the very end of the search (A = 1, say) is still
    acceptable, even if it was not on the way there.  With `selected`, the upper limit
    of A is that of `selected_quantile`.
    """
    walks = _walks(problem, grid, best, cost, noise.excess)
    against_one, against_half = _evidence(problem, walks, noise)
    limits = dict.fromkeys(walks, noise.excess)
    if selected and A in problem.free:
        margin = min(against_one, against_half) - noise.quantile
        errors = selected_quantile(noise.level, margin, at_most=against_one)
        limits[A, True] = noise.excess_at(errors)
    ends, found = _ends(problem, walks, limits, cost, noise.excess)
    rows = np.vstack([*walks.values(), found])
    return Profiles(
        intervals={
            column: Interval(ends.get((column, False)), ends.get((column, True)))
            for column in problem.free
        },
        inside=rows[rows[:, 4] <= noise.excess, :4],
        against_one=against_one,
        against_half=against_half,
    )


def _walks(
    problem: Problem, grid: Grid, best: Array, cost: float, excess: float
) -> dict[Side, Array]:
    """Fits with each parameter held, from the best one to the ends of the search.

    Returns:
        By column, and whether it is moved upwards: theta and the growth of the
        objective [PROFILE_STEPS + 1, 5].
    """
    limits = dict(zip((False, True), problem.limits, strict=True))
    sides = [(column, above) for column in problem.free for above in limits]
    held = np.repeat([column for column, _ in sides], len(PROFILE_STEPS))
    values = np.concatenate(
        [
            best[column] + (limits[above][column] - best[column]) * PROFILE_STEPS
            for column, above in sides
        ]
    )
    starts = np.stack(
        [grid.start_with(int(c), v) for c, v in zip(held, values, strict=True)]
    )
    near = np.tile(best, (len(values), 1))
    near[np.arange(len(held)), held] = values
    starts = np.where(
        (problem.cost(starts) <= problem.cost(near))[:, None], starts, near
    )
    theta, excesses = _refit(problem, starts, held, cost, excess)
    rows = np.c_[theta, excesses].reshape(len(sides), -1, 5)
    first = np.append(best, 0.0)
    return {
        side: np.vstack([first, walk]) for side, walk in zip(sides, rows, strict=True)
    }


def _ends(
    problem: Problem,
    walks: dict[Side, Array],
    limits: dict[Side, float],
    cost: float,
    excess: float,
) -> tuple[dict[Side, float], Array]:
    """Where each walk passes its limit, and the fits [K, 5] on the way there.

    A side whose last fit is within the limit has no end.
    """
    brackets: dict[Side, tuple[Array, Array]] = {}
    for side, walk in walks.items():
        if walk[-1, side[0]] != walk[0, side[0]] and walk[-1, -1] > limits[side]:
            last = int(np.flatnonzero(walk[:, -1] <= limits[side])[-1])
            brackets[side] = walk[last], walk[last + 1]
    if not brackets:
        return {}, np.empty((0, 5))
    steps = BRACKET_STEPS[:, None]
    between = np.concatenate(
        [(inner + (outer - inner) * steps)[:, :4] for inner, outer in brackets.values()]
    )
    held = np.repeat([column for column, _ in brackets], len(steps))
    found = np.c_[_refit(problem, between, held, cost, excess)]
    ends = {}
    for (side, (inner, outer)), rows in zip(
        brackets.items(), found.reshape(len(brackets), -1, 5), strict=True
    ):
        walk = np.vstack([inner, rows, outer])
        ends[side] = _crossing(walk[:, side[0]], walk[:, -1], limits[side])
    return ends, found


def _evidence(
    problem: Problem, walks: dict[Side, Array], noise: Noise
) -> tuple[float, float]:
    """Standard errors that A = 1 is away, and half of the gain beyond the data.

    Infinite where A is not free, or the law has no such half.

    Args:
        problem: what was fitted.
        walks: rows of theta and the growth of the objective, from the best fit on, by
            column and whether upwards.
        noise: of the objective.
    """
    against_one = against_half = np.inf
    if (A, True) in walks:
        against_one = noise.errors_at(float(walks[A, True][-1, -1]))
    half_gain = problem.law.half_gain
    if half_gain is not None:
        walk = walks[SHAPE_V if problem.law.has_v else SHAPE_U, True]
        half = np.asarray(half_gain(walk[:, SHAPE_U], walk[:, SHAPE_V]))
        beyond = np.flatnonzero(half >= 1.0)
        if beyond.size:
            last = int(beyond[0])
            near = slice(max(last - 1, 0), last + 1)
            root = np.interp(1.0, half[near], np.sqrt(walk[near, -1]))
            against_half = noise.errors_at(float(root) ** 2)
    return against_one, against_half


def selected_quantile(level: float, margin: float, *, at_most: float) -> float:
    """Standard errors to the upper limit of an A that is called identified.

    Only curves that noise did not bend upwards are called so, and of a truth that
    seldom is, few of those have it inside the usual interval.  The limit therefore
    lies where, of the curves that would be called identified, `tail` lie lower:

        P(-q) = tail P(s - q),  s = SHARE_OF_MARGIN margin,  tail = (1 - level) / 2

    with P the normal distribution: the usual q far from the edge (s large), infinite
    at the edge.

    Args:
        level: of the interval.
        margin: standard errors from the edge of what is called identified.
        at_most: a larger q is infinite: there is no limit below A = 1.
    """
    from scipy.special import log_ndtr

    tail = 0.5 * (1.0 - level)
    low, high = student_quantile(level, None), min(at_most, FARTHEST_QUANTILE)
    if margin <= 0.0:
        return np.inf
    shift = SHARE_OF_MARGIN * margin

    def too_low(q: float) -> bool:
        return bool(log_ndtr(-q) - log_ndtr(shift - q) > np.log(tail))

    if too_low(high):
        return np.inf
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high


def _refit(
    problem: Problem, starts: Array, held: Places, cost: float, excess: float
) -> tuple[Array, Array]:
    """Fit with one parameter of each row held: theta and growth of the objective."""
    mask = np.zeros(starts.shape, bool)
    mask[np.arange(len(held)), held] = True
    theta, costs, _ = descend(problem, starts, tolerance=1e-3 * excess, held=mask)
    return theta, np.maximum(costs - cost, 0.0)


def _crossing(values: Array, excesses: Array, excess: float) -> float:
    """Where the excess is passed for the last time; its root is close to linear."""
    last = int(np.flatnonzero(excesses <= excess)[-1])
    roots = np.sqrt(excesses[last : last + 2])
    share = (np.sqrt(excess) - roots[0]) / (roots[1] - roots[0])
    return float(values[last] + share * (values[last + 1] - values[last]))


def surface(problem: Problem, best: Array, *, cost: float, excess: float) -> Array:
    """Fits on the edge of the accepted region, along straight rays: [K, 4].

    Together with the profiles' rows they let the range of any quantity over the
    accepted fits be read off, which is its profile-likelihood interval.
    """
    columns = problem.free
    slopes = problem.slopes(best[None], problem.share(best[None]))[0][:, columns]
    # Draws of a fixed generator spread the directions; the result is an envelope.
    directions = np.random.default_rng(0).normal(size=(NUM_RAYS, len(columns)))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    _, singular, basis = np.linalg.svd(slopes, full_matrices=False)
    stretch = np.sqrt(excess) / np.maximum(singular, 1e-3 * singular[0] + 1e-12)
    steps = np.zeros((NUM_RAYS, 4))
    steps[:, columns] = (directions * stretch) @ basis
    lower, upper = problem.limits
    inner, outer = np.zeros(NUM_RAYS), np.full(NUM_RAYS, 4.0)
    for _ in range(RAY_STEPS):
        middle = 0.5 * (inner + outer)
        theta = np.clip(best + middle[:, None] * steps, lower, upper)
        accepted = problem.cost(theta) - cost <= excess
        inner = np.where(accepted, middle, inner)
        outer = np.where(accepted, outer, middle)
    return np.clip(best + inner[:, None] * steps, lower, upper)


def joint_region(
    problem: Problem,
    best: Array,
    columns: tuple[int, int],
    *,
    cost: float,
    excess: float,
    num_angles: int = 48,
) -> tuple[Array, bool]:
    """Edge of the joint profile-likelihood region of two columns.

    Along rays from the best fit, in coordinates in which the region is close to a
    circle, with all other parameters fitted again at each point.

    Returns:
        Its corners [num_angles, 2], and whether none lies on a limit of the search.
    """
    free = problem.free
    slopes = problem.slopes(best[None], problem.share(best[None]))[0][:, free]
    covariance = np.linalg.pinv(slopes.T @ slopes, rcond=1e-12)
    places = [free.index(column) for column in columns]
    root = np.linalg.cholesky(
        covariance[np.ix_(places, places)] + 1e-18 * np.eye(2)
    ) * np.sqrt(excess)
    angles = np.linspace(0.0, 2.0 * np.pi, num_angles, endpoint=False)
    steps = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ root.T
    lower, upper = (limit[list(columns)] for limit in problem.limits)
    mask = np.zeros((num_angles, 4), bool)
    mask[:, list(columns)] = True
    inner, outer = np.zeros(num_angles), np.full(num_angles, 6.0)
    theta = np.tile(best, (num_angles, 1))
    for _ in range(RAY_STEPS):
        middle = 0.5 * (inner + outer)
        start = theta.copy()
        start[:, columns] = np.clip(
            best[list(columns)] + middle[:, None] * steps, lower, upper
        )
        found, costs, _ = descend(problem, start, tolerance=1e-3 * excess, held=mask)
        accepted = costs - cost <= excess
        inner = np.where(accepted, middle, inner)
        outer = np.where(accepted, outer, middle)
        theta = np.where(accepted[:, None], found, theta)
    corners = best[list(columns)] + inner[:, None] * steps
    bounded = bool(np.all((corners > lower) & (corners < upper)))
    return np.clip(corners, lower, upper), bounded
