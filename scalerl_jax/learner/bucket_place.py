"""The checkpoints of a run in a bucket, which has no atomic rename.

A checkpoint is written under its final name, its manifest last: a directory without a
manifest is no checkpoint.  The manifest has each object's size and the CRC-32C that the
bucket keeps of it, so that a listing verifies a checkpoint without reading it.
"""

import re
from collections.abc import Callable, Container
from typing import Any

from etils import epath

from scalerl_jax.formats import remote
from scalerl_jax.learner.places import MANIFEST, CheckpointPlace, Files, sealed
from scalerl_jax.parallel import multihost

_NAME = re.compile(r"step_(\d{8,})")


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
            if _NAME.fullmatch(name):
                self.remove(self.directory / name)

    def remove(self, path: epath.Path) -> None:
        """Remove a checkpoint, beginning with the manifest that makes it one."""
        remote.remove(path / MANIFEST)
        remote.remove(path)
