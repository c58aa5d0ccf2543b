r"""The formula around a number, in text without delimiters of mathematics.

The last number alone is not the answer in "3 / 4", "−42", "√3", "2π" or "(3, 5)".  A
formula grows from its number to both sides, within its line, over signs and what they
join: numbers, single letters, functions.  Other words end it, and so does "=".
"""

import re

_MAX_CHARACTERS = 200  # on each side
_FUNCTION = (
    r"(?:sqrt|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)|negative|minus|pi|mod|[fgh](?=\())"
)
_COMMAND = r"\\[A-Za-z]+(?:\s*\{[^{}]*\})*"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_BINARY = r"[-+−–*/·×÷^_±<>≤≥≠]"
_VARIABLE = r"(?<![^\W\d_])[b-zB-Zπ](?![^\W\d_])"  # "a" is an article
_NO_NUMBER = rf"{_VARIABLE}|pi\b|{_COMMAND}|\([^()]*\)|\|[^|]*\|"
_OPERAND = rf"(?:\d[\d.,]*(?:/\d+)?[%°{_RAISED}]*|{_NO_NUMBER})"
# What may be left of a number, read from the number's side.
_LEFT = re.compile(
    r"(?:(?<!\w)\d+\ \(?mod\ "
    r"|(?<![\d,.])\d{1,3}(?:[.,]\d+)?(?:/\d+)?\ "  # 10 000; 2 3/4; 3 7
    rf"|{_OPERAND}\ ?(?<!\*){_BINARY}(?!\*)\ ?"  # 3 / 4
    r"|(?<![\w)])[-+−–±]"  # a sign at a number
    r"|\b(?:is|equals|are)\ [-−–±]\ "  # a sign before a space
    rf"|[\d{_RAISED}]*\ ?[√∛∜]\ ?|\d+[:°]|\d*\.\("
    rf"|(?<![^\W\d_]){_FUNCTION}\ ?\(?|{_COMMAND}\ ?|(?<!\S)[A-Za-z]\(|\|)\Z"
)
_WORD_OF_VALUE = (
    r"(?i:hundred|thousand|million|billion|trillion|dozen|lakh|crore|percent|squared|"
    r"cubed|factorial|halves|thirds|fourths|fifths|mod|and a (?:half|quarter|third))"
    r"(?![A-Za-z])"
)
_RIGHT = re.compile(
    rf"(?:[{_RAISED}]+|\ ?[¼-¾⅐-⅞]|\.{{3}}|…|\ ?{_COMMAND}|\ ?π|pi\b|\ ?[√∛∜]\ ?\w+"
    r"|[iekbnxyzMB](?![^\W\d_])|\ [xyz](?![^\W\d_])(?=[\s.,;$]*\Z)"
    rf"|\ ?{_BINARY}\ ?(?:{_VARIABLE}|{_COMMAND}|[√∛∜(])|\ {_WORD_OF_VALUE}"
    r"|[)|](?!\w))"
)
# Numbers take the commas behind them along.  Without (?>) each of these could also be
# a separator, and a list of n numbers would be read in 2^n ways.
_ITEM = rf"(?>\d[\d.,]*[%°{_RAISED}]*|{_NO_NUMBER})"
_ITEMS = rf"(?>{_ITEM}(?:{_BINARY}{_ITEM})*)"
_LIST = re.compile(rf"[(\[](?:\s*[-−]?{_ITEMS}(?:\s*[,;]|(?<=,)))+\s*\Z")
_END_OF_LIST = re.compile(r"[^()\[\]A-Za-z\n]*[)\]]")


def around(text: str, start: int, end: int) -> str:
    """Return the formula around the number at these indices, or the number."""
    first = max(text.rfind("\n", 0, start) + 1, start - _MAX_CHARACTERS)
    line_end = text.find("\n", end)
    last = min(len(text) if line_end < 0 else line_end, end + _MAX_CHARACTERS)
    before, after = text[first:start], text[end:last]
    opening, closing = _LIST.search(before), _END_OF_LIST.match(after)
    if opening and closing:
        return opening[0] + text[start:end] + closing[0]
    left, right = len(before), 0
    while (found := _LEFT.search(before, 0, left)) and found.start() < left:
        left = found.start()
    while (found := _RIGHT.match(after, right)) and found.end() > right:
        right = found.end()
    formula = before[left:] + text[start:end] + after[:right]
    return _balanced(re.sub(r"^\s*(?:is|equals|are)\s+", "", formula)).strip()


def _balanced(formula: str) -> str:
    """Return a formula without a bracket whose partner is outside of it."""
    if formula.count("(") < formula.count(")"):
        return formula.rstrip(" ").removesuffix(")")
    if formula.count("(") > formula.count(")") and formula.startswith("("):
        return formula[1:]
    return formula
