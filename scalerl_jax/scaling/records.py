"""Input and output of a fit: checked curves, intervals, JSON records.

`make_curve` raises on input that makes a fit unreliable, naming the line in the file,
the limit and the way out; it does not sort, rescale or guess (`load.py` reads files).
In JSON a number that is not finite, and a limit that the data do not set, is null.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Places = NDArray[np.intp]

DEFAULT_X = "compute_chip_hours"
TOKENS_X = "generated_tokens"  # x of a run on a CPU, whose chip-hours are wall time
DEFAULT_Y = "pass_rate"
# A standard error below this is 0 but for rounding: of the mean of 0.1, 0.1 and 0.1.
ROUNDING = 1e-12
FALLING_CORRELATION = 0.5  # a curve falls if its rank correlation is below minus this
Source = Literal["fitted", "measured", "given", "held"]


def amount(value: float, *, digits: int = 4) -> str:
    """Return a rounded number as axes write it: 20,000 and 0.005, or 2e+18."""
    rounded = f"{value:.{digits}g}"
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return rounded
    return f"{float(rounded):,.10g}"


class CurveError(ValueError):
    """Input that cannot be fitted; the message says how to mend it."""


class HeaderError(CurveError):
    """A header that lacks every usual column, which no later row brings."""


class SeveralCurvesError(CurveError):
    """Several curves where one is needed, of which no later row makes one."""


class TooFewPointsError(CurveError):
    """A curve with too few evaluations to be fitted."""

    def __init__(self, message: str, *, missing: int) -> None:
        """Store the number of `missing` evaluations."""
        super().__init__(message)
        self.missing = missing


@dataclasses.dataclass(frozen=True)
class Record:
    """A result that can be written as JSON.

    Fields with repr=False (arrays of draws, inputs) are left out.
    """

    def to_record(self) -> dict[str, Any]:
        """Return the result as a dict of JSON values."""
        shown = [field.name for field in dataclasses.fields(self) if field.repr]
        return {name: to_plain(getattr(self, name)) for name in shown}

    def to_json(self) -> str:
        """Return one JSON object, with a newline at its end."""
        return to_json(self)


@dataclasses.dataclass(frozen=True)
class Interval(Record):
    """Limits of a quantity; None where the data set no limit."""

    low: float | None
    high: float | None

    def overlaps(self, other: "Interval") -> bool:
        """Return whether the two intervals have a value in common."""
        return not (self.is_above(other) or other.is_above(self))

    def is_above(self, other: "Interval") -> bool:
        """Return whether every value is larger than all of the other interval."""
        return self.low is not None and other.high is not None and self.low > other.high


OPEN = Interval(None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter(Record):
    """One parameter of a law, with its unit and interval."""

    name: str  # "A"
    meaning: str  # "asymptotic pass rate"
    unit: str  # "pass rate", "compute_chip_hours", "" for a plain number
    value: float
    interval: Interval | None  # None: not fitted
    source: Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A checked curve, without its zero-compute point."""

    x: Array  # [n] compute, > 0 and increasing, in the unit of x_name
    y: Array  # [n] pass rates in [0, 1]
    y_se: Array | None  # [n] standard errors of y
    r0: float | None  # pass rate at zero compute; None when it was not measured
    r0_se: float | None = None  # its standard error, where the points have theirs
    r0_evaluations: int = 1  # evaluations that r0 is the mean of: one per pooled seed
    num_left_out: int = 0  # early points that were removed
    x_name: str
    y_name: str
    x_column: str = ""  # that x was read from, whatever `x_name` calls it; "": unknown
    name: str = ""  # of the run
    is_wall_time: bool = False  # x is chip-hours of a CPU, which give no verdict
    recipe: str = ""  # equal for runs that differ only in their seed; "": unknown
    seed: str = ""  # of the run; "": unknown
    chip: str = ""  # kind of chip, or kinds; "": unknown
    # Settings of the run's evaluations by name: those that choose the prompts, and how
    # these are sampled and judged (`run_settings.evaluated`); empty: unknown.
    prompts: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    last_step: int | None = None  # optimizer steps behind the last point, if known
    constants: dict[str, float] = dataclasses.field(default_factory=dict)  # settings
    prompt_rates: Array | None = None  # [n, P] pass rate of each prompt
    r0_prompt_rates: Array | None = None  # [P] at zero compute
    samples_per_prompt: int | None = None  # completions behind a prompt's pass rate
    warnings: tuple[str, ...] = ()

    def part(self, kept: Bools) -> "Curve":
        """Return the curve with the points that are `kept` [n], and step 0."""
        errors = None if self.y_se is None else self.y_se[kept]
        return dataclasses.replace(self, x=self.x[kept], y=self.y[kept], y_se=errors)


def make_curve(
    x: ArrayLike,
    y: ArrayLike,
    *,
    y_se: ArrayLike | None = None,
    names: tuple[str, str] = (DEFAULT_X, DEFAULT_Y),
    name: str = "",
    places: Sequence[str] | None = None,
    constant: bool = False,
) -> Curve:
    """Check a curve and set its zero-compute point apart.

    Args:
        x: [n] compute, increasing; a first value of 0 gives R0.
        y: [n] pass rates, as fractions.
        y_se: [n] standard errors of y.
        names: what x and y are called in messages and output, unit included.
        name: of the run.
        places: [n] where each point comes from; "point 3" by default.
        constant: accept a curve that stays at one value, which is flat.

    Raises:
        CurveError: a point, or the curve, that cannot be fitted.
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
        shapes = f"y_se has shape {errors.shape}, {y_name} {rates.shape}"
        raise CurveError(f"{shapes}; give one standard error per point")
    if errors is not None:
        errors = np.where(np.abs(errors) < ROUNDING, 0.0, errors)
    kept = compute > 0
    if not kept.any():
        raise CurveError(
            f"the only point has {x_name} = 0; evaluate 4 times during training too"
        )
    if not constant:
        _check_not_constant(rates[kept], y_name, name)
    has_zero = not kept[0]
    return Curve(
        x=compute[kept],
        y=rates[kept],
        y_se=None if errors is None else errors[kept],
        r0=float(rates[0]) if has_zero else None,
        r0_se=float(errors[0]) if has_zero and errors is not None else None,
        x_name=x_name,
        y_name=y_name,
        name=name,
    )


def declines(y: Array) -> bool:
    """Test values [n] for a fall from first to last, by the correlation of ranks."""
    if y.size < 3 or not np.isfinite(y).all() or y[-1] >= y[0]:
        return False
    ranks = np.argsort(np.argsort(y, kind="stable"), kind="stable")
    return bool(np.corrcoef(ranks, np.arange(y.size))[0, 1] < -FALLING_CORRELATION)


def _check_not_constant(y: Array, y_name: str, name: str) -> None:
    """Refuse several points of one value."""
    if y.size > 1 and np.ptp(y) == 0:
        raise CurveError(
            f"{name + ': ' if name else ''}constant curve: {y_name} is {y[0]:g} at "
            f"all {y.size} points, so there is no scaling to fit; check --y, or train "
            "for longer"
        )


def _check_finite(values: Array, name: str, where: list[str]) -> None:
    """Refuse NaN and infinity."""
    for i in np.flatnonzero(~np.isfinite(values)):
        raise CurveError(f"{where[i]}: {name} = {values[i]}; remove or mend this point")


def _check_compute(x: Array, name: str, where: list[str]) -> None:
    """Refuse compute that is not finite, is negative, or does not increase."""
    _check_finite(x, name, where)
    for i in np.flatnonzero(x < 0):
        raise CurveError(
            f"{where[i]}: {name} = {x[i]:g} is negative; compute counts from 0, "
            "the start of the run"
        )
    for i in np.flatnonzero(np.diff(x) <= 0):
        if x[i + 1] == x[i]:
            fault = f"appears twice (also at {where[i]}): duplicates"
        else:
            fault = f"does not increase after {x[i]:g} ({where[i]})"
        raise CurveError(
            f"{where[i + 1]}: {name} = {x[i + 1]:g} {fault}; it must grow from point "
            "to point: keep the order of the steps and one point for each, and if "
            "there are several runs, name the column that tells them apart with "
            "--group"
        )


def _check_rates(y: Array, name: str, where: list[str]) -> None:
    """Refuse rates that are not finite or outside [0, 1], and say how to map them."""
    _check_finite(y, name, where)
    outside = np.flatnonzero((y < 0) | (y > 1))
    if not outside.size:
        return
    if y.min() >= 0 and declines(y):
        advice = (
            f"it falls, from {y[0]:g} to {y[-1]:g}: fit a loss by --law kaplan_one; "
            "give --map-rewards 0 100 for percent, with --one-minus if they are error "
            "rates"
        )
    elif y.min() >= 0 and y.max() <= 100:
        advice = (
            "give --map-rewards 0 100 if these are percent; if rewards, "
            f"--map-rewards 0 HIGH, the most that one can be ({y.max():g} or more)"
        )
    elif y.min() >= -1 and y.max() <= 1:
        advice = (
            "if these are rewards in [-1, 1], give --map-rewards -1 1, or use "
            "(reward + 1) / 2"
        )
    else:
        advice = (
            "give --map-rewards LOW HIGH with the least and the most that it can be, "
            "or another column with --y; the mapping is (reward - LOW) / (HIGH - LOW)"
        )
    i = int(outside[0])
    raise CurveError(
        f"{where[i]}: {name} = {y[i]:g} is outside [0, 1], where pass rates "
        f"lie; {advice}"
    )


def to_plain(value: Any) -> Any:
    """Return any result, array or container of them as JSON values."""
    if isinstance(value, Record):
        return value.to_record()
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{key:g}": to_plain(inner)
            for key, inner in value.items()
        }
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> str:
    """Return any result, or container of them, as JSON with a newline at its end."""
    return json.dumps(to_plain(value), indent=2, allow_nan=False) + "\n"


def r_squared(values: Array, residuals: Array) -> float:
    """Return the explained share of the variance of values [n]; 0 for constant ones."""
    spread = float(((values - values.mean()) ** 2).sum())
    return 1.0 - float((residuals**2).sum()) / spread if spread else 0.0


def finite_interval(low: float, high: float) -> Interval:
    """Return an interval whose infinite ends are open."""
    return Interval(
        low if math.isfinite(low) else None, high if math.isfinite(high) else None
    )


def quantile_interval(draws: Array, level: float) -> Interval:
    """Return the central share `level` of draws [K], without NaN; infinity is open."""
    finite = draws[~np.isnan(draws)]
    if finite.size == 0:
        return OPEN
    # "higher" and "lower" do not interpolate, which infinite draws would not survive.
    tail = 0.5 * (1.0 - level)
    return finite_interval(
        float(np.quantile(finite, tail, method="lower")),
        float(np.quantile(finite, 1.0 - tail, method="higher")),
    )


def envelope(values: Array) -> Interval:
    """Return the smallest and largest of values [K]; a side with infinity is open."""
    return finite_interval(float(np.min(values)), float(np.max(values)))
