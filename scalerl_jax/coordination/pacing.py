"""The arithmetic of bounded staleness: how many groups there may be, and which.

The learner takes a window of groups and makes E = epochs steps on each batch of N of
them.  At version v, with the next window opened at v (or the one in hand opened
there), the worker's params at version w, and the groups that are running, buffered, or
taken but not yet used up called outstanding,

    windows(m) = floor((m + k + 1 - v) / E)

is how many windows, this one included, can use a group of version m within
k = max_staleness: the last gradient of the n-th is at v + n * E - 1.

    admission:  start a group only if      outstanding < windows(w) * N
    pacing:     take a window only if, for every version m, the groups it leaves with
                oldest version <= m number  at most (windows(m) - 1) * N

Both keep  (outstanding with oldest version <= m) <= windows(m) * N  true; a step that
is skipped only adds to the right-hand side.  Hence no group of version m is left when
no window can use it, and once everything running has finished, a window of the N
oldest can be taken.  The worker's version bounds admission: with the learner's, a late
publish would let groups in that are too old.  k = E - 1 is the synchronous loop.

Batched mode (PPO-off-policy-k) generates all that k optimizer steps need at one
version, k / E batches of N groups, takes them together, and then starts the next:

    admission:  outstanding < k / E * N, and w >= v
    pacing:     take only when all of them are buffered

A sampler that is faster than the learner would fill all that k allows, and a group's
staleness would be the time for which it waits, finished, in that store.  So the
finished groups that wait, for their verdicts or to be taken, are bounded as well, with
W = max_waiting:

    admission:  ... and    waiting < max(W * N, groups of a window)        (W = 0: any)

It bounds what starts and not what runs: when the last group has started and R, it
included, are being sampled,

    waiting <= W * N - 1 + R

until the next one starts, and R is at most the slots of the sampler.  A judged group is
thus taken with one of the next ceil((W * N - 1 + R) / N) windows, for those that start
later are taken later; its staleness in flight is bounded by k alone.

Both inequalities above stay true, because nothing more is ever started for W's sake.
And no start is denied for it unless a whole window is finished: once those are judged,
the learner can take it, by the argument above, or some have given their places back
(refills); either makes room, and must wake the worker.  This holds whatever waits at
first, as after a restore.  In batched mode, and where k = E - 1, no more than a window
is ever outstanding: W changes nothing.  PipelineRL's generators have such a bounded
queue, https://arxiv.org/abs/2509.19128, algorithm 2.
"""

import dataclasses
import sys
from collections.abc import Sequence

from scalerl_jax.config import Mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pacing:
    """The settings of a queue; versions are optimizer steps applied."""

    num_prompts: int  # N
    max_staleness: int  # k
    mode: Mode
    max_waiting: int = 0  # W, batches of N finished groups; 0: no bound of its own
    epochs: int = 1  # E
    num_steps: int | None = None  # no group starts for a step past it

    def __post_init__(self) -> None:
        """Refuse what `config.checks` keeps from users."""
        assert self.num_prompts >= 1 and self.epochs >= 1, self
        assert self.max_waiting >= 0, self
        assert self.max_staleness >= self.epochs - 1, "the last epoch is past the bound"
        if self.mode == "batched":
            assert self.max_staleness and self.max_staleness % self.epochs == 0, self

    def windows(self, version: int, *, opened: int) -> int:
        """Count the windows from `opened` on that can use a group of `version`."""
        return (version + self.max_staleness + 1 - opened) // self.epochs

    def may_start(
        self, version: int, *, opened: int, outstanding: int, waiting: int
    ) -> bool:
        """Return whether a group may start with params of `version`.

        `waiting` of the `outstanding` groups are sampled and not taken.
        """
        if outstanding >= self._places(version, opened=opened):
            return False
        most = max(
            self.max_waiting * self.num_prompts, self.window_groups(opened=opened)
        )
        return not self.max_waiting or waiting < most

    def _places(self, version: int, *, opened: int) -> int:
        """Groups that may be outstanding once one starts with params of `version`."""
        if self.mode == "batched":
            return self.window_groups(opened=opened) if version >= opened else 0
        windows = min(
            self.windows(version, opened=opened), self._batches_left(opened=opened)
        )
        return windows * self.num_prompts

    def window_groups(self, *, opened: int) -> int:
        """Groups that are taken together by the window that begins at `opened`."""
        batches = 1
        if self.mode == "batched":
            whole = self.max_staleness // self.epochs
            batches = min(whole, self._batches_left(opened=opened))
        return batches * self.num_prompts

    def last_version(self, *, opened: int) -> int:
        """The version at the last gradient of a window, if no step is skipped."""
        batches = self.window_groups(opened=opened) // self.num_prompts
        return opened + batches * self.epochs - 1

    def usable(
        self, versions: Sequence[int], *, opened: int, windows_gone: int = 0
    ) -> bool:
        """Return whether groups so old can all be used, those windows aside."""
        if self.mode == "batched":
            left = 0 if windows_gone else self.window_groups(opened=opened)
            return len(versions) <= left and all(each >= opened for each in versions)
        return all(
            count
            <= (self.windows(each, opened=opened) - windows_gone) * self.num_prompts
            for count, each in enumerate(sorted(versions), start=1)
        )

    def _batches_left(self, *, opened: int) -> int:
        """Batches that the steps from `opened` on need."""
        if self.num_steps is None:
            return sys.maxsize
        return -((opened - self.num_steps) // self.epochs)
