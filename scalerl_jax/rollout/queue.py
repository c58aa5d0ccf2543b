"""The bounded-staleness queue between the sampling worker and the learner.

It says when a group may start and when a batch may be taken, so that no group is
more than k = max_staleness optimizer steps old when it is used, and none is thrown
away for its age (which would favour short completions).  With N prompts per step,
the learner at version v, the worker's params at version w <= v, and the groups that
are running, buffered, or taken but not yet applied called outstanding:

    admission:  start a group only if      N * v + outstanding < (k + w + 1) * N
    pacing:     take a batch only if, for every version m, the groups it leaves with
                oldest version <= m number  at most (m + k - v) * N

Both keep  N * v + (outstanding with oldest version <= m) <= (k + m + 1) * N  true.
Hence no group of version m is left after step m + k, and once everything running
has finished, a batch of the N oldest can be taken.  The worker's version bounds
admission: with the learner's, a late publish would let groups in that are too old.

Batched mode (PPO-off-policy-k) fills a phase of k * N groups at versions p * k,
takes k batches of it, and starts the next:

    admission:  N * v + outstanding < (floor(w / k) + 1) * k * N
    pacing:     take only when what is left of the phase is buffered

One lock guards all of it.  Two threads use it: a worker and a learner.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from scalerl_jax.config import Mode
from scalerl_jax.types import Group

T = TypeVar("T")


class QueueClosed(Exception):  # noqa: N818  an end, not an error
    """The run is over; whoever waits on the queue should return."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueState:
    """What a checkpoint keeps of the queue."""

    version: int  # optimizer steps applied
    next_ticket: int
    buffered: tuple[Group, ...]  # in ticket order
    running: tuple[tuple[int, int], ...]  # (ticket, oldest version), to be re-issued
    dropped: dict[str, int]  # groups by reason


class _Finished(NamedTuple):
    oldest_version: int  # kept, for Group computes it from all its tokens
    group: Group


class RolloutQueue:
    """Admits groups, holds finished ones, hands out batches of N."""

    def __init__(
        self,
        *,
        num_prompts: int,
        max_staleness: int,
        mode: Mode,
        num_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty queue at version 0; no group starts for a step past `num_steps`."""
        assert num_prompts >= 1 and max_staleness >= 0, (num_prompts, max_staleness)
        assert mode == "pipeline" or max_staleness >= 1, "batched mode needs k >= 1"
        self._num_prompts = num_prompts
        self._max_staleness = max_staleness
        self._mode = mode
        self._num_steps = num_steps
        self._clock = clock
        self._changed = threading.Condition()
        self._version = 0
        self._next_ticket = 0
        self._running: dict[int, int] = {}  # ticket -> oldest version
        self._lost: set[int] = set()  # running before a restore, not yet readmitted
        self._buffered: dict[int, _Finished] = {}
        self._taken = 0
        self._dropped: dict[str, int] = {}
        self._changes = 0  # what may let the worker go on
        self._seen = 0  # changes the worker knows of
        self._failure: BaseException | None = None
        self._closed = False

    # The worker's side.

    def admit(self, version: int) -> int | None:
        """The ticket of a group that may start now with params of `version`, or None.

        Raises:
            QueueClosed: after `close`.
        """
        with self._changed:
            self._raise_if_over()
            assert version <= self._version, "published before `applied` was called"
            if self._used() >= self._admission_limit(version):
                self._seen = self._changes
                return None
            ticket = self._next_ticket
            self._next_ticket += 1
            self._running[ticket] = version
            return ticket

    def readmit(self, ticket: int, version: int) -> None:
        """Put a ticket that was running at the restored checkpoint back to work."""
        with self._changed:
            assert ticket in self._lost, f"ticket {ticket} was not running at the save"
            assert self._running[ticket] <= version <= self._version, version
            self._lost.remove(ticket)
            self._running[ticket] = version

    def put(self, group: Group) -> None:
        """A running group is finished and judged; the learner may have it."""
        oldest_version = group.oldest_version
        with self._changed:
            ticket = group.ticket
            assert ticket in self._running, f"ticket {ticket} is not running"
            assert ticket not in self._lost, f"ticket {ticket} was not readmitted"
            assert oldest_version >= self._running[ticket], "older than its admission"
            assert oldest_version <= self._version, "a token from the future"
            del self._running[ticket]
            self._buffered[ticket] = _Finished(oldest_version, group)
            self._changed.notify_all()

    def drop(self, ticket: int, reason: str) -> None:
        """A running group ends without a result; its place is given back."""
        with self._changed:
            assert ticket in self._running, f"ticket {ticket} is not running"
            del self._running[ticket]
            self._lost.discard(ticket)
            self._dropped[reason] = self._dropped.get(reason, 0) + 1
            self._note_change()

    def wait(self, timeout_s: float) -> None:
        """Sleep until `admit` may answer differently than last time, or for so long.

        Raises:
            QueueClosed: after `close`.
        """
        with self._changed:
            self._sleep_until(
                lambda: True if self._changes != self._seen else None, timeout_s
            )
            self._seen = self._changes

    def wake(self) -> None:
        """End the worker's `wait`: something else changed, such as its params."""
        with self._changed:
            self._note_change()

    def fail(self, error: BaseException) -> None:
        """Hand the error that ended one thread to the other; the first one counts."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._note_change()

    # The learner's side.

    def take(self, version: int, timeout_s: float) -> list[Group]:
        """N groups, by ticket, for the step that makes `version` + 1.

        Raises:
            TimeoutError: if no batch could be taken for so long.
            QueueClosed: after `close`.
            BaseException: what `fail` was given.
        """
        with self._changed:
            assert version == self._version, (version, self._version)
            assert not self._taken, "the last batch was neither applied nor skipped"
            chosen = self._sleep_until(self._choose, timeout_s)
            if chosen is None:
                raise TimeoutError(self._timeout_message(timeout_s))
            for finished in chosen:
                staleness = version - finished.oldest_version
                assert staleness <= self._max_staleness, "admission or pacing is broken"
                del self._buffered[finished.group.ticket]
            self._taken = len(chosen)
            return [finished.group for finished in chosen]

    def applied(self) -> None:
        """The batch taken last made a new version.  Call it before publishing."""
        with self._changed:
            assert self._taken, "no batch was taken"
            self._version += 1
            self._taken = 0
            self._note_change()

    def skipped(self) -> None:
        """The batch taken last is used up, without a new version."""
        with self._changed:
            assert self._taken, "no batch was taken"
            self._taken = 0
            self._note_change()

    def close(self) -> None:
        """End every wait, present and future, with QueueClosed."""
        with self._changed:
            self._closed = True
            self._note_change()

    # Either side.

    def raise_if_failed(self) -> None:
        """Raise what `fail` was given, the same object, if it was called."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def snapshot(self) -> QueueState:
        """What a checkpoint needs, between two steps."""
        with self._changed:
            assert not self._taken, "a batch is neither applied nor skipped"
            return QueueState(
                version=self._version,
                next_ticket=self._next_ticket,
                buffered=tuple(
                    finished.group for _, finished in sorted(self._buffered.items())
                ),
                running=tuple(sorted(self._running.items())),
                dropped=dict(self._dropped),
            )

    def restore(self, state: QueueState) -> None:
        """Go on from `state`; each of its running tickets must then be readmitted.

        Until then they keep their places and their versions, so that no new group
        can take them.

        Raises:
            ValueError: if the groups were saved under other settings and could not
                all be used within the bound.
        """
        with self._changed:
            assert self._next_ticket == 0, "only a fresh queue can be restored"
            self._version = state.version
            self._next_ticket = state.next_ticket
            self._running = dict(state.running)
            self._lost = set(self._running)
            self._buffered = {
                group.ticket: _Finished(group.oldest_version, group)
                for group in state.buffered
            }
            self._dropped = dict(state.dropped)
            if not self._usable_after_restore():
                raise ValueError(
                    f"the checkpoint's {self._outstanding()} unfinished and buffered "
                    f"groups cannot all be used from step {self._version + 1} on with "
                    f"queue.mode = {self._mode!r}, queue.max_staleness = "
                    f"{self._max_staleness} and batch.num_prompts = "
                    f"{self._num_prompts}; go on with the settings it was saved with"
                )

    @property
    def version(self) -> int:
        """Optimizer steps applied."""
        with self._changed:
            return self._version

    @property
    def running(self) -> int:
        """Groups that are being sampled or judged."""
        with self._changed:
            return len(self._running)

    @property
    def buffered(self) -> int:
        """Finished groups that wait for the learner."""
        with self._changed:
            return len(self._buffered)

    @property
    def taken(self) -> int:
        """Groups of the batch that is neither applied nor skipped."""
        with self._changed:
            return self._taken

    @property
    def dropped(self) -> dict[str, int]:
        """Groups that ended without a result, by reason."""
        with self._changed:
            return dict(self._dropped)

    # Under the lock.

    def _outstanding(self) -> int:
        return len(self._running) + len(self._buffered) + self._taken

    def _used(self) -> int:
        return self._num_prompts * self._version + self._outstanding()

    def _admission_limit(self, version: int) -> int:
        if self._mode == "batched":
            steps = (version // self._max_staleness + 1) * self._max_staleness
        else:
            steps = self._max_staleness + version + 1
        if self._num_steps is not None:
            steps = min(steps, self._num_steps)
        return steps * self._num_prompts

    def _phase_rest(self) -> int:
        """Groups of the current phase that are not consumed (batched mode)."""
        steps = self._max_staleness - self._version % self._max_staleness
        if self._num_steps is not None:
            steps = min(steps, self._num_steps - self._version)
        return steps * self._num_prompts

    def _choose(self) -> list[_Finished] | None:
        """The batch that may be taken now, by ticket; None if it must wait."""
        by_ticket = [self._buffered[ticket] for ticket in sorted(self._buffered)]
        if self._mode == "batched":
            complete = len(by_ticket) >= self._phase_rest()
            return by_ticket[: self._num_prompts] if complete else None
        if len(by_ticket) < self._num_prompts:
            return None
        by_age = sorted(by_ticket, key=lambda finished: finished.oldest_version)
        chosen, left = by_age[: self._num_prompts], by_age[self._num_prompts :]
        versions = [finished.oldest_version for finished in left]
        versions.extend(self._running.values())
        if not self._usable(versions, from_version=self._version + 1):
            return None
        return sorted(chosen, key=lambda finished: finished.group.ticket)

    def _usable(self, versions: list[int], *, from_version: int) -> bool:
        """Whether groups so old can all be used, N at each of the steps to come."""
        steps = self._max_staleness + 1 - from_version
        return all(
            count <= (oldest_version + steps) * self._num_prompts
            for count, oldest_version in enumerate(sorted(versions), start=1)
        )

    def _usable_after_restore(self) -> bool:
        versions = [finished.oldest_version for finished in self._buffered.values()]
        versions.extend(self._running.values())
        if self._mode == "batched":
            phase = self._version - self._version % self._max_staleness
            return len(versions) <= self._phase_rest() and all(
                oldest_version >= phase for oldest_version in versions
            )
        return self._usable(versions, from_version=self._version)

    def _sleep_until(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        deadline = self._clock() + timeout_s
        while True:
            self._raise_if_over()
            result = ready()
            remaining = deadline - self._clock()
            if result is not None or remaining <= 0:
                return result
            self._changed.wait(remaining)

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _raise_if_over(self) -> None:
        self.raise_if_failed()
        if self._closed:
            raise QueueClosed

    def _timeout_message(self, timeout_s: float) -> str:
        oldest = min(self._running.values(), default=None)
        return (
            f"{len(self._buffered)} of {self._num_prompts} groups after {timeout_s} s "
            f"at policy version {self._version} (mode={self._mode}, "
            f"max_staleness={self._max_staleness}, running={len(self._running)}, "
            f"oldest running version={oldest}, buffered={len(self._buffered)}, "
            f"dropped={self._dropped}); raise queue.batch_timeout_s if groups only "
            f"need longer"
        )
