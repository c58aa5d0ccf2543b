"""Rewriting of characters beyond ASCII as LaTeX.

Fractions, raised and lowered digits, Greek and double-struck letters, full-width forms
and signs of operators each have one spelling afterwards.  Letters of other scripts
stay as they are.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable

FOREIGN_LETTER = r"(?:(?![A-Za-z])[^\W\d_])"  # of another script than the Latin one

_SIGNS = {
    **{"−": "-", "–": "-", "—": "-", "―": "-", "‐": "-", "‑": "-", "’": "'", "′": "'"},
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div "},
    **{"∗": "*", "∕": "/", "⁄": "/", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty "},
    **{"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne "},
    **{"≈": r"\approx ", "≡": r"\equiv ", "≅": r"\cong ", "∼": r"\sim "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset "},
    **{"∖": r"\setminus ", "∣": r"\mid ", "∥": r"\parallel ", "⊥": r"\perp "},
    **{"→": r"\to ", "∠": r"\angle ", "△": r"\triangle ", "‖": "|", "∑": r"\sum "},
    **{
        "∆": r"\Delta ",
        "∏": r"\prod ",
        "∫": r"\int ",
        "⌊": r"\lfloor ",
        "⌋": r"\rfloor ",
    },
    **{"⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle "},
    **{"°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "℃": r"^\circ C"},
    **{"℉": r"^\circ F", "…": r"\ldots ", "⋯": r"\ldots ", "\u00a0": " ", "~": " "},
    **{"ℓ": r"\ell ", "ℏ": r"\hbar ", "。": ".", "、": ",", "｡": ".", "､": ","},
}
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωςΓΔΘΛΞΠΣΥΦΨΩ",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi "
        "rho sigma tau upsilon phi chi psi omega sigma Gamma Delta Theta Lambda Xi Pi "
        "Sigma Upsilon Phi Psi Omega".split(),
        strict=True,
    )
)
# A sign of a root takes the whole number behind it; \sqrt of TeX takes one digit.
_ROOTS = (("√", r"\sqrt"), ("∛", r"\sqrt[3]"), ("∜", r"\sqrt[4]"))
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)")


def spelled(text: str) -> str:
    """Return a text with its characters beyond ASCII written as LaTeX."""
    if text.isascii() and "~" not in text:
        return text
    written = "".join(
        f"{script}{{{_plain_digits(run)}}}" if script else "".join(map(_spelled, run))
        for script, run in itertools.groupby(text, _script)
    )
    for sign, command in _ROOTS:
        first, *behind = written.split(sign)
        written = first + "".join(_root(command, each) for each in behind)
    return written


def _root(command: str, behind: str) -> str:
    found = _NUMBER.match(behind)
    if not found:
        return f"{command} {behind}"
    return f"{command}{{{found[1]}}}{behind[found.end() :]}"


def _plain_digits(run: Iterable[str]) -> str:
    return unicodedata.normalize("NFKC", "".join(run)).replace("−", "-")


@functools.lru_cache(maxsize=1024)
def _script(character: str) -> str:
    """Return "^" for a raised character, "_" for a lowered one, "" for others."""
    if character.isascii() or character in _SIGNS:
        return ""
    kind = unicodedata.decomposition(character).partition(" ")[0]
    return {"<super>": "^", "<sub>": "_"}.get(kind, "")


@functools.lru_cache(maxsize=1024)
def _spelled(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    kind, _, letter = unicodedata.decomposition(character).partition(" ")
    simple = unicodedata.normalize("NFKC", character)
    if kind == "<fraction>":
        above, _, below = simple.partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}" if below else f"{above}/"
    if kind == "<font>" and "DOUBLE-STRUCK CAPITAL" in unicodedata.name(character, ""):
        return rf"\mathbb{{{chr(int(letter, 16))}}}"
    if simple in _GREEK:
        return f"\\{_GREEK[simple]} "
    return simple if len(simple) == 1 else character
