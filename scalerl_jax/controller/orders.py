"""The order book: gives orders to generators, and takes their groups.

Queue, prompts and open orders are kept under one lock, so that generators continue
during a checkpoint: in it every ticket is an open order or a finished group, and every
prompt that was drawn has a ticket.
"""

import collections
import threading
from collections.abc import Callable, Mapping
from typing import Any

from scalerl_jax.contract import Order
from scalerl_jax.controller.group_check import MOST_BAD, GroupCheck, ticket_of
from scalerl_jax.controller.queue import QueueState, RolloutQueue
from scalerl_jax.data.mixture import Stream
from scalerl_jax.types import Group


class OrderBook:
    """The `contract.Orders` of one run: gives orders, takes groups."""

    def __init__(
        self,
        queue: RolloutQueue,
        stream: Stream,
        *,
        check: GroupCheck,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Draw prompts from `stream` whenever `queue` admits a group.

        `check` checks the groups that are put; `note` reports a refused one.
        """
        self._queue = queue
        self._check = check
        self._note = note
        self.refused = 0  # bad groups of all generators
        # Methods that need no prompts are the queue's.
        self.sampled, self.fail = queue.sampled, queue.fail
        self.wait, self.wake = queue.wait, queue.wake
        self.raise_if_over = queue.raise_if_over
        self._stream = stream
        self._lock = threading.Lock()
        self._open: dict[int, Order] = {}
        # Open orders to give out again: from a checkpoint, or of a bad group.
        self._again: collections.deque[Order] = collections.deque()

    def admit(self, used_version: int) -> Order | None:
        """Return a group that may start now with params of that version, or None.

        Orders to sample again come first.

        Raises:
            QueueClosed: the run is over.
        """
        with self._lock:
            if self._again:
                self._queue.raise_if_over()
                order = self._again.popleft()
                self._queue.restart(order.ticket, used_version)
                return order
            ticket = self._queue.admit(used_version)
            if ticket is None:
                return None
            try:
                prompt = self._stream.next(used_version)
            except BaseException:
                self._queue.drop(ticket, "failed")  # a checkpoint must not wait for it
                raise
            order = Order(ticket=ticket, prompt=prompt, begun_version=used_version)
            self._open[ticket] = order
            return order

    def put(self, group: Group) -> bool:
        """Take a finished and judged group; return whether it is valid.

        A bad group is refused, and its order is given out again.

        Raises:
            RuntimeError: the group is bad, and the limit of bad groups is reached.
        """
        fault = self.take(group, newest=self._queue.version)
        if not fault:
            return True
        self.refused += 1
        self._note(f"warning: a group is refused and sampled again: {fault}")
        with self._lock:
            order = self._open.get(group.ticket)
            if order is None or self.refused >= MOST_BAD:
                raise RuntimeError(
                    f"the sampling thread made {self.refused} bad groups, the limit is "
                    f"{MOST_BAD}; the last: {fault}. Suspect the device, or its driver"
                )
            self._again.append(order)
        return False

    def take(self, group: Any, *, newest: int) -> str:
        """Take a group if it is valid; return its fault ("": it has none).

        Its generator has received no params newer than version `newest`.
        """
        with self._lock:
            fault = self._fault(group, newest)
            if not fault:
                self._queue.put(group)
                del self._open[group.ticket]
        return fault

    def _fault(self, group: Any, newest: int) -> str:
        ticket = ticket_of(group)
        if ticket is None:
            return f"it is no group with a ticket, but a {type(group).__name__}"
        order, oldest = self._open.get(ticket), self._queue.oldest_of(ticket)
        if order is None or oldest is None:
            return f"ticket {ticket} is not open"
        newest = min(newest, self._queue.version)
        fault = self._check.fault(group, order, oldest=oldest, newest=newest)
        return fault and f"ticket {ticket}: {fault}"

    def drop(self, ticket: int, reason: str) -> None:
        """End a group without a result, and free its place in the window."""
        with self._lock:
            self._queue.drop(ticket, reason)
            del self._open[ticket]

    def withdrawn(self) -> tuple[int, ...]:
        """Return (): a generator that calls this book directly keeps all its orders."""
        return ()

    def reissue(self, ticket: int, used_version: int) -> tuple[Order, int]:
        """Return an open order, for another replica to sample again from its prompt.

        The second result is the policy version with which it may start: the larger of
        `used_version` and the version at its first start.
        """
        with self._lock:
            version = self._queue.restart(ticket, used_version)
            return self._open[ticket], version

    def snapshot(
        self, in_flight: Mapping[int, int]
    ) -> tuple[dict[str, Any], tuple[Group, ...]]:
        """Return the order book's state as JSON values, and the finished groups.

        `in_flight` maps the tickets under way to the tokens sampled so far.
        """
        with self._lock:
            queue = self._queue.snapshot()
            books = {
                "next_ticket": queue.next_ticket,
                "running": [list(entry) for entry in queue.running],
                "dropped": queue.dropped,
                "in_flight": [
                    {
                        "ticket": ticket,
                        "prompt_id": order.prompt.prompt_id,
                        "epoch": order.prompt.epoch,
                        "begun_version": order.begun_version,
                        "tokens": in_flight.get(ticket, 0),
                    }
                    for ticket, order in sorted(self._open.items())
                ],
                "stream": self._stream.state(),
            }
        return books, queue.buffered

    def restore(
        self, books: dict[str, Any], groups: tuple[Group, ...], *, version: int
    ) -> int:
        """Restore a snapshot; its open orders are sampled again from their prompts.

        Return the number of tokens generated for them before, which are wasted.
        """
        self._stream.restore(books["stream"])
        self._queue.restore(
            QueueState(
                version=version,
                next_ticket=books["next_ticket"],
                buffered=groups,
                running=tuple((ticket, oldest) for ticket, oldest in books["running"]),
                dropped=books["dropped"],
            )
        )
        for entry in books["in_flight"]:
            prompt = self._stream.prompt(entry["prompt_id"], epoch=entry["epoch"])
            order = Order(
                ticket=entry["ticket"],
                prompt=prompt,
                begun_version=entry["begun_version"],
            )
            self._open[order.ticket] = order
            self._again.append(order)
        return sum(entry["tokens"] for entry in books["in_flight"])
