"""Questions of tasks and data sets.

The verifier's process and the data commands import this module: no JAX here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question, and what a verifier needs to judge an answer.

    `reference` holds JSON values only.  That of a data set names its "verifier"
    ("math" or "code"), has the "answer" or the "tests" that this verifier wants, and
    "id", the data set's own name of the question.  That of a reasoning_gym task has
    "answer" and "metadata", and is judged by the task.
    """

    task: str
    text: str
    reference: dict[str, Any]
    system: str = ""  # what the data set itself says before the question


def take(questions: Sequence[Question], places: list[int]) -> list[Question]:
    """Return those at some places; by one read if possible, ten times as fast."""
    read = getattr(questions, "__getitems__", None)
    return read(places) if read else [questions[place] for place in places]
