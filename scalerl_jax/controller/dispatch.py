"""The dispatch of work to replicas: assignments, reports, and losses.

`turn` reads the reports that have arrived, replaces lost replicas, and sends new
orders, jobs and params.  Replicas may start and end at any time.  A lost replica's
groups are sampled again by others, from the same prompts and keys; its late results are
refused, since their tickets are no longer assigned to it.

Without staleness a group's replica depends on its ticket alone (`by_ticket`), so that
a run does not depend on which replica is faster.

The file is above 400 lines: reports, bad groups, losses and orders change the same
records, under one lock.
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


class ReplicaLost(Exception):  # the message is the cause, in one line
    """A replica has ended, or must be replaced."""


class ReplicaLeaves(ReplicaLost):
    """A replica has announced its end, which is no failure."""


class Dispatcher:
    """The records of all replicas.  One thread calls `turn`, any thread the rest."""

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

        `by_ticket` assigns groups to replicas in turn, free or not.
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
        self._version = -1  # version of the publication
        self._ordering = False
        self._again: collections.deque[int] = collections.deque()  # of lost replicas
        # How often each open ticket was moved because it took too long.
        self._moves: collections.Counter[int] = collections.Counter()
        self._jobs = JobBoard()
        self._in_row = 0  # losses since the last finished group
        self.events: collections.Counter[str] = collections.Counter(
            lost=0, left=0, reissued=0, late=0, refused=0
        )

    # Called by other threads.

    def order(self) -> None:
        """Start to assign orders."""
        with self._lock:
            self._ordering = True

    def publish(self, publication: Publication, policy_version: int) -> None:
        """Publish params for all further sampling."""
        with self._lock:
            self._publication, self._version = publication, policy_version

    def submit(
        self, job: ReplicaJob[Publication], number: int | None = None
    ) -> Future[Any]:
        """Add a job for the replica of this number, or for any (None)."""
        with self._lock:
            return self._jobs.submit(job, number)

    def withdraw(self, jobs: Iterable[ReplicaJob]) -> None:
        """Cancel those of these jobs that are not done yet."""
        with self._lock:
            self._jobs.withdraw(jobs, self.replicas)

    def in_flight(self) -> dict[int, int]:
        """Return the tokens that each ticket under way has so far."""
        with self._lock:
            return {
                ticket: replica.tokens.get(ticket, 0)
                for replica in self.replicas
                for ticket in replica.assignments
            }

    # A turn.

    def turn(self) -> None:
        """Read reports, replace lost replicas, send orders, jobs and params.

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
            self._jobs.hand_out(self.replicas, self._clock())
            for replica in self.replicas:
                self._send(replica)

    def end(self, timeout_s: float) -> None:
        """End every replica; do not wait for one that does not answer."""
        with self._lock:
            links = [replica.link for replica in self.replicas if replica.link]
            calls = [link.exchange(Instructions(over=True), 0.0) for link in links]
        concurrent.futures.wait(calls, timeout_s)
        for link in links:
            link.close()

    # Under the lock.

    def _hear(self, replica: KnownReplica) -> None:
        """Read the answer of a replica, or start it if it has no link."""
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
        """Move groups that take too long to a free replica, which starts them again.

        The limit of a group doubles with each move: one that is long, rather than at a
        slow replica, ends after log2(its time / reissue_after_s) moves.  A replica from
        which a ticket was withdrawn can get it again only after it has reported that it
        no longer samples it.
        """
        least = self._limits.reissue_after_s
        if not least or self._by_ticket:
            return
        for ticket, given_s in list(replica.given_s.items()):
            limit = least * 2 ** self._moves[ticket]
            late = now - given_s > limit and ticket not in replica.sampled
            if late and freest(
                each
                for each in self.replicas
                if each is not replica and ticket not in each.withdrawn
            ):
                replica.withdraw(ticket)
                self._moves[ticket] += 1
                self._reissue(ticket)

    def _await(self, replica: KnownReplica, now: float) -> None:
        """Start a replica, or check whether it has started."""
        if replica.coming is None:
            replica.coming, replica.since_s = self._connect(replica.number), now
            replica.coming.add_done_callback(lambda _: self._wake())
        elif replica.coming.done():
            coming, replica.coming = replica.coming, None
            if isinstance(error := coming.exception(), ValueError):
                raise error  # a wrong setting: every replica would fail like this
            if error:
                raise ReplicaLost(f"it did not start: {first_line(error)}") from error
            replica.link, replica.since_s = coming.result(), now
        elif now - replica.since_s > self._limits.start_timeout_s:
            raise ReplicaLost(
                f"it did not start in generators.start_timeout_s = "
                f"{self._limits.start_timeout_s:g} s"
            )

    def _take(self, replica: KnownReplica, report: ReplicaReport) -> None:
        """Record a report; refuse results of withdrawn tickets."""
        if report.seconds:
            assert isinstance(self._ledger, RemoteLedger), "no replica is remote"
            self._ledger.book(replica.pool, report.seconds)
        self._ledger.count(**report.counts)
        self._take_groups(replica, report)
        if report.failure is not None:
            if replica.link and not replica.link.replaceable:
                raise report.failure
            raise ReplicaLost(
                f"{type(report.failure).__name__}: {first_line(report.failure)}"
            ) from report.failure
        if report.used_version > replica.used_version:
            replica.used_version, replica.refusals = report.used_version, 0
        replica.capacity = report.capacity
        replica.metrics = dict(report.metrics)
        replica.hang = report.hang
        replica.verifier_restarts = report.verifier_restarts
        refused = [report.refused] if report.refused else []
        refused += self._take_results(replica, report)
        if refused:
            self._refused(replica, refused[0])
        elif replica.used_version == self._version:
            replica.refusals = 0
        if report.leaving:
            raise ReplicaLeaves("SIGTERM")

    def _take_results(self, replica: KnownReplica, report: ReplicaReport) -> list[str]:
        """Record results of jobs; return why params of the sampling were lacking."""
        refused = []
        for result in report.results:
            replica.jobs.discard(result.number)
            if result.without_params and self._jobs.is_beside(result.number):
                self._note(
                    f"warning: replica {replica.number} on {replica.where} cannot make "
                    f"its part of an evaluation: {result.without_params}"
                )
            elif result.without_params:
                refused.append(result.without_params)
            self._jobs.end(result, replica, self._clock())
        return refused

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
            fault = f"its ticket {ticket} is not assigned to the replica"
            if ticket in own:
                fault = self._orders.take(group, newest=replica.newest_version)
            if fault:
                self._refuse_group(replica, group, fault)
            else:
                self._in_row = 0
                self._close(replica, group.ticket)
        for ticket, reason in report.dropped:
            replica.withdrawn.discard(ticket)
            if ticket in own:
                self._close(replica, ticket)
                self._orders.drop(ticket, reason)

    def _close(self, replica: KnownReplica, ticket: int) -> None:
        """Remove a ticket that has ended from the records."""
        replica.forget(ticket)
        self._moves.pop(ticket, None)

    def _refuse_group(self, replica: KnownReplica, group: Any, fault: str) -> None:
        """Reissue a bad group; replace a replica that made too many of them.

        A replica that returns a group not assigned to it is replaced at once, since its
        other orders may be mixed up, too.
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
            f"warning: replica {replica.number} on {replica.where} continues with the "
            f"params of version {replica.used_version}: {reason}"
        )
        if replica.refusals >= _MOST_REFUSALS:
            raise ReplicaLost(f"{replica.refusals} publications in a row refused")

    def _lose(self, replica: KnownReplica, cause: ReplicaLost) -> None:
        """Replace a lost replica; end the run after too many losses in a row."""
        self._in_row += 1
        where = replica.where
        self._jobs.count_loss(replica.jobs, cause, self._limits.losses)
        self._replace(replica, f"is lost ({cause})", event="lost")
        if self._in_row > self._limits.losses:
            # Logits that are not finite are caused by the params, not by the replica.
            unfit = isinstance(cause.__cause__, FloatingPointError)
            raise (FloatingPointError if unfit else RuntimeError)(
                f"{self._in_row} replicas were lost without a finished group in "
                f"between, more than generators.losses = {self._limits.losses}; the "
                f"last was replica {replica.number} on {where}: {cause}"
            )

    def _replace(self, replica: KnownReplica, what: str, *, event: str) -> None:
        """Reassign a replica's work, and start another replica in its place."""
        self.events[event] += 1
        tickets = sorted(replica.assignments)
        self._note(
            f"warning: replica {replica.number} on {replica.where} {what}; "
            f"{len(tickets)} groups are sampled again"
        )
        self._ledger.count(wasted_tokens=sum(replica.tokens.values()))
        if replica.link is not None:
            replica.link.close()
        if replica.coming is not None:  # it may come yet, and would keep its devices
            replica.coming.add_done_callback(_close_late)
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
        """Assign orders, first those of lost replicas."""
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
        """Call a replica if it has new instructions, or no call is under way."""
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


def _close_late(coming: Future[Link]) -> None:
    """End a replica that has started after it was given up."""
    if coming.exception() is None:
        coming.result().close()
