"""The order in which prompts are sampled, and those that are sampled no more.

The shuffled order of an epoch comes from (seed, epoch) alone.  What has been drawn,
the history that says which prompts are left out, and the difficulties that sort the
epoch are saved, so that a run goes on in the middle of an epoch.
"""

import bisect
import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from scalerl_jax.types import Prompt

_ORDER = 2  # purpose of the draw, beside those of `tasks`
_NEVER = np.iinfo(np.int64).max  # the turn of a prompt that is not sampled again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """A curriculum: the prompts that are open at a step, and their order.

    With `open_steps` = 0 all are open and come sorted, the easiest first, without a
    shuffle, epoch after epoch: Tan et al., https://arxiv.org/abs/2509.25300, who sort
    by a model's pass rate.  Else those of the easiest share

        open(step) = min(1, open_share + (1 - open_share) * step / open_steps)

    come in a shuffled order, the linear competence of Platanios et al.,
    https://arxiv.org/abs/1903.09848, equation 6, with open_share for c_0.
    """

    pass_rates: np.ndarray | None  # [num_prompts]; None: as the run measures them
    open_share: float = 1.0
    open_steps: int = 0  # optimizer steps

    @property
    def is_sorted(self) -> bool:
        """Return whether the easiest come first, not merely open first."""
        return self.open_steps == 0

    def num_open(self, num_prompts: int, *, step: int) -> int:
        """Return how many of so many prompts are open; never none."""
        if not self.open_steps:
            return num_prompts
        gone = step / self.open_steps
        share = min(1.0, self.open_share + (1.0 - self.open_share) * gone)
        return max(1, round(share * num_prompts))


def difficulty_ranks(pass_rates: np.ndarray) -> np.ndarray:
    """Return the place of each prompt, 0 for the easiest; unmeasured (NaN) ones last.

    Equal ones keep the order in which they are given.
    """
    ranks = np.empty(len(pass_rates), np.int64)
    ranks[np.argsort(-pass_rates, kind="stable")] = np.arange(len(pass_rates))
    return ranks


class PromptStream:
    """Prompts, epoch after epoch, less those that the policy can do already.

    No-positive-resampling (ScaleRL section 3.2): a prompt is retired once  passed
    rollouts / rollouts, over all epochs so far, reaches `max_pass_rate`; None retires
    none.  It is for good: results of rollouts that were under way may lower that rate
    again, and bring no prompt back.  Within an epoch each prompt comes once, so none
    is left out of the epoch that measures it first.

    A curriculum sorts each epoch by difficulty, and closes the hardest of the prompts
    that are not left out.  Where the run measures the difficulty itself, the first
    epoch is shuffled and open, and each later one sorted by the history at its start.
    The next prompt is the one that was drawn least often among the open ones, so that
    one that opens in the middle of an epoch comes at once.

    Two threads use it: the worker draws prompts, the learner records their results.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        max_pass_rate: float | None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Begin epoch 0 with no history; no curriculum: shuffled, and all open."""
        if not prompts:
            raise ValueError("no prompts to sample from; see data.train_prompts")
        self._lock = threading.Lock()
        self._prompts = prompts
        self._seed = seed
        self._max_pass_rate = max_pass_rate
        self._curriculum = curriculum
        self._epoch = 0
        self._drawn = np.zeros(len(prompts), np.int64)
        self._passed = np.zeros(len(prompts), np.int64)
        self._rollouts = np.zeros(len(prompts), np.int64)
        self._retired = np.zeros(len(prompts), bool)
        # Pass rates that this epoch is sorted by.
        self._difficulty = curriculum.pass_rates if curriculum else None
        self._order_epoch()

    def next(self, step: int = 0) -> Prompt:
        """Return the prompt to sample next by a policy `step` optimizer steps old.

        Raises:
            ValueError: every prompt is left out.
        """
        with self._lock:
            if not self._left:
                raise ValueError(
                    f"every one of the {self.num_prompts} prompts has a pass rate of "
                    f"data.max_history_pass_rate = {self._max_pass_rate} or more, and "
                    f"none is left to sample; raise data.train_prompts, add harder "
                    f"tasks to data.tasks, or set data.no_positive_resampling = False"
                )
            prompt_id = self._least_drawn(step)
            if self._drawn[prompt_id] > self._epoch:
                self._begin_epoch(int(self._drawn[prompt_id]))
                prompt_id = self._least_drawn(step)
            epoch = int(self._drawn[prompt_id])
            self._drawn[prompt_id] += 1
            self._turns[prompt_id] += self.num_prompts
        return self.prompt(prompt_id, epoch)

    def prompt(self, prompt_id: int, epoch: int) -> Prompt:
        """Return a prompt that was drawn before, to be sampled again as it was."""
        return dataclasses.replace(self._prompts[prompt_id], epoch=epoch)

    def record(self, prompt_id: int, passed: int, total: int) -> None:
        """Note that the verifier accepted `passed` of `total` rollouts of a prompt."""
        assert 0 <= passed <= total, (passed, total)
        with self._lock:
            self._passed[prompt_id] += passed
            self._rollouts[prompt_id] += total
            if self._retired[prompt_id] or not self._passes(np.array([prompt_id]))[0]:
                return
            self._retired[prompt_id] = True
            self._turns[prompt_id] = _NEVER
            self._left -= 1
            self._easiest = None

    @property
    def num_prompts(self) -> int:
        """Prompts in all."""
        return len(self._prompts)

    @property
    def num_retired(self) -> int:
        """Prompts that are not sampled again."""
        with self._lock:
            return self.num_prompts - self._left

    def state(self) -> dict[str, Any]:
        """Return the place and the history, as JSON values."""
        return {
            "num_prompts": len(self._prompts),
            "seed": self._seed,
            "epoch": self._epoch,
            "drawn": self._drawn.tolist(),
            "difficulty": None
            if self._difficulty is None
            else [None if rate != rate else rate for rate in self._difficulty.tolist()],
            "passed": self._passed.tolist(),
            "rollouts": self._rollouts.tolist(),
            "retired": np.flatnonzero(self._retired).tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: it was saved with other prompts or in another order.
        """
        if state["num_prompts"] != len(self._prompts):
            raise ValueError(
                f"the checkpoint was made with {state['num_prompts']} prompts, and "
                f"data.train_prompts now gives {len(self._prompts)}; set it back"
            )
        if state["seed"] != self._seed:
            raise ValueError(
                f"the checkpoint was made with seed = {state['seed']}, and seed is now "
                f"{self._seed}, which orders the prompts differently; set it back"
            )
        self._epoch = state["epoch"]
        self._drawn = np.array(state["drawn"], np.int64)
        self._passed = np.array(state["passed"], np.int64)
        self._rollouts = np.array(state["rollouts"], np.int64)
        every = np.arange(self.num_prompts)
        # A checkpoint that does not hold them: those that its history retires.
        retired = state.get("retired", every[self._passes(every)])
        self._retired = np.isin(every, retired)
        rates = state["difficulty"]
        self._difficulty = None if rates is None else np.array(rates, np.float64)
        self._order_epoch()

    def _least_drawn(self, step: int) -> int:
        """The next of those that may be sampled again, of which there are some."""
        if self._curriculum is None or self._difficulty is None:
            return int(self._turns.argmin())
        if self._easiest is None:
            left = np.flatnonzero(self._turns != _NEVER)
            self._easiest = left[np.argsort(difficulty_ranks(self._difficulty[left]))]
        count = self._curriculum.num_open(self._left, step=step)
        opened = self._easiest[:count]
        return int(opened[self._turns[opened].argmin()])

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._curriculum is not None and self._curriculum.pass_rates is None:
            measured = np.where(self._rollouts > 0, self._rollouts, np.nan)
            self._difficulty = self._passed / measured
        self._order_epoch()

    def _order_epoch(self) -> None:
        """When each prompt comes, by this epoch's order and the history so far."""
        # The least comes next: what was drawn less often, in the epoch's order.  A
        # scan of one array finds it: 0.1 ms for 300,000 prompts.
        turns = self._drawn * self.num_prompts + self._epoch_places()
        self._turns = np.where(self._retired, _NEVER, turns)
        self._left = int((self._turns != _NEVER).sum())
        self._easiest: np.ndarray | None = None  # those left, the easiest first

    def _passes(self, ids: np.ndarray) -> np.ndarray:
        """Return whether the history of each prompt is one that retires it."""
        if self._max_pass_rate is None:
            return np.zeros(len(ids), bool)
        rollouts = self._rollouts[ids]
        pass_rates = self._passed[ids] / np.maximum(rollouts, 1)
        return (rollouts > 0) & (pass_rates >= self._max_pass_rate)

    def _epoch_places(self) -> np.ndarray:
        """The place of each prompt in the order of this epoch."""
        if self._curriculum is not None and self._curriculum.is_sorted:
            if self._difficulty is not None:
                return difficulty_ranks(self._difficulty)
        random = np.random.Generator(np.random.PCG64([self._seed, _ORDER, self._epoch]))
        places = np.empty(len(self._prompts), np.int64)
        places[random.permutation(len(places))] = np.arange(len(places))
        return places


class MixtureStream:
    """Prompts of several streams, each task at its share of the draws.

    After n draws a task with share w has had  floor(w n) <= draws <= ceil(w n)  of
    them, for every n: the next task is, of those with  draws < w (n + 1),  the one with
    the smallest  (draws + 1) / w,  the quota method of Balinski and Young, "The Quota
    Method of Apportionment", American Mathematical Monthly 82 (1975).  Where a task has
    no prompt left to sample, the others take its draws.

    Each stream has epochs and a history of its own.  A prompt's id is its place in the
    streams' prompts laid end to end.
    """

    def __init__(
        self, streams: Sequence[PromptStream], *, weights: Sequence[float]
    ) -> None:
        """Begin; weights are relative, one for each stream."""
        assert len(streams) == len(weights), (len(streams), weights)
        self._streams = tuple(streams)
        # As they are written: 0.1 is a tenth, which no float is.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(each.denominator for each in exact))
        self._weights = [int(each * scale) for each in exact]
        sizes = [stream.num_prompts for stream in streams]
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self._draws = [0] * len(streams)

    @property
    def num_prompts(self) -> int:
        """Prompts of all streams."""
        return self._offsets[-1]

    @property
    def num_retired(self) -> int:
        """Prompts that are not sampled again."""
        return sum(stream.num_retired for stream in self._streams)

    def next(self, step: int = 0) -> Prompt:
        """Return the prompt to sample next by a policy `step` optimizer steps old.

        Raises:
            ValueError: every prompt is left out.
        """
        place = self._next_stream()
        prompt = self._streams[place].next(step)
        self._draws[place] += 1
        return self._named(prompt, place)

    def prompt(self, prompt_id: int, epoch: int) -> Prompt:
        """Return a prompt that was drawn before, to be sampled again as it was."""
        place, own_id = self._find(prompt_id)
        return self._named(self._streams[place].prompt(own_id, epoch), place)

    def record(self, prompt_id: int, passed: int, total: int) -> None:
        """Note that the verifier accepted `passed` of `total` rollouts of a prompt."""
        place, own_id = self._find(prompt_id)
        self._streams[place].record(own_id, passed, total)

    def state(self) -> dict[str, Any]:
        """Return the place and the history of each stream, as JSON values."""
        return {
            "weights": self._weights,
            "draws": self._draws.copy(),
            "streams": [stream.state() for stream in self._streams],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: it was saved with other weights, prompts or another order.
        """
        if state.get("weights") != self._weights:
            raise ValueError(
                f"the checkpoint was made with tasks in the ratio of "
                f"{state.get('weights')}, and data.task_weights now gives "
                f"{self._weights}; set it back"
            )
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.restore(saved)
        self._draws = list(state["draws"])

    def _next_stream(self) -> int:
        left = [
            place
            for place, stream in enumerate(self._streams)
            if stream.num_retired < stream.num_prompts
        ]
        # None left: the first says which setting is to blame.
        left = left or [0]
        total, turn = sum(self._weights), sum(self._draws) + 1
        behind = [
            place
            for place in left
            if self._draws[place] * total < self._weights[place] * turn
        ]
        return min(
            behind or left,
            key=lambda place: Fraction(self._draws[place] + 1, self._weights[place]),
        )

    def _find(self, prompt_id: int) -> tuple[int, int]:
        """The stream of a prompt, and its id there."""
        place = bisect.bisect_right(self._offsets, prompt_id) - 1
        return place, prompt_id - self._offsets[place]

    def _named(self, prompt: Prompt, place: int) -> Prompt:
        return dataclasses.replace(
            prompt, prompt_id=prompt.prompt_id + self._offsets[place]
        )


Stream = PromptStream | MixtureStream
