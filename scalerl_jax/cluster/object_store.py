"""A channel of published params over Ray's object store.

An object is one of the store of the process that puts it: it is there as long as that
process lives and somebody holds its handle, which travels with the manifest
and not in its text.  A store that is full writes to the disk of its machine without a
word; so no more than a share of it is used, and the rest goes to a directory.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from scalerl_jax.cluster.calls import why_lost
from scalerl_jax.weights.channels import (
    Buffer,
    Channel,
    LostObjectError,
    Reference,
)

_SHARE = 0.5  # of a store; the rest is for batches, groups and what replicas fetch
_log = logging.getLogger(__name__)


class ObjectStoreChannel:
    """Objects in the store, and in a directory where it has no room for them."""

    def __init__(
        self,
        directory: Channel,
        *,
        capacity: int | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """A channel.

        Args:
            directory: for what finds no room.
            capacity: bytes that it holds at the most in the store; None: half of what
                the store of this machine has; 0: all goes to the directory.
            patience_s: until an object whose process has ended is given up: another
                one may publish it again.
        """
        self._directory = directory
        self._capacity = capacity
        self._patience_s = patience_s
        self.handles: dict[Reference, Any] = {}
        self._sizes: dict[Reference, int] = {}

    def put(self, name: str, buffers: Sequence[Buffer]) -> Reference:
        """Copy the buffers into the store, or write them to the directory."""
        size = sum(buffer.nbytes for buffer in buffers)
        held, capacity = sum(self._sizes.values()), self._room()
        if held + size > capacity:
            if capacity:
                _log.warning(
                    "the object store of this machine has no room for %d bytes of "
                    "params beside %d (%d at most are used): they go by way of the "
                    "directory; give Ray a larger object_store_memory",
                    *(size, held, capacity),
                )
            return self._directory.put(name, buffers)
        reference = f"{name}-{uuid.uuid4().hex[:12]}"
        try:
            handle = ray.put([np.ascontiguousarray(b) for b in buffers])
        except RayError as error:  # others have filled it, or its disk
            _log.warning(
                "the object store of this machine does not take %d bytes of params "
                "(%s): they go by way of the directory",
                *(size, why_lost(error)),
            )
            return self._directory.put(name, buffers)
        self.handles[reference] = handle
        self._sizes[reference] = size
        return reference

    def fetch(
        self, reference: Reference, *, num_bytes: int, timeout_s: float
    ) -> list[Buffer]:
        """Copy the buffers out of the store, which has no room for bases of deltas."""
        handle = self.handles.get(reference)
        if handle is None:
            return self._directory.fetch(
                reference, num_bytes=num_bytes, timeout_s=timeout_s
            )
        began = time.monotonic()
        try:
            found: Any = ray.get(handle, timeout=timeout_s)
        except RayError as error:
            left = min(timeout_s, self._patience_s) - (time.monotonic() - began)
            time.sleep(max(left, 0.0))
            raise LostObjectError(
                f"{reference} is not in the object store any more "
                f"({type(error).__name__}: its process has ended, or is out of reach)"
            ) from error
        size = sum(buffer.nbytes for buffer in found)
        if size != num_bytes:
            raise LostObjectError(f"{reference} has {size} bytes and not {num_bytes}")
        return [np.array(buffer) for buffer in found]

    def discard(self, reference: Reference) -> None:
        """Release an object; it is deleted once no process fetches it any more."""
        if self.handles.pop(reference, None) is None:
            self._directory.discard(reference)
        self._sizes.pop(reference, None)

    @contextlib.contextmanager
    def reaching(self, handles: Mapping[Reference, Any]) -> Iterator[None]:
        """Fetch these of other processes while the block runs."""
        self.handles = dict(handles)
        try:
            yield
        finally:
            self.handles = {}

    def _room(self) -> int:
        if self._capacity is None:
            own = ray.get_runtime_context().get_node_id()
            (node,) = [each for each in ray.nodes() if each["NodeID"] == own]
            self._capacity = int(_SHARE * node["Resources"]["object_store_memory"])
        return self._capacity
