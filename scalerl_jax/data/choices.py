"""Questions with choices: the choices are shown with letters, and a letter is right."""

import re
import string
from typing import Any

from scalerl_jax.data.drafts import Unusable, first, from_text
from scalerl_jax.data.files import Row

COLUMNS = ("choices", "options")
INDICES = ("answer_index", "answer_idx", "correct_index")
_ASK = "Answer with the letter of the right choice."
NO_INDEX = "the answer is an index of choices that the row does not have"
_LETTERS = string.ascii_uppercase
_LABEL = re.compile(r"\s*\(?([A-Z])\s*[).:]\s*")
_WHICH = re.compile(r"\bwhich (?:one )?of (?:the following|these)\b", re.IGNORECASE)
_MOST_INDEX = 4  # of questions with four or five choices


def read_choices(row: Row) -> list[str] | None:
    """Return the texts of a row's choices in their order, or None without any.

    They are a list of texts or numbers, {"A": text, ...}, or ARC's {"label": [...],
    "text": [...]}; each form may also be a JSON text.
    """
    given = from_text(first(row, *COLUMNS))
    if isinstance(given, dict):
        texts = given.get("text")
        lettered = list(given) == list(_LETTERS[: len(given)])
        given = texts if isinstance(texts, list) else list(given.values())
        if not (lettered or isinstance(texts, list)):
            return None
    if not isinstance(given, list) or not given:
        return None
    if not 2 <= len(given) <= len(_LETTERS):
        raise Unusable("the choices are not between 2 and 26")
    if any(isinstance(each, bool | dict | list | None) for each in given):
        raise Unusable("the choices are no texts")
    return [
        _bare(str(each), letter) for each, letter in zip(given, _LETTERS, strict=False)
    ]


def _bare(choice: str, letter: str) -> str:
    """Return a choice without the letter that it may begin with."""
    label = _LABEL.match(choice)
    return choice[label.end() :] if label and label.group(1) == letter else choice


def letter_of(row: Row, choices: list[str], answer: Any) -> str:
    """Return the letter of the right choice.

    A whole number is an index from 0, as in MMLU; a text is a letter, a label of the
    row's own, one of the choices, or an index where it cannot be one of the choices.
    """
    if answer is None:
        answer = first(row, "answerKey", "correct", *INDICES)
    if answer is None:
        raise Unusable("no answer to the choices")
    if type(answer) is int and 0 <= answer < len(choices):
        return _LETTERS[answer]
    written = str(answer).strip()
    letter = re.fullmatch(r"\(?([A-Z])\s*[).:]?", written)
    if letter and letter.group(1) in _LETTERS[: len(choices)]:
        return letter.group(1)
    given = from_text(first(row, *COLUMNS))
    labels = given.get("label") if isinstance(given, dict) else None
    if isinstance(labels, list) and (found := _places(written, labels)):
        return _LETTERS[found[0]]
    places = set(_places(written, choices))
    if re.fullmatch(r"\d{1,2}", written) and int(written) < len(choices):
        places.add(int(written))
    if len(places) > 1:
        raise Unusable("the answer may be several of the choices")
    if not places:
        raise Unusable("the answer names none of the choices")
    return _LETTERS[places.pop()]


def _places(written: str, texts: list[Any]) -> list[int]:
    """Return the indices of a text in a list."""
    return [place for place, each in enumerate(texts) if str(each).strip() == written]


def show(text: str, choices: list[str]) -> str:
    """Return the question with its choices and their letters, unless it has them."""
    if not text.strip():
        raise Unusable("the question is empty")
    lettered = list(zip(_LETTERS, choices, strict=False))
    shown = all(
        choice.strip() in text and re.search(rf"(?<!\w){letter}\s*[).:]", text)
        for letter, choice in lettered
    )
    lines = [f"{letter}. {choice}" for letter, choice in lettered]
    return "\n".join([text.rstrip(), "", *([] if shown else [*lines, ""]), _ASK])


def check_no_index(row: Row, text: str, answer: Any) -> None:
    """Raise Unusable for a number that can only be the index of a choice.

    Texts are not checked: an answer to such a question of mathematics is a text.
    """
    emptied = any(name in row for name in COLUMNS)
    asks = emptied or _WHICH.search(text)
    if type(answer) is int and 0 <= answer <= _MOST_INDEX and asks:
        raise Unusable(NO_INDEX)
