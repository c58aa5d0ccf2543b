"""Questions with choices: the choices are shown with letters, and a letter is right."""

import re
import string
from typing import Any, NamedTuple

from scalerl_jax.data.drafts import Unusable, as_text, first, from_text, is_filled
from scalerl_jax.data.files import Row

COLUMNS = ("choices", "options")
INDICES = ("answer_index", "answer_idx", "correct_index")
_ASK = "Answer with the letter of the right choice."
NO_INDEX = "the answer is an index of choices that the row does not have"
_LETTERS = string.ascii_uppercase
_LABEL = re.compile(r"\s*\(?([A-Z])\s*[).:]\s*")
_WHICH = re.compile(r"\bwhich (?:one )?of (?:the following|these)\b", re.IGNORECASE)
_MOST_INDEX = 4  # of questions with four or five choices


class Choices(NamedTuple):
    """The choices of a row in their order."""

    texts: list[str]
    values: list[Any]  # as the row has them: texts or numbers
    labels: list[str]  # the row's own, in upper case; [] without any

    @property
    def numbered(self) -> bool:
        """Whether the row's own labels are numbers, so that a number is one of them."""
        return bool(self.labels) and all(map(str.isdecimal, self.labels))


def read_choices(row: Row, text: str) -> Choices | None:
    """Return a row's choices, or None without any, or if the question's text has them.

    They are a list of texts or numbers, {"A": text, ...} or {"1": text, ...}, or ARC's
    {"label": [...], "text": [...]}; each form may also be a JSON text.
    """
    given = from_text(first(row, *COLUMNS))
    if isinstance(given, str) and is_filled(given) and given.strip() not in text:
        raise Unusable("the choices are one text, which is not read")
    labels: list[str] = []
    if isinstance(given, dict):
        labels, given = _labelled(given)
    if not isinstance(given, list):
        return None
    count = next((n for n in range(len(given), 0, -1) if given[n - 1] is not None), 0)
    given, labels = given[:count], labels[:count]  # without the empty ones of a table
    if not given:
        return None
    if not 2 <= len(given) <= len(_LETTERS):
        raise Unusable("the choices are not between 2 and 26")
    if any(isinstance(each, bool | dict | list | None) for each in given):
        raise Unusable("the choices are no texts")
    texts = [
        _bare(as_text(each), letter)
        for each, letter in zip(given, _LETTERS, strict=False)
    ]
    return Choices(texts, given, labels)


def _labelled(given: dict[Any, Any]) -> tuple[list[str], list[Any] | None]:
    """Return the labels of an object of choices, and these; None: it has no choices."""
    texts, labels = given.get("text"), given.get("label")
    if isinstance(texts, list):
        named = [_label(each) for each in labels] if isinstance(labels, list) else []
        if named and len(named) != len(texts):
            raise Unusable("the choices and their labels differ in number")
        return named, texts
    keys = {str(key).strip().upper(): key for key in given}
    are_letters = all(re.fullmatch("[A-Z]", key) for key in keys)
    are_numbers = all(re.fullmatch(r"[0-9]{1,2}", key) for key in keys)
    if len(keys) == len(given) and (are_letters or are_numbers):
        order = sorted(keys, key=int if are_numbers else str)
        return order, [given[keys[key]] for key in order]
    if any(type(each) in (str, int, float) for each in given.values()):
        raise Unusable("the choices have names that are no letters or numbers")
    return [], None  # settings, perhaps


def _label(written: Any) -> str:
    """Return a label without its brackets, in upper case."""
    text = str(written).strip().upper()
    found = re.fullmatch(r"\(?(\w+)\s*[).:]?", text)
    return found[1] if found else text


def _bare(choice: str, letter: str) -> str:
    """Return a choice without the letter that it may begin with."""
    label = _LABEL.match(choice)
    return choice[label.end() :] if label and label.group(1) == letter else choice


def letter_of(row: Row, choices: Choices, answer: Any) -> str:
    """Return the letter of the right choice.

    A label of the row's own is one.  Else a whole number is an index from 0 of texts,
    as in MMLU, and may be one of several numbers; a text is a letter, one of the
    choices, or an index where it cannot be one of the choices.  A letter that is also
    the text of another choice may be either.
    """
    name = ""
    if answer is None:
        names = ("answerKey", "correct", *INDICES)
        name = next((each for each in names if row.get(each) is not None), "")
        answer = row.get(name)
    if answer is None:
        raise Unusable("no answer to the choices")
    written, count = as_text(answer).strip(), len(choices.texts)
    same = set(_places(written, choices.texts))
    index = {int(written)} if re.fullmatch(r"[0-9]{1,2}", written) else set()
    index = {place for place in index if place < count}
    if name in INDICES and type(answer) is int:
        return _only(index)
    if _label(written) in choices.labels:
        place = choices.labels.index(_label(written))
        by_text = same if choices.numbered and name != "answerKey" else set()
        return _only({place} | by_text)
    letter = re.fullmatch(r"\(?([A-Z])\s*[).:]?", written)
    lettered = not choices.labels or choices.numbered  # by us alone
    if letter and lettered and letter[1] in _LETTERS[:count]:
        by_text = same if name != "answerKey" else set()
        return _only({_LETTERS.index(letter[1])} | by_text)
    if choices.numbered:
        return _only(same)
    if index and type(answer) is int and all(map(_is_text, choices.values)):
        return _only(index)
    return _only(same | index)


def _only(places: set[int]) -> str:
    """Return the letter of the only place."""
    if len(places) > 1:
        raise Unusable("the answer may be several of the choices")
    if not places:
        raise Unusable("the answer names none of the choices")
    return _LETTERS[places.pop()]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _places(written: str, texts: list[Any]) -> list[int]:
    """Return the indices of a text in a list."""
    return [place for place, each in enumerate(texts) if str(each).strip() == written]


def show(text: str, choices: Choices) -> str:
    """Return the question with its choices and their letters, unless it has them."""
    if not text.strip():
        raise Unusable("the question is empty")
    lettered = list(zip(_LETTERS, choices.texts, strict=False))
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
