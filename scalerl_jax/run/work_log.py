"""Work of pools in other processes, which report it to the ledger later.

The ledger counts such a pool as idle, or as waiting for another pool, until the pool's
process sends the content of its log.
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
    """A ledger with `remote` pools, whose work `book` adds afterwards."""

    def __init__(self, *, remote: Collection[str], **how: Any) -> None:
        """Create a `Ledger` with arguments `how`; `remote` are some of its pools."""
        super().__init__(**how)
        # Chip-seconds of remote pools without reported work, by category.
        self._untold: dict[str, dict[str, float]] = {
            pool: dict.fromkeys(CATEGORIES, 0.0) for pool in remote
        }
        self._charged = 0.0  # chip-hours, the greatest value reported so far

    def book(self, pool: str, seconds: Mapping[str, float]) -> None:
        """Add work of a remote pool: seconds of all its chips, by activity.

        The seconds are moved from the pool's idle time, then from its waits for other
        pools.  For an evaluation the order is reversed, as other pools wait for it.
        Seconds beyond both are ignored: the remote clock runs faster than ours.
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
        """Return the charged hours, which never decrease.

        Without this they could: a remote pool may report later that idle time was an
        evaluation, which is not charged.
        """
        self._charged = max(self._charged, super()._charged_chip_hours())
        return self._charged


class WorkLog(Ledger):
    """Busy seconds and counts of one pool, for a ledger in another process.

    Idle time is not reported: the ledger derives it from its own clock.
    """

    def __init__(
        self, pool: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start an empty log."""
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
