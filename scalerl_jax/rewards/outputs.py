"""Whether what a program gives is what was expected, exactly or within a tolerance.

With a tolerance t > 0, a number with a decimal point or an exponent may differ from
the expected y by t * max(1, |y|), as in programming contests; whole numbers may not.
"""

import decimal
import math
import re
from typing import Any, TypeGuard

_WHOLE = re.compile(r"[-+]?\d+")


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether outputs agree word by word and line by line, numbers by their value.

    Spaces around and between words, and empty lines at both ends, do not count.
    """
    lines, wanted = (
        [line.split() for line in text.strip().splitlines()]
        for text in (output, expected)
    )
    return len(lines) == len(wanted) and all(
        len(words) == len(others)
        and all(
            _same_word(*pair, tolerance) for pair in zip(words, others, strict=True)
        )
        for words, others in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    try:
        if decimal.Decimal(word) == decimal.Decimal(expected):
            return True
        both_whole = _WHOLE.fullmatch(word) and _WHOLE.fullmatch(expected)
        return not both_whole and _is_close(float(word), float(expected), tolerance)
    except (decimal.InvalidOperation, ValueError):
        return False


def _is_close(number: float, expected: float, tolerance: float) -> bool:
    try:
        finite = math.isfinite(number) and math.isfinite(expected)
        close = abs(number - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # a whole number beyond floats
        return False
    return bool(tolerance) and finite and close


def same_value(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether a value is the expected JSON value; tuples count as lists.

    Keys of dictionaries are texts, as in JSON.
    """
    if isinstance(value, list | tuple) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            same_value(*pair, tolerance) for pair in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        named = {str(key): each for key, each in value.items()}
        return named.keys() == expected.keys() and all(
            same_value(named[key], expected[key], tolerance) for key in expected
        )
    if value == expected:
        return True
    if not (_is_number(value) and _is_number(expected)):
        return False
    if isinstance(value, int) and isinstance(expected, int):
        return False
    return _is_close(value, expected, tolerance)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
