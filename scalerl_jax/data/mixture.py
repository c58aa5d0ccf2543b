"""Mixture of several streams of prompts, sampled at their shares or opened in turn.

Only runs with several streams load this module.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """When the next task opens, where tasks are the levels of a curriculum."""

    pass_rate: float  # of the last open task, from which on the next one is open
    num_prompts: int  # newest results of that task, over which the rate is taken


class MixtureStream:
    """Prompts of several streams, each task at its share of the draws.

    After n draws a task with share w has had  floor(w n) <= draws <= ceil(w n)  of
    them, for every n: the next task is, of those with  draws < w (n + 1),  the one with
    the smallest  (draws + 1) / w,  the quota method of Balinski and Young, "The Quota
    Method of Apportionment", American Mathematical Monthly 82 (1975).  If a task has no
    prompt left to sample, the others take its draws.

    With `levels`, only the first task is open at first.  The next one opens once the
    last open one is passed, or has no prompt left, and draws are counted anew: open
    tasks share them by their weights from then on.

    Each stream has its own epochs and history.  A prompt's id is its index in the
    streams' prompts laid end to end.
    """

    def __init__(
        self,
        streams: Sequence[PromptStream],
        *,
        weights: Sequence[float],
        levels: Levels | None = None,
    ) -> None:
        """Start with no draws; weights are relative, one for each stream."""
        assert len(streams) == len(weights), (len(streams), weights)
        self._levels = levels
        self._open = 1 if levels else len(streams)  # the first ones
        # Passed and judged rollouts of the newest prompts of the last open task.
        self._newest = collections.deque[tuple[int, int]](
            maxlen=levels.num_prompts if levels else 0
        )
        self._lock = threading.Lock()  # of the draws, which an opening counts anew
        self._streams = tuple(streams)
        # Exact as written: 0.1 is a tenth, which no float equals.
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

    @property
    def figures(self) -> dict[str, int]:
        """Counts by metric name."""
        figures = {"data/retired_prompts": self.num_retired}
        return figures | ({"data/open_tasks": self._open} if self._levels else {})

    def next(self, step: int = 0) -> Prompt:
        """Return the prompt to sample next by a policy `step` optimizer steps old.

        Raises:
            ValueError: every prompt is left out.
        """
        with self._lock:
            place = self._next_stream()
            prompt = self._streams[place].next(step)
            self._draws[place] += 1
        return self._named(prompt, place)

    def prompt(self, prompt_id: int, epoch: int) -> Prompt:
        """Return a prompt that was drawn before, to be sampled again unchanged."""
        place, own_id = self._find(prompt_id)
        return self._named(self._streams[place].prompt(own_id, epoch), place)

    def record(self, prompt_id: int, passed: int, total: int) -> None:
        """Note that the verifier accepted `passed` of `total` rollouts of a prompt."""
        place, own_id = self._find(prompt_id)
        self._streams[place].record(own_id, passed, total)
        with self._lock:
            if self._levels and total and place == self._open - 1:
                self._newest.append((passed, total))
                self._open_passed(self._levels)

    def _open_passed(self, levels: Levels) -> None:
        """Open the next task if the last open one is passed."""
        if len(self._newest) == levels.num_prompts:
            passed, total = map(sum, zip(*self._newest, strict=True))
            if passed >= levels.pass_rate * total:
                self._open_next()

    def _open_next(self) -> None:
        if self._open < len(self._streams):
            self._open += 1
            self._draws = [0] * len(self._streams)
            self._newest.clear()

    def state(self) -> dict[str, Any]:
        """Return the position and the history of each stream, as JSON values."""
        with self._lock:
            return {
                "weights": self._weights,
                "draws": self._draws.copy(),
                "open": self._open,
                "newest": [[*each] for each in self._newest],
                "streams": [stream.state() for stream in self._streams],
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from `state`.

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
        # A checkpoint that does not say it: of a run whose tasks were all open.
        all_open = len(self._streams)
        self._open = state.get("open", all_open) if self._levels else all_open
        self._newest.extend(tuple(each) for each in state.get("newest", ()))

    def _next_stream(self) -> int:
        with_prompts = [
            place
            for place, stream in enumerate(self._streams)
            if stream.num_retired < stream.num_prompts
        ]
        last = len(self._streams)
        while with_prompts and self._open < last and self._open - 1 not in with_prompts:
            self._open_next()
        # None left: the first stream raises, naming the setting at fault.
        left = [place for place in with_prompts if place < self._open] or [0]
        total, turn = sum(self._weights[: self._open]), sum(self._draws) + 1
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
        """Return the stream of a prompt, and its id there."""
        place = bisect.bisect_right(self._offsets, prompt_id) - 1
        return place, prompt_id - self._offsets[place]

    def _named(self, prompt: Prompt, place: int) -> Prompt:
        return dataclasses.replace(
            prompt, prompt_id=prompt.prompt_id + self._offsets[place]
        )


Stream = PromptStream | MixtureStream
