"""Mixture of several streams of prompts, each sampled at its own share.

Only runs with several streams load this module.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.types import Prompt


class MixtureStream:
    """Prompts of several streams, each task at its share of the draws.

    After n draws a task with share w has had  floor(w n) <= draws <= ceil(w n)  of
    them, for every n: the next task is, of those with  draws < w (n + 1),  the one with
    the smallest  (draws + 1) / w,  the quota method of Balinski and Young, "The Quota
    Method of Apportionment", American Mathematical Monthly 82 (1975).  If a task has no
    prompt left to sample, the others take its draws.

    Each stream has its own epochs and history.  A prompt's id is its index in the
    streams' prompts laid end to end.
    """

    def __init__(
        self, streams: Sequence[PromptStream], *, weights: Sequence[float]
    ) -> None:
        """Start with no draws; weights are relative, one for each stream."""
        assert len(streams) == len(weights), (len(streams), weights)
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
        """Return a prompt that was drawn before, to be sampled again unchanged."""
        place, own_id = self._find(prompt_id)
        return self._named(self._streams[place].prompt(own_id, epoch), place)

    def record(self, prompt_id: int, passed: int, total: int) -> None:
        """Note that the verifier accepted `passed` of `total` rollouts of a prompt."""
        place, own_id = self._find(prompt_id)
        self._streams[place].record(own_id, passed, total)

    def state(self) -> dict[str, Any]:
        """Return the position and the history of each stream, as JSON values."""
        return {
            "weights": self._weights,
            "draws": self._draws.copy(),
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

    def _next_stream(self) -> int:
        left = [
            place
            for place, stream in enumerate(self._streams)
            if stream.num_retired < stream.num_prompts
        ]
        # None left: the first stream raises, naming the setting at fault.
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
        """Return the stream of a prompt, and its id there."""
        place = bisect.bisect_right(self._offsets, prompt_id) - 1
        return place, prompt_id - self._offsets[place]

    def _named(self, prompt: Prompt, place: int) -> Prompt:
        return dataclasses.replace(
            prompt, prompt_id=prompt.prompt_id + self._offsets[place]
        )


Stream = PromptStream | MixtureStream
