"""Prompts made from questions, at once or when they are asked for.

Their order is that of `streams`; a file of their pass rates is read here.
"""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from scalerl_jax.data.questions import LazySequence, Question, take
from scalerl_jax.types import Prompt
from scalerl_jax.utils.reading import check_regular, parse_json

Render = Callable[[Question], str]  # the text of a question's prompt
Encode = Callable[[str], list[int]]


def build_prompts(
    questions: Sequence[Question],
    *,
    encode: Encode,
    render: Render,
    max_prompt_tokens: int,
) -> tuple[Prompt, ...]:
    """Return the prompts of epoch 0; prompt_id is the place among `questions`.

    Raises:
        ValueError: there are none, or a prompt is longer than `max_prompt_tokens`, or
            empty.
    """
    if not questions:
        raise ValueError("no questions: data.train_prompts and data.tasks give none")
    prompts = tuple(
        _prompt(question, prompt_id, encode=encode, render=render)
        for prompt_id, question in enumerate(questions)
    )
    for prompt in prompts:
        if not len(prompt.tokens):
            raise ValueError(
                f"prompt {prompt.prompt_id} has no tokens: {prompt.text!r}"
            )
        if len(prompt.tokens) > max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.prompt_id} has {len(prompt.tokens)} tokens, more than "
                f"sampler.max_prompt_tokens = {max_prompt_tokens}: "
                f"{prompt.text[:60]!r}...; raise the limit or leave task "
                f"{prompt.task!r} out of data.tasks"
            )
    return prompts


def _prompt(
    question: Question, prompt_id: int, *, encode: Encode, render: Render
) -> Prompt:
    text = render(question)
    return Prompt(
        prompt_id=prompt_id,
        epoch=0,
        task=question.task,
        text=text,
        tokens=np.asarray(encode(text), np.int32),
        reference=question.reference,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class LazyPrompts(LazySequence[Prompt]):
    """Prompts of a data set, each read, rendered and tokenised when it is indexed.

    prompt_id is the index.
    """

    questions: Sequence[Question]
    places: np.ndarray  # [num_prompts] of questions whose lengths have been checked
    _: dataclasses.KW_ONLY
    task: str
    encode: Encode
    render: Render

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.places)

    def read(self, places: list[int]) -> list[Prompt]:
        """Return the prompts with these ids."""
        found = take(self.questions, self.places[places].tolist())
        return [
            _prompt(
                dataclasses.replace(question, task=self.task),
                prompt_id,
                encode=self.encode,
                render=self.render,
            )
            for prompt_id, question in zip(places, found, strict=True)
        ]


class JoinedPrompts(LazySequence[Prompt]):
    """Prompts of several tasks laid end to end; prompt_id is the place in the whole."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        """Take the parts, whose own ids begin at 0."""
        self.parts = tuple(parts)
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        """Return how many there are."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Prompt]:
        """Yield all of them in order, those of a part read together."""
        every = itertools.chain.from_iterable(self.parts)
        for prompt_id, prompt in enumerate(every):
            yield dataclasses.replace(prompt, prompt_id=prompt_id)

    def read(self, places: list[int]) -> list[Prompt]:
        """Return the prompts with these ids."""
        return [self._made(prompt_id) for prompt_id in places]

    def _made(self, prompt_id: int) -> Prompt:
        part = bisect.bisect_right(self._ends, prompt_id)
        start = self._ends[part] - len(self.parts[part])
        prompt = self.parts[part][prompt_id - start]
        return dataclasses.replace(prompt, prompt_id=prompt_id)


def text_digest(text: str) -> str:
    """Return the SHA-256 by which a file of pass rates knows a prompt's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_pass_rates(path: Path, prompts: Sequence[Prompt]) -> np.ndarray:
    """Read the measured pass rate [num_prompts] of each prompt, from JSON lines.

        {"prompt_id": 17, "pass_rate": 0.25}
        {"sha256": "9f86d081...", "pass_rate": 0.25}

    The second form names a prompt by the SHA-256 of its text in UTF-8, template
    included.  Other keys are left alone, and so are texts that no prompt has.

    Raises:
        ValueError: with the line that is wrong, or the first prompt that has none.
    """
    by_text = {text_digest(prompt.text): place for place, prompt in enumerate(prompts)}
    rates = np.full(len(prompts), np.nan)
    check_regular(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            place, rate = _read_line(line, by_text, num_prompts=len(prompts))
            if place is not None and not np.isnan(rates[place]):
                raise ValueError(f"prompt {place} was named before")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if place is not None:
            rates[place] = rate
    missing = np.flatnonzero(np.isnan(rates))
    if len(missing):
        raise ValueError(
            f"{path} has no pass rate for {len(missing)} of {len(prompts)} prompts; "
            f"the first is prompt {missing[0]}: {prompts[missing[0]].text[:60]!r}; "
            f"measure them too, or lower data.train_prompts"
        )
    return rates


def _read_line(
    line: str, by_text: dict[str, int], *, num_prompts: int
) -> tuple[int | None, float]:
    """Place and pass rate; no place if the text is that of no prompt."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"{row!r} is not an object with a pass_rate")
    rate = row.get("pass_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ValueError(f"pass_rate = {rate!r} must be a number")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"pass_rate = {rate} must be in [0, 1]")
    if ("prompt_id" in row) == ("sha256" in row):
        raise ValueError("it must have prompt_id or sha256, and not both")
    if "sha256" in row:
        return by_text.get(row["sha256"]), float(rate)
    place = row["prompt_id"]
    if type(place) is not int or not 0 <= place < num_prompts:
        raise ValueError(f"prompt_id = {place!r} must be from 0 to {num_prompts - 1}")
    return place, float(rate)
