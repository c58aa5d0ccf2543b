"""Scalars of TensorBoard's event files, in the order in which they were written.

The tensorboard package decodes the records; TensorFlow is not needed.  Reading ends,
with a note, at a record that is damaged or whose stated length exceeds its file.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import MOST_WHOLE, open_regular
from scalerl_jax.scaling.resumed import Settled, settle

PATTERN = "events.out.tfevents.*"
_FRAME = 16  # bytes of a record around its data: its length and two checksums


@dataclasses.dataclass
class Series:
    """One scalar of a run: step, value and time of each of its events."""

    steps: list[int] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    num_void: int = 0  # events that a restart declared void

    def void_from(self, step: int) -> None:
        """Drop the events of this step and later ones."""
        kept = [i for i, each in enumerate(self.steps) if each < step]
        self.num_void += len(self.steps) - len(kept)
        self.steps = [self.steps[i] for i in kept]
        self.values = [self.values[i] for i in kept]
        self.times = [self.times[i] for i in kept]

    def settled(self) -> Settled:
        """Return the events that count; void ones are counted as replaced."""
        found = settle(self.steps)
        if not self.num_void:
            return found
        left_out = found.num_left_out + self.num_void
        return dataclasses.replace(found, num_left_out=left_out, resumed=True)


def read_series(path: Path) -> tuple[dict[str, Series], list[str]]:
    """Return the scalars of an event file or a directory of them, by tag, and notes.

    A directory is one run, whose files are read in the order of their creation.
    `tf.summary` stores scalars as tensors of no dimension, others as plain values.
    """
    from tensorboard.compat.proto import event_pb2

    # Message classes are made at import, where a type checker cannot see them.
    start = event_pb2.SessionLog.START  # pyright: ignore[reportAttributeAccessIssue]
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(PATTERN), key=_made)
    found: dict[str, Series] = {}
    plugins: dict[str, str] = {}  # by tag; only a tag's first event names its plugin
    notes: list[str] = []
    for file in files:
        for event in _events(file, notes):
            if event.session_log.status == start:
                for series in found.values():
                    series.void_from(event.step)
            for value in event.summary.value:
                tag = value.tag
                if value.HasField("metadata"):
                    plugin = value.metadata.plugin_data.plugin_name
                    plugins.setdefault(tag, plugin)
                number = _scalar(value, plugins.get(tag))
                if number is None:
                    continue
                series = found.setdefault(tag, Series())
                series.steps.append(event.step)
                series.values.append(number)
                series.times.append(event.wall_time)
    return found, notes


def _scalar(value: Any, plugin: str | None) -> float | None:
    """Return the number in one value of an event, or None if it is not a scalar."""
    from tensorboard.util import tensor_util

    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor") or plugin != "scalars":
        return None
    if value.tensor.tensor_shape.dim:
        return None
    try:
        return float(tensor_util.make_ndarray(value.tensor).item())
    except (TypeError, ValueError):  # text or an empty tensor
        return None


def _made(file: Path) -> tuple[float, float, str]:
    """Return a sort key: seconds in a file's name, then the time of its first event."""
    first = next(iter(_events(file, [])), None)
    written = first.wall_time if first is not None else 0.0
    seconds = file.name.split(".")[3]
    return float(seconds) if seconds.isdecimal() else written, written, file.name


def _events(file: Path, notes: list[str]) -> Iterator[Any]:
    """Return the events of a file; `notes` gets a line if it cannot be read to its end.

    A run that was killed, or is still under way, leaves an incomplete last record.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2

    make = event_pb2.Event.FromString  # pyright: ignore[reportAttributeAccessIssue]
    place, last = 0, None
    for record in _records(file):
        try:
            event = make(record)
        except DecodeError:
            break
        place += _FRAME + len(record)
        if event.HasField("summary"):
            last = event.step
        yield event
    size = file.stat().st_size
    if place < size:
        until = "nothing was read" if last is None else f"it was read up to step {last}"
        ends = "ends within a record, as after a kill"
        fault = ends if _is_cut(file, place) else "is damaged"
        notes.append(f"{file.name} {fault} (byte {place:,} of {size:,}): {until}")


def _records(file: Path) -> Iterator[bytes]:
    """Yield the data of records up to the first incomplete or damaged one."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open_regular(file) as stream:
        while True:
            head, checksum = stream.read(8), stream.read(4)
            if len(checksum) < 4 or _number(checksum) != masked_crc32c(head):
                return
            length = _number(head)
            left = os.fstat(stream.fileno()).st_size - stream.tell() - 4
            if length > min(left, MOST_WHOLE):
                return
            data, checksum = stream.read(length), stream.read(4)
            if _number(checksum) != masked_crc32c(data):
                return
            yield data


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _is_cut(file: Path, place: int) -> bool:
    """Return whether the file ends within the record that begins at `place`."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open_regular(file) as stream:
        stream.seek(place)
        length, checksum = stream.read(8), stream.read(4)
    if len(checksum) < 4:
        return True
    whole = _number(checksum) == masked_crc32c(length)
    return whole and place + _FRAME + _number(length) > file.stat().st_size
