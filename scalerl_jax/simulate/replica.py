"""A generator replica in simulated time: slots, a queue of samples, one rate for all.

Between two events all sequences advance together, a call of `tokens_per_call` tokens
at a time, so that a replica is moved from the end of one completion to the next and
not from token to token.  As in `sampler.scheduler`, a call is dispatched before the one
before it is read.  So a slot is taken for a call after its sequence has ended, and from
a boundary to the next passes the call that was dispatched before it: none in a replica
that stood still.
"""

import collections
import heapq
import math
from typing import NamedTuple

LAG_CALLS = 1  # that a slot is taken for after the last token of its sequence


class SimulatedGroup:
    """A group under way; what `RolloutQueue` asks of a finished one is here."""

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
        """Begin with nothing sampled."""
        self.ticket = ticket
        self.tokens = tokens  # of each completion
        self.total = sum(tokens)
        self.unfinished = len(tokens)
        self.has_reward_variance = useful
        self.oldest_version = -1  # that of its first token
        self.finished_version = -1
        self.sampled = False
        self.told = False  # of that, the queue
        self.lost = False  # with its replica: whatever is said of it is refused


class Machine(NamedTuple):
    """Sizes and rates that all replicas have alike."""

    slots: int
    tokens_per_call: int
    cache_tokens: int  # 0: every slot at its limit
    prompt_tokens: int
    prefill_tokens: int
    call_s: list[float]  # by sequences
    context_s: float  # of each token of context, in each call
    prefill_s: float
    place_s: float


class SimulatedReplica:
    """Slots and samples of one replica, from one boundary between calls to the next.

    Times are seconds of the simulation.  `place` puts samples into free slots, `plan`
    says when the next of them ends, `advance` moves there; `interrupt` makes the next
    boundary come earlier, for something has changed.
    """

    def __init__(self, machine: Machine, number: int = 0, group_size: int = 1) -> None:
        """Begin empty, at time 0."""
        self.machine, self.number, self._group_size = machine, number, group_size
        self.version = self._version_before = -1
        self._received_s = 0.0
        self.clear(0.0)
        self.up = True
        self.token = 0  # of what is planned: an older plan is void
        self.busy_s = self.slot_s = self.eval_s = self.down_s = 0.0
        self.generated = self.suspended = 0

    def clear(self, time_s: float) -> None:
        """Forget all that is under way."""
        self.time_s = time_s
        self.calls = 0  # so far
        self.running = 0  # sequences
        self.held = 0  # tokens of their contexts
        # (call of its end, order of placing, context less tokens since, group, tokens)
        self._ends: list[tuple[int, int, int, SimulatedGroup, int]] = []
        self._order = 0
        # Groups with samples that have no slot yet: how many tokens each is to get, and
        # the context that it begins with.
        self._waiting: collections.deque[tuple[SimulatedGroup, list[int], int]] = (
            collections.deque()
        )
        self.waiting_samples = 0
        self.inbox: list[tuple[int, SimulatedGroup]] = []  # with the version they need
        self._to_come = 0  # samples of these
        self.open: dict[int, SimulatedGroup] = {}  # until handed in
        self._extra_s = 0.0  # of prefills and new params, in the next call
        self._read_s = time_s  # when the call that is dispatched will be over
        self._planned = 0  # calls
        self.planned_s = math.inf  # time of the next boundary
        self.paused = False  # for an evaluation
        self.asked = False  # told that slots are free, and got no group since

    @property
    def free_slots(self) -> int:
        """Slots that no running or waiting sample will take."""
        return self.machine.slots - self.running - self.waiting_samples

    @property
    def room(self) -> int:
        """Groups that it could begin now: the last of them may wait for slots."""
        free = self.free_slots - self._to_come
        return -(-free // self._group_size) if free > 0 else 0

    def give(self, group: SimulatedGroup, version: int) -> None:
        """Take a group, to be begun with params of that version or later."""
        self.open[group.ticket] = group
        self.asked = False
        if version > self.version:
            self.inbox.append((version, group))
            self._to_come += group.unfinished
        else:
            self._enqueue(group)

    def receive(self, version: int, now_s: float) -> None:
        """Take params for the calls that begin from now on, after a pause for them."""
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
        """Return the seconds of calls, counted from now on, with what is in the slots.

        Each makes the contexts longer for those after it.
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
        """Return whether the cache has room for a sample, and a call of all others."""
        ahead = self.running * self.machine.tokens_per_call
        return not self.running or self.held + tokens + ahead <= (
            self.machine.cache_tokens
        )

    def plan(self) -> float:
        """Return the time of the next boundary at which something ends; inf: none."""
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
        """Plan the first boundary from `now_s` on instead; return its time."""
        if not self.running:
            self.time_s = max(self.time_s, now_s)
            self.token += 1
            self.planned_s = self.time_s
            return self.time_s
        most, low = self._planned, 1
        high = most
        while low < high:  # the first that is late enough
            middle = (low + high) // 2
            if self._plan(middle) < now_s:
                low = middle + 1
            else:
                high = middle
        if low != most:
            self.token += 1
        return self._plan(low)

    def advance(self) -> list[SimulatedGroup]:
        """Move to the boundary that was planned; return the groups sampled by then."""
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
        # An end is seen by the step that dispatched the last of these calls.
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
        """Take the youngest samples out of their slots if the cache is full."""
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
            # Its context is prefilled again when it gets a slot.
            context += per_call * self.calls
            self._waiting.appendleft((group, [left], context))
            self.waiting_samples += 1
            self.suspended += 1

    def unfinished_tokens(self) -> int:
        """Return the tokens sampled for completions that have not ended."""
        per_call = self.machine.tokens_per_call
        prompt = self.machine.prompt_tokens
        return sum(
            min(tokens, max(0, context - prompt + per_call * self.calls))
            for _, _, context, _, tokens in self._ends
        )
