"""Files as tables: CSV, JSONL, TRL's trainer_state.json, W&B's chart exports.

A table is rows with named cells and the place each came from; nothing is checked,
mapped or guessed here.  TensorBoard's event files are read in `events.py`.
"""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

from scalerl_jax.scaling.curves import DEFAULT_X, DEFAULT_Y, CurveError

EVALS_NAME = "evals.jsonl"
TRAINER_STATE_NAME = "trainer_state.json"
EVENTS_PATTERN = "events.out.tfevents.*"
STEP_COLUMN = "step"
RUN_COLUMN = "run"
WANDB_SEPARATOR = " - "  # "run name - metric"
WANDB_ENVELOPES = ("__MIN", "__MAX")  # of the steps that one exported point stands for

Row = tuple[str, dict[str, Any]]  # "file:line" and the cells there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one file or directory, and what its kind calls x and y."""

    path: Path
    rows: list[Row]
    x: str | None = DEFAULT_X  # None: the user has to say
    y: str | None = DEFAULT_Y
    group: str | None = None  # column whose values tell runs apart
    sparse: bool = False  # a row holds some columns only: others are no fault

    @property
    def columns(self) -> list[str]:
        """Every column that occurs, in order of appearance."""
        return list(dict.fromkeys(name for _, row in self.rows for name in row))


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
        from scalerl_jax.scaling.events import read_events

        return read_events(file)
    if not file.is_file():
        raise CurveError(f"{file}: no such file; {_KNOWN}")
    try:
        if file.suffix == ".csv":
            return _read_csv(file)
        if file.suffix == ".jsonl":
            return Table(path=file, rows=_read_jsonl(file))
        if file.suffix == ".json":
            return _read_trainer_state(file)
    except UnicodeDecodeError as failure:
        raise CurveError(f"{file}: not UTF-8 text ({failure.reason})") from failure
    raise CurveError(f"{file}: unknown kind {file.suffix!r}; {_KNOWN}")


_KNOWN = (
    f"give a run directory with {EVALS_NAME}, a .jsonl (one object per line) or .csv "
    f"(with a header) file, {TRAINER_STATE_NAME}, or TensorBoard event files"
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


def _read_csv(file: Path) -> Table:
    """A CSV file with a header; cells stay text.  W&B's exports are made long."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        rows = [(f"{file}:{reader.line_num}", row) for row in reader]
        header = list(reader.fieldnames or [])
    for place, row in rows:
        if None in row:  # where DictReader puts what is beyond the header
            raise CurveError(
                f"{place}: more cells than the header's {len(header)} columns; "
                "quote cells that contain commas"
            )
    if any(name.endswith(WANDB_ENVELOPES) for name in header):
        return _wandb_table(file, header, rows)
    return Table(path=file, rows=rows)


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


def _read_trainer_state(file: Path) -> Table:
    """The log of a Hugging Face trainer (TRL's among them): `log_history`."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as failure:
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
