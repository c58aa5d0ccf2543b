"""The directory in which the checkpoints of a run lie: their names, old ones, new ones.

On a disk one is written under another name and gets its own by one rename, so that a
kill at any moment leaves it whole or not at all.  In a bucket the manifest, which is
written last, makes it a checkpoint (`bucket_place`).
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from scalerl_jax.learner import manifest as manifests
from scalerl_jax.learner.manifest import Folder
from scalerl_jax.utils.reading import is_remote

# The second form is a checkpoint on its way out, while another of its step comes in.
_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")


@runtime_checkable
class Place(Protocol):
    """Where checkpoints lie, as their writer and reader uses it."""

    directory: Any  # a Folder

    def target(self, step: int) -> Any:
        """Return the checkpoint of a step, once it is whole."""
        ...

    def partial_name(self, step: int) -> str:
        """Return a name under which one may be written."""
        ...

    def make(self, partial: Any, folder: str) -> None:
        """Begin an empty directory with a folder."""
        ...

    def describe(self, partial: Any, *, share: int, of: int) -> dict[str, Any]:
        """A share of what is to be verified of each file."""
        ...

    def put(self, partial: Any, step: int, manifest: str) -> None:
        """Make a directory the checkpoint of its step, sealed."""
        ...

    def verify(self, path: Any, *, step: int, share: int, of: int) -> dict[str, Any]:
        """Return the manifest of a checkpoint, a share of whose files is good."""
        ...

    def found(self) -> list[tuple[int, Any]]:
        """Steps and directories of the checkpoints, newest first."""
        ...

    def prune(self, keep: int, damaged: Container[Any]) -> None:
        """Remove what a newer checkpoint has made superfluous."""
        ...

    def remove(self, path: Any) -> None:
        """Remove a checkpoint."""
        ...


def place_of(
    directory: str | os.PathLike[str], *, before_seal: Callable[[], None] | None = None
) -> Place:
    """Return the place of a directory of this machine, or of one in a bucket.

    `before_seal` runs before a checkpoint in a bucket becomes one.
    """
    if not is_remote(directory):
        return LocalPlace(Path(directory).absolute())
    from scalerl_jax.learner.bucket_place import BucketPlace
    from scalerl_jax.utils.remote import open_path

    path = open_path(os.fspath(directory), setting="checkpoints in ")
    return BucketPlace(path, before_seal=before_seal or (lambda: None))


class LocalPlace:
    """A directory of this machine, or one that is mounted here."""

    def __init__(self, directory: Path) -> None:
        """Make nothing before a checkpoint is written."""
        self.directory = directory

    def target(self, step: int) -> Path:
        """Return the checkpoint of a step, once it is whole."""
        return self.directory / f"step_{step:08d}"

    def partial_name(self, step: int) -> str:
        """Return a name under which one may be written.

        It is new each time: after a failure orbax's threads may still be writing.
        """
        return f".saving_{step:08d}_{time.monotonic_ns()}"

    def make(self, partial: Path, folder: str) -> None:
        """Make an empty directory with a folder; what is left of others goes."""
        for path in self.directory.glob(".saving_*"):
            shutil.rmtree(path, ignore_errors=True)
        (partial / folder).mkdir(parents=True)

    def describe(self, partial: Path, *, share: int, of: int) -> dict[str, Any]:
        """Size and SHA-256 of a share of the files, which are then on the disk."""
        return manifests.describe(partial, share=share, of=of)

    def put(self, partial: Path, step: int, manifest: str) -> None:
        """Make a directory the checkpoint of its step, sealed.

        One of that step that exists goes after it.
        """
        manifests.write(partial, manifest)
        target = self.target(step)
        replaced = target.with_name(f"{target.name}.replaced")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        manifests.sync(self.directory)

    def verify(self, path: Path, *, step: int, share: int, of: int) -> dict[str, Any]:
        """The manifest of a checkpoint, a share of whose files is as it was written.

        Raises:
            DamagedError: it is not.
            ValueError: the checkpoint is of another format.
        """
        return manifests.verify(
            path, step=step, check=manifests.check_file, share=share, of=of
        )

    def found(self) -> list[tuple[int, Path]]:
        """Steps and directories of the checkpoints, newest first."""
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), match[2] is None, path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def prune(self, keep: int, damaged: Container[Folder]) -> None:
        """Remove what a newer checkpoint has made superfluous."""
        good = [path for _, path in self.found() if path not in damaged]
        current = [path for path in good if not path.name.endswith(".replaced")]
        for _, path in self.found():
            if path not in current[:keep]:
                self.remove(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, as far as it can be."""
        shutil.rmtree(path, ignore_errors=True)
