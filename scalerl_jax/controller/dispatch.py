"""The controller's books of its replicas: assignments, reports, and losses.

`turn` reads the reports that have come, replaces lost replicas, and hands out new
orders, jobs and params.  Replicas may come and go at any time.  A lost replica's groups
are sampled again by others, from the same prompts and keys; late results of the lost
one are refused, as their tickets are no longer assigned to it.

Without staleness a group's replica depends on its ticket alone (`by_ticket`), so that
a run does not depend on which replica is faster.

The file is above 400 lines: reports, bad groups, losses and orders change the same
books, under one lock.
"""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from scalerl_jax.contract import (
    Assignment,
    Instructions,
    Job,
    Link,
    Publication,
    Report,
)
from scalerl_jax.controller.group_check import MOST_BAD, count_tokens, ticket_of
from scalerl_jax.controller.orders import OrderDesk
from scalerl_jax.controller.replicas import JobBoard, Limits, Member, freest
from scalerl_jax.process.ending import first_line
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.work_log import RemoteLedger

_MOST_REFUSALS = 3  # publications that a replica may refuse in a row


class ReplicaLost(Exception):  # noqa: N818  the message is the cause, in one line
    """A replica is gone, or must be replaced."""


class ReplicaLeaves(ReplicaLost):
    """A replica has announced that it will end soon; this is no failure."""


class Roster:
    """The books of the replicas.  One thread calls `turn`, any thread the others."""

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
        """Have one replica for each of `pools`; `connect(number)` starts one.

        `address(publication, number, last_version)` returns the publication for a
        replica that was last given `last_version` (-1: none), or None if it is not
        ready yet.  `by_ticket` deals groups out in turn, whichever replica is free.
        `wake` is called when a turn is due.
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
        self._version = -1  # of the publication
        self._ordering = False
        self._again: collections.deque[int] = collections.deque()  # of lost replicas
        self._jobs = JobBoard()
        self._in_row = 0  # losses since the last finished group
        self.events: collections.Counter[str] = collections.Counter(
            lost=0, left=0, reissued=0, late=0, refused=0
        )

    # Called by other threads.

    def order(self) -> None:
        """Begin to hand out orders."""
        with self._lock:
            self._ordering = True

    def publish(self, publication: Publication, policy_version: int) -> None:
        """Hand over params for all that is sampled from now on."""
        with self._lock:
            self._publication, self._version = publication, policy_version

    def submit(self, job: Job, number: int | None = None) -> Future[Any]:
        """Have a job done by the replica of this number, or by any (None)."""
        with self._lock:
            return self._jobs.submit(job, number)

    def withdraw(self, jobs: Iterable[Job]) -> None:
        """Cancel these jobs, as far as they are not done yet."""
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
        """Read reports, replace lost replicas, hand out orders, jobs and params.

        Raises:
            QueueClosed: the run is over.
            RuntimeError: too many replicas are lost in a row, or cannot be started.
            BaseException: the error that ended the run.
        """
        with self._lock:
            for member in self.members:
                try:
                    self._hear(member)
                except ReplicaLeaves as leave:
                    self._replace(member, f"leaves ({leave})", event="left")
                except ReplicaLost as loss:
                    self._lose(member, loss)
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
        """Read the answer of a replica, or start it if it is not there."""
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
        """Have groups that take too long begun again by a free replica.

        A replica that had the ticket before gets it again only once it has reported
        that it no longer samples it.
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
        """Start a replica, or check whether it has come up."""
        if member.coming is None:
            member.coming, member.since_s = self._connect(member.number), now
            member.coming.add_done_callback(lambda _: self._wake())
        elif member.coming.done():
            coming, member.coming = member.coming, None
            if isinstance(error := coming.exception(), ValueError):
                raise error  # a mistake in the settings: every replica would fail so
            if error:
                raise ReplicaLost(f"it did not start: {first_line(error)}") from error
            member.link, member.since_s = coming.result(), now
        elif now - member.since_s > self._limits.start_timeout_s:
            raise ReplicaLost(
                f"it did not start in generators.start_timeout_s = "
                f"{self._limits.start_timeout_s:g} s"
            )

    def _take(self, member: Member, report: Report) -> None:
        """Enter a report in the books; results of tickets withdrawn are refused."""
        if report.failure is not None:
            if member.link and not member.link.replaceable:
                raise report.failure
            raise ReplicaLost(
                f"{type(report.failure).__name__}: {first_line(report.failure)}"
            ) from report.failure
        member.used_version = max(member.used_version, report.used_version)
        member.capacity = report.capacity
        member.metrics = dict(report.metrics)
        member.hang = report.hang
        member.verifier_restarts = report.verifier_restarts
        if report.seconds:
            assert isinstance(self._ledger, RemoteLedger), "no replica is remote"
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
            ticket = ticket_of(group)
            if ticket in member.withdrawn and ticket not in own:
                self.events["late"] += 1
                member.withdrawn.discard(ticket)
                self._ledger.count(wasted_tokens=count_tokens(group))
                continue
            fault = f"it is of ticket {ticket}, which it was not given"
            if ticket in own:
                fault = self._desk.take(group, newest=member.newest_version)
            if fault:
                self._refuse_group(member, group, fault)
            else:
                self._in_row = 0
                member.forget(group.ticket)
        for ticket, reason in report.dropped:
            member.withdrawn.discard(ticket)
            if ticket in own:
                member.forget(ticket)
                self._desk.drop(ticket, reason)

    def _refuse_group(self, member: Member, group: Any, fault: str) -> None:
        """Have a bad group sampled again; replace a replica that made too many.

        One that hands in what it was not given is replaced at once: it is not known
        what it does with its orders.
        """
        self._desk.refused += 1
        member.bad_groups += 1
        self._note(
            f"warning: a group of replica {member.number} on {member.where} is "
            f"refused and sampled again: {fault}"
        )
        ticket = ticket_of(group)
        if ticket in member.assignments:
            self._ledger.count(wasted_tokens=count_tokens(group))
            member.forget(ticket)
            self._reissue(ticket)
            if member.bad_groups < MOST_BAD:
                return
        cause = f"{member.bad_groups} bad groups, the last: {fault}"
        if member.link and not member.link.replaceable:
            raise RuntimeError(
                f"replica {member.number} on {member.where} made {cause}; the limit is "
                f"{MOST_BAD}. Suspect the device, or its driver"
            )
        raise ReplicaLost(cause)

    def _refused(self, member: Member, reason: str) -> None:
        """Send the params again; replace a replica that refuses them too often."""
        self.events["refused"] += 1
        member.refusals += 1
        member.sent_version = -1
        self._note(
            f"warning: replica {member.number} on {member.where} goes on with the "
            f"params of version {member.used_version}: {reason}"
        )
        if member.refusals >= _MOST_REFUSALS:
            raise ReplicaLost(f"{member.refusals} publications in a row refused")

    def _lose(self, member: Member, cause: ReplicaLost) -> None:
        """Replace a lost replica; end the run after too many losses in a row."""
        self._in_row += 1
        where = member.where
        self._replace(member, f"is lost ({cause})", event="lost")
        if self._in_row > self._limits.losses:
            # Logits that are not finite in any replica are the params' fault.
            unfit = isinstance(cause.__cause__, FloatingPointError)
            raise (FloatingPointError if unfit else RuntimeError)(
                f"{self._in_row} replicas were lost without a finished group between, "
                f"the limit is generators.losses = {self._limits.losses}; the last was "
                f"replica {member.number} on {where}: {cause}"
            )

    def _replace(self, member: Member, what: str, *, event: str) -> None:
        """Give a replica's work to others, and start another in its place."""
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
        """Assign orders, first the ones of lost replicas."""
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
        """Return the replica with the most room for this ticket, or None."""
        return freest(
            each
            for each in self.members
            if each is not but and ticket not in each.withdrawn
        )

    def _admit(self, member: Member) -> Assignment | None:
        """Return a new order for a replica, admitted with the version in use there.

        If that version is too old, the order is admitted with the newest version, and
        waits at the replica until its params come.  None: no group may start.
        """
        newest = self._version
        versions = [newest] if self._by_ticket else [member.version, newest]
        for version in dict.fromkeys(versions):
            if order := self._desk.admit(version):
                return Assignment(order=order, version=version)
        return None

    def _send(self, member: Member) -> None:
        """Call a replica if there is something new, or no call is under way."""
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
                member.newest_version = self._version
        return Instructions(**said, **member.take_new())
