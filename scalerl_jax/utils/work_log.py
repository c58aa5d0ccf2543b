"""Busy seconds and counts of a process that has no ledger, until they are told."""

import contextlib
import threading
import time
from collections import Counter, defaultdict
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


def running(active: Counter[str]) -> list[str]:
    """Return the kinds of activity that chips are split among, evenly.

    `verify` is a wait for verdicts: it counts only while nothing else runs.
    """
    names = [name for name, number in active.items() if number]
    return [name for name in names if name != "verify"] or names


class WorkLog:
    """Busy seconds and counts, for a ledger that is elsewhere.

    It knows of no idle time: that is what its ledger's clock has beyond it.  Seconds in
    which several kinds of activity overlap are split among them, as a ledger does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none."""
        self._clock = clock
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()
        self._last = clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def activity(self, name: str, *, pool: str) -> Iterator[None]:
        """Count the time inside the block; the chips are all of one `pool`."""
        with self._lock:
            self._advance()
            self._active[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._active[name] -= 1

    def count(self, **amounts: float) -> None:
        """Add to the counters named in `COUNTS`."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds by activity, and counts, since the last call."""
        with self._lock:
            self._advance()
            told = dict(self._seconds), dict(self._counts)
            self._seconds.clear()
            self._counts.clear()
            return told

    def _advance(self) -> None:
        """Note the time since the last call; the caller holds the lock."""
        now = self._clock()
        names = running(self._active)
        for name in names:
            self._seconds[name] += (now - self._last) / len(names)
        self._last = now
