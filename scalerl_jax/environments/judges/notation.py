r"""Notation of answers: one spelling for equal texts, and the parts of a text.

`plain` removes what does not affect a value (\left, \dfrac, \mathbf, spaces,
delimiters, "the answer is") and gives one spelling to what has several.  Nothing is
computed here.
"""

import functools
import re
from collections.abc import Container
from typing import NamedTuple

from scalerl_jax.environments.judges.characters import FOREIGN_LETTER, spelled
from scalerl_jax.environments.judges.units import valued

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_NOISE_AT_END = re.compile(
    r"(?:\\q?quad|\\\\|\\[,;:! ]|[\s,;]|(?<![\\.])\.|(?<!\\)\\)\Z"
)
_LONGEST_NOISE = len(r"\qquad")
_TEXTS = (
    r"text(?:bf|it|rm|normal|sf|tt|up|sl|sc|md)?|mbox|hbox|mathrm|emph|operatorname\*?"
)
_BOLD = "mathbf|boldsymbol|bm|pmb|bold|mathit|mathsf|mathtt|ensuremath"
_SIZES = "tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge"
_STYLES = "(?:display|text|script)style|(?:no)?limits|bf|rm|it|notag|nonumber"
_AROUND = "underline|uline|fbox|framebox|mathop|mathord"
_LENGTH = r"-?[\d.]+\s*(?:pt|em|ex|mu|mm|cm|in)"
_FUNCTIONS = (
    r"(?:arc)?(?:sin|cos|tan|cot|csc)h?|arcsec|(?:arc)?c?tg|exp|ln|log|gcd|lcm|det"
)
_CURRENCY = r"(?:\\\$|\\pounds(?![a-z])|[$£€¥₹₩₽₱₫¢])"
_COUNTRY = r"(?:USD|AUD|CAD|CHF|US|EUR|GBP|CNY|RMB|JPY|INR|[AC](?=\$)|Rs\.?)"
_OPERATORS = rf"{_FUNCTIONS}|sech?|max|min|sup|inf|lim|Pr"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
# Each rule with a text that it needs: without this text the rule is skipped.
_REWRITTEN = tuple(
    (hint, re.compile(pattern), replacement)
    for hint, pattern, replacement in (
        # 1\,000 and 1{,}000 and 1,\!000
        ("", r"(?<=\d)\s*(?:\{,\}|,?\\[,!;: ])(?:\\!)?\s*(?=\d{3}(?!\d))", ""),
        (r"\!", r"\s*\\!\s*(?=:)|(?<=:)\s*\\!", ""),  # 5\!:\!30
        ("phantom", rf"\\[hv]?phantom\s*(?:{_GROUP}|[^\s{{])", ""),
        ("\\", r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (
            r"\math",
            r"^\s*\\math(?:bf|it|sf|tt)\s*\{\s*([A-Za-z]{2,})\s*\}\s*$",
            r"\\text{\1}",
        ),
        ("\\", rf"\\(?:{_STYLES}|{_SIZES}|{_BOLD}|{_AROUND})(?![A-Za-z])", ""),
        ("\\", r"\\(?:[hv]space\*?|tag\*?|label)\s*\{[^{}]*\}", " "),
        ("k", rf"\\(?:[hm]skip|m?kern)\s*{_LENGTH}", " "),
        ("color", r"\\(?:text|page)?color(?:box)?\s*(?:\[\w*\])?\s*\{[^{}]*\}", ""),
        (r"\\", rf"\\\\\s*\[\s*{_LENGTH}\s*\]", r"\\\\ "),
        (
            r"\operatorname",
            rf"\\operatorname\*?\s*\{{\s*({_OPERATORS})\s*\}}",
            r"\\\1 ",
        ),
        ("{", rf"\\(?:{_TEXTS})\s*\{{", r"\\text{"),
        (r"\text", rf"\\text\{{\s*({_FUNCTIONS}|pi|sqrt)\s*\}}", r"\\\1 "),
        # \mathrm{i} and \text{x} are i and x; g, m and s may be units.
        (r"\text", r"\\text\{\s*([abcefijknopqruvwxyz])\s*\}", r" \1 "),
        (r"\text", r"\\text\{([^{}A-Za-z]*)\}", r"\1"),
        ("\\", r"\\q?quad(?![A-Za-z])|(?<!\\)\\[,;:! ]", " "),
        ("frac", r"\\(?:[dtc]|nice|flat|[sx])frac(?![a-z])", r"\\frac"),
        ("binom", r"\\[dt]binom(?![a-z])", r"\\binom"),
        (r"\choose", r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\over", r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        ("tg", r"\\(arc)?(c)?tg(?![a-z])", lambda found: _TANGENTS[found[1], found[2]]),
        ("brace", r"\\([lr])brace(?![a-z])", r"\\\1b "),
        (r"\lb", r"\\lb ", r"\\{"),
        (r"\rb", r"\\rb ", r"\\}"),
        ("\\", r"\\[lr]?[vV]ert(?![a-z])|(?<!\\)\\\|", "|"),
        ("eq", r"\\([lg])e(?:q|qslant)(?![a-z])", r"\\\1e "),
        (r"\neq", r"\\neq(?![a-z])", r"\\ne "),
        ("dots", r"\\[lc]?dots(?![a-z])", r"\\ldots "),
        (r"\var", r"\\var(epsilon|theta|rho|phi)(?![a-z])", r"\\\1"),
        ("\\", r"\\varnothing(?![a-z])|\\\{\s*\\\}", r"\\emptyset "),
        ("degree", r"\\(?:text)?degree(?![a-z])", r"^\\circ "),
        ("", r"\\%|\s*\b(?:per\s?cent|percentage|pct)\b", "%"),
        ("%", r"\\text\{\s*%\s*\}", "%"),
        ("", rf"(?<![\d\s])\s*{_CURRENCY}|{_CURRENCY}(?!\s*[\d.])", ""),
        ("", rf"^\s*(?:\\text\{{\s*{_COUNTRY}\s*\}}|{_COUNTRY})\s*(?=[\d.])", ""),
        ("**", r"\*\*", "^"),
        # \dot{2}7\dot{3}: the digits from one dot to the other repeat
        (r"\dot", r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        ("mod", r"\(?\\[pb]?mod(?![a-z])\s*(?:\{([^{}]*)\}|(\w+))\)?", r"\\pmod{\1\2}"),
        ("mod", r"\(?(?:\\text\{\s*mod\s*\}|\bmod\b)\s*(\w+)\)?", r"\\pmod{\1}"),
        # In words the root is of the whole number; \sqrt12 of TeX is of the 1.
        ("sqrt", r"(?<![\\A-Za-z])sqrt\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
        (
            "",
            r"(?<![\\A-Za-z])(pi|sqrt|(?:arc)?(?:sin|cos|tan)|ln|log)(?![A-Za-z])",
            r"\\\1 ",
        ),
        ("inf", r"(?<![\\A-Za-z])inf(?:inity|ty)?(?![A-Za-z])", r"\\infty "),
        ("x", r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times "),
    )
)
_OPEN_END = r"\s+(?:more|less|fewer|greater|higher|lower|above|below|over|under|so)\b"
_AFTER_WORDS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\text\{[\s,]*(?:and|or|AND|OR)[\s,]*\}", ", "),
        (rf"(?<=[\s\d)\]}}])(?:and|or|AND|OR)(?![A-Za-z])(?!{_OPEN_END})", ", "),
        (r"(?<=[\s\d)\]}])(?:或者?|和)", ", "),
        # 10 000; a space between digits separates them otherwise
        (
            r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?!\d|\s*/)",
            lambda found: found[1].replace(" ", ""),
        ),
    )
)
_TANGENTS = {
    **{(None, None): r"\tan ", (None, "c"): r"\cot "},
    **{("arc", None): r"\arctan ", ("arc", "c"): r"\arccot "},
}
_WHOLE = re.compile(r"\\text\{([^{}]*)\}|\{([^{}]*)\}")
_SHORT_TEXT = re.compile(r"[^\d\\]*[A-Za-z]{2}[^\d\\]*")  # no product of its letters
# "The answer is 5", "\\text{Result:} 5"; and that what follows is rounded.
_INTRODUCTION = r"(?:[A-Za-z,']+\s+)*(?:is|are|equals|answer|result)\s*[:=]?\s*"
_FOREIGN_WORDS = rf"{FOREIGN_LETTER}+(?:\s+{FOREIGN_LETTER}+)*"
_INTRODUCED = re.compile(
    rf"\s*(?:\\text\{{\s*(?P<text>{_INTRODUCTION})\}}\s*:?|(?P<words>{_INTRODUCTION})"
    rf"|{_FOREIGN_WORDS}(?<=[是为於于は은는])\s*:?|{_FOREIGN_WORDS}:)"
    r"(?=[^A-Za-z]|\b)\s*(?=\S)",
    re.I,
)
_CHANGES = re.compile(
    r"\b(?:not|no|more|less|most|least|than|never|un\w+)\b|[不非没負负大小多少超半]",
    re.I,
)
_ABOUT = re.compile(
    r"\s*(?:\\approx|\\simeq|\\text\{\s*(?:about|approximately|roughly|around)\s*\}"
    r"|(?:about|approximately|roughly|around)\b)",
    re.I,
)


@functools.lru_cache(maxsize=4096)
def plain(answer: str) -> str:
    """Return an answer in the spelling that is compared; words keep their \\text{}."""
    text = tidy(_unescaped(spelled(answer)))
    for hint, pattern, replacement in _REWRITTEN:
        if hint in text:
            text = pattern.sub(replacement, text)
    text = _with_or(valued(text))
    for pattern, replacement in _AFTER_WORDS:
        text = pattern.sub(replacement, text)
    text = _without_introduction(tidy(text))
    while found := _WHOLE.fullmatch(text):
        if _SHORT_TEXT.fullmatch(found.group(1) or ""):
            break
        text = tidy(found.group(1) or found.group(2) or "")
    return _as_list_of_rows(_as_condition(_INTERVAL.sub(_turned_interval, text)))


_OR = re.compile(
    r"\\(?:lor|vee|cup)(?![A-Za-z])|\\text\{[\s,]*(?:or|OR)[\s,]*\}"
    r"|(?<=[\s\d)\]}])(?:or|OR)(?![A-Za-z])"
)
_COMPARED = re.compile(r"[<>]|\\(?:[lg]e|ne|in)(?![A-Za-z])")


def _with_or(text: str) -> str:
    r"""Write "or" as \lor where it stands between inequalities."""
    parts = _OR.split(text)
    if len(parts) == 1 or not all(map(_COMPARED.search, parts)):
        return text
    return r" \lor ".join(parts)


_COMMANDS = (
    r"[dt]?frac|sqrt|pi|text|left|right|circ|cup|cap|infty|[lc]?dots?|times|log|ln|sin"
    r"|cos|tan|arc(?:sin|cos|tan)|pm|math(?:rm|bb|bf|cal)|begin|[lg]eq?|[lg]eqslant|neq?"
    r"|in|mid|equiv|angle|triangle|alpha|beta|theta|phi|lambda|overline|d?binom|quad"
    r"|operatorname|lfloor|lceil|emptyset|varnothing"
)
_ESCAPED_TWICE = re.compile(rf"\\\\(?:(?:{_COMMANDS})(?![A-Za-z])|[%{{])")
_LONE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")


def _unescaped(text: str) -> str:
    r"""Return a text with one backslash for two, where JSON escaped all of them twice.

    A \\frac of this kind is no new row with "frac" in it: all backslashes are in pairs.
    """
    if not _ESCAPED_TWICE.search(text) or _LONE_BACKSLASH.search(text):
        return text
    return text.replace(r"\\", "\\")


def tidy(answer: str) -> str:
    """Return an answer without the delimiters, spaces and full stops around it."""
    answer = answer.strip()
    for opening, closing in _DELIMITERS:
        inside = answer[len(opening) : -len(closing)]
        if answer == opening + inside + closing and "$" not in inside:
            answer = inside.strip()
    end = len(answer)
    # One after the other: `\,` is also `\` and `,`, and n of them have 2^n readings.
    while noise := _NOISE_AT_END.search(answer, max(0, end - _LONGEST_NOISE), end):
        end = noise.start()
    return answer[:end]


_INTERVAL = re.compile(r"([\[\]])([^\[\](),;{}]+[,;][^\[\](),;{}]+)([\[\]])")


def _turned_interval(found: re.Match[str]) -> str:
    """Write ]a, b[ as (a, b): ISO 31-11's brackets that point away are open ends."""
    opening = "(" if found[1] == "]" else "["
    closing = ")" if found[3] == "[" else "]"
    return f"{opening}{found[2]}{closing}"


_CONDITION = re.compile(
    r"\\\{\s*(?P<name>[A-Za-z])\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|\\R)\s*)?"
    r"(?:\\mid(?![a-z])|[|:])(?P<condition>.+)\\\}",
    re.DOTALL,
)


def _as_condition(text: str) -> str:
    r"""Return the condition of a set of reals, as x > 1 of \{x : x > 1\}."""
    found = _CONDITION.fullmatch(text)
    inside = found["condition"].strip() if found else ""
    if not found or not inside or r"\}" in inside:
        return text
    letters = re.sub(r"\\[A-Za-z]+", " ", inside)
    return inside if set(re.findall(r"[A-Za-z]", letters)) == {found["name"]} else text


_ROWS = re.compile(
    r"(?:(?:\\\{\s*)?\\begin\{(?P<kind>cases|aligned|align\*?|gathered|split)\}"
    r"|\\\{\s*\\begin\{(?P<array>array)\}\s*\{[lcr| ]*\})"
    r"(?P<rows>.*)\\end\{(?:(?P=kind)|(?P=array))\}\.?",
    re.DOTALL,
)
_ALIGNED = re.compile(r"&\s*(?=[=<>]|\\[lg]e(?![a-z]))|(?<=[=<>])\s*&")


def _as_list_of_rows(text: str) -> str:
    """Return the rows of a system as a list; cases of a function stay as they are."""
    if r"\begin" not in text:
        return text.replace(r"\\", ", ")
    found = _ROWS.fullmatch(text)
    rows = _ALIGNED.sub("", found["rows"]) if found else "&"
    if "&" in rows:
        return text
    rows = re.sub(r"\\\\\s*(?=[=<>]|\\[lg]e(?![a-z]))", " ", rows)  # a chain goes on
    return ", ".join(filter(None, map(tidy, rows.split(r"\\"))))


def _without_introduction(text: str) -> str:
    found = _INTRODUCED.match(text)
    if found and not _CHANGES.search(found.group()):
        text = text[found.end() :]
    about = _ABOUT.match(text)
    return text[about.end() :].strip() if about else text


_GAP = re.compile(r"(?<![\d.]) | (?![\d.])")


def squeezed(text: str) -> str:
    """Return a text without spaces, but for those that keep numbers apart."""
    return _GAP.sub("", " ".join(text.split()))


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
    """A text that is in brackets as a whole."""

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
    r"(?P<factor>[^&]*?)(?P<open>[(\[])?\s*\\begin\{(?P<kind>[pb]?(?:small)?matrix|array)\}"
    r"(?:\{[lcr| ]*\})?(?P<inside>.*)\\end\{(?P=kind)\}\s*(?P<close>[)\]])?",
    re.DOTALL,
)


def cells(text: str) -> list[list[str]] | None:
    """Return the cells of a matrix, row by row, times the factor before it."""
    found = _MATRIX.fullmatch(text)
    if not found or bool(found["open"]) != bool(found["close"]):
        return None
    factor = found["factor"].strip().removesuffix(r"\cdot").strip()
    if factor in ("+", "-"):
        factor += "1"
    if any(split(factor.lstrip("+-"), {"+", "-", ",", ";", "="})[1]):
        return None
    inside = re.sub(r"\\hline(?![a-z])", " ", found["inside"])
    rows = [row for row in re.split(r"\\\\|\\cr(?![a-z])", inside) if row.strip()]
    return [
        [
            f"({factor})({cell})" if factor else cell
            for cell in map(plain, row.split("&"))
        ]
        for row in rows
    ]


_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")


def ungrouped(text: str) -> str:
    """Return a text without commas that group digits; in brackets they separate."""
    if any(bracket in text for bracket in ("(", "[", r"\{")):
        return text
    return _GROUPED.sub(lambda found: found.group().replace(",", ""), text)
