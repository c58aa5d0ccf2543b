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
    Link,
    Publication,
    ReplicaJob,
    ReplicaReport,
)
from scalerl_jax.controller.dealing import deal, freest
from scalerl_jax.controller.group_check import MOST_BAD, count_tokens, ticket_of
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.replicas import FleetLimits, JobBoard, KnownReplica
from scalerl_jax.process.ending import first_line
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.work_log import RemoteLedger

_MOST_REFUSALS = 3  # publications that a replica may refuse in a row


class ReplicaLost(Exception):  # noqa: N818  the message is the cause, in one line
    """A replica is gone, or must be replaced."""


class ReplicaLeaves(ReplicaLost):
    """A replica has announced that it will end soon; this is no failure."""


class Dispatcher:
    """The books of the replicas.  One thread calls `turn`, any thread the others."""

    def __init__(
        self,
        *,
        orders: OrderBook,
        ledger: Ledger,
        connect: Callable[[int], Future[Link]],
        pools: Sequence[str],
        limits: FleetLimits,
        by_ticket: bool = False,
        note: Callable[[str], None] = lambda text: None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one replica for each of `pools`; `connect(number)` starts one.

        `by_ticket` deals groups out in turn, whichever replica is free.
        `wake` is called when a turn is due.
        """
        self._orders = orders
        self._ledger = ledger
        self._connect = connect
        self._limits = limits
        self._by_ticket = by_ticket
        self._note = note
        self._wake = wake
        self._clock = clock
        self._lock = threading.RLock()
        self.replicas = [
            KnownReplica(number=at, pool=pool) for at, pool in enumerate(pools)
        ]
        self._publication: Publication | None = None
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

    def submit(
        self, job: ReplicaJob[Publication], number: int | None = None
    ) -> Future[Any]:
        """Add a job for the replica of this number, or for any (None)."""
        with self._lock:
            return self._jobs.submit(job, number)

    def withdraw(self, jobs: Iterable[ReplicaJob]) -> None:
        """Cancel these jobs, as far as they are not done yet."""
        with self._lock:
            self._jobs.withdraw(jobs, self.replicas)

    def in_flight(self) -> dict[int, int]:
        """Return the tickets under way, and how many tokens each has so far."""
        with self._lock:
            return {
                ticket: replica.tokens.get(ticket, 0)
                for replica in self.replicas
                for ticket in replica.assignments
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
            for replica in self.replicas:
                try:
                    self._hear(replica)
                except ReplicaLeaves as leave:
                    self._replace(replica, f"leaves ({leave})", event="left")
                except ReplicaLost as loss:
                    self._lose(replica, loss)
            self._orders.raise_if_over()
            if self._publication is None:
                return
            if self._ordering:
                self._deal()
            self._jobs.hand_out(self.replicas)
            for replica in self.replicas:
                self._send(replica)

    def end(self, timeout_s: float) -> None:
        """End every replica; one that does not answer is left behind."""
        with self._lock:
            links = [replica.link for replica in self.replicas if replica.link]
            calls = [link.exchange(Instructions(over=True), 0.0) for link in links]
        concurrent.futures.wait(calls, timeout_s)
        for link in links:
            link.close()

    # Under the lock.

    def _hear(self, replica: KnownReplica) -> None:
        """Read the answer of a replica, or start it if it is not there."""
        now = self._clock()
        if replica.link is None:
            self._await(replica, now)
            return
        for call in [call for call in replica.calls if call.done()]:
            replica.calls.remove(call)
            if error := call.exception():
                raise ReplicaLost(f"{type(error).__name__}: {first_line(error)}")
            replica.since_s = now
            self._take(replica, call.result())
        silence = now - replica.since_s
        if replica.calls and silence > self._limits.silence_timeout_s:
            raise ReplicaLost(
                f"no answer for {silence:.0f} s (generators.silence_timeout_s = "
                f"{self._limits.silence_timeout_s:g})"
            )
        self._withdraw_late(replica, now)

    def _withdraw_late(self, replica: KnownReplica, now: float) -> None:
        """Assign groups that take too long to a free replica, which begins them again.

        A replica that had the ticket before gets it again only once it has reported
        that it no longer samples it.
        """
        limit = self._limits.reissue_after_s
        if not limit or self._by_ticket:
            return
        for ticket, given_s in list(replica.given_s.items()):
            late = now - given_s > limit and ticket not in replica.sampled
            if late and freest(
                each
                for each in self.replicas
                if each is not replica and ticket not in each.withdrawn
            ):
                replica.withdraw(ticket)
                self._reissue(ticket)

    def _await(self, replica: KnownReplica, now: float) -> None:
        """Start a replica, or check whether it has come up."""
        if replica.coming is None:
            replica.coming, replica.since_s = self._connect(replica.number), now
            replica.coming.add_done_callback(lambda _: self._wake())
        elif replica.coming.done():
            coming, replica.coming = replica.coming, None
            if isinstance(error := coming.exception(), ValueError):
                raise error  # a mistake in the settings: every replica would fail so
            if error:
                raise ReplicaLost(f"it did not start: {first_line(error)}") from error
            replica.link, replica.since_s = coming.result(), now
        elif now - replica.since_s > self._limits.start_timeout_s:
            raise ReplicaLost(
                f"it did not start in generators.start_timeout_s = "
                f"{self._limits.start_timeout_s:g} s"
            )

    def _take(self, replica: KnownReplica, report: ReplicaReport) -> None:
        """Enter a report in the books; results of tickets withdrawn are refused."""
        if report.failure is not None:
            if replica.link and not replica.link.replaceable:
                raise report.failure
            raise ReplicaLost(
                f"{type(report.failure).__name__}: {first_line(report.failure)}"
            ) from report.failure
        replica.used_version = max(replica.used_version, report.used_version)
        replica.capacity = report.capacity
        replica.metrics = dict(report.metrics)
        replica.hang = report.hang
        replica.verifier_restarts = report.verifier_restarts
        if report.seconds:
            assert isinstance(self._ledger, RemoteLedger), "no replica is remote"
            self._ledger.book(replica.pool, report.seconds)
        self._ledger.count(**report.counts)
        self._take_groups(replica, report)
        refused = [report.refused] if report.refused else []
        for result in report.results:
            replica.jobs.discard(result.number)
            if result.without_params and self._jobs.is_beside(result.number):
                self._note(
                    f"warning: replica {replica.number} on {replica.where} cannot make "
                    f"its part of an evaluation: {result.without_params}"
                )
            elif result.without_params:
                refused.append(result.without_params)
            self._jobs.end(result)
        if refused:
            self._refused(replica, refused[0])
        elif replica.used_version == self._version:
            replica.refusals = 0
        if report.leaving:
            raise ReplicaLeaves("SIGTERM")

    def _take_groups(self, replica: KnownReplica, report: ReplicaReport) -> None:
        own = replica.assignments
        replica.tokens |= {
            ticket: count for ticket, count in report.tokens.items() if ticket in own
        }
        for ticket in report.sampled:
            if ticket in own:
                replica.sampled.add(ticket)
                self._orders.sampled(ticket)
        for group in report.groups:
            ticket = ticket_of(group)
            if ticket in replica.withdrawn and ticket not in own:
                self.events["late"] += 1
                replica.withdrawn.discard(ticket)
                self._ledger.count(wasted_tokens=count_tokens(group))
                continue
            fault = f"it is of ticket {ticket}, which it was not given"
            if ticket in own:
                fault = self._orders.take(group, newest=replica.newest_version)
            if fault:
                self._refuse_group(replica, group, fault)
            else:
                self._in_row = 0
                replica.forget(group.ticket)
        for ticket, reason in report.dropped:
            replica.withdrawn.discard(ticket)
            if ticket in own:
                replica.forget(ticket)
                self._orders.drop(ticket, reason)

    def _refuse_group(self, replica: KnownReplica, group: Any, fault: str) -> None:
        """Reissue a bad group; replace a replica that made too many.

        One that hands in what it was not given is replaced at once: it is not known
        what it does with its orders.
        """
        self._orders.refused += 1
        replica.bad_groups += 1
        self._note(
            f"warning: a group of replica {replica.number} on {replica.where} is "
            f"refused and sampled again: {fault}"
        )
        ticket = ticket_of(group)
        if ticket in replica.assignments:
            self._ledger.count(wasted_tokens=count_tokens(group))
            replica.forget(ticket)
            self._reissue(ticket)
            if replica.bad_groups < MOST_BAD:
                return
        cause = f"{replica.bad_groups} bad groups, the last: {fault}"
        if replica.link and not replica.link.replaceable:
            raise RuntimeError(
                f"replica {replica.number} on {replica.where} made {cause}; the limit "
                f"is {MOST_BAD}. Suspect the device, or its driver"
            )
        raise ReplicaLost(cause)

    def _refused(self, replica: KnownReplica, reason: str) -> None:
        """Send the params again; replace a replica that refuses them too often."""
        self.events["refused"] += 1
        replica.refusals += 1
        replica.sent_version = -1
        self._note(
            f"warning: replica {replica.number} on {replica.where} goes on with the "
            f"params of version {replica.used_version}: {reason}"
        )
        if replica.refusals >= _MOST_REFUSALS:
            raise ReplicaLost(f"{replica.refusals} publications in a row refused")

    def _lose(self, replica: KnownReplica, cause: ReplicaLost) -> None:
        """Replace a lost replica; end the run after too many losses in a row."""
        self._in_row += 1
        where = replica.where
        self._replace(replica, f"is lost ({cause})", event="lost")
        if self._in_row > self._limits.losses:
            # Logits that are not finite in any replica are the params' fault.
            unfit = isinstance(cause.__cause__, FloatingPointError)
            raise (FloatingPointError if unfit else RuntimeError)(
                f"{self._in_row} replicas were lost without a finished group between, "
                f"the limit is generators.losses = {self._limits.losses}; the last was "
                f"replica {replica.number} on {where}: {cause}"
            )

    def _replace(self, replica: KnownReplica, what: str, *, event: str) -> None:
        """Give a replica's work to others, and start another in its place."""
        self.events[event] += 1
        tickets = sorted(replica.assignments)
        self._note(
            f"warning: replica {replica.number} on {replica.where} {what}; "
            f"{len(tickets)} groups are sampled again"
        )
        self._ledger.count(wasted_tokens=sum(replica.tokens.values()))
        if replica.link is not None:
            replica.link.close()
        numbers = set(replica.jobs)
        self.replicas[replica.number] = KnownReplica(
            number=replica.number, pool=replica.pool, losses=replica.losses + 1
        )
        for ticket in tickets:
            self._reissue(ticket)
        self._jobs.give_back(numbers)

    def _reissue(self, ticket: int) -> None:
        self.events["reissued"] += 1
        self._again.append(ticket)

    def _deal(self) -> None:
        """Assign orders, first the ones of lost replicas."""
        for replica, order, version in deal(
            self.replicas,
            self._again,
            newest=self._version,
            by_ticket=self._by_ticket,
            admit=self._orders.admit,
            reissue=self._orders.reissue,
            takes=lambda replica, ticket: ticket not in replica.withdrawn,
        ):
            replica.give(Assignment(order=order, version=version), self._clock())

    def _send(self, replica: KnownReplica) -> None:
        """Call a replica if there is something new, or no call is under way."""
        if replica.link is None:
            return
        instructions = self._instructions(replica)
        if instructions == Instructions() and replica.calls:
            return
        if not replica.calls:
            replica.since_s = self._clock()
        call = replica.link.exchange(instructions, self._limits.poll_s)
        replica.calls.append(call)
        call.add_done_callback(lambda _: self._wake())

    def _instructions(self, replica: KnownReplica) -> Instructions:
        said: dict[str, Any] = {}
        if replica.sent_version < self._version:
            assert self._publication is not None, "its version is above -1"
            own = self._publication.for_replica(replica.number, replica.sent_version)
            if own is not None:
                said["publication"] = own
                said["policy_version"] = replica.sent_version = self._version
                replica.newest_version = self._version
        return Instructions(**said, **replica.take_new())
