"""Events for TensorBoard, without TensorFlow."""

import os
import re
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from scalerl_jax.run.appending import Appender

# Message classes are created at import, which type checkers cannot see.
Event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
SessionLog = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
Summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{1,10})(\..*)?")  # names of files


class EventFile:
    """Events for TensorBoard, in its own record format, without TensorFlow.

    TensorBoard's `EventFileWriter` passes events to a thread that keeps them for up to
    two minutes and reports errors late; here each event is written on return.  It also
    follows a link with the name of its file.
    """

    def __init__(self, directory: Path) -> None:
        """Create a new file in a directory, and the directory if it is missing."""
        # TensorBoard reads the files of a directory in the order of their names, so the
        # file of a resumed run must come last even if it starts in the same second.
        names = map(
            _EVENTS.fullmatch, os.listdir(directory) if directory.is_dir() else ()
        )
        times = [int(found[1]) for found in names if found]
        self.is_first = not times
        seconds = max(int(time.time()), max(times, default=0) + 1)
        path = directory / f"events.out.tfevents.{seconds:010d}.{os.getpid()}"
        self._file = Appender(path, new=True)
        self._records = RecordWriter(self._file)
        self.close, self.sync = self._file.close, self._file.sync
        self.write(file_version="brain.Event:2")

    def write(self, **fields: object) -> None:
        """Append an event with these fields."""
        event = Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


class RunEvents(EventFile):
    """The events of a run, which may continue those of an earlier start."""

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], *, after: int
    ) -> None:
        """Go on after optimizer step `after` of a run with these settings."""
        super().__init__(directory)
        # At a START event readers discard earlier events of this step or later ones.
        # They ignore the first START that they read, so every file has one.
        start = SessionLog(status=SessionLog.START)
        self.write(step=after + 1, session_log=start)
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        if plain and self.is_first:
            self.write(step=0, summary=hparams_pb(plain))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Append the numbers of a step, by tag."""
        scalars = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in values.items()
        ]
        self.write(step=step, summary=Summary(value=scalars))

    def histogram(self, step: int, tag: str, numbers: np.ndarray) -> None:
        """Append a histogram of numbers."""
        self.write(step=step, summary=histogram_pb(tag, numbers))

    def text(self, step: int, tag: str, row: Mapping[str, Any]) -> None:
        """Append a row as a text."""
        self.write(step=step, summary=text_pb(tag, _markdown(row)))


def _markdown(row: Mapping[str, Any]) -> str:
    """Return a row as Markdown, with texts unchanged, in indented lines."""
    parts = [
        f"{name}: {value}\n"
        if not isinstance(value, str)
        else f"{name}:\n\n{textwrap.indent(value, ' ' * 4, lambda _: True)}\n"
        for name, value in row.items()
    ]
    # TensorBoard needs valid UTF-8, but a policy may write lone surrogates.
    return "\n".join(parts).encode(errors="replace").decode()
