"""Answers to learn from, in rows: chats, and prompts with their completions.

    {"messages" | "conversations": [turns, the last of them the assistant's]}
    {"prompt" | "question" | "problem": text or turns,
     "completion" | "response" | "solution" | "answer": text or a turn}

Perhaps with "system".  A question that is a text is asked as in training, by
data.template; turns are written by the chat template.  What each part of a row becomes
is tokenised apart, as a prompt is before it is sampled from.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from scalerl_jax.config import DataConfig
from scalerl_jax.data.chat import ChatTemplate, TemplateRefused
from scalerl_jax.data.drafts import Malformed, Unusable, first
from scalerl_jax.data.files import Row, read_rows
from scalerl_jax.data.questions import CHAT, PLACE
from scalerl_jax.data.records import Tally
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.data.turns import has_picture, read_conversation

_ANSWERS = ("completion", "response", "solution", "answer")
_QUESTIONS = ("prompt", "question", "problem")
Turns = list[tuple[str, str]]  # role and text
Parts = list[tuple[str, bool]]  # text, and whether it is an answer


class Answer(NamedTuple):
    """A sequence of token ids, and which of them are an answer's."""

    tokens: Int[np.ndarray, " n"]  # int32
    mask: Bool[np.ndarray, " n"]


class Writer:
    """Writes the turns of a row as a policy reads and writes them."""

    def __init__(
        self, data: DataConfig, tokenizer: Tokenizer, chat: ChatTemplate | None
    ) -> None:
        """Take the chat template if data.template asks for it."""
        assert (chat is not None) == (data.template == CHAT), "one goes with the other"
        self._data, self._tokenizer, self._chat = data, tokenizer, chat
        self._options = {"enable_thinking": data.enable_thinking}

    def __call__(self, row: Row) -> Answer:
        """Return the answers of a row behind their prompts.

        Raises:
            Unusable: there is nothing to learn in it.
            Malformed: it is not in the form.
        """
        turns = self._turns(row)
        if turns[-1][0] != "assistant" or not turns[-1][1].strip():
            raise Unusable("the last turn is no answer of the assistant's")
        if any(map(has_picture, (text for _, text in turns))):
            raise Unusable("it has a picture, sound or film")
        parts = self._plain(turns) if self._chat is None else self._written(turns)
        return self._tokenized(parts)

    def _turns(self, row: Row) -> Turns:
        for name in ("messages", "conversations"):
            if (turns := read_conversation(row.get(name))) is not None:
                return self._with_system(row, turns)
        prompt, answer = first(row, *_QUESTIONS), first(row, *_ANSWERS)
        for names, found in ((_QUESTIONS, prompt), (_ANSWERS, answer)):
            if found is None:
                raise Malformed(f"field {' or '.join(map(repr, names))} is missing")
        if (said := read_conversation(answer)) is None:
            said = [("assistant", _text(answer, _ANSWERS))]
        if (turns := read_conversation(prompt)) is not None:
            return self._with_system(row, [*turns, *said])
        question = _text(prompt, _QUESTIONS)
        if self._chat is not None:
            question = self._data.user_template.replace(PLACE, question)
        return self._with_system(row, [("user", question), *said])

    def _with_system(self, row: Row, turns: Turns) -> Turns:
        system = self._data.system_prompt or row.get("system")
        if not system or turns[0][0] == "system":
            return turns
        return [("system", _text(system, ("system",))), *turns]

    def _plain(self, turns: Turns) -> Parts:
        """Put the one question into data.template."""
        match turns:
            case [("user", question), ("assistant", answer)]:
                prompt = self._data.template.replace(PLACE, question)
                return [(prompt, False), (answer, True)]
        raise Unusable(
            "it has other turns than a question and an answer, for which "
            f"data.template must be {CHAT!r}"
        )

    def _written(self, turns: Turns) -> Parts:
        """Write turns by the chat template; an answer is what it adds to its prompt.

        Earlier turns are learned where the whole still has them as they were written
        when they were new: Qwen3's template takes their thinking out.  Where that is so
        of the last one, it is learned as it is.
        """
        messages = [{"role": role, "content": text} for role, text in turns]
        whole = self._render(messages, replied_to=False)
        parts: Parts = []
        end, last = 0, len(turns) - 1
        for place in (at for at, (role, _) in enumerate(turns) if role == "assistant"):
            before = self._render(messages[:place], replied_to=True)
            behind = whole
            if place < last:
                behind = self._render(messages[: place + 1], replied_to=False)
            added = behind[len(before) :]
            grows = whole.startswith(behind) and behind.startswith(before)
            # A template that leaves the thinking out would teach to think no more.
            if grows and turns[place][1].strip() in added:
                parts += [(before[end:], False), (added, True)]
                end = len(behind)
            elif place == last:  # the answer as it is, behind what is sampled from
                known = end if before.startswith(whole[:end]) else 0
                parts = [*(parts if known else ()), (before[known:], False)]
                parts.append((turns[-1][1], True))
        return parts

    def _render(self, messages: list[dict[str, Any]], *, replied_to: bool) -> str:
        assert self._chat is not None, "turns are written by a template"
        try:
            return self._chat.render(
                messages, options=self._options, replied_to=replied_to
            )
        except TemplateRefused as error:
            raise Unusable("the chat template refuses its turns") from error

    def _tokenized(self, parts: Parts) -> Answer:
        """Return the ids of the parts; an answer ends with the end of sequence.

        What a template writes behind that is read and not learned, and at the end it
        is left out.
        """
        eos_ids = self._tokenizer.eos_ids
        tokens: list[int] = []
        mask: list[bool] = []
        for number, (text, answer) in enumerate(parts, 1):
            own = self._tokenizer.encode(text)
            count = len(own) if answer else 0
            if answer:
                ends = [place for place, each in enumerate(own) if each in eos_ids]
                count = ends[-1] + 1 if ends else len(own)
                if number == len(parts):
                    own = own[:count] if ends else [*own, eos_ids[0]]
                    count = len(own)
            tokens += own
            mask += [True] * count + [False] * (len(own) - count)
        return Answer(np.array(tokens, np.int32), np.array(mask, bool))


def _text(value: Any, names: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise Malformed(
            f"field {' or '.join(map(repr, names))} is of type "
            f"{type(value).__name__}, not str"
        )
    return value


def read_answers(
    path: Path,
    write: Callable[[Row], Answer],
    *,
    left_out: Tally,
    broken: Tally,
) -> Iterator[Answer]:
    """Yield the answers of a file's rows in order, and count the rows without one.

    Raises:
        ValueError: the file as a whole cannot be read.
    """
    for place, row, reason in read_rows(path):
        if row is None:
            broken.add(reason, place)
            continue
        try:
            yield write(row)
        except Unusable as error:
            left_out.add(str(error), place)
        except Malformed as error:
            broken.add(str(error), place)
