"""The bounded-staleness queue between the sampling worker and the learner.

The queue decides when a group may start and when a window of groups may be taken, so
that no group is more than max_staleness optimizer steps old at any gradient, and none
is discarded for its age (which would favour short completions).  The file is above 400
lines: it has the state, shared by threads under one lock, the arithmetic of the bounds,
and the proof that the queue never stalls.

The learner takes a window of groups and makes E = epochs steps on each of its batches
of N groups.  Let v be the version at which the current window, or the next one, opens;
w the version of the worker's params; and let outstanding count the groups that are
running, buffered, or taken but not yet used up.  Then

    windows(m) = floor((m + k + 1 - v) / E)

is the number of windows, including the current one, that can use a group of version m
within k = max_staleness, since the last gradient of the n-th window is at
v + n * E - 1.

    admission:  start a group only if      outstanding < windows(w) * N
    pacing:     take a window only if, for every version m, the groups it leaves with
                oldest version <= m number  at most (windows(m) - 1) * N

Both rules preserve  (outstanding with oldest version <= m) <= windows(m) * N,  and a
skipped step only raises the right-hand side.  Hence every group of version m is used
while a window can use it, and once all running groups have finished, a window of the N
oldest can be taken.  Admission uses the worker's version: with the learner's, a late
publish would admit groups that are too old.  k = E - 1 is the synchronous loop.

Batched mode (PPO-off-policy-k) generates all groups of k optimizer steps at one
version, k / E batches of N groups, takes them together, and then starts the next ones:

    admission:  outstanding < k / E * N, and w >= v
    pacing:     take only when all of them are buffered

A sampler faster than the learner would fill the buffer that k allows, and a group's
staleness would be mostly its wait there after it has finished.  So the finished groups
that wait, for verdicts or to be taken, are bounded as well, with W = max_waiting:

    admission:  ... and    waiting < max(W * N, groups of a window)        (W = 0: any)

Starts that stop only at this bound come in waves, between which the learner waits.  So
the groups in process, running or waiting, have a limit that `starts` moves until W / 4
batches are left when the learner takes one; it is N or more.

W bounds starts, not groups already running: when the last admitted group has
started and R groups, including that one, are being sampled,

    waiting <= W * N - 1 + R

until the next group starts, and R is at most the slots of the sampler.  A judged group
is thus taken with one of the next ceil((W * N - 1 + R) / N) windows, since groups that
start later are taken later.  Only k bounds the staleness from its time in flight.

Both inequalities above stay true, because W and the limit only ever deny a start.  And
they deny one only while N groups are in process: once these are judged, the learner can
take a window, by the argument above, or some groups have freed their places (refills).
Either makes room, and must wake the worker.  This also holds if groups wait from the
start, as after a restore.  In batched mode, and with k = E - 1, at most one window is
ever outstanding, and W changes nothing.  PipelineRL's generators have such a bounded
queue, https://arxiv.org/abs/2509.19128, algorithm 2.

With refills (dynamic sampling), a finished group whose rewards are all equal frees its
place, for at most `max_refills` groups per place of a window; after that such a group
keeps its place like any other, so that a window always fills.  The bounds treat a group
that freed its place as if it had never existed.  In the synchronous loop a window has
the same groups whichever finishes first; but a refill starts when a verdict arrives, so
that the number of sequences decoded together, and with it the last bit of a
log-probability, may differ from run to run.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from scalerl_jax.config import Mode
from scalerl_jax.contract import QueueClosed
from scalerl_jax.controller.starts import StartLimit
from scalerl_jax.types import Group

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pacing:
    """Bounds of a queue; versions count optimizer steps applied."""

    num_prompts: int  # N
    max_staleness: int  # k
    mode: Mode
    # W, batches of N finished groups that wait at most; 0: only k bounds them.
    max_waiting: int = 0
    epochs: int = 1  # E
    num_steps: int | None = None  # no group starts for a later step

    def windows(self, version: int, *, opened: int) -> int:
        """Count the windows from `opened` on that can use a group of `version`."""
        return (version + self.max_staleness + 1 - opened) // self.epochs

    def may_start(
        self, version: int, *, opened: int, outstanding: int, waiting: int
    ) -> bool:
        """Return whether a group may start with params of `version`.

        `waiting` of the `outstanding` groups are fully sampled and not yet taken.
        """
        if outstanding >= self._places(version, opened=opened):
            return False
        most = max(
            self.max_waiting * self.num_prompts, self.window_groups(opened=opened)
        )
        return not self.max_waiting or waiting < most

    def _places(self, version: int, *, opened: int) -> int:
        """Return the number of outstanding groups below which `version` may start."""
        if self.mode == "batched":
            return self.window_groups(opened=opened) if version >= opened else 0
        windows = min(
            self.windows(version, opened=opened), self._batches_left(opened=opened)
        )
        return windows * self.num_prompts

    def window_groups(self, *, opened: int) -> int:
        """Return the number of groups of the window that opens at version `opened`."""
        batches = 1
        if self.mode == "batched":
            whole = self.max_staleness // self.epochs
            batches = min(whole, self._batches_left(opened=opened))
        return batches * self.num_prompts

    def last_version(self, *, opened: int) -> int:
        """Return the version at a window's last gradient, if no step is skipped."""
        batches = self.window_groups(opened=opened) // self.num_prompts
        return opened + batches * self.epochs - 1

    def usable(
        self, versions: Sequence[int], *, opened: int, windows_gone: int = 0
    ) -> bool:
        """Return whether groups of these versions can all be used within the bound.

        `windows_gone` windows from `opened` on have been taken.
        """
        if self.mode == "batched":
            left = 0 if windows_gone else self.window_groups(opened=opened)
            return len(versions) <= left and all(each >= opened for each in versions)
        return all(
            count
            <= (self.windows(each, opened=opened) - windows_gone) * self.num_prompts
            for count, each in enumerate(sorted(versions), start=1)
        )

    def _batches_left(self, *, opened: int) -> int:
        """Return the number of batches that the steps from `opened` on need."""
        if self.num_steps is None:
            return sys.maxsize
        return max(-((opened - self.num_steps) // self.epochs), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueState:
    """State of the queue in a checkpoint."""

    version: int  # optimizer steps applied
    next_ticket: int
    buffered: tuple[Group, ...]  # in ticket order, including refilled ones
    running: tuple[tuple[int, int], ...]  # (ticket, oldest version), to be restarted
    dropped: dict[str, int]  # groups by reason


class RolloutQueue:
    """The queue: admits groups, holds finished ones, returns windows of N or more."""

    def __init__(self, pacing: Pacing, *, max_refills: int = 0) -> None:
        """Start empty at version 0."""
        self._pacing = pacing
        self._max_refills = max_refills
        self._starts: StartLimit | None = None
        if pacing.mode == "pipeline" and pacing.max_waiting:
            self._starts = StartLimit(
                num_prompts=pacing.num_prompts, max_waiting=pacing.max_waiting
            )
        self._changed = threading.Condition()
        self.version = 0  # optimizer steps applied
        self._opened = 0  # version at which the current window, or the next, opens
        self._next_ticket = 0
        self._running: dict[int, int] = {}  # ticket -> oldest version
        self._sampled: set[int] = set()  # running tickets that await their verdicts
        self._lost: set[int] = set()  # running before a restore, not yet restarted
        self._buffered: dict[int, Group] = {}
        self._refilled: list[Group] = []  # freed their places since the last take
        self.taken = 0  # groups with a place in the window that is not used up
        self._dropped: dict[str, int] = {}
        self._changes = 0  # count of changes after which `admit` may admit a group
        self._seen = 0  # the count at the worker's last call
        self.failure: BaseException | None = None  # the first error given to `fail`
        self._closed = False
        self._held = False  # no group starts
        self._listener: Callable[[], None] = lambda: None

    # The worker's side.

    def admit(self, version: int) -> int | None:
        """Return the ticket of a group that may start at `version` now, or None.

        Raises:
            QueueClosed: after `close`.
        """
        with self._changed:
            self.raise_if_over()
            assert version <= self.version, "published before `applied` was called"
            denied = self._starts and self._starts.denies(self._in_process())
            if (
                self._held
                or denied
                or not self._pacing.may_start(
                    version,
                    opened=self._opened,
                    outstanding=self._outstanding(),
                    waiting=self._waiting(),
                )
            ):
                self._seen = self._changes
                return None
            ticket = self._next_ticket
            self._next_ticket += 1
            self._running[ticket] = version
            return ticket

    def restart(self, ticket: int, version: int) -> int:
        """Restart a running ticket from its prompt; return its new oldest version.

        The result is the larger of `version` and the old one, so that the bound holds.
        Each running ticket of a restored checkpoint must be restarted; others may be,
        if their sampled tokens were lost.
        """
        with self._changed:
            assert ticket in self._running, f"ticket {ticket} is not running"
            version = max(version, self._running[ticket])
            assert version <= self.version, version
            self._lost.discard(ticket)
            self._sampled.discard(ticket)
            self._running[ticket] = version
            return version

    def sampled(self, ticket: int) -> None:
        """Record that a running group lacks only its verdicts; it counts as waiting."""
        with self._changed:
            assert ticket in self._running, f"ticket {ticket} is not running"
            self._sampled.add(ticket)

    def oldest_of(self, ticket: int) -> int | None:
        """Return the oldest version that a ticket's tokens may have.

        None: it is not running, or was restored and is not restarted yet.
        """
        with self._changed:
            return None if ticket in self._lost else self._running.get(ticket)

    def put(self, group: Group) -> None:
        """Buffer a finished and judged group, which the order book has checked."""
        oldest_version = group.oldest_version  # computed outside of the lock
        with self._changed:
            ticket = group.ticket
            assert ticket in self._running, f"ticket {ticket} is not running"
            assert ticket not in self._lost, f"ticket {ticket} was not restarted"
            assert oldest_version >= self._running[ticket], "older than its admission"
            assert oldest_version <= self.version, "a token from the future"
            del self._running[ticket]
            self._sampled.discard(ticket)
            if self._may_refill(group):
                self._refilled.append(group)
                self._note_change()
            else:
                self._buffered[ticket] = group
                self._changed.notify_all()

    def drop(self, ticket: int, reason: str) -> None:
        """End a running group without a result, and free its place."""
        with self._changed:
            assert ticket in self._running, f"ticket {ticket} is not running"
            del self._running[ticket]
            self._sampled.discard(ticket)
            self._lost.discard(ticket)
            self._dropped[reason] = self._dropped.get(reason, 0) + 1
            self._note_change()

    def wait(self, timeout_s: float) -> None:
        """Sleep until `admit` may give another answer, at most `timeout_s`.

        Raises:
            QueueClosed: after `close`.
        """
        with self._changed:
            self._sleep_until(lambda: self._changes != self._seen, timeout_s)
            self._seen = self._changes

    def on_change(self, listener: Callable[[], None]) -> None:
        """Set the function to call, under the lock, when `admit` may admit a group."""
        self._listener = listener

    def wake(self) -> None:
        """End the worker's `wait`: something else changed, such as its params."""
        with self._changed:
            self._note_change()

    def fail(self, error: BaseException) -> None:
        """Pass the error that ended one thread to the other; keep only the first."""
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._note_change()

    # The learner's side.

    def take(self, version: int, timeout_s: float) -> list[Group]:
        """Return the groups of a window in ticket order, for steps from `version` on.

        They are N groups, in batched mode N per batch, and in addition the groups that
        have freed their places since the last call.

        Raises:
            TimeoutError: no window could be taken within `timeout_s`.
            QueueClosed: after `close`.
            BaseException: the error given to `fail`.
        """
        with self._changed:
            assert version == self.version, (version, self.version)
            assert not self.taken, "the last window is not used up"
            chosen = self._sleep_until(self._choose, timeout_s)
            if chosen is None:
                raise TimeoutError(self._timeout_message())
            for group in chosen:
                age = self._pacing.last_version(opened=version) - group.oldest_version
                assert age <= self._pacing.max_staleness, "admission or pacing failed"
                del self._buffered[group.ticket]
            self.taken = len(chosen)
            if self._starts:
                self._starts.note_taken(
                    in_process=self._in_process(), left=len(self._buffered)
                )
            self._note_change()  # fewer groups wait
            refilled, self._refilled = self._refilled, []
            return _by_ticket([*chosen, *refilled])

    def applied(self, *, last: bool = True) -> None:
        """Record that a step on the current window made a new version.

        `last`: it was the window's last step.  Call this before publishing.
        """
        with self._changed:
            assert self.taken, "no window was taken"
            self.version += 1
            self._end_pass(last)

    def skipped(self, *, last: bool = True) -> None:
        """Record that a step on the current window made no new version."""
        with self._changed:
            assert self.taken, "no window was taken"
            self._end_pass(last)

    def hold(self, held: bool) -> None:
        """Let no group start until this is called with False.

        Without staleness an evaluation in the loop, begun like this, is beside no group
        of training, whose samples would otherwise be suspended wherever they were.
        """
        with self._changed:
            self._held = held
            self._note_change()

    def close(self) -> None:
        """End every wait, present and future, with QueueClosed."""
        with self._changed:
            self._closed = True
            self._note_change()

    # Either side.

    def raise_if_over(self) -> None:
        """Raise the error given to `fail`, or QueueClosed after `close`."""
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if self._closed:
                raise QueueClosed

    def snapshot(self) -> QueueState:
        """Return the state for a checkpoint, between two windows."""
        with self._changed:
            assert not self.taken, "a window is not used up"
            return QueueState(
                version=self.version,
                next_ticket=self._next_ticket,
                buffered=tuple(_by_ticket([*self._buffered.values(), *self._refilled])),
                running=tuple(sorted(self._running.items())),
                dropped=dict(self._dropped),
            )

    def restore(self, state: QueueState) -> None:
        """Restore `state`; each of its running tickets must then be restarted.

        Until then a running ticket keeps its place and its version, so that no new
        group can take the place.

        Raises:
            ValueError: the groups were saved under other settings and could not all
                be used within the bound.
        """
        with self._changed:
            assert self._next_ticket == 0, "only a fresh queue can be restored"
            self.version = self._opened = state.version
            self._next_ticket = state.next_ticket
            self._running = dict(state.running)
            self._lost = set(self._running)
            # Refill the oldest zero-variance groups: this leaves the most room to the
            # groups that keep their places.
            for group in sorted(state.buffered, key=lambda each: each.oldest_version):
                if self._may_refill(group):
                    self._refilled.append(group)
                else:
                    self._buffered[group.ticket] = group
            self._dropped = dict(state.dropped)
            pacing, versions = self._pacing, list(self._running.values())
            versions += [each.oldest_version for each in self._buffered.values()]
            if not pacing.usable(versions, opened=self._opened):
                raise ValueError(
                    f"the checkpoint's {self._outstanding()} unfinished and buffered "
                    f"groups cannot all be used from step {self.version + 1} on with "
                    f"queue.mode = {pacing.mode!r}, queue.max_staleness = "
                    f"{pacing.max_staleness}, batch.epochs = {pacing.epochs}, "
                    f"batch.num_prompts = {pacing.num_prompts} and train.num_steps = "
                    f"{pacing.num_steps}; resume with the settings with which it was "
                    f"saved"
                )

    @property
    def running(self) -> int:
        """Number of groups that are being sampled or judged."""
        return len(self._running)

    @property
    def buffered(self) -> int:
        """Number of finished groups that wait for the learner."""
        return len(self._buffered)

    @property
    def dropped(self) -> dict[str, int]:
        """Number of groups that ended without a result, by reason."""
        with self._changed:
            return dict(self._dropped)

    # Under the lock.

    def _in_process(self) -> int:
        return len(self._running) + len(self._buffered)

    def _waiting(self) -> int:
        return len(self._sampled) + len(self._buffered)

    def _outstanding(self) -> int:
        return self._in_process() + self.taken

    def _may_refill(self, group: Group) -> bool:
        """Return whether a group has zero variance and may still be refilled."""
        limit = self._max_refills * self._pacing.window_groups(opened=self._opened)
        return len(self._refilled) < limit and not group.has_reward_variance

    def _end_pass(self, last: bool) -> None:
        if last:
            self.taken = 0
            self._opened = self.version
            self._note_change()

    def _choose(self) -> list[Group] | None:
        """Return the oldest groups, as many as a window takes; None: it must wait."""
        size = self._pacing.window_groups(opened=self._opened)
        if len(self._buffered) < size:
            return None
        by_age = sorted(
            self._buffered.values(),
            key=lambda group: (group.oldest_version, group.ticket),
        )
        left = [group.oldest_version for group in by_age[size:]]
        left += self._running.values()
        usable = self._pacing.usable(left, opened=self._opened, windows_gone=1)
        return by_age[:size] if usable else None

    def _sleep_until(self, ready: Callable[[], T], timeout_s: float) -> T:
        """Wait until `ready` returns something true; return its last result."""

        def answer() -> T:
            self.raise_if_over()
            return ready()

        return self._changed.wait_for(answer, timeout_s)

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()
        self._listener()

    def _timeout_message(self) -> str:
        oldest = min(self._running.values(), default=None)
        return (
            f"{len(self._buffered)} of "
            f"{self._pacing.window_groups(opened=self._opened)} groups at policy "
            f"version {self.version} "
            f"(mode={self._pacing.mode}, max_staleness={self._pacing.max_staleness}, "
            f"running={len(self._running)}, of these {len(self._sampled)} with the "
            f"verifiers, oldest running version={oldest}, "
            f"buffered={len(self._buffered)}, refilled={len(self._refilled)}, "
            f"dropped={self._dropped}); raise queue.batch_timeout_s if groups only "
            f"need more time"
        )


def _by_ticket(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.ticket)
