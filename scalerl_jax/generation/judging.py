"""Turn the verdicts on a prompt's completions into rollouts and rewards."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.verdict import Verdict, count_as_judged
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import Rollout, Turn


class JudgedSample(NamedTuple):
    """The result of a completion and its verdict, in training and in evaluations."""

    passed: bool
    judged: bool  # whether it counts in rewards and pass rates
    reward: float  # 0.0 if not judged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judging:
    """The rules that turn completions into answers and verdicts into rewards."""

    tokenizer: Tokenizer
    answer_after: str
    correct: float = 1.0
    wrong: float = -1.0
    cut_off_is_wrong: bool = False  # True: whatever the verdict
    unjudged_is_wrong: bool = False  # False: unjudged rollouts are left out
    max_too_costly_share: float = 0.1  # share that may be unjudged; with more: wrong
    whole: bool = False  # True: a user's function gets the whole completion

    def answer(self, tokens: np.ndarray) -> str | None:
        """Return the text that the verifier judges; None if there is no answer."""
        text = self.tokenizer.decode(tokens.tolist())
        if self.whole:
            return text
        return extract_answer(text, answer_after=self.answer_after)

    def _judged(self, statuses: Sequence[str]) -> list[bool]:
        """Return for each of a prompt's answers whether it counts as judged."""
        if self.unjudged_is_wrong:
            return [True] * len(statuses)
        return count_as_judged(statuses, max_too_costly_share=self.max_too_costly_share)

    def rollouts(
        self,
        completions: Sequence[Completion],
        verdicts: Sequence[Verdict],
        turns: Sequence[tuple[Turn, ...]] = (),
    ) -> tuple[Rollout, ...]:
        """Return the rollouts of a prompt with their verdicts and rewards."""
        outcomes = self.outcomes(completions, verdicts)
        turns = turns or [()] * len(completions)
        return tuple(
            _rollout(*each)
            for each in zip(completions, verdicts, outcomes, turns, strict=True)
        )

    def outcomes(
        self, completions: Sequence[Completion], verdicts: Sequence[Verdict]
    ) -> list[JudgedSample]:
        """Return what each of a prompt's completions counts as."""
        judged = self._judged([verdict.status for verdict in verdicts])
        return [
            self._outcome(*each)
            for each in zip(completions, verdicts, judged, strict=True)
        ]

    def _reward(self, verdict: Verdict) -> float:
        """Return the verdict's own reward, or the reward of its status."""
        if verdict.reward is not None:
            return verdict.reward
        return self.correct if verdict.status == "correct" else self.wrong

    def _outcome(
        self, completion: Completion, verdict: Verdict, judged: bool
    ) -> JudgedSample:
        if completion.cut_off and self.cut_off_is_wrong:
            return JudgedSample(passed=False, judged=True, reward=self.wrong)
        return JudgedSample(
            passed=verdict.status == "correct",
            judged=judged,
            reward=self._reward(verdict) if judged else 0.0,
        )


def _rollout(
    completion: Completion,
    verdict: Verdict,
    outcome: JudgedSample,
    turns: tuple[Turn, ...],
) -> Rollout:
    return Rollout(
        completion_tokens=completion.tokens,
        completion_mask=completion.mask,
        behavior_logprobs=completion.logprobs,
        policy_versions=completion.versions,
        experts=completion.experts,
        cut_off=completion.cut_off,
        interrupted=completion.interrupted,
        reward=outcome.reward,
        passed=outcome.passed,
        judged=outcome.judged,
        status=verdict.status,
        turns=turns,
        parts=dict(verdict.parts),
    )
