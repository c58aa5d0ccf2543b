"""Episodes: from a prompt to its completions, and from these to their verdicts.

A judge is an environment of one turn, and is given a prompt's completions together.
An environment of more answers each turn by itself, and what it says is appended to the
tokens, which the sampler then goes on from.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.environments.pool import Verdicts, VerifierPool
from scalerl_jax.environments.verdict import More, Step, Verdict, count_as_judged
from scalerl_jax.sampler.protocol import Sampler
from scalerl_jax.sampler.requests import Completion, Request
from scalerl_jax.types import Prompt, Rollout, Turn


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
        """Return the reward of a verdict that counts: its own, or of its status."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """Limits of an episode's turns, and the tokens that stand between two of them."""

    # (text, role, last=token) -> tokens, as of an `ObservationWriter`
    write: Callable[..., Int[np.ndarray, " n"]]
    max_turns: int
    max_observation_tokens: int
    max_tokens: int  # of a completion whose request says nothing else
    timeout_s: float  # of an episode; 0: none

    def appended(self, said: More, completion: Completion) -> Int[np.ndarray, " n"]:
        """Return the tokens to append to a completion, of what was said to it.

        Raises:
            ValueError: they cannot be written, or are too many.
        """
        last = int(completion.tokens[-1])
        tokens = self.write(said.text, said.role, last=last)
        if len(tokens) > self.max_observation_tokens:
            raise ValueError(
                f"the observation has {len(tokens)} tokens; "
                f"episode.max_observation_tokens = {self.max_observation_tokens} is "
                f"the limit"
            )
        return tokens


@dataclasses.dataclass(kw_only=True)
class Story:
    """One sample's turns so far, where an environment answers by turns."""

    turns: list[Turn] = dataclasses.field(default_factory=list)
    text: str = ""  # of the last sampled turn, as its environment is given it
    said: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    verdict: Verdict | None = None  # None: it has not ended


@dataclasses.dataclass(kw_only=True)
class Episode:
    """A prompt with its completions and their verdicts, sample by sample."""

    key: int  # ticket of a group, or place of a prompt in an evaluation
    prompt: Prompt
    num_samples: int
    begun_s: float
    number: int = 0  # of all that were begun: a key may come again
    tokens: int = 0  # sampled so far
    ended_version: int = -1  # version when the last completion ended; -1: not yet
    completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
    answers: tuple[str | None, ...] = ()  # as the verifier got them
    verdicts: tuple[Verdict, ...] = ()
    detail: str = ""  # why some have no verdict; empty if all have one
    request: Request | None = None  # by which the sampler goes on; set when it is made
    stories: dict[int, Story] = dataclasses.field(default_factory=dict)

    def listen(self, sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Count tokens as they come."""
        self.tokens += len(tokens)

    @property
    def lacking(self) -> int:
        """Return how many of its samples may need a slot."""
        if self.ended_version >= 0:
            return 0
        ended = [each for each in self.stories.values() if each.verdict is not None]
        return self.num_samples - len(ended if self.stories else self.completions)

    @property
    def in_order(self) -> tuple[Completion, ...]:
        """Return the completions in sample order, once all have ended."""
        return tuple(self.completions[sample] for sample in range(self.num_samples))

    @property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """Return the turns of each sample; () where each is one turn."""
        if not self.stories:
            return ()
        return tuple(
            tuple(self.stories[sample].turns) for sample in range(self.num_samples)
        )


class Episodes:
    """Episodes under way, and the verifiers or environments that answer them."""

    def __init__(
        self,
        verifier: VerifierPool,
        answer: Callable[[np.ndarray], str | None],
        turns: Turns | None = None,
    ) -> None:
        """Begin with none; `answer` maps completion tokens to the text to judge."""
        self.open: dict[int, Episode] = {}
        self._verifier = verifier
        self._answer = answer
        self._turns = turns
        self._begun = 0  # episodes

    def begin(self, key: int, prompt: Prompt, num_samples: int) -> Episode:
        """Expect `num_samples` completions of a prompt, under a new key."""
        self._begun += 1
        episode = Episode(
            key=key,
            prompt=prompt,
            num_samples=num_samples,
            begun_s=time.monotonic(),
            number=self._begun,
        )
        self.open[key] = episode
        return episode

    def add(self, completion: Completion, version: int) -> bool:
        """Take a completion; return whether it was the last one of its episode.

        After the last one the episode's answers are submitted to the verifiers.  An
        environment is given each turn at once, and may ask for another.

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
        if self._verifier.by_turns:
            self._submit_turn(episode, completion)
            return False
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

    def judged(self, sampler: Sampler) -> Iterator[Episode]:
        """Close and yield the episodes whose verdicts have come, in that order.

        Samples that an environment has asked for more go on in `sampler`.
        """
        for verdicts in self._verifier.poll():
            if self._verifier.by_turns:
                episode = self._take(verdicts, sampler)
                if episode is None:
                    continue
            else:
                episode = self.open[verdicts.key]
                episode.verdicts = tuple(verdicts.judgements)
                episode.detail = verdicts.detail
            yield episode
            del self.open[episode.key]

    @property
    def waiting(self) -> bool:
        """Return whether any verdicts are pending."""
        return bool(self._verifier.pending)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a verdict comes, at most `timeout_s`."""
        self._verifier.wait(timeout_s)

    # -- episodes of several turns ----------------------------------------------------

    def _submit_turn(self, episode: Episode, completion: Completion) -> None:
        """Give a sampled turn to the sample's environment."""
        assert self._turns is not None, "set with every environment"
        story = episode.stories.setdefault(completion.sample, Story())
        start = story.turns[-1].end if story.turns else 0
        story.turns.append(Turn(start, len(completion.tokens), True))
        story.text = self._answer(completion.tokens[start:]) or ""
        last = len(story.said) + 1 >= self._turns.max_turns or completion.cut_off
        self._submit(episode, completion.sample, last=last)

    def _submit(
        self, episode: Episode, sample: int, *, last: bool = False, cut: bool = False
    ) -> None:
        story = episode.stories[sample]
        self._verifier.submit(
            (episode.key, episode.number, sample),
            episode.prompt.task,
            ["" if cut else story.text],
            episode.prompt.reference,
            prompt=episode.prompt.text,
            step=Step(
                episode=(episode.number, sample),
                turns=tuple(story.said),
                last=last,
                cut=cut,
            ),
        )

    def _take(self, verdicts: Verdicts, sampler: Sampler) -> Episode | None:
        """Take what an environment said to a turn; return an episode that is over."""
        key, number, sample = verdicts.key
        episode = self.open.get(key)
        if episode is None or episode.number != number:
            return None  # given up meanwhile
        (said,) = verdicts.verdicts
        if isinstance(said, More):
            said = self._go_on(episode, sample, said, sampler)
        episode.stories[sample].verdict = said
        ended = [each.verdict for each in episode.stories.values()]
        if len(ended) < episode.num_samples or None in ended:
            return None
        self._end(episode)
        return episode

    def _go_on(
        self, episode: Episode, sample: int, said: More, sampler: Sampler
    ) -> Verdict | None:
        """Let a sample go on behind what was said to it, or return why it cannot."""
        assert self._turns is not None, "set with every environment"
        story, completion = episode.stories[sample], episode.completions[sample]
        story.turns[-1] = story.turns[-1]._replace(reward=said.reward)
        took_s, limit_s = time.monotonic() - episode.begun_s, self._turns.timeout_s
        if limit_s and took_s > limit_s:
            return Verdict(
                "verifier_timeout",
                f"the episode took more than episode.timeout_s = {limit_s:g}",
            )
        try:
            appended = self._turns.appended(said, completion)
        except ValueError as error:
            return Verdict("bad_observation", str(error))
        request = episode.request
        assert request is not None, "set when the episode began"
        limits, most = request.samples.max_tokens, self._turns.max_tokens
        most = most if limits is None else int(limits[sample])
        story.said.append((story.text, said.text))
        known = len(completion.tokens) + len(appended)
        if known >= most:
            self._submit(episode, sample, cut=True)
        else:
            story.turns.append(Turn(len(completion.tokens), known, False))
            sampler.resume(request, completion, appended)
        return None

    def _end(self, episode: Episode) -> None:
        """Fill in what the samples of an episode have come to."""
        order: list[Any] = [episode.stories[n] for n in range(episode.num_samples)]
        episode.verdicts = tuple(each.verdict for each in order)
        details = (each.detail for each in episode.verdicts if each.detail)
        episode.detail = "; ".join(dict.fromkeys(details))
        episode.answers = tuple(each.text for each in order)
        episode.ended_version = max(
            int(each.versions[-1]) for each in episode.completions.values()
        )
