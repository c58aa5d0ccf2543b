"""The directory with a run's checkpoints, and how a directory becomes a checkpoint.

A checkpoint's manifest lists its files with their sizes and SHA-256, and is sealed by a
SHA-256 of its own.  On a disk a checkpoint is written under another name and gets its
own by one rename, so that a kill at any moment leaves it whole or not at all.  In a
bucket, which has no atomic rename, it is written under its final name, and the
manifest is written last: a directory without a manifest is not a checkpoint.
That manifest has each object's size and the CRC-32C that the bucket keeps of it, so
that a listing verifies a checkpoint without reading it.

Several processes share the reading of the files: each takes every n-th.

A file beside the directory has the step of the newest checkpoint: a run whose
checkpoints were removed does not begin again, over its rows, without a word.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etils import epath

from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import object_of, read_json
from scalerl_jax.parallel import multihost
from scalerl_jax.run.writing import write_json

# A pathlib.Path, or in a bucket an epath.Path, which has the same methods.
Folder = Any
# Size and checksum of each file, by its name in the checkpoint.
Files = dict[str, dict[str, Any]]
FORMAT = 1  # of the directory; to be raised with every change that old code misreads
MANIFEST = "manifest.json"
DISK_THREADS = 4
# The second form is a checkpoint on its way out, while another of its step comes in.
_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")
_IN_BUCKET = re.compile(r"step_(\d{8,})")
_T = TypeVar("_T")


class CheckpointPlace:
    """A directory of this machine, or one that is mounted here."""

    def __init__(self, directory: Folder) -> None:
        """Store the place; nothing is created before a checkpoint is written."""
        self.directory = directory

    def target(self, step: int) -> Folder:
        """Return the path that the checkpoint of a step has once it is whole."""
        return self.directory / f"step_{step:08d}"

    def partial_name(self, step: int) -> str:
        """Return a name under which the checkpoint of a step may be written.

        The name is new each time: after a failure orbax's threads may still be writing.
        """
        return f".saving_{step:08d}_{time.monotonic_ns()}"

    def make(self, partial: Folder, folder: str) -> None:
        """Make an empty directory with a folder; remove half-written ones."""
        for path in self.directory.glob(".saving_*"):
            shutil.rmtree(path, ignore_errors=True)
        (partial / folder).mkdir(parents=True)

    def describe(self, partial: Folder) -> Files:
        """Return size and SHA-256 of this process's share of the files; sync them."""
        paths = sorted(path for path in partial.rglob("*") if path.is_file())

        def entry(path: Path) -> dict[str, Any]:
            entry = measure(path)
            _sync(path)
            return entry

        mine = share(paths)
        with concurrent.futures.ThreadPoolExecutor(DISK_THREADS) as pool:
            entries = list(pool.map(entry, mine))
        names = [str(path.relative_to(partial)) for path in mine]
        return dict(zip(names, entries, strict=True))

    def put(self, partial: Folder, manifest: dict[str, Any]) -> None:
        """Write the sealed manifest, and rename the directory to its checkpoint's name.

        An existing checkpoint of that step is removed afterwards.
        """
        (partial / MANIFEST).write_text(sealed(manifest))
        folders = [path for path in partial.rglob("*") if path.is_dir()]
        for path in (partial / MANIFEST, *folders, partial):
            _sync(path)
        target = self.target(manifest["step"])
        replaced = target.with_name(f"{target.name}.replaced")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        _sync(self.directory)
        write_json(self._mark, {"newest": manifest["step"]})

    def require_none_was_here(self) -> None:
        """Raise ValueError if a checkpoint was ever put here; call it if none is."""
        if (mark := self._read_mark()) is not None:
            step = mark.get("newest")
            raise ValueError(
                f"{self.directory} holds no checkpoint, and that of step {step} was "
                f"there: begun again, the run would lose its rows; put the checkpoint "
                f"back, choose another --workdir, or remove {self._mark} to begin "
                f"again in this one"
            )

    @property
    def _mark(self) -> Folder:
        return self.directory.with_name(f"{self.directory.name}.json")

    def _read_mark(self) -> dict[str, Any] | None:
        return read_json(self._mark) if self._mark.is_file() else None

    def known_files(self, path: Folder) -> Files | None:
        """Return sizes and digests of files, if the place has them; None: read them."""
        del path
        return None

    def listed(self, *, timeout_s: float) -> list[tuple[int, Folder]]:
        """Return the checkpoints that the first process has `found`, in every process.

        Others may see a stale shared directory.
        """
        found = json.dumps([(step, path.name) for step, path in self.found()])
        listed = multihost.exchange(found, name="checkpoint", timeout_s=timeout_s)
        return [(step, self.directory / name) for step, name in json.loads(listed[0])]

    def found(self) -> list[tuple[int, Folder]]:
        """Steps and directories of the checkpoints, newest first."""
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), match[2] is None, path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def free_bytes(self) -> int | None:
        """Return the bytes that are free for a checkpoint; None: unknown."""
        try:
            return shutil.disk_usage(self.directory).free
        except OSError:
            return None

    def prune(self, keep: int, damaged: Container[Folder]) -> None:
        """Remove old checkpoints: all but the `keep` newest good ones."""
        good = [path for _, path in self.found() if path not in damaged]
        current = [path for path in good if not path.name.endswith(".replaced")]
        for _, path in self.found():
            if path not in current[:keep]:
                self.remove(path)

    def remove(self, path: Folder) -> None:
        """Remove a checkpoint, as far as it can be."""
        shutil.rmtree(path, ignore_errors=True)


class BucketPlace(CheckpointPlace):
    """A directory in a bucket; `before_seal` runs before a checkpoint becomes one."""

    def __init__(
        self, directory: str, *, before_seal: Callable[[], None] | None = None
    ) -> None:
        """Store the place; nothing is created before a checkpoint is written.

        Raises:
            ValueError: the bucket cannot be used.
        """
        super().__init__(
            remote.open_path(directory, setting="checkpoints in ", in_run=True)
        )
        self._before_seal = before_seal

    def partial_name(self, step: int) -> str:
        """Return the name under which the checkpoint of a step is written."""
        return self.target(step).name

    def make(self, partial: epath.Path, folder: str) -> None:
        """Remove the remains of an earlier checkpoint of the step."""
        self.remove(partial)

    def describe(self, partial: epath.Path) -> Files:
        """Return size and CRC-32C of every object, in the first process for all."""
        return {} if multihost.process_index() else self.known_files(partial)

    def put(self, partial: epath.Path, manifest: dict[str, Any]) -> None:
        """Make a directory the checkpoint of its step."""
        if self._before_seal is not None:
            self._before_seal()
        remote.write(partial / MANIFEST, sealed(manifest).encode())
        remote.write(self._mark, json.dumps({"newest": manifest["step"]}).encode())

    def _read_mark(self) -> dict[str, Any] | None:
        found = remote.read(self._mark)
        return None if found is None else object_of(found, self._mark)

    def free_bytes(self) -> int | None:
        """Return None: a bucket has no end."""
        return None

    def known_files(self, path: epath.Path) -> Files:
        """Return size and CRC-32C of every object, from a listing."""
        return {
            name: {"bytes": entry["size"], "crc32c": entry["crc32c"]}
            for name, entry in sorted(remote.entries(path).items())
        }

    def found(self) -> list[tuple[int, epath.Path]]:
        """Steps and directories of the checkpoints, newest first."""
        whole = {
            name.partition("/")[0]
            for name in remote.entries(self.directory)
            if re.fullmatch(rf"step_\d{{8,}}/{MANIFEST}", name)
        }
        steps = {int(name.removeprefix("step_")): name for name in whole}
        return [(step, self.directory / steps[step]) for step in sorted(steps)[::-1]]

    def prune(self, keep: int, damaged: Container[epath.Path]) -> None:
        """Remove old checkpoints, and directories that never became one."""
        good = [path for _, path in self.found() if path not in damaged]
        kept = {path.name for path in good[:keep]}
        names = {name.partition("/")[0] for name in remote.entries(self.directory)}
        for name in sorted(names - kept):
            if _IN_BUCKET.fullmatch(name):
                self.remove(self.directory / name)

    def remove(self, path: epath.Path) -> None:
        """Remove a checkpoint, beginning with the manifest that makes it one."""
        remote.remove(path / MANIFEST)
        remote.remove(path)


def sealed(manifest: dict[str, Any]) -> str:
    """Return a manifest as a text, with its seal."""
    return json.dumps({"sha256": seal(manifest), "manifest": manifest}, indent=1)


def seal(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of the manifest itself, independent of white space."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def share(files: Sequence[_T]) -> Sequence[_T]:
    """Return the files that this process must read."""
    return files[multihost.process_index() :: multihost.process_count()]


def measure(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
