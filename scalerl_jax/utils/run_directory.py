"""The directory of one run: its settings, its lock, and whether it may go on.

`config.json` says what was asked for, by which code and with which versions.  A
resume with other settings is refused, because its curves would be of two recipes;
the few settings that do not change the method are named by the caller.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import scalerl_jax
from scalerl_jax.utils.reading import is_remote, local_file, parse_json

if TYPE_CHECKING:
    from scalerl_jax.utils.run_files import RunFiles

METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
# Files that a run leaves behind: with one of these and no config.json, nobody can tell
# which recipe they belong to.
RUN_FILES = (METRICS_FILE, EVALS_FILE, ROLLOUTS_FILE, "ledger.json", "checkpoints")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_PACKAGES += ("reasoning_gym",)  # of an extra
STATUS_FILE = "status.json"  # how the processes of a run stand
_MOST_DIFFERENCES_SHOWN = 5
_ABSENT = "absent"
_MEND = "put the file right, or choose another --workdir"


@dataclasses.dataclass(kw_only=True, eq=False)
class RunDirectory(contextlib.AbstractContextManager["RunDirectory"]):
    """An open and locked run directory; `close` or a dead process unlocks it."""

    path: Path  # of one in a bucket, its local copy
    resumed: bool  # its config.json was there before
    lock: "TextIO | RunFiles"
    bucket: "RunFiles | None" = None  # keeps the copy and the bucket alike

    @property
    def url(self) -> str:
        """Return what processes of other machines know it by."""
        return str(self.bucket.remote) if self.bucket else str(self.path)

    def close(self) -> None:
        """Let another process have the directory."""
        self.lock.close()

    def __exit__(self, *_: object) -> None:
        """Unlock."""
        self.close()


def open_run_directory(
    workdir: str | os.PathLike[str],
    *,
    settings: dict[str, Any],
    free_settings: tuple[str, ...],
) -> RunDirectory:
    """Make or reopen, lock and check the directory of a run.

    `settings` are JSON values by section; those named in `free_settings`
    ("train.num_steps") may differ from what a reopened directory holds, and all of
    them if there is nothing of a run in it yet.

    Raises:
        ValueError: the directory is not for this run: other settings, files of an
            unknown run, a broken config.json, not a directory.
        RuntimeError: it cannot be written, or another process is using it.
    """
    with contextlib.ExitStack() as held:
        bucket = None
        if is_remote(workdir):
            from scalerl_jax.utils.run_files import RunFiles  # and its packages

            lock = bucket = held.enter_context(RunFiles(str(workdir)))
            path = bucket.path
            held.enter_context(_called(path, str(workdir)))
        else:
            path = local_directory(workdir)
            lock = held.enter_context(_lock(path))
        settings = json.loads(json.dumps(settings))
        config_file = path / "config.json"
        with _usable(config_file):
            resumed = config_file.exists()
            if resumed:
                record = _check_record(config_file, settings, free_settings)
            elif found := _run_files(path):
                raise ValueError(
                    f"--workdir={path} holds {', '.join(found)} of a run but no "
                    f"config.json that says which; choose another --workdir, or move "
                    f"these files away"
                )
            else:
                record = _new_record(settings)
            if record is not None:
                write_json(config_file, record)
        held.pop_all()
    return RunDirectory(path=path, resumed=resumed, lock=lock, bucket=bucket)


@contextlib.contextmanager
def _called(path: Path, name: str) -> Iterator[None]:
    """Call a local copy in errors what its user calls it."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(str(error).replace(str(path), name)) from error


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Name a path that the system does not let us use."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"cannot use {path} ({error.strerror or error}); free space or rights "
            f"there, or choose another --workdir"
        ) from error


@contextlib.contextmanager
def sound(file: Path, *, else_unknown: str, way_out: str) -> Iterator[None]:
    """Name a file of the run that does not hold what a run writes there."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is broken ({error!r}), so {else_unknown} is unknown; {way_out}"
        ) from error


def find_settings(workdir: str | os.PathLike[str]) -> Path | None:
    """Return the config.json of a run, from a bucket a copy; None: there is no run.

    Raises:
        ValueError: the bucket cannot be used.
    """
    if not is_remote(workdir):
        file = Path(workdir).expanduser() / "config.json"
        return file if file.is_file() else None
    from scalerl_jax.utils.remote import entries, open_path

    path = open_path(str(workdir), setting="--workdir=") / "config.json"
    return local_file(str(path)) if entries(path) else None


def local_directory(workdir: str | os.PathLike[str]) -> Path:
    """Return where the files of a run lie on this machine, while it runs and after."""
    if is_remote(workdir):
        from scalerl_jax.utils.remote import copy_of  # for buckets only

        return copy_of(str(workdir))
    return Path(workdir).expanduser().absolute()


def _lock(path: Path) -> TextIO:
    """Make the directory and take its lock; the kernel gives it back when we die."""
    with _usable(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"--workdir={path} is or lies under a file; name a directory"
            ) from error
    with _usable(path / ".lock"), contextlib.ExitStack() as held:
        lock = held.enter_context(open(path / ".lock", "a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise RuntimeError(
                f"another process ({lock.read() or 'unknown'}) is using "
                f"--workdir={path}; stop it first or choose another --workdir"
            ) from error
        # A forked child (a verifier, say) shares the lock and may outlive us.
        child_copy: weakref.ref[TextIO] = weakref.ref(lock)
        os.register_at_fork(after_in_child=lambda: _close_if_alive(child_copy))
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {platform.node()}")
        lock.flush()
        held.pop_all()
    return lock


def _close_if_alive(reference: "weakref.ref[TextIO]") -> None:
    lock = reference()
    if lock is not None:
        lock.close()


def _run_files(path: Path) -> list[str]:
    return [name for name in RUN_FILES if (path / name).exists()]


def _new_record(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": settings,
        "versions": versions(),
        "seed": settings.get("seed"),
        "git_revision": git_revision(),
        "started": _now(),
    }


def _check_record(
    config_file: Path, settings: dict[str, Any], free_settings: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return the record brought up to date; None: it need not be written again."""
    unknown = "whether this run may be resumed"
    with sound(config_file, else_unknown=unknown, way_out=_MEND):
        record = parse_json(config_file.read_bytes())
        if not isinstance(record["config"], dict):
            raise TypeError("'config' is not a section")
    was, now = flatten(record["config"]), flatten(settings)
    changed = {
        name: [was.get(name, _ABSENT), now.get(name, _ABSENT)]
        for name in sorted(was.keys() | now.keys())
        if was.get(name, _ABSENT) != now.get(name, _ABSENT)
    }
    forbidden = {
        name: pair for name, pair in changed.items() if name not in free_settings
    }
    if forbidden and not _run_files(config_file.parent):
        return _new_record(settings)  # it ended before it began
    if forbidden:
        shown = "; ".join(
            f"{name} was {old!r} and is now {new!r}"
            for name, (old, new) in list(forbidden.items())[:_MOST_DIFFERENCES_SHOWN]
        )
        more = len(forbidden) - _MOST_DIFFERENCES_SHOWN
        raise ValueError(
            f"{config_file.parent} is the run of other settings: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. Give the old values to "
            f"resume it, or another --workdir to start a new run"
        )
    code = {"versions": versions(), "git_revision": git_revision()}
    latest = (record.get("resumes") or [record])[-1]
    if not changed and all(latest.get(name) == code[name] for name in code):
        return None
    resume = {"time": _now(), "changed": changed, **code}
    resumes = [*record.get("resumes", []), resume]
    return {**record, "config": settings, "resumes": resumes}


def keep_data_report(directory: Path, report: dict[str, dict[str, Any]]) -> None:
    """Write what a run trains and is judged on, `data.json`; once, for the whole run.

    `report` has an entry per data set under "training" and "evaluation".

    Raises:
        ValueError: the run in the directory was begun with other prompts.
        RuntimeError: it cannot be written.
    """
    file = directory / "data.json"
    unknown = "whether this run's prompts are still the same"
    with _usable(file):
        if not (file.exists() and _run_files(directory)):
            write_json(file, report)
            return
        with sound(file, else_unknown=unknown, way_out=_MEND):
            before = parse_json(file.read_bytes())
            changed = [
                name
                for kind, sets in report.items()
                for name, now in sets.items()
                if now.get("sha256") != before[kind][name].get("sha256")
            ]
    if changed:
        raise ValueError(
            f"the prompts of {', '.join(map(repr, changed))} are not those that the "
            f"run in {directory} began with ({file.name}); give it the same files, or "
            f"choose another --workdir to start a new run"
        )


def flatten(settings: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name: {"train": {"seed": 3}} as {"train.seed": 3}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def versions() -> dict[str, str | None]:
    """Return versions of Python, of this package and of what it computes with."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "scalerl_jax": scalerl_jax.__version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_revision() -> str | None:
    """Return the source tree's commit, "+dirty" with changes; None: no checkout."""
    root = Path(scalerl_jax.__file__).resolve().parent.parent
    if not (root / ".git").exists():  # an install, perhaps inside somebody's checkout
        return None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    if revision is None or changes is None:
        return None
    return f"{revision}+dirty" if changes else revision


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=20.0,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace the file by a JSON object, in one go."""
    replace_file(path, (json.dumps(values, indent=2) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file in one go: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
