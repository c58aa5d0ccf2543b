"""What every result of this package has: intervals, and a form for JSON.

A number that is not finite, and a limit that the data do not set, is null in JSON.
"""

import dataclasses
import json
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Interval:
    """Limits of a quantity; None where the data set no limit."""

    low: float | None
    high: float | None

    def overlaps(self, other: "Interval") -> bool:
        """Whether a value lies in both."""
        return not (self.is_above(other) or other.is_above(self))

    def is_above(self, other: "Interval") -> bool:
        """Whether every value is larger than every one of the other's."""
        return self.low is not None and other.high is not None and self.low > other.high


class Record:
    """A result that can be written as JSON; for dataclasses.

    Fields with repr=False (arrays of draws, inputs) are left out.
    """

    def to_record(self) -> dict[str, Any]:
        """The result as a dict of JSON values."""
        return to_plain(self)

    def to_json(self) -> str:
        """One JSON object, with a newline at its end."""
        return json.dumps(self.to_record(), indent=2, allow_nan=False) + "\n"


def to_plain(value: Any) -> Any:
    """Any result, array or container of them, as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _nested(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.repr
        }
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{key:g}": _nested(inner)
            for key, inner in value.items()
        }
    if isinstance(value, np.ndarray):
        return _nested(value.tolist())
    if isinstance(value, list | tuple):
        return [_nested(inner) for inner in value]
    if isinstance(value, np.generic):
        return _nested(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _nested(value: Any) -> Any:
    """A part of a result; one that writes itself does so."""
    return value.to_record() if isinstance(value, Record) else to_plain(value)


def quantile_interval(draws: np.ndarray, level: float) -> Interval:
    """The central share `level` of draws [K]; a side with infinite draws is open."""
    finite = draws[~np.isnan(draws)]
    if finite.size == 0:
        return Interval(None, None)
    # "higher" and "lower" do not interpolate, which infinite draws would not survive.
    tail = 0.5 * (1.0 - level)
    low = float(np.quantile(finite, tail, method="lower"))
    high = float(np.quantile(finite, 1.0 - tail, method="higher"))
    return Interval(
        low if math.isfinite(low) else None, high if math.isfinite(high) else None
    )


def envelope(values: np.ndarray) -> Interval:
    """The smallest and largest of values [K]; a side with infinite values is open."""
    low, high = float(np.min(values)), float(np.max(values))
    return Interval(
        low if math.isfinite(low) else None, high if math.isfinite(high) else None
    )
