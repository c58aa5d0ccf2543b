"""A verifier's word on one answer; the reward that it is worth is set elsewhere."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Status = Literal[
    "correct",
    "wrong",
    "no_answer",  # the completion holds none
    "unparsable",  # it holds one that cannot be read
    "verifier_timeout",
    "verifier_error",
]


# Failures of the verifier, which say nothing of the answer: it is not judged.
UNJUDGED: tuple[Status, ...] = ("verifier_timeout", "verifier_error")


class Verdict(NamedTuple):
    """The judgement of one answer."""

    status: Status
    detail: str = ""  # the reason of a verifier_error


# (task, answer, reference) -> a verdict, or a score: 1 or more is correct
ScoreFunction = Callable[[str, str, dict[str, Any]], float | Verdict]
