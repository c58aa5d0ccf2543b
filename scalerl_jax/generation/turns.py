"""The text before and between the turns of an episode, and its limits."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from scalerl_jax.data.observations import ObservationWriter
from scalerl_jax.environments.verdict import More, Opening
from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.requests import Completion, Request
from scalerl_jax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """Limits of an episode's turns, and the writer of the tokens between them."""

    writer: Callable[[], ObservationWriter]  # made once, when it is needed
    max_turns: int
    max_observation_tokens: int
    max_tokens: int  # limit of a completion whose request has none
    timeout_s: float  # limit of an episode; 0: no limit

    def appended(self, said: More, completion: Completion) -> Int[np.ndarray, " n"]:
        """Return the tokens of an observation, to append to a completion.

        Raises:
            ValueError: they cannot be written, or are too many.
        """
        if said.tokens is not None:
            tokens = self.writer().checked(said.tokens)
        else:
            last = int(completion.tokens[-1])
            tokens = self.writer()(said.text, said.role, last=last)
        self._check("the observation", tokens)
        return tokens

    def opened(self, prompt: Prompt, said: Opening) -> Int[np.ndarray, " n"]:
        """Return the tokens of a prompt and of an opening.

        Raises:
            ValueError: they cannot be written, or are too many.
        """
        if not said.messages:
            return prompt.tokens
        ids = [each.tokens for each in said.messages if each.tokens is not None]
        if ids:
            given = list(itertools.chain(*ids))
            tokens = self.writer().opened_with(prompt.text, given)
        else:
            messages = [(each.text, each.role) for each in said.messages]
            tokens = self.writer().opened(prompt.text, messages)
        kept = shared_length([prompt.tokens, tokens])
        if not kept:
            raise ValueError(
                "followed by what begin says, the prompt shares no token with the "
                "prompt alone; put it into the prompts"
            )
        self._check("what begin says", tokens[kept:])
        return tokens

    def check_room(self, opening: int, most: int) -> None:
        """Refuse an opening of that many tokens if it leaves none of `most` for a turn.

        Raises:
            ValueError: it leaves none.
        """
        if opening >= most:
            raise ValueError(
                f"what begin says has {opening} tokens, of the {most} that "
                f"sampler.max_completion_tokens leaves, and a turn needs one"
            )

    def _check(self, what: str, tokens: np.ndarray) -> None:
        if len(tokens) > self.max_observation_tokens:
            raise ValueError(
                f"{what} has {len(tokens)} tokens; episode.max_observation_tokens = "
                f"{self.max_observation_tokens} is the limit"
            )


def shared_length(sequences: Sequence[Int[np.ndarray, " n"]]) -> int:
    """Return the number of tokens that all sequences share at their start."""
    first, *others = sequences
    shared = len(first)
    for each in others:
        shared = min(shared, len(each))
        differ = np.flatnonzero(first[:shared] != each[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared


def opened_request(request: Request, given: Sequence[Int[np.ndarray, " n"]]) -> Request:
    """Return a request whose samples begin with these tokens, one array per sample.

    Its prompt is the part that all samples share with it.  The rest belongs to their
    completions and counts in the limits of these; thinking starts after it.
    """
    shared = shared_length([request.tokens, *given])
    openings = tuple(each[shared:] for each in given)
    if not any(map(len, openings)):
        return request
    lengths = np.array([len(each) for each in openings], np.int64)
    thinking = np.minimum(request.samples.thinking_limits + lengths, NEVER)
    samples = dataclasses.replace(
        request.samples, openings=openings, thinking_limits=thinking.astype(np.int32)
    )
    return dataclasses.replace(request, tokens=request.tokens[:shared], samples=samples)
