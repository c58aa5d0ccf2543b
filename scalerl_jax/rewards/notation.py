r"""Notation of answers: one way to write the same thing, and the parts it has.

`plain` takes away what says nothing of a value (\left, \dfrac, \mathbf, spaces,
delimiters, "the answer is") and gives one spelling to what has several.  Nothing is
computed here.
"""

import functools
import re
from collections.abc import Container
from typing import NamedTuple

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_NOISE_AT_END = re.compile(r"(?:\\q?quad|\\\\|\\[,;:! ]|[\s,;]|(?<!\\)\.)+$")
_UNICODE = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm "},
        **{"π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset "},
        **{"°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac12 ", "…": r"\ldots "},
        **{"’": "'", "\u00a0": " ", "~": " "},
    }
)
_TEXTS = "text(?:bf|it|rm|normal|sf|tt|up)?|mbox|hbox|mathrm|operatorname"
_BOLD = "mathbf|boldsymbol|bm|pmb|bold|mathit|mathsf|mathtt|ensuremath"
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # 1\,000 and 1{,}000 and 1,\!000
        (r"(?<=\d)\s*(?:\{,\}|,?\\[,!;: ])(?:\\!)?\s*(?=\d{3}(?!\d))", ""),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"\\(?:(?:display|text|script)style|(?:no)?limits|bf|rm|it)(?![A-Za-z])", ""),
        (rf"\\(?:{_BOLD})(?![A-Za-z])", ""),
        (rf"\\(?:{_TEXTS})\s*\{{", r"\\text{"),
        (r"\\text\{([^{}A-Za-z]*)\}", r"\1"),
        (r"\\q?quad(?![A-Za-z])|(?<!\\)\\[,;:! ]", " "),
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\[dt]binom(?![a-z])", r"\\binom"),
        (r"\\([lr])brace(?![a-z])", r"\\\1b "),
        (r"\\lb ", r"\\{"),
        (r"\\rb ", r"\\}"),
        (r"\\[lr]?vert(?![a-z])", "|"),
        (r"\\([lg])e(?:q|qslant)(?![a-z])", r"\\\1e "),
        (r"\\neq(?![a-z])", r"\\ne "),
        (r"\\[lc]?dots(?![a-z])", r"\\ldots "),
        (r"\\varnothing(?![a-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\%|\s*\b(?:percent|percentage|pct)\b", "%"),
        (r"\\text\{\s*%\s*\}", "%"),
        (r"\\\$|\\pounds(?![a-z])|[$£€]", ""),
        (r"\*\*", "^"),
        (r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|ln|log)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])inf(?:inity|ty)?(?![A-Za-z])", r"\\infty "),
        (r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times "),
        (r"\\text\{[\s,]*(?:and|or|AND|OR)[\s,]*\}", ", "),
        (r"(?<=[\s\d)\]}])(?:and|or|AND|OR)(?![A-Za-z])", ", "),
    )
)
_WHOLE = re.compile(r"\\text\{([^{}]*)\}|\{([^{}]*)\}")
# "The answer is 5", "\\text{Result:} 5"; and that what follows is rounded.
_INTRODUCTION = r"(?:[A-Za-z,']+\s+)*(?:is|are|equals|answer|result)\s*[:=]?\s*"
_INTRODUCED = re.compile(
    rf"\s*(?:\\text\{{\s*(?P<text>{_INTRODUCTION})\}}\s*:?|(?P<words>{_INTRODUCTION}))"
    r"(?=[^A-Za-z]|\b)\s*(?=\S)",
    re.I,
)
_CHANGES = re.compile(r"\b(?:not|no|more|less|most|least|than|never|un\w+)\b", re.I)
_ABOUT = re.compile(
    r"\s*(?:\\approx|\\simeq|\\text\{\s*(?:about|approximately|roughly|around)\s*\}"
    r"|(?:about|approximately|roughly|around)\b)",
    re.I,
)


@functools.lru_cache(maxsize=4096)
def plain(answer: str) -> str:
    """Write an answer in the one way that is compared; texts keep their \\text{}."""
    text = tidy(answer.translate(_UNICODE))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _without_introduction(tidy(text))
    while found := _WHOLE.fullmatch(text):
        text = tidy(found.group(1) or found.group(2) or "")
    return text


def tidy(answer: str) -> str:
    """Return an answer less mathematical delimiters, spaces and stops around it."""
    answer = answer.strip()
    for opening, closing in _DELIMITERS:
        inside = answer[len(opening) : -len(closing)]
        if answer == opening + inside + closing and "$" not in inside:
            answer = inside.strip()
    return _NOISE_AT_END.sub("", answer)


def _without_introduction(text: str) -> str:
    found = _INTRODUCED.match(text)
    if found and not _CHANGES.search(found.group()):
        text = text[found.end() :]
    about = _ABOUT.match(text)
    return text[about.end() :].strip() if about else text


def squeezed(text: str) -> str:
    """Return a text without spaces."""
    return "".join(text.split())


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = {"(", "[", "{", r"\{", r"\langle"}
_CLOSING = {")", "]", "}", r"\}", r"\rangle"}


def split(text: str, separators: Container[str]) -> tuple[list[str], list[str]]:
    """Cut a text at separators outside of all brackets; return those, too."""
    parts, between, depth = [""], [], 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in separators:
            between.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], between


class Bracketed(NamedTuple):
    """A text that stands in brackets as a whole."""

    opening: str
    closing: str
    inside: str

    @property
    def pair(self) -> str:
        """Both brackets."""
        return self.opening + self.closing


def bracketed(text: str) -> Bracketed | None:
    """Return the brackets around all of a text; None without them."""
    tokens, depth = _TOKEN.findall(text), 0
    if not tokens or tokens[0] not in _OPENING or tokens[-1] not in _CLOSING:
        return None
    for place, token in enumerate(tokens, start=1):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and place < len(tokens):
            return None
    return Bracketed(tokens[0], tokens[-1], "".join(tokens[1:-1]).strip())


_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[pb]?matrix|array)\}(?:\{[lcr| ]*\})?(?P<inside>.*)"
    r"\\end\{(?P=kind)\}",
    re.DOTALL,
)


def cells(text: str) -> list[list[str]] | None:
    """Return the cells of a matrix, row by row; None of other texts."""
    around = bracketed(text)
    found = _MATRIX.fullmatch(around.inside if around else text)
    if not found:
        return None
    rows = [row for row in found["inside"].split(r"\\") if row.strip()]
    return [[plain(cell) for cell in row.split("&")] for row in rows]


_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")


def ungrouped(text: str) -> str:
    """Return a text without commas that group digits; in brackets they separate."""
    if any(bracket in text for bracket in ("(", "[", r"\{")):
        return text
    return _GROUPED.sub(lambda found: found.group().replace(",", ""), text)


_POWER = r"(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
_END_OF_VALUE = r"(?:[\d})\]]|\\pi|\\circ)"
_DEGREES = re.compile(
    r"(?P<rest>.+?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:[CF]|\\text\{\s*[CF]\s*\})?"
)
_ANGLE = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_UNIT_IN_TEXT = re.compile(
    rf"(?P<rest>.+?)(?P<unit>(?:[\s/]|\\cdot)*\\text\{{[^{{}}]+\}}{_POWER})+"
)
_UNIT_IN_WORDS = re.compile(
    rf"(?P<rest>.*{_END_OF_VALUE})"
    rf"(?P<unit>\s*[A-Za-z]+(?:[\s/.-]+[A-Za-z]+)*\.?{_POWER})"
)
_UNITS = re.compile(
    r"(?:cm|mm|km|dm|nm|kg|mg|ml|mL|lbs?|oz|ft|in|mi|yd|hrs?|mins?|secs?|sq|cu|mph|kmh|"
    r"kph|rpm|deg|rad|usd|USD|units?|cents?|degrees?|dollars?|inch(?:es)?|feet|foot|"
    r"met(?:er|re)s?|square|cubic|hours?|minutes?|seconds?|days?|years?)(?![A-Za-z])"
)
_NO_UNIT = re.compile(
    r"(?:and|or|if|is|are|for|when|where|mod|base|times|plus|minus|to|not|but|with)\b"
)


def without_unit(text: str) -> tuple[str, bool]:
    """Return a text without the words behind it, and whether these must be units.

    Where they need not be, as the words in "5 apples", they are units after a number.
    """
    found = _DEGREES.fullmatch(text)
    if found and not _ANGLE.search(found["rest"]):
        return found["rest"], True
    found = _UNIT_IN_TEXT.fullmatch(text) or _UNIT_IN_WORDS.fullmatch(text)
    if not found:
        return text, True
    unit = re.sub(r"\\text|[{}/^\s.\d]", " ", found["unit"]).strip()
    known = _UNITS.match(unit) is not None
    if _NO_UNIT.match(unit):
        return text, True
    if not known and "\\text" not in found["unit"]:  # 5x, and 2 abc, are products
        if not re.match(r"\s+[A-Za-z]{4}", found["unit"]):
            return text, True
    return found["rest"].strip(), known
