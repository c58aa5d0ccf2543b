"""A worker and a learner around a queue, moved one event at a time by a test."""

import numpy as np

from scalerl_jax.rollout.queue import RolloutQueue
from scalerl_jax.types import Group, Prompt, Rollout


def make_group(ticket, *versions):
    """A finished group of one rollout whose tokens have these versions."""
    length = len(versions)
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
        rollouts=(
            Rollout(
                completion_tokens=np.zeros(length, np.int32),
                completion_mask=np.ones(length, bool),
                behavior_logprobs=np.zeros(length, np.float32),
                policy_versions=np.array(versions, np.int32),
                cut_off=False,
                interrupted=False,
            ),
        ),
        finished_version=versions[-1],
    )


class World:
    """A worker and a learner in one thread, moved one event at a time.

    It keeps its own books, so that nothing is judged by the queue's own count.
    """

    def __init__(self, *, num_prompts, max_staleness, mode):
        self.settings = dict(
            num_prompts=num_prompts, max_staleness=max_staleness, mode=mode
        )
        self.queue = RolloutQueue(**self.settings)
        self.version = 0  # the learner's
        self.worker_version = 0
        self.first_version = {}  # of running groups, by ticket
        self.buffered = {}  # first version by ticket
        self.batch = []
        self.batches = []  # (version, [(ticket, first version)])
        self.consumed, self.dropped = [], []
        self.admitted = 0
        self.skips = 0

    def admit(self, first_token_late=False):
        ticket = self.queue.admit(self.worker_version)
        if ticket is None:
            return False
        assert ticket == self.admitted, "tickets count up from 0"
        self.admitted += 1
        # None: it waits for a slot and samples its first token with later params.
        self.first_version[ticket] = None if first_token_late else self.worker_version
        return True

    def finish(self, ticket):
        first = self.first_version.pop(ticket)
        first = self.worker_version if first is None else first
        self.queue.put(make_group(ticket, first, self.worker_version))
        self.buffered[ticket] = first

    def drop(self, ticket):
        del self.first_version[ticket]
        self.queue.drop(ticket, "group_timeout")
        self.dropped.append(ticket)

    def take(self):
        """Whether the learner got a batch without waiting."""
        try:
            groups = self.queue.take(self.version, 0.0)
        except TimeoutError:
            return False
        tickets = [group.ticket for group in groups]
        assert len(tickets) == self.settings["num_prompts"]
        assert tickets == sorted(tickets)
        batch = [(ticket, self.buffered.pop(ticket)) for ticket in tickets]
        for _, first in batch:
            assert 0 <= self.version - first <= self.settings["max_staleness"]
        self.batch = batch
        self.batches.append((self.version, batch))
        return True

    def finish_step(self, *, skip=False):
        self.consumed.extend(ticket for ticket, _ in self.batch)
        self.batch = []
        if skip:
            self.queue.skipped()
            self.skips += 1
        else:
            self.queue.applied()
            self.version += 1

    def checkpoint(self):
        """Save, start a new queue with the saved state, re-issue what was running."""
        state = self.queue.snapshot()
        self.queue = RolloutQueue(**self.settings)
        self.queue.restore(state)
        self.worker_version = self.version
        assert sorted(self.first_version) == [ticket for ticket, _ in state.running]
        for ticket in self.first_version:
            self.queue.readmit(ticket, self.version)
            self.first_version[ticket] = self.version

    def check_books(self):
        in_batch = [ticket for ticket, _ in self.batch]
        everywhere = [
            *self.consumed,
            *self.dropped,
            *self.first_version,
            *self.buffered,
            *in_batch,
        ]
        assert sorted(everywhere) == list(range(self.admitted))
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
        elif action == "drop" and running:
            self.drop(running[choice % len(running)])
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

    def can_still_step(self):
        """Once what runs has finished, the learner gets its batch."""
        if self.batch:
            self.finish_step()
        while self.admit():
            pass
        for ticket in sorted(self.first_version):
            self.finish(ticket)
        self.check_books()
        return self.take()
