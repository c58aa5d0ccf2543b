"""The lock of a run directory in a bucket: an object that only one process can create.

It holds who has it and when that process last spoke.  Nobody gives it back for a dead
process, as a kernel does: a lock that was silent for `STALE_S`, or whose process is
gone from this very machine, is taken over.  Clocks must agree within a minute.
"""

import json
import logging
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl_jax.utils import remote
from scalerl_jax.utils.reading import parse_json

if TYPE_CHECKING:
    from etils import epath

LOCK_FILE = ".lock"
SPEAK_EVERY_S = 60.0
STALE_S = 300.0
_TRIES = 5  # against others who take over at the same moment
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux; another after each start

_log = logging.getLogger(__name__)


class BucketLock:
    """The lock of a directory, held from `take` to `close`; a thread speaks for it."""

    def __init__(self, directory: "epath.Path") -> None:
        """Take nothing yet."""
        self._directory = directory
        self._path = directory / LOCK_FILE
        self._me = {
            "host": platform.node(),
            "pid": os.getpid(),
            "boot": _boot(),
            "token": uuid.uuid4().hex,
        }
        self._lost = ""
        self._spoken = 0.0  # monotonic
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="lock", daemon=True)

    def take(self) -> None:
        """Take the lock.

        Raises:
            RuntimeError: another process has it; says which.
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
        """Raise if another process has the directory by now.

        Raises:
            RuntimeError: with what has happened.
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
        """Give the lock back, if it is still ours."""
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
            except Exception as error:  # noqa: BLE001  `require` tells, when it lasts
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
        """Remove a lock whose process is gone.

        Raises:
            RuntimeError: it is not gone.
        """
        entry = remote.entries(self._path).get("")
        if entry is None:  # given back just now
            return
        holder = _parsed(remote.read(self._path))
        spoke = holder.get("time", 0.0)
        silent_s = time.time() - (spoke if isinstance(spoke, float) else 0.0)
        if silent_s < STALE_S and not _is_gone(holder):
            raise RuntimeError(
                f"{_who(holder)} is using --workdir={self._directory}, and was heard "
                f"of {max(silent_s, 0.0):.0f} s ago; stop it first, or choose another "
                f"--workdir (a lock that is silent for {STALE_S:.0f} s is taken over)"
            )
        _log.warning("taking over the lock of %s", _who(holder))
        remote.remove_generation(self._path, entry["generation"])


def _parsed(text: bytes | None) -> dict[str, Any]:
    """Return what a lock says; of a broken one, nothing."""
    try:
        value = parse_json(text or b"")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def _is_gone(holder: dict[str, Any]) -> bool:
    """Return whether it is a process of this machine, and runs no more."""
    mine = (platform.node(), _boot())
    if not mine[1] or (holder.get("host"), holder.get("boot")) != mine:
        return False
    pid = holder.get("pid")
    return isinstance(pid, int) and not Path(f"/proc/{pid}").exists()
