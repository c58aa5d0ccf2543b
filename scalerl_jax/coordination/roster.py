"""The replicas of a run: what each was given, what it has handed in, who is lost.

`turn` takes the reports that have come, replaces replicas that are lost, and hands out
what is new.  Replicas may come and go at any time.  What one had is sampled again by
another, from the same prompts and keys; whatever comes late from the first is refused,
for the ticket is no longer in its name.

Without staleness the replica of a group depends on its ticket alone, so that nothing of
a run hangs on which of them was faster.
"""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from scalerl_jax.contract import Publication
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.coordination.members import JobBoard, Limits, Member, freest
from scalerl_jax.exchange import Assignment, Instructions, Job, Link, Report
from scalerl_jax.utils.ending import first_line
from scalerl_jax.utils.ledger import Ledger

_MOST_REFUSALS = 3  # of publications by one replica, in a row


class ReplicaLost(Exception):  # noqa: N818  what happened to it, in one line
    """A replica is gone, or has to go."""


class ReplicaLeaves(ReplicaLost):
    """A replica is about to be gone, and says so: no fault of anybody's."""


class Roster:
    """Books of the replicas, moved on by `turn`, which one thread calls.

    All other methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        desk: OrderDesk,
        ledger: Ledger,
        connect: Callable[[int], Future[Link]],
        pools: Sequence[str],
        limits: Limits,
        address: Callable[[Publication, int, int], Any],
        by_ticket: bool = False,
        note: Callable[[str], None] = lambda text: None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have a replica for each of `pools`; `connect` starts the one of a number.

        `address` returns a publication for the replica of a number, by the version that
        it was given last (-1: none); None where it is not ready yet.  `by_ticket` deals
        groups out in turn, whatever replica is free.  `wake` is called when a turn is
        due.
        """
        self._desk = desk
        self._ledger = ledger
        self._connect = connect
        self._limits = limits
        self._address = address
        self._by_ticket = by_ticket
        self._note = note
        self._wake = wake
        self._clock = clock
        self._lock = threading.RLock()
        self.members = [Member(number=at, pool=pool) for at, pool in enumerate(pools)]
        self._publication: Publication = None
        self._version = -1  # of it
        self._ordering = False
        self._again: collections.deque[int] = collections.deque()  # tickets of the lost
        self._jobs = JobBoard()
        self._in_row = 0  # losses since the last finished group
        self.events: collections.Counter[str] = collections.Counter(
            lost=0, left=0, reissued=0, late=0, refused=0
        )

    # Asked for from outside.

    def order(self) -> None:
        """Begin to hand out orders."""
        with self._lock:
            self._ordering = True

    def publish(self, publication: Publication, policy_version: int) -> None:
        """Hand over params for all that is sampled from now on."""
        with self._lock:
            self._publication, self._version = publication, policy_version

    def submit(self, job: Job, number: int | None = None) -> Future[Any]:
        """Have a job done by the replica of a number, or by any."""
        with self._lock:
            return self._jobs.submit(job, number)

    def withdraw(self, jobs: Iterable[Job]) -> None:
        """Have these jobs left undone, if they are not done yet."""
        with self._lock:
            self._jobs.withdraw(jobs, self.members)

    def in_flight(self) -> dict[int, int]:
        """Return the tickets under way, and how many tokens each has so far."""
        with self._lock:
            return {
                ticket: member.tokens.get(ticket, 0)
                for member in self.members
                for ticket in member.assignments
            }

    # A turn.

    def turn(self) -> None:
        """Take what has come, replace what is lost, hand out what is new.

        Raises:
            QueueClosed: the run is over.
            RuntimeError: replicas are lost again and again, or cannot be started.
            BaseException: what ended the run.
        """
        with self._lock:
            for member in self.members:
                try:
                    self._hear(member)
                except ReplicaLeaves as leave:
                    self._replace(member, f"leaves ({leave})", event="left")
                except ReplicaLost as loss:
                    self._lose(member, str(loss))
            self._desk.raise_if_over()
            if self._publication is None:
                return
            if self._ordering:
                self._deal()
            self._jobs.hand_out(self.members, self._address)
            for member in self.members:
                self._send(member)

    def end(self, timeout_s: float) -> None:
        """End every replica; one that does not answer is left behind."""
        with self._lock:
            links = [member.link for member in self.members if member.link]
            calls = [link.exchange(Instructions(over=True), 0.0) for link in links]
        concurrent.futures.wait(calls, timeout_s)
        for link in links:
            link.close()

    # Under the lock.

    def _hear(self, member: Member) -> None:
        """Take the answers of a replica; start it if it is not there."""
        now = self._clock()
        if member.link is None:
            self._await(member, now)
            return
        for call in [call for call in member.calls if call.done()]:
            member.calls.remove(call)
            if error := call.exception():
                raise ReplicaLost(f"{type(error).__name__}: {first_line(error)}")
            member.since_s = now
            self._take(member, call.result())
        silence = now - member.since_s
        if member.calls and silence > self._limits.silence_timeout_s:
            raise ReplicaLost(
                f"no answer for {silence:.0f} s (generators.silence_timeout_s = "
                f"{self._limits.silence_timeout_s:g})"
            )
        self._withdraw_late(member, now)

    def _withdraw_late(self, member: Member, now: float) -> None:
        """Have groups that take too long begun again by a replica that is free.

        One that had the ticket before gets it again only once it has given it up.
        """
        limit = self._limits.reissue_after_s
        if not limit or self._by_ticket:
            return
        for ticket, given_s in list(member.given_s.items()):
            late = now - given_s > limit and ticket not in member.sampled
            if late and self._free(ticket, but=member):
                member.withdraw(ticket)
                self._reissue(ticket)

    def _await(self, member: Member, now: float) -> None:
        """Start a replica, or see whether it has come."""
        if member.coming is None:
            member.coming, member.since_s = self._connect(member.number), now
            member.coming.add_done_callback(lambda _: self._wake())
        elif member.coming.done():
            coming, member.coming = member.coming, None
            if isinstance(error := coming.exception(), ValueError):
                raise error  # a mistake in what was asked for: another has it too
            if error:
                raise ReplicaLost(f"it did not start: {first_line(error)}") from error
            member.link, member.since_s = coming.result(), now
        elif now - member.since_s > self._limits.start_timeout_s:
            raise ReplicaLost(
                f"it did not start in generators.start_timeout_s = "
                f"{self._limits.start_timeout_s:g} s"
            )

    def _take(self, member: Member, report: Report) -> None:
        """Enter a report in the books; what is not in its name any more is refused."""
        if report.failure is not None:
            if member.link and not member.link.replaceable:
                raise report.failure
            raise ReplicaLost(
                f"{type(report.failure).__name__}: {first_line(report.failure)}"
            )
        member.used_version = max(member.used_version, report.used_version)
        member.capacity = report.capacity
        member.metrics = dict(report.metrics)
        member.verifier_restarts = report.verifier_restarts
        if report.seconds:
            self._ledger.book(member.pool, report.seconds)
        self._ledger.count(**report.counts)
        self._take_groups(member, report)
        refused = [report.refused] if report.refused else []
        for result in report.results:
            member.jobs.discard(result.number)
            if result.without_params and self._jobs.is_beside(result.number):
                self._note(
                    f"warning: replica {member.number} on {member.where} cannot make "
                    f"its part of an evaluation: {result.without_params}"
                )
            elif result.without_params:
                refused.append(result.without_params)
            self._jobs.end(result)
        if refused:
            self._refused(member, refused[0])
        elif member.used_version == self._version:
            member.refusals = 0
        if report.leaving:
            raise ReplicaLeaves("SIGTERM")

    def _take_groups(self, member: Member, report: Report) -> None:
        own = member.assignments
        member.tokens |= {
            ticket: count for ticket, count in report.tokens.items() if ticket in own
        }
        for ticket in report.sampled:
            if ticket in own:
                member.sampled.add(ticket)
                self._desk.sampled(ticket)
        for group in report.groups:
            if group.ticket in own:
                self._in_row = 0
                member.forget(group.ticket)
                self._desk.put(group)
            else:
                self.events["late"] += 1
                member.withdrawn.discard(group.ticket)
                self._ledger.count(
                    wasted_tokens=sum(
                        len(each.completion_tokens) for each in group.rollouts
                    )
                )
        for ticket, reason in report.dropped:
            member.withdrawn.discard(ticket)
            if ticket in own:
                member.forget(ticket)
                self._desk.drop(ticket, reason)

    def _refused(self, member: Member, reason: str) -> None:
        """Send the params again; whoever cannot take them has to go."""
        self.events["refused"] += 1
        member.refusals += 1
        member.sent_version = -1
        self._note(
            f"warning: replica {member.number} on {member.where} goes on with the "
            f"params of version {member.used_version}: {reason}"
        )
        if member.refusals >= _MOST_REFUSALS:
            raise ReplicaLost(f"{member.refusals} publications in a row refused")

    def _lose(self, member: Member, cause: str) -> None:
        """Give up a replica; the run ends when that happens too often in a row."""
        self._in_row += 1
        where = member.where
        self._replace(member, f"is lost ({cause})", event="lost")
        if self._in_row > self._limits.losses:
            raise RuntimeError(
                f"{self._in_row} replicas were lost without a finished group between, "
                f"the limit is generators.losses = {self._limits.losses}; the last was "
                f"replica {member.number} on {where}: {cause}"
            )

    def _replace(self, member: Member, what: str, *, event: str) -> None:
        """Give a replica's work to others, and have another one come."""
        self.events[event] += 1
        tickets = sorted(member.assignments)
        self._note(
            f"warning: replica {member.number} on {member.where} {what}; "
            f"{len(tickets)} groups are sampled again"
        )
        self._ledger.count(wasted_tokens=sum(member.tokens.values()))
        if member.link is not None:
            member.link.close()
        numbers = set(member.jobs)
        self.members[member.number] = Member(
            number=member.number, pool=member.pool, losses=member.losses + 1
        )
        for ticket in tickets:
            self._reissue(ticket)
        self._jobs.give_back(numbers)

    def _reissue(self, ticket: int) -> None:
        self.events["reissued"] += 1
        self._again.append(ticket)

    def _deal(self) -> None:
        """Assign orders: those of lost replicas first."""
        for ticket in list(self._again):
            member = self._free(ticket)
            if self._by_ticket:
                member = self.members[ticket % len(self.members)]
            if member is not None:
                self._again.remove(ticket)
                version = self._version if self._by_ticket else member.version
                order, version = self._desk.reissue(ticket, version)
                assignment = Assignment(order=order, version=version)
                member.give(assignment, self._clock())
        while (member := self.members[0] if self._by_ticket else self._free()) and (
            assignment := self._admit(member)
        ):
            if self._by_ticket:
                ticket = assignment.order.ticket
                member = self.members[ticket % len(self.members)]
            member.give(assignment, self._clock())

    def _free(self, ticket: int = -1, but: Member | None = None) -> Member | None:
        """Return the replica with the most room, if any has some for this ticket."""
        return freest(
            each
            for each in self.members
            if each is not but and ticket not in each.withdrawn
        )

    def _admit(self, member: Member) -> Assignment | None:
        """Return a new order, if there may be one, counted by the version in use there.

        Where that is too old it is counted by the newest, for which it then waits.
        """
        newest = self._version
        versions = [newest] if self._by_ticket else [member.version, newest]
        for version in dict.fromkeys(versions):
            if order := self._desk.admit(version):
                return Assignment(order=order, version=version)
        return None

    def _send(self, member: Member) -> None:
        """Make a call if there is something new, or none is under way."""
        if member.link is None:
            return
        instructions = self._instructions(member)
        if instructions == Instructions() and member.calls:
            return
        if not member.calls:
            member.since_s = self._clock()
        call = member.link.exchange(instructions, self._limits.poll_s)
        member.calls.append(call)
        call.add_done_callback(lambda _: self._wake())

    def _instructions(self, member: Member) -> Instructions:
        said: dict[str, Any] = {}
        if member.sent_version < self._version:
            said["publication"] = self._address(
                self._publication, member.number, member.sent_version
            )
            if said["publication"] is not None:
                said["policy_version"] = member.sent_version = self._version
        return Instructions(**said, **member.take_new())
