"""How questions look to a policy: the rendered text, its tokens, lengths of all."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scalerl_jax.data.chat import CHAT, make_renderer
from scalerl_jax.data.questions import Question
from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer

_CHUNK = 512  # texts tokenised together
_SHOWN = 2000  # characters of a reference; tests can have millions


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """How a question becomes a prompt; without a tokenizer, lengths are characters."""

    render: Callable[[Question], str]
    tokenizer: Tokenizer | None

    @classmethod
    def make(
        cls,
        *,
        template: str,
        system_prompt: str,
        user_template: str,
        enable_thinking: bool,
        tokenizer: Path | None,
    ) -> "View":
        """From the settings of `data`.

        Raises:
            ValueError: they do not fit each other, or cannot be read.
        """
        if template == CHAT and tokenizer is None:
            raise ValueError("--template=chat needs --tokenizer, which brings it")
        if template != CHAT and (system_prompt or user_template != "{question}"):
            raise ValueError(
                f"--system-prompt and --user-template are for --template={CHAT}; put "
                f"their text into --template={template!r}"
            )
        render = make_renderer(
            template=template,
            system_prompt=system_prompt,
            user_template=user_template,
            enable_thinking=enable_thinking,
            tokenizer_directory=tokenizer or "",
        )
        return cls(
            render=render,
            tokenizer=load_tokenizer(tokenizer, must_end=False) if tokenizer else None,
        )

    @property
    def unit(self) -> str:
        """What lengths count."""
        return "tokens" if self.tokenizer else "characters"

    def lengths(self, questions: Iterable[Question]) -> list[int]:
        """Of their prompts."""
        texts = [self.render(question) for question in questions]
        if self.tokenizer:
            return self.tokenizer.count_tokens(texts)
        return [len(text) for text in texts]

    def lines(self, place: int, question: Question, *, ids: bool) -> list[str]:
        """A question as text for people."""
        (length,) = self.lengths([question])
        reference = json.dumps(question.reference, ensure_ascii=False)
        if len(reference) > _SHOWN:
            left = len(reference) - _SHOWN
            reference = f"{reference[:_SHOWN]}... and {left:,} characters more"
        head = f"--- {place}: {question.reference['id']}, {length:,} {self.unit} "
        found = [head.ljust(79, "-"), self.render(question), "--- reference", reference]
        if ids and self.tokenizer:
            tokens = self.tokenizer.encode(self.render(question))
            found += ["--- token ids", " ".join(map(str, tokens))]
        return found


def summary(questions: Sequence[Question], view: View) -> list[str]:
    """A table of the lengths of all prompts, and how many each verifier judges."""
    lengths: list[int] = []
    verifiers: collections.Counter[str] = collections.Counter()
    remaining = iter(tqdm(questions, desc="lengths", unit=" rows", disable=None))
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        lengths += view.lengths(chunk)
        verifiers.update(_kind(question) for question in chunk)
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99])
    table = [("mean", float(np.mean(lengths)))]
    table += list(zip(("50 %", "90 %", "99 %"), map(float, quantiles), strict=True))
    table += [("greatest", float(max(lengths)))]
    return [
        f"{len(lengths):,} questions; {view.unit} of a prompt:",
        *(f"  {label:<10} {value:>10,.1f}" for label, value in table),
        "verifiers:",
        *(f"  {kind:<14} {count:>6,}" for kind, count in verifiers.most_common()),
    ]


def _kind(question: Question) -> str:
    verifier = question.reference["verifier"]
    tests = question.reference.get("tests")
    return f"{verifier}, {tests['kind']}" if tests else verifier
