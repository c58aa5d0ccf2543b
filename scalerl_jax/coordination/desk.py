"""The desk: where generators get their orders, and hand in groups.

Queue, prompts and open orders are kept under one lock, so that a checkpoint needs no
pause of the generators: in it every ticket is an open order or a finished group, and
every prompt that was drawn has a ticket.
"""

import collections
import threading
from collections.abc import Mapping
from typing import Any

from scalerl_jax.contract import Order
from scalerl_jax.coordination.queue import QueueState, RolloutQueue
from scalerl_jax.data.mixture import Stream
from scalerl_jax.types import Group


class OrderDesk:
    """Orders out, groups in; the `contract.Desk` of one run."""

    def __init__(self, queue: RolloutQueue, stream: Stream) -> None:
        """Draw prompts from `stream` whenever `queue` admits a group."""
        self._queue = queue
        # Methods that concern no prompts are the queue's own.
        self.sampled, self.fail = queue.sampled, queue.fail
        self.wait, self.wake = queue.wait, queue.wake
        self.raise_if_over = queue.raise_if_over
        self._stream = stream
        self._lock = threading.Lock()
        self._open: dict[int, Order] = {}
        # Open orders of a checkpoint that have not been handed out again yet.
        self._restored: collections.deque[Order] = collections.deque()

    def admit(self, used_version: int) -> Order | None:
        """Return a group that may start now with params of that version, or None.

        The open orders of a restored checkpoint come first.

        Raises:
            QueueClosed: the run is over.
        """
        with self._lock:
            if self._restored:
                self._queue.raise_if_over()
                order = self._restored.popleft()
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

    def put(self, group: Group) -> None:
        """Take a finished and judged group."""
        with self._lock:
            self._queue.put(group)
            del self._open[group.ticket]

    def drop(self, ticket: int, reason: str) -> None:
        """End a group without a result; its place is given back."""
        with self._lock:
            self._queue.drop(ticket, reason)
            del self._open[ticket]

    def withdrawn(self) -> tuple[int, ...]:
        """Return (): a generator that asks this desk directly keeps all its orders."""
        return ()

    def reissue(self, ticket: int, used_version: int) -> tuple[Order, int]:
        """Return an open order, to be sampled again from its prompt by another replica.

        The second result is the policy version that it may begin with: the larger of
        `used_version` and the version at which it first began.
        """
        with self._lock:
            version = self._queue.restart(ticket, used_version)
            return self._open[ticket], version

    def snapshot(
        self, in_flight: Mapping[int, int]
    ) -> tuple[dict[str, Any], tuple[Group, ...]]:
        """Return the books as JSON values, and the finished groups.

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
        """Go on from a snapshot; its open orders are sampled again from their prompts.

        Return how many tokens were generated for them before, and are wasted.
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
            self._restored.append(order)
        return sum(entry["tokens"] for entry in books["in_flight"])
