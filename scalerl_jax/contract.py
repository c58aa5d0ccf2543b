"""The contract between the three roles: controller, learner and generators.

The controller runs the loop and keeps the run's records: queue, prompts, ledger, files.
The learner holds the arrays of the train state; generators hold engines and verifiers.
They exchange the plain records defined here and in `types`.  The learner is a
`learner.step.LocalLearner` or a `cluster.learner_processes.LearnerProcesses`;
generators are a thread (`generation.driver`) or replicas (`controller.fleet`).  The
controller reaches a replica by one call over its `Link`:

    report = replica.exchange(instructions, wait_s)

The call delivers new instructions, waits until the replica has something to report,
and returns the report.  A second call ends the wait of the first.  A report cannot be
requested again: if one is lost, the replica counts as lost.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from scalerl_jax.types import Group, PackedBatch, Prompt, Scores
from scalerl_jax.weights.manifest import Manifest
from scalerl_jax.weights.publication import Published


class QueueClosed(Exception):  # an end, not an error
    """The run is over: a thread that asked or waited should return."""


# The learner's train state, opaque to the loop, which passes it back to the learner.
State = Any
# Params of one version as a replica gets them: arrays on its devices, or a manifest of
# the files that it fetches.
ReplicaParams = Published | Manifest


@runtime_checkable
class Publication(Protocol):
    """Params of one version as the learner publishes them, for any replica."""

    def for_replica(self, number: int, held_version: int) -> ReplicaParams | None:
        """Return the params for replica `number`; None: they are not ready yet.

        The replica last received those of `held_version` (-1: none).
        """
        ...


_Params = TypeVar("_Params", Publication, ReplicaParams)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A group to sample, or under way."""

    ticket: int
    prompt: Prompt
    begun_version: int  # policy version that sets its length limit; restarts keep it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """Contents of a checkpoint, as the loop gets them back."""

    step: int  # optimizer steps applied
    state: State
    host: dict[str, Any]  # the controller's books, JSON values
    groups: tuple[Group, ...]  # finished, not yet trained on


@runtime_checkable
class Assembled(Protocol):
    """The groups that a batch was made of, from which it can be made again."""

    @property
    def groups(self) -> Sequence[Group]:
        """The groups, trained on or filtered away."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the learner as they were packed: a window's first."""
        ...

    @property
    def rollout(self) -> Int[np.ndarray, "M R S"]:
        """The rollout n * G + g of each prediction; -1 where there is none."""
        ...


# From what a batch can be made again: its groups, or its number in a known order.
MadeOf = Assembled | int


class Learner(Protocol):
    """The learner as the loop uses it, in the loop's process or in several others."""

    @property
    def checkpointer(self) -> Any:
        """The run's checkpoints: a `learner.checkpoint.Checkpointer` or similar."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The learner's metrics for a row of metrics.jsonl."""
        ...

    def step(
        self, state: State, batch: PackedBatch, made_of: MadeOf
    ) -> tuple[State, dict[str, float], str]:
        """Make an optimizer step on a batch [M, R, S]; `state` is donated.

        Return the next state, the metrics, and the reason if the step was skipped ("":
        it was made).  A learner that may have to repeat the step keeps `made_of`, which
        is a third of the batch.
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
        """Return the metrics and gradient norm of a batch [M, R, S] without a step."""
        ...

    def save(
        self, step: int, state: State, *, host: dict[str, Any], groups: Sequence[Group]
    ) -> None:
        """Save the state, the controller's books and its groups.

        All three are copied on return; a thread may still write the copy.
        """
        ...

    def restore(self) -> Restored | None:
        """Return the newest good checkpoint, or None."""
        ...


class Orders(Protocol):
    """The order book as generators use it: it gives orders and takes groups."""

    def admit(self, used_version: int) -> Order | None:
        """Return a group that may start now with params of that version, or None."""
        ...

    def sampled(self, ticket: int) -> None:
        """Record that a group is fully sampled and only its verdicts are missing."""
        ...

    def put(self, group: Group) -> bool:
        """Take a finished and judged group; return False if it is not valid.

        An invalid group's order is given out again.
        """
        ...

    def drop(self, ticket: int, reason: str) -> None:
        """End a group without a result, and free its place in the window."""
        ...

    def withdrawn(self) -> Collection[int]:
        """Return the tickets of groups that are no longer needed."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `admit` may give another answer, at most `timeout_s`."""
        ...

    def wake(self) -> None:
        """End a `wait` because the generators' params, jobs or orders have changed."""
        ...

    def fail(self, error: BaseException) -> None:
        """Pass the error that ended generation to the loop."""
        ...

    def raise_if_over(self) -> None:
        """Raise QueueClosed if the run is over, or the error that ended it."""
        ...


class Generators(Protocol):
    """The sampling side as the loop uses it: one thread, or many machines."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The generators' metrics for a row of metrics.jsonl."""
        ...

    def start(self) -> None:
        """Start to sample the orders of the order book."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Stop sampling; wait at most `timeout_s` for the step under way."""
        ...

    def publish(self, publication: Publication, *, policy_version: int) -> None:
        """Deliver the params with which tokens are sampled from now on."""
        ...

    def sample(self, publication: Publication) -> list[Any]:
        """Return (prompt, completion) pairs whose log-probabilities are compared."""
        ...

    def evaluate(
        self,
        publication: Publication,
        *,
        policy_version: int,
        stopped: Callable[[], bool],
        beside: bool = False,
        probe: bool = True,
    ) -> tuple[Any, list[Any]]:
        """Return the evaluation on held-out prompts, and the pairs of `sample`.

        With `beside` training prompts are sampled meanwhile.  Then, and without
        `probe`, there are no pairs.
        """
        ...

    def hang(self) -> str:
        """Return where in the code a step hangs; "": none does.

        A step counts as hung once it has lasted for half of queue.batch_timeout_s.
        """
        ...

    def in_flight(self) -> Mapping[int, int]:
        """Return the tokens that each group under way has so far, by ticket."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """An order, and the oldest version of the params that it may start with."""

    order: Order
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaJob(Generic[_Params]):
    """A job at one version of the params, done between two sampling steps."""

    number: int
    kind: Literal["probe", "evaluate"]
    publication: _Params  # of that version; `ReplicaParams` once a replica has the job
    policy_version: int
    places: tuple[int, ...] = ()  # an evaluation's indices of held-out prompts
    beside: bool = False  # sampling continues; its params may be newer than the job's


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobResult:
    """The result of a job: its value, or the error with which it ended."""

    number: int
    value: Any = None
    error: BaseException | None = None
    without_params: str = ""  # why its params were not available; it was not started


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instructions:
    """New params, orders and jobs for a replica."""

    publication: ReplicaParams | None = None  # params for all further sampling
    policy_version: int = -1  # version of `publication`
    assignments: tuple[Assignment, ...] = ()
    withdrawn: tuple[int, ...] = ()  # tickets of groups that are no longer needed
    jobs: tuple[ReplicaJob[ReplicaParams], ...] = ()
    abandoned: tuple[int, ...] = ()  # numbers of jobs that are no longer needed
    over: bool = False  # sample nothing more


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """The state of a replica, and its work since the last report."""

    used_version: int  # version of the sampling thread's params; -1: no params yet
    capacity: int  # groups not fully sampled that its slots have room for now
    sampled: tuple[int, ...] = ()  # tickets that lack only verdicts
    groups: tuple[Group, ...] = ()  # finished and judged
    dropped: tuple[tuple[int, str], ...] = ()  # (ticket without a result, reason)
    tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)  # so far
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # busy
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of a ledger
    metrics: Mapping[str, int] = dataclasses.field(default_factory=dict)  # totals
    hang: str = ""  # where in the code its sampling thread hangs; "": it does not
    results: tuple[JobResult, ...] = ()
    verifier_restarts: int = 0  # total
    refused: str = ""  # why the last publication is not in use
    leaving: bool = False  # its machine is being preempted: give it no more work
    failure: BaseException | None = None  # the error that ended its sampling


class Link(Protocol):
    """The connection to one replica, in this process or another."""

    where: str  # host and process, for messages
    replaceable: bool  # can be replaced; else its failure ends the run

    def exchange(
        self, instructions: Instructions, wait_s: float
    ) -> Future[ReplicaReport]:
        """Call the replica; the future fails if the replica is lost."""
        ...

    def close(self) -> None:
        """End the replica without waiting for its answer."""
        ...
