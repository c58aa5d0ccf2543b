"""Uncertainty of a fit: profile intervals, regions, and the mean of all curves.

Profiles: a parameter is held, all others are fitted again, and its interval ends where
the objective has grown by more than noise explains.  These intervals do not include
what a second seed, or other prompts, would change (`compare.py`, `bootstrap.py`).

The mean curve is the forecast of a law: on few or noisy evaluations very different
curves fit about as well, and the best one follows the noise.  The mean over all curves,
weighted by likelihood, does not; where the data leave no choice it is the best fit.

One file above 400 lines: both parts share the problem, its noise and its limits.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.laws import PLATEAULESS, Law
from scalerl_jax.scaling.records import Array, Interval, Places
from scalerl_jax.scaling.search import (
    R0,
    SHAPE_U,
    SHAPE_V,
    A,
    Grid,
    Problem,
    descend,
    minimise,
)

# Noise assumed when a curve is smoother: one in 10,000, less than any evaluation has.
# It keeps the intervals of noise-free curves from shrinking to rounding errors.
SIGMA_FLOOR = 1e-4
# Distances from the best fit, as shares of the way to the limit of the search.
PROFILE_STEPS = np.geomspace(2e-3, 1.0, 14)
BRACKET_STEPS = np.linspace(0.0, 1.0, 8)[1:-1]
NUM_RAYS, NUM_ANGLES = 96, 48
# Share of its distance to the threshold of identification that a curve would lose if
# the truth were at the upper limit of A; 1 for a mean of normal noise.  Calibrated
# (`benchmarks/scaling.py --only=selection`): profiles flatten towards A = 1.
SHARE_OF_MARGIN = 0.35
FARTHEST_QUANTILE = 30.0  # standard errors; the normal's tail ends at 38
Side = tuple[int, bool]  # a column of theta, and whether it is moved upwards
RAY_STEPS = 12
NUM_SHAPES = (24, 32)  # nodes of u and v
# The range of shapes shrinks around the best fit's and those with more than NO_WEIGHT
# times the largest weight, until a step leaves at least NO_ZOOM of it.
NO_WEIGHT = 1e-5
NO_ZOOM = 0.6
NUM_LEVELS = (11, 7)  # of A at each shape, and of R0 at each A
REACH = 4.0  # standard errors of a level to either side
TINY = 1e-12  # keeps divisors above 0


def student_quantile(level: float, degrees: int | None) -> float:
    """Return Student's two-sided quantile, or the normal's if degrees is None."""
    from scipy.special import ndtri, stdtrit  # here: most of the import time

    if degrees is None:
        return float(ndtri(0.5 + level / 2))
    return float(stdtrit(degrees, 0.5 + level / 2))


def reach_of_mean(values: Array, level: float) -> float:
    """Return half of the interval of a mean: t(S - 1) * sd / sqrt(S), S >= 2 values."""
    error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
    return student_quantile(level, len(values) - 1) * error


def region_quantile(level: float, degrees: int | None) -> float:
    """Return 2 F(level; 2, degrees), or chi-squared with 2 degrees of freedom."""
    tail = 1.0 - level
    if degrees is None:
        return float(-2.0 * np.log(tail))
    return float(degrees * (tail ** (-2.0 / degrees) - 1.0))


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of the objective, and the level of the intervals."""

    growth: float  # of the objective, for one standard error of a parameter
    degrees: int | None  # degrees of freedom of `growth`; None: it is known
    level: float  # of the intervals

    @property
    def quantile(self) -> float:
        """Standard errors to either end of an interval, of normal noise."""
        return student_quantile(self.level, None)

    @property
    def excess(self) -> float:
        """Growth of the objective that an interval of this level allows."""
        return student_quantile(self.level, self.degrees) ** 2 * self.growth

    def excess_at(self, errors: float) -> float:
        """Return the objective's growth at a distance in standard errors of noise."""
        from scipy.special import ndtr, stdtrit

        if self.degrees is not None and np.isfinite(errors):
            errors = -float(stdtrit(self.degrees, ndtr(-errors)))
        return errors**2 * self.growth

    def errors_at(self, excess: float) -> float:
        """Return the standard errors of normal noise that are as rare as an excess."""
        from scipy.special import ndtri, stdtr

        errors = float(np.sqrt(excess / self.growth))
        if self.degrees is None:
            return errors
        return -float(ndtri(stdtr(self.degrees, -errors)))


@dataclasses.dataclass(frozen=True)
class Profiles:
    """Intervals of theta's columns, and the fits found inside them."""

    intervals: dict[int, Interval]
    inside: Array  # [K, 4] parameter rows within the intervals' level
    against_one: float  # standard errors to A = 1
    against_half: float  # standard errors to half of the gain beyond the data
    against_power: float  # standard errors to a power law, which has no plateau

    @property
    def margin(self) -> float:
        """Standard errors to the nearest of these three cases."""
        return min(self.against_one, self.against_half, self.against_power)


def profile(
    problem: Problem, best: Array, *, cost: float, noise: Noise, selected: bool
) -> Profiles:
    """Find the profile-likelihood intervals of every free parameter.

    Holds a parameter at values on both sides of the best fit, fits all others
    again, and finds where the objective has grown by `noise.excess`.  A side has no
    limit when the value at the very end of the search (A = 1, say) is still
    acceptable, even if it was not on the way there.  With `selected`, the upper limit
    of A is that of `selected_quantile`.
    """
    walks = _walks(problem, best, cost, noise.excess)
    evidence = _evidence(problem, walks, cost, noise)
    limits = dict.fromkeys(walks, noise.excess)
    if selected and A in problem.free:
        margin = min(evidence) - noise.quantile
        errors = selected_quantile(noise.level, margin, at_most=evidence[0])
        limits[A, True] = noise.excess_at(errors)
    ends, found = _ends(problem, walks, limits, cost, noise.excess)
    rows = np.vstack([*walks.values(), found])
    return Profiles(
        intervals={
            column: Interval(ends.get((column, False)), ends.get((column, True)))
            for column in problem.free
        },
        inside=rows[rows[:, 4] <= noise.excess, :4],
        against_one=evidence[0],
        against_half=evidence[1],
        against_power=evidence[2],
    )


def _walks(
    problem: Problem, best: Array, cost: float, excess: float
) -> dict[Side, Array]:
    """Fit with each parameter held, from the best fit to the ends of the search.

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
    grid = Grid(problem)
    starts = np.stack(
        [grid.start_with(int(c), v) for c, v in zip(held, values, strict=True)]
    )
    near = np.tile(best, (len(values), 1))
    near[np.arange(len(held)), held] = values
    starts = np.where(
        (problem.cost(starts) <= problem.cost(near))[:, None], starts, near
    )
    rows = _refit(problem, starts, held, cost, excess).reshape(len(sides), -1, 5)
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
    """Find where each walk passes its limit, and the fits [K, 5] on the way there.

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
    found = _refit(problem, between, held, cost, excess)
    ends = {}
    for (side, (inner, outer)), rows in zip(
        brackets.items(), found.reshape(len(brackets), -1, 5), strict=True
    ):
        walk = np.vstack([inner, rows, outer])
        last = int(np.flatnonzero(walk[:, -1] <= limits[side])[-1])
        roots = np.sqrt(walk[last : last + 2, -1])  # close to linear
        share = (np.sqrt(limits[side]) - roots[0]) / (roots[1] - roots[0])
        low, high = walk[last : last + 2, side[0]]
        ends[side] = float(low + share * (high - low))
    return ends, found


def _evidence(
    problem: Problem, walks: dict[Side, Array], cost: float, noise: Noise
) -> tuple[float, float, float]:
    """Return the distances, in standard errors, of three cases against a plateau.

    They are A = 1, half of the gain beyond the data, and the law PLATEAULESS.  That law
    is not nested in the fitted one; it is judged by the same growth of the objective, a
    log-likelihood ratio.  It has one parameter less, and AICc would reject it at a
    smaller growth.  Infinite where A is not free, or the law has no such half.

    Args:
        walks: rows of theta and the growth of the objective, from the best fit on, by
            column and whether upwards.
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
    against_power = np.inf
    if half_gain is not None and A in problem.free:
        held = {**problem.held, A: 1.0}
        rival = dataclasses.replace(problem, law=PLATEAULESS, held=held)
        _, least, _ = minimise(rival, Grid(rival))
        against_power = noise.errors_at(max(least - cost, 0.0))
    return against_one, against_half, against_power


def selected_quantile(level: float, margin: float, *, at_most: float) -> float:
    """Return the standard errors to the upper limit of an A that is called identified.

    Curves that noise bends upwards are not called identified.  Where a true A is seldom
    called identified, the usual interval covers it for few of the curves that are.  The
    limit is therefore the A at which, of the curves that would be called identified, a
    share `tail` lies lower:

        P(-q) = tail P(s - q),  s = SHARE_OF_MARGIN margin,  tail = (1 - level) / 2

    with P the normal distribution: the usual q far from the edge (s large), infinite
    at the edge.

    Args:
        margin: standard errors from the threshold of identification.
        at_most: a larger q is returned as infinity: there is no limit below A = 1.
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
) -> Array:
    """Fit with one parameter of each row held: theta, the objective's growth [K, 5]."""
    mask = np.zeros(starts.shape, bool)
    mask[np.arange(len(held)), held] = True
    theta, costs, _ = descend(problem, starts, tolerance=1e-3 * excess, held=mask)
    return np.c_[theta, np.maximum(costs - cost, 0.0)]


def surface(problem: Problem, best: Array, *, cost: float, excess: float) -> Array:
    """Find fits on the edge of the accepted region, along straight rays: [K, 4].

    Together with the profiles' rows they give the range of any quantity over the
    accepted fits, which is its profile-likelihood interval.
    """
    columns = problem.free
    slopes = problem.slopes(best[None])[0][:, columns]
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
) -> tuple[Array, bool]:
    """Find the edge of the joint profile-likelihood region of two columns.

    The search follows rays from the best fit, in coordinates in which the region is
    close to a circle, and fits all other parameters again at each point.

    Returns:
        Its corners [NUM_ANGLES, 2], and whether no corner is at a limit of the search.
    """
    free = problem.free
    slopes = problem.slopes(best[None])[0][:, free]
    covariance = np.linalg.pinv(slopes.T @ slopes, rcond=1e-12)
    places = [free.index(column) for column in columns]
    root = np.linalg.cholesky(
        covariance[np.ix_(places, places)] + 1e-18 * np.eye(2)
    ) * np.sqrt(excess)
    angles = np.linspace(0.0, 2.0 * np.pi, NUM_ANGLES, endpoint=False)
    steps = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ root.T
    lower, upper = (limit[list(columns)] for limit in problem.limits)
    mask = np.zeros((NUM_ANGLES, 4), bool)
    mask[:, list(columns)] = True
    inner, outer = np.zeros(NUM_ANGLES), np.full(NUM_ANGLES, 6.0)
    theta = np.tile(best, (NUM_ANGLES, 1))
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


@dataclasses.dataclass(frozen=True)
class MeanCurve:
    """Shapes [G] with their weights, and the mean levels of each."""

    law: Law
    theta: Array  # [G, 4]
    weights: Array  # [G], of sum 1

    def rates(self, t: Array) -> Array:
        """Return the mean pass rates at t = log(x / x_last) [m]."""
        return self.weights @ self.law.rates(self.theta, t)


def mean_curve(
    problem: Problem, best: Array, *, known: float | None, thinning: float
) -> MeanCurve:
    """Return the mean over all curves that climb.

        S = sum_i z_i^2,   weight = (1 + (S - least S) / (thinning * least S))^(-n / 2),
        or exp(-S / (2 thinning * sigma^2)) if sigma is known

    With thinning = 1 that is S^(-n / 2), the likelihood after integrating over an
    unknown noise with density 1 / sigma.  Otherwise the mean is over the curves that
    the intervals accept: S^(-n / (2 thinning)), the likelihood of few evaluations,
    accepts curves that miss all data where thinning leaves fewer of them than
    parameters.  All levels 0 <= R0 <= A <= 1 count alike before the data, and so do
    all u and v.

    Args:
        problem: of one curve.
        best: [4] its fit; points that a robust loss weighs less there weigh less here.
        known: sigma of a point of weight 1.
        thinning: factor by which the correlation of the noise widens variances.
    """
    weights = problem.weights
    if problem.huber is not None:
        z = problem.scaled_residuals(best[None])[0]
        weights = weights * problem.huber / np.maximum(np.abs(z), problem.huber)
    box = np.stack(problem.limits)[:, SHAPE_U:]
    while True:
        found = _mean_within(problem, best, weights, box, known, thinning)
        heavy = found.weights > NO_WEIGHT * found.weights.max()
        nodes = np.vstack([found.theta[heavy], best])[:, SHAPE_U:]
        step = np.ptp(box, axis=0) / (np.array(NUM_SHAPES) - 1)
        closer = np.stack([nodes.min(axis=0) - step, nodes.max(axis=0) + step])
        closer = np.clip(closer, *box)
        if np.all(np.ptp(closer, axis=0) >= NO_ZOOM * np.ptp(box, axis=0)):
            return found
        box = closer


def _mean_within(
    problem: Problem,
    best: Array,
    weights: Array,
    box: Array,
    known: float | None,
    thinning: float,
) -> MeanCurve:
    """Return the mean over the shapes from box[0] to box[1], u and v each."""
    u, v = (
        np.linspace(low, high, count if low < high else 1)
        for (low, high), count in zip(box.T, NUM_SHAPES, strict=True)
    )
    u, v = (nodes.ravel() for nodes in np.meshgrid(u, v, indexing="ij"))
    rest = 1.0 - problem.law.share(problem.t, u[:, None], v[:, None])
    r0, asymptote, volume, cost = _levels(problem, best, weights, rest)
    if known is None:
        count = problem.points.t.size
        misfit = problem.y[0] - problem.law.rates(best[None], problem.t)[0]
        least = float(weights @ misfit**2) + problem.within
        least = max(min(least, float(cost.min())), count * SIGMA_FLOOR**2)
        excess = np.maximum(cost - least, 0.0) / (thinning * least)
        density = -0.5 * count * np.log1p(excess)
    else:
        density = -0.5 * cost / (thinning * known**2)
    chances = volume * np.exp(density - density.max())
    total = chances.sum(axis=(1, 2))
    r0, asymptote = (
        (level * chances).sum(axis=(1, 2)) / np.maximum(total, 1e-300)
        for level in (r0, asymptote)
    )
    theta = np.stack([r0, asymptote, u, v], axis=1)
    return MeanCurve(problem.law, theta, total / total.sum())


def _levels(
    problem: Problem, best: Array, weights: Array, rest: Array
) -> tuple[Array, Array, Array, Array]:
    """Return nodes at each shape: R0, A, their volume and sum of squares [G, J, K].

    With rest [G, n], the share of the gain that is still to come, a curve is
    A + (R0 - A) rest, so the sum of squares is a quadratic in A with another one in
    R0 around its best value at that A.
    """
    y, held = problem.y[0], problem.held
    degrees = max(problem.points.t.size - len(problem.free), 1)
    cost = max(float(problem.cost(best[None])[0]), degrees * SIGMA_FLOOR**2)
    spread = np.sqrt(cost / degrees)
    rest_rest = (rest**2 @ weights + TINY)[:, None]
    rest_one, rest_y = (rest @ weights)[:, None], (rest @ (weights * y))[:, None]
    precision = weights.sum() - rest_one**2 / rest_rest + TINY
    precision = np.where(precision > 0.0, precision, TINY)  # rounding, with many points
    middle = (weights @ y - rest_one * rest_y / rest_rest) / precision
    least = weights @ y**2 - rest_y**2 / rest_rest - precision * middle**2
    least += problem.within
    centre, error = middle, spread / np.sqrt(precision)
    if R0 in held:
        share_share = ((1.0 - rest) ** 2 @ weights + TINY)[:, None]
        gained = ((1.0 - rest) * (y - held[R0] * rest) @ weights)[:, None]
        centre, error = gained / share_share, spread / np.sqrt(share_share)
    limits = held.get(R0, 0.0), 1.0
    a, a_width = _nodes(centre, error, limits, NUM_LEVELS[0], held.get(A))
    a, a_width = a[:, 0], a_width[:, 0]  # [G, J], [G]
    drop = (rest_y - a * rest_one) / rest_rest
    error = spread / np.sqrt(rest_rest)
    r0, r0_width = _nodes(a + drop, error, (0.0, a), NUM_LEVELS[1], held.get(R0))
    cost = np.maximum(least, 0.0) + precision * (a - middle) ** 2
    cost = cost[..., None] + rest_rest[..., None] * (r0 - (a + drop)[..., None]) ** 2
    return r0, a[..., None], (a_width[:, None] * r0_width)[..., None], cost


def _nodes(
    centre: Array,
    error: Array,
    limits: tuple[Array | float, Array | float],
    count: int,
    held: float | None,
) -> tuple[Array, Array]:
    """Return values of a level along a new last axis, and the distance between two.

    They are within REACH standard errors of the best value and within the limits; if
    the level is held, they are its held value alone.
    """
    if held is not None:
        return np.full((*centre.shape, 1), held), np.ones(centre.shape)
    inner = np.clip(centre, *limits)
    low = np.maximum(limits[0], inner - REACH * error)
    high = np.minimum(limits[1], inner + REACH * error)
    width = (high - low) / (count - 1)
    return low[..., None] + width[..., None] * np.arange(count), width
