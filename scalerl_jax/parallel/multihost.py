"""Coordinate several processes that train as one: exchange texts, agree, wait.

Only this module asks JAX for the number of this process.  With a single process every
function returns at once and sends nothing; `rendezvous` starts several processes.

Processes exchange short texts through the store of JAX's coordination service: it needs
no device, and reports which process is missing.  All processes must make the same calls
in the same order.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Sharding

from scalerl_jax.types import PyTree

_Result = TypeVar("_Result")
_calls: collections.Counter[str] = collections.Counter()


def process_index() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Return the number of processes."""
    return jax.process_count()


def exchange(text: str, *, name: str, timeout_s: float) -> list[str]:
    """Exchange a text with the other processes; return the texts of all, in order.

    Raises:
        TimeoutError: a process did not call; the message says which.
    """
    mine, count = process_index(), process_count()
    if count == 1:
        return [text]

    return _by_store(text, process=mine, count=count, name=name, timeout_s=timeout_s)


def agree(value: str, *, name: str, timeout_s: float) -> None:
    """Check that all processes have the same value.

    Raises:
        ValueError: a value differs from process 0's; the same error on every process.
    """
    first, *others = exchange(value, name=name, timeout_s=timeout_s)
    for process, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"{name} is {other} in process {process} and {first} in process 0; "
                f"start all processes with the same code and settings"
            )


def together(action: Callable[[], _Result], *, name: str, timeout_s: float) -> _Result:
    """Run `action` in every process; return its result here once all have succeeded.

    Raises:
        RuntimeError: it failed in a process; all raise the first such process's error.
            A single process raises its own error unchanged.
    """
    if process_count() == 1:
        return action()
    failure, result = "", None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  raised below, on every process
        failure = str(error) or repr(error)
    for process, text in enumerate(exchange(failure, name=name, timeout_s=timeout_s)):
        if text:
            raise RuntimeError(f"process {process}: {text}")
    return result  # type: ignore[return-value]


# First and last index, the latter not included, along each axis of an array.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnPart:
    """The part of an array that the devices of this process read, which alone it has.

    It stands in batches [M, ...] of arrays, whose microbatches are all there; an index
    into them gives a part again.  With slices for all axes, as JAX asks for what a
    device reads, it gives the numbers there.
    """

    part: np.ndarray
    starts: tuple[int, ...]  # of the part, in the array
    shape: tuple[int, ...]  # of the array

    @property
    def nbytes(self) -> int:
        """Return the bytes of the part."""
        return self.part.nbytes

    def __len__(self) -> int:
        """Return the length of the array's first axis."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return some microbatches, or the numbers of a device."""
        if isinstance(index, tuple):
            return self.part[self._own(index)]
        found = self.part[index]
        if found.ndim < self.part.ndim:
            return OwnPart(part=found, starts=self.starts[1:], shape=self.shape[1:])
        shape = (len(found), *self.shape[1:])
        return OwnPart(part=found, starts=self.starts, shape=shape)

    def _own(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        own = []
        sizes = zip(index, self.starts, self.shape, self.part.shape, strict=True)
        for each, first, size, here in sizes:
            start, stop, _ = each.indices(size)
            assert first <= start <= stop <= first + here, "a device of other processes"
            own.append(slice(start - first, stop - first))
        return tuple(own)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """Refuse to pass for the array: a part of it is here."""
        raise TypeError(f"a part of {self.shape} is here, {self.part.shape}")


def own_box(
    shape: tuple[int, ...], sharding: Sharding, devices: Collection[Any] | None = None
) -> Box:
    """Return the smallest box of an array with all that the devices read of it.

    `devices` None: those of this process.
    """
    if devices is None:
        devices = sharding.addressable_devices
    read = [
        [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
        for device, index in sharding.devices_indices_map(shape).items()
        if device in devices
    ]
    return tuple(
        (min(first for first, _ in axis), max(end for _, end in axis))
        for axis in zip(*read, strict=True)
    )


def first_tokens(rows: np.ndarray | OwnPart, most: int) -> Any:
    """Return rows [R, S, ...] without the tokens after the first `most`."""
    if not isinstance(rows, OwnPart):
        return rows[:, :most]
    return OwnPart(
        part=rows.part[:, :most],
        starts=rows.starts,
        shape=(rows.shape[0], most, *rows.shape[2:]),
    )


def put_global(tree: PyTree, shardings: PyTree) -> PyTree:
    """Put host arrays, equal in every process, on the devices of all processes.

    Each process transfers the shards of its own devices, for which an `OwnPart` is
    enough, without waiting for the end.  `shardings` may be a prefix of the tree, as
    for `jax.device_put`.
    """
    if process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            leaf.shape, sharding, leaf.__getitem__
        ),
        tree,
        jax.tree.broadcast(shardings, tree),
    )


def _by_store(
    text: str, *, process: int, count: int, name: str, timeout_s: float
) -> list[str]:
    """Exchange a text with the other processes; return the texts of all, in order.

    This process is number `process` of `count`.

    Raises:
        TimeoutError: a process did not call; the message says which.
    """
    client = distributed.global_state.client
    assert client is not None, "several processes have a client"
    folder = f"scalerl_jax/{name}/"
    call = _calls[name]
    _calls[name] += 1
    key = f"{folder}{call}/"
    client.key_value_set(f"{key}{process}", text)
    try:
        client.wait_at_barrier(key, int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(range(count)) - _given(client, key).keys())
        raise TimeoutError(
            f"{name}: process {', '.join(map(str, missing))} of {count} did not come "
            f"within {timeout_s:g} s; see its log"
        ) from error
    found = _given(client, key)
    # All processes have returned from the previous call of this name.
    if call:
        client.key_value_delete(f"{folder}{call - 1}/{process}")
    return [found[number] for number in range(count)]


def _given(client: Any, key: str) -> dict[int, str]:
    """Return the texts, by process, that were given so far in one call."""
    entries = client.key_value_dir_get(key)
    return {int(path.rpartition("/")[2]): value for path, value in entries}
