"""Reading and checking a curve: pass rate against compute, from CSV or JSONL.

Whatever a fit could not be trusted on is refused here, with the place in the file,
the limit, and the way out.  Nothing is sorted, rescaled or guessed.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

EVALS_NAME = "evals.jsonl"
DEFAULT_X = "compute_chip_hours"
DEFAULT_Y = "pass_rate"
STEP_COLUMN = "step"


class CurveError(ValueError):
    """Input that cannot be fitted; the message says how to mend it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A checked curve, without its zero-compute point."""

    x: NDArray[np.float64]  # [n] compute, > 0 and increasing, in the unit of x_name
    y: NDArray[np.float64]  # [n] pass rates in [0, 1]
    y_se: NDArray[np.float64] | None  # [n] standard errors, for the figure only
    r0: float | None  # pass rate at zero compute; None when it was not measured
    num_left_out: int  # points with 0 < x < start
    x_name: str
    y_name: str
    warnings: tuple[str, ...] = ()


def make_curve(
    x: ArrayLike,
    y: ArrayLike,
    *,
    y_se: ArrayLike | None = None,
    start: float | None = None,
    names: tuple[str, str] = (DEFAULT_X, DEFAULT_Y),
    places: Sequence[str] | None = None,
    warnings: tuple[str, ...] = (),
) -> Curve:
    """Check a curve and set its zero-compute point apart.

    Args:
        x: [n] compute, increasing; a first value of 0 gives R0.
        y: [n] pass rates, as fractions.
        y_se: [n] standard errors of y.
        start: points with 0 < x < start are left out.
        names: what x and y are called in messages and output, unit included.
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

    r0 = float(rates[0]) if compute[0] == 0 else None
    kept = compute > 0 if start is None else (compute >= start) & (compute > 0)
    if not kept.any():
        raise CurveError(
            f"--from {start:g} leaves out every point: the last {x_name} is "
            f"{compute[-1]:g}; give a smaller --from"
            if start is not None
            else f"the only point has {x_name} = 0; evaluate during training too"
        )
    if kept.sum() > 1 and np.ptp(rates[kept]) == 0:
        raise CurveError(
            f"constant curve: {y_name} is {rates[kept][0]:g} at all {kept.sum()} "
            "points, so there is no scaling to fit; check --y, or train for longer"
        )
    return Curve(
        x=compute[kept],
        y=rates[kept],
        y_se=None if errors is None else errors[kept],
        r0=r0,
        num_left_out=int((compute > 0).sum() - kept.sum()),
        x_name=x_name,
        y_name=y_name,
        warnings=warnings,
    )


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
        raise CurveError(
            f"{where[i + 1]}: {name} = {x[i + 1]:g} does not increase after "
            f"{x[i]:g} ({where[i]}); it must grow from point to point: keep one run "
            "per file, in the order of its steps, without duplicates"
        )


def _check_rates(y: NDArray[np.float64], name: str, where: list[str]) -> None:
    """Finite, in [0, 1]."""
    for value, place in zip(y, where, strict=True):
        if not math.isfinite(value):
            raise CurveError(f"{place}: {name} = {value}; remove or mend this point")
    outside = np.flatnonzero((y < 0) | (y > 1))
    if outside.size:
        if y.min() >= 0 and y.max() <= 100:
            advice = "if these are percent, divide by 100"
        elif y.min() >= -1 and y.max() <= 1:
            advice = "if these are rewards in [-1, 1], use (reward + 1) / 2"
        else:
            advice = "divide percent by 100, map rewards in [-1, 1] by (reward + 1) / 2"
        i = int(outside[0])
        raise CurveError(
            f"{where[i]}: {name} = {y[i]:g} is outside [0, 1], where pass rates "
            f"lie; {advice}"
        )


def load_curve(
    path: str | Path,
    *,
    x: str = DEFAULT_X,
    y: str = DEFAULT_Y,
    start: float | None = None,
) -> Curve:
    """Read a curve from a run directory, a JSONL file, or a CSV file with a header.

    In JSONL, the row with step 0 is the zero-compute point, and a step that comes
    again (a resumed run) replaces the rows from its first appearance on.

    Args:
        path: a directory with `evals.jsonl`, or a .jsonl or .csv file.
        x: column of the compute.
        y: column of the pass rate; `<y>_se`, if there, gives the error bars.
        start: points with 0 < x < start are left out.
    """
    file = Path(path)
    if file.is_dir():
        file = file / EVALS_NAME
    if not file.is_file():
        raise CurveError(
            f"{file}: no such file; give a run directory with {EVALS_NAME}, "
            "a .jsonl or a .csv file"
        )
    warnings: tuple[str, ...] = ()
    if file.suffix == ".csv":
        rows = _read_csv(file)
    elif file.suffix == ".jsonl":
        rows, warnings = _drop_replaced(_read_jsonl(file), file)
    else:
        raise CurveError(
            f"{file}: unknown kind {file.suffix!r}; give .jsonl (one object per line) "
            "or .csv (with a header)"
        )
    if not rows:
        raise CurveError(f"{file}: no rows; has the run been evaluated yet?")
    _check_columns(file, rows[0][1], (x, y))
    compute = [_number(place, row, x) for place, row in rows]
    rates = [_number(place, row, y) for place, row in rows]
    if file.suffix == ".jsonl" and rows[0][1].get(STEP_COLUMN) == 0:
        compute[0] = 0.0
    return make_curve(
        compute,
        rates,
        y_se=_errors(rows, f"{y}_se"),
        start=start,
        names=(x, y),
        places=[place for place, _ in rows],
        warnings=warnings,
    )


Row = tuple[str, dict[str, Any]]  # "file:line" and the columns there


def _read_csv(file: Path) -> list[Row]:
    """The rows of a CSV file; cells stay text."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        return [(f"{file}:{reader.line_num}", row) for row in reader]


def _read_jsonl(file: Path) -> list[Row]:
    """The objects of a JSONL file; blank lines are skipped."""
    rows = []
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as failure:
            raise CurveError(
                f"{file}:{number}: not valid JSON ({failure.msg}); remove the line "
                "if a killed run left it half written"
            ) from failure
        if not isinstance(row, dict):
            raise CurveError(
                f"{file}:{number}: holds {type(row).__name__}, not an object with "
                "named columns"
            )
        rows.append((f"{file}:{number}", row))
    return rows


def _drop_replaced(rows: list[Row], file: Path) -> tuple[list[Row], tuple[str, ...]]:
    """Rows that still stand after each resume, and a warning if any do not."""
    kept: list[Row] = []
    for place, row in rows:
        steps = [old.get(STEP_COLUMN) for _, old in kept]
        step = row.get(STEP_COLUMN)
        if step is not None and step in steps:
            del kept[steps.index(step) :]
        kept.append((place, row))
    replaced = len(rows) - len(kept)
    if not replaced:
        return kept, ()
    return kept, (
        f"{file}: {replaced} rows left out: their steps were evaluated again after "
        "a resume, and the last evaluation counts",
    )


def _check_columns(file: Path, row: dict[str, Any], wanted: tuple[str, str]) -> None:
    """Both columns exist."""
    for flag, column in zip(("--x", "--y"), wanted, strict=True):
        if column not in row:
            known = ", ".join(str(name) for name in row)
            raise CurveError(
                f"{file}: no column {column!r}; choose {flag} from: {known}"
            )


def _number(place: str, row: dict[str, Any], column: str) -> float:
    """A cell as a number."""
    cell = row.get(column)
    if cell is None or cell == "":
        raise CurveError(f"{place}: {column} is missing; remove or complete the row")
    try:
        return float(cell)
    except (TypeError, ValueError) as failure:
        raise CurveError(f"{place}: {column} = {cell!r} is not a number") from failure


def _errors(rows: list[Row], column: str) -> list[float] | None:
    """Standard errors; None unless every row has one that is a number and not < 0."""
    cells = [row.get(column) for _, row in rows]
    try:
        errors = [float(cell) for cell in cells if cell is not None]
    except (TypeError, ValueError):
        return None
    usable = all(math.isfinite(error) and error >= 0 for error in errors)
    return errors if usable and len(errors) == len(rows) else None
