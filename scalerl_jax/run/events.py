"""Append-only files: rows, and events for TensorBoard without TensorFlow."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from scalerl_jax.run.writing import open_to_append

# Message classes are created at import, which type checkers cannot see.
Event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{1,10})(\..*)?")  # names of files


class Appender:
    """An unbuffered append-only file, whose errors name its path."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Open the file; with `new` it must not exist yet.

        Raises:
            RuntimeError: the file cannot be opened, or is a link.
        """
        self._path = path
        self._lock = threading.Lock()
        self._written = False  # since the last `sync`
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(path, new=new)
        except OSError as error:
            raise unwritable(path, error) from error

    def write(self, data: bytes) -> None:
        """Append `data`, in one system call unless the system writes only a part."""
        rest = memoryview(data)
        with self._lock, self._naming():
            self._written = True
            while rest:
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Return once a failure of the machine cannot lose what was written.

        The file is opened anew: in a bucket that gcsfuse mounts, what is written is
        kept, and seen by others, only once the file is closed.
        """
        with self._lock, self._naming():
            if self._written:
                os.fsync(self._file.fileno())
                self._file, before = open_to_append(self._path), self._file
                before.close()
                self._written = False

    def close(self) -> None:
        """Close the file."""
        with self._lock, self._naming():
            self._file.close()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self._path, error) from error


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


def unwritable(path: Path, error: OSError) -> RuntimeError:
    """Return the error of a run whose file cannot be written."""
    return RuntimeError(
        f"cannot write {path} ({error.strerror or error}); free space or rights there "
        f"and start again with the same --workdir to resume"
    )
