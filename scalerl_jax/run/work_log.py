"""Work of pools in other processes, which tell the ledger of it afterwards.

The ledger's clock counts such a pool as idle, or as waiting for another pool, until the
pool's process sends what its log holds.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from scalerl_jax.run.ledger import (
    ACTIVITIES,
    CATEGORIES,
    COUNTS,
    NOT_CHARGED,
    Ledger,
)


class RemoteLedger(Ledger):
    """A ledger with `remote` pools, whose work is told afterwards, by `book`."""

    def __init__(self, *, remote: Collection[str], **how: Any) -> None:
        """Begin as a `Ledger` with arguments `how`; `remote` are among its pools."""
        super().__init__(**how)
        # Chip-seconds of a remote pool that no work has been told of, by category.
        self._untold: dict[str, dict[str, float]] = {
            pool: dict.fromkeys(CATEGORIES, 0.0) for pool in remote
        }
        self._charged = 0.0  # chip-hours, as they were reported

    def book(self, pool: str, seconds: Mapping[str, float]) -> None:
        """Take in what a remote pool has done: seconds of all its chips, by activity.

        They are taken from what the clock has counted there as idle, then from what it
        has counted as a wait for another pool; an evaluation the other way round, for
        another pool waits for it.  What is more than both is left out: a clock that
        runs faster than ours.
        """
        with self._lock:
            self._advance()
            untold = self._untold[pool]
            for name, amount in seconds.items():
                left = amount * self._pools[pool]
                waits = ("idle", *NOT_CHARGED)
                for category in sorted(waits, key=lambda each: each != name):
                    part = min(left, untold[category])
                    untold[category] -= part
                    self._chip_s[category] -= part
                    self._chip_s[name] += part
                    if category == "idle":
                        self._pool_idle_s[pool] -= part
                    left -= part

    def _enter(self, pool: str, category: str, chip_s: float) -> None:
        super()._enter(pool, category, chip_s)
        if pool in self._untold:
            self._untold[pool][category] += chip_s

    def _charged_chip_hours(self) -> float:
        """Return the charged hours, which never fall.

        A remote pool may tell later that it has evaluated and was not idle.
        """
        self._charged = max(self._charged, super()._charged_chip_hours())
        return self._charged


class WorkLog(Ledger):
    """Busy seconds and counts of one pool, for a ledger that is elsewhere.

    Idle time is not told: that is what its ledger's clock has beyond it.
    """

    def __init__(
        self, pool: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with none."""
        super().__init__(pools={pool: 1}, chip="", clock=clock)
        self.start()

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds by activity, and counts, since the last call."""
        with self._lock:
            self._advance()
            seconds = {
                name: self._chip_s[name] for name in ACTIVITIES if self._chip_s[name]
            }
            counts = {name: amount for name, amount in self._counts.items() if amount}
            self._chip_s = dict.fromkeys(CATEGORIES, 0.0)
            self._counts = dict.fromkeys(COUNTS, 0)
        return seconds, counts
