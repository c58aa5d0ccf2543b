"""Curves from a table: the choice of columns, rows and runs, and the scale of y.

A row without a number in x or y is left out, a repeated step counts once, and unsorted
rows are sorted; each adds a note that becomes a warning of the curve.  Any other
doubtful input raises CurveError, here or in `records.make_curve`.

One file above 400 lines: a curve is made in one pass over the rows of its run.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scalerl_jax.process.printing import shown
from scalerl_jax.scaling.mixtures import (
    SEED_NAMES,
    alternating,
    hint_of_numbers,
    refuse_mixture,
)
from scalerl_jax.scaling.records import (
    DEFAULT_X,
    DEFAULT_Y,
    TOKENS_X,
    Array,
    Curve,
    CurveError,
    HeaderError,
    SeveralCurvesError,
    declines,
    make_curve,
)
from scalerl_jax.scaling.resumed import settle
from scalerl_jax.scaling.run_settings import RunSettings, read_settings
from scalerl_jax.scaling.tables import (
    EVALS_NAME,
    RUN_COLUMN,
    Row,
    Table,
    is_empty,
    is_number,
    is_percent,
    is_step,
    read_table,
    starts_at_zero,
    to_number,
)

ERRORS_ENDING = "_se"  # of the column of y's standard errors
_MOST_ERROR = 1e6  # of a rate, which has no error above 1: a mistake, or an overflow
PROMPTS_COLUMN = "prompt_pass_rates"  # of evals.jsonl: a list
SAMPLES_COLUMN = "samples_per_prompt"
_MOST_SAMPLES = 2**31  # of a prompt
# Names that identify no run; the name of their directory is used instead.
_PLAIN_NAMES = ("evals", "trainer_state", "tensorboard")
WALL_TIME = (
    "chip-hours of a CPU are its wall time, which depends on its other load: "
    f"they decide nothing; tokens do not depend on it: --x {TOKENS_X}"
)
Notes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Columns and rows that make a curve; None: the default of the kind of file."""

    x: str | None = None  # column of the compute
    y: str | None = None  # column of the pass rate; "a,b": each is a run
    wide: bool = False  # every column of numbers besides x is a run
    group: str | None = None  # column, or columns "a,b", whose values tell runs apart
    where: Sequence[tuple[str, str]] = ()  # (column, value): other rows are ignored
    se: str | None = None  # column of standard errors; by default `<y>_se`, if any
    samples: str | None = None  # column of the number of samples behind a rate
    reward_range: Sequence[float] | None = None  # y at no and at full success
    one_minus: bool = False  # y is an error rate: the pass rate is 1 - y
    x_scale: float = 1.0  # compute = x_scale * column: rollouts of a step, say
    x_name: str | None = None  # name of the scaled compute
    constants: tuple[str, ...] = ()  # columns of settings, one value for each run
    constant: bool = False  # curves that stay at one value are flat, and not refused
    by_step: bool = False  # without `x` it is the column of steps, if there is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Columns:
    """A selection's columns, by their names in a table."""

    x: str
    ys: list[str]
    group: list[str]
    se: str | None
    samples: str | None
    constants: dict[str, str]  # requested name: column

    @property
    def numbers(self) -> list[str]:
        """The columns that are read as numbers."""
        named = [self.x, *self.ys, self.se, self.samples, *self.constants.values()]
        return [column for column in named if column is not None]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a table, usually those of one run."""

    table: Table
    rows: list[Row]
    run: str = ""  # its name in notes; "" if it is alone

    @property
    def title(self) -> str:
        """The file, and the run if there are several."""
        return f"{self.table.path}{': ' + self.run if self.run else ''}"

    def cells(self, column: str) -> list[object]:
        """Return the cells of a column; None where a row has none."""
        return [row.get(column) for _, row in self.rows]

    def all_numbers(self, column: str) -> bool:
        """Return whether a column holds a number in every row."""
        return all(is_number(cell) for cell in self.cells(column))

    @property
    def chips(self) -> list[str]:
        """The kinds of chips: of its own rows if they name some, else of the table."""
        found = [cell for cell in self.cells("chip") if isinstance(cell, str)]
        return sorted({*found} or {*filter(None, [self.table.chip])})

    def percent_cell(self, column: str) -> object:
        """Return the first cell of a column that has a percent sign."""
        return next((cell for cell in self.cells(column) if is_percent(cell)), None)

    def numbers(self, column: str) -> Array:
        """Return a column as numbers [n]; NaN where a cell is empty.

        Raises:
            CurveError: a cell is not a number, or only some cells have percent signs.
        """
        values = np.empty(len(self.rows))
        for i, (place, row) in enumerate(self.rows):
            try:
                values[i] = to_number(row.get(column), self.table.mark)
            except ValueError as failure:
                raise CurveError(
                    f"{place}: {column} = {row[column]!r} is not a number; mend the "
                    "cell, or empty it to leave the row out"
                ) from failure
        signs = np.array([is_percent(cell) for cell in self.cells(column)], bool)
        bare = np.flatnonzero(~signs & ~np.isnan(values) & (values != 0))
        if signs.any() and bare.size:
            place, row = self.rows[bare[0]]
            raise CurveError(
                f"{place}: {column} = {row[column]!r} has no percent sign, but others "
                "have one; write the column in one way"
            )
        return values

    def filled(self, column: str, y: str, flag: str) -> Array:
        """Return a column of numbers [n]; raise CurveError if one is missing."""
        values = self.numbers(column)
        for i in np.flatnonzero(np.isnan(values)):
            raise CurveError(
                f"{self.rows[i][0]}: {column} is empty, and {y} is not; fill it in, or "
                f"leave {flag} out"
            )
        return values

    def constant(self, column: str) -> float:
        """Return the value of a setting; raise CurveError unless a run has just one."""
        values = np.unique(self.numbers(column))
        values = values[~np.isnan(values)]
        name = self.run or self.table.path
        if values.size == 0:
            raise CurveError(f"{name}: {column} is empty in every row; fill it in")
        if values.size > 1:
            shown = ", ".join(f"{value:g}" for value in values[:5])
            raise CurveError(
                f"{name}: {column} is {shown} in one run, and a setting has one value; "
                "tell the runs apart with --group"
            )
        return float(values[0])

    def complete(self, columns: Sequence[str]) -> tuple["_Rows", Notes]:
        """Return the rows with a number in each column, and a note on all others.

        If the kind of file has empty cells as a rule, the note only counts NaN.
        """
        gaps = {column: np.isnan(self.numbers(column)) for column in columns}
        gap = np.logical_or.reduce(list(gaps.values()))
        kept = [row for row, lacks in zip(self.rows, gap, strict=True) if not lacks]
        if not kept:
            have = [f"{c} in {int((~lacks).sum())}" for c, lacks in gaps.items()]
            raise CurveError(
                f"{self.title}: no row has a number in {' and '.join(columns)} (of "
                f"{len(self.rows)}, {', '.join(have)}); fill them in, or choose other "
                "columns"
            )
        lacking = [column for column, lacks in gaps.items() if lacks.any()]
        told = sum(
            any(
                gaps[c][i] and not (self.table.sparse and _is_absent(row.get(c)))
                for c in lacking
            )
            for i, (_, row) in enumerate(self.rows)
        )
        note = (
            f"{self.title}: {told} of {len(self.rows)} rows left out: no number in "
            f"{' or '.join(lacking)}"
        )
        return dataclasses.replace(self, rows=kept), (note,) if told else ()

    def settle(self, key: str, y: str) -> tuple["_Rows", Notes]:
        """Return the rows that count, in order of the key, and notes: see `settle`."""
        keys = self.numbers(key).tolist()
        if all(a < b for a, b in itertools.pairwise(keys)):
            return self, tuple(f"{self.title}: {n}" for n in alternating(self.rows, y))
        refuse_mixture(self.rows, keys, key, y)
        found = settle(keys)
        rows = [self.rows[i] for i in found.order]
        notes = *found.notes(key), *hint_of_numbers(self.rows, keys, key, y)
        notes = tuple(f"{self.title}: {note}" for note in notes)
        return dataclasses.replace(self, rows=rows), notes

    def newest_at_each(self, x: str) -> tuple["_Rows", Notes]:
        """Return the last of neighbouring rows with equal x, and a note on the others.

        A sampler that has finished a run's rollouts generates no token between its last
        evaluations: the newest policy is the result of that compute.
        """
        values = self.numbers(x)
        newest = np.append(values[:-1] != values[1:], True)
        rows = [row for row, kept in zip(self.rows, newest, strict=True) if kept]
        left = len(self.rows) - len(rows)
        note = (
            f"{self.title}: {left} of {len(self.rows)} rows left out: no {x} between "
            "them and the next one"
        )
        return dataclasses.replace(self, rows=rows), (note,) if left else ()


def _is_absent(cell: object) -> bool:
    """Return whether a cell is missing or empty; NaN is neither."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


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
        raise SeveralCurvesError(
            f"{path}: {len(curves)} curves where one is needed: {names}; choose one "
            "with --where COLUMN=VALUE, or --y where each column is a run"
        )
    return curves[0]


def load_curves(
    path: str | Path, *, selection: Selection | None = None, **columns: object
) -> list[Curve]:
    """Read the curves of a run directory or file, in order of appearance.

    The row with step 0, if there is one, is the zero-compute point.  Rows without a
    number in x or y are left out, and a repeated step (of a resumed run) counts once,
    with its last row.

    Args:
        path: what `tables.read_table` reads.
        selection: which columns and rows.
        columns: fields of `Selection` by name, instead of it: `x="gpu_hours"`.

    Raises:
        CurveError: a missing column, a cell that is not a number, or a curve that
            cannot be fitted; the message says how to mend it.
    """
    chosen = selection or Selection()
    chosen = dataclasses.replace(chosen, **columns)  # pyright: ignore[reportArgumentType]
    table = read_table(path)
    if not table.rows:
        raise CurveError(f"{table.path}: no rows; has the run been evaluated yet?")
    found = _find_columns(table, chosen)
    table, notes = table.with_mark(found.numbers)
    runs = _split(table, _rows_asked(table, chosen), found)
    wide = chosen.wide or len(found.ys) > 1
    several = len(runs) > 1 or wide
    directory = _directory_of(table)
    evaluated = directory.evaluated() if directory else {}
    curves, unusable = [], []
    for (run, rows), y in itertools.product(runs.items(), found.ys):
        name = run
        if wide:
            name = f"{run}, {y}" if len(runs) > 1 else y
        part = _Rows(table, rows, run=name if several else "")
        try:
            curve = _make(part, y, found, chosen, wide=wide)
        except CurveError as failure:
            if not several:
                raise
            unusable.append(failure)
            continue
        values = [str(rows[0][1].get(column)) for column in found.group]
        recipe, seed = "", ""
        if not wide:
            recipe, seed = _recipe(table, values, found.group, directory)
        curve = dataclasses.replace(
            curve, name=shown(name), recipe=recipe, seed=seed, **evaluated
        )
        curves.append(curve)
    if not curves:
        raise unusable[0]
    notes += tuple(f"a run is left out: {failure}" for failure in unusable)
    return [dataclasses.replace(c, warnings=(*notes, *c.warnings)) for c in curves]


@dataclasses.dataclass(frozen=True)
class Points:
    """Rows of a table that are separate points, not a curve."""

    names: tuple[str, ...]  # of the columns
    values: list[Array]  # [n] each
    notes: Notes


def load_columns(
    path: str | Path, named: dict[str, str | None], selection: Selection
) -> Points:
    """Read columns of a table as numbers; rows that lack one are left out.

    Args:
        path: what `tables.read_table` reads.
        named: column by the flag that names it; None: the x of this kind of file.
        selection: its `where` chooses the rows.
    """
    table = read_table(path)
    if not table.rows:
        raise CurveError(f"{table.path}: no rows")
    columns = [table.require(f, c or table.default_x) for f, c in named.items()]
    table, notes = table.with_mark(columns)
    rows, left_out = _Rows(table, _rows_asked(table, selection)).complete(columns)
    values = [rows.numbers(column) for column in columns]
    runs = {str(row.get(RUN_COLUMN)): row for _, row in rows.rows}
    told = [n for row in runs.values() for n in table.notes_on(columns, row)]
    notes += tuple(f"{table.path}: {note}" for note in dict.fromkeys(told))
    return Points(tuple(columns), values, (*notes, *left_out))


def _find_columns(table: Table, chosen: Selection) -> _Columns:
    """Return the columns of a selection; raise with all columns if one is missing."""

    def named(flag: str, name: str | None) -> str | None:
        return None if name is None else table.require(flag, name)

    group = chosen.group or table.group
    found = _Columns(
        x=_find_x(table, chosen),
        ys=[],
        group=[] if group is None else table.require_all("--group", group),
        se=named("--se", chosen.se),
        samples=named("--samples", chosen.samples),
        constants={c: table.require("the setting", c) for c in chosen.constants},
    )
    if chosen.wide:
        return dataclasses.replace(found, ys=_wide_columns(table, chosen, found))
    y = chosen.y or table.y
    ys = [table.require("--y", y)] if y is None else table.require_all("--y", y)
    return dataclasses.replace(found, ys=ys)


def _find_x(table: Table, chosen: Selection) -> str:
    """Return the column of x."""
    try:
        return table.require("--x", chosen.x or _usual_x(table, chosen))
    except CurveError as error:
        # Other kinds of files have a row's columns in the row, and a column that is
        # named may be new in a header that a logger writes again.
        if chosen.x or table.delimiter is None:
            raise
        raise HeaderError(str(error)) from error


def _usual_x(table: Table, chosen: Selection) -> str | None:
    """Return the default column of x: tokens for a run on a CPU."""
    if chosen.by_step and table.step is not None:
        return table.step
    usual = table.default_x
    if usual is None or not _on_a_cpu(usual, [table.chip]):
        return usual
    tokens = usual.removesuffix(DEFAULT_X) + TOKENS_X
    return tokens if tokens in table.columns else usual


def _on_a_cpu(x: str, chips: Sequence[str | None]) -> bool:
    """Return whether x is chip-hours, and a chip of these is a CPU."""
    return x.endswith(DEFAULT_X) and "cpu" in chips


def _recipe(
    table: Table,
    run: Sequence[str],
    group: Sequence[str],
    directory: RunSettings | None,
) -> tuple[str, str]:
    """Return a text that is equal for runs that differ only in seed, and the seed.

    The text has the settings of a run directory without the seed, or the values of
    --group's columns without those of seeds.  "" stands for what is unknown.
    """
    others, seeds = [], []
    for value, column in zip(run, group, strict=True):
        (seeds if column.casefold() in SEED_NAMES else others).append(value)
    if seeds:  # a column of numbers with gaps has 0.0 for 0
        seed = ", ".join(value.removesuffix(".0") for value in seeds)
        return f"{table.path}: {', '.join(others)}", seed
    return directory.recipe() if directory and not group else ("", "")


def _directory_of(table: Table) -> RunSettings | None:
    """Return the settings of a run directory; None for other files.

    Settings beside other files may not be those of each run in them.
    """
    own = table.path.name == EVALS_NAME
    return RunSettings(table.path.parent) if own else None


def _wide_columns(table: Table, chosen: Selection, found: _Columns) -> list[str]:
    """Return the columns that are runs: all of numbers that have no other use."""
    if chosen.y is not None:
        raise CurveError(
            f"--wide takes every column of numbers as a run, and --y {chosen.y} names "
            "them: give one of the two"
        )
    asked = (table.require("--where", column) for column, _ in chosen.where)
    others = {*found.numbers, *found.group, *asked}
    ys = [c for c in table.columns if c not in others and _holds_rates(table, c)]
    if not ys:
        raise CurveError(
            f"{table.path}: --wide finds no column of numbers besides {found.x}; name "
            f"the runs with --y, from: {', '.join(table.columns)}"
        )
    return ys


def _holds_rates(table: Table, column: str) -> bool:
    """Return whether a wide table's column is a run: numbers, no steps, no errors."""
    rates = column.removesuffix(ERRORS_ENDING)
    if is_step(column) or (rates != column and rates in table.columns):
        return False
    cells = [row.get(column) for _, row in table.rows]
    filled = [cell for cell in cells if not is_empty(cell)]
    return bool(filled) and all(is_number(cell) for cell in filled)


def _rows_asked(table: Table, chosen: Selection) -> list[Row]:
    """Return the rows that `where` selects."""
    where = [(table.require("--where", name), value) for name, value in chosen.where]
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


def _cell_is(table: Table, cell: object, value: str) -> bool:
    """Return whether a cell is what was typed, as a number or as text."""
    try:
        return to_number(cell, table.mark) == float(value)
    except ValueError:
        return str(cell) == value


def _split(table: Table, rows: list[Row], columns: _Columns) -> dict[str, list[Row]]:
    """Return the rows of each run that logs x and y."""
    path = table.path.absolute()  # "." has no name
    name = path.name if path.is_dir() else path.stem
    if name in _PLAIN_NAMES:
        name = path.resolve().parent.name
    if not columns.group:
        return {name: rows}
    runs: dict[str, list[Row]] = {}
    for place, row in rows:
        run = ", ".join(str(row.get(column)) for column in columns.group)
        runs.setdefault(run, []).append((place, row))
    if not table.sparse or len(runs) == 1:
        return runs
    x, ys = columns.x, columns.ys
    logged = [
        n for n, rs in runs.items() if any(x in r and y in r for _, r in rs for y in ys)
    ]
    return {name: runs[name] for name in logged} or runs


def _make(
    part: _Rows, y: str, columns: _Columns, chosen: Selection, *, wide: bool
) -> Curve:
    """Return the checked curve of one run."""
    x, step = columns.x, part.table.step
    told = part.table.notes_on((y,), part.rows[0][1])
    told = tuple(f"{part.title}: {note}" for note in told)
    part, gaps = part.complete([x, y])
    if step is not None and not part.all_numbers(step):
        step = None
    part, order = part.settle(step or x, y)
    if x.endswith(TOKENS_X) and step is not None:
        part, same = part.newest_at_each(x)
        order += same
    with np.errstate(over="ignore"):  # inf is refused by name
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
    rates, y_name, read = _rates(part, y, chosen)
    is_wall_time = _on_a_cpu(x, part.chips)
    wall = (WALL_TIME,) if is_wall_time else ()
    curve = make_curve(
        compute,
        rates,
        y_se=_errors(part, y, rates, columns, chosen),
        names=(chosen.x_name or asked, y_name),
        name=part.run,
        places=[place for place, _ in part.rows],
        constant=chosen.constant,
    )
    by_prompt = _prompt_rates(part) if y == y_name == DEFAULT_Y else None
    zero = None if by_prompt is None or curve.r0 is None else by_prompt[0]
    return dataclasses.replace(
        curve,
        prompt_rates=None if by_prompt is None else by_prompt[-curve.x.size :],
        r0_prompt_rates=zero,
        y_name=y_name.replace(y, DEFAULT_Y, 1) if wide else y_name,
        warnings=(
            *told,
            *gaps,
            *order,
            *read,
            *_errors_left_out(part, y, columns),
            *wall,
        ),
        is_wall_time=is_wall_time,
        chip=", ".join(part.chips),
        x_column=asked,
        last_step=last_step,
        samples_per_prompt=_samples(part),
        constants={n: part.constant(c) for n, c in columns.constants.items()},
    )


def _rates(part: _Rows, y: str, chosen: Selection) -> tuple[Array, str, Notes]:
    """Return pass rates [n], their name, and notes on how they were read."""
    what = f"{part.table.path}: {y}"
    values, name, notes = part.numbers(y), y, []
    parts = part.table.parts_of(y)
    outside = ((values < 0) | (values > 1)).any()
    if chosen.reward_range is None and parts:
        if outside or (chosen.y is None and len(parts) > 1):
            raise CurveError(
                f"{what} is a weighted sum of rewards, from {values.min():g} to "
                f"{values.max():g}: choose one with --y, from: {', '.join(parts)}; or "
                f"give --y {y} --map-rewards LOW HIGH, the least and the most it can be"
            )
    percent = part.percent_cell(y)
    if percent is not None:
        if chosen.reward_range is not None:
            raise CurveError(
                f"{what} = {percent!r} is read as hundredths, so it is not to be "
                "mapped; leave --map-rewards out"
            )
        number = f"{to_number(percent, part.table.mark):.10g}"
        notes.append(f"{what} has percent signs: {percent!r} is read as {number}")
    if chosen.reward_range is not None:
        low, high = chosen.reward_range
        values = _mapped(values, low, high, what)
        name = f"{name}, mapped from [{low:g}, {high:g}]"
    if chosen.one_minus:
        if ((values < 0) | (values > 1)).any():
            raise CurveError(
                f"{what} reaches from {values.min():g} to {values.max():g}, outside "
                "[0, 1] where error rates lie for --one-minus; give --map-rewards 0 "
                "100 too for percent, and fit a loss by --law kaplan_one"
            )
        return 1.0 - values, f"1 - {name}", tuple(notes)
    if y != DEFAULT_Y and declines(values):
        notes.append(
            f"{what} falls, from {values[0]:g} to {values[-1]:g}: if it is an error "
            "rate, give --one-minus; if it is a loss, fit --law kaplan_one"
        )
    return values, name, tuple(notes)


def _mapped(rewards: Array, low: float, high: float, what: str) -> Array:
    """Return rewards [n] as pass rates: (reward - low) / (high - low)."""
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


def _prompt_rates(part: _Rows) -> Array | None:
    """Return pass rates of each prompt [n, P], or None if an evaluation lacks some.

    A prompt that was not judged, whose rate is null, cannot be paired.
    """
    rates = [cell for cell in part.cells(PROMPTS_COLUMN) if isinstance(cell, list)]
    if len(rates) < len(part.rows) or len({len(each) for each in rates}) != 1:
        return None
    for rate in itertools.chain.from_iterable(rates):
        if not (isinstance(rate, int | float) and 0 <= rate <= 1):
            return None
    return np.array(rates, np.float64)


def _samples(part: _Rows) -> int | None:
    """Return the completions behind a prompt's pass rate; None if they are unknown."""
    found = part.rows[-1][1].get(SAMPLES_COLUMN)
    if isinstance(found, int | float) and 1 <= found < _MOST_SAMPLES:
        return int(found)
    return None


def _errors(
    part: _Rows, y: str, rates: Array, columns: _Columns, chosen: Selection
) -> Array | None:
    """Return standard errors of the rates [n]; None if not every row has one.

    From `samples` they are binomial, sqrt(p (1 - p) / n), with p = (successes + 1) /
    (n + 2), so that a rate of 0 or 1 has an error above 0.
    """
    if columns.samples is not None:
        count = part.filled(columns.samples, y, "--samples")
        if (count < 1).any():
            raise CurveError(f"--samples {columns.samples}: a rate is of at least 1")
        share = (rates * count + 1.0) / (count + 2.0)
        return np.sqrt(share * (1.0 - share) / count)
    column = columns.se or y + ERRORS_ENDING
    if columns.se is None and not part.all_numbers(column):
        return None
    errors = part.filled(column, y, "--se")
    one, other = (part.percent_cell(name) is None for name in (y, column))
    if one != other and errors.any():
        raise CurveError(
            f"{part.table.path}: only one of {y} and {column} has percent signs; "
            "write both in one way"
        )
    low, high = chosen.reward_range or (0.0, 1.0)
    if not np.all((errors >= 0) & (errors < _MOST_ERROR * (high - low))):
        raise CurveError(
            f"{part.rows[0][0]}: {column} holds standard errors that are negative, not "
            f"finite, or {_MOST_ERROR:g} times the range of {y}; mend them, or name "
            "another column with --se"
        )
    return errors / (high - low)


def _errors_left_out(part: _Rows, y: str, columns: _Columns) -> Notes:
    """Return a note if y has standard errors, but not in every row: none are used."""
    column = y + ERRORS_ENDING
    given = [is_number(cell) for cell in part.cells(column)]
    if columns.se or columns.samples or all(given) or not any(given):
        return ()
    return (
        f"{part.title}: {column} has no number in {len(given) - sum(given)} of "
        f"{len(given)} points, and is left out; --se {column} says in which",
    )


def when_enough(folder: Path, missing: int) -> str:
    """Return a text on when a run has `missing` more evaluations; "": unknown."""
    try:
        rows = [row for _, row in read_table(folder / "metrics.jsonl").rows]
        settings = read_settings(folder)
        every, last = settings["eval"]["every"], settings["train"]["num_steps"]
        done, seconds = rows[-1]["step"], np.mean([row["time/step_s"] for row in rows])
        enough = (done // every + missing) * every
        minutes = (enough - done) * seconds / 60.0
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError):
        return ""  # no files of a run, or not of this version
    more = "" if enough <= last else f": go on with --config.train.num_steps={enough}"
    return (
        f". That is step {enough} of {last}, {minutes:.1f} more minutes at "
        f"{seconds:.1f} s a step{more}"
    )
