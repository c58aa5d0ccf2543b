"""Tracking of a run that `tracking` settings enable: W&B, and a profiler trace."""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_json
from scalerl_jax.formats.remote import origin_of


class Wandb:
    """A run at Weights & Biases, which is resumed with the run.

    WANDB_MODE=offline stores it in the run directory.
    """

    def __init__(
        self, project: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        """Start or resume the run at W&B; `settings` are by dotted name."""
        wandb = importlib.import_module("wandb")  # of an extra
        begun = read_json(directory / "config.json")["started"]
        place = origin_of(directory) or str(directory.absolute())
        digest = hashlib.sha256(place.encode()).hexdigest()[:8]
        name = "/".join(directory.absolute().parts[-2:])  # of a study: ARM/seedN
        self._run = wandb.init(
            project=project,
            dir=directory,
            name=name,
            id="".join(filter(str.isalnum, f"{name}{begun}{digest}")),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(console="off"),
        )
        # W&B ignores a repeated step of its own counter, so steps repeated after a kill
        # would be missing; "step" is our own.
        self._run.define_metric("*", step_metric="step")
        self.close = self._run.finish

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of an optimizer step."""
        self._run.log({**values, "step": step})


class StepProfile:
    """A profiler trace of the optimizer steps from a first to a last one."""

    def __init__(self, steps: tuple[int, ...], directory: Path) -> None:
        """Store (first, last) step; the trace is written to TensorBoard's directory."""
        self._first, self._last = steps
        self._directory = directory
        self._running = False

    def reached(self, version: int) -> None:
        """Start or stop the trace, before the step that trains params of `version`."""
        if self._running and version >= self._last:
            self.close()
        elif version == self._first - 1 and not self._running:
            import jax  # readers and writers of metrics do not need it

            jax.profiler.start_trace(self._directory)
            self._running = True

    def close(self) -> None:
        """Stop and write the trace, if it is running."""
        if self._running:
            import jax

            self._running = False
            jax.profiler.stop_trace()
