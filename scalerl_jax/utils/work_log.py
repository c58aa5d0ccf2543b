"""Busy seconds and counts of a process that has no ledger, until they are told."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Books(Protocol):
    """The part of a ledger that whoever works writes in."""

    def activity(
        self, name: str, *, pool: str
    ) -> contextlib.AbstractContextManager[None]:
        """Count the time inside the block."""
        ...

    def count(self, **amounts: float) -> None:
        """Add to the counters named in `COUNTS`."""
        ...

    def waste_tokens(self, tokens: int) -> None:
        """Say that generated tokens led to no gradient."""
        ...


class WorkLog:
    """Busy seconds and counts, for a ledger that is elsewhere.

    It knows of no idle time: that is what its ledger's clock has beyond it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none."""
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, float]] = {}  # blocks: name, told up to
        self._next = 0
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    @contextlib.contextmanager
    def activity(self, name: str, *, pool: str) -> Iterator[None]:
        """Count the time inside the block; the chips are all of one `pool`."""
        with self._lock:
            block, self._next = self._next, self._next + 1
            self._open[block] = (name, self._clock())
        try:
            yield
        finally:
            with self._lock:
                self._note(block)
                del self._open[block]

    def count(self, **amounts: float) -> None:
        """Add to the counters named in `COUNTS`."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] = self._counts.get(name, 0.0) + amount

    def waste_tokens(self, tokens: int) -> None:
        """Say that `tokens` generated tokens led to no gradient."""
        self.count(wasted_tokens=tokens)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds by activity, and counts, since the last call."""
        with self._lock:
            for block in list(self._open):
                self._note(block)
            told = self._seconds, self._counts
            self._seconds, self._counts = {}, {}
            return told

    def _note(self, block: int) -> None:
        name, since = self._open[block]
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - since
        self._open[block] = (name, now)
