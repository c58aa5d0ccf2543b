"""The contract between the three roles: all that they know of each other.

The controller runs the loop and has the books: queue, prompts, ledger, files.  A
learner holds the arrays of the train state, generators hold engines and verifiers.
What passes between them are the plain records here, in `exchange` and in `types`.  The
loop has a learner, which is a `learner.step.LocalLearner` or a gang of them, and
generators, which are a thread (`generation.local`) or replicas (`coordination.fleet`).
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Protocol

from scalerl_jax.types import Group, Prompt


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
