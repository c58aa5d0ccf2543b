"""The files of a run whose directory is in a bucket, beside its checkpoints.

A bucket cannot append to an object.  So the run writes its files to a local directory,
as any run does, and a thread uploads those that have changed, whole, every `UPLOAD_S`;
a file whose upload takes long, less often.  A checkpoint becomes one only after they
are uploaded: what is lost with the machine is then written again by the resumption, but
for what `ledger.json` says of the last `UPLOAD_S`.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from scalerl_jax.utils import remote
from scalerl_jax.utils.hub import copy_of
from scalerl_jax.utils.run_lock import LOCK_FILE, BucketLock

if TYPE_CHECKING:
    from etils import epath

UPLOAD_S = 30.0
_PACE = 20.0  # times what its last upload took, a file waits for the next
_LAST_S = 600.0  # for the upload that is under way at the end
_CHECKPOINTS = "checkpoints"  # are written past the local directory

_log = logging.getLogger(__name__)


class RunFiles(contextlib.AbstractContextManager["RunFiles"]):
    """A locked run directory in a bucket and its local copy, kept alike."""

    def __init__(self, workdir: str) -> None:
        """Lock the directory and fetch its files; the local copy begins anew.

        Raises:
            ValueError: the bucket cannot be used.
            RuntimeError: another process has the directory.
        """
        self.remote: epath.Path = remote.open_path(workdir, setting="--workdir=")
        self.path = copy_of(str(self.remote))
        self.lock = BucketLock(self.remote)
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and time of change
        self._next: dict[Path, float] = {}  # monotonic; an upload before it is too soon
        self._uploading = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="upload", daemon=True)
        with _explained(self.remote):
            self.lock.take()
        with contextlib.ExitStack() as opened, _explained(self.remote):
            opened.callback(self.lock.close)
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            self._fetch()
            opened.pop_all()
        self._thread.start()

    @property
    def checkpoints(self) -> "epath.Path":
        """The directory of the checkpoints."""
        return self.remote / _CHECKPOINTS

    def flush(self) -> None:
        """Upload every file that has changed.

        Raises:
            RuntimeError: one cannot be, or another process has the directory.
        """
        self._upload(at_once=True)

    def close(self) -> None:
        """Upload what has changed, and give the directory back.

        Raises:
            RuntimeError: a file cannot be uploaded.
        """
        self._ended.set()
        self._thread.join(_LAST_S)
        try:
            self.flush()
        finally:
            with _explained(self.remote):
                self.lock.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Upload and unlock."""
        self.close()

    def _fetch(self) -> None:
        for name in remote.entries(self.remote):
            if name.startswith(f"{_CHECKPOINTS}/") or name == LOCK_FILE:
                continue
            data, file = remote.read(self.remote / name), self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data or b"")
            self._uploaded[file] = _version(file)

    def _keep(self) -> None:
        told = False
        while not self._ended.wait(UPLOAD_S):
            try:
                self._upload(at_once=False)
                told = False
            except RuntimeError as error:  # `flush` raises it, when it lasts
                if not told:
                    _log.warning("%s", error)
                told = True

    def _upload(self, *, at_once: bool) -> None:
        with self._uploading:
            self.lock.require()
            for file in self._changed():
                if not at_once and time.monotonic() < self._next.get(file, 0.0):
                    continue
                begun, version = time.monotonic(), _version(file)
                with _explained(self.remote):
                    name = file.relative_to(self.path).as_posix()
                    remote.write(self.remote / name, file.read_bytes())
                self._uploaded[file] = version
                ended = time.monotonic()
                self._next[file] = ended + _PACE * (ended - begun)

    def _changed(self) -> list[Path]:
        """Return the files that differ from what was uploaded; hidden ones are not."""
        return [
            file
            for file in sorted(self.path.rglob("*"))
            if file.is_file()
            and not file.name.startswith(".")
            and self._uploaded.get(file) != _version(file)
        ]


def _version(file: Path) -> tuple[int, int]:
    known = file.stat()
    return known.st_size, known.st_mtime_ns


@contextlib.contextmanager
def _explained(path: "epath.Path") -> Iterator[None]:
    """Name the directory whose bucket does not do what is asked."""
    try:
        yield
    except (ValueError, RuntimeError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"cannot use {path} ({remote.reason(error)}); see to the bucket and to the "
            f"rights there (roles/storage.objectUser), and start again with the same "
            f"--workdir to resume"
        ) from error
