"""Checking a curve: pass rate against compute.

Whatever a fit could not be trusted on is refused here, with the place in the file,
the limit, and the way out.  Nothing is sorted, rescaled or guessed; `load.py` reads.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEFAULT_X = "compute_chip_hours"
DEFAULT_Y = "pass_rate"
FALLING_CORRELATION = 0.5  # of ranks, from which a curve is said to fall


class CurveError(ValueError):
    """Input that cannot be fitted; the message says how to mend it."""


class TooFewPointsError(CurveError):
    """A curve that more evaluations would mend."""

    def __init__(self, message: str, *, missing: int) -> None:
        """`missing` is how many more."""
        super().__init__(message)
        self.missing = missing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A checked curve, without its zero-compute point."""

    x: NDArray[np.float64]  # [n] compute, > 0 and increasing, in the unit of x_name
    y: NDArray[np.float64]  # [n] pass rates in [0, 1]
    y_se: NDArray[np.float64] | None  # [n] standard errors of y
    r0: float | None  # pass rate at zero compute; None when it was not measured
    r0_se: float | None = None  # its standard error, where the points have theirs
    r0_evaluations: int = 1  # how many r0 is the mean of: one of each pooled seed
    num_left_out: int = 0  # early points that were taken away
    x_name: str
    y_name: str
    name: str = ""  # of the run
    last_step: int | None = None  # optimizer steps behind the last point, if known
    constants: dict[str, float] = dataclasses.field(default_factory=dict)  # settings
    prompt_rates: NDArray[np.float64] | None = None  # [n, P] of each prompt
    r0_prompt_rates: NDArray[np.float64] | None = None  # [P] at zero compute
    samples_per_prompt: int | None = None  # completions behind each of these
    warnings: tuple[str, ...] = ()

    def part(self, kept: NDArray[np.bool_]) -> "Curve":
        """The curve with the points that are `kept` [n], and step 0."""
        return dataclasses.replace(
            self,
            x=self.x[kept],
            y=self.y[kept],
            y_se=None if self.y_se is None else self.y_se[kept],
        )


def make_curve(
    x: ArrayLike,
    y: ArrayLike,
    *,
    y_se: ArrayLike | None = None,
    names: tuple[str, str] = (DEFAULT_X, DEFAULT_Y),
    name: str = "",
    places: Sequence[str] | None = None,
) -> Curve:
    """Check a curve and set its zero-compute point apart.

    Args:
        x: [n] compute, increasing; a first value of 0 gives R0.
        y: [n] pass rates, as fractions.
        y_se: [n] standard errors of y.
        names: what x and y are called in messages and output, unit included.
        name: what the run is called.
        places: [n] where each point comes from; "point 3" by default.
    """
    x_name, y_name = names
    compute, rates = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if compute.ndim != 1 or compute.shape != rates.shape:
        raise CurveError(
            f"{x_name} has shape {compute.shape} and {y_name} {rates.shape}; "
            "give two lists of the same length"
        )
    if compute.size == 0:
        raise CurveError(f"no points: {x_name} and {y_name} are empty")
    where = list(places or (f"point {i + 1}" for i in range(compute.size)))
    _check_compute(compute, x_name, where)
    _check_rates(rates, y_name, where)
    errors = None if y_se is None else np.asarray(y_se, np.float64)
    if errors is not None and errors.shape != rates.shape:
        raise CurveError(
            f"y_se has shape {errors.shape}, {y_name} {rates.shape}; give one "
            "standard error per point"
        )

    r0 = float(rates[0]) if compute[0] == 0 else None
    kept = compute > 0
    if not kept.any():
        raise CurveError(
            f"the only point has {x_name} = 0; evaluate 4 times during training too"
        )
    if kept.sum() > 1 and np.ptp(rates[kept]) == 0:
        raise CurveError(
            f"{name + ': ' if name else ''}constant curve: {y_name} is "
            f"{rates[kept][0]:g} at all {kept.sum()} points, so there is no "
            "scaling to fit; check --y, or train for longer"
        )
    return Curve(
        x=compute[kept],
        y=rates[kept],
        y_se=None if errors is None else errors[kept],
        r0=r0,
        r0_se=None if errors is None or r0 is None else float(errors[0]),
        x_name=x_name,
        y_name=y_name,
        name=name,
    )


def falls(y: NDArray[np.float64]) -> bool:
    """Whether values [n] fall from first to last, by the correlation of their ranks."""
    if y.size < 3 or not np.isfinite(y).all() or y[-1] >= y[0]:
        return False
    ranks = np.argsort(np.argsort(y, kind="stable"), kind="stable")
    return bool(np.corrcoef(ranks, np.arange(y.size))[0, 1] < -FALLING_CORRELATION)


def _check_compute(x: NDArray[np.float64], name: str, where: list[str]) -> None:
    """Finite, not negative, increasing."""
    for value, place in zip(x, where, strict=True):
        if not math.isfinite(value):
            raise CurveError(f"{place}: {name} = {value}; remove or mend this point")
        if value < 0:
            raise CurveError(
                f"{place}: {name} = {value:g} is negative; compute counts from 0, "
                "the start of the run"
            )
    for i in np.flatnonzero(np.diff(x) <= 0)[:1]:
        if x[i + 1] == x[i]:
            fault = f"is there twice (also at {where[i]}): duplicates"
        else:
            fault = f"does not increase after {x[i]:g} ({where[i]})"
        raise CurveError(
            f"{where[i + 1]}: {name} = {x[i + 1]:g} {fault}; it must grow from point "
            "to point: keep the order of the steps and one point for each, and if "
            "there are several runs, name the column that tells them apart with "
            "--group"
        )


def _check_rates(y: NDArray[np.float64], name: str, where: list[str]) -> None:
    """Finite, in [0, 1]."""
    for value, place in zip(y, where, strict=True):
        if not math.isfinite(value):
            raise CurveError(f"{place}: {name} = {value}; remove or mend this point")
    outside = np.flatnonzero((y < 0) | (y > 1))
    if outside.size:
        if y.min() >= 0 and falls(y):
            advice = (
                f"it falls, from {y[0]:g} to {y[-1]:g}: fit a loss by --law "
                "kaplan_one; give --map-rewards 0 100 for percent, with --one-minus "
                "if they are error rates"
            )
        elif y.min() >= 0 and y.max() <= 100:
            advice = "if these are percent, give --map-rewards 0 100, or divide by 100"
        elif y.min() >= -1 and y.max() <= 1:
            advice = (
                "if these are rewards in [-1, 1], give --map-rewards -1 1, or use "
                "(reward + 1) / 2"
            )
        else:
            advice = (
                "give --map-rewards LOW HIGH with the least and the most that it can "
                "be, or another column with --y; the mapping is (reward - LOW) / "
                "(HIGH - LOW)"
            )
        i = int(outside[0])
        raise CurveError(
            f"{where[i]}: {name} = {y[i]:g} is outside [0, 1], where pass rates "
            f"lie; {advice}"
        )
