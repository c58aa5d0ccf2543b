"""Numbers of a run: the files that it appends to, and TensorBoard.

metrics.jsonl, evals.jsonl and rollouts.jsonl hold one JSON object per line, each
written by one system call, so that a killed run leaves at most one torn line, at the
end.  Floats are written so that they read back bit for bit; NaN and infinities, which
JSON lacks, become null.
"""

import contextlib
import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.run.directory import (
    EVALS_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
)
from scalerl_jax.run.events import Appender, EventFile, unwritable
from scalerl_jax.run.resume import rows_until
from scalerl_jax.run.tracking import Wandb
from scalerl_jax.run.writing import open_to_append, replace_file

# Message classes are made at import, where a type checker cannot see them.
SessionLog = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
Summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]

TENSORBOARD_DIRECTORY = "tensorboard"
# The figures that matter, by the metric that each shows again, under one heading.  The
# capital makes it the first one: TensorBoard sorts by code, and "R" is before "a".
OVERVIEW = {
    "eval/pass_rate": "Run/pass_rate",
    "reward/mean": "Run/reward",
    "completion/mean_tokens": "Run/length",
    "staleness/mean": "Run/staleness",
    "throughput/generated_tokens_per_s": "Run/tokens_per_s",
}


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Writes the numbers of a run, and goes on with the files of one that resumes."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        after: int,
        settings: Mapping[str, Any] | None = None,
        wandb_project: str = "",
    ) -> None:
        """Open the files in `directory` to append to.

        Rows after optimizer step `after` (-1: all) are dropped, and so is a torn last
        line: they will be written again.  `settings`, by dotted name, are what
        TensorBoard and W&B call hyper-parameters.
        """
        self._directory = Path(directory)
        self._files: dict[str, Appender] = {}
        self._wandb = None
        with contextlib.ExitStack() as opened:
            for name in (METRICS_FILE, EVALS_FILE, ROLLOUTS_FILE):
                file, steps = self._directory / name, []
                if file.is_file():
                    steps = _drop_after(file, after)
                if name == EVALS_FILE:
                    self._evaluated = set(steps)
                self._files[name] = Appender(self._directory / name)
                opened.callback(self._files[name].close)
            self._tensorboard = _TensorBoard(self.tensorboard, settings or {}, after)
            opened.callback(self._tensorboard.close)
            if wandb_project:
                self._wandb = Wandb(wandb_project, self._directory, settings or {})
                opened.callback(self._wandb.close)
            self.close = opened.pop_all().close

    @property
    def tensorboard(self) -> Path:
        """The directory that TensorBoard reads."""
        return self._directory / TENSORBOARD_DIRECTORY

    def write_step(
        self,
        step: int,
        values: dict[str, float],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append the metrics of one optimizer step; histograms are for TensorBoard."""
        self._write(METRICS_FILE, {"step": step, **values})
        self._show(step, values)
        for tag, numbers in (histograms or {}).items():
            self._tensorboard.write(step=step, summary=histogram_pb(tag, numbers))

    def write_eval(self, row: dict[str, Any]) -> None:
        """Append one evaluation; its numbers go to TensorBoard under `eval/`."""
        row = self._write(EVALS_FILE, {"step": row["step"], **row})
        self._evaluated.add(row["step"])
        numbers = {
            f"eval/{name}": value
            for name, value in row.items()
            if isinstance(value, float | int) and name != "step"
        }
        self._show(row["step"], numbers)

    def has_eval(self, step: int) -> bool:
        """Return whether the evaluation at a step is on file."""
        return step in self._evaluated

    def write_rollouts(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append readable rollouts; each row has a "step"."""
        for number, row in enumerate(rows):
            row = self._write(ROLLOUTS_FILE, {"step": row["step"], **row})
            text = text_pb(f"rollouts/{number}", _markdown(row))
            self._tensorboard.write(step=row["step"], summary=text)

    def _write(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        row = _json_values(row)
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self._files[name].write(line)
        return row

    def _show(self, step: int, values: dict[str, Any]) -> None:
        """Give numbers to TensorBoard, and to W&B where it is on."""
        shown = {OVERVIEW[tag]: values[tag] for tag in OVERVIEW if tag in values}
        scalars = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in {**shown, **values}.items()
        ]
        self._tensorboard.write(step=step, summary=Summary(value=scalars))
        if self._wandb is not None:
            self._wandb.log(step, values)

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()


class _TensorBoard(EventFile):
    """The events of a run, which may go on with those of an earlier start."""

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], after: int
    ) -> None:
        super().__init__(directory)
        # Readers drop what has this step or a later one: all but the first start that
        # they meet, which is why every file has one.
        start = SessionLog(status=SessionLog.START)
        self.write(step=after + 1, session_log=start)
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        if plain and self.is_first:
            self.write(step=0, summary=hparams_pb(plain))


def _json_values(value: Any) -> Any:
    """Return JSON values for them, NumPy and JAX scalars; what JSON lacks is None."""
    if isinstance(value, dict):
        return {str(name): _json_values(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(part) for part in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _markdown(row: dict[str, Any]) -> str:
    """Return a row to be read: texts as they stand, line by line."""
    parts = [
        f"{name}: {value}\n"
        if not isinstance(value, str)
        else f"{name}:\n\n{textwrap.indent(value, ' ' * 4, lambda _: True)}\n"
        for name, value in row.items()
    ]
    # Half of a character, which a policy may write, is none for TensorBoard.
    return "\n".join(parts).encode(errors="replace").decode()


def _drop_after(path: Path, step: int) -> list[int]:
    """Keep the rows up to `step`, in one go; return their steps.

    A run writes its rows in the order of their steps: those that go are at the end.
    """
    try:
        steps, pieces = rows_until(step, path)
        last = pieces[-1][1] if pieces else 0
        if len(pieces) > 1 or (pieces and pieces[0][0] > 0):
            data = b"".join(read_lines(path))
            replace_file(path, b"".join(data[start:end] for start, end in pieces))
        elif last < path.stat().st_size:
            with open_to_append(path) as file:
                file.truncate(last)
                os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error) from error
    return steps
