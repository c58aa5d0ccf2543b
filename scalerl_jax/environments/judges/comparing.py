r"""Comparison of answers: whether two are equal, however they are written.

Answers are taken apart: lists and sets, points and intervals, equations and
inequalities, matrices.  Their parts are compared as words or by `values`.  What these
cannot read is left to computer algebra, which takes a hundred times as long.
With all of these the file is above 400 lines.
"""

import functools
import itertools
import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase
from sympy.logic.boolalg import BooleanAtom

from scalerl_jax.environments.judges.grammar import has_names
from scalerl_jax.environments.judges.notation import (
    Bracketed,
    bracketed,
    cells,
    plain,
    split,
    squeezed,
    ungrouped,
)
from scalerl_jax.environments.judges.units import without_unit
from scalerl_jax.environments.judges.values import (
    Value,
    evaluate,
    is_about,
    is_bounded,
    proportional,
    same_value,
)

MAX_CHARACTERS = 1000  # of an answer; the longest of MATH-500 has 53
_MAX_DEPTH = 30  # depth of nested brackets: the grammars are read recursively

_SEPARATORS = {",", ";", r"\lor"}
_RELATIONS = {
    **{r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!="},
    **{name: name for name in ("=", "<", ">", r"\in", r"\approx", r"\cup", r"\cap")},
    **{name: name for name in (r"\setminus", r"\equiv", r"\pmod", r"\mid", r"\notin")},
    **{name: name for name in (r"\parallel", r"\perp", r"\cong", r"\sim", r"\to")},
}
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_ASSIGNING = {"=", r"\in"}


def same_answer(expected: str, found: str) -> bool | None:
    """Return whether two answers are equal; None where one of them cannot be read."""
    return _same(plain(expected), plain(found))


def is_readable(answer: str) -> bool:
    """Return whether other answers can be compared with this one."""
    text = plain(answer)
    return _is_small(text) and _is_readable(text)


def _is_readable(text: str) -> bool:
    if _words(text) or _moment(text) or _quantity(text) or _is_phrase(text):
        return True
    around = bracketed(text)
    parts = _listed(around.inside if around else ungrouped(text))
    sides, _ = split(text, _RELATIONS)
    divided = parts if len(parts) > 1 else sides
    if len(divided) > 1 and all(map(_is_readable, divided)):
        return True
    return _in_base(text) is not None or _expression(text) is not None


def _is_small(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(text) <= MAX_CHARACTERS and deepest <= _MAX_DEPTH


@functools.lru_cache(maxsize=4096)
def _same(expected: str, found: str) -> bool | None:
    """Return whether two plain texts, or parts of them, are equal."""
    if squeezed(expected) == squeezed(found):
        return True
    if not (_is_small(expected) and _is_small(found)):
        return None
    for rule in _RULES:
        verdict = rule(expected, found)
        if verdict is not None:
            return verdict
    return None


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    known = list(verdicts)
    return None if None in known and False not in known else all(known)


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    known = list(verdicts)
    return None if None in known and True not in known else any(known)


# Words.

_WORD = re.compile(
    r"\b(?:[A-Za-z]{4,}|[A-Z]{3}|[A-Z](?:[a-z][aeiouy]|[aeiouy][a-z])|No"
    r"|yes|no|odd|one|two|six|ten|red|all|any)\b",
    re.ASCII,
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9\s.,:;'\"!?()&-]*", re.ASCII)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def _bare(text: str) -> str:
    """Return a text without the \\text{} around its words."""
    return _TEXT.sub(r" \1 ", text)


def _letters(text: str) -> str | None:
    """Return the letters and digits of a text without mathematics."""
    bare = _bare(text).strip(" ()")
    if not _WORDS.fullmatch(bare):
        return None
    return "".join(filter(str.isalnum, bare)).casefold()


def _words(text: str) -> str | None:
    """Return the letters of a text that is words, not a product of variables."""
    bare = _bare(text)
    typeset = bare != text and re.search(r"[A-Za-z]{2}", bare)
    return _letters(text) if typeset or _WORD.search(bare) else None


def _as_words(expected: str, found: str) -> bool | None:
    if not (_words(expected) or _words(found)):
        return None
    mine, theirs = _letters(expected), _letters(found)
    return None if mine is None or theirs is None else mine == theirs


def _is_phrase(text: str) -> bool:
    """Return whether words are a part of an answer, as in `n \\text{ is odd}`."""
    bare = re.sub(r"\\(?!text)[A-Za-z]+", " ", text)
    words = re.search(r"\\text\{[^{}]*[A-Za-z]{2}|(?<![\\A-Za-z])[A-Za-z]{5}", bare)
    return words is not None and _quantity(text) is None


def _as_phrases(expected: str, found: str) -> bool | None:
    if not (_is_phrase(expected) or _is_phrase(found)):
        return None
    return _phrase(expected) == _phrase(found)


def _phrase(text: str) -> str:
    """Return a phrase without what separates its words: 1.2, x^{12} and X stay."""
    words = re.sub(r"[.,](?!\d)", " ", _bare(text))
    return re.sub(r"[A-Za-z]{2,}", lambda found: found[0].lower(), squeezed(words))


# Dates and clock times: their signs are no operations.

_DATE = re.compile(r"(\d{4})-(\d\d?)-(\d\d?)", re.ASCII)
_CLOCK = re.compile(
    r"(\d{1,2})(?::(\d\d)(?::(\d\d))?)?\s*(?:([ap])\.?\s*m\b\.?)?",
    re.IGNORECASE | re.ASCII,
)
_LED_BY_ZERO = re.compile(r"(?<!\d)0\d", re.ASCII)


class _Moment(NamedTuple):
    """A date or a clock time in numbers, and whether it can be nothing else."""

    fields: tuple[int, ...]
    certain: bool


def _moment(text: str) -> _Moment | None:
    """Return a date or a time; one before or after noon is in hours of the day."""
    text = _bare(text).strip()
    if date := _DATE.fullmatch(text):
        fields = tuple(map(int, date.groups()))
        return _Moment(fields, bool(_LED_BY_ZERO.search(text)))
    clock = _CLOCK.fullmatch(text)
    if not clock or not (clock[2] or clock[4]):
        return None
    hour, minute, second = (int(each or 0) for each in clock.groups()[:3])
    if clock[4]:
        hour = hour % 12 + 12 * (clock[4] in "pP")
    certain = bool(clock[2] and (clock[4] or _LED_BY_ZERO.search(text)))
    fields = (hour, minute, second) if clock[3] else (hour, minute)
    return _Moment(fields, certain)


def _as_moments(expected: str, found: str) -> bool | None:
    mine, theirs = _moment(expected), _moment(found)
    if mine and theirs:
        return mine.fields == theirs.fields
    return False if any(each and each.certain for each in (mine, theirs)) else None


# Options of multiple choice.

_LETTER = re.compile(r"\(?\s*([A-J])\s*\)?")
_LABEL = re.compile(
    r"\s*(?:(?:option|choice)\s+(?:\(([A-J])\)|([A-J])(?![A-Za-z]))"
    r"|\(\s*([A-J])\s*\)|([A-J])\s*[).:])(?:\s*[).:])?(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
# A letter alone; "A" only where it is no article.
_ANOTHER_LABEL = re.compile(
    r"(?<![A-Za-z\\])[B-J](?![A-Za-z])|^A$|[,/&(]\s*A(?![A-Za-z])|\([a-j]\)"
    r"|(?:\b(?:or|and)|,)\s+(?:[a-j]|A)(?![A-Za-z])|\b(?:not|wrong|incorrect)\b"
)
# (A)^2, (B)-1 and (C) = 5 are formulas; (B) -1 is an option with its text.
_OPERATED = re.compile(
    r"\s*(?:[\^_/+*=!'<>&|]|-\s|\\(?:cdot|times|cup|cap|le|ge|in|div|setminus)(?![a-z]))"
    r"|[-\w(]"
)


def _as_options(expected: str, found: str) -> bool | None:
    """Compare labels where the reference is one: "(B) 14" is B, whatever follows."""
    letter = _LETTER.fullmatch(_bare(expected))
    label = _LABEL.fullmatch(_bare(found))
    if not (letter and label):
        return None
    named, rest = next(filter(None, label.groups()[:-1])), label["rest"]
    if _OPERATED.match(rest):
        return None
    return named.upper() == letter[1] and not _ANOTHER_LABEL.search(rest.strip())


# Lists, sets, points, intervals, matrices.

_REALS = re.compile(
    r"\\mathbb\s*\{?\s*R\s*\}?|\\R|\(\s*-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)"
    r"|(?:the\s+set\s+of\s+)?all\s+(?:the\s+)?real(?:s|\s+numbers)",
    re.IGNORECASE,
)


def _as_reals(expected: str, found: str) -> bool | None:
    """Return True where both are the set of all real numbers."""
    both = (_REALS.fullmatch(_bare(each).strip()) for each in (expected, found))
    return True if all(both) else None


def _named(text: str) -> dict[str, str] | None:
    """Return the values in x = 3, y = 5 and (x, y) = (3, 5); None of other texts."""
    around = bracketed(text)
    relations = [_relation(part) for part in _listed(around.inside if around else text)]
    if len(relations) == 1 and relations[0].signs == ["="]:
        names, values = map(bracketed, relations[0].sides)
        if not (names and values):
            return None
        names, values = _listed(names.inside), _listed(values.inside)
        if not all((name := evaluate(each)) and name.is_named for each in names):
            return None
    elif all(each.name and each.signs == ["="] for each in relations):
        names = [each.name for each in relations]
        values = [each.sides[-1] for each in relations]
    else:
        return None
    if len(names) != len(values) or len(set(names)) < max(len(names), 2):
        return None
    return dict(zip(map(squeezed, names), values, strict=True))


def _as_named(expected: str, found: str) -> bool | None:
    """Compare values of several variables: by names, else in the reference's order."""
    mine = _named(expected) if "=" in expected else None
    if mine is None:
        return None
    theirs = _named(found)
    if theirs:
        if mine.keys() != theirs.keys():
            return None
        return _all(_same(mine[name], theirs[name]) for name in mine)
    around = bracketed(found)
    parts = _listed(around.inside if around else ungrouped(found))
    if len(parts) < 2 or any(_relation(part).signs for part in parts):
        return None
    # A set does not assign its values to variables, and (3, 5] is an interval.
    if around and around.pair not in ("()", "[]", r"\langle\rangle"):
        return False
    return _match(list(mine.values()), parts, ordered=True)


def _listed(text: str) -> list[str]:
    r"""Return the parts of a list; a part with \pm gives two."""
    return [
        sign
        for part in split(text, _SEPARATORS)[0]
        if part
        for sign in ([part] if bracketed(part) else _signed(part))
    ]


def _is_list(text: str) -> bool:
    separated = any(separator in text for separator in _SEPARATORS)
    return separated and len(_listed(ungrouped(text))) > 1


def _signed(part: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", part):
        return [part]
    plus, minus = re.compile(r"\\pm(?![A-Za-z])"), re.compile(r"\\mp(?![A-Za-z])")
    return [
        plus.sub(first, minus.sub(second, part))
        for first, second in (("+", "-"), ("-", "+"))
    ]


def _as_lists(expected: str, found: str) -> bool | None:
    mine, theirs = _listed(ungrouped(expected)), _listed(ungrouped(found))
    if len(mine) == 1 < len(theirs):  # 100,200 may be a list, too
        mine = _listed(expected)
    elif len(theirs) == 1 < len(mine):
        theirs = _listed(found)
    for parts, others, text in ((mine, theirs, found), (theirs, mine, expected)):
        if len(others) <= 1 < len(parts):
            around = bracketed(text)
            if around:
                inside = _listed(around.inside)
                ordered = around.opening != r"\{"
                names = [_relation(part).name for part in parts]
                if ordered and names[0] and {*names[1:]} <= {"", names[0]}:
                    return False  # x = 5, 6, and x = 5 or x = 6
                return _match(parts, inside, ordered=ordered)
            if _is_one_value(parts) and _all(_same(text, part) for part in parts):
                return True
            signs = {_RELATIONS[sign] for sign in split(text, _RELATIONS)[1]}
            return None if signs - {"="} else False
    if len(mine) <= 1:
        return None
    words = all(len(_words(part) or "") > 1 for part in mine)
    return _match(mine, theirs, ordered=words)


def _is_one_value(parts: list[str]) -> bool:
    """Return whether a list is one value in several forms, as 5/2 or 2.5 is."""
    if len(set(map(squeezed, parts))) < len(parts):
        return False
    names = {_relation(part).name for part in parts} - {""}
    pairs = itertools.combinations(parts, 2) if len(parts) <= 4 else ()
    return len(names) <= 1 < len(parts) <= 4 and all(_same(*pair) for pair in pairs)


def _match(mine: list[str], theirs: list[str], *, ordered: bool) -> bool | None:
    """Return whether two lists have the same parts, each the same number of times."""
    if len(mine) != len(theirs):
        return False
    if ordered:
        return _all(_same(*pair) for pair in zip(mine, theirs, strict=True))
    rest = list(theirs)
    for part in mine:
        verdicts = [_same(part, other) for other in rest]
        if not _any(verdicts):
            return _any(verdicts)
        del rest[verdicts.index(True)]
    return True


def _as_brackets(expected: str, found: str) -> bool | None:
    mine, theirs = bracketed(expected), bracketed(found)
    if _holds_a_set(mine) != _holds_a_set(theirs):
        return False
    if mine and len(_listed(mine.inside)) == 1:
        same_kind = theirs and theirs.opening == mine.opening
        return _same(mine.inside, theirs.inside if theirs and same_kind else found)
    if theirs and len(_listed(theirs.inside)) == 1:
        return _same(expected, theirs.inside)
    if not (mine and theirs):
        return None
    parts, others = _listed(mine.inside), _listed(theirs.inside)
    braces = (mine.opening, theirs.opening).count(r"\{")
    if braces:
        return _same_sets(parts, others) if braces == 2 else False
    round_or_square = {mine.opening, theirs.opening} <= {"(", "["}
    if round_or_square and len(parts) == 2 and mine.pair != theirs.pair:
        return False
    return _match(parts, others, ordered=True)


def _holds_a_set(text: Bracketed | None) -> bool:
    """Return whether this is a set of one set, which is not that set."""
    if text is None or text.opening != r"\{":
        return False
    inner = bracketed(text.inside)
    return text.inside == r"\emptyset" or bool(inner and inner.opening == r"\{")


def _same_sets(mine: list[str], theirs: list[str]) -> bool | None:
    """Return whether all parts of each are in the other, however often."""
    forth = [_any(_same(part, other) for other in theirs) for part in mine]
    back = [_any(_same(part, other) for part in mine) for other in theirs]
    return _all(forth + back)


def _as_matrices(expected: str, found: str) -> bool | None:
    mine, theirs = cells(expected), cells(found)
    if mine is None or theirs is None:
        return None
    if list(map(len, mine)) != list(map(len, theirs)):
        return False
    return _all(_match(*rows, ordered=True) for rows in zip(mine, theirs, strict=True))


# Equations, inequalities, unions.

# \\max f, \\det A, P(X > 1), E[X]: what is computed, on the left of its value.
_APPLIED = re.compile(
    r"\\(?:max|min|sup|inf|det|gcd|lcm|Pr|dim|deg|ker|arg|lim|sum|prod|int)(?![A-Za-z]).*"
    r"|(?:\\mathbb\s*\{?\s*)?[PE]\s*\}?\s*[(\[].*[)\]]"
    r"|\\text\{\s*\w+\s*\}\s*[(\[].*[)\]]|\|.*\|",
    re.DOTALL,
)


class _Relation(NamedTuple):
    """The sides of a relation, and the signs between them."""

    sides: list[str]
    signs: list[str]

    @property
    def name(self) -> str:
        """The name that an assignment gives a value to, without spaces; else "".

        Of 2+3 = 5, which gives its value to none, it is "=".
        """
        left = self.sides[0]
        value = evaluate(left)
        named = not left or _words(left) or value and value.is_named
        named = named or _APPLIED.fullmatch(left)
        assigns = self.signs and set(self.signs) <= _ASSIGNING
        if named and assigns:
            return squeezed(left) or "="
        return "=" if set(self.signs) == {"="} and self.is_of_numbers else ""

    @property
    def contradicts(self) -> bool:
        """Return whether it equates numbers that are not equal, as in 6 = 5.

        Decimals may be rounded: 2/3 = 0.67.
        """
        values = filter(None, map(evaluate, self.sides))
        numbers = [each for each in values if not has_names(each.tree)]
        return set(self.signs) == {"="} and any(
            same_value(one, other) is False
            and not ((one.decimal or other.decimal) and is_about(one, other))
            for one, other in itertools.pairwise(numbers)
        )

    @property
    def is_of_numbers(self) -> bool:
        """Return whether all sides are numbers."""
        values = [_quantity(side) for side in self.sides]
        return all(each and not has_names(each.value.tree) for each in values)

    @property
    def is_settled(self) -> bool:
        """Return whether it says nothing of variables, as 0 < 1 and x = x."""
        if self.is_of_numbers:
            return bool(self.signs)
        pairs = itertools.pairwise(map(evaluate, self.sides))
        return set(self.signs) == {"="} and all(
            one and other and same_value(one, other) for one, other in pairs
        )

    def is_same(self, other: "_Relation") -> bool | None:
        """Return whether sides and signs are the same, one after the other."""
        if self.signs != other.signs:
            return False
        return _all(map(_same, self.sides, other.sides))


def _relation(text: str) -> _Relation:
    """Return the relation of a text; of `2\\pi \\approx 6.28`, its exact side."""
    sides, between = split(text, _RELATIONS)
    signs = [_RELATIONS[sign] for sign in between]
    if r"\approx" in signs:
        first = signs.index(r"\approx")
        value = evaluate(sides[first])
        if not value or value.is_named:
            signs = ["=" if sign == r"\approx" else sign for sign in signs]
        else:
            sides, signs = sides[: first + 1], signs[:first]
    return _Relation(sides, signs)


def _as_relations(expected: str, found: str) -> bool | None:
    if _is_list(expected) or _is_list(found):
        return None
    mine, theirs = _relation(expected), _relation(found)
    if not (mine.signs or theirs.signs):
        exact = mine.sides[0], theirs.sides[0]
        return None if exact == (expected, found) else _same(*exact)
    if mine.contradicts or theirs.contradicts:
        return False
    if {*mine.signs, *theirs.signs} == {r"\cup"}:
        return _match(mine.sides, theirs.sides, ordered=False) or None
    if mine.name and theirs.name:
        if mine.name == theirs.name:
            return _same(mine.sides[-1], theirs.sides[-1])
    elif mine.name and not theirs.signs:
        return _same(mine.sides[-1], theirs.sides[0])
    elif theirs.name and not mine.signs:
        return _same(mine.sides[0], theirs.sides[-1])
    return _same_statement(mine, theirs)


def _same_statement(mine: _Relation, theirs: _Relation) -> bool | None:
    """Return whether two relations are the same or turned, or two equations alike."""
    if mine.is_same(theirs) or mine.is_same(_turned(theirs)):
        return True
    if mine.is_settled or theirs.is_settled:
        return False  # computer algebra would find all that are true equal
    return _proportional(mine, theirs) or None


def _as_unions(expected: str, found: str) -> bool | None:
    r"""Compare x < 2 or x > 5 with (-\infty, 2) \cup (5, \infty)."""
    for union, condition in ((expected, found), (found, expected)):
        sets, between = split(union, {r"\cup"})
        parts, alternatives = split(condition, {r"\lor"})
        if between and alternatives:
            letters = re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", condition))
            return len(set(letters)) == 1 and _match(sets, parts, ordered=False)
    return None


def _turned(relation: _Relation) -> _Relation:
    """Return the relation from right to left, each sign reversed or marked."""
    signs = [_TURNED.get(sign, f"{sign} turned") for sign in relation.signs[::-1]]
    return _Relation(relation.sides[::-1], signs)


def _proportional(mine: _Relation, theirs: _Relation) -> bool:
    """Return whether one equation is a multiple of the other."""
    if not mine.signs == theirs.signs == ["="]:
        return False
    one, other = (evaluate("({})-({})".format(*each.sides)) for each in (mine, theirs))
    return one is not None and other is not None and proportional(one, other)


# Numbers and expressions.


class _Quantity(NamedTuple):
    """Return a value without its unit, and its text."""

    value: Value
    text: str
    is_percentage: bool
    has_unit: bool

    def hundredth(self) -> Value | None:
        """Return the value of a percentage in hundredths; other values unchanged."""
        if not self.is_percentage:
            return self.value
        return evaluate(f"({ungrouped(self.text)})/100")


def _quantity(text: str) -> _Quantity | None:
    rest, is_unit = without_unit(text)
    value = evaluate(ungrouped(rest.removesuffix("%")))
    if value is None or not (is_unit or value.constant):
        rest, value = text, evaluate(ungrouped(text.removesuffix("%")))
    bare = rest.removesuffix("%")
    return value and _Quantity(value, bare, rest != bare, has_unit=rest != text)


def _as_quantities(expected: str, found: str) -> bool | None:
    mine, theirs = _quantity(expected), _quantity(found)
    if mine is None or theirs is None:
        return None
    if mine.is_percentage and theirs.has_unit or theirs.is_percentage and mine.has_unit:
        return False  # 125% and 125 miles
    verdict = same_value(mine.value, theirs.value)
    if verdict is False and mine.is_percentage != theirs.is_percentage:
        one, other = mine.hundredth(), theirs.hundredth()
        return None if one is None or other is None else same_value(one, other)
    return verdict


_BASE = re.compile(r"(?P<digits>-?\d[\dA-Z]*)\s*(?:_\s*(?:\{\s*(\d+)\s*\}|(\d+)))?")


def _in_base(text: str) -> tuple[str, str] | None:
    """The digits of a number, and the base behind them or none."""
    found = _BASE.fullmatch(text.replace("{,}", ""))
    return (found["digits"], found[2] or found[3] or "") if found else None


def _as_based(expected: str, found: str) -> bool | None:
    mine, theirs = _in_base(expected), _in_base(found)
    if not (mine and theirs) or not (mine[1] or theirs[1]):
        return None
    return mine[0] == theirs[0] and ("" in (mine[1], theirs[1]) or mine[1] == theirs[1])


_C = r"(?:C|\\text\{\s*C\s*\})"
_CHOSEN = re.compile(
    rf"{_C}\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)"
    rf"|(?:\{{\s*\}}\s*)?[_^]?\s*\{{?\s*(\d+)\s*\}}?\s*{_C}\s*_?\s*\{{?\s*(\d+)\s*\}}?",
    re.ASCII,
)


def _as_chosen(expected: str, found: str) -> bool | None:
    """Compare a number with C(10, 3) or {}_{10}C_3, which as a reference is a point."""
    chosen, value = _CHOSEN.fullmatch(found), evaluate(expected)
    if not (chosen and value and value.constant):
        return None
    return _same(expected, r"\binom{{{}}}{{{}}}".format(*filter(None, chosen.groups())))


# Computer algebra: `math-verify`, over SymPy.  It reads by a LaTeX grammar, and never
# as Python: of its ways to read, the one that ends in SymPy's `parse_expr`, which
# evaluates, is left out.  It has no bounds in time or memory, and gets no
# expression that looks large.

_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    # `units` would take the letter that ends `a + b + c`.
    normalization_config=NormalizationConfig(
        units=False, malformed_operators=True, nits=True
    ),
)
# It warns once that its own time limits, which use signals, are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


# `math-verify` leaves out the signs of 3_{x}, 3', and what follows a brace too many.
_LEFT_OUT = re.compile(r"\d\s*_|'")
# It reads "3 7" as 37; \\frac 3 7 is what it says.
_GAP = re.compile(r"\d(?:\s|\\?[$£€])+\d")
_FRACTION_OF_DIGITS = re.compile(r"\\(?:frac|binom)\s*\d\s+\d")


@functools.lru_cache(maxsize=64)  # a group's answers often agree, its reference always
def _expression(answer: str) -> Basic | MatrixBase | None:
    """Read an answer as SymPy's expression, not simplified; None if it is not one.

    None also for what is true or false, as 0 < 1: all that is true would be equal.
    """
    if _LEFT_OUT.search(answer) or answer.count("{") != answer.count("}"):
        return None
    if not is_bounded(answer) or _GAP.search(_FRACTION_OF_DIGITS.sub("", answer)):
        return None
    try:
        # Of a text that is no expression it would take a fraction or formula within.
        found = parse(
            f"\\boxed{{{answer}}}",
            [_LATEX],
            parsing_timeout=0,
            extraction_mode="first_match",
        )
    except RecursionError:
        return None
    first = found[0] if found else None
    is_value = isinstance(first, Basic | MatrixBase)
    return first if is_value and not isinstance(first, BooleanAtom) else None


def same_expressions(expected: str, found: str) -> bool | None:
    """Return whether two answers are equal; None where one of them cannot be read."""
    one, other = _expression(expected), _expression(found)
    if one is None or other is None:
        return None
    return verify(one, other, timeout_seconds=0, allow_set_relation_comp=True)


_RULES = (
    _as_moments,
    _as_options,
    _as_reals,
    _as_words,
    _as_named,
    _as_unions,
    _as_lists,
    _as_relations,
    _as_brackets,
    _as_matrices,
    _as_based,
    _as_chosen,
    _as_quantities,
    _as_phrases,
    same_expressions,
)
