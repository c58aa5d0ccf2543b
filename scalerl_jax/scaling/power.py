"""How many runs it takes to see a difference between two recipes."""

import math

from scalerl_jax.scaling.records import CurveError
from scalerl_jax.scaling.uncertainty import student_quantile

MOST_RUNS = 1000  # of each recipe
POWER = 0.8


def power_of(
    true_difference: float,
    run_sd: float,
    runs: int,
    *,
    level: float,
    paired: bool = False,
) -> float:
    """The share of comparisons with a winner, and the right one.

    Student's t of two recipes with `runs` runs each, as `differences.difference` has
    it, where values of runs are normal and the noise of evaluations is in their spread:

        P(T > t[(1 + level) / 2]),  T noncentral with true_difference / error
        error = run_sd sqrt(2 / runs), 2 runs - 2 degrees of freedom
        paired: error = run_sd / sqrt(runs), runs - 1 degrees of freedom

    Args:
        true_difference: between the means of the two recipes.
        run_sd: between runs of one recipe; paired: of the differences of pairs.
        level: of the two-sided interval that must leave out 0.
    """
    from scipy.special import nctdtr

    if not (run_sd >= 0.0 and math.isfinite(run_sd)) or runs < 2:  # noqa: PLR2004
        raise CurveError(
            f"run_sd = {run_sd:g}, runs = {runs}: give a spread of 0 or more, and two "
            f"runs or more of each recipe"
        )
    degrees = runs - 1 if paired else 2 * runs - 2
    error = run_sd / math.sqrt(runs) * (1.0 if paired else math.sqrt(2.0))
    size = abs(true_difference)
    if error == 0.0 or size / error > 30.0:  # noqa: PLR2004  beyond nctdtr's reach
        return float(size > 0.0)
    bound = student_quantile(level, degrees)
    return float(1.0 - nctdtr(degrees, size / error, bound))


def runs_to_decide(
    true_difference: float,
    run_sd: float,
    *,
    level: float,
    paired: bool = False,
    power: float = POWER,
) -> int | None:
    """The least runs of each recipe with that `power`; None: a thousand are too few."""
    if true_difference == 0.0:
        return None

    def enough(runs: int) -> bool:
        found = power_of(true_difference, run_sd, runs, level=level, paired=paired)
        return found >= power

    if not enough(MOST_RUNS):
        return None
    low, high = 1, MOST_RUNS  # too few; enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
