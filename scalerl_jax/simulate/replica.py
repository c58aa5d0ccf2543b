"""A generator replica in simulated time: slots and a queue of samples.

Between two events all sequences advance together, a call of `tokens_per_call` tokens
at a time.  The replica moves from the end of one completion to the next, not from token
to token.  As in `sampler.scheduler`, a call is dispatched before the previous call is
read.  So a slot stays taken for one call after its sequence has ended, and the time
between two boundaries starts with the call that was dispatched before the first one
(no call in a replica that was idle).
"""

import collections
import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

LAG_CALLS = 1  # calls for which a slot stays taken after its sequence's last token


class SimulatedGroup:
    """A group in flight, with the attributes of a group that `RolloutQueue` reads."""

    __slots__ = (
        "finished_version",
        "has_reward_variance",
        "lost",
        "oldest_version",
        "sampled",
        "ticket",
        "told",
        "tokens",
        "total",
        "unfinished",
    )

    def __init__(self, ticket: int, tokens: list[int], *, useful: bool = True) -> None:
        """Create a group of which nothing is sampled."""
        self.ticket = ticket
        self.tokens = tokens  # of each completion
        self.total = sum(tokens)
        self.unfinished = len(tokens)
        self.has_reward_variance = useful
        self.oldest_version = -1  # of the first token
        self.finished_version = -1
        self.sampled = False
        self.told = False  # the queue has been notified that it is sampled
        self.lost = False  # with its replica: later events about it are ignored


class Machine(NamedTuple):
    """Sizes and rates that all replicas share."""

    slots: int
    tokens_per_call: int
    cache_tokens: int  # 0: room for every slot at its limit
    prompt_tokens: int
    prefill_tokens: int
    call_s: list[float]  # by number of sequences
    context_s: float  # per token of context and call
    prefill_s: float
    place_s: float


class SimulatedReplica:
    """Slots and samples of one replica, from one boundary between calls to the next.

    Times are seconds of the simulation.  `place` puts samples into free slots, `plan`
    computes when the next of them ends, `advance` moves there.  `interrupt` moves the
    next boundary to an earlier time, after a change.
    """

    def __init__(self, machine: Machine, number: int = 0, group_size: int = 1) -> None:
        """Create an empty replica at time 0."""
        self.machine, self.number, self._group_size = machine, number, group_size
        self.version = self._version_before = -1
        self._received_s = 0.0
        self.clear(0.0)
        self.up = True
        self.token = 0  # number of the current plan; events of older plans are void
        self.busy_s = self.slot_s = self.eval_s = self.down_s = 0.0
        self.pauses_left, self.pause_at_s = 0, 0.0  # of an evaluation, and the next
        self.generated = self.suspended = 0

    def clear(self, time_s: float) -> None:
        """Discard everything in progress."""
        self.time_s = time_s
        self.calls = 0  # so far
        self.running = 0  # sequences in slots
        self.held = 0  # tokens of their contexts
        # Heap of (call at which the sequence ends, order of placing, context less the
        # tokens of all calls before its placing, group, tokens to sample).
        self._ends: list[tuple[int, int, int, SimulatedGroup, int]] = []
        self._order = 0
        # Groups with samples that wait for a slot: (group, tokens to sample for each
        # sample, context with which they begin).
        self._waiting: collections.deque[tuple[SimulatedGroup, list[int], int]] = (
            collections.deque()
        )
        self.waiting_samples = 0
        self.inbox: list[tuple[int, SimulatedGroup]] = []  # with the version they need
        self._to_come = 0  # samples of the groups in `inbox`
        self.open: dict[int, SimulatedGroup] = {}  # by ticket, until delivered
        self._extra_s = 0.0  # prefills and new params, added to the next call
        self._read_s = time_s  # when the dispatched call ends
        self._planned = 0  # calls until the next boundary
        self.planned_s = math.inf  # time of the next boundary
        self.paused = False  # for an evaluation
        self.asked = False  # has reported free slots and received no group since

    @property
    def free_slots(self) -> int:
        """Slots left by running and waiting samples; negative if samples must wait."""
        return self.machine.slots - self.running - self.waiting_samples

    @property
    def room(self) -> int:
        """Groups that could begin now; samples of the last one may wait for slots."""
        free = self.free_slots - self._to_come
        return -(-free // self._group_size) if free > 0 else 0

    def give(self, group: SimulatedGroup, version: int) -> None:
        """Accept a group, to begin with params of `version` or later."""
        self.open[group.ticket] = group
        self.asked = False
        if version > self.version:
            self.inbox.append((version, group))
            self._to_come += group.unfinished
        else:
            self._enqueue(group)

    def receive(self, version: int, now_s: float) -> None:
        """Use params of `version` from the next call on, after `place_s` seconds."""
        if version > self.version >= 0 and self.running:
            self._extra_s += self.machine.place_s
        if version > self.version:
            self._version_before, self._received_s = self.version, now_s
            self.version = version
        if self.inbox:
            ready = [group for needs, group in self.inbox if needs <= self.version]
            self.inbox = [each for each in self.inbox if each[0] > self.version]
            for group in ready:
                self._to_come -= group.unfinished
                self._enqueue(group)

    def _enqueue(self, group: SimulatedGroup) -> None:
        prompt = self.machine.prompt_tokens
        self._waiting.append((group, group.tokens[::-1], prompt))
        self.waiting_samples += group.unfinished

    def place(self) -> None:
        """Put waiting samples into free slots; call it at a boundary."""
        if not self._waiting:
            return
        machine, ends, calls = self.machine, self._ends, self.calls
        per_call, cache = machine.tokens_per_call, machine.cache_tokens
        free, prefilled = machine.slots - self.running, 0
        offset = per_call * calls
        while free and self._waiting:
            group, samples, context = self._waiting[0]
            if cache and not self._fits(context + per_call):
                break
            if group.oldest_version < 0 or context > machine.prompt_tokens:
                prefilled += context
            if group.oldest_version < 0:
                group.oldest_version = self.version
            while samples and free:
                if cache and not self._fits(context + per_call):
                    break
                tokens = samples.pop()
                end = calls - (-tokens // per_call) + LAG_CALLS
                self._order += 1
                heapq.heappush(
                    ends, (end, self._order, context - offset, group, tokens)
                )
                free -= 1
                self.running += 1
                self.held += context
                self.waiting_samples -= 1
            if samples:
                break
            self._waiting.popleft()
        if prefilled:
            chunks = -(-prefilled // machine.prefill_tokens)
            self._extra_s += chunks * machine.prefill_s

    def _calls_s(self, first: int, end: int) -> float:
        """Return the seconds of the calls `first` to `end`, counted from now.

        The slots stay unchanged; each call lengthens the contexts of later calls.
        """
        count, running = end - first, self.running
        context = count * self.held
        context += (
            running
            * self.machine.tokens_per_call
            * (end * (end - 1) // 2 - first * (first - 1) // 2)
        )
        return count * self.machine.call_s[running] + self.machine.context_s * context

    def _fits(self, tokens: int) -> bool:
        """Return True if the cache has room for a sample and a call of all others."""
        ahead = self.running * self.machine.tokens_per_call
        return not self.running or self.held + tokens + ahead <= (
            self.machine.cache_tokens
        )

    def plan(self) -> float:
        """Plan the next boundary at which a sequence ends; return its time, or inf."""
        self.token += 1
        if not self.running:
            self._planned, self.planned_s = 0, math.inf
            return math.inf
        calls = self._ends[0][0] - self.calls
        machine = self.machine
        if machine.cache_tokens:
            room = machine.cache_tokens - self.held
            calls = max(1, min(calls, room // (self.running * machine.tokens_per_call)))
        return self._plan(calls)

    def _plan(self, calls: int) -> float:
        self._planned = calls
        read_s = max(self.time_s, self._read_s)
        self.planned_s = read_s + self._extra_s + self._calls_s(0, calls - 1)
        return self.planned_s

    def interrupt(self, now_s: float) -> float:
        """Plan the first boundary at or after `now_s` instead; return its time."""
        if not self.running:
            self.time_s = max(self.time_s, now_s)
            self.token += 1
            self.planned_s = self.time_s
            return self.time_s
        most, low, before_s = self._planned, 1, self.planned_s
        high = most
        while low < high:  # bisect for the first boundary not before now_s
            middle = (low + high) // 2
            if self._plan(middle) < now_s:
                low = middle + 1
            else:
                high = middle
        if self._plan(low) != before_s or low != most:
            self.token += 1
        return self.planned_s

    def advance(self) -> list[SimulatedGroup]:
        """Move to the planned boundary; return the groups whose sampling ended."""
        calls, running = self._planned, self.running
        seconds = self.planned_s - self.time_s
        self.time_s = self.planned_s
        if not running:
            return []
        machine = self.machine
        last_s = seconds if calls == 1 else self._calls_s(calls - 2, calls - 1)
        self._read_s = self.time_s + self._calls_s(calls - 1, calls)
        self._planned, self._extra_s = 0, 0.0
        self.calls += calls
        self.held += calls * running * machine.tokens_per_call
        self.busy_s += seconds
        self.slot_s += seconds * running
        done: list[SimulatedGroup] = []
        # The step that dispatched the last of these calls sees the end.
        late = self._received_s > self.time_s - last_s
        version = self._version_before if late else self.version
        ends, now = self._ends, self.calls
        offset = machine.tokens_per_call * now
        while ends and ends[0][0] <= now:
            _, _, context, group, tokens = heapq.heappop(ends)
            self.held -= context + offset
            self.running -= 1
            self.generated += tokens
            group.unfinished -= 1
            if not group.unfinished:
                group.finished_version = max(group.oldest_version, version)
                group.sampled = True
                done.append(group)
        if machine.cache_tokens:
            self._suspend()
        return done

    def _suspend(self) -> None:
        """Suspend the youngest samples if the cache is full."""
        machine = self.machine
        per_call = machine.tokens_per_call
        while self.running > 1 and (
            self.held + self.running * per_call > machine.cache_tokens
        ):
            youngest = max(self._ends, key=lambda each: each[1])
            self._ends.remove(youngest)
            heapq.heapify(self._ends)
            end, _, context, group, tokens = youngest
            self.held -= context + per_call * self.calls
            self.running -= 1
            left = min(tokens, max(1, (end - LAG_CALLS - self.calls) * per_call))
            self.generated += tokens - left
            # The context is prefilled again when the sample gets a slot.
            context += per_call * self.calls
            self._waiting.appendleft((group, [left], context))
            self.waiting_samples += 1
            self.suspended += 1

    def sampled_tokens(self) -> int:
        """Return the tokens sampled so far for all groups that are not delivered."""
        of_running = sum(tokens for *_, tokens in self._ends)
        left = of_running - self.unfinished()()
        left += sum(sum(samples) for _, samples, _ in self._waiting)
        left += sum(group.total for _, group in self.inbox)
        return sum(group.total for group in self.open.values()) - left

    def unfinished(self) -> Callable[[], int]:
        """Return a function that tells the tokens sampled so far in slots.

        They are those of now, and cost more to know.
        """
        calls, ends = self.calls, list(self._ends)
        per_call = self.machine.tokens_per_call
        prompt = self.machine.prompt_tokens

        def tokens_of_then() -> int:
            return sum(
                min(tokens, max(0, context - prompt + per_call * calls))
                for _, _, context, _, tokens in ends
            )

        return tokens_of_then
