"""The tokens between two turns: the end of one, what was said to it, a beginning.

They are made once, when the environment has answered, and appended to the tokens that
were sampled, which are never read again: an episode grows, and nothing of it is
rendered or tokenised a second time.  Where a chat template would write earlier turns
otherwise (Qwen3 leaves their thinking out), the episode keeps what was sampled.

An observation is a text of somebody else's: no token of it is one that the tokenizer
knows by name, such as the end of a turn or of a thinking.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer as Backend

from scalerl_jax.data.chat import ChatTemplate, TemplateRefused
from scalerl_jax.data.tokenizer import Tokenizer

PLACE = "{observation}"
# Texts that stand for a turn and an observation while a template is looked at.
_TURN, _SAID = "\ue000turn\ue001", "\ue000said\ue001"
_PROBE = "a b"


@dataclasses.dataclass(frozen=True)
class Frame:
    """What stands before and behind an observation."""

    before: str
    after: str


# The role of a message, as a chat template knows it -> what is written around it
Framing = Callable[[str], Frame]


def plain_framing(between: str) -> Framing:
    """Return the framing of a text with a place for the observation."""
    before, _, after = between.partition(PLACE)
    return lambda role: Frame(before, after)


def chat_framing(chat: ChatTemplate, options: dict[str, Any]) -> Framing:
    """Return what a chat template writes behind a turn, around a message of a role.

    Raises:
        ValueError: the template refuses such a conversation, or does not write it
            behind the turn as it is.
    """

    def frame(role: str) -> Frame:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _TURN},
            {"role": role, "content": _SAID},
        ]
        try:
            text = chat.render(messages, options=options)
        except TemplateRefused as error:
            raise ValueError(
                f"{error}; an environment's observation cannot have the role {role!r}"
            ) from error
        _, turn, rest = text.rpartition(_TURN)
        before, said, after = rest.partition(_SAID)
        if not (turn and said):
            raise ValueError(
                f"{chat.origin} does not write a turn of the assistant and behind it a "
                f"message of the role {role!r}; an episode cannot have several turns "
                f"with it"
            )
        return Frame(before, after)

    return functools.cache(frame)


class ObservationWriter:
    """Makes the tokens that follow a turn, of what an environment says to it."""

    def __init__(self, tokenizer: Tokenizer, framing: Framing) -> None:
        """Write with a tokenizer that has no name for any token.

        Raises:
            ValueError: the tokenizer adds something to each text that it is given.
        """
        self._tokenizer, self._framing = tokenizer, framing
        named = tokenizer.backend.get_added_tokens_decoder()
        self._plain = _without_names(tokenizer.backend)
        # Signs that it cannot write are no names, however that token is called.
        unknown = tokenizer.backend.token_to_id(
            getattr(self._plain.model, "unk_token", None) or ""
        )
        self._named = frozenset(named) - {unknown}
        self._frame = functools.cache(self._frame_of)
        pieces = tokenizer.written.later
        ids = self._plain.encode(_PROBE, add_special_tokens=False).ids
        if b"".join(pieces[each] for each in ids) != _PROBE.encode():
            raise ValueError(
                "data.tokenizer writes a text otherwise behind other tokens than at "
                "the beginning, and so cannot append an observation to a turn; "
                "episodes of several turns need a tokenizer like Llama 3's or Qwen's"
            )

    def _frame_of(self, role: str) -> tuple[list[int], list[int]]:
        frame = self._framing(role)
        return self._tokenizer.encode(frame.before), self._tokenizer.encode(frame.after)

    def __call__(self, text: str, role: str, *, last: int) -> Int[np.ndarray, " n"]:
        """Return the tokens to append behind a turn whose last token is `last`.

        The end of the turn is left out where the policy has written it, or another one.

        Raises:
            ValueError: the text is in no way written without a named token, or the
                template has no such role.
        """
        before, after = self._frame(role)
        eos_ids = self._tokenizer.eos_ids
        if before and before[0] in eos_ids and last in eos_ids:
            before = before[1:]
        said = self._plain.encode(text, add_special_tokens=False).ids
        if found := self._named.intersection(said):
            raise ValueError(
                f"the observation is written with the token {min(found)}, which the "
                f"tokenizer knows by name"
            )
        return np.array([*before, *said, *after], np.int32)


def _without_names(backend: Backend) -> Backend:
    """Return a tokenizer that finds no added token in a text."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    content["post_processor"] = None  # it may name some
    return Backend.from_str(json.dumps(content))
