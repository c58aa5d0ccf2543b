"""The contract between the three roles: controller, learner and generators.

The controller runs the loop and has the books: queue, prompts, ledger, files.  The
learner holds the arrays of the train state, generators hold engines and verifiers.
They exchange the plain records defined here and in `types`.  The learner is a
`learner.step.LocalLearner` or a `cluster.learner_processes.LearnerProcesses`;
generators are a thread (`generation.driver`) or replicas (`controller.fleet`), each of
which is told things by one call over its `Link`:

    report = replica.exchange(instructions, wait_s)

The call hands over what is new, waits until the replica has something to say, and
brings it back.  Delivering a second one ends the wait of the first.  It cannot be made
twice for one answer: a caller that loses an answer has lost the replica.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float

from scalerl_jax.types import Group, PackedBatch, Prompt, Scores
from scalerl_jax.weights.manifest import Manifest
from scalerl_jax.weights.publication import Published


class QueueClosed(Exception):  # noqa: N818  an end, not an error
    """The run is over: a thread that asked or waited should return."""


# The learner's train state: the loop hands it back, and never looks inside.
State = Any
# Params of one version as a replica gets them: arrays on its devices, or the manifest
# of what it fetches.
ReplicaParams = Published | Manifest


@runtime_checkable
class Publication(Protocol):
    """Params of one version as the learner publishes them, for any replica."""

    def for_replica(self, number: int, held_version: int) -> ReplicaParams | None:
        """Return them for the replica of this number; None: they are not ready yet.

        It was last given those of `held_version` (-1: none).
        """
        ...


_Params = TypeVar("_Params", Publication, ReplicaParams)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A group that is to be sampled, or is being sampled."""

    ticket: int
    prompt: Prompt
    begun_version: int  # policy version that sets its length limit; restarts keep it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """Contents of a checkpoint, as the loop gets them back."""

    step: int  # optimizer steps applied
    state: State
    host: dict[str, Any]  # the controller's books, JSON values
    groups: tuple[Group, ...]  # finished, and not yet trained on


class Learner(Protocol):
    """The learner, as the loop uses it: one in its process, or several processes."""

    @property
    def checkpointer(self) -> Any:
        """The run's checkpoints, a `learner.checkpoint.Checkpointer` or like it."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures of the learner for a row of metrics.jsonl."""
        ...

    def step(
        self, state: State, batch: PackedBatch
    ) -> tuple[State, dict[str, float], str]:
        """Make an optimizer step on a batch [M, R, S], which donates `state`.

        Return the next state, the metrics, and why the step was skipped ("": it was
        not).
        """
        ...

    def annotate(self, state: State, batches: list[PackedBatch]) -> list[Scores]:
        """Return the scores of a window's batches that the objective reads."""
        ...

    def publish(self, state: State, *, pinned: bool = False) -> Publication:
        """Return a copy of the params, laid out for generators.

        A `pinned` copy stays available until the next pinned one is published, however
        many others are published in between.
        """
        ...

    def score(self, state: State, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        """Return the log-probability of every target of a batch, in nats."""
        ...

    def examine(self, state: State, batch: PackedBatch) -> dict[str, float]:
        """Return the metrics and gradient norm of a batch [M, R, S]; make no step."""
        ...

    def save(
        self, step: int, state: State, *, host: dict[str, Any], groups: Sequence[Group]
    ) -> None:
        """Save the state, the controller's books and its groups.

        All three are copied on return; a thread may still write the copy.
        """
        ...

    def restore(self) -> Restored | None:
        """Return the newest good checkpoint, if there is any."""
        ...


class Orders(Protocol):
    """The part of a run that generators use: it gives orders and takes groups."""

    def admit(self, used_version: int) -> Order | None:
        """Return a group that may start now with params of that version, or None."""
        ...

    def sampled(self, ticket: int) -> None:
        """Note that a group is wholly sampled and only its verdicts are missing."""
        ...

    def put(self, group: Group) -> bool:
        """Take a finished and judged group; return False if it is not good.

        Its order is then given again.
        """
        ...

    def drop(self, ticket: int, reason: str) -> None:
        """End a group without a result; its place is given back."""
        ...

    def withdrawn(self) -> Collection[int]:
        """Return the tickets of groups that are no longer wanted."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `admit` may answer differently, at most `timeout_s`."""
        ...

    def wake(self) -> None:
        """End a `wait`: params, jobs or orders of the generators have changed."""
        ...

    def fail(self, error: BaseException) -> None:
        """Hand the error that ended generating to the loop."""
        ...

    def raise_if_over(self) -> None:
        """Raise QueueClosed if the run is over, or the error that ended it."""
        ...


class Generators(Protocol):
    """The sampling side, as the loop uses it: one thread, or many machines."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures of the generators for a row of metrics.jsonl."""
        ...

    def start(self) -> None:
        """Begin to sample the orders of the order book."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Stop sampling; wait at most `timeout_s` for the step under way."""
        ...

    def publish(self, publication: Publication, *, policy_version: int) -> None:
        """Hand over the params with which tokens are sampled from now on."""
        ...

    def sample(self, publication: Publication) -> list[Any]:
        """Return (prompt, completion) pairs to compare log-probabilities on."""
        ...

    def evaluate(
        self,
        publication: Publication,
        *,
        policy_version: int,
        stopped: Callable[[], bool],
        beside: bool = False,
    ) -> tuple[Any, list[Any]]:
        """Return the evaluation on held-out prompts, and the pairs of `sample`.

        Training prompts are sampled meanwhile only with `beside`, and then there are no
        pairs.
        """
        ...

    def hang(self) -> str:
        """Return the place where a step hangs; "": none does.

        A step hangs once it has lasted for half of queue.batch_timeout_s.
        """
        ...

    def in_flight(self) -> Mapping[int, int]:
        """Return the tickets under way, and how many tokens each has so far."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """An order, and the version of the params that it may begin with at the least."""

    order: Order
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaJob(Generic[_Params]):
    """Work at one version, done between two steps of the sampling."""

    number: int
    kind: Literal["probe", "evaluate"]
    publication: _Params  # of that version; `ReplicaParams` once a replica has the job
    policy_version: int
    places: tuple[int, ...] = ()  # held-out prompts of an evaluation
    beside: bool = False  # the sampling goes on, and the params may be older than its


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobResult:
    """The end of a job: its value, or the error that it ended with."""

    number: int
    value: Any = None
    error: BaseException | None = None
    without_params: str = ""  # why its params could not be had; it was not begun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instructions:
    """News for a replica."""

    publication: ReplicaParams | None = None  # for all that is sampled from now on
    policy_version: int = -1  # optimizer steps behind them
    assignments: tuple[Assignment, ...] = ()
    withdrawn: tuple[int, ...] = ()  # tickets whose groups nobody wants any more
    jobs: tuple[ReplicaJob[ReplicaParams], ...] = ()
    abandoned: tuple[int, ...] = ()  # jobs whose results nobody wants any more
    over: bool = False  # sample nothing more


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """The work of a replica since its last report, and its state."""

    used_version: int  # of the params that the sampling thread has; -1: none so far
    capacity: int  # groups not wholly sampled that it can have, as its slots are now
    sampled: tuple[int, ...] = ()  # tickets that lack nothing but verdicts
    groups: tuple[Group, ...] = ()  # finished and judged
    dropped: tuple[tuple[int, str], ...] = ()  # tickets without a result, and why
    tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)  # so far
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # busy
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of a ledger
    metrics: Mapping[str, int] = dataclasses.field(default_factory=dict)  # in all
    hang: str = ""  # where its sampling thread hangs; "": it does not
    results: tuple[JobResult, ...] = ()
    verifier_restarts: int = 0  # in all
    refused: str = ""  # why the last publication is not in use
    leaving: bool = False  # its machine is being taken away; give it nothing more
    failure: BaseException | None = None  # what ended its sampling


class Link(Protocol):
    """The way to one replica, whatever it goes through."""

    where: str  # host and process, for people
    replaceable: (
        bool  # another one can come in its place; else its failure is the run's
    )

    def exchange(
        self, instructions: Instructions, wait_s: float
    ) -> Future[ReplicaReport]:
        """Call the replica; the future fails if it is lost."""
        ...

    def close(self) -> None:
        """End the replica, which need not answer; returns at once."""
        ...
