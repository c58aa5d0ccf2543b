"""The learner that lives in the loop's own process, with the whole train state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.contract import Publication, Restored
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.step import Step, TrainState
from scalerl_jax.types import Group, PackedBatch, PyTree

# State at the start of a window, its batches -> the batches with what they lack.
Annotate = Callable[[TrainState, list[PackedBatch]], list[PackedBatch]]


@dataclasses.dataclass(kw_only=True)
class LocalLearner:
    """Compiled programs over the train state; the `contract.Learner` of one process."""

    layout: PyTree  # of the train state: shapes, dtypes and shardings
    train_step: Step
    diagnose: Callable[[PyTree, PackedBatch], str]  # of a skipped step
    annotate_window: Annotate
    to_sampler: Callable[[PyTree, Array], Publication]
    score_batch: Callable[[PyTree, PackedBatch], Float[np.ndarray, "M R S"]]
    checkpointer: Checkpointer
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # of a gang

    def step(
        self, state: TrainState, batch: PackedBatch
    ) -> tuple[TrainState, dict[str, float], str]:
        """Make an optimizer step, which donates the state.

        Returns the next state, metrics, and why the step was skipped; empty: it was
        made.
        """
        state, arrays = self.train_step(state, batch)
        metrics = {name: float(value) for name, value in arrays.items()}
        skipped = metrics.pop("skipped")
        return state, metrics, self.diagnose(state.params, batch) if skipped else ""

    def annotate(
        self, state: TrainState, batches: list[PackedBatch]
    ) -> list[PackedBatch]:
        """Return a window's batches with the scores that the objective reads."""
        return self.annotate_window(state, batches)

    def publish(self, state: TrainState, *, pinned: bool = False) -> Publication:
        """Return a copy of the params, on the devices of every generator replica.

        It is there as long as somebody holds it, `pinned` or not.

        Raises:
            RuntimeError: it could not be sent.
        """
        return self.to_sampler(state.params, state.policy_version)

    def score(
        self, state: TrainState, batch: PackedBatch
    ) -> Float[np.ndarray, "M R S"]:
        """Return the log-probability of every target of a batch, in nats."""
        return self.score_batch(state.params, batch)

    def examine(self, state: TrainState, batch: PackedBatch) -> dict[str, float]:
        """Return a batch's metrics and the norm of its gradient; no step is made."""
        return self.train_step.policy.examine(state.params, batch)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        host: dict[str, Any],
        groups: Sequence[Group],
    ) -> None:
        """Save the state and what the controller adds; on return both are copied.

        Raises:
            UnsavedError: it, or the one before it, cannot be written; those on disk are
                untouched.
        """
        self.checkpointer.save(step, state=state, host=host, groups=groups)

    def restore(self) -> Restored | None:
        """Return the newest good checkpoint, if there is any."""
        found = self.checkpointer.restore(self.layout)
        return found and Restored(
            step=found.step, state=found.state, host=found.host, groups=found.groups
        )
