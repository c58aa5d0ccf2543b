"""Questions of tasks and data sets, their prompts, and where an answer begins.

The verifier's process and the data commands import this module: no JAX here.
"""

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar, overload

T = TypeVar("T")
_CHUNK = 64  # members read together, each perhaps with megabytes of tests
CHAT = "chat"  # the value of data.template that asks for the model's own
PLACE = "{question}"  # in a template


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question, and what a verifier needs to judge an answer.

    `reference` holds JSON values only.  That of a data set names its "verifier"
    ("math" or "code"), has the "answer" or the "tests" that this verifier needs,
    perhaps "own", the row's "reference" for a user's function, and "id", the data set's
    own name of the question.  That of a reasoning_gym task has
    "answer" and "metadata", and is judged by the task.  If its environment answers
    calls of tools, "tools" lists the tools in the form that chat templates take.
    """

    task: str
    text: str
    reference: dict[str, Any]
    system: str = ""  # the data set's own system message

    @property
    def compared(self) -> str:
        """Return the text that distinguishes the question from others.

        Questions of an environment may have the same text and yet differ: "unlike" of
        the reference then distinguishes them.
        """
        return with_unlike(self.text, self.reference)


def with_unlike(text: str, reference: dict[str, Any]) -> str:
    """Return a question's or a prompt's text with what "unlike" of a reference says."""
    known = reference.get("answer")
    unlike = known.get("unlike", "") if isinstance(known, dict) else ""
    return f"{text} {unlike}" if unlike else text


class LazySequence(Sequence[T]):
    """A sequence whose members are read on access, several together."""

    @abc.abstractmethod
    def read(self, places: list[int]) -> list[T]:
        """Return the members at these indices, which are in range and not negative."""

    @overload
    def __getitem__(self, place: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> T | list[T]:
        """Return the member at an index, or those of a slice; negative: from the end.

        Raises:
            IndexError: the index is out of range.
        """
        if isinstance(place, slice):
            return self.read(list(range(*place.indices(len(self)))))
        index = operator.index(place)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} members")
        return self.read([index % len(self)])[0]

    def __iter__(self) -> Iterator[T]:
        """Yield all of them in order."""
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]


def take(members: Sequence[T], places: list[int]) -> list[T]:
    """Return the members at `places`.

    A lazy sequence reads them at once, which is ten times as fast.
    """
    if isinstance(members, LazySequence):
        return members.read(places)
    return [members[place] for place in places]


class Renderer:
    """Writer of a question's prompt, with the tag that ends the thinking after it."""

    def __init__(
        self, write: Callable[[Question], str], template: str, *, dated: bool = False
    ) -> None:
        """Write an example, so that an invalid template raises here.

        Args:
            write: returns the text of a question's prompt.
            template: shows which family of models it is written for.
            dated: whether the template asks for today's date.

        Raises:
            ValueError: the template refuses a question.
        """
        self.write = write
        self.dated = dated
        self.example = write(Question(task="", text="1 + 1 = ?", reference={}))
        # Empty: the policy answers at once.
        self.end_of_thinking = end_of_thinking(self.example, template)

    def __call__(self, question: Question) -> str:
        """Return the prompt's text.

        Raises:
            ValueError: the template refuses the question, or its system message.
        """
        return self.write(question)


def plain_renderer(template: str) -> Renderer:
    """Make the renderer that replaces "{question}" in data.template.

    Raises:
        ValueError: the template shows no question.
    """
    check_place("data.template", template, f", or be {CHAT!r}")

    def write(question: Question) -> str:
        if question.system:
            raise ValueError(
                f"a question of {question.task!r} brings a system message, for which "
                f"data.template = {template!r} has no place; set it to {CHAT!r}"
            )
        # Not str.format: a template may hold braces of its own.
        return template.replace(PLACE, question.text)

    return Renderer(write, template)


def check_place(setting: str, template: str, otherwise: str = "") -> None:
    """Raise ValueError for a template without a placeholder for the question."""
    if PLACE not in template:
        raise ValueError(
            f"{setting} = {template!r} must hold {PLACE!r}, where the question "
            f"goes{otherwise}"
        )


class ThinkingTags(NamedTuple):
    """Texts that a family of models writes around its thinking."""

    begin: str
    end: str


THINKING_TAGS = (
    # Qwen3 and QwQ: https://huggingface.co/Qwen/Qwen3-8B; DeepSeek-R1 and what was
    # distilled from it: https://huggingface.co/deepseek-ai/DeepSeek-R1; SmolLM3:
    # https://huggingface.co/HuggingFaceTB/SmolLM3-3B; OLMo 3 Think:
    # https://huggingface.co/allenai/Olmo-3-7B-Think
    ThinkingTags("<think>", "</think>"),
    # Magistral: https://huggingface.co/mistralai/Magistral-Small-2507
    ThinkingTags("[THINK]", "[/THINK]"),
    # gpt-oss: https://cookbook.openai.com/articles/openai-harmony.  Each message of a
    # reply has a channel: thinking is in "analysis", the answer in "final".
    ThinkingTags("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    # Llama 3, Qwen2.5, SmolLM2, Mistral, OLMo 2 and Gemma 3 have none.
)


def end_of_thinking(prompt: str, template: str) -> str:
    """Return the tag that ends the thinking after a prompt; "" without thinking.

    The prompt may leave thinking open, or switch it off by closing an empty one.  If it
    does neither, a template that contains a family's tags is that of a model which
    opens its thinking by itself.
    """
    text = prompt.rstrip()
    for tags in THINKING_TAGS:
        if text.endswith(tags.begin):
            return tags.end
        if text.endswith(tags.end):
            return ""
    return next((tags.end for tags in THINKING_TAGS if tags.end in template), "")


def find_answer(text: str, *, answer_after: str) -> int | None:
    """Return where an answer begins in a completion: after the last `answer_after`.

    None if the text does not contain it; an empty `answer_after` is at the start.
    """
    place = text.rfind(answer_after) if answer_after else 0
    return None if place < 0 else place + len(answer_after)


def extract_answer(text: str, *, answer_after: str) -> str | None:
    """Return the answer in a completion, without spaces around; None without one."""
    start = find_answer(text, answer_after=answer_after)
    return None if start is None else text[start:].strip()
