"""Metrics of a run: its JSON-lines files, TensorBoard and W&B.

metrics.jsonl, evals.jsonl, rollouts.jsonl and, if it is asked for, train_rollouts.jsonl
hold one JSON object per line.  Each line is written by one system call, so that a
killed run leaves at most one incomplete line, at the end; a machine that fails loses
the lines of `SYNC_S` seconds, but none before a checkpoint.  Floats are written so that
they read back bit for bit; NaN and infinities, which JSON lacks, become null.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.process.background import repeated
from scalerl_jax.run.appending import Appender, unwritable
from scalerl_jax.run.directory import (
    EVALS_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    TRAIN_ROLLOUTS_FILE,
)
from scalerl_jax.run.resume import rows_until
from scalerl_jax.run.tracking import Wandb
from scalerl_jax.run.writing import open_to_append, replace_file

TENSORBOARD_DIRECTORY = "tensorboard"
SYNC_S = 60.0
_LAST_SYNC_S = 60.0  # timeout of the last one
# Metric -> name of its copy under the heading "Run", for the most important metrics.
# TensorBoard sorts by character code, so the capital R puts the heading first.
OVERVIEW = {
    "eval/pass_rate": "Run/pass_rate",
    "reward/mean": "Run/reward",
    "completion/mean_tokens": "Run/length",
    "staleness/mean": "Run/staleness",
    "throughput/generated_tokens_per_s": "Run/tokens_per_s",
}


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Writer of a run's metrics, which continues the files of a resumed run."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        after: int,
        settings: Mapping[str, Any] | None = None,
        wandb_project: str = "",
        train_rollouts: bool = False,
    ) -> None:
        """Open the files in `directory` to append to.

        Rows after optimizer step `after` (-1: all rows) and an incomplete last line are
        removed: they will be written again.  `settings`, by dotted name, are the
        hyper-parameters in TensorBoard and W&B.  With `train_rollouts`, a file for
        these is opened, too.
        """
        from scalerl_jax.run.events import RunEvents  # it brings TensorBoard

        self._directory = Path(directory)
        self._files: dict[str, Appender] = {}
        self._wandb = None
        with contextlib.ExitStack() as opened:
            kept = (TRAIN_ROLLOUTS_FILE,)
            for name in (METRICS_FILE, EVALS_FILE, ROLLOUTS_FILE, *kept):
                file, steps = self._directory / name, []
                if file.is_file():
                    steps = _drop_after(file, after)
                if name in kept and not train_rollouts:
                    continue
                if name == EVALS_FILE:
                    self._evaluated = set(steps)
                self._files[name] = Appender(self._directory / name)
                opened.callback(self._files[name].close)
            self._tensorboard = RunEvents(self.tensorboard, settings or {}, after=after)
            opened.callback(self._tensorboard.close)
            opened.enter_context(
                repeated(
                    lambda _: self.sync(),
                    name="sync",
                    every_s=SYNC_S,
                    last_s=_LAST_SYNC_S,
                )
            )
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
            self._tensorboard.histogram(step, tag, numbers)

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
        """Return True if the evaluation at a step is in the file."""
        return step in self._evaluated

    def write_rollouts(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append readable rollouts; each row has a "step"."""
        for number, row in enumerate(rows):
            row = self._write(ROLLOUTS_FILE, {"step": row["step"], **row})
            self._tensorboard.text(row["step"], f"rollouts/{number}", row)

    def write_train_rollouts(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rollouts of token ids, if there is a file of them."""
        if TRAIN_ROLLOUTS_FILE in self._files:
            for row in rows:
                self._write(TRAIN_ROLLOUTS_FILE, row)

    def sync(self) -> None:
        """Return once a failure of the machine cannot lose what was written.

        Raises:
            RuntimeError: the system cannot write it.
        """
        for file in (*self._files.values(), self._tensorboard):
            file.sync()

    def _write(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        row = _json_values(row)
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self._files[name].write(line)
        return row

    def _show(self, step: int, values: dict[str, Any]) -> None:
        """Send numbers to TensorBoard, and to W&B if it is enabled."""
        shown = {OVERVIEW[tag]: values[tag] for tag in OVERVIEW if tag in values}
        self._tensorboard.numbers(step, {**shown, **values})
        if self._wandb is not None:
            self._wandb.log(step, values)

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()


def _json_values(value: Any) -> Any:
    """Convert to JSON values, NumPy and JAX scalars too; NaN and inf become None."""
    if isinstance(value, dict):
        return {str(name): _json_values(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(part) for part in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _drop_after(path: Path, step: int) -> list[int]:
    """Remove the rows after `step` atomically; return the steps of the others.

    A run writes its rows in the order of steps, so removed rows are usually at the end.
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
