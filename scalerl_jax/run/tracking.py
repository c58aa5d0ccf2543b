"""Places to look at a run that `tracking` switches on: W&B, and a profiler's trace."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_json


class Wandb:
    """A run at Weights & Biases, which goes on when the run does.

    WANDB_MODE=offline keeps it in the run directory.
    """

    def __init__(
        self, project: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        """Begin the run there, or go on with it; `settings` are by dotted name."""
        wandb = importlib.import_module("wandb")  # of an extra
        begun = read_json(directory / "config.json")["started"]
        self._run = wandb.init(
            project=project,
            dir=directory,
            name=directory.name,
            id="".join(filter(str.isalnum, f"{directory.name}{begun}")),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(console="off"),
        )
        # A step of its own does not come twice: what a kill undid would be missing.
        self._run.define_metric("*", step_metric="step")
        self.close = self._run.finish

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of an optimizer step."""
        self._run.log({**values, "step": step})


class StepProfile:
    """A profiler's trace of the optimizer steps from the first to the last of two."""

    def __init__(self, steps: tuple[int, ...], directory: Path) -> None:
        """Take the first and the last step; TensorBoard looks in `directory`."""
        self._first, self._last = steps
        self._directory = directory
        self._running = False

    def reached(self, version: int) -> None:
        """Begin, or end, before the step that follows on a version."""
        if self._running and version >= self._last:
            self.close()
        elif version == self._first - 1 and not self._running:
            import jax  # what reads and writes metrics does without

            jax.profiler.start_trace(self._directory)
            self._running = True

    def close(self) -> None:
        """End and write the trace, if there is one under way."""
        if self._running:
            import jax

            self._running = False
            jax.profiler.stop_trace()
