"""Number of runs that are needed to see a difference between two recipes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.scaling.compare import FEWEST_RECIPES, Recipe, noise_of_one
from scalerl_jax.scaling.differences import RUN_SD, pooled
from scalerl_jax.scaling.obstacles import refuse_copies
from scalerl_jax.scaling.pairing import Paired, PairedBy, pair
from scalerl_jax.scaling.records import (
    OPEN,
    Array,
    CurveError,
    Interval,
    Record,
    amount,
)
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.uncertainty import student_quantile

MOST_RUNS = 1000  # of each recipe
POWER = 0.8
NUM_NODES = 64  # for each sum of squares; gives the power to 1e-3


def power_of(
    true_difference: float,
    run_sd: float,
    runs: int,
    *,
    level: float,
    recipes: int = 2,
    paired: bool = False,
    noise: float = 0.0,
) -> float:
    """Return the share of comparisons that name the right winner.

    The test is `differences.difference` of one quantity; values of runs are normal, and
    their spread includes the noise of evaluations:

        P(Z + true_difference / error > max(t[(1 + level) / 2] max(own, all), least)),
        error = run_sd sqrt(2 / runs),   least = noise / sqrt(runs) / error

    with Z normal and the spread, in units of run_sd, that of the two recipes' own runs
    (2 (runs - 1) degrees of freedom; paired: runs - 1) or of all (recipes (runs - 1);
    paired: (recipes - 1) (runs - 1)).  Of two recipes, Student's t, noncentral.

    Args:
        true_difference: between the means of the two recipes.
        run_sd: between runs of one recipe; paired: without what a seed adds to all.
        level: of the two-sided interval that must exclude 0.
        recipes: number of recipes that estimate the spread, these two included.
        noise: of the evaluations alone, as `Difference.noise`, taken as constant.
    """
    from scipy.special import ndtr

    if not (run_sd >= 0.0 and math.isfinite(run_sd)) or runs < 2:
        raise CurveError(
            f"run_sd = {run_sd:g}, runs = {runs}: give a spread of 0 or more, and two "
            f"runs or more of each recipe"
        )
    error = run_sd * math.sqrt(2.0 / runs)
    size = abs(true_difference)
    if error == 0.0:
        return float(size > noise / math.sqrt(runs))
    degrees, more = (2 - paired) * (runs - 1), (recipes - 2) * (runs - 1)
    own, others = _squares(degrees)[:, None], _squares(more)
    variance = np.maximum(own / degrees, (own + others) / (degrees + more))
    bound = student_quantile(level, degrees + more) * np.sqrt(variance)
    bound = np.maximum(bound, noise / math.sqrt(runs) / error)
    return float(ndtr(size / error - bound).mean())


def _squares(degrees: int) -> Array:
    """Return values of chi-squared that are equally likely, [1] or [NUM_NODES]."""
    from scipy.special import gammaincinv

    if degrees == 0:
        return np.zeros(1)
    shares = (np.arange(NUM_NODES) + 0.5) / NUM_NODES
    return 2.0 * gammaincinv(0.5 * degrees, shares)


def runs_to_decide(
    true_difference: float,
    run_sd: float,
    *,
    level: float,
    recipes: int = 2,
    paired: bool = False,
    noise: float = 0.0,
    power: float = POWER,
) -> int | None:
    """Return the least runs of each recipe for `power`; None: 1,000 are too few."""
    if true_difference == 0.0:
        return None

    def enough(runs: int) -> bool:
        found = power_of(
            true_difference,
            run_sd,
            runs,
            level=level,
            recipes=recipes,
            paired=paired,
            noise=noise,
        )
        return found >= power

    if not enough(MOST_RUNS):
        return None
    low, high = 1, MOST_RUNS  # too few; enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerPlan(Record):
    """Runs and compute that would decide a difference, at a spread between runs."""

    true_difference: float
    quantity: str  # of the difference and the spread, in words
    run_sd: float  # paired: without what a seed adds to all recipes
    run_sd_interval: Interval  # at the level; open: it was given, or is ScaleRL's
    run_sd_source: str
    # `Difference.noise` of recipes whose evaluations are as these; None: no limit.
    noise: float | None
    level: float  # of the verdicts
    num_recipes: int  # the first one, and those that are compared with it
    paired: bool
    paired_by: PairedBy  # of the present runs, if `paired`
    power: float  # requested
    runs: int | None  # of each recipe; None: a thousand are too few
    runs_interval: tuple[int | None, int | None]  # over the interval of the spread
    x_name: str
    compute_of_a_run: float  # mean of the present runs
    compute: float | None  # of all runs
    found_by: dict[int, float]  # power by runs of each recipe
    warnings: tuple[str, ...]


SHOWN_RUNS = (2, 3, 4, 5, 8, 12, 20)


def plan_power(
    recipes: Mapping[str, Sequence[Fit]],
    true_difference: float,
    *,
    run_sd: float | None = None,
    paired: bool = False,
    num_recipes: int | None = None,
    power: float = POWER,
) -> PowerPlan:
    """Plan runs that decide a difference of A, as `compare` tests it in a study.

    The spread between runs is that of the recipes with several runs: of A where a
    recipe identifies it (B has the other half of the error), else of the fitted pass
    rate at the last compute that all reached.  It includes the noise of the present
    evaluations, which also bounds the interval of a difference on its own.

    Args:
        recipes: their runs, over one x.
        run_sd: instead of the measured spread.
        paired: runs of one seed are compared, and measured by `pair`.
        num_recipes: the first one and those that will be compared with it, which share
            the error; by default the present ones.
    """
    fits = [fit for group in recipes.values() for fit in group]
    count = num_recipes or max(len(recipes), FEWEST_RECIPES)
    level = fits[0].level
    found = _measured(recipes, paired=paired and run_sd is None)
    quantity, values, measured, end = _spreading([Recipe(each) for each in found.runs])
    run_sd, degrees, source = _spread(run_sd, values, paired=paired)
    at = 1.0 - (0.5 if end is None else 1.0) * (1.0 - level) / (count - 1)
    noise = noise_of_one(measured, at, at=end)
    test: Any = {"level": at, "recipes": count, "paired": paired, "noise": noise}

    def needed(spread: float | None) -> int | None:
        if spread is None:
            return None
        return runs_to_decide(true_difference, spread, power=power, **test)

    interval, runs = _interval_of_spread(run_sd, degrees, level), needed(run_sd)
    each = float(np.mean([fit.x_last for fit in fits]))
    return PowerPlan(
        true_difference=true_difference,
        quantity=quantity,
        run_sd=run_sd,
        run_sd_interval=interval,
        run_sd_source=source,
        noise=noise if math.isfinite(noise) else None,
        level=level,
        num_recipes=count,
        paired=paired,
        paired_by=found.by,
        power=power,
        runs=runs,
        runs_interval=(needed(interval.low), needed(interval.high)),
        x_name=fits[0].x_name,
        compute_of_a_run=each,
        compute=None if runs is None else runs * count * each,
        found_by={n: power_of(true_difference, run_sd, n, **test) for n in SHOWN_RUNS},
        warnings=found.warnings,
    )


def _measured(recipes: Mapping[str, Sequence[Fit]], *, paired: bool) -> Paired:
    """Return the runs that the spread is measured on: all, or those with a partner."""
    for group in recipes.values():
        refuse_copies(fit.whole_curve for fit in group)
    several = [(name, group) for name, group in recipes.items() if len(group) > 1]
    if paired and len(several) >= FEWEST_RECIPES:
        return pair(several)
    runs = tuple(tuple(group) for group in recipes.values())
    return Paired(runs=runs, by="seed", left_out=())


def _spread(
    given: float | None, values: Sequence[Array], *, paired: bool
) -> tuple[float, int, str]:
    """Return the spread between runs, its degrees of freedom, and its source."""
    if given is not None:
        return given, 0, "given"
    if not values:
        return RUN_SD, 0, "that of ScaleRL's own runs"
    if paired and len(values) < FEWEST_RECIPES:
        raise CurveError(
            f"--paired measures the spread on two recipes or more with several runs "
            f"each, and there is {len(values)}; leave it out, or give --run-sd"
        )
    variance, degrees = pooled(values, paired=paired)
    return math.sqrt(variance), degrees, f"measured, {degrees} degrees of freedom"


def _spreading(
    recipes: Sequence[Recipe],
) -> tuple[str, list[Array], list[Fit], float | None]:
    """Return what is compared: its name, values by recipe, runs, and compute.

    The values are of recipes with several runs, the runs those that measure it; the
    compute is that of a pass rate, None for A.
    """
    several = [each for each in recipes if len(each.fits) > 1]
    known = [each for each in several or recipes if each.asymptotes is not None]
    if known:
        found = [each.asymptotes for each in known if len(each.fits) > 1]
        fits = [fit for each in known for fit in each.fits]
        return "A", [values for values in found if values is not None], fits, None
    fits = [fit for each in several or recipes for fit in each.fits]
    end = min(fit.x_last for fit in fits)
    rates = [values for each in several if (values := each.rates_at(end)) is not None]
    return f"the pass rate at {amount(end)}, as A is not identified", rates, fits, end


def _interval_of_spread(run_sd: float, degrees: int, level: float) -> Interval:
    """Return the interval of a standard deviation of normal values, by chi-squared."""
    from scipy.special import gammaincinv

    if degrees == 0:
        return OPEN
    squares = run_sd**2 * degrees
    low, high = (
        2.0 * float(gammaincinv(0.5 * degrees, 0.5 * (1.0 + side * level)))
        for side in (1, -1)
    )
    return Interval(math.sqrt(squares / low), math.sqrt(squares / high))
