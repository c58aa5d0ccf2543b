"""A computer algebra system's word on two answers: `math-verify`, over SymPy.

It reads by a LaTeX grammar, and never as Python: of its ways to read, the one that
ends in SymPy's `parse_expr`, which evaluates, is left out.  It has no bounds in time
or memory, and is not asked about what is large by its looks.
"""

import functools
import logging

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase

from scalerl_jax.rewards.values import is_bounded

_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    # `units` would take the letter that ends `a + b + c`.
    normalization_config=NormalizationConfig(
        units=False, malformed_operators=True, nits=True
    ),
)

# It warns once that its own time limits, made of signals, are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@functools.lru_cache(maxsize=64)  # a group's answers often agree, its reference always
def read(answer: str) -> Basic | MatrixBase | None:
    """Read an answer as SymPy's expression, not simplified; None if it is none."""
    if not is_bounded(answer):
        return None
    try:
        found = parse(f"\\boxed{{{answer}}}", [_LATEX], parsing_timeout=0)
    except RecursionError:
        return None
    first = found[0] if found else None
    return first if isinstance(first, Basic | MatrixBase) else None


def same(expected: str, found: str) -> bool | None:
    """Return whether two answers are equal; None where one of them cannot be read."""
    one, other = read(expected), read(found)
    if one is None or other is None:
        return None
    return verify(one, other, timeout_seconds=0, allow_set_relation_comp=True)
