"""Rows of several runs, or of several evaluations of one run, that stand in one file.

They are refused, or there is a note, where they would be taken for a resumed run, whose
later rows replace earlier ones, for rows out of order, or for one curve.
"""

import collections
from collections.abc import Sequence

from scalerl_jax.scaling.records import CurveError
from scalerl_jax.scaling.tables import Row, is_empty, is_number

SEED_NAMES = frozenset(["seed", "trial", "replicate"])
# Columns whose numbers are names of runs, like text.
RUN_NAMES = SEED_NAMES | {"run", "run_id", "run_name"}
WAY_OUT = "tell them apart with --group, or choose one with --where"
_MOST_WORDS = 100  # letters of the names in a message


def refuse_mixture(rows: list[Row], keys: list[float], key: str, y: str) -> None:
    """Raise CurveError if rows in the order of writing are those of several curves.

    Steps come back in a resumed run.  Rows are of several curves if a column of names
    explains each step back, or if most steps have rows in succession whose y differ.

    Args:
        rows: of one run, as far as is known.
        keys: [n] their steps, or x without steps.
        key: the column of the keys.
        y: the column of the pass rates.
    """
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    columns = [column for column in columns if column not in (key, y)]
    told = [c for c in columns if _names_runs([row.get(c) for _, row in rows], c)]
    if told and _explain(rows, keys, told):
        _refuse(rows, keys, key, "of several runs", told)
    doubled = [
        i
        for i in range(1, len(keys))
        if keys[i] == keys[i - 1] and rows[i][1].get(y) != rows[i - 1][1].get(y)
    ]
    steps = len({keys[i] for i in doubled})  # one that a run repeated often is one
    if steps < 2 or 2 * steps < len(set(keys)):
        return
    told = [
        c
        for c in columns
        if all(rows[i][1].get(c) != rows[i - 1][1].get(c) for i in doubled)
        and len({str(row.get(c)) for _, row in rows}) < len(set(keys))
    ]
    _refuse(rows, keys, key, "as most do, of several evaluations or runs", told)


def hint_of_numbers(
    rows: list[Row], keys: list[float], key: str, y: str
) -> tuple[str, ...]:
    """Return a note if a column of few numbers explains the steps back, as names would.

    It may count the lives of a resumed run, too, so the rows are not refused.
    """
    columns = dict.fromkeys(name for _, row in rows for name in row)
    told = []
    for column in columns:
        cells = [row.get(column) for _, row in rows]
        if column in (key, y) or not all(map(is_number, cells)):
            continue
        counts = collections.Counter(map(str, cells))
        few = len(counts) > 1 and min(counts.values()) > 1
        if few and _explain(rows, keys, [column]):
            told.append(column)
    if not told:
        return ()
    return (f"if these rows are of several runs, {WAY_OUT}: {', '.join(told)}",)


def _explain(rows: list[Row], keys: list[float], told: Sequence[str]) -> bool:
    """Return whether the keys of each name have no repetition, or no step back."""
    names = [tuple(str(row[column]) for column in told) for _, row in rows]
    if len(set(keys)) < len(keys):
        return len(set(zip(keys, names, strict=True))) == len(keys)
    last: dict[tuple[str, ...], float] = {}
    for name, at in zip(names, keys, strict=True):
        if at <= last.get(name, -float("inf")):
            return False
        last[name] = at
    return True


def _refuse(
    rows: list[Row], keys: list[float], key: str, why: str, told: Sequence[str]
) -> None:
    """Raise CurveError at the first row whose key repeats or is below the one before.

    The message lists the columns that may tell the rows apart.
    """
    seen: dict[float, int] = {}
    for i, at in enumerate(keys):
        if at in seen:
            fault = f"appears twice (also at {rows[seen[at]][0]})"
        elif i and at < keys[i - 1]:
            fault = f"comes after {keys[i - 1]:g}"
        else:
            seen[at] = i
            continue
        hint = f"; candidates: {', '.join(told)}" if told else ""
        raise CurveError(
            f"{rows[i][0]}: {key} = {at:g} {fault}, {why}: {WAY_OUT}{hint}"
        )


def alternating(rows: list[Row], y: str) -> tuple[str, ...]:
    """Return a note for each column of names that change to and fro along a curve."""
    notes = []
    columns = dict.fromkeys(name for _, row in rows for name in row if name != y)
    for column in columns:
        cells = [row.get(column) for _, row in rows]
        if not _names_runs(cells, column):
            continue
        words = list(dict.fromkeys(map(str, cells)))
        changes = sum(a != b for a, b in zip(cells, cells[1:], strict=False))
        if changes >= 2 * len(words):
            named = ", ".join(words)[:_MOST_WORDS]
            notes.append(
                f"rows of {column} = {named} are read as one curve; if they are "
                f"several runs or evaluations, {WAY_OUT}"
            )
    return tuple(notes)


def _names_runs(cells: Sequence[object], column: str) -> bool:
    """Return whether a column has a few words, each in several rows: names of runs."""
    words = all(isinstance(cell, str) and not is_number(cell) for cell in cells)
    if any(map(is_empty, cells)) or not (words or column.casefold() in RUN_NAMES):
        return False
    counts = collections.Counter(str(cell) for cell in cells)
    return len(counts) > 1 and min(counts.values()) > 1
