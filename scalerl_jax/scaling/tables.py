"""Tables: rows with named cells, and the place each came from.

Nothing is checked, mapped or guessed here; `readers.py` and `events.py` make tables of
files, `cells.py` makes numbers of cells.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from scalerl_jax.scaling.cells import Mark
from scalerl_jax.scaling.curves import DEFAULT_X, DEFAULT_Y, CurveError

STEP_COLUMN = "step"
# What trainers call it, best first: W&B's _step counts what was logged, not steps.
STEP_NAMES = (STEP_COLUMN, "global_step", "_step")
RUN_COLUMN = "run"
_SHOWN = 50  # columns that a message lists

Row = tuple[str, dict[str, Any]]  # "file:line" and the cells there


def is_step(column: str) -> bool:
    """Whether a column counts steps, by its name: Step, train/global_step, _step."""
    return _last_part(column) in STEP_NAMES


def starts_at_zero(step: str) -> bool:
    """Whether step 0 of this column is a state before training; of W&B's _step not."""
    return _last_part(step) != STEP_NAMES[-1]


def _last_part(column: str) -> str:
    return column.casefold().rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one file or directory, and what its kind calls x and y."""

    path: Path
    rows: list[Row]
    x: str | None = DEFAULT_X  # None: the user has to say
    y: str | None = DEFAULT_Y
    group: str | None = None  # column whose values tell runs apart
    sparse: bool = False  # a row holds some columns only: others are no fault
    delimiter: str | None = None  # of a text file
    mark: Mark = "."  # the decimal mark of cells that are text

    @functools.cached_property
    def columns(self) -> list[str]:
        """Every column that occurs, in order of appearance."""
        return list(dict.fromkeys(name for _, row in self.rows for name in row))

    @property
    def step(self) -> str | None:
        """The column that counts steps, if there is one."""
        found = [column for column in self.columns if is_step(column)]
        return min(found, key=lambda c: STEP_NAMES.index(_last_part(c)), default=None)

    @property
    def default_x(self) -> str | None:
        """What x is unless it is said: what the kind of file has, else the step."""
        return self.x if self.x in self.columns else self.step or self.x

    def find(self, name: str) -> str | None:
        """The column of a name, in any case; any column of steps for a step."""
        if name in self.columns:
            return name
        alike = [c for c in self.columns if c.casefold() == name.casefold()]
        if len(alike) == 1:
            return alike[0]
        return self.step if is_step(name) else None

    def require(self, flag: str, name: str | None) -> str:
        """A column that is there; else the list of those that are is the error."""
        column = None if name is None else self.find(name)
        if column is None:
            fault = "which column is wanted?" if name is None else f"no column {name!r}"
            known = ", ".join(self.columns[:_SHOWN])
            if len(self.columns) > _SHOWN:
                known += f" and {len(self.columns) - _SHOWN} more"
            raise CurveError(f"{self.path}: {fault}; choose {flag} from: {known}")
        return column

    def require_all(self, flag: str, names: str) -> list[str]:
        """The columns of a list "a,b"; a name with a comma in it is one column."""
        if self.find(names) is not None or "," not in names:
            return [self.require(flag, names)]
        return [self.require(flag, name.strip()) for name in names.split(",")]
