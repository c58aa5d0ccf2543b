"""The contract between the three roles: all that they know of each other.

The controller runs the loop and has the books: queue, prompts, ledger, files.  A
learner holds the arrays of the train state, generators hold engines and verifiers.
What passes between them are the plain records here, in `exchange` and in `types`.  A
learner is a `learner.step.LocalLearner` or a `cluster.gang.LearnerGang`, generators are
a thread (`generation.local`) or replicas (`coordination.fleet`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from scalerl_jax.types import Group, PackedBatch, Prompt


class QueueClosed(Exception):  # noqa: N818  an end, not an error
    """The run is over; whoever asks or waits should return."""


# The learner's train state: the loop hands it back, and never looks inside.
State = Any
# Params of one version, ready for generators; `parallel.publication.Published`.
Publication = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A group that is to be sampled, or is being sampled."""

    ticket: int
    prompt: Prompt
    begun_version: int  # sets its length budget; a restart does not change it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """Contents of a checkpoint, as the loop gets them back."""

    step: int  # optimizer steps behind it
    state: State
    host: dict[str, Any]  # the controller's books, JSON values
    groups: tuple[Group, ...]  # finished, and not yet trained on


class Learner(Protocol):
    """The learner, as the loop uses it: one in its process, or a gang of processes."""

    @property
    def checkpointer(self) -> Any:
        """The checkpoints of the run, as `learner.checkpoint.Checkpointer` has them."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures of the learner for a row of metrics.jsonl."""
        ...

    def step(
        self, state: State, batch: PackedBatch
    ) -> tuple[State, dict[str, float], str]:
        """Make an optimizer step: the next state, metrics, and why it was skipped."""
        ...

    def annotate(self, state: State, batches: list[PackedBatch]) -> list[PackedBatch]:
        """Return a window's batches with the scores that the objective reads."""
        ...

    def publish(self, state: State, *, pinned: bool = False) -> Publication:
        """Return a copy of the params, laid out for generators.

        One that is `pinned` can be had until the next such one is published, whatever
        comes between.
        """
        ...

    def score(self, state: State, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        """Return the log-probability of every target of a batch, in nats."""
        ...

    def examine(self, state: State, batch: PackedBatch) -> dict[str, float]:
        """Return a batch's metrics and the norm of its gradient; no step is made."""
        ...

    def save(
        self, step: int, state: State, *, host: dict[str, Any], groups: Sequence[Group]
    ) -> None:
        """Save the state and what the controller adds; on return both are copied."""
        ...

    def restore(self) -> Restored | None:
        """Return the newest good checkpoint, if there is any."""
        ...


class Desk(Protocol):
    """The run, as generators may use it."""

    def admit(self, used_version: int) -> Order | None:
        """Return a group that may start now with params of that version, or None."""
        ...

    def sampled(self, ticket: int) -> None:
        """Note that a group lacks nothing but its verdicts."""
        ...

    def put(self, group: Group) -> None:
        """Take a finished and judged group."""
        ...

    def drop(self, ticket: int, reason: str) -> None:
        """End a group without a result; its place is given back."""
        ...

    def withdrawn(self) -> Collection[int]:
        """Return the tickets whose groups nobody wants any more."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `admit` may answer differently, or for so long."""
        ...

    def wake(self) -> None:
        """End a `wait`: something that the generators go by has changed."""
        ...

    def fail(self, error: BaseException) -> None:
        """Hand the error that ended generating to the loop."""
        ...

    def raise_if_over(self) -> None:
        """Raise QueueClosed in a run that is over, or the error that ended it."""
        ...


class Generators(Protocol):
    """The sampling side, as the loop uses it: one thread, or many machines."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures of the generators for a row of metrics.jsonl."""
        ...

    def start(self) -> None:
        """Begin to sample what the desk orders."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Sample nothing more."""
        ...

    def publish(self, publication: Publication, *, policy_version: int) -> None:
        """Hand over params for all that is sampled from now on."""
        ...

    def sample(self, publication: Publication) -> list[Any]:
        """Return prompts and completions to compare the learner with."""
        ...

    def evaluate(
        self,
        publication: Publication,
        *,
        policy_version: int,
        stopped: Callable[[], bool],
    ) -> tuple[Any, list[Any]]:
        """Return the pass rate on held-out prompts and more, and what `sample` does."""
        ...

    def evaluate_beside(
        self,
        publication: Publication,
        *,
        policy_version: int,
        stopped: Callable[[], bool],
    ) -> Any:
        """Return the pass rate and more; the sampling goes on, with newer params."""
        ...

    def in_flight(self) -> Mapping[int, int]:
        """Return the tickets under way, and how many tokens each has so far."""
        ...
