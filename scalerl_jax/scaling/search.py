"""Least squares for a law: variable projection on a grid, then descent.

A law is linear in its two levels once its shape (u, v) is known.  So one grid over
the shapes, with the levels solved exactly at each of its nodes, finds the basin of
the global minimum; a damped Gauss-Newton descent, run on many starts at once, then
finds its floor.  Many curves on the same compute (bootstrap resamples) share the grid
and descend together.  Nothing here is random, reads input, or judges the result.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.laws import Law
from scalerl_jax.scaling.records import Array, Bools, Places

# Columns of a parameter row theta; K rows are searched at once, on n points.
R0, A, SHAPE_U, SHAPE_V = range(4)

# log(x / x_last) of step 0: so low that the share of the gain is exactly 0, and finite
# so that 0 times it is a number.
LOG_ZERO = -1e4

GRID_SHAPE = (32, 48)  # u times v: neighbours differ by 1.18 in the sigmoid's B
GRID_POINTS = 128  # points of the curve that the grid uses
MAX_DESCENT_STEPS = 150
MAX_SHAPE_STEP = 1.0  # a larger move in u or v leaves the basin
ROBUST_STEPS = 400  # a reweighted step gains less than a Newton step


@dataclasses.dataclass(frozen=True)
class Problem:
    """One law, one or more curves on the same compute, and what is held.

    The objective of a row is sum_i loss(z_i), z_i = sqrt(weight_i) (y_i - R(x_i)),
    with loss(z) = z^2, or Huber's 2 huber |z| - huber^2 where |z| > huber; plus
    `within`, the loss inside the bins of a binned problem (`bins.py`).
    """

    law: Law
    t: Array  # [n] log(x / x_last); LOG_ZERO first where step 0 is an observation
    y: Array  # [1, n], or [K, n] with one row for each row of theta
    weights: Array  # [n], of mean 1 unless binned, or standard errors are known
    # Levels that are not fitted, by column: R0, A or both.
    held: dict[int, float] = dataclasses.field(default_factory=dict)
    huber: float | None = None  # in units of z
    whole: "Problem | None" = None  # the single evaluations, if the points are bins
    within: float = 0.0  # objective of the evaluations minus that of the bins

    @property
    def points(self) -> "Problem":
        """Return the problem of the single evaluations."""
        return self if self.whole is None else self.whole

    @property
    def free(self) -> list[int]:
        """Columns of theta that are fitted."""
        columns = [R0, A, SHAPE_U, SHAPE_V] if self.law.has_v else [R0, A, SHAPE_U]
        return [column for column in columns if column not in self.held]

    @property
    def limits(self) -> tuple[Array, Array]:
        """Lower and upper limits of theta, [4] each: 0 <= R0, A <= 1.

        A is not below a held R0, nor R0 above a held A: the laws describe curves
        that climb (`in_order` ensures this where both are free).
        """
        first = float(self.t[int(self.observes_zero)])
        (low_u, high_u), (low_v, high_v) = self.law.limits(first)
        lower = np.array([0.0, self.held.get(R0, 0.0), low_u, low_v])
        upper = np.array([self.held.get(A, 1.0), 1.0, high_u, high_v])
        return lower, upper

    @property
    def observes_zero(self) -> bool:
        """Return whether the first point is step 0, an observation of R0."""
        return bool(self.t[0] == LOG_ZERO)

    def in_order(self, theta: Array, still: Bools) -> Array:
        """Return rows [K, 4] with the best constant in place of curves that fall.

        A level that is `still` keeps its value, and the other one takes that value.
        """
        falls = theta[:, A] < theta[:, R0]
        if not falls.any():
            return theta
        level = np.broadcast_to(self.y @ self.weights / self.weights.sum(), len(theta))
        level = np.where(still[:, A], theta[:, A], level)
        level = np.where(still[:, R0], theta[:, R0], level)
        theta = theta.copy()
        theta[falls, R0] = theta[falls, A] = level[falls]
        return theta

    def curves(self, rows: Places) -> "Problem":
        """Return the problem with some of its curves."""
        if len(self.y) == 1:
            return self
        return dataclasses.replace(self, y=self.y[rows])

    def share(self, theta: Array) -> Array:
        """Return the share of the gain at each point: [K, 4] -> [K, n]."""
        return self.law.share(self.t, theta[:, SHAPE_U, None], theta[:, SHAPE_V, None])

    def scaled_residuals(self, theta: Array, share: Array | None = None) -> Array:
        """Return z, measured minus predicted in units of the weights: [K, n].

        `share` is `self.share(theta)`, if the caller has computed it.
        """
        share = self.share(theta) if share is None else share
        r0, asymptote = theta[:, R0, None], theta[:, A, None]
        predicted = r0 + (asymptote - r0) * share
        return (self.y - predicted) * np.sqrt(self.weights)

    def cost(self, theta: Array) -> Array:
        """Return the objective at each row: [K, 4] -> [K]."""
        z = self.scaled_residuals(theta)
        if self.huber is None:
            return (z**2).sum(axis=1) + self.within
        size = np.abs(z)
        beyond = self.huber * (2.0 * size - self.huber)
        return np.where(size <= self.huber, z**2, beyond).sum(axis=1)

    def slopes(self, theta: Array, share: Array | None = None) -> Array:
        """Return derivatives of the scaled prediction by every column: [K, n, 4]."""
        share = self.share(theta) if share is None else share
        gain = theta[:, A, None] - theta[:, R0, None]
        by_u, by_v = self.law.slopes(
            self.t, theta[:, SHAPE_U, None], theta[:, SHAPE_V, None]
        )
        slopes = np.stack([1.0 - share, share, gain * by_u, gain * by_v], axis=2)
        slopes *= np.sqrt(self.weights)[:, None]
        return slopes


class Grid:
    """Sums over the curves at every (u, v) node: [U, V] or, by curve, [U, V, K].

    Large deviations count in full here: a robust fit only starts from the grid.
    """

    def __init__(self, problem: Problem) -> None:
        """Evaluate the share of the gain once; later calls only do algebra."""
        thinned = slice(None, None, -(-problem.t.size // GRID_POINTS))
        weights = problem.weights[thinned].copy()
        if problem.observes_zero:  # never thinned out, so it gets one point's weight
            weights[0] *= weights.size / problem.t.size
        lower, upper = problem.limits
        self.u = np.linspace(lower[SHAPE_U], upper[SHAPE_U], GRID_SHAPE[0])
        num_v = GRID_SHAPE[1] if problem.law.has_v else 1
        self.v = np.linspace(lower[SHAPE_V], upper[SHAPE_V], num_v)
        share = problem.law.share(
            problem.t[thinned], self.u[:, None, None], self.v[None, :, None]
        )
        y = problem.y[:, thinned].T  # [n, K]
        self._held = problem.held
        self._rest_rest = ((1.0 - share) ** 2 @ weights)[..., None] + 1e-12
        self._share_rest = (share * (1.0 - share) @ weights)[..., None]
        self._share_share = (share**2 @ weights)[..., None] + 1e-12
        share *= weights
        self._share_y = share @ y
        self._rest_y = weights @ y - self._share_y
        self._level = weights @ y / weights.sum()  # [K] the best constants
        self._solved = self.solve(problem.held)

    def solve(self, held: dict[int, float]) -> tuple[Array, Array, Array]:
        """Return the best R0 and A in [0, 1] at every node, and their cost: [U, V, K].

        Levels in `held` are kept.  The cost is the squared error minus a constant.
        """
        rest, cross, share = self._rest_rest, self._share_rest, self._share_share
        shape = self._share_y.shape
        if A in held:
            a = np.full(shape, held[A])
        elif R0 in held:
            a = (self._share_y - held[R0] * cross) / share
        else:
            determinant = rest * share - cross**2 + 1e-12
            a = (rest * self._share_y - cross * self._rest_y) / determinant
        a = np.clip(a, held.get(R0, 0.0), 1.0) if A not in held else a
        if R0 in held:
            r0 = np.full(shape, held[R0])
        else:
            r0 = np.clip((self._rest_y - a * cross) / rest, 0.0, held.get(A, 1.0))
        if not (A in held or R0 in held):
            falls = a < r0
            a, r0 = np.where(falls, self._level, a), np.where(falls, self._level, r0)
        cost = r0**2 * rest + 2.0 * r0 * a * cross + a**2 * share
        cost -= 2.0 * (r0 * self._rest_y + a * self._share_y)
        return r0, a, cost

    def starts(self) -> Array:
        """Return starts [S, 4], over all u, for a search for the global minimum.

        They are of the first curve only.
        """
        r0, a, cost = (values[..., 0] for values in self._solved)
        best_row = int(np.argmin(cost.min(axis=1)))
        rows = np.unique([best_row, *range(0, len(self.u), 4)])
        columns = np.argmin(cost[rows], axis=1)
        at = (rows, columns)
        return np.stack([r0[at], a[at], self.u[rows], self.v[columns]], axis=1)

    def best(self) -> Array:
        """Return the best node of every curve: [K, 4]."""
        r0, a, cost = (values.reshape(-1, values.shape[-1]) for values in self._solved)
        nodes = np.argmin(cost, axis=0)
        curves = np.arange(cost.shape[1])
        u, v = self.u[nodes // len(self.v)], self.v[nodes % len(self.v)]
        return np.stack([r0[nodes, curves], a[nodes, curves], u, v], axis=1)

    def start_with(self, column: int, value: float) -> Array:
        """Return the best node when one more parameter is held at a value: [4]."""
        solved = self._solved
        if column in (R0, A):
            solved = self.solve(self._held | {column: value})
        r0, a, cost = (values[..., 0].copy() for values in solved)
        if column == SHAPE_U:  # the nearest nodes alone
            cost[np.arange(len(self.u)) != np.argmin(np.abs(self.u - value))] = np.inf
        elif column == SHAPE_V:
            cost[:, np.arange(len(self.v)) != np.argmin(np.abs(self.v - value))] = (
                np.inf
            )
        at = np.unravel_index(np.argmin(cost), cost.shape)
        start = np.array([r0[at], a[at], self.u[at[0]], self.v[at[1]]])
        start[column] = value
        return start


def descend(
    problem: Problem, start: Array, *, tolerance: float, held: Bools | None = None
) -> tuple[Array, Array, Bools]:
    """Run Levenberg-Marquardt from every row of `start` at once, inside the limits.

    Args:
        problem: with one curve, or one curve for each row.
        start: [K, 4] parameter rows; columns that are not free stay.
        tolerance: a row is done when a step lowers its objective by less.
        held: [K, 4], True where a row keeps a value that is free in the problem.

    Returns:
        Parameter rows [K, 4], their objectives [K], and which rows ended [K]:
        False where the last permitted step still gained more than the tolerance.
    """
    still = np.ones(start.shape, bool)
    still[:, problem.free] = False
    still = still if held is None else still | held
    theta = start.copy()
    cost = problem.cost(theta)
    damping = np.full(len(theta), 1e-3)
    active = np.arange(len(theta))
    for _ in range(MAX_DESCENT_STEPS if problem.huber is None else ROBUST_STEPS):
        some = problem.curves(active)
        proposed = _step(some, theta[active], damping[active], still[active])
        proposed_cost = some.cost(proposed)
        drop = cost[active] - proposed_cost
        better = drop > 0
        accepted = active[better]
        theta[accepted] = proposed[better]
        cost[accepted] = proposed_cost[better]
        damping[active] = np.clip(
            damping[active] * np.where(better, 0.1, 10.0), 1e-12, 1e9
        )
        # Rounding moves a cost by 1e-16 of itself: less than 1e-13 is no progress.
        small = drop < tolerance + 1e-13 * cost[active]
        done = np.where(better, small, damping[active] >= 1e6)
        active = active[~done]
        if active.size == 0:
            break
    ended = np.ones(len(theta), bool)
    ended[active] = False
    return theta, cost, ended


def _step(problem: Problem, theta: Array, damping: Array, still: Bools) -> Array:
    """Take one damped Gauss-Newton step of each row, cut at the limits: [K, 4]."""
    share = problem.share(theta)
    slopes = problem.slopes(theta, share)
    z = problem.scaled_residuals(theta, share)
    lower, upper = problem.limits
    influence = np.ones_like(z)
    if problem.huber is not None:  # iteratively reweighted: points far off pull less
        influence = problem.huber / np.maximum(np.abs(z), problem.huber)
    pull = z * influence
    uphill = -(pull[:, None, :] @ slopes)[:, 0, :]  # of half the objective
    # A parameter pressed against its limit would block the others: freeze it.
    pressed = ((theta <= lower) & (uphill > 0)) | ((theta >= upper) & (uphill < 0))
    pressed |= still
    slopes = np.where(pressed[:, None, :], 0.0, slopes)
    uphill = np.where(pressed, 0.0, uphill)
    normal = slopes.transpose(0, 2, 1) @ (slopes * influence[:, :, None])
    diagonal = np.einsum("kii->ki", normal)  # a view: writing to it writes to normal
    diagonal += damping[:, None] * diagonal + 1e-14 + pressed
    step = -np.linalg.solve(normal, uphill[:, :, None])[:, :, 0]
    step = np.clip(step, -MAX_SHAPE_STEP, MAX_SHAPE_STEP)
    moved = np.where(still, theta, np.clip(theta + step, lower, upper))
    return problem.in_order(moved, still)


def minimise(problem: Problem, grid: Grid) -> tuple[Array, float, bool]:
    """Find the global minimum of one curve: parameters [4], objective, converged."""
    starts = grid.starts()
    # Starts in poor basins crawl: descend only until the best ones are clear.
    rough = 1e-5 * float(problem.cost(starts).min())
    theta, cost, _ = descend(problem, starts, tolerance=rough)
    best = np.argsort(cost)[:2]
    theta, cost, ended = descend(problem, theta[best], tolerance=1e-18)
    winner = int(np.argmin(cost))
    return theta[winner], float(cost[winner]), bool(ended[winner])


def minimise_each(problem: Problem, near: Array) -> tuple[Array, Array, Bools]:
    """Find the minimum of every curve of a problem with K curves.

    Starts at the better of the grid's best node and `near` [4].

    Returns:
        Parameters [K, 4], objectives [K], and which rows converged [K].
    """
    nodes = Grid(problem).best()
    same = np.tile(near, (len(problem.y), 1))
    start = np.where((problem.cost(nodes) < problem.cost(same))[:, None], nodes, same)
    return descend(problem, start, tolerance=1e-10)
