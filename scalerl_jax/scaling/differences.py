"""A difference between two recipes, with an interval that includes the spread of runs.

Evaluations of one run share its luck, so their scatter says nothing about how far a
second run of the same recipe would be from it; only runs with different seeds do.  Here
the quantity of every run (A, log B, a pass rate) is one number, and the runs are the
sample: the spread between them includes correlated residuals, wandering noise and
whatever else moves a run as a whole.  Where more than two recipes are compared, all of
them are used to estimate that spread.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from scalerl_jax.scaling.records import Array, Interval, Record
from scalerl_jax.scaling.uncertainty import student_quantile

# ScaleRL's own runs of one recipe: three fits of A within 0.015 of each other's mean.
RUN_SD = 0.015
UNLIKE = 0.02  # share of recipes of equal spread that `_alike` leaves out
ZERO = Interval(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class RecipeSample:
    """One quantity over the runs of a recipe."""

    values: Array  # [S]
    # [S, 2] distance below and above each value that its run's evaluations allow, at
    # the level of the requested interval; infinite where they set no limit.
    reach: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """The mean of the first recipe's runs minus that of the second's."""

    value: float
    interval: Interval
    level: float  # of the interval
    run_sd: float  # between runs of one recipe; paired, of one seed
    degrees: int | None  # degrees of freedom of `run_sd`; None: it was given
    num_recipes: int = 0  # recipes whose runs `run_sd` is estimated from
    # Half the width that the noise of evaluations alone gives to one run of each, on
    # the side of 0; None: no limit.  S runs of each decide nothing below it / sqrt(S).
    noise: float | None = 0.0

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        if self.interval.is_above(ZERO):
            return 1
        return -1 if ZERO.is_above(self.interval) else 0


def difference(
    a: RecipeSample,
    b: RecipeSample,
    *,
    level: float,
    run_sd: float,
    paired: bool = False,
    others: Sequence[Array] = (),
) -> Difference:
    """Return mean(a) - mean(b) with its interval.

        error^2 = run_sd^2 (1 / S_a + 1 / S_b)

    If any recipe has two runs or more, the spread is estimated (`_spread`), `run_sd` is
    ignored, and the quantile is Student's t.  This assumes that recipes spread alike,
    and errs most if a recipe has few runs that spread further: for unequal numbers of
    runs the interval is the wider one of this and Welch's.  The estimated spread is
    that of the fitted values, so it includes the noise of evaluations; the interval is
    never narrower than that noise alone makes it.

    If no recipe has two runs, the spread is `run_sd`, and the noise of the two runs
    is added in squares, each side by its own limits (MOVER; Zou and Donner, Statistics
    in Medicine 27 (2008), equation 3).

    Args:
        paired: a, b and the others have runs of the same seeds, in the same order.
        others: the same quantity of the runs of other recipes, [S] each.
    """
    value = float(a.values.mean() - b.values.mean())
    counts = len(a.values), len(b.values)
    below, above = evaluation_noise(a, b, runs=counts)
    noise = evaluation_noise(a, b, runs=(1, 1))[int(value < 0.0)]
    found = _spread((a.values, b.values), others, paired=paired)
    if found is None:
        spread = student_quantile(level, None) * run_sd * math.sqrt(2.0)
        below, above = math.hypot(below, spread), math.hypot(above, spread)
        degrees, num_recipes = None, 0
    else:
        run_sd, degrees, num_recipes = found
        error = run_sd * math.sqrt(1.0 / counts[0] + 1.0 / counts[1])
        spread = student_quantile(level, degrees) * error
        if 1 < min(counts) < max(counts):
            spread = max(spread, _welch(a.values, b.values, level))
        below, above = max(below, spread), max(above, spread)
    ends = [
        end if math.isfinite(end) else None for end in (value - below, value + above)
    ]
    return Difference(
        value=value,
        interval=Interval(*ends),
        level=level,
        run_sd=run_sd,
        degrees=degrees,
        num_recipes=num_recipes,
        noise=noise if math.isfinite(noise) else None,
    )


def evaluation_noise(
    a: RecipeSample, b: RecipeSample, *, runs: tuple[int, int]
) -> tuple[float, float]:
    """Return the noise of the evaluations alone, below and above a difference.

    Args:
        runs: of each recipe; their noise is on average that of the runs given.
    """
    of_a, of_b = (
        np.sqrt((each.reach**2).mean(axis=0) / count)
        for each, count in zip((a, b), runs, strict=True)
    )
    return float(np.hypot(of_a[0], of_b[1])), float(np.hypot(of_a[1], of_b[0]))


def _spread(
    pair: Sequence[Array], others: Sequence[Array], *, paired: bool
) -> tuple[float, int, int] | None:
    """Return the spread of runs, its degrees of freedom and its number of recipes.

    None if every recipe has one run.

    The spread is that of all recipes, or of the two that are compared if theirs is
    larger, with the degrees of freedom of all: otherwise a recipe could win because its
    runs spread further than the rest.
    """
    own, rest = ([each for each in of if len(each) > 1] for of in (pair, others))
    every = [*own, *(_alike(own, rest) if own else rest)]
    if not every:
        return None
    variance, degrees = pooled(every, paired=paired)
    if own:
        variance = max(variance, pooled(own, paired=paired)[0])
    return math.sqrt(variance), degrees, len(every)


def pooled(recipes: Sequence[Array], *, paired: bool) -> tuple[float, int]:
    """Return the variance between runs of a recipe, and its degrees of freedom.

        squares = sum_ks (y_ks - mean_k)^2,   degrees = sum_k (S_k - 1)
        paired: sum_ks (y_ks - mean_k - mean_s + mean)^2,   (K - 1)(S - 1)

    over K recipes and seeds s.  Paired, it excludes the luck that a seed brings to all
    recipes: for K = 2 it is half of the variance of the differences of pairs.
    """
    left = [each - each.mean() for each in recipes]
    degrees = sum(len(each) - 1 for each in recipes)
    if paired:
        table = np.array(left)
        left = list(table - table.mean(axis=0))
        degrees -= table.shape[1] - 1
    return sum(float((each**2).sum()) for each in left) / degrees, degrees


def _alike(pair: Sequence[Array], others: Sequence[Array]) -> list[Array]:
    """Return the other recipes whose runs spread as those of a pair do.

    They pass the F test of two variances, which leaves out a share UNLIKE of recipes
    that do spread alike.
    """
    from scipy.special import fdtri

    degrees = sum(len(each) - 1 for each in pair)
    variance = sum(len(each) * float(each.var()) for each in pair) / degrees
    found = []
    for other in others:
        more, own = len(other) - 1, float(other.var(ddof=1))
        most = own <= variance * fdtri(more, degrees, 1.0 - 0.5 * UNLIKE)
        if most and variance <= own * fdtri(degrees, more, 1.0 - 0.5 * UNLIKE):
            found.append(other)
    return found


def _welch(a: Array, b: Array, level: float) -> float:
    """Return half the width of the interval if the two recipes spread differently.

    Welch, Biometrika 34 (1947).  The degrees of freedom are not whole numbers.
    """
    from scipy.special import stdtrit

    parts = [(float(each.var(ddof=1)) / len(each), len(each) - 1) for each in (a, b)]
    square = sum(part for part, _ in parts)
    if square == 0.0:
        return 0.0
    degrees = square**2 / sum(part**2 / count for part, count in parts)
    return float(stdtrit(degrees, 0.5 + level / 2.0)) * math.sqrt(square)
