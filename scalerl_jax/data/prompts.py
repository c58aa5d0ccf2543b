"""Prompts made from questions, and the order in which they are sampled.

The shuffled order of an epoch depends only on (seed, epoch).  The draws, and the
history that decides which prompts are left out, are saved, so that a run resumes in the
middle of an epoch.
"""

import base64
import binascii
import bisect
import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.data.questions import LazySequence, Question, take
from scalerl_jax.types import Prompt

Render = Callable[[Question], str]  # the text of a question's prompt
Encode = Callable[[str], list[int]]

# Types of saved numbers, little-endian.
_SAVED = ("|u1", "<u2", "<u4", "<u8", "<f8")
_ORDER = 2  # purpose of the draw, beside those of `tasks`
NEVER = np.iinfo(np.int64).max  # the turn of a prompt that is not sampled again


def build_prompts(
    questions: Sequence[Question],
    *,
    encode: Encode,
    render: Render,
    max_prompt_tokens: int,
) -> tuple[Prompt, ...]:
    """Return the prompts of epoch 0; prompt_id is the index in `questions`.

    Raises:
        ValueError: there are no questions, or a prompt is longer than
            `max_prompt_tokens`, or empty.
    """
    if not questions:
        raise ValueError("no questions: data.train_prompts and data.tasks give none")
    prompts = tuple(
        make_prompt(question, prompt_id, encode=encode, render=render)
        for prompt_id, question in enumerate(questions)
    )
    for prompt in prompts:
        if not len(prompt.tokens):
            raise ValueError(
                f"prompt {prompt.prompt_id} has no tokens: {prompt.text!r}"
            )
        if len(prompt.tokens) > max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.prompt_id} has {len(prompt.tokens)} tokens, more than "
                f"sampler.max_prompt_tokens = {max_prompt_tokens}: "
                f"{prompt.text[:60]!r}...; raise the limit or leave task "
                f"{prompt.task!r} out of data.tasks"
            )
    return prompts


def make_prompt(
    question: Question, prompt_id: int, *, encode: Encode, render: Render
) -> Prompt:
    """Return a question's prompt in epoch 0."""
    text = render(question)
    return Prompt(
        prompt_id=prompt_id,
        epoch=0,
        task=question.task,
        text=text,
        tokens=np.asarray(encode(text), np.int32),
        reference=question.reference,
    )


def save_numbers(numbers: np.ndarray) -> dict[str, str]:
    """Return counts or pass rates as a JSON value, in the fewest bytes a number.

    A list of a million would take the loop a second at each checkpoint.
    """
    if numbers.dtype.kind == "i":
        assert (numbers >= 0).all(), "counts"
        numbers = numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"))
    return {
        "dtype": numbers.dtype.str,
        "base64": base64.b64encode(numbers.tobytes()).decode(),
    }


def read_numbers(saved: Any) -> np.ndarray:
    """Return the numbers that `save_numbers` was given; older checkpoints have lists.

    Raises:
        ValueError: they are damaged.
    """
    if isinstance(saved, list):
        return np.array(saved, np.float64 if None in saved else None)
    try:
        if saved["dtype"] not in _SAVED:
            raise ValueError(f"{saved['dtype']!r} is none of {', '.join(_SAVED)}")
        text = base64.b64decode(saved["base64"], validate=True)
        return np.frombuffer(text, saved["dtype"])
    except (TypeError, KeyError, binascii.Error, ValueError) as error:
        raise ValueError(f"the history of prompts is damaged: {error}") from error


class JoinedPrompts(LazySequence[Prompt]):
    """Prompts of several tasks laid end to end; prompt_id is the index in the whole."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        """Take the parts, whose own ids begin at 0."""
        self.parts = tuple(parts)
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        """Return the number of prompts."""
        return self._ends[-1] if self._ends else 0

    def read(self, places: list[int]) -> list[Prompt]:
        """Return the prompts with these ids; neighbours of a part are read together."""
        found: list[Prompt] = []
        runs = itertools.groupby(places, lambda each: bisect.bisect(self._ends, each))
        for number, ids in runs:
            part = self.parts[number]
            start = self._ends[number] - len(part)
            found += take(part, [prompt_id - start for prompt_id in ids])
        return [
            dataclasses.replace(prompt, prompt_id=prompt_id)
            for prompt_id, prompt in zip(places, found, strict=True)
        ]


class PromptStream:
    """Stream of prompts, epoch after epoch, without those that the policy solves.

    No-positive-resampling (ScaleRL section 3.2): a prompt is retired once  passed
    rollouts / rollouts, over all epochs so far, reaches `max_pass_rate`; None retires
    no prompt.  A retired prompt stays retired, even if rollouts that were under way
    lower its rate again.  Within an epoch each prompt comes once, so every prompt takes
    part in the epoch that measures it first.

    Two threads use it: the worker draws prompts, the learner records their results.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        max_pass_rate: float | None,
    ) -> None:
        """Begin epoch 0 with no history."""
        if not prompts:
            raise ValueError("no prompts to sample from; see data.train_prompts")
        self._lock = threading.Lock()
        self._prompts = prompts
        self._seed = seed
        self._max_pass_rate = max_pass_rate
        self._epoch = 0
        self._drawn = np.zeros(len(prompts), np.int64)
        self._passed = np.zeros(len(prompts), np.int64)
        self._rollouts = np.zeros(len(prompts), np.int64)
        self._retired = np.zeros(len(prompts), bool)
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
        """Return a prompt that was drawn before, to be sampled again unchanged."""
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
            self._turns[prompt_id] = NEVER
            self._left -= 1

    @property
    def num_prompts(self) -> int:
        """Prompts in all."""
        return len(self._prompts)

    @property
    def figures(self) -> dict[str, int]:
        """Counts by metric name."""
        return {"data/retired_prompts": self.num_retired}

    @property
    def num_retired(self) -> int:
        """Prompts that are not sampled again."""
        with self._lock:
            return self.num_prompts - self._left

    def state(self) -> dict[str, Any]:
        """Return the position and the history, as JSON values."""
        return {
            "num_prompts": len(self._prompts),
            "seed": self._seed,
            "epoch": self._epoch,
            "drawn": save_numbers(self._drawn),
            "difficulty": None,  # set by a stream that orders by it
            "passed": save_numbers(self._passed),
            "rollouts": save_numbers(self._rollouts),
            "retired": save_numbers(np.flatnonzero(self._retired)),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from `state`.

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
        self._drawn = read_numbers(state["drawn"]).astype(np.int64)
        self._passed = read_numbers(state["passed"]).astype(np.int64)
        self._rollouts = read_numbers(state["rollouts"]).astype(np.int64)
        every = np.arange(self.num_prompts)
        retired = every[self._passes(every)]
        if "retired" in state:  # an older one lacks them
            retired = read_numbers(state["retired"])
        self._retired = np.isin(every, retired)
        self._order_epoch()

    def _least_drawn(self, step: int) -> int:
        """Return the id of the next prompt; at least one is not retired."""
        return int(self._turns.argmin())

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order_epoch()

    def _order_epoch(self) -> None:
        """Set the turn of each prompt, by this epoch's order and the history so far."""
        places = np.empty(self.num_prompts, np.int64)
        places[self._epoch_order()] = np.arange(self.num_prompts)
        # The least turn is next: fewest draws first, then the epoch's order.  A scan of
        # one array finds it: 0.1 ms for 300,000 prompts.
        turns = self._drawn * self.num_prompts + places
        self._turns = np.where(self._retired, NEVER, turns)
        self._left = int((self._turns != NEVER).sum())

    def _epoch_order(self) -> np.ndarray:
        """Return the ids of all prompts in the order of this epoch."""
        random = np.random.Generator(np.random.PCG64([self._seed, _ORDER, self._epoch]))
        return random.permutation(self.num_prompts)

    def _passes(self, ids: np.ndarray) -> np.ndarray:
        """Mark the prompts that retire: their past pass rate reaches the limit."""
        if self._max_pass_rate is None:
            return np.zeros(len(ids), bool)
        rollouts = self._rollouts[ids]
        pass_rates = self._passed[ids] / np.maximum(rollouts, 1)
        return (rollouts > 0) & (pass_rates >= self._max_pass_rate)
