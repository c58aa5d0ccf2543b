"""The compute ledger: chip-seconds of a run by category.

Every chip belongs to one pool and is in some category at every instant, so that the
categories sum to chips x wall clock.  All are charged to the run except loading and
compiling (`startup`) and evaluation (`eval`), which are measured but left out of the
training axis.  Nothing here imports JAX; callers count FLOPs.  `run.lost_work` computes
what a resumed run has lost.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.process.background import repeated
from scalerl_jax.run.writing import write_json

LEDGER_FILE = "ledger.json"
WRITE_EVERY_S = 5.0  # a kill loses at most this much of the ledger
_LAST_WRITE_S = 60.0  # timeout of the last write, for a slow disk

# Activities of a chip.  `verify` is a pool's wait for verdicts, not CPU seconds.
ACTIVITIES = ("startup", "generate", "train", "publish", "verify", "eval", "checkpoint")
NOT_CHARGED = ("startup", "eval")
COUNTS = (
    "generated_tokens",
    "wasted_tokens",  # generated, and led to no gradient
    "train_tokens",
    "train_flops",
    "generate_flops",
    "teacher_flops",
    "asked_teacher_tokens",  # scored by an endpoint, whose FLOPs are not ours
    "lost_tokens",
    "lost_flops",
)
CATEGORIES = (*ACTIVITIES, "idle", "lost")
_SECONDS_PER_HOUR = 3600.0


class Ledger:
    """Chip-seconds by category, with the tokens and FLOPs that they produced.

    At every instant a pool's chips are split evenly among its current kinds of activity
    (the number of threads in each does not count); a pool without activity is idle.  A
    pool that is idle while another one evaluates or starts up waits for it, and its
    chips count in that category: a pause for an evaluation costs the training axis
    nothing.  For one beside the run no pool waits.

    `start` starts the clock.  All methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        pools: Mapping[str, float],
        chip: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a ledger of `pools` (name -> number of chips) of one kind of chip."""
        if not pools or min(pools.values()) <= 0:
            raise ValueError(f"pools = {pools} must each have chips")
        self.chip = chip
        self._pools = dict(pools)
        self._clock = clock
        self._lock = threading.Lock()
        self._last: float | None = None  # time of the last update; None: not started
        self._active: dict[str, Counter[str]] = {pool: Counter() for pool in pools}
        self._awaited: Counter[str] = Counter()  # activities that are not beside
        self._chip_s: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        # Since the last call of `idle_shares`: idle chip-seconds, and total seconds.
        self._pool_idle_s: dict[str, float] = dict.fromkeys(pools, 0.0)
        self._total_s = 0.0
        self._restored = False

    def start(self, *, startup_s: float = 0.0) -> None:
        """Start the clock; of the time before only `startup_s` seconds are counted."""
        with self._lock:
            assert self._last is None, "the ledger was started twice"
            self._last, self._total_s = self._clock(), startup_s
            self._chip_s["startup"] += sum(self._pools.values()) * startup_s

    @contextlib.contextmanager
    def activity(self, name: str, *, pool: str, beside: bool = False) -> Iterator[None]:
        """Count the time inside the block as `name` on the chips of `pool`.

        Blocks may nest and overlap, in one thread or in many.  What goes on `beside`
        the run holds up no other pool: one that is idle meanwhile is idle.
        """
        if name not in ACTIVITIES:
            raise ValueError(f"activity {name!r}; choose from {sorted(ACTIVITIES)}")
        if pool not in self._pools:
            raise ValueError(f"pool {pool!r}; choose from {sorted(self._pools)}")
        with self._lock:
            self._advance()
            self._active[pool][name] += 1
            self._awaited[name] += not beside
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._active[pool][name] -= 1
                self._awaited[name] -= not beside

    def count(self, **amounts: float) -> None:
        """Add amounts to counters of `COUNTS`."""
        for name, amount in amounts.items():
            if name not in COUNTS:
                raise ValueError(f"counter {name!r}; choose from {sorted(COUNTS)}")
            if amount < 0:
                raise ValueError(f"counter {name!r} cannot fall (by {amount})")
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def report(self) -> dict[str, float]:
        """Return chip-seconds by category, charged chip-hours and counters, up to now.

            wasted = generate * wasted_tokens / generated_tokens

        is subtracted from `generate`, so that the `_chip_s` entries still sum to
        chips x wall clock.
        """
        with self._lock:
            self._advance()
            chip_s = dict(self._chip_s)
            generated = self._counts["generated_tokens"]
            share = self._counts["wasted_tokens"] / generated if generated else 0.0
            chip_s["wasted"] = chip_s["generate"] * min(share, 1.0)
            chip_s["generate"] -= chip_s["wasted"]
            return {
                **{f"compute/{name}_chip_s": value for name, value in chip_s.items()},
                "compute/charged_chip_hours": self._charged_chip_hours(),
                **{f"compute/{name}": value for name, value in self._counts.items()},
            }

    def idle_shares(self) -> dict[str, float]:
        """Return each pool's idle share of the time since the last call, in [0, 1]."""
        with self._lock:
            self._advance()
            total_s = self._total_s or 1.0  # idle seconds are 0 then
            shares = {
                pool: max(self._pool_idle_s[pool] / (chips * total_s), 0.0)
                for pool, chips in self._pools.items()
            }
            self._pool_idle_s = dict.fromkeys(self._pools, 0.0)
            self._total_s = 0.0
            return shares

    def state(self) -> dict[str, Any]:
        """Return the ledger's whole state as JSON values."""
        with self._lock:
            self._advance()
            return {
                "chip": self.chip,
                "chip_s": dict(self._chip_s),
                "counts": dict(self._counts),
            }

    def add_past(self, amounts: Mapping[str, float]) -> None:
        """Add chip-seconds by category, and counts, of the run's earlier processes.

        They are added to what this process has counted since `start`, so that a resumed
        run includes all its start-ups.
        """
        assert not self._restored, "a second call would count the past twice"
        with self._lock:
            self._advance()
            for total in (self._chip_s, self._counts):
                for name in total:
                    total[name] += amounts.get(name, 0)
            self._restored = True

    def _charged_chip_hours(self) -> float:
        charged = [name for name in CATEGORIES if name not in NOT_CHARGED]
        return sum(self._chip_s[name] for name in charged) / _SECONDS_PER_HOUR

    def _advance(self) -> None:
        """Account for the time since the last call; the caller holds the lock."""
        if self._last is None:
            return
        now = self._clock()
        elapsed_s, self._last = now - self._last, now
        self._total_s += elapsed_s
        active = {pool: _running(names) for pool, names in self._active.items()}
        waited_for = [name for name in NOT_CHARGED if self._awaited[name]]
        for pool, chips in self._pools.items():
            chip_s = chips * elapsed_s
            booked = active[pool] or waited_for or ["idle"]
            for name in booked:
                self._enter(pool, name, chip_s / len(booked))

    def _enter(self, pool: str, category: str, chip_s: float) -> None:
        """Add chip-seconds of a pool; the caller holds the lock."""
        self._chip_s[category] += chip_s
        if category == "idle":
            self._pool_idle_s[pool] += chip_s


def _running(active: Counter[str]) -> list[str]:
    """Return the kinds of activity among which a pool's chips are split evenly.

    `verify` is a wait for verdicts: it counts only while nothing else runs.
    """
    names = [name for name, number in active.items() if number]
    return [name for name in names if name != "verify"] or names


@contextlib.contextmanager
def kept_on_disk(ledger: Ledger, directory: Path) -> Iterator[None]:
    """Write the ledger's state periodically during the block, and once at its end.

    The file is replaced atomically.  A failure to write is logged; the run continues.
    """
    path = directory / LEDGER_FILE

    def write(last: bool) -> None:
        try:
            write_json(path, ledger.state())
        except OSError as error:
            raise RuntimeError(
                f"cannot write {path} ({error.strerror or error}): if this process is "
                f"killed, its lost compute will be missing from the ledger"
            ) from error

    with repeated(write, name="ledger", every_s=WRITE_EVERY_S, last_s=_LAST_WRITE_S):
        yield
