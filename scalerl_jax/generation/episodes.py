"""Episodes: from a prompt to its completions, and from these to their verdicts."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Verdict, count_as_judged
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import Prompt, Rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judging:
    """Rules by which completions become answers, and verdicts rewards."""

    tokenizer: Tokenizer
    answer_after: str
    correct: float = 1.0
    wrong: float = -1.0
    cut_off_is_wrong: bool = False  # whatever its verdict
    unjudged_is_wrong: bool = False  # else an unjudged rollout is left out
    max_too_costly_share: float = 0.1  # of a prompt's that are unjudged; more are wrong
    whole: bool = False  # a user's function is given all of the completion

    def answer(self, tokens: np.ndarray) -> str | None:
        """Return the text that the verifier judges; None if there is no answer."""
        text = self.tokenizer.decode(tokens.tolist())
        if self.whole:
            return text
        return extract_answer(text, answer_after=self.answer_after)

    def judged(self, statuses: Sequence[str]) -> list[bool]:
        """Return for each of a prompt's answers whether it counts."""
        if self.unjudged_is_wrong:
            return [True] * len(statuses)
        return count_as_judged(statuses, max_too_costly_share=self.max_too_costly_share)

    def rollouts(
        self, completions: Sequence[Completion], verdicts: Sequence[Verdict]
    ) -> tuple[Rollout, ...]:
        """Return the rollouts of a prompt with their verdicts and rewards."""
        judged = self.judged([verdict.status for verdict in verdicts])
        return tuple(
            self._rollout(*each)
            for each in zip(completions, verdicts, judged, strict=True)
        )

    def reward(self, verdict: Verdict) -> float:
        """Return the reward of a verdict that counts: its own, or of its status."""
        if verdict.reward is not None:
            return verdict.reward
        return self.correct if verdict.status == "correct" else self.wrong

    def _rollout(
        self, completion: Completion, verdict: Verdict, judged: bool
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
            parts=dict(verdict.parts),
        )


@dataclasses.dataclass(kw_only=True)
class Episode:
    """A prompt with its completions and their verdicts, sample by sample."""

    key: int  # ticket of a group, or place of a prompt in an evaluation
    prompt: Prompt
    num_samples: int
    begun_s: float
    tokens: int = 0  # sampled so far
    ended_version: int = -1  # version when the last completion ended; -1: not yet
    completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
    answers: tuple[str | None, ...] = ()  # as the verifier got them
    verdicts: tuple[Verdict, ...] = ()
    detail: str = ""  # why some have no verdict; empty if all have one

    def listen(self, sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Count tokens as they come."""
        self.tokens += len(tokens)

    @property
    def in_order(self) -> tuple[Completion, ...]:
        """Return the completions in sample order, once all have ended."""
        return tuple(self.completions[sample] for sample in range(self.num_samples))


class Episodes:
    """Episodes under way, and the verifiers that judge them."""

    def __init__(
        self, verifier: VerifierPool, answer: Callable[[np.ndarray], str | None]
    ) -> None:
        """Begin with none; `answer` maps completion tokens to the text to judge."""
        self.open: dict[int, Episode] = {}
        self._verifier = verifier
        self._answer = answer

    def begin(self, key: int, prompt: Prompt, num_samples: int) -> Episode:
        """Expect `num_samples` completions of a prompt, under a new key."""
        episode = Episode(
            key=key, prompt=prompt, num_samples=num_samples, begun_s=time.monotonic()
        )
        self.open[key] = episode
        return episode

    def add(self, completion: Completion, version: int) -> bool:
        """Take a completion; return whether it was the last one of its episode.

        After the last one the episode's answers are submitted to the verifiers.

        Raises:
            FloatingPointError: the logits of the sample were not finite.
        """
        episode = self.open[completion.request_id]
        if completion.failure:
            raise FloatingPointError(
                f"sample {completion.sample} of prompt {episode.prompt.prompt_id} "
                f"failed: {completion.failure}"
            )
        episode.completions[completion.sample] = completion
        if len(episode.completions) < episode.num_samples:
            return False
        episode.ended_version = version
        episode.answers = tuple(
            self._answer(completion.tokens) for completion in episode.in_order
        )
        self._verifier.submit(
            episode.key,
            episode.prompt.task,
            list(episode.answers),
            episode.prompt.reference,
            prompt=episode.prompt.text,
        )
        return True

    def judged(self) -> Iterator[Episode]:
        """Close and yield the episodes whose verdicts have come, in that order."""
        for verdicts in self._verifier.poll():
            episode = self.open[verdicts.key]
            episode.verdicts = tuple(verdicts.verdicts)
            episode.detail = verdicts.detail
            yield episode
            del self.open[verdicts.key]

    @property
    def waiting(self) -> bool:
        """Return whether any verdicts are pending."""
        return bool(self._verifier.pending)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a verdict comes, at most `timeout_s`."""
        self._verifier.wait(timeout_s)
