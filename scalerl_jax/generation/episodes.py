"""Episodes: from a prompt to its completions, and from these to their verdicts.

A judge is an environment of one turn, and gets all completions of a prompt together.
An environment of several turns answers each turn separately; its observation is
appended to the tokens, and the sampler continues from there.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scalerl_jax.environments.pool import Verdicts, VerifierPool
from scalerl_jax.environments.verdict import (
    More,
    Opening,
    Said,
    Step,
    Verdict,
)
from scalerl_jax.generation.turns import Turns, opened_request, shared_length
from scalerl_jax.sampler.protocol import Sampler
from scalerl_jax.sampler.requests import Completion, Request
from scalerl_jax.types import Prompt, Turn

_DROPPED = Verdict("no_end", "its group was dropped")  # never read
_NUMBERS = itertools.count(1)  # of episodes: several `Episodes` may share a pool


@dataclasses.dataclass(kw_only=True)
class Story:
    """One sample's turns so far, with an environment of several turns."""

    turns: list[Turn] = dataclasses.field(default_factory=list)
    text: str = ""  # the last sampled turn, as the environment gets it
    said: list[tuple[str, More]] = dataclasses.field(default_factory=list)
    verdict: Verdict | None = None  # None: it has not ended
    opened: Opening = Opening()  # what is read before the first turn
    refused: Verdict | None = None  # set if the sample ends without its environment
    asked: bool = False  # its environment has not answered yet


@dataclasses.dataclass(kw_only=True)
class Episode:
    """A prompt with its completions and their verdicts, sample by sample."""

    key: int  # ticket of a group, or index of a prompt in an evaluation
    prompt: Prompt
    num_samples: int
    begun_s: float
    number: int = 0  # unique, since a key may be used again
    tokens: int = 0  # sampled so far
    ended_version: int = -1  # version when the last completion ended; -1: not yet
    completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
    answers: tuple[str | None, ...] = ()  # as the verifier got them
    verdicts: tuple[Verdict, ...] = ()
    detail: str = ""  # why some have no verdict; empty if all have one
    request: Request | None = None  # the sampler's request, once it is made
    stories: dict[int, Story] = dataclasses.field(default_factory=dict)
    unopened: int = 0  # samples whose environments have not opened yet

    def listen(self, sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Count new tokens."""
        self.tokens += len(tokens)

    @property
    def lacking(self) -> int:
        """Return the number of its samples that may need a slot."""
        if self.ended_version >= 0:
            return 0
        stories = list(self.stories.values())  # the sampling thread adds to them
        ended = [each for each in stories if each.verdict is not None]
        return self.num_samples - len(ended if stories else self.completions)

    @property
    def given(self) -> Prompt:
        """Return the part of the prompt that all samples share.

        It lacks the prompt's end if an environment's opening comes before that.
        """
        tokens = self.prompt.tokens if self.request is None else self.request.tokens
        if len(tokens) == len(self.prompt.tokens):
            return self.prompt
        return dataclasses.replace(self.prompt, tokens=tokens)

    @property
    def in_order(self) -> tuple[Completion, ...]:
        """Return the completions in sample order, once all have ended."""
        return tuple(self.completions[sample] for sample in range(self.num_samples))

    @property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """Return the turns of each sample; () if each sample is one turn."""
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
        """Start with none; `answer` maps completion tokens to the text to judge."""
        self.open: dict[int, Episode] = {}
        self._verifier = verifier
        self._answer = answer
        self._turns = turns

    def fill(self, sampler: Sampler, begun: Callable[[], Episode | None]) -> None:
        """Start episodes as long as a slot is free for a sample of another one.

        `begun` returns the next episode with its request, which goes to the sampler at
        once, or after all its environments have opened.
        """
        while True:
            waiting = sum(each.unopened for each in list(self.open.values()))
            if sampler.free_slots <= waiting or (episode := begun()) is None:
                return
            if not self._verifier.kind.opens:
                assert episode.request is not None, "made by `begun`"
                sampler.submit(episode.request)
                continue
            episode.unopened = episode.num_samples
            for sample in range(episode.num_samples):
                episode.stories[sample] = Story()
                self._submit(episode, sample, begins=True)

    def begin(self, key: int, prompt: Prompt, num_samples: int) -> Episode:
        """Open an episode of `num_samples` completions of a prompt, under a new key."""
        episode = Episode(
            key=key,
            prompt=prompt,
            num_samples=num_samples,
            begun_s=time.monotonic(),
            number=next(_NUMBERS),
        )
        self.open[key] = episode
        return episode

    def add(self, completion: Completion, version: int) -> bool:
        """Take a completion; return whether it was the last of its episode.

        After the last one the episode's answers are submitted to the verifiers.  An
        environment of several turns gets each turn at once, and may request another.

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
        if self._verifier.kind.by_turns:
            self._submit_turn(episode, completion)
            return False
        if len(episode.completions) < episode.num_samples:
            return False
        episode.ended_version = version
        episode.answers = tuple(
            self._answer(completion.tokens) for completion in episode.in_order
        )
        self._verifier.submit(
            episode,
            episode.prompt.task,
            list(episode.answers),
            episode.prompt.reference,
            prompt=episode.prompt.text,
        )
        return True

    def judged(self, sampler: Sampler) -> Iterator[Episode]:
        """Close and yield the episodes whose verdicts have arrived, in that order.

        In `sampler`, samples for which an environment requests another turn continue,
        and episodes whose environments have all opened start.
        """
        for verdicts in self._verifier.poll():
            if self._verifier.kind.by_turns:
                episode = self._take(verdicts, sampler)
                if episode is None:
                    continue
            else:
                episode = verdicts.key
                if self.open.get(episode.key) is not episode:
                    continue  # of an evaluation that was abandoned
                episode.verdicts = tuple(verdicts.judgements)
                episode.detail = verdicts.detail
            yield episode
            del self.open[episode.key]

    def drop(self, episode: Episode) -> None:
        """Remove an episode that has not ended; its environments are closed."""
        del self.open[episode.key]
        for sample, story in episode.stories.items():
            if story.verdict is None and not story.asked:
                self._refuse(episode, sample, _DROPPED)

    @property
    def waiting(self) -> bool:
        """Return whether any verdicts are pending."""
        return bool(self._verifier.pending)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a verdict arrives, at most `timeout_s`."""
        self._verifier.wait(timeout_s)

    # -- episodes of several turns ----------------------------------------------------

    def _submit_turn(self, episode: Episode, completion: Completion) -> None:
        """Submit a sampled turn to the sample's environment."""
        assert self._turns is not None, "set with every environment"
        story = episode.stories.setdefault(completion.sample, Story())
        start = story.turns[-1].end if story.turns else 0
        story.turns.append(Turn(start, len(completion.tokens), True))
        story.text = self._answer(completion.tokens[start:]) or ""
        last = len(story.said) + 1 >= self._turns.max_turns or completion.cut_off
        self._submit(episode, completion.sample, last=last)

    def _submit(
        self,
        episode: Episode,
        sample: int,
        *,
        begins: bool = False,
        last: bool = False,
        cut: bool = False,
    ) -> None:
        story = episode.stories[sample]
        story.asked = True
        self._verifier.submit(
            (episode, sample),
            episode.prompt.task,
            ["" if cut else story.text],
            episode.prompt.reference,
            prompt=episode.prompt.text,
            step=Step(
                episode=(episode.number, sample),
                turns=tuple(story.said),
                last=last,
                cut=cut,
                begins=begins,
                opened=story.opened,
                refused=story.refused,
            ),
        )

    def _refuse(self, episode: Episode, sample: int, verdict: Verdict) -> None:
        """End a sample with this verdict, which comes once its environment is closed.

        No turn of the sample may be with the environment.
        """
        episode.stories[sample].refused = verdict
        self._submit(episode, sample)

    def _take(self, verdicts: Verdicts, sampler: Sampler) -> Episode | None:
        """Take an environment's answer to a turn; return its episode if that ended."""
        episode, sample = verdicts.key
        episode.stories[sample].asked = False
        (said,) = verdicts.verdicts
        if self.open.get(episode.key) is not episode:  # dropped meanwhile
            if not isinstance(said, Verdict):
                self._refuse(episode, sample, _DROPPED)
            return None
        if episode.unopened:
            self._open(episode, sample, said, sampler)
            return None
        assert not isinstance(said, Opening), "every sample is asked for one"
        if isinstance(said, More):
            self._go_on(episode, sample, said, sampler)
            return None
        episode.stories[sample].verdict = said
        ended = [each.verdict for each in episode.stories.values()]
        if len(ended) < episode.num_samples or None in ended:
            return None
        self._end(episode)
        return episode

    def _open(
        self, episode: Episode, sample: int, said: Said, sampler: Sampler
    ) -> None:
        """Take an environment's opening; after the last one submit the samples."""
        story = episode.stories[sample]
        if isinstance(said, Opening):
            story.opened = said
        else:
            assert isinstance(said, Verdict), "no turn was submitted yet"
            story.refused = said
        episode.unopened -= 1
        if episode.unopened:
            return
        assert self._turns is not None, "set with every environment"
        request = episode.request
        assert request is not None, "set when the episode began"
        prompt, limits = episode.prompt, request.samples.max_tokens
        given = [prompt.tokens] * episode.num_samples

        def refuse(number: int, error: ValueError) -> None:
            each, given[number] = episode.stories[number], prompt.tokens
            each.refused = Verdict("bad_observation", str(error))
            each.opened = Opening()

        for number, each in episode.stories.items():
            try:
                given[number] = self._turns.opened(prompt, each.opened)
            except ValueError as error:
                refuse(number, error)
        shared = shared_length([prompt.tokens, *given])
        for number, tokens in enumerate(list(given)):
            most = self._turns.max_tokens if limits is None else int(limits[number])
            try:
                self._turns.check_room(len(tokens) - shared, most)
            except ValueError as error:
                refuse(number, error)
        episode.request = opened_request(request, given)
        for number, opening in enumerate(episode.request.samples.openings or ()):
            if len(opening):
                turn = Turn(0, len(opening), False)
                episode.stories[number].turns.append(turn)
        sampler.submit(episode.request)

    def _go_on(
        self, episode: Episode, sample: int, said: More, sampler: Sampler
    ) -> None:
        """Continue a sample after an observation, or end it."""
        assert self._turns is not None, "set with every environment"
        story, completion = episode.stories[sample], episode.completions[sample]
        story.turns[-1] = story.turns[-1]._replace(reward=said.reward)
        took_s, limit_s = time.monotonic() - episode.begun_s, self._turns.timeout_s
        if limit_s and took_s > limit_s:
            late = f"the episode took more than episode.timeout_s = {limit_s:g}"
            self._refuse(episode, sample, Verdict("verifier_timeout", late))
            return
        try:
            appended = self._turns.appended(said, completion)
        except ValueError as error:
            self._refuse(episode, sample, Verdict("bad_observation", str(error)))
            return
        request = episode.request
        assert request is not None, "set when the episode began"
        limits, most = request.samples.max_tokens, self._turns.max_tokens
        most = most if limits is None else int(limits[sample])
        story.said.append((story.text, said))
        known = len(completion.tokens) + len(appended)
        if known >= most:
            self._submit(episode, sample, cut=True)
        else:
            story.turns.append(Turn(len(completion.tokens), known, False))
            sampler.resume(request, completion, appended)

    def _end(self, episode: Episode) -> None:
        """Set verdicts, answers and detail of an ended episode from its samples."""
        order: list[Any] = [episode.stories[n] for n in range(episode.num_samples)]
        episode.verdicts = tuple(each.verdict for each in order)
        details = (each.detail for each in episode.verdicts if each.detail)
        episode.detail = "; ".join(dict.fromkeys(details))
        episode.answers = tuple(each.text for each in order)
        episode.ended_version = max(
            int(each.versions[-1]) for each in episode.completions.values()
        )
