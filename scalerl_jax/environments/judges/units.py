r"""Words around a number: units, which do not count, and words that change its value.

"5 cm" is 5 and "\$5" is 5; "2 million" is 2000000, "3 squared" is 9, "12 and a half"
is 12.5, "negative 5" is -5.  A word that may change the value and has no rule here is
not a unit, so that the number before it is not the answer.
"""

import re
from collections.abc import Iterable

from scalerl_jax.environments.judges.characters import FOREIGN_LETTER

_SCALES = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9},
    **{"trillion": 10**12, "dozen": 12, "lakh": 10**5, "crore": 10**7},
    **{"百": 10**2, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8},
    **{"만": 10**4, "억": 10**8, "тыс": 10**3, "млн": 10**6, "млрд": 10**9},
}
_PARTS = {
    **{"a half": "12", "one half": "12", "a third": "13", "one third": "13"},
    **{"two thirds": "23", "a quarter": "14", "one quarter": "14"},
    **{"a fourth": "14", "three quarters": "34", "three fourths": "34"},
}
_FRACTIONS = {
    **{"halves": 2, "thirds": 3, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7},
    **{"eighths": 8, "ninths": 9, "tenths": 10, "twelfths": 12, "hundredths": 100},
    **{"thousandths": 1000, "half": 2, "third": 3, "fifth": 5, "sixth": 6, "tenth": 10},
}
_SIGNS = {
    "negative": "-",
    "minus": "-",
    "positive": "",
    "plus": "",
    "负": "-",
    "負": "-",
}
_BEHIND = {"squared": "^{2}", "cubed": "^{3}", "factorial": "!"}


def _words(names: Iterable[str]) -> str:
    return "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in names)


def _behind_a_number(words: str) -> re.Pattern[str]:
    r"""Match words right after a number, bare or as the first ones of a \text{}."""
    return re.compile(
        rf"(?<=[\d)}}\]])\s*(?:\\text\{{\s*(?P<text>{words})(?![A-Za-z])(?P<rest>[^{{}}]*)\}}"
        rf"|(?P<bare>{words})(?![A-Za-z]))",
        re.IGNORECASE,
    )


_SCALED = _behind_a_number(_words(_SCALES) + "|thousands|millions|billions|dozens")
_AND_A_PART = _behind_a_number(rf"and\s+(?:{_words(_PARTS)})")
_RAISED = _behind_a_number(_words(_BEHIND))
_PARTED = re.compile(
    rf"(?P<number>(?<![\d.])\d+)\s*(?:\\text\{{\s*(?P<text>{_words(_FRACTIONS)})"
    rf"(?![A-Za-z])(?P<rest>[^{{}}]*)\}}|(?P<bare>{_words(_FRACTIONS)})(?![A-Za-z]))"
)
_SIGNED = re.compile(
    rf"^\s*(?:\\text\{{\s*(?P<text>{_words(_SIGNS)})\s*\}}|(?P<bare>{_words(_SIGNS)}))"
    r"\s*(?=[\d.\\(]|(?<=\s)[A-Za-z](?![A-Za-z]))",
    re.I,
)


def valued(text: str) -> str:
    """Return a text whose words of value are signs: "2 million" is 2 * 1000000."""
    if not re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}|[^\x00-\x7f]", text):
        return text
    text = _SIGNED.sub(lambda found: _SIGNS[_word(found)], text)
    text = _AND_A_PART.sub(_and_a_part, text)
    for _ in range(2):  # 3 hundred thousand
        text = _SCALED.sub(_scaled, text)
    text = _RAISED.sub(lambda found: _BEHIND[_word(found)] + _rest(found), text)
    return _PARTED.sub(
        lambda found: (
            rf"\frac{{{found['number']}}}{{{_FRACTIONS[_word(found)]}}}{_rest(found)}"
        ),
        text,
    )


def _word(found: re.Match[str]) -> str:
    return " ".join((found["text"] or found["bare"]).lower().split())


def _rest(found: re.Match[str]) -> str:
    rest = (found["rest"] or "").strip()
    return rf"\text{{ {rest}}}" if rest else " "


def _scaled(found: re.Match[str]) -> str:
    word = _word(found)
    scale = _SCALES.get(word) or _SCALES[word.removesuffix("s")]
    return rf" \times {scale}{_rest(found)}"


def _and_a_part(found: re.Match[str]) -> str:
    above, below = _PARTS[_word(found).removeprefix("and ")]
    return rf" \frac{{{above}}}{{{below}}}{_rest(found)}"


_POWER = r"(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
_END_OF_VALUE = r"(?:[\d})\]]|\\pi|\\circ)"
_DEGREES = re.compile(
    r"(?P<rest>.+?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:[CF]|\\text\{\s*[CF]\s*\})?"
)
_ANGLE = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_TEXT_UNIT = rf"\\text\{{(?:[^{{}}]|\{{[^{{}}]*\}})+\}}{_POWER}"
_UNIT_IN_TEXT = re.compile(
    rf"(?P<rest>.+?)(?P<unit>(?:(?:[\s/]|\\cdot|\\mu(?=\s*\\text))*"
    rf"(?:{_TEXT_UNIT}|\\frac\{{\s*{_TEXT_UNIT}\s*\}}\{{\s*{_TEXT_UNIT}\s*\}}))+"
    r"|(?<=[\d}])\s*(?:[kM]|\\text\{\s*[kM]\s*\})?\s*\\Omega|(?<=\d)\s*\\mu\s*[mgs])"
)
_UNIT_IN_WORDS = re.compile(
    rf"(?P<rest>.*{_END_OF_VALUE})"
    rf"(?P<unit>\s*/?\s*[A-Za-z]+(?:[\s/.-]+[A-Za-z]+)*\.?{_POWER}"
    rf"|\s*{FOREIGN_LETTER}+(?:[\s/.]+{FOREIGN_LETTER}+)*\.?)"
)
# Not nm, which is n times m.
_UNITS = re.compile(
    r"(?:(?:k?m|[cm]m|ft|mi|k?g|L) (?:s|h|hr|min)|"
    r"cm|mm|km|dm|kg|mg|ml|mL|lbs?|oz|ft|in|mi|yd|hrs?|mins?|secs?|sq|cu|mph|kmh|"
    r"kph|rpm|deg|rad|usd|USD|EUR|GBP|CNY|RMB|JPY|INR|CHF|units?|cents?|degrees?|dollars?|inch(?:es)?|feet|foot|"
    r"met(?:er|re)s?|square|cubic|hours?|minutes?|seconds?|days?|years?)(?![A-Za-z])"
)
_SINGLE = "mgshdltLAVWNJCFKTHB"  # letters that are units on their own
_COUNTED = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty"
_NO_UNIT = re.compile(
    rf"(?![{_SINGLE}]$)[A-Za-z]$|"
    r"(?:and|or|if|is|are|for|when|where|mod|base|times|plus|minus|to|not|but|with|"
    r"over|choose|squared|cubed|factorial|percent|per mill?e|k|M|modulo|point|"
    r"doubled|tripled|quadrupled|halved|score|gross|googol|myriad|kilo|[bmt]n|mln|mlrd|tausend|mil|mille|"
    r"(?i:mill|mill?i(?:on|ón|ard)\w*|millones|\w*illions?)|\w+(?:ion|dred|sand|ten|hund)ths?|"
    rf"{_words(_SCALES)}|{_words(_FRACTIONS)})(?![A-Za-z])"
    rf"|(?:{_COUNTED})s?(?![A-Za-z-])"  # but 7 two-digit numbers
    r"|.*\b(?:x?or|than|least|most|below|negative|half|remainder|base|else|otherwise|"
    r"unless|maybe|perhaps|alternatively|versus)\b"
    r"|[成折打的次]|[平立]方$|.*(?:[半不非负負多少余]|[大小][于於]|最[大小]|分之|以[上下外内])"
    r"|.*(?:полов|меньше|больше|менее|более|минус|тысяч|миллион|миллиард)"
    r"|в\s+(?:квадрат|куб|степен)|(?:квадрат|куб)$",
    re.DOTALL,
)

# "5 or 6 units" and "5 or six", with commas for "or"
_ANOTHER_ANSWER = re.compile(r"[,;].*\d|\\text\{\s*[,;]", re.DOTALL)


def without_unit(text: str) -> tuple[str, bool]:
    """Return a text without the words behind it, and whether these must be units.

    Other words, as in "5 apples", count as units only after a number.
    """
    found = _DEGREES.fullmatch(text)
    if found and not _ANGLE.search(found["rest"]):
        return found["rest"], True
    found = _UNIT_IN_TEXT.fullmatch(text) or _UNIT_IN_WORDS.fullmatch(text)
    if not found or _ANOTHER_ANSWER.search(found["unit"]):
        return text, True
    unit = re.sub(r"\\(?:text|frac|cdot)|[{}/^\s.\d]", " ", found["unit"]).strip()
    if unit.endswith(r"\Omega") or unit.startswith(r"\mu"):
        return found["rest"].strip(), True
    known = _UNITS.match(unit) is not None
    if _NO_UNIT.match(unit):
        return text, True
    bare = "\\text" not in found["unit"] and unit.isascii()
    if not known and bare:  # 5x, and 2 abc, are products
        if not re.match(r"(?:\s|/)+[A-Za-z]{4}", found["unit"]):
            return text, True
    return found["rest"].strip(), known
