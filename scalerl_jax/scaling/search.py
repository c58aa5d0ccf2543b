"""Least squares for the sigmoid: variable projection on a grid, then descent.

Equation 1 is linear in A and R0 once B and C_mid are known.  So one grid over
(log B, log C_mid), with A and R0 solved exactly at each of its nodes, finds the
basin of the global minimum; a damped Gauss-Newton descent, run on many starts at
once, then finds its floor.  Nothing here is random, weighs the points, reads input,
or judges the result.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from scalerl_jax.scaling.laws import gained_share

Array = NDArray[np.float64]

# Columns of a parameter row theta; K rows are searched at once, on n points.
R0, A, LOG_B, LOG_C = range(4)

EXPONENT_LIMITS = (0.1, 16.0)  # 1.1 to 2.4 in the paper; 16 is a step
MIDPOINT_REACH = 30.0  # C_mid from x_first / 30 to x_last * 30
GRID_SHAPE = (32, 48)  # B times C_mid: neighbours differ by 1.18 in B
GRID_POINTS = 128  # points of the curve that the grid looks at
MAX_DESCENT_STEPS = 80
MAX_LOG_STEP = 1.0  # a larger move in log B or log C_mid leaves the basin


@dataclasses.dataclass(frozen=True)
class Problem:
    """One curve and what is free in it."""

    log_x: Array  # [n]
    y: Array  # [n] pass rates
    r0: float | None  # fixed initial reward; None when it is free

    @property
    def free(self) -> tuple[int, ...]:
        """The columns of theta that are fitted."""
        return (A, LOG_B, LOG_C) if self.r0 is not None else (R0, A, LOG_B, LOG_C)

    @property
    def limits(self) -> tuple[Array, Array]:
        """Lower and upper limits of theta, [4] each: 0 <= R0, A <= 1.

        A is not below a fixed R0: equation 1 describes curves that climb.
        """
        low_b, high_b = np.log(EXPONENT_LIMITS)
        reach = np.log(MIDPOINT_REACH)
        lower = [0.0, self.r0 or 0.0, low_b, self.log_x[0] - reach]
        upper = [1.0, 1.0, high_b, self.log_x[-1] + reach]
        return np.array(lower), np.array(upper)

    def share(self, theta: Array) -> Array:
        """Share of the gain at each point: [K, 4] -> [K, n]."""
        exponent = np.exp(theta[:, LOG_B, None])
        return gained_share(self.log_x, exponent, theta[:, LOG_C, None])

    def residuals(self, theta: Array, share: Array) -> Array:
        """Measured minus predicted: [K, n]."""
        r0, asymptote = theta[:, R0, None], theta[:, A, None]
        return self.y - (r0 + (asymptote - r0) * share)

    def slopes(self, theta: Array, share: Array, columns: list[int]) -> Array:
        """Derivatives of the prediction by the named columns: [K, n, columns]."""
        gain = theta[:, A, None] - theta[:, R0, None]
        exponent = np.exp(theta[:, LOG_B, None])
        by_position = gain * share * (1.0 - share) * exponent
        slopes = np.empty((*share.shape, len(columns)))
        for place, column in enumerate(columns):
            if column == R0:
                slopes[:, :, place] = 1.0 - share
            elif column == A:
                slopes[:, :, place] = share
            elif column == LOG_B:
                slopes[:, :, place] = by_position * (self.log_x - theta[:, LOG_C, None])
            else:
                slopes[:, :, place] = -by_position
        return slopes


class Grid:
    """Sums over a curve at every (log B, log C_mid) node: [GRID_SHAPE] each."""

    def __init__(self, problem: Problem) -> None:
        """Evaluate the share of the gain once; every later question is algebra."""
        stride = -(-problem.y.size // GRID_POINTS)
        thinned = slice(None, None, stride)
        log_x, y = problem.log_x[thinned], problem.y[thinned]
        lower, upper = problem.limits
        self.log_b = np.linspace(lower[LOG_B], upper[LOG_B], GRID_SHAPE[0])
        self.log_c = np.linspace(lower[LOG_C], upper[LOG_C], GRID_SHAPE[1])
        share = gained_share(
            log_x, np.exp(self.log_b)[:, None, None], self.log_c[None, :, None]
        )
        self._r0 = problem.r0
        self._rest_rest = ((1.0 - share) ** 2).sum(axis=-1) + 1e-12
        self._share_rest = (share * (1.0 - share)).sum(axis=-1)
        self._share_share = (share**2).sum(axis=-1) + 1e-12
        self._rest_y = (1.0 - share) @ y
        self._share_y = share @ y

    def solve(self, r0: float | None, a: float | None) -> tuple[Array, Array, Array]:
        """Best R0 and A at every node, in [0, 1], and what they cost.

        A given r0 or a is kept.  Cost: the squared error less the same constant.
        """
        rest, cross, share = self._rest_rest, self._share_rest, self._share_share
        if a is not None:
            a_grid = np.full(GRID_SHAPE, a)
        elif r0 is not None:
            a_grid = (self._share_y - r0 * cross) / share
        else:
            determinant = rest * share - cross**2 + 1e-12
            a_grid = (rest * self._share_y - cross * self._rest_y) / determinant
        a_grid = np.clip(a_grid, r0 or 0.0, 1.0)
        if r0 is not None:
            r0_grid = np.full(GRID_SHAPE, r0)
        else:
            r0_grid = np.clip((self._rest_y - a_grid * cross) / rest, 0.0, 1.0)
        cost = r0_grid**2 * rest + 2.0 * r0_grid * a_grid * cross + a_grid**2 * share
        cost -= 2.0 * (r0_grid * self._rest_y + a_grid * self._share_y)
        return r0_grid, a_grid, cost

    def starts(self) -> Array:
        """Where a search for the global minimum starts: [K, 4], over all B."""
        r0, a, cost = self.solve(self._r0, None)
        best_row = int(np.argmin(cost.min(axis=1)))
        rows = np.unique([best_row, *range(0, GRID_SHAPE[0], 4)])
        columns = np.argmin(cost[rows], axis=1)
        at = (rows, columns)
        return np.stack([r0[at], a[at], self.log_b[rows], self.log_c[columns]], axis=1)

    def start_with(self, column: int, value: float) -> Array:
        """The best node when one parameter is held at a value: [4]."""
        r0, a, cost = self.solve(
            value if column == R0 else self._r0, value if column == A else None
        )
        if column == LOG_B:
            row = int(np.argmin(np.abs(self.log_b - value)))
            at = (row, int(np.argmin(cost[row])))
        elif column == LOG_C:
            place = int(np.argmin(np.abs(self.log_c - value)))
            at = (int(np.argmin(cost[:, place])), place)
        else:
            row, place = np.unravel_index(np.argmin(cost), cost.shape)
            at = (int(row), int(place))
        start = np.array([r0[at], a[at], self.log_b[at[0]], self.log_c[at[1]]])
        start[column] = value
        return start


def descend(
    problem: Problem, start: Array, *, tolerance: float, held: int | None = None
) -> tuple[Array, Array]:
    """Levenberg-Marquardt from every row of `start` at once, inside the limits.

    Args:
        start: [K, 4] parameter rows; a column that is not free, or is `held`, stays.
        tolerance: a row is done when a step lowers its squared error by less.

    Returns:
        Parameter rows [K, 4] and their squared errors [K].
    """
    columns = [column for column in problem.free if column != held]
    theta = start.copy()
    squared_error = (problem.residuals(theta, problem.share(theta)) ** 2).sum(axis=1)
    damping = np.full(len(theta), 1e-3)
    active = np.arange(len(theta))
    for _ in range(MAX_DESCENT_STEPS):
        proposed = _step(problem, theta[active], damping[active], columns)
        error = (problem.residuals(proposed, problem.share(proposed)) ** 2).sum(axis=1)
        drop = squared_error[active] - error
        better = drop > 0
        accepted = active[better]
        theta[accepted] = proposed[better]
        squared_error[accepted] = error[better]
        damping[active] = np.clip(
            damping[active] * np.where(better, 0.1, 10.0), 1e-12, 1e9
        )
        done = np.where(better, drop < tolerance, damping[active] >= 1e6)
        active = active[~done]
        if active.size == 0:
            break
    return theta, squared_error


def _step(problem: Problem, theta: Array, damping: Array, columns: list[int]) -> Array:
    """One damped Gauss-Newton step of each row, cut at the limits: [K, 4]."""
    share = problem.share(theta)
    slopes = problem.slopes(theta, share, columns)
    residuals = problem.residuals(theta, share)
    uphill = -(residuals[:, None, :] @ slopes)[:, 0, :]  # of half the squared error
    lower, upper = (limit[columns] for limit in problem.limits)
    here = theta[:, columns]
    # A parameter pressed against its limit would block the others: freeze it.
    pressed = ((here <= lower) & (uphill > 0)) | ((here >= upper) & (uphill < 0))
    slopes = np.where(pressed[:, None, :], 0.0, slopes)
    uphill = np.where(pressed, 0.0, uphill)
    normal = slopes.transpose(0, 2, 1) @ slopes
    diagonal = np.einsum("kii->ki", normal)  # a view: writing to it writes to normal
    diagonal += damping[:, None] * diagonal + 1e-14 + pressed
    step = -np.linalg.solve(normal, uphill[:, :, None])[:, :, 0]
    step = np.clip(step, -MAX_LOG_STEP, MAX_LOG_STEP)
    proposed = theta.copy()
    proposed[:, columns] = np.clip(here + step, lower, upper)
    return proposed


def minimise(problem: Problem, grid: Grid) -> tuple[Array, float]:
    """The global minimum: parameters [4] and squared error."""
    theta, squared_error = descend(problem, grid.starts(), tolerance=1e-18)
    best = int(np.argmin(squared_error))
    return theta[best], float(squared_error[best])
