"""Choice of the rows of a log that count, where a resumed run wrote steps again.

A resumed run continues from an earlier step and writes steps again; its new rows
replace all earlier rows from that step on.  Rows may also be unsorted; then a row is
replaced only by a later row of the same step.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Settled:
    """The rows of a log that count."""

    order: list[int]  # their indices in the log, by increasing key
    num_left_out: int  # rows that were replaced
    resumed: bool  # whether a resumed run replaced rows
    unsorted: bool  # whether the log was not in the order of its keys

    def notes(self, key: str) -> tuple[str, ...]:
        """Return notes on rows left out or sorted, for rows ordered by `key`."""
        said = []
        if self.num_left_out:
            why = f"a resumed run wrote their {key} again"
            why = why if self.resumed else f"their {key} comes again"
            said.append(
                f"{self.num_left_out} rows left out: {why}, and the last row counts"
            )
        if self.unsorted:
            said.append(f"rows were not in the order of {key}, and are sorted")
        return tuple(said)


def settle(keys: Sequence[float]) -> Settled:
    """Choose the rows of a log that count, by their steps in the order of writing.

    A step back is a resume if it returns to a logged step, or if the rows after it
    repeat every logged step that they pass: all rows from that step on are then
    replaced.  From the first other step back on, rows are sorted, and the last row of
    each step counts.
    """
    starts = [i for i in range(1, len(keys)) if keys[i] <= keys[i - 1]]
    order: list[int] = []
    kept: list[float] = []  # the keys of `order`, increasing
    resumed = unsorted = False
    for first, end in itertools.pairwise([0, *starts, len(keys)]):
        life = keys[first:end]
        place = bisect.bisect_left(kept, life[0]) if life else 0
        if place < len(kept):
            if not _resumes(kept[place:], life):
                unsorted = True
                last = {keys[i]: i for i in (*order, *range(first, len(keys)))}
                order = [last[key] for key in sorted(last)]
                break
            resumed = True
        order[place:], kept[place:] = range(first, end), life
    return Settled(order, len(keys) - len(order), resumed, unsorted)


def _resumes(replaced: Sequence[float], life: Sequence[float]) -> bool:
    """Return whether rows with the keys `life` are those of a resumed run."""
    if replaced[0] == life[0]:
        return True
    passed = {key for key in replaced if key <= life[-1]}
    return bool(passed) and passed.issubset(life)
