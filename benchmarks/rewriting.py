r"""Answers in other writings, for measuring a verifier.

Every rule of REWRITINGS surely keeps the meaning of an answer, and returns None for an
answer where that is not sure.  Nothing of the verifier is used here.
"""

import re
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[str], str | None]

_WHOLE = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"(-?)(?:\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}|(\d+)/(\d+))")
PERCENT = re.compile(r"(-?\d+(?:\.\d+)?)\s*\\?%")
_TEXT = re.compile(r"\\text\{\s*([A-Za-z]+)\s*\}")
_WITH_UNIT = re.compile(r"(-?\d+(?:\.\d+)?)\s*\\(?:text|mbox)\{[a-z .]+\}")
_DEGREES = re.compile(r"(-?\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\}?")
_PART = r"-?(?:\d+(?:\.\d+)?|\\[dt]?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}|[a-z])"
_PARTS = re.compile(rf"{_PART}(?:\s*,\s*{_PART})+")
_AROUND = (("", ""), ("(", ")"), (r"\{", r"\}"), (r"\left(", r"\right)"))
_EXPRESSION = re.compile(
    r"(?:[0-9a-zA-Z+\-*/^_{}()! ]|\\(?:[dt]?frac|sqrt|pi|cdot|ln|sin|cos|alpha|theta)"
    r"(?![a-zA-Z]))+"
)


def number_of(answer: str) -> Fraction | None:
    """Return the value of a whole number, a decimal or a fraction of whole numbers."""
    if _WHOLE.fullmatch(answer) or _DECIMAL.fullmatch(answer):
        return Fraction(answer)
    found = FRACTION.fullmatch(answer)
    if not found:
        return None
    sign, *parts = found.groups()
    above, below = (int(part) for part in parts if part)
    return None if not below else Fraction(above, below) * (-1 if sign else 1)


def decimal_of(value: Fraction) -> str | None:
    """Return a number's decimal form, if that ends within 20 digits."""
    for digits in range(20):
        scaled = value * 10**digits
        if scaled.denominator == 1:
            sign = "-" if value < 0 else ""
            text = str(abs(scaled.numerator)).rjust(digits + 1, "0")
            return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)
    return None


def is_expression(answer: str) -> bool:
    """Return whether an answer is one expression that can be part of sums and products.

    Not so a number in a base, a word, a list with "or", and the letter of a choice.
    """
    if re.search(r"_\s*\{?\d|(?<![\\a-zA-Z])(?:[a-zA-Z]{3}|or)", answer):
        return False
    if re.fullmatch(r"\(?[A-Z]\)?", answer) or answer.endswith("-"):
        return False
    return _EXPRESSION.fullmatch(answer) is not None


def parts_of(answer: str) -> tuple[str, list[str], str] | None:
    """Split a list, set or tuple of simple parts: text before, parts, text after."""
    for before, after in _AROUND:
        if not (answer.startswith(before) and answer.endswith(after)):
            continue
        inside = answer[len(before) : len(answer) - len(after)].strip()
        grouped = re.fullmatch(r"\d{1,3}(,\d{3})+", inside)  # may be one number
        if _PARTS.fullmatch(inside) and not grouped:
            return before, [part.strip() for part in inside.split(",")], after
    return None


def on_numbers(change: Callable[[Fraction], str | None]) -> Rule:
    """Return a rule for the answers that are numbers."""

    def rule(answer: str) -> str | None:
        value = number_of(answer)
        return None if value is None else change(value)

    return rule


def _on_decimals(pattern: str) -> Rule:
    """Return a rule for numbers with a finite decimal form, put for @ in a pattern."""

    def change(value: Fraction) -> str | None:
        text = decimal_of(value)
        return None if text is None else pattern.replace("@", text)

    return on_numbers(change)


def on_expressions(pattern: str) -> Rule:
    """Return a rule for expressions: the pattern with the answer for @."""
    return lambda answer: (
        pattern.replace("@", answer) if is_expression(answer) else None
    )


def replaced(pattern: str, replacement: str) -> Rule:
    """Return a rule that replaces all matches of a pattern, where there is one."""

    def rule(answer: str) -> str | None:
        changed = re.sub(pattern, replacement, answer)
        return None if changed == answer or r"\text" in answer else changed

    return rule


def on_match(found_by: re.Pattern[str], template: str) -> Rule:
    """Return a rule for answers that match as a whole."""

    def rule(answer: str) -> str | None:
        found = found_by.fullmatch(answer)
        return found.expand(template) if found else None

    return rule


def as_fraction(pattern: str, times: int = 1) -> Callable[[Fraction], str]:
    """Return a rule that writes a number by sign, numerator and denominator."""

    def change(value: Fraction) -> str:
        sign = "-" if value < 0 else ""
        above, below = times * abs(value.numerator), times * value.denominator
        return pattern.format(sign, above, below)

    return change


def rearranged(order: Callable[[list[str]], list[str]], *, sets: bool) -> Rule:
    """Return a rule that changes the parts of lists and sets, or those of tuples."""

    def rule(answer: str) -> str | None:
        found = parts_of(answer)
        if found is None or (found[0] in ("", r"\{")) != sets:
            return None
        before, parts, after = found
        changed = order(parts)
        return None if changed == parts else before + ", ".join(changed) + after

    return rule


def _around(pattern: str) -> Rule:
    return lambda answer: pattern.replace("@", answer)


def _grouped(separator: str) -> Rule:
    def change(value: Fraction) -> str | None:
        if value.denominator > 1 or abs(value) < 1000:
            return None
        return f"{value.numerator:,}".replace(",", separator)

    return on_numbers(change)


def _scientific(pattern: str) -> Rule:
    def change(value: Fraction) -> str | None:
        if value == 0 or decimal_of(value) is None:
            return None
        exponent = len(str(int(abs(value)))) - 1
        while abs(value) < Fraction(10) ** exponent:
            exponent -= 1
        mantissa = decimal_of(value / Fraction(10) ** exponent)
        return mantissa and pattern.format(mantissa, exponent)

    return on_numbers(change)


def _mixed(value: Fraction) -> str | None:
    if value.denominator == 1 or abs(value) < 1:
        return None
    whole, rest = divmod(abs(value.numerator), value.denominator)
    sign = "-" if value < 0 else ""
    return rf"{sign}{whole}\frac{{{rest}}}{{{value.denominator}}}"


def _long_decimal(value: Fraction) -> str | None:
    if decimal_of(value) is not None or abs(value) < Fraction(1, 1000):
        return None
    return f"{float(value):.12f}"


def _zeros_behind(value: Fraction) -> str | None:
    text = decimal_of(value)
    return text and text + ("0" if "." in text else ".00")


def _no_zero_before(value: Fraction) -> str | None:
    text = decimal_of(value)
    return re.sub(r"^(-?)0\.", r"\1.", text) if text and 0 < abs(value) < 1 else None


def _root_of_square(value: Fraction) -> str | None:
    if value.denominator > 1 or not 0 < value < 10**6:
        return None
    return rf"\sqrt{{{value.numerator**2}}}"


def _spaced(answer: str) -> str | None:
    if r"\text" in answer or r"\mbox" in answer or re.search(r"\d,\d|,\\|\\,", answer):
        return None
    changed = re.sub(r"\s*([+=,])\s*", r" \1 ", answer)
    return changed if changed != answer else None


def _with_left_and_right(answer: str) -> str | None:
    if r"\left" in answer or r"\sqrt" in answer or not re.search(r"[(\[]", answer):
        return None
    text = re.sub(r"(?<!\\)([(\[])", r"\\left\1", answer)
    text = re.sub(r"(?<!\\)([)\]])", r"\\right\1", text)
    return text if text.count(r"\left") == text.count(r"\right") else None


def _swapped_terms(answer: str) -> str | None:
    found = re.fullmatch(
        r"([^-+(){}\\=,]+) ?\+ ?([^-+(){}=,]+|\d*\\sqrt\{\d+\})", answer
    )
    if not found or not is_expression(answer) or "/" in answer:
        return None
    return f"{found[2].strip()} + {found[1].strip()}"


def _turned_inequality(answer: str) -> str | None:
    found = re.fullmatch(r"([^<>=\\]+)(<|>|\\leq?|\\geq?)(?![a-z])([^<>=]+)", answer)
    if not found or re.search(r"\\[lg]e", found[3]) or "," in answer:
        return None
    turned = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    return f"{found[3].strip()} {turned[found[2].removesuffix('q')]} {found[1].strip()}"


def _joined_by_and(answer: str) -> str | None:
    found = parts_of(answer)
    if found is None or found[0] or len(found[1]) != 2:
        return None
    return " and ".join(found[1])


def _in_lower_case(answer: str) -> str | None:
    found = _TEXT.fullmatch(answer)
    return found[1].lower() if found and len(found[1]) > 3 else None


_ASSIGNED, _CURRENCY = on_expressions("x = @"), _on_decimals(r"\$@")

REWRITINGS: dict[str, Rule] = {
    "dollar signs": _around("$@$"),
    "displayed": _around(r"\[ @ \]"),
    "display style": _around(r"\displaystyle @"),
    "spaces at both ends": _around(r" \; @ \quad "),
    "full stop": lambda answer: None if answer.endswith(".") else answer + ".",
    "spaces": _spaced,
    "no spaces": replaced(r"(?<![a-zA-Z\\])(?<!,) +(?![a-zA-Z])", ""),
    "left and right": _with_left_and_right,
    "dfrac": replaced(r"\\frac(?![a-z])", r"\\dfrac"),
    "tfrac": replaced(r"\\d?frac(?![a-z])", r"\\tfrac"),
    "braces": replaced(r"([\^_])(\d)(?!\d)", r"\1{\2}"),
    "times": replaced(r"\\cdot(?![a-z])", r"\\times"),
    "leq": replaced(r"\\([lg])e(?![a-z])", r"\\\1eq"),
    "bmatrix": replaced(r"\{pmatrix\}", "{bmatrix}"),
    "bold": _on_decimals(r"\mathbf{@}"),
    "in text": _on_decimals(r"\text{@}"),
    "approximately": _on_decimals(r"\approx @"),
    "introduced": _on_decimals(r"\text{The answer is } @"),
    "assigned": lambda answer: None if "x" in answer else _ASSIGNED(answer),
    "in brackets": on_expressions("(@)"),
    "decimal": on_numbers(decimal_of),
    "zeros behind": on_numbers(_zeros_behind),
    "no zero before": on_numbers(_no_zero_before),
    "twelve decimals": on_numbers(_long_decimal),
    "fraction": on_numbers(as_fraction(r"{}\frac{{{}}}{{{}}}")),
    "slash": on_numbers(as_fraction("{}{}/{}")),
    "not reduced": on_numbers(as_fraction(r"{}\frac{{{}}}{{{}}}", times=6)),
    "sign above": on_numbers(as_fraction(r"\frac{{{}{}}}{{{}}}")),
    "mixed": on_numbers(_mixed),
    "commas": _grouped(","),
    "commas in braces": _grouped("{,}"),
    "commas and thin spaces": _grouped(r",\!"),
    "thin spaces": _grouped(r"\,"),
    "scientific": _scientific(r"{} \times 10^{{{}}}"),
    "scientific, dot": _scientific(r"{} \cdot 10^{{{}}}"),
    "scientific, e": _scientific("{}e{}"),
    "scientific, E": _scientific("{}E{:+d}"),
    "root of its square": on_numbers(_root_of_square),
    "unit": _on_decimals(r"@\text{ cm}"),
    "unit as a word": _on_decimals("@ dollars"),
    "currency": lambda answer: None if "-" in answer else _CURRENCY(answer),
    "no unit": on_match(_WITH_UNIT, r"\1"),
    "other unit": on_match(_WITH_UNIT, r"\1 \\mathrm{units}"),
    "percent": on_match(PERCENT, r"\1 percent"),
    "percent, a number": on_match(PERCENT, r"\1"),
    "percent, a hundredth": on_match(PERCENT, r"\\frac{\1}{100}"),
    "degrees": on_match(_DEGREES, r"\1^{\\circ}"),
    "degrees in words": on_match(_DEGREES, r"\1 \\text{ degrees}"),
    "degrees left out": on_match(_DEGREES, r"\1"),
    "plus nothing": on_expressions("0 + (@)"),
    "times one": on_expressions(r"1 \cdot (@)"),
    "twice its half": on_expressions(r"\frac{2 \cdot \left( @ \right)}{2}"),
    "minus its negative": on_expressions("-(-(@))"),
    "terms swapped": _swapped_terms,
    "roots as powers": replaced(r"\\sqrt\{(\d+)\}", r"(\1)^{1/2}"),
    "backwards": rearranged(lambda parts: parts[::-1], sets=True),
    "rotated": rearranged(lambda parts: parts[1:] + parts[:1], sets=True),
    "and": _joined_by_and,
    "inequality turned": _turned_inequality,
    "no text": on_match(_TEXT, r"\1"),
    "bold text": on_match(_TEXT, r"\\textbf{\1}"),
    "lower case": _in_lower_case,
}
