"""Which rows of a run are points of its curve, and in which order.

A row without a number in x or y is left out, a step that comes again counts once, and
unsorted rows are sorted; each with a note that says how many.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.scaling.cells import (
    decimal_mark,
    is_empty,
    is_number,
    is_percent,
    to_number,
)
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.tables import Row, Table

# Columns whose numbers are names of runs, as text is.
RUN_NAMES = frozenset(["run", "run_id", "run_name", "seed", "trial"])


def with_mark(table: Table, columns: Sequence[str]) -> tuple[Table, tuple[str, ...]]:
    """The table with its decimal mark, by the cells of these columns, and a note."""
    mark, note = decimal_mark(
        table.path,
        ((place, c, row.get(c)) for place, row in table.rows for c in columns),
        semicolons=table.delimiter == ";",
    )
    return dataclasses.replace(table, mark=mark), () if note is None else (note,)


def numbers(table: Table, rows: Sequence[Row], column: str) -> Array:
    """A column as numbers [n]; NaN where a cell is empty.

    Raises:
        CurveError: a cell that is no number, or percent signs in some cells only.
    """
    values = np.empty(len(rows))
    for i, (place, row) in enumerate(rows):
        try:
            values[i] = to_number(row.get(column), table.mark)
        except ValueError as failure:
            raise CurveError(
                f"{place}: {column} = {row[column]!r} is not a number; mend the cell, "
                "or empty it to leave the row out"
            ) from failure
    signs = np.array([is_percent(row.get(column)) for _, row in rows], bool)
    bare = np.flatnonzero(~signs & ~np.isnan(values) & (values != 0))
    if signs.any() and bare.size:
        place, row = rows[bare[0]]
        raise CurveError(
            f"{place}: {column} = {row[column]!r} has no percent sign, but others have "
            "one; write the column in one way"
        )
    return values


def percent_cell(rows: Sequence[Row], column: str) -> str | None:
    """The first cell of a column that has a percent sign."""
    cells = (row.get(column) for _, row in rows)
    return next((cell for cell in cells if is_percent(cell)), None)


def complete_rows(
    table: Table, rows: list[Row], columns: Sequence[str], *, run: str = ""
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows with a number in each column, and a note of how many have none.

    Where a kind of file leaves cells empty as a rule, only a NaN is told.
    """
    gaps = {column: np.isnan(numbers(table, rows, column)) for column in columns}
    gap = np.logical_or.reduce(list(gaps.values()))
    kept = [row for row, lacks in zip(rows, gap.tolist(), strict=True) if not lacks]
    name = f"{table.path}{': ' + run if run else ''}"
    if not kept:
        have = ", ".join(f"{c} in {int((~lacks).sum())}" for c, lacks in gaps.items())
        raise CurveError(
            f"{name}: no row has a number in {' and '.join(columns)} (of {len(rows)}, "
            f"{have}); fill them in, or choose other columns"
        )
    lacking = [column for column, lacks in gaps.items() if lacks.any()]
    told = [
        any(
            gaps[c][i] and not (table.sparse and _is_absent(rows[i][1], c))
            for c in lacking
        )
        for i in np.flatnonzero(gap)
    ]
    if not any(told):
        return kept, ()
    where = " or ".join(lacking)
    note = f"{name}: {sum(told)} of {len(rows)} rows left out: no number in {where}"
    return kept, (note,)


def _is_absent(row: dict[str, object], column: str) -> bool:
    """Whether a row has no such cell, or an empty one; NaN is not empty."""
    cell = row.get(column)
    return cell is None or (isinstance(cell, str) and not cell.strip())


def settle(
    table: Table, rows: list[Row], key: str, *, run: str
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows in order of the key, one for each of its values, and notes.

    The last row of a key counts.  Rows that step back only to keys that were there
    are the log of a run that was resumed: all that it wrote from that key on until
    then is replaced.  Rows in another order are sorted.
    """
    keys = numbers(table, rows, key).tolist()
    name = f"{table.path}{': ' + run if run else ''}"
    if all(a < b for a, b in zip(keys, keys[1:], strict=False)):
        return rows, ()
    if len(set(keys)) < len(keys):
        _refuse_several_runs(table, rows, keys, key)
    first = {value: i for i, value in reversed(list(enumerate(keys)))}
    resumed = all(
        keys[i] > keys[i - 1] or first[keys[i]] < i for i in range(1, len(keys))
    )
    kept = _rewound(keys) if resumed else {value: i for i, value in enumerate(keys)}
    order = sorted(kept.values(), key=keys.__getitem__)
    notes = []
    if len(order) < len(keys):
        why = f"their {key} comes again, and the last row counts"
        if resumed:
            why = f"a resumed run wrote their {key} again, and the last row counts"
        notes.append(f"{name}: {len(keys) - len(order)} rows left out: {why}")
    if not resumed:
        notes.append(f"{name}: rows were not in the order of {key}, and are sorted")
    return [rows[i] for i in order], tuple(notes)


def _rewound(keys: list[float]) -> dict[float, int]:
    """Places by key of what stands after each resume."""
    kept: dict[float, int] = {}
    for i, key in enumerate(keys):
        if key in kept:
            since = kept[key]
            while kept and next(reversed(kept.values())) >= since:
                kept.popitem()
        kept[key] = i
    return kept


def _refuse_several_runs(
    table: Table, rows: list[Row], keys: list[float], key: str
) -> None:
    """Refuse keys that come again in rows which names of runs tell apart."""
    told = [
        column
        for column in table.columns
        if column != key and _names_runs([row.get(column) for _, row in rows], column)
    ]
    names = {
        (k, *(str(row[c]) for c in told))
        for k, (_, row) in zip(keys, rows, strict=True)
    }
    if not told or len(names) < len(rows):
        return
    i = next(i for i, k in enumerate(keys) if k in keys[:i])
    raise CurveError(
        f"{rows[i][0]}: {key} = {keys[i]:g} is there twice (also at "
        f"{rows[keys.index(keys[i])][0]}), of several runs: name the column that tells "
        f"them apart with --group, or choose one with --where; candidates: "
        f"{', '.join(told)}"
    )


def _names_runs(cells: list[object], column: str) -> bool:
    """Whether a column looks like names of runs: a few words, each in several rows."""
    if any(is_empty(cell) for cell in cells):
        return False
    named = column.casefold() in RUN_NAMES
    if not named and not all(isinstance(cell, str) for cell in cells):
        return False
    if not named and any(is_number(cell) for cell in cells):
        return False
    counts = collections.Counter(str(cell) for cell in cells)
    return len(counts) > 1 and min(counts.values()) > 1
