"""Tokens between two turns: a turn's end, the observation, the start of a reply.

They are made once, when the environment has answered, and appended to the sampled
tokens: an episode only grows, and nothing of it is rendered or tokenised twice.  Where
a chat template would write earlier turns differently (Qwen3 leaves out their thinking),
the episode keeps what was sampled.

An observation is untrusted text: it has none of the tokenizer's named tokens, such as
the end of a turn or of thinking.  The same holds for what an environment says before
the first turn; that follows the prompt, before a reply begins.

An environment that renders by itself gives token ids, which are appended unchanged and
may be any of the vocabulary: they are its own frame and no text of others.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer as Backend

from scalerl_jax.data.chat import ChatTemplate, TemplateRefused
from scalerl_jax.data.questions import PLACE as QUESTION
from scalerl_jax.data.tokenizer import Tokenizer

PLACE = "{observation}"
# Texts that stand for a turn and an observation when a template is probed.
_TURN, _SAID = "\ue000turn\ue001", "\ue000said\ue001"
_PROBE = "a b"


@dataclasses.dataclass(frozen=True)
class Frame:
    """Text before and after an observation."""

    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class OpeningFrame:
    """Text around the messages that open an episode, after its prompt."""

    replaced: str  # the end of the prompt, which begins a reply; messages replace it
    around: tuple[str, ...]  # before the first one, between two, after the last


class Framing(Protocol):
    """Text around the messages of an environment, by their roles."""

    def turn(self, role: str) -> Frame:
        """Return the frame of an observation after a turn."""
        ...

    def opening(self, roles: tuple[str, ...]) -> OpeningFrame:
        """Return the frame of messages after a prompt."""
        ...


class PlainFraming:
    """Framing by a text with a placeholder for the observation, for every role."""

    def __init__(self, between: str, template: str) -> None:
        """Frame with `between`; prompts are written by `template`, with a question."""
        before, _, after = between.partition(PLACE)
        self._frame = Frame(before, after)
        self._end = template.rpartition(QUESTION)[2]

    def turn(self, role: str) -> Frame:
        """Return the text's two parts."""
        return self._frame

    def opening(self, roles: tuple[str, ...]) -> OpeningFrame:
        """Return the text's two parts, and new lines between messages."""
        between = ["\n"] * (len(roles) - 1)
        around = (self._frame.before, *between, self._frame.after)
        return OpeningFrame(self._end, around)


class ChatFraming:
    """Framing by a chat template, according to the roles of messages."""

    def __init__(self, chat: ChatTemplate, options: Mapping[str, Any]) -> None:
        """Probe the template when a role is used for the first time."""
        self._chat, self._options = chat, options
        self.turn = functools.cache(self._turn)
        self.opening = functools.cache(self._opening)

    def _render(self, *messages: tuple[str, str], replied_to: bool = True) -> str:
        """Return the text of a question and the messages after it.

        Raises:
            ValueError: the template refuses such a conversation.
        """
        given = [{"role": "user", "content": "a"}]
        given += [{"role": role, "content": text} for role, text in messages]
        try:
            return self._chat.render(
                given, options=self._options, replied_to=replied_to
            )
        except TemplateRefused as error:
            raise ValueError(
                f"{error}; an environment's observation cannot have the role "
                f"{messages[-1][0]!r}"
            ) from error

    def _turn(self, role: str) -> Frame:
        """Return what the template writes after a turn, around a message.

        Raises:
            ValueError: it refuses such a conversation, or does not write the message
                after the unchanged turn.
        """
        text = self._render(("assistant", _TURN), (role, _SAID))
        _, turn, rest = text.rpartition(_TURN)
        before, said, after = rest.partition(_SAID)
        if not (turn and said):
            raise ValueError(
                f"{self._chat.origin} does not write a turn of the assistant and "
                f"behind it a message of the role {role!r}; an episode cannot have "
                f"several turns with it"
            )
        return Frame(before, after)

    def _opening(self, roles: tuple[str, ...]) -> OpeningFrame:
        """Return what the template writes after a question, around messages.

        Raises:
            ValueError: it refuses such a conversation, or does not write the messages
                after the unchanged question.
        """
        question = self._render(replied_to=False)
        replied_to = self._render()
        opened = self._render(*((role, _SAID) for role in roles))
        around = opened.removeprefix(question).split(_SAID)
        good = replied_to.startswith(question) and opened.startswith(question)
        if not good or len(around) != len(roles) + 1:
            raise ValueError(
                f"{self._chat.origin} does not write messages of the roles "
                f"{', '.join(roles)} behind a question; an episode cannot begin so "
                f"with it"
            )
        return OpeningFrame(replied_to.removeprefix(question), tuple(around))


class ObservationWriter:
    """Writer of the tokens that follow a turn, from an environment's message."""

    def __init__(self, tokenizer: Tokenizer, framing: Framing) -> None:
        """Make a copy of the tokenizer without named tokens.

        Raises:
            ValueError: the tokenizer adds something to each text that it is given.
        """
        self._tokenizer, self._framing = tokenizer, framing
        named = tokenizer.backend.get_added_tokens_decoder()
        self._plain = _without_names(tokenizer.backend)
        # The token for unknown characters does not count as named.
        unknown = tokenizer.backend.token_to_id(
            getattr(self._plain.model, "unk_token", None) or ""
        )
        self._named = frozenset(named) - {unknown}
        self._frame = functools.cache(self._frame_of)
        self._encoded = functools.lru_cache(maxsize=64)(tokenizer.encode)
        pieces = tokenizer.written.later
        ids = self._plain.encode(_PROBE, add_special_tokens=False).ids
        if b"".join(pieces[each] for each in ids) != _PROBE.encode():
            raise ValueError(
                "data.tokenizer writes a text otherwise behind other tokens than at "
                "the beginning, and so cannot append an observation to a turn; "
                "episodes of several turns need a tokenizer like Llama 3's or Qwen's"
            )

    def _frame_of(self, role: str) -> tuple[list[int], list[int]]:
        frame = self._framing.turn(role)
        return self._tokenizer.encode(frame.before), self._tokenizer.encode(frame.after)

    def __call__(self, text: str, role: str, *, last: int) -> Int[np.ndarray, " n"]:
        """Return the tokens to append after a turn whose last token is `last`.

        The end of the turn is left out if the policy has already written an end.

        Raises:
            ValueError: the text cannot be written without a named token, or the
                template has no such role.
        """
        before, after = self._frame(role)
        eos_ids = self._tokenizer.eos_ids
        if before and before[0] in eos_ids and last in eos_ids:
            before = before[1:]
        return np.array([*before, *self._said(text), *after], np.int32)

    def opened(
        self, prompt: str, messages: Sequence[tuple[str, str]]
    ) -> Int[np.ndarray, " n"]:
        """Return the tokens of a prompt and of messages (text, role) after it.

        They replace the prompt's end, which begins a reply, and are followed by such an
        end.

        Raises:
            ValueError: as above, or the prompt has another end.
        """
        frame = self._framing.opening(tuple(role for _, role in messages))
        question = self._question(prompt, frame)
        first, *others = map(self._encoded, frame.around)
        if first and first[0] in self._tokenizer.eos_ids:
            first = first[1:]  # it ends a turn, and there was none
        tokens = [*question, *first]
        for (text, _), after in zip(messages, others, strict=True):
            tokens += [*self._said(text), *after]
        return np.array(tokens, np.int32)

    def opened_with(self, prompt: str, ids: Sequence[int]) -> Int[np.ndarray, " n"]:
        """Return the tokens of a prompt and of an opening by token ids.

        These replace the prompt's end, which begins a reply, and nothing follows them.

        Raises:
            ValueError: an id is not in the vocabulary, or the prompt has another end.
        """
        question = self._question(prompt, self._framing.opening(()))
        return np.concatenate([np.array(question, np.int32), self.checked(ids)])

    def checked(self, ids: Sequence[int]) -> Int[np.ndarray, " n"]:
        """Return an environment's token ids, which are appended unchanged.

        Ids of tokens that end a sequence or a turn are ids like others: only a sampled
        one ends anything.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        known = len(self._tokenizer.written.later)
        for each in ids:
            if not 0 <= each < known:
                raise ValueError(
                    f"the observation has the token id {each}; those of data.tokenizer "
                    f"are 0 to {known - 1}"
                )
        return np.array(ids, np.int32)

    def _question(self, prompt: str, frame: OpeningFrame) -> list[int]:
        """Return the tokens of a prompt without its end, which begins a reply."""
        if not prompt.endswith(frame.replaced):
            raise ValueError(
                f"the prompt does not end with {frame.replaced!r}, where a reply "
                f"begins; an environment cannot say anything before that"
            )
        return self._encoded(prompt[: len(prompt) - len(frame.replaced)])

    def _said(self, text: str) -> list[int]:
        """Return the tokens of an untrusted text, none of which is named."""
        said = self._plain.encode(text, add_special_tokens=False).ids
        if found := self._named.intersection(said):
            raise ValueError(
                f"the observation is written with the token {min(found)}, which is a "
                f"named token of the tokenizer"
            )
        return said


def _without_names(backend: Backend) -> Backend:
    """Return a tokenizer that finds no added token in a text."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    content["post_processor"] = None  # it may name some
    return Backend.from_str(json.dumps(content))
