"""A difference between two recipes, with an interval that holds what runs differ by.

Evaluations of one run share its luck.  Its own scatter therefore says nothing of how
far a second run of the same recipe would lie from it, and only runs of one recipe that
differ in their seeds do.  Here the quantity of every run (A, log B, a pass rate) is one
number, and the runs are the sample: correlated residuals, wandering noise and whatever
else moves a run as a whole are in the spread between them.
"""

import dataclasses
import math

import numpy as np

from scalerl_jax.scaling.records import Array, Interval, Record
from scalerl_jax.scaling.uncertainty import student_quantile

# ScaleRL's own runs of one recipe: three fits of A within 0.015 of each other's mean.
RUN_SD = 0.015
ZERO = Interval(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class RecipeSample:
    """One quantity over the runs of a recipe."""

    values: Array  # [S]
    # [S, 2] how far below and above each value its run's evaluations allow, at the
    # level of the interval that is asked for; infinite where they set no limit.
    reach: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """The mean of the first recipe's runs minus that of the second's."""

    value: float
    interval: Interval
    level: float  # of the interval
    run_sd: float  # between runs of one recipe; of the pairs' differences if paired
    degrees: int | None  # of freedom behind `run_sd`; None: it was given

    @property
    def sign(self) -> int:
        """1 or -1 where the interval leaves out 0, else 0."""
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
) -> Difference:
    """Return mean(a) - mean(b) with its interval.

        error^2 = run_sd^2 (1 / S_a + 1 / S_b)

    With two runs or more of a recipe the spread is estimated and `run_sd` not looked
    at: pooled over both recipes, Student's t with S_a + S_b - 2 degrees of freedom;
    `paired` from the differences of the pairs, with S - 1.  Pooling takes both recipes
    to spread alike, and errs most where one has few runs, which spread further: of
    unequal numbers of runs, the interval is the wider one of this and of Welch's.  What
    is estimated is the spread of the fitted values, so the noise of evaluations is in
    it; the interval is never narrower than that noise alone makes it.

    With one run each the spread is `run_sd`, and the noise of the two runs is added in
    squares, each side by its own limits (MOVER; Zou and Donner, Statistics in Medicine
    27 (2008), equation 3).
    """
    value = float(a.values.mean() - b.values.mean())
    counts = len(a.values), len(b.values)
    below, above = _noise(a, b)
    if max(counts) == 1:
        spread = student_quantile(level, None) * run_sd * math.sqrt(2.0)
        below, above, degrees = (
            math.hypot(below, spread),
            math.hypot(above, spread),
            None,
        )
    else:
        run_sd, degrees, error = _spread(a.values, b.values, paired=paired)
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
    )


def _noise(a: RecipeSample, b: RecipeSample) -> tuple[float, float]:
    """Return the noise of the evaluations alone, below and above the difference."""
    of_a, of_b = (
        np.sqrt((each.reach**2).sum(axis=0)) / len(each.values) for each in (a, b)
    )
    return float(np.hypot(of_a[0], of_b[1])), float(np.hypot(of_a[1], of_b[0]))


def _spread(a: Array, b: Array, *, paired: bool) -> tuple[float, int, float]:
    """Return the spread of runs, its degrees of freedom, and the difference's error."""
    if paired:
        spread = float((a - b).std(ddof=1))
        return spread, len(a) - 1, spread / math.sqrt(len(a))
    degrees = len(a) + len(b) - 2
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in (a, b))
    spread = math.sqrt(squares / degrees)
    return spread, degrees, spread * math.sqrt(1.0 / len(a) + 1.0 / len(b))


def _welch(a: Array, b: Array, level: float) -> float:
    """Return half of the interval of recipes whose runs spread differently.

    Welch, Biometrika 34 (1947).  The degrees of freedom are not whole numbers.
    """
    from scipy.special import stdtrit

    parts = [(float(each.var(ddof=1)) / len(each), len(each) - 1) for each in (a, b)]
    square = sum(part for part, _ in parts)
    if square == 0.0:
        return 0.0
    degrees = square**2 / sum(part**2 / count for part, count in parts)
    return float(stdtrit(degrees, 0.5 + level / 2.0)) * math.sqrt(square)
