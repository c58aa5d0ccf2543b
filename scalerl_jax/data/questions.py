"""Questions of tasks and data sets, and sequences that read them when asked.

The verifier's process and the data commands import this module: no JAX here.
"""

import abc
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

T = TypeVar("T")
_CHUNK = 64  # members read together, each perhaps with megabytes of tests


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


class LazySequence(Sequence[T]):
    """A sequence whose members are read when they are asked for, several together."""

    @abc.abstractmethod
    def read(self, places: list[int]) -> list[T]:
        """Return the members at some places, from 0, which there are."""

    @overload
    def __getitem__(self, place: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> T | list[T]:
        """Return the member in a place, or those of a slice; negative: from the end.

        Raises:
            IndexError: there is no such place.
        """
        if isinstance(place, slice):
            return self.read(list(range(*place.indices(len(self)))))
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Iterable[SupportsIndex]) -> list[T]:
        """Return several members, which are read together."""
        indices = [operator.index(place) for place in places]
        for index in indices:
            if not -len(self) <= index < len(self):
                raise IndexError(f"there is no place {index} of {len(self)}")
        return self.read([index % len(self) for index in indices])

    def __iter__(self) -> Iterator[T]:
        """Yield all of them in order."""
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]


def take(questions: Sequence[Question], places: list[int]) -> list[Question]:
    """Return those at some places; by one read if possible, ten times as fast."""
    if isinstance(questions, LazySequence):
        return questions.read(places)
    return [questions[place] for place in places]
