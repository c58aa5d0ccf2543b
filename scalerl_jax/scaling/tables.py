"""Files read as tables: rows with named cells, each with its file and line.

Text with separators, JSONL, TRL's trainer_state.json, W&B's charts, TensorBoard's event
files (read by the tensorboard package itself; TensorFlow is not needed).  A cell is
empty, a number of JSON, or text as people and spreadsheets write it: "20,000,000",
"0,53", "20.3%".  Whether "," or "." is the decimal mark is decided once for a whole
file (`Table.with_mark`): the program that wrote it had one of them.

One file above 400 lines: every kind of file ends in the same table and cells.
"""

import collections
import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from scalerl_jax.formats.bounded import MOST_WHOLE, read_bytes, read_lines
from scalerl_jax.formats.reading import parse_json, read_json, read_value
from scalerl_jax.formats.remote import files_of_run
from scalerl_jax.scaling.event_files import PATTERN, read_series
from scalerl_jax.scaling.records import (
    DEFAULT_X,
    DEFAULT_Y,
    TOKENS_X,
    CurveError,
    SeveralCurvesError,
)

Mark = Literal[".", ","]
MARKS: tuple[Mark, ...] = (".", ",")
Cell = tuple[str, str, object]  # file and line, column, content
Row = tuple[str, dict[str, Any]]  # "file:line" and the cells there

EMPTY = frozenset(["", "nan", "na", "n/a", "#n/a", "null", "none", "-", "--"])
# Thousands separators besides the mark that is not decimal: spaces, apostrophe.
_SPACES = " \u00a0\u2009\u202f'"
_GROUPED = {
    mark: re.compile(
        rf"[+-]?\d{{1,3}}([{other}{_SPACES}])\d{{3}}(\1\d{{3}})*([{mark}]\d*)?"
    )
    for mark, other in ((".", ","), (",", "."))
}
STEP_COLUMN = "step"
# Its names in trainers' logs, best first: W&B's _step counts log calls, not steps.
STEP_NAMES = (STEP_COLUMN, "global_step", "_step")
RUN_COLUMN = "run"
EVALS_NAME = "evals.jsonl"
LEDGER_NAME = "ledger.json"
TRAINER_STATE_NAME = "trainer_state.json"
STUDY_CURVES = ("curves.parquet", "curves.csv")  # of an exported study
STUDY_GROUP = ("arm", "seed")
DELIMITERS = (",", ";", "\t")
SNIFFED_LINES = 40
TENSORBOARD_HEADER = ["Wall time", "Step", "Value"]  # of an exported scalar
WANDB_SEPARATOR = " - "  # "run name - metric"
WANDB_ENVELOPES = ("__MIN", "__MAX")  # of the steps that one exported point stands for
TIME_COLUMN = "wall_time_s"  # since the run's first event
EVENTS_PREFIX = "eval/"  # of the tags of this package's own evaluations
LONGEST_NAME = 500  # letters of a column's name
# "(TaskRunner pid=1) step:5 - critic/score/mean:0.1 - ...", as verl prints it.
_CONSOLE_LINE = re.compile(r"(?:^|\s)step:(\d{1,18}) - (.*)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST_CONSOLE_LINE = 2**22  # bytes
_MOST_PARQUET_ROWS, _PARQUET_ROWS = 2**22, 64  # in all; unpacked at once
_NUMPY_NUMBER = re.compile(r"^np\.\w+\((.*)\)$")
_SHOWN = 50  # columns that a message lists
_KNOWN = (
    f"give a run directory with {EVALS_NAME}, a .jsonl (one object per line), .csv or "
    f".tsv (with a header) or .parquet file, {TRAINER_STATE_NAME}, a .json array of "
    f"objects, a .log of verl, or TensorBoard event files"
)


def is_empty(cell: object) -> bool:
    """Return whether a cell holds nothing, or NaN."""
    if isinstance(cell, str):
        return cell.strip().casefold() in EMPTY
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def is_percent(cell: object) -> bool:
    """Return whether a cell is text with a percent sign."""
    return isinstance(cell, str) and cell.rstrip().endswith("%")


def to_number(cell: object, mark: Mark = ".") -> float:
    """Return a cell as a number; NaN for an empty one, hundredths for a percent sign.

    Raises:
        ValueError: the cell is not a number with this decimal mark.
    """
    if is_empty(cell):
        return math.nan
    if isinstance(cell, int | float):
        try:
            return float(cell)
        except OverflowError as error:
            raise ValueError("it is too large for a number") from error
    if not isinstance(cell, str):
        raise ValueError(f"{type(cell).__name__} is no number")
    text = cell.strip().replace("\u2212", "-").removesuffix("%").rstrip()
    if _GROUPED[mark].fullmatch(text):
        text = re.sub(rf"[^\d+\-{mark}]", "", text)
    if mark == ",":
        if "." in text:
            raise ValueError("a decimal point among decimal commas")
        text = text.replace(",", ".")
    return float(text) / (100.0 if is_percent(cell) else 1.0)


def is_number(cell: object) -> bool:
    """Return whether a cell is a number, with either decimal mark."""
    for mark in MARKS:
        try:
            return not math.isnan(to_number(cell, mark))
        except ValueError:
            continue
    return False


def _mark_of(text: str) -> Mark | None:
    """Return the decimal mark that a number must have, or None if it is undecided."""
    body = re.sub(r"[eE][+-]?\d+$", "", text.strip().removesuffix("%").strip())
    body = re.sub(rf"[{_SPACES}]", "", body).lstrip("+-\u2212")
    if not re.fullmatch(r"[\d.,]*\d[\d.,]*", body):
        return None
    used: list[Mark] = [mark for mark in MARKS if mark in body]
    if len(used) == 2:  # the last one, as the other groups the digits before it
        return max(used, key=body.rfind)
    (mark,) = used
    if body.count(mark) > 1:
        return "," if mark == "." else "."
    before, after = body.split(mark)
    if len(after) == 3 and 1 <= len(before) <= 3 and before[0] != "0":
        return None
    return mark


def is_step(column: str) -> bool:
    """Return whether a column counts steps: Step, train/global_step, _step."""
    return _last_part(column) in STEP_NAMES


def unit_of(column: str) -> str:
    """Return a column's name as it is in files of all kinds: step, pass_rate."""
    return STEP_COLUMN if is_step(column) else column.removeprefix(EVENTS_PREFIX)


def starts_at_zero(step: str) -> bool:
    """Return whether step 0 of a column is before training; W&B's _step 0 is not."""
    return _last_part(step) != STEP_NAMES[-1]


def _last_part(column: str) -> str:
    return column.casefold().rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one file or directory, with the x and y columns of its kind."""

    path: Path
    rows: list[Row]
    x: str | None = DEFAULT_X  # None: the user must name it
    y: str | None = DEFAULT_Y
    group: str | None = None  # column whose values tell runs apart
    sparse: bool = False  # a row may lack columns
    delimiter: str | None = None  # of a text file
    mark: Mark = "."  # the decimal mark of cells that are text
    # The reader's notes, by run and column; "" stands for all of them.
    notes: Mapping[tuple[str, str], tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )

    @functools.cached_property
    def columns(self) -> list[str]:
        """Columns that occur, in order of appearance."""
        return list(dict.fromkeys(name for _, row in self.rows for name in row))

    @functools.cached_property
    def chip(self) -> str | None:
        """The kind of chip, from its rows or from the ledger of its directory."""
        if self.rows and isinstance(self.rows[0][1].get("chip"), str):
            return self.rows[0][1]["chip"]
        for folder in [self.path, *self.path.parents][:4]:  # event files are below it
            with contextlib.suppress(ValueError):
                chip = read_json(folder / LEDGER_NAME).get("chip")
                return chip if isinstance(chip, str) else None
        return None

    @property
    def step(self) -> str | None:
        """The column that counts steps, if there is one."""
        found = [column for column in self.columns if is_step(column)]
        return min(found, key=lambda c: STEP_NAMES.index(_last_part(c)), default=None)

    @property
    def default_x(self) -> str | None:
        """The x column unless the user names one: the file kind's, else the step."""
        return self.x if self.x in self.columns else self.step or self.x

    def find(self, name: str) -> str | None:
        """Return the column with a name, in any case; for a step, any step column."""
        if name in self.columns:
            return name
        alike = [c for c in self.columns if c.casefold() == name.casefold()]
        if len(alike) == 1:
            return alike[0]
        return self.step if is_step(name) else None

    def notes_on(self, columns: Sequence[str], row: Mapping[str, Any]) -> list[str]:
        """Return the reader's notes on `columns`, in the run of a row."""
        run = str(row.get(RUN_COLUMN, ""))
        places = [("", ""), (run, ""), *((run, column) for column in columns)]
        said = [self.notes.get(place, ()) for place in places]
        return list(dict.fromkeys(itertools.chain.from_iterable(said)))

    def parts_of(self, y: str) -> list[str]:
        """Return the columns that TRL's `reward` is the weighted sum of."""
        if y not in ("reward", "eval_reward"):
            return []
        ends = ("/std", "_std")
        return [
            c for c in self.columns if c.startswith(f"{y}s/") and not c.endswith(ends)
        ]

    def require(self, flag: str, name: str | None) -> str:
        """Return an existing column; otherwise raise with the list of columns."""
        column = None if name is None else self.find(name)
        if column is None:
            fault = "no column is given" if name is None else f"no column {name!r}"
            known = ", ".join(self.columns[:_SHOWN])
            if len(self.columns) > _SHOWN:
                known += f" and {len(self.columns) - _SHOWN} more"
            raise CurveError(f"{self.path}: {fault}; choose {flag} from: {known}")
        return column

    def require_all(self, flag: str, names: str) -> list[str]:
        """Return the columns of a list "a,b"; a column's name may have a comma."""
        if self.find(names) is not None or "," not in names:
            return [self.require(flag, names)]
        return [self.require(flag, name.strip()) for name in names.split(",")]

    def with_mark(self, columns: Sequence[str]) -> tuple["Table", tuple[str, ...]]:
        """Return the table with its decimal mark, and a note if that is not obvious.

        "0,53" can only have a decimal comma and "20,000,000" only a point; "1,500" may
        be either.  Where no cell decides, a comma is decimal in a file that ";"
        separates, as spreadsheets write it where the comma is decimal; elsewhere it
        groups thousands.

        Args:
            columns: those read as numbers; only cells that are text count.

        Raises:
            CurveError: some cells have decimal commas and others decimal points.
        """
        decided: dict[Mark, Cell] = {}
        open_comma: Cell | None = None
        for (place, row), column in itertools.product(self.rows, columns):
            cell = row.get(column)
            if not isinstance(cell, str) or not ("," in cell or "." in cell):
                continue
            found = _mark_of(cell)
            if found is not None:
                decided.setdefault(found, (place, column, cell))
            elif "," in cell and is_number(cell):
                open_comma = open_comma or (place, column, cell)
        if len(decided) == 2:
            (a, x, comma), (b, y, point) = decided[","], decided["."]
            raise CurveError(
                f"{a}: {x} = {comma!r} has a decimal comma, but {b}: {y} = {point!r} a "
                "decimal point; write all numbers of the file in one way"
            )
        if "," in decided:
            mark: Mark = ","
            _, column, cell = decided[","]
            says = f"read with decimal commas, as {column} = {cell!r} has one"
        elif "." in decided or open_comma is None:
            return self, ()
        else:
            mark = "," if self.delimiter == ";" else "."
            _, column, cell = open_comma
            says = f"{column} = {cell!r} is read as {to_number(cell, mark):.12g}"
        return dataclasses.replace(self, mark=mark), (f"{self.path}: {says}",)


def read_table(path: str | Path) -> Table:
    """Read a file as a table; in a directory, find the file to read.

    A directory may be a run of this package (`evals.jsonl`), of Hugging Face's
    trainers (`trainer_state.json`, or the newest checkpoint's), or hold TensorBoard
    event files at any depth, unless they are those of runs (`runs_below`).  All but
    event files may also be in a bucket.

    Raises:
        CurveError: there is nothing to read; the message lists what can be read.
        ValueError: the bucket lacks the path, or cannot be used.
    """
    given = files_of_run(path)
    file = _find_in(given) if given.is_dir() else given
    if file.is_dir() or ".tfevents." in file.name:
        return _read_events(file)
    if not file.is_file():
        raise CurveError(f"{file}: no such file; {_KNOWN}")
    if file.suffix not in _READERS:
        raise CurveError(f"{file}: unknown kind {file.suffix!r}; {_KNOWN}")
    try:
        table = _READERS[file.suffix](file)
        if file.name in STUDY_CURVES and {*STUDY_GROUP} <= {*table.columns}:
            group = ",".join(STUDY_GROUP)
            return dataclasses.replace(table, x=TOKENS_X, group=group)
        return table
    except CurveError:
        raise
    except UnicodeDecodeError as failure:
        raise CurveError(
            f"{file}: not UTF-8 text ({failure.reason}); save it as UTF-8, which "
            "spreadsheets call CSV UTF-8"
        ) from failure
    except ValueError as failure:  # raised by `formats.reading`
        raise CurveError(str(failure)) from failure


def _own_file(folder: Path) -> Path | None:
    names = (EVALS_NAME, TRAINER_STATE_NAME, *STUDY_CURVES)
    return next((folder / n for n in names if (folder / n).is_file()), None)


def runs_below(path: Path) -> list[Path]:
    """Return the runs of this package below a directory that has no curve itself."""
    if not path.is_dir() or _own_file(path):
        return []
    files = (file for file in path.rglob(EVALS_NAME) if file.is_file())
    return sorted(file.parent for file in files)


def _find_in(folder: Path) -> Path:
    """Return the file of a directory that holds its curve; itself, for event files."""
    if own := _own_file(folder):
        return own
    if runs := runs_below(folder):
        raise SeveralCurvesError(
            f"{folder}: {len(runs)} runs are below this directory: read each of them, "
            f"as {runs[0]}"
        )
    saved = [
        (int(state.parent.name.split("-")[1]), state)
        for state in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
        if state.parent.name.split("-")[1].isdigit()
    ]
    if saved:
        return max(saved)[1]
    if next(folder.rglob(PATTERN), None) is not None:
        return folder
    raise CurveError(f"{folder}: nothing to read in this directory; {_KNOWN}")


def _read_delimited(file: Path) -> Table:
    """Read text with a header and separators (",", ";" or tab); cells stay text."""
    text = read_bytes(file, most=MOST_WHOLE).decode("utf-8-sig")
    lines = list(io.StringIO(text, newline=""))
    hint = re.fullmatch("sep=(.)", lines[0].rstrip("\r\n")) if lines else None
    skipped = int(hint is not None)  # the line that names the delimiter
    filled = [line for line in lines if line.strip()]
    delimiter = hint[1] if hint else _delimiter(filled[:SNIFFED_LINES])
    reader = csv.reader(lines[skipped:], delimiter=delimiter, skipinitialspace=True)
    try:
        # Spreadsheets leave empty rows behind, above the header too.
        cells = [
            (reader.line_num + skipped, row)
            for row in reader
            if any(cell.strip() for cell in row)
        ]
    except csv.Error as failure:
        line = max(reader.line_num + skipped, 1)
        raise CurveError(f"{file}:{line}: {failure}; mend the line") from failure
    header = [name.strip() for name in cells[0][1]] if cells else []
    for name, count in collections.Counter(filter(None, header)).items():
        if count > 1:
            raise CurveError(f"{file}: two columns are called {name!r}; rename one")
    rows = [
        (f"{file}:{line}", _by_column(f"{file}:{line}", header, row, delimiter))
        for line, row in cells[1:]
    ]
    enveloped = any(name.endswith(WANDB_ENVELOPES) for name in header)
    metrics = len(header) > 1 and all(WANDB_SEPARATOR in name for name in header[1:])
    if enveloped or metrics:
        return _wandb_table(file, header, rows)
    if header == TENSORBOARD_HEADER:
        _, x, y = header
        return Table(path=file, rows=rows, x=x, y=y, delimiter=delimiter)
    return Table(path=file, rows=rows, delimiter=delimiter)


def _by_column(
    place: str, header: list[str], row: list[str], delimiter: str
) -> dict[str, str | None]:
    """Return the cells of a row by their columns; None where the row is short."""
    if any(cell.strip() for cell in row[len(header) :]):
        raise CurveError(
            f"{place}: more cells than the header's {len(header)} columns; quote cells "
            f"that contain {delimiter!r}"
        )
    padded = [*row, *[None] * (len(header) - len(row))]
    return {name: cell for name, cell in zip(header, padded, strict=False) if name}


def _delimiter(lines: list[str]) -> str:
    """Choose the delimiter that makes most numbers in rows as long as the header."""

    def score(delimiter: str) -> tuple[int, int]:
        try:
            header, *rows = [*csv.reader(lines, delimiter=delimiter)] or [[]]
        except csv.Error:  # a cell that is too long: reading it raises
            return 0, 0
        if len(header) < 2:
            return 0, 0
        full = [row for row in rows if len(row) == len(header)]
        return sum(is_number(cell) for row in full for cell in row), len(header)

    return max(DELIMITERS, key=score)


def _wandb_table(file: Path, header: list[str], rows: list[Row]) -> Table:
    """Read a chart that Weights & Biases exported: one row per run and step.

    Its header is the x axis, then "run name - metric", "run name - metric__MIN" and
    "...__MAX" for every run; the envelopes are left out, and so is an empty cell: a
    run has no value at the steps of others.
    """
    x, *others = header
    series = {
        name: name.rsplit(WANDB_SEPARATOR, 1)
        for name in others
        if WANDB_SEPARATOR in name and not name.endswith(WANDB_ENVELOPES)
    }
    long: dict[tuple[int, str], Row] = {}
    for number, (place, row) in enumerate(rows):
        for name, (run, metric) in series.items():
            if row[name] not in (None, ""):
                cells = {x: row[x], RUN_COLUMN: run}
                _, found = long.setdefault((number, run), (place, cells))
                found[metric] = row[name]
    metrics = dict.fromkeys(m for _, m in series.values() if not m.startswith("_"))
    return Table(
        path=file,
        rows=list(long.values()),
        x=x,
        y=next(iter(metrics)) if len(metrics) == 1 else None,
        group=RUN_COLUMN,
        sparse=True,
    )


def _read_jsonl(file: Path) -> Table:
    """Read the objects of a JSONL file; blank lines are skipped.

    A last line that a kill left half written is left out, with a note.
    """
    rows, notes = [], ()
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = parse_json(line)
        except ValueError as failure:
            if isinstance(failure.__cause__, UnicodeDecodeError):
                raise failure.__cause__ from None
            if rows and not line.endswith(b"\n"):
                notes = (f"line {number}, the last, is half written and left out",)
                break
            raise CurveError(
                f"{place}: not valid JSON ({failure}); remove the line"
            ) from failure
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise CurveError(f"{place}: holds {kind}, not an object with named columns")
        rows.append((place, row))
    rows, nested = _flat(rows)
    return Table(path=file, rows=rows, sparse=nested, notes={("", ""): notes})


def _flat(rows: list[Row]) -> tuple[list[Row], bool]:
    """Return rows with nested objects flattened, and whether there were any.

    A cell of an object becomes a column "outer/inner"; if all objects are in one
    column, as in verl's {"step": 1, "data": {...}}, it keeps its own name.

    Raises:
        CurveError: the name of a column is too long.
    """
    outer = {n for _, row in rows for n, cell in row.items() if isinstance(cell, dict)}
    if not outer:
        return rows, False
    own = {name for _, row in rows for name in row} - outer
    inner = {
        name
        for _, row in rows
        for column in outer
        if isinstance(cell := row.get(column), dict)
        for name in cell
    }
    bare = len(outer) == 1
    flat: list[Row] = []
    for place, row in rows:
        cells: dict[str, Any] = {}
        todo = list(reversed(row.items()))
        while todo:
            name, cell = todo.pop()
            if len(name) > LONGEST_NAME:
                raise CurveError(
                    f"{place}: a column's name has {len(name)} letters; "
                    f"{LONGEST_NAME} at most"
                )
            if not isinstance(cell, dict):
                cells[name] = cell
                continue
            prefix = "" if bare and name in outer and not own & inner else f"{name}/"
            todo += [(prefix + key, part) for key, part in reversed(cell.items())]
        flat.append((place, cells))
    return flat, True


def _read_json(file: Path) -> Table:
    """Read an array of objects, or `log_history` of a Hugging Face trainer's state."""
    found = read_value(file)
    if isinstance(found, list):
        for i, row in enumerate(found):
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise CurveError(f"{file}: [{i}] holds {kind}, not an object")
        rows, nested = _flat([(f"{file}: [{i}]", row) for i, row in enumerate(found)])
        return Table(path=file, rows=rows, sparse=nested)
    history = found.get("log_history") if isinstance(found, dict) else None
    if not isinstance(history, list) or not all(isinstance(r, dict) for r in history):
        raise CurveError(
            f"{file}: no list log_history of objects, as {TRAINER_STATE_NAME} has, or "
            f"no array of objects; {_KNOWN}"
        )
    rows = [(f"{file}: log_history[{i}]", row) for i, row in enumerate(history)]
    evaluated = any("eval_reward" in row for row in history)
    y = "eval_reward" if evaluated else "reward"
    return Table(path=file, rows=rows, x=STEP_COLUMN, y=y, sparse=True)


def _read_parquet(file: Path) -> Table:
    """Read a Parquet file, one row per point, up to the size limit of text files.

    One stored value can be that of every row, so the limit is on the size of the rows
    as they are unpacked, a few at a time.
    """
    import pyarrow  # here: a heavy library that no other kind of file needs
    import pyarrow.parquet

    rows: list[dict[str, Any]] = []
    size = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            if opened.metadata.num_rows > _MOST_PARQUET_ROWS:
                raise CurveError(
                    f"{file}: {opened.metadata.num_rows:,} rows, and "
                    f"{_MOST_PARQUET_ROWS:,} are the most; give a part of them"
                )
            for batch in opened.iter_batches(_PARQUET_ROWS):
                size += sum(_unpacked_bytes(file, each) for each in batch.columns)
                if size > MOST_WHOLE:
                    raise CurveError(
                        f"{file}: more than {MOST_WHOLE:,} bytes of values; give a "
                        f"part of its rows"
                    )
                rows += batch.to_pylist()
    except pyarrow.ArrowException as failure:
        raise CurveError(f"{file}: no Parquet file: {failure}") from failure
    return Table(
        path=file, rows=[(f"{file}:{n}", row) for n, row in enumerate(rows, 1)]
    )


def _unpacked_bytes(file: Path, column: Any) -> int:
    """Return the bytes of an Arrow array in which each row has its own value."""
    if "dictionary<" not in str(column.type):
        return column.nbytes
    try:
        return column.dictionary_decode().nbytes
    except AttributeError:
        raise CurveError(
            f"{file}: a column is {column.type}, which is not read; write its values "
            f"themselves"
        ) from None


def _read_console(file: Path) -> Table:
    """Read the lines "step:5 - name:0.5 - ..." that verl prints; others are skipped."""
    rows: list[Row] = []
    for number, line in enumerate(read_lines(file, most=_MOST_CONSOLE_LINE), 1):
        text = line.decode(errors="replace")
        found = _CONSOLE_LINE.search(_COLOURS.sub("", text))
        if found is None:
            continue
        row: dict[str, Any] = {STEP_COLUMN: found[1]}
        for part in found[2].split(" - "):
            name, _, value = part.strip().rpartition(":")
            row[name] = _NUMPY_NUMBER.sub(r"\1", value)
        rows.append((f"{file}:{number}", row))
    if not rows:
        raise CurveError(
            f'{file}: no line has "step:NUMBER - NAME:VALUE", as verl prints; {_KNOWN}'
        )
    return Table(path=file, rows=rows, x=STEP_COLUMN, y=None, sparse=True)


_READERS = {
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".log": _read_console,
    ".parquet": _read_parquet,
}


def _read_events(path: Path) -> Table:
    """Read one event file, or all below a directory: a row per run and step.

    A run is a directory with event files, named by its path below `path`.  Columns are
    the tags, `step`, `wall_time_s` and `run`.  Steps that a resumed run wrote again are
    resolved for each tag separately, as tags are not all written at the same steps.
    """
    folders = [path]
    if path.is_dir():
        folders = sorted({file.parent for file in path.rglob(PATTERN)})
    rows: list[Row] = []
    notes: dict[tuple[str, str], tuple[str, ...]] = {}
    damaged: list[str] = []
    for folder in folders:
        run = str(folder.relative_to(path)) if folder != path else path.absolute().name
        tags, found = read_series(folder)
        damaged += found
        # The notes on a run without scalars are shown with all other runs.
        place = run if tags else ""
        notes[place, ""] = (*notes.get((place, ""), ()), *found)
        began = min((t for series in tags.values() for t in series.times), default=0.0)
        joined: dict[int, dict[str, Any]] = {}
        for tag, series in tags.items():
            settled = series.settled()
            notes[run, tag] = settled.notes(STEP_COLUMN)
            for i in settled.order:
                step = series.steps[i]
                row = joined.setdefault(step, {STEP_COLUMN: step, RUN_COLUMN: run})
                row[TIME_COLUMN] = series.times[i] - began
                row[tag] = series.values[i]
        rows += [(f"{folder} step {step}", joined[step]) for step in sorted(joined)]
    if not rows:
        why = "; ".join(damaged) or "they are empty"
        raise CurveError(f"{path}: no scalars in its event files: {why}")
    tags = dict.fromkeys(name for _, row in rows for name in row)
    own_x, own_y = EVENTS_PREFIX + DEFAULT_X, EVENTS_PREFIX + DEFAULT_Y
    return Table(
        path=path,
        rows=rows,
        x=own_x if own_x in tags else STEP_COLUMN,
        y=own_y if own_y in tags else None,
        group=RUN_COLUMN if len(folders) > 1 else None,
        sparse=True,
        notes=notes,
    )
