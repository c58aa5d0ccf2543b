"""Drafts of questions, and the functions with which readers of rows make them.

A reader returns a `Draft`, or raises the reason: `Malformed` if the row is not in the
form, which hints at a wrong file, `Unusable` if it is but cannot be asked or judged.
The message of both is the reason alone, so that rows can be counted by it.  `Refused`
ends the reading of the file.
"""

import ast
import math
import re
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

from scalerl_jax.data.files import Row
from scalerl_jax.environments.judges.finding import last_boxed
from scalerl_jax.formats.reading import parse_json

_HEADING = re.compile(r"[^\W\d_]{2}")  # begins with a word
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
# "$$" and "\boxed{}" are empty; "\{\}" is a set.
_EMPTY = re.compile(r"(?:[\s$]|\\(?:boxed|text|mathrm|textbf)\s*\{\s*\})*")
_SETTING = re.compile(r"\\(?:boxed|text|mathrm|textbf)\b|[\s$\\{}.]")
# Written instead of an answer: "proof" and "notfound" in NuminaMath-1.5, the others in
# tables.  "None" is not included: it is the answer of some questions.
_NO_ANSWERS = frozenset(
    ("proof", "notfound", "not found", "nan", "null", "n/a", "<na>", "no answer", "?")
)
_NO_ANSWER = "the answer is {!r}, which is no answer"
# Lists and objects as Python literals, as in tables of pandas.
_PYTHON = re.compile(r"\s*[\[{]\s*[\[{]?\s*'")
_LONGEST_PYTHON = 2**20  # characters
_LONGEST_WORD = 40  # characters with the typesetting around it


class Draft(NamedTuple):
    """A question whose reference is not checked yet."""

    text: str
    reference: dict[str, Any]
    identity: str = ""  # the data set's own; empty: its rows have none
    system: str = ""


class Unusable(ValueError):
    """A reason for which a row in the right form cannot become a question."""


class Malformed(ValueError):
    """A reason for which a row is not in the data set's form."""


class Refused(ValueError):
    """A reason for which no row of the file may be left out in silence."""


Reader = Callable[[Row], Draft]


def first(row: Row, *names: str) -> Any:
    """Return the first of these fields that exists; None counts as missing."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def field(row: Row, *names: str, kind: type = str) -> Any:
    """Return the first of these fields; raise Malformed unless it has the type."""
    found = first(row, *names)
    if found is None:
        raise Malformed(f"field {' or '.join(map(repr, names))} is missing")
    if not isinstance(found, kind):
        name = next(name for name in names if row.get(name) is not None)
        raise Malformed(
            f"field {name!r} is of type {type(found).__name__}, not {kind.__name__}"
        )
    return found


def identity(row: Row, *names: str) -> str:
    """Return the row's own id, or "" if it has none."""
    found = first(row, *names)
    return str(found) if isinstance(found, str | int) else ""


def is_filled(value: Any) -> bool:
    """Return whether a column holds something: no null, also not one in a text."""
    return bool(value) and not (
        isinstance(value, str) and value.strip() in ("", "[]", "{}", "null", "None")
    )


def check_text(*texts: str) -> None:
    """Raise Unusable for texts that are not UTF-8: JSON's escapes can make them."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise Unusable("it holds half a character of UTF-16") from error


def as_text(value: Any) -> str:
    """Return a value of a cell as text: 142.0 is how tables write 142."""
    if isinstance(value, float) and value.is_integer():
        return str(int(Decimal(repr(value))))  # 6.02e23 has no digits behind its 2
    return str(value)


def maths(text: str, answer: Any, **more: str) -> Draft:
    """Make a question with an answer: a text, a number, or a list of right ones."""
    if not text.strip():
        raise Unusable("the question is empty")
    written = []
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise Malformed(f"the answer is of type {type(each).__name__}")
        if isinstance(each, float) and not math.isfinite(each):
            if math.isnan(each):
                raise Unusable(_NO_ANSWER.format("nan"))
            raise Malformed("the answer is no finite number")
        written.append(as_text(each))
    if not written:
        raise Unusable("the answer is empty")
    for each in written:
        _check_answer(each)
    kept = written if isinstance(answer, list) else written[0].strip()
    return Draft(text, {"verifier": "math", "answer": kept}, **more)


def _check_answer(answer: str) -> None:
    """Raise Unusable for an empty answer, or a word that is written instead of one."""
    answer = answer.strip()
    if len(answer) > _LONGEST_WORD:
        return
    if _EMPTY.fullmatch(answer):
        raise Unusable("the answer is empty")
    word = _SETTING.sub(" ", answer).strip().lower()
    if word in _NO_ANSWERS:
        raise Unusable(_NO_ANSWER.format(word))


def program(text: str, tests: dict[str, Any], **more: str) -> Draft:
    """Make a question that asks for a program."""
    if not text.strip():
        raise Unusable("the question is empty")
    return Draft(text, {"verifier": "code", "tests": tests}, **more)


def worked_answer(worked: str) -> str | None:
    r"""Return a solution's answer, or None without one.

    It is the line after the last "####", else in the last \boxed{}.  With text below it
    "####" may also begin a heading of Markdown: one of words, or one in a solution that
    has a \boxed{}, is no answer.
    """
    _, marked, behind = worked.rpartition("####")
    answer, _, below = behind.strip().partition("\n")
    boxed = last_boxed(worked) if below or not marked else None
    if not marked or boxed is not None or (below and _HEADING.match(answer)):
        return boxed
    bracketed = answer.lstrip(" $\\").startswith(("(", "[", "{"))  # (3,125)
    return answer if bracketed else _THOUSANDS.sub("", answer)


def from_json(text: Any, reason: str) -> Any:
    """Return the value of a JSON text; raise Unusable(reason) if it is invalid."""
    try:
        return parse_json(text)
    except (ValueError, TypeError) as error:
        raise Unusable(reason) from error


def from_text(given: Any) -> Any:
    """Return the list or object in a text, written as JSON or as a Python literal.

    Anything else is returned unchanged.
    """
    if not isinstance(given, str) or given.lstrip()[:1] not in ("[", "{"):
        return given
    try:
        value = parse_json(given)
    except ValueError:
        value = _from_python(given)
    return value if isinstance(value, list | dict) else given


def _from_python(text: str) -> Any:
    """Return the value of a Python literal, or None if the text is not one."""
    if len(text) > _LONGEST_PYTHON or not _PYTHON.match(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in the texts
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
