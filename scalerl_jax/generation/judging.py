"""Turn the verdicts on a prompt's completions into rollouts and rewards."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.verdict import Verdict, count_as_judged
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import Rollout, Turn


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

    def judged(self, statuses: Sequence[str]) -> list[bool]:
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
        judged = self.judged([verdict.status for verdict in verdicts])
        turns = turns or [()] * len(completions)
        return tuple(
            self._rollout(*each)
            for each in zip(completions, verdicts, judged, turns, strict=True)
        )

    def reward(self, verdict: Verdict) -> float:
        """Return the verdict's own reward, or the reward of its status."""
        if verdict.reward is not None:
            return verdict.reward
        return self.correct if verdict.status == "correct" else self.wrong

    def _rollout(
        self,
        completion: Completion,
        verdict: Verdict,
        judged: bool,
        turns: tuple[Turn, ...],
    ) -> Rollout:
        counted_wrong = completion.cut_off and self.cut_off_is_wrong
        passed = verdict.status == "correct" and not counted_wrong
        judged = judged or counted_wrong
        reward = self.wrong if counted_wrong else self.reward(verdict)
        return Rollout(
            completion_tokens=completion.tokens,
            completion_mask=completion.mask,
            behavior_logprobs=completion.logprobs,
            policy_versions=completion.versions,
            experts=completion.experts,
            cut_off=completion.cut_off,
            interrupted=completion.interrupted,
            reward=reward if judged else 0.0,
            passed=passed,
            judged=judged,
            status=verdict.status,
            turns=turns,
            parts=dict(verdict.parts),
        )
