"""From a file to curves: which rows, which run, on which scale.

What is left out, sorted, or read in a way that a reader should know of becomes a
warning of the curve (`points.py`); all else that is in doubt is refused by
`curves.make_curve`.
"""

import dataclasses
from pathlib import Path

import numpy as np

from scalerl_jax.scaling.cells import is_number, to_number
from scalerl_jax.scaling.columns import (
    ERRORS_ENDING,
    Columns,
    Selection,
    find_columns,
    find_conditions,
)
from scalerl_jax.scaling.curves import (
    DEFAULT_Y,
    Curve,
    CurveError,
    falls,
    make_curve,
)
from scalerl_jax.scaling.points import (
    complete_rows,
    numbers,
    percent_cell,
    settle,
    with_mark,
)
from scalerl_jax.scaling.readers import read_table
from scalerl_jax.scaling.tables import Row, Table, starts_at_zero

PROMPTS_COLUMN = "prompt_pass_rates"  # of evals.jsonl: a list
SAMPLES_COLUMN = "samples_per_prompt"
_PLAIN_NAMES = ("evals", "trainer_state", "tensorboard")  # their folder's says more


def load_curve(
    path: str | Path, *, selection: Selection | None = None, **columns: object
) -> Curve:
    """Read the one curve of a run directory or file: see `load_curves`.

    Raises:
        CurveError: as there, and if there are several curves.
    """
    curves = load_curves(path, selection=selection, **columns)
    if len(curves) > 1:
        names = ", ".join(curve.name for curve in curves)
        raise CurveError(
            f"{path}: {len(curves)} curves where one is wanted: {names}; choose one "
            "with --where COLUMN=VALUE, or --y where each column is a run"
        )
    return curves[0]


def load_curves(
    path: str | Path, *, selection: Selection | None = None, **columns: object
) -> list[Curve]:
    """Read the curves of a run directory or file, in order of appearance.

    The row with step 0, if there is one, is the zero-compute point.  Rows without a
    number in x or y are left out, and a step that comes again (a resumed run) counts
    once, with its last row.

    Args:
        path: what `readers.read_table` reads.
        selection: which columns and rows.
        columns: fields of `Selection` by name, instead of it: `x="gpu_hours"`.

    Raises:
        CurveError: a column that is not there, a cell that is no number, or a curve
            that cannot be fitted; the message says how to mend it.
    """
    chosen = selection or Selection()
    chosen = dataclasses.replace(chosen, **columns)  # pyright: ignore[reportArgumentType]
    table = read_table(path)
    if not table.rows:
        raise CurveError(f"{table.path}: no rows; has the run been evaluated yet?")
    found = find_columns(table, chosen)
    table, notes = with_mark(table, found.numbers)
    runs = _split(table, found)
    if table.sparse and len(runs) > 1:  # runs that log something else are no curves
        runs = {
            name: rows
            for name, rows in runs.items()
            if any(found.x in row and y in row for _, row in rows for y in found.ys)
        } or runs
    wide = chosen.wide or len(found.ys) > 1
    curves = []
    for run, rows in runs.items():
        for y in found.ys:
            name = run
            if wide:
                name = f"{run}, {y}" if len(runs) > 1 else y
            several = len(runs) > 1 or wide
            part = _Part(table, rows, y, found, run=name if several else "")
            curve = dataclasses.replace(_make(part, chosen, wide=wide), name=name)
            curves.append(
                dataclasses.replace(curve, warnings=(*notes, *curve.warnings))
            )
    return curves


@dataclasses.dataclass(frozen=True)
class Points:
    """Rows of a table that are points, and not those of a curve."""

    names: tuple[str, ...]  # of the columns
    values: list[np.ndarray]  # [n] each
    notes: tuple[str, ...]


def load_columns(
    path: str | Path, named: dict[str, str | None], selection: Selection
) -> Points:
    """Columns of a table as numbers; rows that lack one are left out.

    Args:
        path: what `readers.read_table` reads.
        named: column by the flag that names it; None: the x of this kind of file.
        selection: its `where` chooses the rows.
    """
    table = read_table(path)
    if not table.rows:
        raise CurveError(f"{table.path}: no rows")
    columns = [table.require(f, c or table.default_x) for f, c in named.items()]
    table, notes = with_mark(table, columns)
    rows = _rows_asked(table, find_conditions(table, selection))
    rows, left_out = complete_rows(table, rows, columns)
    values = [numbers(table, rows, column) for column in columns]
    return Points(tuple(columns), values, (*notes, *left_out))


def _rows_asked(table: Table, where: list[tuple[str, str]]) -> list[Row]:
    """The rows that `where` leaves."""
    rows = [
        (place, row)
        for place, row in table.rows
        if all(_cell_is(table, row.get(column), value) for column, value in where)
    ]
    if not rows:
        asked = ", ".join(f"{column}={value}" for column, value in where)
        column = where[0][0]
        known = list(dict.fromkeys(str(row.get(column)) for _, row in table.rows))
        raise CurveError(
            f"{table.path}: no row has {asked}; {column} is one of: "
            f"{', '.join(known[:20])}{', ...' if len(known) > 20 else ''}"
        )
    return rows


def _split(table: Table, columns: Columns) -> dict[str, list[Row]]:
    """The rows of each run that are asked for."""
    rows = _rows_asked(table, columns.where)
    path = table.path
    name = path.resolve().parent.name if path.stem in _PLAIN_NAMES else path.stem
    if not columns.group:
        return {name: rows}
    runs: dict[str, list[Row]] = {}
    for place, row in rows:
        run = ", ".join(str(row.get(column)) for column in columns.group)
        runs.setdefault(run, []).append((place, row))
    return runs


def _cell_is(table: Table, cell: object, value: str) -> bool:
    """Whether a cell is what was typed, as a number or as text."""
    try:
        return to_number(cell, table.mark) == float(value)
    except ValueError:
        return str(cell) == value


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows of one curve."""

    table: Table
    rows: list[Row]
    y: str
    columns: Columns
    run: str  # its name in notes; "" if it is alone

    def numbers(self, column: str) -> np.ndarray:
        """A column of its rows as numbers [n]."""
        return numbers(self.table, self.rows, column)


def _make(part: _Part, chosen: Selection, *, wide: bool) -> Curve:
    """The checked curve of one run."""
    table, x = part.table, part.columns.x
    rows, gaps = complete_rows(table, part.rows, [x, part.y], run=part.run)
    step = table.step
    if step is None or not all(is_number(row.get(step)) for _, row in rows):
        step = None
    rows, order = settle(table, rows, step or x, run=part.run)
    part = dataclasses.replace(part, rows=rows)
    compute = chosen.x_scale * part.numbers(x)
    last_step = None
    if step is not None:
        steps = part.numbers(step)
        last_step = int(steps[-1]) if steps[-1].is_integer() else None
        if steps[0] == 0 and starts_at_zero(step):
            compute[0] = 0.0
    asked = chosen.x or x
    if chosen.x_scale != 1:
        asked = f"{chosen.x_scale:g} {asked}"
    rates, y_name, read = _rates(part, chosen)
    curve = make_curve(
        compute,
        rates,
        y_se=_errors(part, rates, chosen),
        names=(chosen.x_name or asked, y_name),
        name=part.run,
        places=[place for place, _ in rows],
    )
    by_prompt = _prompt_rates(part, y_name)
    if by_prompt is not None:
        r0_rates = None if curve.r0 is None else by_prompt[0]
        by_prompt = by_prompt[-curve.x.size :]
        curve = dataclasses.replace(
            curve, prompt_rates=by_prompt, r0_prompt_rates=r0_rates
        )
    return dataclasses.replace(
        curve,
        y_name=y_name.replace(part.y, DEFAULT_Y, 1) if wide else y_name,
        warnings=(*gaps, *order, *read),
        last_step=last_step,
        samples_per_prompt=rows[-1][1].get(SAMPLES_COLUMN),
        constants={
            name: _constant(part, column)
            for name, column in part.columns.constants.items()
        },
    )


def _rates(part: _Part, chosen: Selection) -> tuple[np.ndarray, str, tuple[str, ...]]:
    """Pass rates [n], what they are called, and notes on how they were read."""
    where, y = part.table.path, part.y
    values, name, notes = part.numbers(y), y, []
    percent = percent_cell(part.rows, y)
    if percent is not None:
        if chosen.reward_range is not None:
            raise CurveError(
                f"{where}: {y} = {percent!r} is read as hundredths, so it is not to be "
                "mapped; leave --map-rewards out"
            )
        number = f"{to_number(percent, part.table.mark):.10g}"
        notes.append(f"{where}: {y} has percent signs: {percent!r} is read as {number}")
    if chosen.reward_range is not None:
        values = _mapped(values, chosen.reward_range, f"{where}: {y}")
        low, high = chosen.reward_range
        name = f"{name}, mapped from [{low:g}, {high:g}]"
    if chosen.one_minus:
        return _complement(values, f"{where}: {y}"), f"1 - {name}", tuple(notes)
    if y != DEFAULT_Y and falls(values):
        notes.append(
            f"{where}: {y} falls, from {values[0]:g} to {values[-1]:g}: if it is an "
            "error rate, give --one-minus; if it is a loss, fit --law kaplan_one"
        )
    return values, name, tuple(notes)


def _mapped(
    rewards: np.ndarray, reward_range: tuple[float, float], what: str
) -> np.ndarray:
    """Rewards [n] on the scale of pass rates: (reward - low) / (high - low)."""
    low, high = reward_range
    if not low < high:
        raise CurveError(
            f"--map-rewards {low:g} {high:g}: give the reward of no success, then the "
            "larger one of full success"
        )
    if ((rewards < low) | (rewards > high)).any():
        raise CurveError(
            f"{what} reaches from {rewards.min():g} to {rewards.max():g}, outside "
            f"--map-rewards {low:g} {high:g}; give the least and the most it can be"
        )
    return (rewards - low) / (high - low)


def _complement(errors: np.ndarray, what: str) -> np.ndarray:
    """Pass rates [n] of error rates."""
    if ((errors < 0) | (errors > 1)).any():
        raise CurveError(
            f"{what} reaches from {errors.min():g} to {errors.max():g}, outside [0, 1] "
            "where error rates lie for --one-minus; give --map-rewards 0 100 too for "
            "percent, and fit a loss by --law kaplan_one"
        )
    return 1.0 - errors


def _prompt_rates(part: _Part, y_name: str) -> np.ndarray | None:
    """Pass rates of each prompt [n, P], where every evaluation says them."""
    rates = [row.get(PROMPTS_COLUMN) for _, row in part.rows]
    if y_name != part.y or part.y != DEFAULT_Y:
        return None
    if not all(isinstance(each, list) for each in rates):
        return None
    if len({len(each) for each in rates if each is not None}) != 1:
        return None
    if any(each is not None and None in each for each in rates):
        return None  # a prompt that was not judged pairs with nothing
    return np.array(rates, np.float64)


def _constant(part: _Part, column: str) -> float:
    """The one value of a setting in all rows of a run that have it."""
    values = np.unique(part.numbers(column))
    values = values[~np.isnan(values)]
    name = part.run or part.table.path
    if values.size == 0:
        raise CurveError(f"{name}: {column} is empty in every row; fill it in")
    if values.size > 1:
        shown = ", ".join(f"{value:g}" for value in values[:5])
        raise CurveError(
            f"{name}: {column} is {shown} in one run, and a setting has one value; "
            "tell the runs apart with --group"
        )
    return float(values[0])


def _errors(part: _Part, rates: np.ndarray, chosen: Selection) -> np.ndarray | None:
    """Standard errors of the rates [n]; None if not every row has one.

    From `samples` they are binomial, sqrt(p (1 - p) / n), with p = (successes + 1) /
    (n + 2), so that a rate of 0 or 1 is not taken for certain.
    """
    columns = part.columns
    if columns.samples is not None:
        count = _filled(part, columns.samples, "--samples")
        if (count < 1).any():
            raise CurveError(f"--samples {columns.samples}: a rate is of at least 1")
        share = (rates * count + 1.0) / (count + 2.0)
        return np.sqrt(share * (1.0 - share) / count)
    column = columns.se or part.y + ERRORS_ENDING
    if columns.se is None and not all(is_number(r.get(column)) for _, r in part.rows):
        return None
    errors = _filled(part, column, "--se")
    percents = [percent_cell(part.rows, name) is not None for name in (part.y, column)]
    if percents[0] != percents[1] and errors.any():
        raise CurveError(
            f"{part.table.path}: only one of {part.y} and {column} has percent signs; "
            "write both in one way"
        )
    low, high = chosen.reward_range or (0.0, 1.0)
    if not np.all(np.isfinite(errors) & (errors >= 0)):
        raise CurveError(
            f"{part.rows[0][0]}: {column} holds standard errors that are negative or "
            "not finite; mend them, or name another column with --se"
        )
    return errors / (high - low)


def _filled(part: _Part, column: str, flag: str) -> np.ndarray:
    """A column of numbers [n] that has one wherever y has."""
    values = part.numbers(column)
    empty = np.flatnonzero(np.isnan(values))
    if empty.size:
        raise CurveError(
            f"{part.rows[empty[0]][0]}: {column} is empty, and {part.y} is not; fill "
            f"it in, or leave {flag} out"
        )
    return values
