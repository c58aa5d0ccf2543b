"""The list of a checkpoint's files, with the SHA-256 of each, and its verification.

Several processes share the reading: each takes every n-th file.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etils import epath

# A directory of this machine, or one in a bucket.
Folder = Path | epath.Path
FORMAT = 1  # of the directory; to be raised with every change that old code misreads
FILE = "manifest.json"
_DISK_THREADS = 4


class UnsavedError(RuntimeError):
    """A checkpoint cannot be written."""


class DamagedError(Exception):
    """A checkpoint that is not as it was written; says how."""


def describe(directory: Path, *, share: int = 0, of: int = 1) -> dict[str, Any]:
    """Size and digest of a share of the files, which are then on the disk."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())

    def entry(path: Path) -> dict[str, Any]:
        digest = _digest(path)
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": digest}

    mine = paths[share::of]
    with concurrent.futures.ThreadPoolExecutor(_DISK_THREADS) as pool:
        entries = list(pool.map(entry, mine))
    return {
        str(path.relative_to(directory)): each
        for path, each in zip(mine, entries, strict=True)
    }


def text(
    *, step: int, files: dict[str, Any], arrays: dict[str, list[Any]], **more: Any
) -> str:
    """A manifest that says everything of a checkpoint, sealed."""
    manifest = {"format": FORMAT, "step": step, "files": files, "arrays": arrays}
    manifest |= more
    return json.dumps({"sha256": seal(manifest), "manifest": manifest}, indent=1)


def write(directory: Path, manifest: str) -> None:
    """Put the manifest into a directory; it is then on the disk."""
    (directory / FILE).write_text(manifest)
    folders = [path for path in directory.rglob("*") if path.is_dir()]
    for path in (directory / FILE, *folders, directory):
        sync(path)


def seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest itself, whatever its white space."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(
    path: Folder,
    *,
    step: int,
    check: Callable[[Any, str, dict[str, Any]], None],
    share: int = 0,
    of: int = 1,
) -> dict[str, Any]:
    """The manifest of a checkpoint, a share of whose files is as it was written.

    `check` raises DamagedError for a file, by its name, that is not as expected.

    Raises:
        DamagedError: it is not.
        ValueError: the checkpoint is of another format.
    """
    manifest = _read(path / FILE)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']} and this code reads {FORMAT}; "
            f"resume with the code that wrote it (git_revision in config.json)"
        )
    if manifest["step"] != step:
        raise DamagedError(f"its manifest is of step {manifest['step']}")
    files = manifest["files"]
    with concurrent.futures.ThreadPoolExecutor(_DISK_THREADS) as pool:
        checked = [
            pool.submit(check, path, name, files[name])
            for name in list(files)[share::of]
        ]
        for each in checked:
            each.result()
    return manifest


def _read(path: Folder) -> dict[str, Any]:
    try:
        sealed = json.loads(path.read_bytes())
        if sealed["sha256"] == seal(sealed["manifest"]):
            return sealed["manifest"]
    except FileNotFoundError:
        raise DamagedError(f"{FILE} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{FILE} is broken: {error!r}") from error
    raise DamagedError(f"{FILE} is broken: its checksum differs")


def check_file(checkpoint: Path, name: str, expected: dict[str, Any]) -> None:
    """Refuse a file of this machine that is not as expected."""
    path = (checkpoint / name).resolve()
    if not path.is_relative_to(checkpoint.resolve()):
        raise DamagedError(f"{FILE} names {name!r}, which is not in the checkpoint")
    if not path.is_file():
        raise DamagedError(f"{name} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise DamagedError(f"{name} has {size} of {expected['bytes']} bytes")
    if _digest(path) != expected["sha256"]:
        raise DamagedError(f"{name} has a wrong checksum")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
