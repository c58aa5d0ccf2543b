"""The checkpoints of a run in a bucket, where nothing can be renamed at one stroke.

A checkpoint is written under its own name, and its manifest last: without one it is
none.  The manifest has each object's size and the CRC-32C that the bucket keeps of it,
so that a checkpoint is verified by a listing and not read twice.
"""

import functools
import re
from collections.abc import Callable, Container
from typing import Any

from etils import epath

from scalerl_jax.learner import manifest as manifests
from scalerl_jax.utils import remote

_NAME = re.compile(r"step_(\d{8,})")


class BucketPlace:
    """A directory in a bucket; `before_seal` runs before a checkpoint becomes one."""

    def __init__(
        self,
        directory: epath.Path,
        *,
        before_seal: Callable[[], None] = lambda: None,
    ) -> None:
        """Make nothing before a checkpoint is written."""
        self.directory = directory
        self._before_seal = before_seal

    def target(self, step: int) -> epath.Path:
        """Return the checkpoint of a step."""
        return self.directory / f"step_{step:08d}"

    def partial_name(self, step: int) -> str:
        """Return the name under which one is written."""
        return self.target(step).name

    def make(self, partial: epath.Path, folder: str) -> None:
        """Remove what is left of another checkpoint of the step."""
        self.remove(partial)

    def describe(
        self, partial: epath.Path, *, share: int, of: int
    ) -> dict[str, dict[str, Any]]:
        """Size and CRC-32C of every object; the first process says it for all."""
        return {} if share else _described(partial)

    def put(self, partial: epath.Path, step: int, manifest: str) -> None:
        """Make a directory the checkpoint of its step."""
        self._before_seal()
        remote.write(partial / manifests.FILE, manifest.encode())

    def verify(
        self, path: epath.Path, *, step: int, share: int, of: int
    ) -> dict[str, Any]:
        """The manifest of a checkpoint whose objects are as they were written.

        Raises:
            DamagedError: they are not.
            ValueError: the checkpoint is of another format.
        """
        found = functools.partial(_check, _described(path))
        return manifests.verify(path, step=step, check=found, share=share, of=of)

    def found(self) -> list[tuple[int, epath.Path]]:
        """Steps and directories of the checkpoints, newest first."""
        sealed = {
            name.partition("/")[0]
            for name in remote.entries(self.directory)
            if re.fullmatch(rf"step_\d{{8,}}/{manifests.FILE}", name)
        }
        steps = {int(name.removeprefix("step_")): name for name in sealed}
        return [(step, self.directory / steps[step]) for step in sorted(steps)[::-1]]

    def prune(self, keep: int, damaged: Container[epath.Path]) -> None:
        """Remove what a newer checkpoint has made superfluous, and what became none."""
        good = [path for _, path in self.found() if path not in damaged]
        kept = {path.name for path in good[:keep]}
        names = {name.partition("/")[0] for name in remote.entries(self.directory)}
        for name in sorted(names - kept):
            if _NAME.fullmatch(name):
                self.remove(self.directory / name)

    def remove(self, path: epath.Path) -> None:
        """Remove a checkpoint; from the first object on it is none."""
        remote.remove(path / manifests.FILE)
        remote.remove(path)


def _described(path: epath.Path) -> dict[str, dict[str, Any]]:
    return {
        name: {"bytes": entry["size"], "crc32c": entry["crc32c"]}
        for name, entry in sorted(remote.entries(path).items())
    }


def _check(
    found: dict[str, dict[str, Any]],
    checkpoint: epath.Path,
    name: str,
    expected: dict[str, Any],
) -> None:
    if name not in found:
        raise manifests.DamagedError(f"{name} is missing")
    size = found[name]["bytes"]
    if size != expected["bytes"]:
        raise manifests.DamagedError(f"{name} has {size} of {expected['bytes']} bytes")
    if found[name]["crc32c"] != expected["crc32c"]:
        raise manifests.DamagedError(f"{name} has a wrong checksum")
