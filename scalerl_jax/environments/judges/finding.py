r"""Finding of the final answer in a completion: in its last box, or its last number.

Boxes that follow each other with only a separator between are one list.  A box that is
opened and never closed was cut off: then there is no answer, and an earlier box, which
it would have replaced, does not count.  The last number is taken with the formula
around it.
"""

import collections
import re
from typing import Literal, NamedTuple

from scalerl_jax.environments.judges import formulas

AnswerFrom = Literal["boxed", "last_number", "boxed_else_last_number"]

# \boxed{...} or \fbox{...}, and \boxed with one token of TeX or one number behind it;
# where more of a formula follows, as in \boxed 2 \pi, it is taken to the formula's end.
_OPERAND = r"(?:[-+]?\d|\\(?![()\[\]])[A-Za-z]|\(|[A-Za-z](?![A-Za-z]))"
_MORE = (
    rf"\s*(?:[-+*/^_=<>(]|,|\b(?:and|or)\b)\s*{_OPERAND}"
    rf"|\s*(?:[\^_({{]|\\(?![()\[\]])[A-Za-z])"
)
_BOX_OR_BRACE = re.compile(
    r"\\(?:f?boxed|fbox)(?:\s*(?:\{|(?P<bare>(?:[-+]?\d(?:[^\s$\\{},]|,(?=\d))*|[A-Za-z](?![A-Za-z])"
    rf"|\\(?![()\[\]])[A-Za-z]+)(?:(?:{_MORE})[^$\n]*?(?=\$|\\[)\]]|\n|\Z))?))"
    r"|(?P<open>[\s$(]*\Z))"
    r"|\\.|[{}]",
    re.DOTALL,
)
_BETWEEN = re.compile(
    r"(?:[\s$&~]|\\[()\[\],;:! \\]|\\q?quad|\\text\s*\{\s*\}"
    r"|(?P<separator>[,;]|\band\b|\bor\b|\\text\s*\{[\s,]*(?:and|or)[\s,]*\})"
    r"|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)
_NAME_BEFORE = re.compile(r"(?<![\w\\])([A-Za-z](?:_\{?\w+\}?)?)\s*=\s*$")
_MOST_NAME = 100  # characters before a box in which its name is looked for
_POWER_OF_TEN = (
    r"\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)"
)
_NUMBER = re.compile(
    r"(?<![\w.)])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    rf"(?:[eE][-+]?\d+(?!\w)|{_POWER_OF_TEN}|(?: +\d+/\d+|/\d+)?%?)"
    r"|(?<![\w)])[-+]?\.\d+%?"
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<display>.+?)(?<!\\)\$\$|(?<!\\)\$(?P<inline>[^$]+?)(?<!\\)\$"
    # Up to the next opening: many that stay open would each be read to the end.
    r"|(?<!\\)\\\((?P<round>(?:(?!(?<!\\)\\\().)+?)\\\)"
    r"|(?<!\\)\\\[(?P<square>(?:(?!(?<!\\)\\\[).)+?)\\\]",
    re.DOTALL,
)
_SIDES = re.compile(r"=|\\approx(?![a-z])|≈")


class AnswerBox(NamedTuple):
    """A box in a text."""

    start: int  # of \boxed or \fbox
    end: int  # behind its closing brace
    inside: str


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, or None if it is cut off or missing.

    \fbox{...} is a box, too.  Of nested boxes this is the inner one.  For boxes with
    only a separator between them, `\boxed{3}` and `\boxed{4}`, it is the list of their
    contents.
    """
    boxes, cut_off = _boxes(text)
    return None if cut_off or not boxes else _joined(text, boxes)


def _boxes(text: str) -> tuple[list[AnswerBox], bool]:
    """Return the boxes in the order of their starts, and whether the last is open."""
    opened: list[
        tuple[int, int | None]
    ] = []  # the inside begins; its box, if it is one
    boxes: list[AnswerBox] = []
    for found in _BOX_OR_BRACE.finditer(text):
        token = found.group()
        if found["bare"]:
            bare = found["bare"].rstrip(".,;:!?)")
            boxes.append(
                AnswerBox(found.start(), found.start("bare") + len(bare), bare)
            )
        elif token.endswith("{") and (token == "{" or len(token) > 2):
            opened.append((found.end(), None if token == "{" else found.start()))
        elif token == "}" and opened:
            inside, start = opened.pop()
            if start is not None:
                boxes.append(
                    AnswerBox(start, found.end(), text[inside : found.start()])
                )
        elif found["open"] is not None:
            opened.append((found.end(), found.start()))
    boxes.sort()
    last_open = max((start for _, start in opened if start is not None), default=-1)
    return boxes, last_open > (boxes[-1].start if boxes else -1)


def _joined(text: str, boxes: list[AnswerBox]) -> str:
    """Return the last box with those before it that make one list with it."""
    run = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = _BETWEEN.fullmatch(text, box.end, run[0].start)
        if not (between and between["separator"]):
            break
        run.insert(0, box)
    if len({"".join(box.inside.split()) for box in run}) == 1:
        return run[0].inside
    names = [
        _NAME_BEFORE.search(text, max(0, box.start - _MOST_NAME), box.start)
        for box in run
    ]
    if all(names):
        return ", ".join(
            f"{name[1]} = {box.inside}"
            for name, box in zip(names, run, strict=True)
            if name
        )
    return ", ".join(box.inside for box in run)


def _last_number(text: str) -> re.Match[str] | None:
    numbers = collections.deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0] if numbers else None


def last_formula(text: str) -> str | None:
    r"""Return the formula around the last number of a text, or the number.

    In $\frac{3}{4}$ the last number is not the answer; in $x = 5$ the right side is.
    """
    number = _last_number(text)
    if number is None:
        return None
    for found in _FORMULA.finditer(text):
        if found.start() < number.start() < found.end():
            formula = found[found.lastgroup or 0]
            return _SIDES.split(formula)[-1].strip() or formula
    start, end = number.span()
    if text[start - 1 : start] in tuple("^_{\\/") or text[end : end + 1] in tuple(
        "^_}{\\"
    ):
        start = max(text.rfind(space, 0, start) for space in " \n\t") + 1
        end = min(
            (place for space in " \n\t" if (place := text.find(space, end)) >= 0),
            default=len(text),
        )
        return _SIDES.split(text[start:end].strip("*$.,;:!?"))[-1]
    return _SIDES.split(formulas.around(text, start, end))[-1].strip()


def find_answer(text: str, answer_from: AnswerFrom) -> str | None:
    """Return the final answer of a completion, as written; None without one."""
    if answer_from != "last_number":
        boxes, cut_off = _boxes(text)
        if cut_off:
            return None
        if boxes:
            return _joined(text, boxes)
    return last_formula(text) if answer_from != "boxed" else None
