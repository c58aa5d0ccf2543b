"""The forecast of a law: the mean of all its curves, weighted by their likelihood.

On few or noisy evaluations very different curves fit about as well, and the best one
is seldom the best guess of what comes: it follows the noise.  The mean over all of
them is, and where the data leave no choice it is the best fit.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.laws import Array, Law
from scalerl_jax.scaling.search import R0, SHAPE_U, A, Problem
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR

NUM_SHAPES = (24, 32)  # nodes of u and v
# The range of shapes shrinks around those that have weight beside the heaviest one, and
# the best fit's, until it shrinks by little.
NO_WEIGHT = 1e-5
NO_ZOOM = 0.6
NUM_LEVELS = (11, 7)  # of A at each shape, and of R0 at each A
REACH = 4.0  # standard errors of a level to either side
TINY = 1e-12  # keeps what is divided by from being 0


@dataclasses.dataclass(frozen=True)
class MeanCurve:
    """Shapes [G] with their weights, and the mean levels of each."""

    law: Law
    u: Array
    v: Array
    r0: Array
    asymptote: Array
    weights: Array  # of sum 1

    def rates(self, t: Array) -> Array:
        """Mean pass rates at t = log(x / x_last) [m]."""
        share = self.law.share(t, self.u[:, None], self.v[:, None])
        levels = self.r0[:, None] + (self.asymptote - self.r0)[:, None] * share
        return self.weights @ levels


def mean_curve(
    problem: Problem, best: Array, *, known: float | None, thinning: float
) -> MeanCurve:
    """The mean over all curves that climb.

        weight = (sum_i z_i^2)^(-n / 2),  or exp(-sum_i z_i^2 / (2 sigma^2)) if known

    the likelihood after integrating over an unknown noise with density 1 / sigma.  All
    levels 0 <= R0 <= A <= 1 count alike before the data, and so do all u and v.

    Args:
        problem: of one curve.
        best: [4] its fit; points that a robust loss holds back there weigh less here.
        known: sigma of a point of weight 1.
        thinning: n over the number of evaluations that are independent.
    """
    weights = problem.weights
    if problem.huber is not None:
        z = problem.scaled_residuals(best[None], problem.share(best[None]))[0]
        weights = weights * problem.huber / np.maximum(np.abs(z), problem.huber)
    box = np.stack(problem.limits)[:, SHAPE_U:]
    while True:
        found = _mean_within(problem, best, weights, box, known, thinning)
        nodes = np.stack([found.u, found.v], axis=1)
        nodes = nodes[found.weights > NO_WEIGHT * found.weights.max()]
        nodes = np.vstack([nodes, best[SHAPE_U:]])
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
    """The mean over the shapes from box[0] to box[1], u and v each."""
    u, v = (
        np.linspace(low, high, count if low < high else 1)
        for (low, high), count in zip(box.T, NUM_SHAPES, strict=True)
    )
    u, v = (nodes.ravel() for nodes in np.meshgrid(u, v, indexing="ij"))
    rest = 1.0 - problem.law.share(problem.t, u[:, None], v[:, None])
    r0, asymptote, volume, cost = _levels(problem, best, weights, rest)
    if known is None:
        floor = problem.t.size * SIGMA_FLOOR**2
        density = -0.5 * problem.t.size * np.log(np.maximum(cost, floor))
    else:
        density = -0.5 * cost / known**2
    density /= thinning
    chances = volume * np.exp(density - density.max())
    total = chances.sum(axis=(1, 2))
    r0, asymptote = (
        (level * chances).sum(axis=(1, 2)) / np.maximum(total, 1e-300)
        for level in (r0, asymptote)
    )
    return MeanCurve(problem.law, u, v, r0, asymptote, total / total.sum())


def _levels(
    problem: Problem, best: Array, weights: Array, rest: Array
) -> tuple[Array, Array, Array, Array]:
    """Nodes of R0 and A at each shape: R0, A, volume and sum of squares [G, J, K].

    With the share of the gain that is still to come, rest [G, n], a curve is
    A + (R0 - A) rest, so the sum of squares is a quadratic in A with another one in
    R0 around its best value at that A.
    """
    y, held = problem.y[0], problem.held
    degrees = max(problem.t.size - len(problem.free), 1)
    cost = max(float(problem.cost(best[None])[0]), degrees * SIGMA_FLOOR**2)
    spread = np.sqrt(cost / degrees)
    rest_rest = (rest**2 @ weights + TINY)[:, None]
    rest_one, rest_y = (rest @ weights)[:, None], (rest @ (weights * y))[:, None]
    precision = weights.sum() - rest_one**2 / rest_rest + TINY
    middle = (weights @ y - rest_one * rest_y / rest_rest) / precision
    least = weights @ y**2 - rest_y**2 / rest_rest - precision * middle**2
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
    """Values of a level along a new last axis, and the width between two.

    Within REACH standard errors of its best value and within its limits; the held
    value alone if there is one.
    """
    if held is not None:
        return np.full((*centre.shape, 1), held), np.ones(centre.shape)
    inner = np.clip(centre, *limits)
    low = np.maximum(limits[0], inner - REACH * error)
    high = np.minimum(limits[1], inner + REACH * error)
    width = (high - low) / (count - 1)
    return low[..., None] + width[..., None] * np.arange(count), width
