"""A channel in the memory of one process, with faults on request."""

import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from scalerl_jax.weights.channels import (
    Buffer,
    FullChannelError,
    LostObjectError,
    Reference,
)

Fault = Literal["torn", "late", "missing"]


class MemoryChannel:
    """Objects in the memory of this process, and faults on request."""

    def __init__(self, *, capacity: int | None = None) -> None:
        """A channel that holds so many bytes; None: as many as come."""
        self.capacity = capacity
        self.faults: dict[Reference, Fault] = {}  # until the entry is removed
        self._objects: dict[Reference, list[Buffer]] = {}
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Reference]:
        """References of what it holds, oldest first."""
        return iter(list(self._objects))

    def put(self, name: str, buffers: Sequence[Buffer]) -> Reference:
        """Copy buffers."""
        size = sum(buffer.nbytes for buffer in buffers)
        with self._changed:
            held = sum(each.nbytes for kept in self._objects.values() for each in kept)
            if self.capacity is not None and held + size > self.capacity:
                raise FullChannelError(
                    f"{size} bytes of {name} beside {held} are more than the "
                    f"{self.capacity} that the channel holds; discard others first"
                )
            reference = f"{name}-{uuid.uuid4().hex[:12]}"
            self._objects[reference] = [buffer.copy() for buffer in buffers]
            self._changed.notify_all()
        return reference

    def fetch(
        self, reference: Reference, *, num_bytes: int, timeout_s: float
    ) -> list[Buffer]:
        """Copy what was put, as its fault makes it."""

        def is_there() -> bool:
            absent = self.faults.get(reference) in ("late", "missing")
            return reference in self._objects and not absent

        with self._changed:
            if not self._changed.wait_for(is_there, timeout_s):
                raise LostObjectError(f"{reference} is not there after {timeout_s:g} s")
            found = [buffer.copy() for buffer in self._objects[reference]]
            torn = self.faults.get(reference) == "torn"
        size = sum(buffer.nbytes for buffer in found)
        if size != num_bytes:
            raise LostObjectError(f"{reference} has {size} bytes and not {num_bytes}")
        if torn:
            for buffer in found:
                buffer[buffer.size // 2 :] ^= 0xFF
        return found

    def mend(self, reference: Reference) -> None:
        """Take a fault away; who waits for the object gets it."""
        with self._changed:
            self.faults.pop(reference, None)
            self._changed.notify_all()

    def discard(self, reference: Reference) -> None:
        """Drop buffers."""
        with self._changed:
            self._objects.pop(reference, None)
