"""Files of a run whose directory is in a bucket, but not its checkpoints or weights.

A bucket cannot append to an object.  So the run writes its files to a local directory,
like any run, and a thread uploads changed files, whole, every `UPLOAD_S` seconds (files
with slow uploads less often).  A checkpoint becomes complete only after they are
uploaded: a resumed run then rewrites everything that was lost with the machine, except
the entries of `ledger.json` for the last `UPLOAD_S` seconds.

The lock of the directory is an object that only one process can create.  It stores its
holder and the time of its last renewal.  Unlike a kernel's lock it is not released when
its process dies: a lock that was not renewed for `STALE_S` seconds, or whose process
has ended on this very machine, is taken over.  Clocks must agree within a minute.
"""

import contextlib
import json
import logging
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.run.writing import replace_file

if TYPE_CHECKING:
    from etils import epath

UPLOAD_S = 30.0
_PACE = 20.0  # pause of a file after an upload, in multiples of its duration
_LAST_S = 600.0  # for an upload in progress at the end
CHECKPOINTS_FOLDER = "checkpoints"
WEIGHTS_FOLDER = "weights"  # what a learner of several processes publishes
# Written to the bucket directly.
_DIRECT = (CHECKPOINTS_FOLDER, f"{CHECKPOINTS_FOLDER}.json", WEIGHTS_FOLDER)
LOCK_FILE = ".lock"
_SETTINGS = "config.json"  # of a run, and of a model
SPEAK_EVERY_S = 60.0
STALE_S = 300.0
_TRIES = 5  # attempts, if others take the lock over at the same moment
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux; a new id after each boot
_PIDS = Path("/proc/self/ns/pid")  # Linux; containers of one machine may differ in it

_log = logging.getLogger(__name__)


class RunFiles(contextlib.AbstractContextManager["RunFiles"]):
    """A locked run directory in a bucket, synchronised with its local copy."""

    def __init__(self, workdir: str) -> None:
        """Lock the directory and fetch its files into a new local copy.

        Raises:
            ValueError: the bucket cannot be used.
            RuntimeError: another process has the directory.
        """
        self.remote: epath.Path = remote.open_path(workdir, setting="--workdir=")
        self.path = remote.copy_of(str(self.remote))
        self.lock = BucketLock(self.remote)
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and time of change
        self._next: dict[Path, float] = {}  # earliest next upload, monotonic time
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
        return self.remote / CHECKPOINTS_FOLDER

    def flush(self) -> None:
        """Upload every changed file.

        Raises:
            RuntimeError: an upload fails, or another process has the directory.
        """
        self._upload(at_once=True)

    def close(self) -> None:
        """Upload changed files, and unlock the directory.

        Raises:
            RuntimeError: an upload fails.
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
        found = remote.entries(self.remote)
        # Runs and models below, as in a directory of runs that is named by mistake.
        others = tuple(
            name.removesuffix(_SETTINGS)
            for name in found
            if name.endswith(f"/{_SETTINGS}")
        )
        names = [
            name
            for name in found
            if name not in ("", LOCK_FILE) and name.partition("/")[0] not in _DIRECT
        ]
        for name, file in remote.places(self.remote, names, self.path).items():
            if name.startswith(others):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, remote.read(self.remote / name) or b"")
            self._uploaded[file] = _version(file)

    def _keep(self) -> None:
        told = False
        while not self._ended.wait(UPLOAD_S):
            try:
                self._upload(at_once=False)
                told = False
            except RuntimeError as error:  # `flush` raises it if it persists
                if not told:
                    _log.warning("%s", error)
                told = True

    def _upload(self, *, at_once: bool) -> None:
        with self._uploading:
            self.lock.require()
            for file in self._changed():
                if not at_once and time.monotonic() < self._next.get(file, 0.0):
                    continue
                begun = time.monotonic()
                try:
                    version, data = _version(file), file.read_bytes()
                except FileNotFoundError:  # gone since it was listed
                    continue
                with _explained(self.remote):
                    name = file.relative_to(self.path).as_posix()
                    remote.write(self.remote / name, data)
                self._uploaded[file] = version
                ended = time.monotonic()
                self._next[file] = ended + _PACE * (ended - begun)

    def _changed(self) -> list[Path]:
        """Return the files that have changed since their last upload.

        What is hidden, or written to the bucket directly, is never uploaded, and links
        are not: the target of one may be any file.
        """
        changed = []
        for folder, folders, names in os.walk(self.path):
            top = Path(folder) == self.path
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".") and not (top and name in _DIRECT)
            ]
            for file in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    if (
                        file.is_file()
                        and not file.is_symlink()
                        and not file.name.startswith(".")
                        and self._uploaded.get(file) != _version(file)
                    ):
                        changed.append(file)
        return sorted(changed)


def _version(file: Path) -> tuple[int, int]:
    known = file.stat()
    return known.st_size, known.st_mtime_ns


@contextlib.contextmanager
def _explained(path: "epath.Path") -> Iterator[None]:
    """Turn an error of the bucket in the block into a RuntimeError with `path`."""
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


class BucketLock:
    """The lock of a directory, held from `take` to `close` and renewed by a thread."""

    def __init__(self, directory: "epath.Path") -> None:
        """Store the directory; do not lock it."""
        self._directory = directory
        self._path = directory / LOCK_FILE
        self._me = {
            **_here(),
            "pid": os.getpid(),
            "token": uuid.uuid4().hex,
        }
        self._lost = ""
        self._spoken = 0.0  # monotonic
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="lock", daemon=True)

    def take(self) -> None:
        """Take the lock.

        Raises:
            RuntimeError: another process holds it; the message says which.
        """
        for _ in range(_TRIES):
            try:
                remote.write(self._path, self._text(), only_new=True)
            except FileExistsError:
                self._remove_stale()
                continue
            self._spoken = time.monotonic()
            self._thread.start()
            return
        raise RuntimeError(
            f"the lock {self._path} changes hands all the time; start one process only"
        )

    def require(self) -> None:
        """Check that this process still has the lock.

        Raises:
            RuntimeError: the lock is lost, or was not renewed in time.
        """
        silent_s = time.monotonic() - self._spoken
        if not self._lost and silent_s > STALE_S:
            self._lost = f"the bucket has not been reached for {silent_s:.0f} s"
        if self._lost:
            raise RuntimeError(
                f"{self._directory} may be another process's now: {self._lost}; start "
                f"again with the same --workdir to resume"
            )

    def close(self) -> None:
        """Release the lock, if it is still ours."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(remote.ACCESS_S)
        if not self._lost and self._is_mine():
            remote.remove(self._path)

    def _speak(self) -> None:
        told = False
        while not self._ended.wait(SPEAK_EVERY_S) and not self._lost:
            try:
                if self._is_mine():
                    remote.write(self._path, self._text())
                    self._spoken, told = time.monotonic(), False
                else:
                    self._lost = (
                        f"{_who(_parsed(remote.read(self._path)))} has its lock"
                    )
            except Exception as error:  # noqa: BLE001  `require` raises if it persists
                if not told:
                    _log.warning(
                        "cannot renew %s (%s)", self._path, remote.reason(error)
                    )
                told = True

    def _is_mine(self) -> bool:
        return _parsed(remote.read(self._path)).get("token") == self._me["token"]

    def _text(self) -> bytes:
        return json.dumps({**self._me, "time": time.time()}).encode()

    def _remove_stale(self) -> None:
        """Remove a lock whose process has ended, or has not renewed it in time.

        Raises:
            RuntimeError: the process still runs.
        """
        entry = remote.entries(self._path).get("")
        if entry is None:  # released just now
            return
        holder = _parsed(remote.read(self._path))
        spoke = holder.get("time", 0.0)
        silent_s = time.time() - (spoke if isinstance(spoke, float) else 0.0)
        if silent_s < STALE_S and not _is_gone(holder):
            raise RuntimeError(
                f"{_who(holder)} is using --workdir={self._directory}, and renewed its "
                f"lock {max(silent_s, 0.0):.0f} s ago; stop it first or choose another "
                f"--workdir (a lock not renewed for {STALE_S:.0f} s is taken over)"
            )
        _log.warning("taking over the lock of %s", _who(holder))
        remote.remove_generation(self._path, entry["generation"])


def _parsed(text: bytes | None) -> dict[str, Any]:
    """Parse the content of a lock; {}: malformed."""
    try:
        value = parse_json(text or b"")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _here() -> dict[str, str]:
    """Return what says where a process id is valid; "": not known."""
    try:
        boot, pids = _BOOT.read_text().strip(), os.readlink(_PIDS)
    except OSError:  # another system
        boot = pids = ""
    return {"host": platform.node(), "boot": boot, "pids": pids}


def _is_gone(holder: dict[str, Any]) -> bool:
    """Return True if a lock's holder is a process of this machine that has ended.

    Processes of another container do not count: their ids are not seen here.
    """
    here = _here()
    if not here["boot"] or any(holder.get(name) != here[name] for name in here):
        return False
    pid = holder.get("pid")
    return isinstance(pid, int) and not Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def called(path: Path, name: str) -> Iterator[None]:
    """Replace the path of a local copy by the user's name for it, in errors."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(str(error).replace(str(path), name)) from error
