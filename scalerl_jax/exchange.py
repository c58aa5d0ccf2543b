"""The one call by which a controller and a generator replica tell each other things.

    report = replica.exchange(instructions, wait_s)

The call hands over what is new, waits until the replica has something to say, and
brings it back.  Delivering a second one ends the wait of the first.  It cannot be made
twice for one answer: a caller that loses an answer has lost the replica.
"""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from scalerl_jax.contract import Order
from scalerl_jax.types import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """An order, and the version of the params that it may begin with at the least."""

    order: Order
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Work at one version, done between two steps of the sampling."""

    number: int
    kind: Literal["probe", "evaluate"]
    publication: Any  # params of that version
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

    publication: Any = None  # params for all that is sampled from now on
    policy_version: int = -1  # optimizer steps behind them
    assignments: tuple[Assignment, ...] = ()
    withdrawn: tuple[int, ...] = ()  # tickets whose groups nobody wants any more
    jobs: tuple[Job, ...] = ()
    abandoned: tuple[int, ...] = ()  # jobs whose results nobody wants any more
    over: bool = False  # sample nothing more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
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

    def exchange(self, instructions: Instructions, wait_s: float) -> Future[Report]:
        """Call the replica; the future fails if it is lost."""
        ...

    def close(self) -> None:
        """End the replica, which need not answer; returns at once."""
        ...
