"""The sizes in which a program exists, and the choice of one for a call."""

import collections
import itertools
import math
from collections.abc import Iterator

_FEW_CALLS = 8  # of a size whose padding costs a compilation: not worth beginning


class ProgramSizes:
    """Sizes of a program, each of which has to be compiled before its first call.

    A call takes the smallest size that holds it, if that one is compiled.  Else it is
    padded to a larger one, until its padding has cost as much as a compilation: a size
    is not compiled for a handful of calls, and none is padded for long.  The choice
    depends on the calls alone, never on a clock.
    """

    def __init__(self, *axes: tuple[int, ...], worth: float = 0.0) -> None:
        """Combine the sizes along each axis, which increase.

        Args:
            axes: the sizes along each.
            worth: the padding that costs as much as a compilation, along the first
                axis; 0: nothing is padded.
        """
        self._axes, self._worth = axes, worth
        self._compiled: set[tuple[int, ...]] = set()
        self._padding: dict[tuple[int, ...], float] = collections.defaultdict(float)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Return all sizes, the smallest first and the largest last."""
        return itertools.product(*self._axes)

    def __len__(self) -> int:
        """Return the number of sizes."""
        return math.prod(map(len, self._axes))

    @property
    def largest(self) -> tuple[int, ...]:
        """The size that holds every call."""
        return tuple(axis[-1] for axis in self._axes)

    def compile_all(self) -> None:
        """Take every size as compiled: from now on a call takes the smallest."""
        self._compiled.update(self)

    def choose(self, *least: int) -> tuple[int, ...]:
        """Return the size for a call that needs at least so much along each axis.

        What is above the largest size gets the largest.  If no compiled size holds the
        call, it is the first one that is full along the first axis: of slots, tokens or
        sequences, a run soon has as many as there can be.
        """
        smallest = tuple(
            next((size for size in axis if size >= wanted), axis[-1])
            for axis, wanted in zip(self._axes, least, strict=True)
        )
        if smallest in self._compiled:
            return smallest
        holding = [
            size for size in self._compiled if all(map(int.__ge__, size, smallest))
        ]
        full = (self.largest[0], *smallest[1:])
        padded = min(holding, key=lambda size: (math.prod(size), size), default=full)
        padding = padded[0] * (1.0 - math.prod(smallest) / math.prod(padded))
        self._padding[smallest] += padding
        pays = max(self._padding[smallest], _FEW_CALLS * padding) <= self._worth
        chosen = padded if pays else smallest
        self._compiled.add(chosen)
        return chosen


def ladder(first: int, last: int, *, steps: tuple[float, ...] = (1,)) -> tuple:
    """Return sizes from `first` to `last`: powers of two times each of `steps`.

    Above 16 sizes only double, since every size is a program to compile.
    """
    sizes, size = {last}, first
    while size < last:
        within = steps if size < 16 else (1,)
        sizes |= {round(size * step) for step in within if size * step < last}
        size *= 2
    return tuple(sorted(sizes))
