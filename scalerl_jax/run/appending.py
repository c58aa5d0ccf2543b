"""Append-only files, whose errors name their path."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from scalerl_jax.run.writing import open_to_append


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


def unwritable(path: Path, error: OSError) -> RuntimeError:
    """Return the error of a run whose file cannot be written."""
    return RuntimeError(
        f"cannot write {path} ({error.strerror or error}); free space or rights there "
        f"and start again with the same --workdir to resume"
    )
