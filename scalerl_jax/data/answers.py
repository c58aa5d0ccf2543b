"""Answers to learn from, in rows: chats, and prompts with their completions.

    {"messages" | "conversations": [turns, the last of them the assistant's]}
    {"prompt" | "question" | "problem": text or turns,
     "completion" | "response" | "solution" | "answer": text or a turn}

Perhaps with "system" and "tools".  A question that is a text is asked as in training,
by data.template; turns are written by the chat template.  What each part of a row
becomes is tokenised apart, as a prompt is before it is sampled from.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from scalerl_jax.config import DataConfig
from scalerl_jax.data.chat import ChatTemplate, TemplateRefused
from scalerl_jax.data.drafts import Malformed, Unusable, check_text, first
from scalerl_jax.data.files import Row, read_rows
from scalerl_jax.data.questions import CHAT, PLACE, THINKING_TAGS
from scalerl_jax.data.records import Tally
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.data.turns import (
    Turn,
    check_no_pictures,
    has_picture,
    listed_tools,
    read_conversation,
)

_ANSWERS = ("completion", "response", "solution", "answer")
_QUESTIONS = ("prompt", "question", "problem")
# Fields of a turn with its thinking: of Qwen's and DeepSeek's templates, of gpt-oss's.
_THINKING = ("reasoning_content", "reasoning", "thinking")
Turns = list[Turn]
Tools = list[dict[str, Any]]
Parts = list[tuple[str, bool]]  # text, and whether it is an answer


class Answer(NamedTuple):
    """A sequence of token ids, and which of them are an answer's."""

    tokens: Int[np.ndarray, " n"]  # int32
    mask: Bool[np.ndarray, " n"]


class Written(NamedTuple):
    """The answers of a row behind their prompts, in one sequence or several."""

    sequences: list[Answer]
    left_out: tuple[str, ...] = ()  # why not, for each answer that cannot be learned


class Writer:
    """Writes the turns of a row as a policy reads and writes them."""

    def __init__(
        self, data: DataConfig, tokenizer: Tokenizer, chat: ChatTemplate | None
    ) -> None:
        """Take the chat template if data.template asks for it."""
        assert (chat is not None) == (data.template == CHAT), "one goes with the other"
        self._data, self._tokenizer, self._chat = data, tokenizer, chat
        self._options = {"enable_thinking": data.enable_thinking}
        ends = (tokenizer.decode_all([each]) for each in tokenizer.eos_ids)
        self._ends = re.compile("|".join(map(re.escape, filter(None, ends))) or "(?!)")

    def __call__(self, row: Row) -> Written:
        """Return what a row has to teach.

        Raises:
            Unusable: there is nothing to learn in it.
            Malformed: it is not in the form.
        """
        turns, tools = self._turns(row), listed_tools(row)
        if turns[-1].role != "assistant" or not turns[-1].text.strip():
            raise Unusable("the last turn is no answer of the assistant's")
        check_no_pictures(row)
        if any(has_picture(turn.text) for turn in turns):
            raise Unusable("it has a picture, sound or film")
        if not (learned := _learned(turns)):
            raise Unusable("no answer of it is to be learned")
        for place in learned:
            turns[place] = self._without_end(turns[place])
        if self._chat is None:
            return Written([self._tokenized(self._plain(turns, tools))])
        return self._written(turns, learned, tools)

    def _turns(self, row: Row) -> Turns:
        for name in ("messages", "conversations"):
            if (turns := read_conversation(row.get(name))) is not None:
                return self._with_system(row, turns)
        prompt, answer = first(row, *_QUESTIONS), first(row, *_ANSWERS)
        for names, found in ((_QUESTIONS, prompt), (_ANSWERS, answer)):
            if found is None:
                raise Malformed(f"field {' or '.join(map(repr, names))} is missing")
        if (said := read_conversation(answer)) is None:
            said = [Turn("assistant", _text(answer, _ANSWERS))]
        if (turns := read_conversation(prompt)) is not None:
            return self._with_system(row, [*turns, *said])
        question = _text(prompt, _QUESTIONS)
        if self._chat is not None:
            question = self._data.user_template.replace(PLACE, question)
        return self._with_system(row, [Turn("user", question), *said])

    def _with_system(self, row: Row, turns: Turns) -> Turns:
        system = self._data.system_prompt or row.get("system")
        if not system or turns[0].role == "system":
            return turns
        return [Turn("system", _text(system, ("system",))), *turns]

    def _without_end(self, turn: Turn) -> Turn:
        """Return an answer without an end of sequence behind it."""
        message = _message(turn)
        for name in ("content", *_thinking(turn)):
            message[name], *behind = self._ends.split(message[name])
            if "".join(behind).strip():
                raise Unusable("an end of sequence is within an answer")
        return Turn(turn.role, message["content"], message)

    def _plain(self, turns: Turns, tools: Tools) -> Parts:
        """Put the one question into data.template."""
        wanted = f"for which data.template must be {CHAT!r}"
        match turns:
            case [Turn("user", question), Turn("assistant", answer) as said]:
                prompt = self._data.template.replace(PLACE, question)
            case _:
                raise Unusable(
                    f"it has other turns than a question and an answer, {wanted}"
                )
        if fields := [*_thinking(said), *(["tools"] if tools else [])]:
            raise Unusable(f"it has {fields[0]!r}, {wanted}")
        return [(prompt, False), (_unread(answer, prompt), True)]

    def _written(self, turns: Turns, learned: Sequence[int], tools: Tools) -> Written:
        """Write turns by the chat template, each answer behind what it is sampled from.

        A sequence goes on as long as the template leaves unchanged what it wrote when
        that was new.  Qwen3's takes the thinking out of earlier answers, so that the
        next answer begins a sequence of its own.
        """
        messages = [_message(turn) for turn in turns]
        if tools:
            self._check_listed(messages[: learned[0]], tools)
        sequences: list[Parts] = []
        left_out: list[str] = []
        known = ""  # of the last sequence, if it may go on
        for place in learned:
            before = self._render(messages[:place], tools, replied_to=True)
            behind = self._render(messages[: place + 1], tools, replied_to=False)
            try:
                added = _added(turns[place], before, behind)
            except Unusable as error:
                left_out.append(str(error))
                continue
            if not known or not before.startswith(known):
                sequences.append([])
                known = ""
            sequences[-1] += [(before[len(known) :], False), (added, True)]
            known = behind if behind == before + added else ""
        if not sequences:
            raise Unusable(left_out[0])
        return Written(list(map(self._tokenized, sequences)), tuple(left_out))

    def _check_listed(self, messages: list[dict[str, Any]], tools: Tools) -> None:
        """Raise Unusable for tools that the template does not write."""
        texts = {self._render(messages, each, replied_to=True) for each in (tools, [])}
        if len(texts) == 1:
            raise Unusable("the chat template does not write its 'tools'")

    def _render(
        self, messages: list[dict[str, Any]], tools: Tools, *, replied_to: bool
    ) -> str:
        assert self._chat is not None, "turns are written by a template"
        try:
            return self._chat.render(
                messages,
                options=self._options,
                tools=tools or None,
                replied_to=replied_to,
            )
        except TemplateRefused as error:
            raise Unusable("the chat template refuses its turns") from error
        except ValueError as error:
            if not tools:
                raise
            raise Unusable(f"with its 'tools' {error}") from error

    def _tokenized(self, parts: Parts) -> Answer:
        """Return the ids of the parts; an answer ends with the end of sequence.

        What a template writes behind that is read and not learned, and at the end it
        is left out.
        """
        check_text(*(text for text, _ in parts))
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


def _learned(turns: Turns) -> list[int]:
    """Return the places of the answers to learn.

    Not learned is what OpenAI's "weight" of 0 or "train" of false says, and what is
    before the first turn of a user: no prompt asks for it.
    """
    found, asked = [], False
    for place, (role, _, given) in enumerate(turns):
        asked = asked or role == "user"
        if role != "assistant":
            continue
        weight, train = given.get("weight"), given.get("train")
        if weight not in (None, 0, 1):
            raise Malformed("'weight' of a message is neither 0 nor 1")
        if train not in (None, False, True):
            raise Malformed("'train' of a message is neither true nor false")
        if asked and 0 not in (weight, train):
            found.append(place)
    return found


def _thinking(turn: Turn) -> dict[str, str]:
    """Return the fields with the thinking of an answer, apart from its text."""
    if turn.role != "assistant":
        return {}
    found = {name: turn.given[name] for name in _THINKING if turn.given.get(name)}
    for name, value in found.items():
        if not isinstance(value, str):
            raise Malformed(f"field {name!r} of a message is no text")
    return found


def _message(turn: Turn) -> dict[str, Any]:
    """Return a turn as chat templates read it."""
    return {"role": turn.role, "content": turn.text, **_thinking(turn)}


def _added(turn: Turn, before: str, behind: str) -> str:
    """Return what an answer adds to its prompt: in the template's words, or as it is.

    It is learned as it is where the template leaves a part of it out, such as
    DeepSeek-R1's the thinking: that would teach to think no more.
    """
    own, thinking = _unread(turn.text, before), _thinking(turn)
    added = behind[len(before) :] if behind.startswith(before) else ""
    for name, text in thinking.items():
        if text.strip() not in added:
            raise Unusable(f"the chat template does not write {name!r} of an answer")
    if own.strip() in added:
        own = added
    elif thinking:
        raise Unusable("the chat template does not write an answer as it is in its row")
    read = before.rstrip()
    for tags in THINKING_TAGS:
        if read.endswith(tags.begin) and tags.end not in own:
            raise Unusable("its prompt begins the thinking, which an answer never ends")
        thinks = own.lstrip().startswith(tags.begin) or tags.end in own
        if read.endswith(tags.end) and thinks:
            raise Unusable("its prompt has ended the thinking, and an answer thinks")
    return own


def _unread(answer: str, before: str) -> str:
    """Return an answer without the start of its thinking that its prompt ends with.

    Raises:
        Unusable: nothing else is in it.
    """
    own = answer
    for tags in THINKING_TAGS:
        _, begun, rest = before.rpartition(tags.begin)
        read = begun + rest
        if begun and answer.startswith(read):
            own = answer[len(read) :]
        elif begun and answer.lstrip().startswith(read.strip()):
            own = answer.lstrip()[len(read.strip()) :]
    if not own.strip():
        raise Unusable("an answer is empty")
    return own


def _text(value: Any, names: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise Malformed(
            f"field {' or '.join(map(repr, names))} is of type "
            f"{type(value).__name__}, not str"
        )
    return value


def read_answers(
    path: Path,
    write: Callable[[Row], Written],
    *,
    left_out: Tally,
    broken: Tally,
) -> Iterator[Written]:
    """Yield the answers of each of a file's rows, and count the rows without one.

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
