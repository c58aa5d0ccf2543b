"""The directory of a run: its settings, its lock, and whether it may be resumed.

`config.json` holds the settings, the revision of the code and package versions.  A
resume with other settings is refused, because its curves would mix two recipes; the
caller names the few settings that do not change the method.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import platform
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import read_text
from scalerl_jax.formats.reading import is_remote, read_json
from scalerl_jax.formats.remote import copy_of
from scalerl_jax.process.ending import first_line
from scalerl_jax.run.files import CHECKPOINTS_FOLDER, RunFiles, called
from scalerl_jax.run.ledger import LEDGER_FILE
from scalerl_jax.run.record import new_record
from scalerl_jax.run.resume import check_record, check_report
from scalerl_jax.run.writing import open_to_append, replace_file, write_json

METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TRAIN_ROLLOUTS_FILE = "train_rollouts.jsonl"  # token ids; run/rollouts.py
# Files of a run.  If one of them exists without config.json, its recipe is unknown.
RUN_FILES = (
    METRICS_FILE,
    EVALS_FILE,
    ROLLOUTS_FILE,
    TRAIN_ROLLOUTS_FILE,
    LEDGER_FILE,
    CHECKPOINTS_FOLDER,
)
CONFIG_FILE = "config.json"  # settings and versions
DATA_FILE = "data.json"  # what `keep_data_report` writes
ENVIRONMENT_FILE = "environment.py"  # copy of the user's reward functions
STATUS_FILE = "status.json"  # state of the run's processes
ENDED_FILE = "ended.json"  # why a run ended before its last step; "": it goes on


@dataclasses.dataclass(kw_only=True, eq=False)
class RunDirectory(contextlib.AbstractContextManager["RunDirectory"]):
    """An open and locked run directory; `close` or the process's end unlocks it."""

    path: Path  # the local copy, if the directory is in a bucket
    lock: io.FileIO | RunFiles
    bucket: RunFiles | None = None  # synchronises copy and bucket; None: a local run

    @property
    def url(self) -> str:
        """The directory's path or URL for processes on other machines."""
        return str(self.bucket.remote) if self.bucket else str(self.path)

    def close(self) -> None:
        """Unlock the directory for other processes."""
        self.lock.close()

    def __exit__(self, *_: object) -> None:
        """Unlock."""
        self.close()


def open_run_directory(
    workdir: str | os.PathLike[str],
    *,
    settings: dict[str, Any],
    free_settings: Collection[str],
) -> RunDirectory:
    """Create or reopen, lock and check the directory of a run.

    `settings` are JSON values by section.  Those named in `free_settings`
    ("train.num_steps") may differ from the ones in a reopened directory; all may differ
    while the directory has no files of a run.

    Raises:
        ValueError: the path is no directory, or holds a run of other settings, files
            of an unknown run, or a broken config.json.
        RuntimeError: it cannot be written, or another process is using it.
    """
    with contextlib.ExitStack() as held:
        bucket = None
        if is_remote(workdir):
            lock = bucket = held.enter_context(RunFiles(str(workdir)))
            path = bucket.path
            held.enter_context(called(path, str(workdir)))
        else:
            path = local_directory(workdir)
            lock = held.enter_context(lock_directory(path))
        config_file = path / CONFIG_FILE
        with _usable(config_file):
            record = new_record(json.loads(json.dumps(settings)))
            if config_file.exists():
                record = check_record(
                    config_file,
                    record,
                    free_settings,
                    begun=bool(_run_files(path)),
                )
            elif found := _run_files(path):
                raise ValueError(
                    f"--workdir={path} holds {', '.join(found)} of a run but no "
                    f"config.json that says which; choose another --workdir, or move "
                    f"these files away"
                )
            if record is not None:
                write_json(config_file, record)
        held.pop_all()
    return RunDirectory(path=path, lock=lock, bucket=bucket)


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a RuntimeError that names the path."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"cannot use {path} ({error.strerror or error}); free space or rights "
            f"there, or choose another --workdir"
        ) from error


def local_directory(workdir: str | os.PathLike[str]) -> Path:
    """Return the local directory of a run's files, or that of their local copy."""
    if is_remote(workdir):
        return copy_of(str(workdir))
    return Path(workdir).expanduser().absolute()


def lock_directory(path: Path, *, flag: str = "--workdir") -> io.FileIO:
    """Create the directory and lock it; the kernel unlocks it when the process ends.

    `flag` is the name of the path in errors.

    Raises:
        ValueError: the path is no directory.
        RuntimeError: it cannot be written, or another process is using it.
    """
    with _usable(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"{flag}={path} is a file, or below one; name a directory"
            ) from error
    with _usable(path / ".lock"), contextlib.ExitStack() as held:
        lock = held.enter_context(open_to_append(path / ".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace") or "unknown"
            raise RuntimeError(
                f"another process ({holder}) is using "
                f"{flag}={path}; stop it first or choose another {flag}"
            ) from error
        # A forked child (such as a verifier) shares the lock and may outlive us.
        child_copy: weakref.ref[io.FileIO] = weakref.ref(lock)
        os.register_at_fork(after_in_child=lambda: _close_if_alive(child_copy))
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {platform.node()}".encode())
        held.pop_all()
    return lock


def is_abandoned(path: Path) -> bool:
    """Return whether the process of this machine that locked the directory is gone."""
    try:
        process, _, machine = read_text(path / ".lock").partition(" on ")
        if machine != platform.node():
            return False  # unknown
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # no lock, or the process of another user
        return False
    return False


def _close_if_alive(reference: "weakref.ref[io.FileIO]") -> None:
    lock = reference()
    if lock is not None:
        lock.close()


def _run_files(path: Path) -> list[str]:
    return [name for name in RUN_FILES if (path / name).exists()]


def keep_end(directory: Path, why: str) -> None:
    """Write why a run ended before its last step, or "" where it goes on."""
    file = directory / ENDED_FILE
    if why or file.exists():
        write_json(file, {"why": why})


def why_ended(directory: Path) -> str:
    """Return why a run ended before its last step; "": it goes on, or is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(directory / ENDED_FILE)["why"])
    return ""


@contextlib.contextmanager
def end_kept(directory: Path, why: Callable[[], str | None]) -> Iterator[None]:
    """Write why the run in the block has ended early: what `why` says, or a failure."""
    keep_end(directory, "")
    try:
        yield
        keep_end(directory, why() or "")
    except Exception as error:
        with contextlib.suppress(OSError):  # of a full disk, which `error` may tell
            keep_end(directory, first_line(error))
        raise


def keep_data_report(directory: Path, report: dict[str, dict[str, Any]]) -> None:
    """Write `data.json`, the report on training and evaluation data, once per run.

    `report` has an entry per data set under "training" and "evaluation".

    Raises:
        ValueError: the run in the directory was started with other prompts.
        RuntimeError: the file cannot be written.
    """
    file = directory / DATA_FILE
    with _usable(file):
        if file.exists() and _run_files(directory):
            check_report(file, report)
        else:
            write_json(file, report)


def keep_environment(directory: Path, text: str) -> Path | None:
    """Write a user's reward functions to the run's directory; keep an older version.

    If the run used another text before, return the path to which that text is moved;
    its name contains the first digits of its SHA-256.

    Raises:
        RuntimeError: a file cannot be written.
    """
    file = directory / ENVIRONMENT_FILE
    with _usable(file):
        before = read_text(file) if file.exists() else text
        aside = None
        if before != text and _run_files(directory):
            digest = hashlib.sha256(before.encode()).hexdigest()[:8]
            aside = file.with_stem(f"{file.stem}-{digest}")
            replace_file(aside, before.encode())
        replace_file(file, text.encode())
    return aside
