"""Transfer of batches to learner processes: each gets its own rows, once.

A rank keeps the arrays that it was sent until the window ends.  The controller records
what it has sent, and sends only arrays that have changed since: after the scores of a
window, the advantages, and not the tokens again.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.parallel.multihost import Box, OwnPart
from scalerl_jax.types import PackedBatch, Scores, Sharing
from scalerl_jax.weights.shards import named_leaves

# The arrays of a batch by name: tokens, scores.reference, sharing.place.
Arrays = dict[str, Any]


class BatchParts(NamedTuple):
    """The part of a batch that one rank is sent."""

    window: int
    place: int  # of the batch, in its window
    names: tuple[str, ...]  # of the batch's arrays
    new: Arrays  # the rank's own part of those that it does not have yet

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the arrays."""
        return sum(each.nbytes for each in self.new.values())


def arrays_of(batch: PackedBatch) -> Arrays:
    """Return the arrays of a batch, or of a microbatch, by name."""
    return named_leaves(batch, separator=".")


def batch_of(arrays: Arrays) -> PackedBatch:
    """Return the batch of these arrays; a field of which there is none is None."""
    fields: Arrays = {each.name: None for each in dataclasses.fields(PackedBatch)}
    nested: dict[str, Arrays] = {"scores": {}, "sharing": {}}
    for name, array in arrays.items():
        outer, _, inner = name.partition(".")
        (nested[outer] if inner else fields)[inner or outer] = array
    sharing = Sharing(**nested["sharing"]) if nested["sharing"] else None
    return PackedBatch(**fields | {"scores": nested["scores"], "sharing": sharing})


class SentBatches:
    """The controller's record of the arrays that ranks were sent in a window.

    An array that is the same object has the same numbers: batches are never written to.
    """

    def __init__(self) -> None:
        """Begin before there is any rank."""
        self._boxes: Sequence[Mapping[str, Box]] = ()
        self._window = 0
        self._sent: list[Arrays] = []
        self.num_bytes = 0  # in all, to all ranks

    def meet(self, boxes: Sequence[Mapping[str, Box]]) -> None:
        """Take ranks that have nothing, and what each reads of a microbatch."""
        self._boxes = boxes
        self.begin()

    def begin(self) -> None:
        """Begin a window; what ranks have of the one before they let go."""
        self._window += 1
        self._sent = []

    def parts(self, batch: PackedBatch) -> list[BatchParts]:
        """Return what each rank is to be sent of a batch, which it then has."""
        arrays = arrays_of(batch)
        place = self._place(arrays)
        sent = self._sent[place]
        new = {
            name: each for name, each in arrays.items() if sent.get(name) is not each
        }
        self._sent[place] = sent | new
        parts = [
            BatchParts(
                window=self._window,
                place=place,
                names=tuple(arrays),
                # An array with a number for each microbatch has no box.
                new={
                    name: own_part(each, boxes.get(name, ()))
                    for name, each in new.items()
                },
            )
            for boxes in self._boxes
        ]
        self.num_bytes += sum(each.num_bytes for each in parts)
        return parts

    def made(self, batch: PackedBatch, scores: Scores) -> None:
        """Note that each rank has these scores of a batch: it has made them."""
        sent = self._sent[self._place(arrays_of(batch))]
        sent |= {f"scores.{name}": each for name, each in scores.items()}
        self.num_bytes += sum(each.nbytes for each in scores.values())  # of one rank

    def _place(self, arrays: Arrays) -> int:
        for place, sent in enumerate(self._sent):
            if sent["tokens"] is arrays["tokens"]:
                return place
        self._sent.append({"tokens": None})
        return len(self._sent) - 1


def own_part(array: Any, box: Box) -> np.ndarray | OwnPart:
    """Return a box of each microbatch of an array; the array itself if that is all."""
    array = np.asarray(array)
    if all((0, size) == side for size, side in zip(array.shape[1:], box, strict=True)):
        return array
    part = array[(slice(None), *(slice(*side) for side in box))]
    return OwnPart(
        part=np.ascontiguousarray(part),
        starts=(0, *(first for first, _ in box)),
        shape=array.shape,
    )


class HeldBatches:
    """The parts of a window's batches that a rank holds."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._window = -1
        self._held: dict[int, Arrays] = {}

    def take(self, parts: BatchParts) -> PackedBatch:
        """Return a batch from the parts received now and earlier in its window."""
        if parts.window != self._window:
            self._window, self._held = parts.window, {}
        held = self._held.setdefault(parts.place, {})
        held |= parts.new
        return batch_of({name: held[name] for name in parts.names})

    def made(self, batches: Iterable[BatchParts], scores: Iterable[Scores]) -> None:
        """Keep the scores that were made of batches."""
        for parts, found in zip(batches, scores, strict=True):
            held = self._held[parts.place]
            held |= {f"scores.{name}": each for name, each in found.items()}
