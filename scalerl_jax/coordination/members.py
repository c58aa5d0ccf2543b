"""The replicas of a run as its controller knows them, and the jobs that they are given.

A job is a part of an evaluation, or a probe; each is done by one of the replicas.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from scalerl_jax.exchange import Assignment, Job, JobResult, Link, Report


class Roomy(Protocol):
    """A replica that groups can be given to."""

    @property
    def up(self) -> bool:
        """Return whether it has answered."""
        ...

    @property
    def room(self) -> int:
        """Groups that it could begin now."""
        ...


R = TypeVar("R", bound=Roomy)


def freest(replicas: Iterable[R]) -> R | None:
    """Return the replica with the most room, the first of equals; None: all are full.

    It is the one that the next group goes to.
    """
    found, most = None, 0
    for each in replicas:
        if each.up and (room := each.room) > most:
            found, most = each, room
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The controller's waits for replicas, and the times that it replaces them."""

    start_timeout_s: float = 600.0  # for one to come up; 0 or more
    silence_timeout_s: float = 60.0  # for an answer of one that is up
    reissue_after_s: float = 0.0  # groups go to another replica then; 0: never
    losses: int = 5  # in a row, without a finished group between: the run ends
    poll_s: float = 5.0  # that a replica may wait for news of its own


@dataclasses.dataclass(kw_only=True)
class Member:
    """The place of one replica, with what the one that is there now has been given."""

    number: int
    pool: str  # of the ledger
    link: Link | None = None
    coming: Future[Link] | None = None  # a link that is not up yet
    since_s: float = 0.0  # when it began to come, or answered last
    calls: list[Future[Report]] = dataclasses.field(default_factory=list)
    losses: int = 0  # in this place, in all
    used_version: int = -1
    sent_version: int = -1  # of the newest publication it has been given
    capacity: int = 0
    assignments: dict[int, Assignment] = dataclasses.field(default_factory=dict)
    given_s: dict[int, float] = dataclasses.field(default_factory=dict)
    sampled: set[int] = dataclasses.field(default_factory=set)
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    # Tickets that were taken from it, and that it may still be sampling.
    withdrawn: set[int] = dataclasses.field(default_factory=set)
    jobs: set[int] = dataclasses.field(default_factory=set)  # their numbers
    metrics: dict[str, int] = dataclasses.field(default_factory=dict)
    verifier_restarts: int = 0
    # What goes with the next call.
    assigned: list[Assignment] = dataclasses.field(default_factory=list)
    new_jobs: list[Job] = dataclasses.field(default_factory=list)
    to_withdraw: list[int] = dataclasses.field(default_factory=list)
    abandoned: list[int] = dataclasses.field(default_factory=list)
    refusals: int = 0  # of publications, in a row

    @property
    def where(self) -> str:
        """Return its host, for people."""
        return self.link.where if self.link else "no host yet"

    @property
    def up(self) -> bool:
        """Return whether it has answered."""
        return self.link is not None and self.capacity > 0

    @property
    def room(self) -> int:
        """Groups that it could begin now."""
        return self.capacity - len(self.assignments.keys() - self.sampled)

    @property
    def version(self) -> int:
        """The version to count its next group by: what it uses, or will begin with."""
        return self.used_version if self.used_version >= 0 else self.sent_version

    def give(self, assignment: Assignment, now_s: float) -> None:
        """Note an assignment, which goes with the next call."""
        ticket = assignment.order.ticket
        self.assignments[ticket] = assignment
        self.given_s[ticket] = now_s
        self.assigned.append(assignment)

    def give_job(self, job: Job) -> None:
        """Note a job, which goes with the next call."""
        self.jobs.add(job.number)
        self.new_jobs.append(job)

    def forget(self, ticket: int) -> None:
        """Take an assignment off its books."""
        del self.assignments[ticket], self.given_s[ticket]
        self.sampled.discard(ticket)
        self.tokens.pop(ticket, None)

    def withdraw(self, ticket: int) -> None:
        """Take an assignment away, which the replica will hear of."""
        self.forget(ticket)
        self.withdrawn.add(ticket)
        self.to_withdraw.append(ticket)

    def take_new(self) -> dict[str, Any]:
        """Return what goes with the next call, once: fields of `Instructions`."""
        said = dict(
            assignments=tuple(self.assigned),
            withdrawn=tuple(self.to_withdraw),
            jobs=tuple(self.new_jobs),
            abandoned=tuple(self.abandoned),
        )
        for each in (self.assigned, self.to_withdraw, self.new_jobs, self.abandoned):
            each.clear()
        return said


@dataclasses.dataclass(kw_only=True)
class _Wanted:
    """A job that is to be done, by the replica of a number or by any."""

    job: Job
    number: int | None
    result: Future[Any]
    taken: bool = False  # a replica has it


class JobBoard:
    """The jobs that are not done yet; the caller sees to it that one thread is in."""

    def __init__(self) -> None:
        """Begin without any."""
        self._wanted: list[_Wanted] = []

    def submit(self, job: Job, number: int | None) -> Future[Any]:
        """Have a job done by the replica of a number, or by any."""
        wanted = _Wanted(job=job, number=number, result=Future())
        self._wanted.append(wanted)
        return wanted.result

    def withdraw(self, jobs: Iterable[Job], members: Iterable[Member]) -> None:
        """Have these jobs left undone, if they are not done yet."""
        numbers = {job.number for job in jobs}
        self._wanted = [each for each in self._wanted if each.job.number not in numbers]
        for member in members:
            gone = member.jobs & numbers
            member.jobs -= gone
            member.abandoned += sorted(numbers)  # who has done some may hold params

    def hand_out(
        self, members: Sequence[Member], address: Callable[[Any, int, int], Any]
    ) -> None:
        """Give each job that nobody has to a replica that has none."""
        for wanted in self._wanted:
            able = [
                each
                for each in members
                if each.up
                and not each.jobs
                and wanted.number in (None, each.number)
                and (each.used_version >= 0 or not wanted.job.beside)
            ]
            if not able or wanted.taken:
                continue
            job, held = wanted.job, able[0].sent_version
            own = address(job.publication, able[0].number, held)
            if own is not None:
                wanted.taken = True
                able[0].give_job(dataclasses.replace(job, publication=own))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Have these done by another replica."""
        for wanted in self._wanted:
            if wanted.job.number in numbers:
                wanted.taken = False

    def is_beside(self, number: int) -> bool:
        """Return whether a job's params are pinned, whatever its replica samples with.

        That they cannot be had says nothing of the replica.
        """
        return any(
            wanted.job.number == number and wanted.job.beside for wanted in self._wanted
        )

    def end(self, result: JobResult) -> None:
        """Hand on what a job has come to; one without params is for any replica."""
        if result.without_params:
            self.give_back([result.number])
            return
        for wanted in [w for w in self._wanted if w.job.number == result.number]:
            self._wanted.remove(wanted)
            if result.error is not None:
                wanted.result.set_exception(result.error)
            else:
                wanted.result.set_result(result.value)
