"""The controller's records of replicas and of their jobs.

A job is a part of an evaluation, or a probe; one replica does it.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from scalerl_jax.contract import (
    Assignment,
    JobResult,
    Link,
    Publication,
    ReplicaJob,
    ReplicaReport,
)

# A replica that lacks the params of a job beside the run gets it again after a pause,
# each time twice as long: over 10 minutes in all, in which a learner starts again.
_MOST_LACKS = 7
_PAUSE_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetLimits:
    """Time limits for replicas, and the limit of losses in a row.

    The first four are settings of the section `generators`, which has their defaults.
    """

    start_timeout_s: float  # for a replica to start; 0 or more
    silence_timeout_s: float  # for an answer of a replica that is up
    reissue_after_s: float  # an older group moves to another replica; 0: never
    losses: int  # in a row, without a finished group; one more ends the run
    poll_s: float = 5.0  # longest wait of a call for something to report


@dataclasses.dataclass(kw_only=True)
class KnownReplica:
    """The record of replica `number`, and of its work since it was last replaced."""

    number: int
    pool: str  # its pool in the ledger
    link: Link | None = None
    coming: Future[Link] | None = None  # a link that is not up yet
    since_s: float = 0.0  # time of its start, or of its last answer
    calls: list[Future[ReplicaReport]] = dataclasses.field(default_factory=list)
    losses: int = 0  # replicas lost under this number so far
    used_version: int = -1
    sent_version: int = -1  # version of the newest publication sent to it
    newest_version: int = -1  # the same, not reset by a refused publication
    capacity: int = 0
    assignments: dict[int, Assignment] = dataclasses.field(default_factory=dict)
    given_s: dict[int, float] = dataclasses.field(default_factory=dict)
    sampled: set[int] = dataclasses.field(default_factory=set)
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    # Tickets taken from the replica that it may still be sampling.
    withdrawn: set[int] = dataclasses.field(default_factory=set)
    jobs: set[int] = dataclasses.field(default_factory=set)  # numbers of its jobs
    metrics: dict[str, int] = dataclasses.field(default_factory=dict)
    hang: str = ""  # where its sampling thread hangs; "": it does not
    verifier_restarts: int = 0
    # Contents of the next call.
    assigned: list[Assignment] = dataclasses.field(default_factory=list)
    new_jobs: list[ReplicaJob] = dataclasses.field(default_factory=list)
    to_withdraw: list[int] = dataclasses.field(default_factory=list)
    abandoned: list[int] = dataclasses.field(default_factory=list)
    refusals: int = 0  # publications refused in a row
    bad_groups: int = 0  # returned so far

    @property
    def where(self) -> str:
        """Return the replica's host, for messages."""
        return self.link.where if self.link else "no host yet"

    @property
    def life(self) -> tuple[int, int]:
        """Return what tells it from those under this number before and after it."""
        return self.number, self.losses

    @property
    def up(self) -> bool:
        """Return whether the replica has reported."""
        return self.link is not None and self.capacity > 0

    @property
    def room(self) -> int:
        """Number of groups that it can start now."""
        return self.capacity - len(self.assignments.keys() - self.sampled)

    @property
    def version(self) -> int:
        """Policy version with which the replica starts its next group; -1: none yet.

        It has none again if it refused its first publication, until the next is sent.
        """
        return self.used_version if self.used_version >= 0 else self.sent_version

    def give(self, assignment: Assignment, now_s: float) -> None:
        """Record an assignment, to send with the next call."""
        ticket = assignment.order.ticket
        self.assignments[ticket] = assignment
        self.given_s[ticket] = now_s
        self.assigned.append(assignment)

    def give_job(self, job: ReplicaJob) -> None:
        """Record a job, to send with the next call."""
        self.jobs.add(job.number)
        self.new_jobs.append(job)

    def forget(self, ticket: int) -> None:
        """Remove an assignment from the replica's record."""
        del self.assignments[ticket], self.given_s[ticket]
        self.sampled.discard(ticket)
        self.tokens.pop(ticket, None)

    def withdraw(self, ticket: int) -> None:
        """Withdraw an assignment, and tell the replica with the next call."""
        self.forget(ticket)
        self.withdrawn.add(ticket)
        self.to_withdraw.append(ticket)

    def take_new(self) -> dict[str, Any]:
        """Return and clear the next call's contents, as fields of `Instructions`."""
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
    """A job for replica `number`, or for any (None)."""

    job: ReplicaJob[Publication]
    number: int | None
    result: Future[Any]
    taken: bool = False  # a replica has it
    losses: int = 0  # of replicas that had it
    # By replica (`life`): how often it lacked the params, and when it may try again.
    lacks: collections.Counter[tuple[int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )
    again_s: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why params were lacking the last time

    def lack(self, replica: KnownReplica, reason: str, now_s: float) -> None:
        """Record that a replica lacked the params."""
        life = replica.life
        self.again_s[life] = now_s + _PAUSE_S * 2 ** self.lacks[life]
        self.lacks[life] += 1
        self.reason = reason

    def able(self, replicas: Iterable[KnownReplica]) -> list[KnownReplica]:
        """Return the replicas that may do the job, busy or not."""
        return [
            each
            for each in replicas
            if each.up
            and self.number in (None, each.number)
            and (each.used_version >= 0 or not self.job.beside)
        ]

    def next(self, able: Iterable[KnownReplica], now_s: float) -> KnownReplica | None:
        """Return the replica without a job that has lacked the params least often."""
        free = [
            each
            for each in able
            if not each.jobs
            and self.lacks[each.life] < _MOST_LACKS
            and now_s >= self.again_s.get(each.life, now_s)
        ]
        return min(free, key=lambda each: self.lacks[each.life], default=None)

    def lacking_everywhere(self, able: Sequence[KnownReplica]) -> bool:
        """Return whether none of these replicas may try again."""
        return bool(able) and all(self.lacks[each.life] >= _MOST_LACKS for each in able)


class JobBoard:
    """The jobs that are not done yet.  Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        """Start without jobs."""
        self._wanted: list[_Wanted] = []

    def submit(self, job: ReplicaJob[Publication], number: int | None) -> Future[Any]:
        """Add a job for the replica of this number, or for any (None)."""
        wanted = _Wanted(job=job, number=number, result=Future())
        self._wanted.append(wanted)
        return wanted.result

    def withdraw(
        self, jobs: Iterable[ReplicaJob], replicas: Iterable[KnownReplica]
    ) -> None:
        """Cancel those of these jobs that are not done yet."""
        numbers = {job.number for job in jobs}
        self._wanted = [each for each in self._wanted if each.job.number not in numbers]
        for replica in replicas:
            gone = replica.jobs & numbers
            replica.jobs -= gone
            replica.abandoned += sorted(numbers)  # a replica may hold params for them

    def hand_out(self, replicas: Sequence[KnownReplica], now_s: float) -> None:
        """Assign each waiting job to a replica without a job.

        A job whose params all replicas have lacked too often ends with the reason.
        """
        for wanted in [each for each in self._wanted if not each.taken]:
            able = wanted.able(replicas)
            if wanted.lacking_everywhere(able):
                self._wanted.remove(wanted)
                wanted.result.set_exception(_never_there(wanted, able))
                continue
            replica = wanted.next(able, now_s)
            if replica is None:
                continue
            job = wanted.job
            own = job.publication.for_replica(replica.number, replica.sent_version)
            if own is not None:
                wanted.taken = True
                replica.give_job(dataclasses.replace(job, publication=own))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Make the jobs of a replica available to another replica again."""
        for wanted in self._wanted:
            if wanted.job.number in numbers:
                wanted.taken = False

    def count_loss(self, numbers: Iterable[int], cause: object, most: int) -> None:
        """Count a lost replica for the jobs that it had; one with too many ends.

        Such a job may be what ends each replica that takes it.
        """
        for wanted in [each for each in self._wanted if each.job.number in numbers]:
            wanted.losses += 1
            if wanted.losses > most:
                self._wanted.remove(wanted)
                wanted.result.set_exception(
                    RuntimeError(
                        f"{wanted.losses} replicas in a row were lost with the same "
                        f"part of an evaluation at version "
                        f"{wanted.job.policy_version}, more than generators.losses = "
                        f"{most}; the last one: {cause}"
                    )
                )

    def is_beside(self, number: int) -> bool:
        """Return whether a job uses pinned params, not those of the sampling.

        If a replica cannot get pinned params, that is no fault of the replica.
        """
        return any(
            wanted.job.number == number and wanted.job.beside for wanted in self._wanted
        )

    def end(self, result: JobResult, replica: KnownReplica, now_s: float) -> None:
        """Deliver a job's result; a job that lacked its params goes to any replica."""
        if result.without_params:
            for wanted in self._wanted:
                if wanted.job.number == result.number and wanted.job.beside:
                    wanted.lack(replica, result.without_params, now_s)
            self.give_back([result.number])
            return
        for wanted in [w for w in self._wanted if w.job.number == result.number]:
            self._wanted.remove(wanted)
            if result.error is not None:
                wanted.result.set_exception(result.error)
            else:
                wanted.result.set_result(result.value)


def _never_there(wanted: _Wanted, able: Sequence[KnownReplica]) -> RuntimeError:
    names = ", ".join(f"{each.number} on {each.where}" for each in able[:4])
    names += ", ..." * (len(able) > 4)
    return RuntimeError(
        f"the evaluation at version {wanted.job.policy_version} beside the run cannot "
        f"be made: each replica ({names}) has lacked its params {_MOST_LACKS} times, "
        f"the last time: {wanted.reason}; eval.concurrent=off evaluates in the loop, "
        f"without other params beside those of the sampling"
    )
