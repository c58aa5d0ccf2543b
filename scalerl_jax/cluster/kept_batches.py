"""Batches since the last complete checkpoint, for ranks that start again.

What is kept of a batch are the groups that it was made of, 13 bytes a token where the
packed one has 37 and its padding, and what the run added to it: scores and advantages.
Packed again it is the same, bit for bit.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.contract import Assembled
from scalerl_jax.learner import contents
from scalerl_jax.types import PackedBatch

# The batch of a window, by which its epochs share it: the version at which it was
# packed, and its first ticket.
_Key = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """Float32 values [M, R, S] of a batch, as few of them as give all again."""

    kept: np.ndarray
    each: str  # of which there is one: "rollout", "prediction", "position"

    @classmethod
    def of(
        cls, values: Float[np.ndarray, "M R S"], rollout: Int[np.ndarray, "M R S"]
    ) -> "Values":
        """Take what is needed of `values`; -0.0 and 0.0 are not the same."""
        bits, here = values.view(np.int32), rollout >= 0
        if bits[~here].any():
            return cls(kept=values.copy(), each="position")
        own, numbers = values[here], rollout[here]
        by_rollout = np.zeros(numbers.max() + 1, np.float32)
        by_rollout[numbers] = own
        if np.array_equal(by_rollout[numbers].view(np.int32), own.view(np.int32)):
            return cls(kept=by_rollout, each="rollout")
        return cls(kept=own, each="prediction")

    def on(self, rollout: Int[np.ndarray, "M R S"]) -> Float[np.ndarray, "M R S"]:
        """Return the values, given the rollout of each prediction."""
        if self.each == "position":
            return self.kept
        values, here = np.zeros(rollout.shape, np.float32), rollout >= 0
        by_rollout = self.each == "rollout"
        values[here] = self.kept[rollout[here]] if by_rollout else self.kept
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """The groups and values that a packed batch was made of."""

    arrays: dict[str, np.ndarray]  # of its groups, as `learner.contents` lays them out
    rows: bytes  # the rest of the groups, as JSON
    version: int  # of the learner, as it was packed
    values: dict[str, Values]  # its advantages, and its scores by name

    @classmethod
    def of(cls, batch: PackedBatch, made_of: Assembled) -> "KeptBatch":
        """Copy what `batch` was made of."""
        arrays, rows = contents.flatten(made_of.groups)
        known = {"": batch.advantages, **batch.scores}
        return cls(
            arrays=arrays,
            rows=json.dumps(rows).encode(),
            version=made_of.version,
            values={
                name: Values.of(np.asarray(each), made_of.rollout)
                for name, each in known.items()
            },
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes."""
        kept = [*self.arrays.values(), *(each.kept for each in self.values.values())]
        return sum(each.nbytes for each in kept) + len(self.rows)

    def packed(self, assembler: Assembler) -> PackedBatch:
        """Return the batch again, with the staleness of the window's first step."""
        groups = contents.unflatten(self.arrays, json.loads(self.rows))
        laid = assembler.packed(groups, learner_version=self.version)
        assert laid.packed is not None, "it was trained on"
        values = {name: each.on(laid.rollout) for name, each in self.values.items()}
        advantages = values.pop("")
        return dataclasses.replace(laid.packed, advantages=advantages, scores=values)


class Kept(Protocol):
    """The held batches that a learner over processes may train on again."""

    def add(self, batch: PackedBatch, made_of: Any, *, version: int) -> None:
        """Keep the batch of the step from a version, made or skipped."""
        ...

    def saved(self, version: int) -> None:
        """Note that a checkpoint is begun, or was restored, behind all these steps."""
        ...

    def forget(self, complete: Sequence[int]) -> None:
        """Let go what is behind one of the checkpoints that are complete."""
        ...

    def has_all_since(self, version: int) -> bool:
        """Return whether the batches of all steps since a checkpoint are kept."""
        ...

    def since(self, version: int) -> Iterator[PackedBatch]:
        """Yield the batches of all steps since a checkpoint, each packed again."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all that is kept."""
        ...

    @property
    def full(self) -> bool:
        """Return whether another batch may take too much memory."""
        ...


class NumberedBatches:
    """Batches that are known by their numbers: nothing of them has to be kept.

    A checkpoint of step n is behind the batches 0 to n - 1.
    """

    num_bytes, full = 0, False

    def __init__(self, packed: Callable[[int], PackedBatch]) -> None:
        """Begin at the start; `packed` makes the batch of a number."""
        self._packed = packed
        self._end = 0

    def add(self, batch: PackedBatch, made_of: int, *, version: int) -> None:
        """Note that a batch was trained on; `made_of` is its number."""
        del batch, version
        self._end = made_of + 1

    def saved(self, version: int) -> None:
        """Do nothing: the step of a checkpoint says what is behind it."""

    def forget(self, complete: Sequence[int]) -> None:
        """Do nothing."""

    def has_all_since(self, version: int) -> bool:
        """Return True: every batch can be made again."""
        return True

    def since(self, version: int) -> Iterator[PackedBatch]:
        """Yield the batches after the checkpoint of a step, each packed again."""
        return map(self._packed, range(version, self._end))


class KeptBatches:
    """The batches since the last complete checkpoint, in the order of their steps."""

    def __init__(self, assembler: Assembler, *, limit_bytes: float) -> None:
        """Begin at the start of the run; `limit_bytes`: see `full`."""
        self._assembler = assembler
        self._limit = limit_bytes
        self._number = 0  # steps made or skipped
        self._steps: dict[int, tuple[_Key, int]] = {}  # the batch, and its age
        self._batches: dict[_Key, KeptBatch] = {}
        self._saved: dict[int, int] = {0: 0}  # version of a checkpoint -> steps before

    def add(self, batch: PackedBatch, made_of: Assembled, *, version: int) -> None:
        """Keep the batch of the step from a version, made or skipped."""
        key = (made_of.version, made_of.groups[0].ticket)
        if key not in self._batches:
            self._batches[key] = KeptBatch.of(batch, made_of)
        self._steps[self._number] = (key, version - made_of.version)
        self._number += 1

    def saved(self, version: int) -> None:
        """Note that a checkpoint is begun, or was restored, behind all these steps."""
        self._saved[version] = self._number

    def forget(self, complete: Sequence[int]) -> None:
        """Let go what is behind one of the checkpoints that are complete."""
        before = max((self._saved.get(version, 0) for version in complete), default=0)
        self._steps = {
            number: step for number, step in self._steps.items() if number >= before
        }
        used = {key for key, _ in self._steps.values()}
        self._batches = {key: self._batches[key] for key in used}

    def has_all_since(self, version: int) -> bool:
        """Return whether the batches of all steps since a checkpoint are kept."""
        first = self._saved.get(version)
        return first is not None and all(
            number in self._steps for number in range(first, self._number)
        )

    def since(self, version: int) -> Iterator[PackedBatch]:
        """Yield the batches of all steps since a checkpoint, each packed again."""
        for number in range(self._saved[version], self._number):
            key, age = self._steps[number]
            batch = self._batches[key].packed(self._assembler)
            yield dataclasses.replace(batch, staleness=batch.staleness + age)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all that is kept."""
        return sum(each.num_bytes for each in self._batches.values())

    @property
    def full(self) -> bool:
        """Return whether another batch may pass half of the limit.

        That half is for batches since the newest checkpoint was begun, the other for
        those before it, which are kept until it is complete.
        """
        newest = max(self._saved.values())
        keys = {key for number, (key, _) in self._steps.items() if number >= newest}
        sizes = [self._batches[key].num_bytes for key in keys]
        return sum(sizes) + max(sizes, default=0) > self._limit / 2
