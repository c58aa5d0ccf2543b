"""Do the residuals of a fit go together as the noise of evaluations does not?

They do where noise wanders, and where the law does not follow the curve, as none here
follows a climb in two phases.
"""

import numpy as np

from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.search import Problem

FALSE_WARNINGS = 0.05  # share of curves of the law with independent noise
LEAST_SLOPE = 1e-9  # of the steepest: the points do not feel the parameter


def durbin_watson(problem: Problem, best: Array) -> float:
    """Chance that independent noise leaves residuals that go together as much.

        d = sum_i (z_i - z_(i-1))^2 / sum_i z_i^2

    is near 2 for independent residuals and less for those that go together.  The
    slopes of the law by its parameters say what a fit does to noise, hence the mean
    and variance of d; its distribution is that of 4 times a beta variable with these.
    Durbin and Watson, Biometrika 38 (1951), sections 2 and 4.
    """
    from scipy.special import betainc

    share = problem.share(best[None])
    z = problem.scaled_residuals(best[None], share)[0]
    lower, upper = problem.limits
    inside = [c for c in problem.free if lower[c] < best[c] < upper[c]]
    basis, sizes, _ = np.linalg.svd(
        problem.slopes(best[None], share)[0][:, inside], full_matrices=False
    )
    basis = basis[:, sizes > LEAST_SLOPE * sizes.max(initial=0.0)]
    spare, total = z.size - basis.shape[1], float((z**2).sum())
    if spare < 2 or total == 0.0:
        return 1.0
    moved = _second_differences(basis)  # of D'D, with D the differences of neighbours
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


def _second_differences(columns: Array) -> Array:
    """D'D times columns [n, p], with D the differences of neighbouring rows."""
    steps = np.diff(columns, axis=0)
    padded = np.pad(steps, ((1, 1), (0, 0)))
    return padded[:-1] - padded[1:]
