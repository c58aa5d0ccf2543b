"""Choice of a data set's questions: to train on, or held out.

One pass over a data set, in a given order, leaves out and counts duplicates, questions
that overlap with evaluation prompts, and those that are too long.  Questions are not
kept in memory, only the indices of the selected ones, whose prompts are made on access.
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.data.prompts import Encode, Render, make_prompt
from scalerl_jax.data.questions import LazySequence, Question, take
from scalerl_jax.run.progress import Progress
from scalerl_jax.types import Prompt

HELD_OUT, TRAIN = 3, 4  # purposes of the draws, beside those of `tasks` and `prompts`
_CHUNK = 1024  # questions that are read and tokenised together
# A phrase is this number of words in a row that more evaluation prompts have than this
# number and this share.
_PHRASE_WORDS, _PHRASE_PROMPTS, _PHRASE_SHARE = 6, 3, 0.01
_WORDING_SAMPLE = 1000  # questions in which the common wording is searched
_LEAST_SAMPLE = 20  # fewer questions may share what they ask
_MATH_MODE = re.compile(r"\\[()\[\]]")
_WORD = re.compile(r"[^\W_]+")
_NUMBER = r"\d+(?:[.:]\d+)*"
# A number, a letter or both, as 2n: what a factorial or a derivative is of.
_OPERAND = rf"(?<![^\W_])(?:{_NUMBER}[^\W\d_]?|[^\W\d_])"
_TOKENS = (
    r"[^\W\d_]{2,}(?![^\W_])"  # most words, at once
    rf"|!=|(?:{_OPERAND}|\))!+(?!=)"  # 5!, n!, (n + 1)!
    rf"|(?:(?<!'){_OPERAND}|\))'+(?![^\W\d_])"  # f'(2), but no 'b'
    r"|[^\W_]+(?:(?<=\d)[.:](?=\d)[^\W_]+)*"  # words and numbers
    # Any other sign that is not punctuation: operators and brackets are not.
    r"|[^\w\s.,;:!?'\"`“”‘’«»…–—$\\{}\[\]#&~]"
)
_TOKEN = re.compile(_TOKENS)
_LATEX = re.compile(r"\$|\\(?!boxed\b)")
_TOKEN_OR_DRAWING = re.compile(
    r"(?<!\S)(?=\S*[#~_.{}\[\]])(?:[^\w\s]|_)+(?!\S)"  # a row of signs
    rf"|{_TOKENS}|[#~_&.{{}}\[\]]{{2,}}|[#~_&]"
)
_QUOTES = str.maketrans("‘’", "''")


def normalized(text: str) -> str:
    """Return a question's text in a form that does not depend on its typesetting.

    Unicode's NFKC, lower case; words, operators and round brackets with one space
    between them, other punctuation left out: "3 + 4" and "3 - 4" stay two questions,
    and so do "5!" and "5", "f'(2)" and "f(2)", "1.5" and "1 5".
    """
    return " ".join(_TOKEN.findall(_lowered(text)))


def drawn(text: str) -> str:
    """Return a normalised text with what other signs draw, where they typeset nothing.

    Mazes, boards, nested lists and code differ in them: "#..#" and "#.##", "X _" and
    "_ X", "[[1], 2]" and "[1, [2]]".  With LaTeX in the text it is `normalized`.
    """
    tokens = _TOKEN if _LATEX.search(text) else _TOKEN_OR_DRAWING
    return " ".join(tokens.findall(_lowered(text)))


def _lowered(text: str) -> str:
    text = _MATH_MODE.sub(" ", unicodedata.normalize("NFKC", text).lower())
    return text.translate(_QUOTES)


def _hash(key: str) -> int:
    """Return a 64-bit hash: two of a million texts collide with probability 3e-8."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Asked(NamedTuple):
    """A question in the forms that are compared with others."""

    whole: str  # normalised, with its system message
    core: str  # without the `Wording` of its data set, and without that message
    drawn: str  # the whole with what its signs draw

    @property
    def plain(self) -> set[str]:
        """Forms that equal another question's whole, whatever its signs draw."""
        forms = {self.core} - {self.whole}
        return forms | {self.whole} if self.drawn == self.whole else forms


@dataclasses.dataclass(frozen=True)
class Wording:
    """Words of a data set before and after every question: instructions to solve it.

    Without these words a question may equal one of a data set without instructions.
    """

    before: str = ""  # normalised, with the space after it
    after: str = ""

    @classmethod
    def of(cls, questions: Sequence[Question]) -> "Wording":
        """Return the common start and end of up to 1000 evenly spread questions."""
        count = min(len(questions), _WORDING_SAMPLE)
        if count < _LEAST_SAMPLE:
            return cls()
        places = np.linspace(0, len(questions) - 1, count).astype(int).tolist()
        found = [normalized(each.compared).split() for each in take(questions, places)]
        before = os.path.commonprefix(found)
        after = os.path.commonprefix([words[::-1] for words in found])
        return cls(
            before="".join(f"{word} " for word in before),
            after="".join(f" {word}" for word in reversed(after)),
        )

    def read(self, text: str, system: str = "") -> Asked:
        """Return a question of the data set in the forms that are compared."""
        alone, with_system = normalized(text), f"{system}\n{text}" if system else text
        core = alone.removeprefix(self.before).removesuffix(self.after)
        whole = normalized(with_system) if system else alone
        return Asked(whole, core or alone, drawn(with_system))


class Overlap:
    """Index of evaluation prompts, to find training prompts that overlap with them.

    A training prompt overlaps if it equals an evaluation prompt, where one of the two
    may be without the wording of its data set and its system message (not both: without
    wordings "What is 3 + 1?" and "What is 3 * 1?" may both be "3"), or if they share
    `ngram` words in a row.
    Phrases do not count: six words in a row that more than three evaluation prompts
    have, and more than 1 % of them, such as "m and n are relatively prime".
    """

    def __init__(self, asked: Iterable[Asked], *, ngram: int) -> None:
        """Index the questions to evaluate on; `ngram` = 0: only equal ones overlap."""
        evaluation = set(asked)
        self._ngram = ngram
        self._drawn = {_hash(each.drawn) for each in evaluation}
        self._wholes = {_hash(each.whole) for each in evaluation}
        self._plain = {_hash(form) for each in evaluation for form in each.plain}
        self._ngrams: set[str] = set()
        size = min(ngram, _PHRASE_WORDS)
        held = collections.Counter(
            each for asked in evaluation for each in set(_ngrams(asked.core, size))
        )
        limit = max(_PHRASE_PROMPTS, _PHRASE_SHARE * len(evaluation))
        phrases = {each for each, count in held.items() if count > limit}
        for _, core, _ in evaluation:
            is_phrase = np.array([each in phrases for each in _ngrams(core, size)])
            for start, each in enumerate(_ngrams(core, ngram)):
                if not is_phrase[start : start + ngram - size + 1].any():
                    self._ngrams.add(each)

    def reason(self, asked: Asked) -> str:
        """Return the reason to drop a training prompt; "": it is kept."""
        if _hash(asked.drawn) in self._drawn or _hash(asked.whole) in self._plain:
            return "equals_evaluation"
        if not self._wholes.isdisjoint(map(_hash, asked.plain)):
            return "equals_evaluation"
        if self._ngrams and not self._ngrams.isdisjoint(
            _ngrams(asked.core, self._ngram)
        ):
            return "shares_ngram"
        return ""


def _ngrams(key: str, size: int) -> list[str]:
    """Return every `size` words in a row, without operators; [] for size 0."""
    words = _WORD.findall(key)
    if not size or len(words) < size:
        return []
    # Slices of one string: a third of the time of joining words.
    text = " ".join(words)
    stops = list(itertools.accumulate(len(word) + 1 for word in words))
    return [
        text[start : stop - 1]
        for start, stop in zip([0, *stops], stops[size - 1 :], strict=False)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedQuestions:
    """The questions of a data set that were kept, and counts of the others."""

    places: np.ndarray  # int64 [kept], ascending
    looked_at: int
    dropped: dict[str, int]  # by reason
    longest: int  # tokens of the longest prompt, dropped ones included
    examples: tuple[int, ...]  # index of one kept question for each verifier
    sha256: str  # of what was kept

    def counts(self) -> dict[str, Any]:
        """Return the counts and the digest for a run's report, as JSON values."""
        return {
            "looked_at": self.looked_at,
            "kept": len(self.places),
            "dropped": self.dropped,
            "sha256": self.sha256,
        }


def draw_order(count: int, *, seed: int, purpose: int) -> np.ndarray:
    """Return the indices 0 to `count` - 1 of a data set, shuffled."""
    random = np.random.PCG64([seed, purpose])
    return np.random.Generator(random).permutation(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sieve:
    """Conditions that a question must meet to become a prompt."""

    # Tokens of their prompts; an upper bound is enough if it is at most `max_tokens`.
    count_tokens: Callable[[list[Question]], list[int]]
    max_tokens: int
    progress: Progress = dataclasses.field(default_factory=Progress)
    overlap: Overlap | None = None
    # Hashes of kept questions, of any data set so far; None: duplicates are kept.
    seen: set[int] | None = None

    def reason(self, asked: Asked, tokens: int) -> str:
        """Return the reason to drop a question; "": it is kept."""
        if tokens > self.max_tokens:
            return "over_long"
        if not tokens:
            return "empty"
        if self.seen is not None and _hash(asked.drawn) in self.seen:
            return "duplicate"
        return self.overlap.reason(asked) if self.overlap else ""

    def select(
        self,
        questions: Sequence[Question],
        order: np.ndarray,
        *,
        count: int | None,
        wording: Wording,
    ) -> SelectedQuestions:
        """Select the first `count` along `order` that pass; None: all of them."""
        hashes: dict[int, int] = {}  # of what is kept, by place
        examples: dict[str, int] = {}
        dropped: collections.Counter[str] = collections.Counter()
        looked_at = longest = 0
        for place, question, tokens in self._read(questions, order):
            if len(hashes) == count:
                break
            looked_at += 1
            longest = max(longest, tokens)
            asked = wording.read(question.compared, question.system)
            if reason := self.reason(asked, tokens):
                dropped[reason] += 1
                continue
            hashes[place] = _hash(asked.drawn)
            if self.seen is not None:
                self.seen.add(hashes[place])
            examples.setdefault(str(question.reference.get("verifier")), place)
        places = np.array(sorted(hashes), np.int64)
        kept = np.array([hashes[place] for place in places.tolist()], np.uint64)
        return SelectedQuestions(
            places=places,
            looked_at=looked_at,
            dropped=dict(dropped),
            longest=longest,
            examples=tuple(examples.values()),
            sha256=hashlib.sha256(kept.tobytes()).hexdigest(),
        )

    def _read(
        self, questions: Sequence[Question], order: np.ndarray
    ) -> Iterator[tuple[int, Question, int]]:
        """Yield the index of each question, the question and its prompt's length."""
        with self.progress.bar("reading prompts: question", total=len(order)) as bar:
            for start in range(0, len(order), _CHUNK):
                places = order[start : start + _CHUNK].tolist()
                read = take(questions, places)
                yield from zip(places, read, self.count_tokens(read), strict=True)
                self.progress.advance(bar, len(places))


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
        """Return the number of prompts."""
        return len(self.places)

    def read(self, places: list[int]) -> list[Prompt]:
        """Return the prompts with these ids."""
        found = take(self.questions, self.places[places].tolist())
        return [
            make_prompt(
                dataclasses.replace(question, task=self.task),
                prompt_id,
                encode=self.encode,
                render=self.render,
            )
            for prompt_id, question in zip(places, found, strict=True)
        ]
