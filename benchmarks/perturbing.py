r"""Slightly wrong answers, for measuring a verifier.

Every rule of PERTURBATIONS surely changes the meaning of an answer, and returns None
for an answer where that is not sure.  Nothing of the verifier is used here.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction

from rewriting import (
    FRACTION,
    PERCENT,
    Rule,
    as_fraction,
    decimal_of,
    is_expression,
    number_of,
    on_expressions,
    on_match,
    on_numbers,
    parts_of,
    rearranged,
    replaced,
)

_COLUMN = re.compile(r"\\begin\{pmatrix\}([^&]*?)\\end\{pmatrix\}")
_VARIABLE = r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])"


def _other_digit(answer: str) -> str | None:
    if number_of(answer) is None:
        return None
    chance = random.Random(answer)
    place = chance.choice([n for n, each in enumerate(answer) if each.isdigit()])
    digit = str((int(answer[place]) + chance.randint(1, 9)) % 10)
    changed = answer[:place] + digit + answer[place + 1 :]
    return changed if number_of(changed) not in (None, number_of(answer)) else None


def _number(change: Callable[[Fraction], Fraction]) -> Rule:
    """Return a rule that changes a number and keeps its form."""

    def rule(answer: str) -> str | None:
        value = number_of(answer)
        if value is None or change(value) == value:
            return None
        changed = change(value)
        text = None if FRACTION.fullmatch(answer) else decimal_of(changed)
        return text or as_fraction(r"{}\frac{{{}}}{{{}}}")(changed)

    return rule


def _last_digit_cut(answer: str) -> str | None:
    return answer[:-1] if re.fullmatch(r"-?[1-9]\d+", answer) else None


def _digits_swapped(answer: str) -> str | None:
    if not re.fullmatch(r"[1-9]\d+", answer) or answer[-1] == answer[-2]:
        return None
    return answer[:-2] + answer[-1] + answer[-2]


def _three_decimals(value: Fraction) -> str | None:
    text = f"{float(value):.3f}"
    near = abs(Fraction(text) - value) <= max(abs(value), 1) / 10**5
    return None if near else text


def _not_zero(pattern: str) -> Rule:
    """Return a rule that changes an expression, where it is not 0."""
    change = on_expressions(pattern)
    return lambda answer: None if number_of(answer) == 0 else change(answer)


def _parts(change: Callable[[list[str]], list[str]]) -> Rule:
    """Return a rule that changes parts of a list, set (without repeats) or tuple."""

    def rule(answer: str) -> str | None:
        found = parts_of(answer)
        if found is None or found[0] == r"\{" and len(set(found[1])) < len(found[1]):
            return None
        return found[0] + ", ".join(change(found[1])) + found[2]

    return rule


def _coordinates_swapped(answer: str) -> str | None:
    found = parts_of(answer)
    if found is None or found[0] in ("", r"\{"):
        return None
    before, (first, second, *rest), after = found
    values = number_of(first), number_of(second)
    if None in values or values[0] == values[1]:
        return None
    return before + ", ".join([second, first, *rest]) + after


def _other_bracket(answer: str) -> str | None:
    found = re.fullmatch(r"([(\[])([^()\[\]\\]+,[^()\[\],]+)([)\]])", answer)
    if not found or not re.search(r"[\[\]]", answer):  # a point, perhaps
        return None
    return {"(": "[", "[": "("}[found[1]] + found[2] + found[3]


def _other_direction(answer: str) -> str | None:
    if re.search(r"\\left|\\text|\\langle", answer):
        return None
    signs = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    changed = re.sub(
        r"(\\[lg]e)q?(?![a-z])|([<>])",
        lambda found: signs[found[1] or found[2]] + " ",
        answer,
    )
    return changed if changed != answer else None


def _letters_sorted(answer: str) -> str | None:
    found = re.fullmatch(r"(?:\\text\{)?([A-Za-z]{3,})\}?", answer)
    letters = "".join(sorted(found[1])) if found else ""
    return letters if found and letters.lower() != found[1].lower() else None


def _other_variable(answer: str) -> str | None:
    names = set(re.findall(_VARIABLE, answer)) - {"e", "i"}
    if not is_expression(answer) or len(names) != 1 or "q" in names:
        return None
    return re.sub(_VARIABLE.replace("[a-zA-Z](", f"{names.pop()}("), "q", answer)


def _ten_times_without_percent(answer: str) -> str | None:
    found = PERCENT.fullmatch(answer)
    return f"{found[1]}0" if found and "." not in found[1] else None


PERTURBATIONS: dict[str, Rule] = {
    "other sign": _number(lambda value: -value),
    "negative": _not_zero("-(@)"),
    "other digit": _other_digit,
    "one more": _number(lambda value: value + 1),
    "one less": _number(lambda value: value - 1),
    "plus one": on_expressions("@ + 1"),
    "minus a thousandth": on_expressions("@ - 0.001"),
    "last digit cut": _last_digit_cut,
    "digits swapped": _digits_swapped,
    "turned over": _number(lambda value: 1 / value if value else value),
    "ten times": _number(lambda value: 10 * value),
    "a tenth": _number(lambda value: value / 10),
    "a thousandth more": _number(lambda value: value * Fraction(1001, 1000)),
    "an expression, a thousandth more": _not_zero(r"1.001 \cdot (@)"),
    "squared": _number(lambda value: value**2),
    "three decimals": on_numbers(_three_decimals),
    "doubled": _not_zero(r"2 \cdot (@)"),
    "last part left out": _parts(lambda parts: parts[:-1]),
    "first part left out": _parts(lambda parts: parts[1:]),
    "one part more": _parts(lambda parts: [*parts, "987654"]),
    "another part": _parts(lambda parts: [*parts[:-1], "987654"]),
    "a part twice": rearranged(lambda parts: [*parts, parts[-1]], sets=False),
    "coordinates swapped": _coordinates_swapped,
    "other bracket": _other_bracket,
    "other direction": _other_direction,
    "pi rounded": replaced(r"\\pi(?![a-zA-Z])", r"(3.14)"),
    "no root": replaced(r"\\sqrt\{([2-9]\d*)\}", r"(\1)"),
    "another root": replaced(r"\\sqrt\{([2-9]\d*)\}", r"\\sqrt{1\1}"),
    "another power": replaced(r"(?<=[a-z])\^\{?([2-9])\}?(?!\d)", r"^{1\1}"),
    "another base": replaced(r"^(\d+)_\{?(\d)\}?$", r"\1_{1\2}"),
    "another cell": on_match(_COLUMN, r"\\begin{pmatrix}1 + \1\\end{pmatrix}"),
    "letters sorted": _letters_sorted,
    "another variable": _other_variable,
    "ten times, without the percent sign": _ten_times_without_percent,
}
