"""Files as tables: text with separators, JSONL, TRL's trainer_state.json, W&B's charts.

TensorBoard's event files are read in `events.py`.
"""

import collections
import csv
import re
from pathlib import Path

from scalerl_jax.scaling.cells import is_number
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.events import EVENTS_PATTERN, read_events
from scalerl_jax.scaling.tables import RUN_COLUMN, STEP_COLUMN, Row, Table
from scalerl_jax.utils.reading import parse_json

EVALS_NAME = "evals.jsonl"
TRAINER_STATE_NAME = "trainer_state.json"
TEXT_KINDS = (".csv", ".tsv")
DELIMITERS = (",", ";", "\t")
SNIFFED_LINES = 40
TENSORBOARD_HEADER = ["Wall time", "Step", "Value"]  # of a scalar that it exports
WANDB_SEPARATOR = " - "  # "run name - metric"
WANDB_ENVELOPES = ("__MIN", "__MAX")  # of the steps that one exported point stands for


def read_table(path: str | Path) -> Table:
    """Read whatever `path` is; directories are looked through for a file that is known.

    A directory may be a run of this package (`evals.jsonl`), of Hugging Face's
    trainers (`trainer_state.json`, or the newest checkpoint's), or hold TensorBoard
    event files at any depth.

    Raises:
        CurveError: nothing there that can be read; the message lists what can.
    """
    given = Path(path)
    file = _find_in(given) if given.is_dir() else given
    if file.is_dir() or ".tfevents." in file.name:
        return read_events(file)
    if not file.is_file():
        raise CurveError(f"{file}: no such file; {_KNOWN}")
    try:
        if file.suffix in TEXT_KINDS:
            return _read_delimited(file)
        if file.suffix == ".jsonl":
            return Table(path=file, rows=_read_jsonl(file))
        if file.suffix == ".json":
            return _read_trainer_state(file)
    except UnicodeDecodeError as failure:
        raise CurveError(
            f"{file}: not UTF-8 text ({failure.reason}); save it as UTF-8, which "
            "spreadsheets call CSV UTF-8"
        ) from failure
    raise CurveError(f"{file}: unknown kind {file.suffix!r}; {_KNOWN}")


_KNOWN = (
    f"give a run directory with {EVALS_NAME}, a .jsonl (one object per line), .csv or "
    f".tsv (with a header) file, {TRAINER_STATE_NAME}, or TensorBoard event files"
)


def _find_in(folder: Path) -> Path:
    """The file of a directory that holds its curve; the directory, for event files."""
    for name in (EVALS_NAME, TRAINER_STATE_NAME):
        if (folder / name).is_file():
            return folder / name
    saved = [
        (int(state.parent.name.split("-")[1]), state)
        for state in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
        if state.parent.name.split("-")[1].isdigit()
    ]
    if saved:
        return max(saved)[1]
    if next(folder.rglob(EVENTS_PATTERN), None) is not None:
        return folder
    raise CurveError(f"{folder}: nothing to read in this directory; {_KNOWN}")


def _read_delimited(file: Path) -> Table:
    """Text with a header, separated by commas, semicolons or tabs; cells stay text."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        lines = list(stream)
    hint = re.fullmatch("sep=(.)", lines[0].rstrip("\r\n")) if lines else None
    skipped = int(hint is not None)  # the line by which spreadsheets name it
    delimiter = hint[1] if hint else _delimiter(lines[:SNIFFED_LINES])
    reader = csv.reader(lines[skipped:], delimiter=delimiter, skipinitialspace=True)
    try:
        cells = [(reader.line_num + skipped, row) for row in reader]
    except csv.Error as failure:
        line = reader.line_num + skipped
        raise CurveError(
            f"{file}:{max(line, 1)}: {failure}; mend the line"
        ) from failure
    header = [name.strip() for name in cells[0][1]] if cells else []
    named = [name for name in header if name]
    for name, count in collections.Counter(named).items():
        if count > 1:
            raise CurveError(f"{file}: two columns are called {name!r}; rename one")
    rows = [
        (f"{file}:{line}", _named(f"{file}:{line}", header, row, delimiter))
        for line, row in cells[1:]
        if any(cell.strip() for cell in row)  # spreadsheets leave empty rows behind
    ]
    if _is_wandb(header):
        return _wandb_table(file, header, rows)
    if header == TENSORBOARD_HEADER:
        _, x, y = header
        return Table(path=file, rows=rows, x=x, y=y, delimiter=delimiter)
    return Table(path=file, rows=rows, delimiter=delimiter)


def _named(
    place: str, header: list[str], row: list[str], delimiter: str
) -> dict[str, str | None]:
    """The cells of a row by their columns; None where the row is short."""
    if any(cell.strip() for cell in row[len(header) :]):
        raise CurveError(
            f"{place}: more cells than the header's {len(header)} columns; quote cells "
            f"that contain {delimiter!r}"
        )
    padded = [*row, *[None] * (len(header) - len(row))]
    return {name: cell for name, cell in zip(header, padded, strict=False) if name}


def _delimiter(lines: list[str]) -> str:
    """What separates cells: what makes most numbers in rows as long as the header."""

    def score(delimiter: str) -> tuple[int, int]:
        try:
            header, *rows = [*csv.reader(lines, delimiter=delimiter)] or [[]]
        except csv.Error:  # a cell that is too long, which is told when it is read
            return 0, 0
        if len(header) < 2:
            return 0, 0
        full = [row for row in rows if len(row) == len(header)]
        return sum(is_number(cell) for row in full for cell in row), len(header)

    return max(DELIMITERS, key=score)


def _is_wandb(header: list[str]) -> bool:
    """Whether all columns but the first are "run - metric", or envelopes of those."""
    if any(name.endswith(WANDB_ENVELOPES) for name in header):
        return True
    return len(header) > 1 and all(WANDB_SEPARATOR in name for name in header[1:])


def _wandb_table(file: Path, header: list[str], rows: list[Row]) -> Table:
    """A chart that Weights & Biases exported, one row per run and step.

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


def _read_jsonl(file: Path) -> list[Row]:
    """The objects of a JSONL file; blank lines are skipped."""
    rows = []
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as failure:
            raise CurveError(
                f"{file}:{number}: not valid JSON ({failure}); remove the line "
                "if a killed run left it half written"
            ) from failure
        if not isinstance(row, dict):
            raise CurveError(
                f"{file}:{number}: holds {type(row).__name__}, not an object with "
                "named columns"
            )
        rows.append((f"{file}:{number}", row))
    return rows


def _read_trainer_state(file: Path) -> Table:
    """The log of a Hugging Face trainer (TRL's among them): `log_history`."""
    try:
        state = parse_json(file.read_bytes())
    except ValueError as failure:
        raise CurveError(f"{file}: not valid JSON ({failure})") from failure
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(r, dict) for r in history):
        raise CurveError(
            f"{file}: no list log_history of objects, as {TRAINER_STATE_NAME} has; "
            f"{_KNOWN}"
        )
    rows = [(f"{file}: log_history[{i}]", row) for i, row in enumerate(history)]
    evaluated = any("eval_reward" in row for row in history)
    return Table(
        path=file,
        rows=rows,
        x=STEP_COLUMN,
        y="eval_reward" if evaluated else "reward",
        sparse=True,
    )
