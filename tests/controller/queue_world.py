"""A worker and a learner around a queue, moved one event at a time by a test."""

from fractions import Fraction

import numpy as np

from scalerl_jax.controller.queue import Pacing, RolloutQueue
from scalerl_jax.types import Group, Prompt, Rollout


def make_rollout(versions, reward):
    length = len(versions)
    return Rollout(
        completion_tokens=np.zeros(length, np.int32),
        completion_mask=np.ones(length, bool),
        behavior_logprobs=np.zeros(length, np.float32),
        policy_versions=np.array(versions, np.int32),
        cut_off=False,
        interrupted=False,
        reward=reward,
        status="wrong",
    )


def make_group(ticket, *versions, rewards=(0.0,)):
    """A finished group of rollouts whose tokens have these versions."""
    return Group(
        ticket=ticket,
        prompt=Prompt(
            prompt_id=ticket,
            epoch=0,
            task="none",
            text="",
            tokens=np.zeros(1, np.int32),
            reference={},
        ),
        rollouts=tuple(make_rollout(versions, reward) for reward in rewards),
        finished_version=versions[-1],
    )


class World:
    """A worker and a learner in one thread, moved one event at a time.

    It keeps its own books, so that nothing is judged by the queue's own count, and
    finds by trial which groups the windows to come can use.
    """

    def __init__(
        self,
        *,
        num_prompts,
        max_staleness,
        mode,
        max_waiting=0,
        epochs=1,
        max_refills=0,
        num_steps=None,
        useless=0,
    ):
        self.settings = dict(
            num_prompts=num_prompts,
            max_staleness=max_staleness,
            mode=mode,
            max_waiting=max_waiting,
            epochs=epochs,
            max_refills=max_refills,
            num_steps=num_steps,
        )
        self.num_prompts, self.max_staleness = num_prompts, max_staleness
        self.mode, self.epochs = mode, epochs
        self.useless = useless  # tenths of the groups without reward variance
        self.queue = self.new_queue()
        self.version = 0  # the learner's
        self.opened = 0  # version at the start of the window in hand, or the next
        self.worker_version = 0
        self.begun = {}  # version at admission, of running groups, by ticket
        self.first_version = {}  # of their first token
        self.sampled = set()  # of these, without a verdict
        self.buffered = {}  # first version by ticket
        self.refilled = {}  # the same of those that gave their places back
        self.batch = []  # (ticket, first version) with a place in the window in hand
        self.passes_left = 0
        self.batches = []  # (version, batch, tickets refilled)
        self.consumed, self.dropped = [], []
        self.admitted = 0
        self.windows_waited = {}  # by finished groups until theirs, which counts
        self.most_waiting = 0  # if all that ran at the last admission finished
        self.limit = float("inf")  # of the groups that run or wait
        self.skips = 0

    @property
    def places(self):
        """Groups that the window in hand, or the next, is for."""
        if self.mode == "pipeline":
            return self.num_prompts
        steps = self.max_staleness
        if self.settings["num_steps"] is not None:
            steps = min(steps, self.settings["num_steps"] - self.opened)
        return -(-steps // self.epochs) * self.num_prompts

    def can_use(self, versions, *, opened):
        """Whether windows from there on, the oldest groups first, are in time."""
        for place, version in enumerate(sorted(versions)):
            window = place // self.num_prompts
            if opened + (window + 1) * self.epochs - 1 - version > self.max_staleness:
                return False
        return True

    def may_admit(self):
        if self.is_full() or len(self.begun) + len(self.buffered) >= self.limit:
            return False
        outstanding = len(self.begun) + len(self.buffered) + len(self.batch)
        if self.settings["num_steps"] is not None:
            steps = self.settings["num_steps"] - self.opened
            if outstanding >= -(-steps // self.epochs) * self.num_prompts:
                return False
        if self.mode == "batched":
            return outstanding < self.places and self.worker_version >= self.opened
        # The new one comes last; how old the others are is their own matter.
        others = [self.worker_version] * outstanding
        return self.can_use([*others, self.worker_version], opened=self.opened)

    def is_full(self):
        """Whether as many finished groups wait as may, and a window is among them."""
        batches = self.settings["max_waiting"]
        waiting = len(self.sampled) + len(self.buffered)
        return batches > 0 and waiting >= max(self.places, batches * self.num_prompts)

    def may_take(self):
        if len(self.buffered) < self.places:
            return False
        left = sorted(self.buffered.values())[self.places :]
        left += self.begun.values()
        if self.mode == "batched":
            return not left
        return self.can_use(left, opened=self.version + self.epochs)

    def admit(self, first_token_late=False):
        allowed = self.may_admit()
        ticket = self.queue.admit(self.worker_version)
        assert (ticket is not None) == allowed
        if ticket is None:
            return False
        assert ticket == self.admitted, "tickets count up from 0"
        self.admitted += 1
        self.begun[ticket] = self.worker_version
        # None: it waits for a slot and samples its first token with later params.
        self.first_version[ticket] = None if first_token_late else self.worker_version
        self.note_running()
        return True

    def note_running(self):
        self.most_waiting = len(self.buffered) + len(self.begun)

    def is_useful(self, ticket):
        return ticket * 7919 % 10 >= self.useless

    def sample(self, ticket):
        """All that a group lacks is its verdicts."""
        if ticket in self.sampled:
            return
        self.queue.sampled(ticket)
        self.sampled.add(ticket)
        if self.first_version[ticket] is None:
            self.first_version[ticket] = self.worker_version

    def finish(self, ticket):
        self.sample(ticket)
        self.sampled.remove(ticket)
        del self.begun[ticket]
        first = self.first_version.pop(ticket)
        rewards = (0.0, 1.0) if self.is_useful(ticket) else (1.0, 1.0)
        self.queue.put(make_group(ticket, first, self.worker_version, rewards=rewards))
        self.keep(ticket, first)

    def keep(self, ticket, first):
        room = len(self.refilled) < self.settings["max_refills"] * self.places
        at = self.refilled if room and not self.is_useful(ticket) else self.buffered
        at[ticket] = first
        self.windows_waited[ticket] = -len(self.batches)

    def drop(self, ticket):
        del self.first_version[ticket], self.begun[ticket]
        self.sampled.discard(ticket)
        self.queue.drop(ticket, "group_timeout")
        self.dropped.append(ticket)

    def restart(self, ticket):
        """What was sampled is lost, with the machine that had it; another begins."""
        if self.worker_version < self.begun[ticket]:
            return
        self.queue.restart(ticket, self.worker_version)
        self.begun[ticket] = self.first_version[ticket] = self.worker_version
        self.sampled.discard(ticket)

    def take(self):
        """Whether the learner got a window without waiting."""
        allowed = self.may_take()
        try:
            groups = self.queue.take(self.version, 0.0)
        except TimeoutError:
            assert not allowed
            return False
        assert allowed
        tickets = [group.ticket for group in groups]
        assert tickets == sorted(tickets)
        assert self.refilled.keys() <= set(tickets)
        refilled, self.refilled = list(self.refilled), {}
        self.batch = [
            (ticket, self.buffered.pop(ticket))
            for ticket in tickets
            if ticket not in refilled
        ]
        assert len(self.batch) == self.places
        newest = max(first for _, first in self.batch)
        assert all(newest <= first for first in self.buffered.values()), "oldest first"
        # At most 1 + max_refills groups for each place.
        assert len(tickets) <= (1 + self.settings["max_refills"]) * self.places
        self.consumed.extend(refilled)
        self.batches.append((self.version, self.batch, refilled))
        for ticket, _ in self.batch:
            self.windows_waited[ticket] += len(self.batches)
        self.passes_left = len(self.batch) // self.num_prompts * self.epochs
        self.move_limit()
        return True

    def move_limit(self):
        """A tenth of what is amiss, from a window more than there is."""
        size, batches = self.num_prompts, self.settings["max_waiting"]
        if self.mode == "batched" or not batches:
            return
        there = len(self.begun) + len(self.buffered)
        left = len(self.buffered)
        limit = there + size if self.limit == float("inf") else self.limit
        limit += (Fraction(batches * size, 4) - left) / 10
        limit += 0 if left else Fraction(size, 2)
        self.limit = max(size, min(limit, there + 2 * size))

    def finish_step(self, *, skip=False):
        for _, first in self.batch:
            assert 0 <= self.version - first <= self.max_staleness
        self.passes_left -= 1
        self.version += not skip
        last = not self.passes_left or self.version == self.settings["num_steps"]
        if skip:
            self.queue.skipped(last=last)
            self.skips += 1
        else:
            self.queue.applied(last=last)
        if last:
            self.consumed.extend(ticket for ticket, _ in self.batch)
            self.batch = []
            self.opened = self.version

    def new_queue(self):
        """A queue with the world's settings, as it begins."""
        pacing = dict(self.settings)
        max_refills = pacing.pop("max_refills")
        return RolloutQueue(Pacing(**pacing), max_refills=max_refills)

    def checkpoint(self):
        """Save, start a new queue with the saved state, re-issue what was running."""
        state = self.queue.snapshot()
        self.queue = self.new_queue()
        self.queue.restore(state)
        self.limit = float("inf")
        self.worker_version = self.version
        self.sampled = set()
        assert sorted(self.first_version) == [ticket for ticket, _ in state.running]
        for ticket in self.first_version:
            self.queue.restart(ticket, self.version)
            self.first_version[ticket] = self.begun[ticket] = self.version
        finished = self.buffered | self.refilled
        self.buffered, self.refilled = {}, {}
        for ticket in sorted(finished, key=lambda each: (finished[each], each)):
            self.keep(ticket, finished[ticket])
        self.note_running()

    def check_books(self):
        in_batch = [ticket for ticket, _ in self.batch]
        everywhere = [
            *self.consumed,
            *self.dropped,
            *self.first_version,
            *self.buffered,
            *self.refilled,
            *in_batch,
        ]
        assert sorted(everywhere) == list(range(self.admitted))
        assert len(self.sampled) + len(self.buffered) <= self.most_waiting
        assert self.queue.running == len(self.first_version)
        assert self.queue.buffered == len(self.buffered)
        assert self.queue.taken == len(in_batch)
        assert sum(self.queue.dropped.values()) == len(self.dropped)

    def act(self, action, choice):
        running = sorted(self.first_version)
        if action == "admit":
            self.admit(first_token_late=choice % 5 == 0)
        elif action == "finish" and running:
            # Often the newest, so that old groups run on and on.
            newest = choice % 3 > 0
            self.finish(running[-1] if newest else running[choice % len(running)])
        elif action == "sample" and running:
            self.sample(running[choice % len(running)])
        elif action == "drop" and running:
            self.drop(running[choice % len(running)])
        elif action == "restart" and running:
            self.restart(running[choice % len(running)])
        elif action == "step":
            if self.batch:
                self.finish_step(skip=choice % 7 == 0)
            else:
                self.take()
        elif action == "publish":
            late = self.version - self.worker_version
            self.worker_version += choice % (late + 1)
        elif action == "checkpoint" and not self.batch:
            self.checkpoint()
        self.check_books()

    def finish_window(self):
        while self.batch:
            self.finish_step()

    def can_still_step(self):
        """Once what runs has finished, the learner gets its window."""
        self.finish_window()
        while self.admit() or self.first_version:
            while self.admit():
                pass
            for ticket in sorted(self.first_version):
                self.finish(ticket)
        self.check_books()
        return self.take()
