r"""Verdicts on answers to maths problems.

`finding` finds the final answer.  `comparing` decides if it equals the reference's:
numbers and most expressions by their values, the rest by `math-verify`.  Nothing here
limits time or memory, which SymPy may use without bounds to simplify an expression:
the verifier's process limits them.
"""

from typing import Any

from scalerl_jax.environments.judges.comparing import (
    MAX_CHARACTERS,
    is_readable,
    same_answer,
)
from scalerl_jax.environments.judges.finding import AnswerFrom, find_answer, last_boxed
from scalerl_jax.environments.judges.notation import squeezed, tidy
from scalerl_jax.environments.verdict import Verdict

_MAX_WRITTEN = 8 * MAX_CHARACTERS  # of an answer, typesetting included


def judge(
    task: str, answer: str, reference: dict[str, Any], *, answer_from: AnswerFrom
) -> Verdict:
    """Return whether a completion's final answer equals the reference's "answer".

    The latter is a LaTeX expression, a number, or a list, any of which is right.
    Spaces, typesetting and units do not count, nor the order of a list or a set; in a
    list it counts how often an element occurs.  Numbers are equal as `values` says, a
    percentage is a number or its hundredth, an assignment its right side.  A pair in
    brackets is a point and an open interval, and equals the list of the two.

    Raises:
        ValueError: the reference's answer cannot be read, and another text may or
            may not equal it.
    """
    found = find_answer(answer, answer_from)
    if found is not None and len(found) > _MAX_WRITTEN:
        return Verdict("unparsable")
    if found is None or not tidy(found):
        return Verdict("no_answer")
    expected = expected_answers(reference)
    verdicts = []
    for each in expected:
        verdicts.append(same_answer(each, found))
        if verdicts[-1]:
            return Verdict("correct")
    if None in verdicts:
        if not is_readable(found):
            return Verdict("unparsable")
        for each in expected:
            _check_readable(each)
    return Verdict("wrong")


def check(task: str, answer: str, reference: dict[str, Any]) -> float:
    """Return 1 if a prompt's reference is usable; a score function for a pool.

    Raises:
        ValueError: it holds no answer, or one that cannot be read.
    """
    for each in expected_answers(reference):
        _check_readable(each)
    return 1.0


def _check_readable(expected: str) -> None:
    if not is_readable(expected):
        raise ValueError(f"the reference's answer cannot be read: {expected[:80]!r}")


def expected_answers(reference: dict[str, Any]) -> list[str]:
    r"""Return the right answers, without a \boxed{} around them.

    Raises:
        ValueError: there is none.
    """
    given = reference.get("answer")
    if len(str(given)) > _MAX_WRITTEN:
        raise ValueError(f"the reference's answer is over {_MAX_WRITTEN} characters")
    answers = [
        tidy(last_boxed(str(each)) or str(each))
        for each in (given if isinstance(given, list | tuple) else [given])
        if isinstance(each, str | int | float) and not isinstance(each, bool)
    ]
    if not answers or not all(answers):
        raise ValueError(
            f"a maths prompt's reference needs an 'answer', a text or a number or a "
            f"list of them, and has {given!r}"
        )
    return answers


def normalized(answer: str) -> str:
    """Return an answer without spaces and delimiters: equal texts are one answer."""
    return squeezed(tidy(answer))
