"""Prompts made from questions, and the order in which they are sampled.

The shuffled order of an epoch comes from (seed, epoch) alone.  What has been drawn,
the history that says which prompts are left out, and the difficulties that sort the
epoch are saved, so that a run goes on in the middle of an epoch.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.data.curriculum import Curriculum, difficulty_ranks
from scalerl_jax.data.tasks import Question
from scalerl_jax.types import Prompt

_ORDER = 2  # purpose of the draw, beside those of `tasks`


def build_prompts(
    questions: Sequence[Question],
    *,
    encode: Callable[[str], list[int]],
    template: str,
    max_prompt_tokens: int,
) -> tuple[Prompt, ...]:
    """The prompts of epoch 0; prompt_id is the place among `questions`.

    Raises:
        ValueError: if there are none, if `template` shows no question, or if a
            prompt is longer than `max_prompt_tokens`.
    """
    if not questions:
        raise ValueError("no questions: data.train_prompts and data.tasks give none")
    if "{question}" not in template:
        raise ValueError(f"data.template = {template!r} must hold '{{question}}'")
    prompts = []
    for prompt_id, question in enumerate(questions):
        # Not str.format: a template may hold braces of its own.
        text = template.replace("{question}", question.text)
        tokens = encode(text)
        if not tokens:
            raise ValueError(f"prompt {prompt_id} has no tokens: {text!r}")
        if len(tokens) > max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt_id} has {len(tokens)} tokens, more than "
                f"sampler.max_prompt_tokens = {max_prompt_tokens}: {text[:60]!r}...; "
                f"raise the limit or leave task {question.task!r} out of data.tasks"
            )
        prompts.append(
            Prompt(
                prompt_id=prompt_id,
                epoch=0,
                task=question.task,
                text=text,
                tokens=np.asarray(tokens, np.int32),
                reference=question.reference,
            )
        )
    return tuple(prompts)


class PromptStream:
    """Prompts, epoch after epoch, less those that the policy can do already.

    No-positive-resampling (ScaleRL section 3.2): a prompt is left out of later
    epochs once  passed rollouts / rollouts, over all epochs so far, reaches
    `max_pass_rate`; None never leaves one out.  Within an epoch each prompt comes
    once, so none is left out of the epoch that measures it first.

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
        """At the start of epoch 0, with no history; None: shuffled, all open."""
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
        # Pass rates that this epoch is sorted by.
        self._difficulty = curriculum.pass_rates if curriculum else None
        self._places = self._epoch_places()

    def next(self, step: int = 0) -> Prompt:
        """The prompt to sample next, when the policy is `step` optimizer steps old.

        Raises:
            ValueError: if every prompt is left out.
        """
        with self._lock:
            left = np.flatnonzero(~self._retired())
        if not len(left):
            raise ValueError(
                f"every one of the {len(self._prompts)} prompts has a pass rate of "
                f"data.max_history_pass_rate = {self._max_pass_rate} or more, and none "
                f"is left to sample; raise data.train_prompts, add harder tasks to "
                f"data.tasks, or set data.no_positive_resampling = False"
            )
        prompt_id = self._least_drawn(left, step)
        if self._drawn[prompt_id] > self._epoch:
            self._begin_epoch(int(self._drawn[prompt_id]))
            prompt_id = self._least_drawn(left, step)
        self._drawn[prompt_id] += 1
        return self.prompt(prompt_id, int(self._drawn[prompt_id]) - 1)

    def prompt(self, prompt_id: int, epoch: int) -> Prompt:
        """A prompt that was drawn before, to be sampled again as it was."""
        return dataclasses.replace(self._prompts[prompt_id], epoch=epoch)

    def record(self, prompt_id: int, passed: int, total: int) -> None:
        """Of `total` rollouts of a prompt, the verifier accepted `passed`."""
        assert 0 <= passed <= total, (passed, total)
        with self._lock:
            self._passed[prompt_id] += passed
            self._rollouts[prompt_id] += total

    @property
    def num_retired(self) -> int:
        """Prompts that are not sampled again."""
        with self._lock:
            return int(self._retired().sum())

    def state(self) -> dict[str, Any]:
        """The place and the history, as JSON values."""
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
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: if it was saved with other prompts or in another order.
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
        rates = state["difficulty"]
        self._difficulty = None if rates is None else np.array(rates, np.float64)
        self._places = self._epoch_places()

    def _least_drawn(self, left: np.ndarray, step: int) -> int:
        """The next of these prompts; every one of them may be sampled again."""
        if self._curriculum is not None and self._difficulty is not None:
            count = self._curriculum.num_open(len(left), step=step)
            if count < len(left):
                ranks = difficulty_ranks(self._difficulty[left])
                left = left[ranks < count]
        turns = self._drawn[left] * len(self._prompts) + self._places[left]
        return int(left[turns.argmin()])

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._curriculum is not None and self._curriculum.pass_rates is None:
            with self._lock:
                measured = np.where(self._rollouts > 0, self._rollouts, np.nan)
                self._difficulty = self._passed / measured
        self._places = self._epoch_places()

    def _epoch_places(self) -> np.ndarray:
        """The place of each prompt in the order of this epoch."""
        if self._curriculum is not None and self._curriculum.is_sorted:
            if self._difficulty is not None:
                return difficulty_ranks(self._difficulty)
        random = np.random.Generator(np.random.PCG64([self._seed, _ORDER, self._epoch]))
        places = np.empty(len(self._prompts), np.int64)
        places[random.permutation(len(places))] = np.arange(len(places))
        return places

    def _retired(self) -> np.ndarray:
        if self._max_pass_rate is None:
            return np.zeros(len(self._prompts), bool)
        pass_rate = self._passed / np.maximum(self._rollouts, 1)
        return (self._rollouts > 0) & (pass_rate >= self._max_pass_rate)
