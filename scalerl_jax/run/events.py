"""Files that only grow: rows, and events for TensorBoard without TensorFlow."""

import os
import re
import time
from pathlib import Path

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from scalerl_jax.run.writing import open_to_append

# Message classes are made at import, where a type checker cannot see them.
Event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{1,10})(\..*)?")  # names of files


class Appender:
    """An unbuffered file that is only added to, and says its name when it cannot be."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Open the file; with `new`, one that is there already is an error.

        Raises:
            RuntimeError: it cannot be opened, or is a link.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(path, new=new)
        except OSError as error:
            raise unwritable(path, error) from error
        self.close = self._file.close

    def write(self, data: bytes) -> None:
        """Append `data`, in one call unless the system takes only a part of it."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise unwritable(self._path, error) from error


class EventFile:
    """Events for TensorBoard, in its own record format, without TensorFlow.

    TensorBoard's `EventFileWriter` hands events to a thread that keeps them for up to
    two minutes and whose errors come late; here each event is on disk on return.  It
    also writes through a link that has the name of its file.
    """

    def __init__(self, directory: Path) -> None:
        """Make a new file in a directory, which is made if it is missing."""
        # TensorBoard reads the files of a directory in the order of their names, so
        # a resumed run's must come last even if it starts within the same second.
        names = map(
            _EVENTS.fullmatch, os.listdir(directory) if directory.is_dir() else ()
        )
        times = [int(found[1]) for found in names if found]
        self.is_first = not times
        seconds = max(int(time.time()), max(times, default=0) + 1)
        path = directory / f"events.out.tfevents.{seconds:010d}.{os.getpid()}"
        self._file = Appender(path, new=True)
        self._records = RecordWriter(self._file)
        self.close = self._file.close
        self.write(file_version="brain.Event:2")

    def write(self, **fields: object) -> None:
        """Add an event with these fields."""
        event = Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


def unwritable(path: Path, error: OSError) -> RuntimeError:
    """Return the error of a run whose file cannot be written."""
    return RuntimeError(
        f"cannot write {path} ({error.strerror or error}); free space or rights there "
        f"and start again with the same --workdir to resume"
    )
