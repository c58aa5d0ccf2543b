"""The directory in which the checkpoints of a run lie: their names, old ones, new ones.

A checkpoint is written under another name and gets its own by one rename, so that a
kill at any moment leaves it whole or not at all.
"""

import re
import shutil
import time
from collections.abc import Container
from pathlib import Path

from scalerl_jax.learner import manifest as manifests

# The second form is a checkpoint on its way out, while another of its step comes in.
_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")


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

    def put(self, partial: Path, step: int) -> None:
        """Make a sealed directory the checkpoint of its step.

        One of that step that exists goes after it.
        """
        target = self.target(step)
        replaced = target.with_name(f"{target.name}.replaced")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        manifests.sync(self.directory)

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

    def prune(self, keep: int, damaged: Container[Path]) -> None:
        """Remove what a newer checkpoint has made superfluous."""
        good = [path for _, path in self.found() if path not in damaged]
        current = [path for path in good if not path.name.endswith(".replaced")]
        for _, path in self.found():
            if path not in current[:keep]:
                self.remove(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, as far as it can be."""
        shutil.rmtree(path, ignore_errors=True)
