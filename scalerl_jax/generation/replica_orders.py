"""The order book of a generator replica, which its sampling thread uses.

It gives out the orders that the controller has assigned, and collects results for the
next report.
"""

import collections
import threading
from typing import Any

from scalerl_jax.contract import Assignment, Instructions, JobResult, Order, QueueClosed
from scalerl_jax.types import Group


class ReplicaOrders:
    """The `contract.Orders` of one replica: an inbox and an outbox under one lock."""

    def __init__(self) -> None:
        """Start without orders."""
        self._changed = threading.Condition()
        self._inbox: collections.deque[Assignment] = collections.deque()
        self._withdrawn: set[int] = set()
        self._arrivals = self._seen = 0  # counts that wake the sampling thread
        self._asked = False  # free slots were reported, and no order started since
        self._used_version = -1
        self._sampled: list[int] = []
        self._groups: list[Group] = []
        self._dropped: list[tuple[int, str]] = []
        self._results: list[JobResult] = []
        self._refused = ""
        self._leaving = False
        self._failure: BaseException | None = None
        self._over = False
        self._deliveries = 0
        self._news = False

    # The sampling thread's side: `contract.Orders`.

    def admit(self, used_version: int) -> Order | None:
        """Return the first order for which these params are new enough, or None.

        A call means that slots are free; if there is no order, that is reported.
        """
        with self._changed:
            self.raise_if_over()
            if used_version != self._used_version:
                self._used_version = used_version
                self._tell()
            self._seen = self._arrivals
            for assignment in self._inbox:
                if assignment.version <= used_version:
                    self._inbox.remove(assignment)
                    self._asked = False
                    return assignment.order
            if not self._asked:
                self._asked = True
                self._tell()
            return None

    def sampled(self, ticket: int) -> None:
        """Report that a group lacks only its verdicts."""
        with self._changed:
            self._sampled.append(ticket)
            self._tell()

    def put(self, group: Group) -> bool:
        """Report a finished group, which the controller will check."""
        with self._changed:
            self._groups.append(group)
            self._forget(group.ticket)
        return True

    def drop(self, ticket: int, reason: str) -> None:
        """Report that a group has no result."""
        with self._changed:
            self._dropped.append((ticket, reason))
            self._forget(ticket)

    def withdrawn(self) -> frozenset[int]:
        """Return the tickets of groups that are no longer needed."""
        with self._changed:
            return frozenset(self._withdrawn)

    def wait(self, timeout_s: float) -> None:
        """Sleep until `admit` may give another answer, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._arrivals != self._seen, timeout_s
            )
            self._seen = self._arrivals
            self.raise_if_over()

    def wake(self) -> None:
        """End a `wait`: other params or a job have arrived."""
        with self._changed:
            self._arrivals += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report the error that ended the sampling."""
        with self._changed:
            self._failure = self._failure or error
            self._tell()

    def raise_if_over(self) -> None:
        """Raise QueueClosed once the controller has ended the run."""
        if self._over:
            raise QueueClosed

    # The controller's side.

    def deliver(self, instructions: Instructions) -> None:
        """Take new orders; an `await_news` under way returns."""
        with self._changed:
            gone = set(instructions.withdrawn)
            waiting = {each.order.ticket for each in self._inbox} & gone
            self._inbox = collections.deque(
                each for each in self._inbox if each.order.ticket not in gone
            )
            self._dropped += [(ticket, "withdrawn") for ticket in sorted(waiting)]
            self._withdrawn |= gone - waiting
            for each in instructions.assignments:
                self._withdrawn.discard(each.order.ticket)
                self._inbox.append(each)
            self._over = self._over or instructions.over
            self._deliveries += 1
            self._arrivals += 1
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Return the number of orders that are not started."""
        return len(self._inbox)

    def finish(self, result: JobResult) -> None:
        """Report the result of a job."""
        with self._changed:
            self._results.append(result)
            self._tell()

    def refuse(self, reason: str) -> None:
        """Report that a publication is not in use."""
        with self._changed:
            self._refused = reason
            self._tell()

    def leave(self) -> None:
        """Report that this replica will end soon."""
        with self._changed:
            self._leaving = True
            self._tell()

    def await_news(self, timeout_s: float) -> None:
        """Sleep until there is something to report, or another delivery arrives."""
        with self._changed:
            deliveries = self._deliveries
            self._changed.wait_for(
                lambda: self._news or self._over or self._deliveries != deliveries,
                timeout_s,
            )

    def news(self) -> dict[str, Any]:
        """Return and clear the results to report, as fields of a `ReplicaReport`."""
        with self._changed:
            said = dict(
                used_version=self._used_version,
                sampled=tuple(self._sampled),
                groups=tuple(self._groups),
                dropped=tuple(self._dropped),
                results=tuple(self._results),
                refused=self._refused,
                leaving=self._leaving,
                failure=self._failure,
            )
            for outbox in (self._sampled, self._groups, self._dropped, self._results):
                outbox.clear()
            self._refused, self._news = "", False
            return said

    # Under the lock.

    def _forget(self, ticket: int) -> None:
        self._withdrawn.discard(ticket)
        self._tell()

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()
