"""Receive published params on a replica: fetch, check, and lay out on devices.

A version arrives whole or not at all.  The fetched values stay on the host as the base
of the next delta, separate from the arrays on the devices: the sampler continues with
the old arrays, and swaps between two calls.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from scalerl_jax.types import PyTree
from scalerl_jax.weights.channels import Buffer, Channel, LostObjectError, Reference
from scalerl_jax.weights.deltas import DamagedDeltaError, apply
from scalerl_jax.weights.manifest import Manifest, ManifestShard, PublishReport
from scalerl_jax.weights.publication import Published
from scalerl_jax.weights.shards import (
    Region,
    Shard,
    checksum,
    named_leaves,
    own_boxes,
    place,
)

# handles -> context manager in which the channel can use them
Reaching = Callable[[Mapping[Reference, Any]], contextlib.AbstractContextManager[None]]
# old params, deleted to free memory, or None -> new params on the devices
LayOut = Callable[[PyTree | None], PyTree]
_Bits = tuple[int, list[int]]  # a version, and the checksums of its shards


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A version on the host: checked, and not yet on devices."""

    manifest: Manifest
    needed: list[ManifestShard]  # the fetched shards
    held: dict[Region, NDArray]  # their values
    seconds: float  # of fetching


class NotReceivedError(RuntimeError):
    """A version did not arrive whole; the previous one is still valid."""


class NeedsFullError(NotReceivedError):
    """A delta against a version that this process does not have."""


class Receiver:
    """Fetches versions for the devices of this process, one at a time.

    It fetches only shards that overlap with the shards of these devices.
    """

    policy_version: int | None = None  # received last
    report: PublishReport | None = None  # of that version

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        keep_base: bool = True,
        threads: int = 4,
    ) -> None:
        """Create a receiver without a version.

        Args:
            channel: the channel of the senders.
            abstract: `jax.ShapeDtypeStruct`s with shardings, in the sampler's tree.
            keep_base: keep each version on the host, so that the next can be a delta;
                if False, every version must be full.
            threads: number of threads that fetch, decode and compute checksums.
        """
        self._channel = channel
        self._abstract = abstract
        self._leaves: Mapping[str, Any] = named_leaves(abstract)
        self._own = collections.defaultdict(list)
        for box in own_boxes(abstract):
            self._own[box.leaf].append(box)
        self._threads = threads
        self._keep_base = keep_base
        self._held: dict[Region, NDArray] = {}  # values of `policy_version`

    def needs_full(self, manifest: Manifest) -> bool:
        """Return True if a manifest has deltas against a version not held here."""
        return any(shard.form == "delta" for shard in self._needed(manifest)) and not (
            self._held and manifest.base_version == self.policy_version
        )

    def receive(self, manifest: Manifest, *, timeout_s: float = 600.0) -> PyTree:
        """Return the params of a version, on this process's devices.

        The host needs memory for the held and the new version, the devices need memory
        for the new one beside their current arrays.

        Raises:
            NotReceivedError: names version, shard and cause; the version held here
                stays unchanged.
        """
        return self.lay_out(self.fetch(manifest, timeout_s=timeout_s))

    def fetch(self, manifest: Manifest, *, timeout_s: float = 600.0) -> Fetched:
        """Return a version on the host, with every shard checked.

        Raises:
            NotReceivedError: see `receive`.
        """
        began = time.perf_counter()
        with self._naming(manifest):
            self._check(manifest)
            needed = self._needed(manifest)
            held = self._fetch(manifest, needed, began + timeout_s)
        return Fetched(manifest, needed, held, time.perf_counter() - began)

    def lay_out(self, fetched: Fetched, *, instead_of: PyTree | None = None) -> PyTree:
        """Return params on this process's devices; this version is then held.

        Args:
            fetched: the result of `fetch`; nothing else was laid out since.
            instead_of: params that are deleted leaf by leaf to free memory, and lost
                even if this fails.

        Raises:
            NotReceivedError: see `receive`.
        """
        began, held = time.perf_counter(), fetched.held
        by_leaf = collections.defaultdict(list)
        for shard in fetched.needed:
            by_leaf[shard.leaf].append(
                Shard(box=shard.box, shape=shard.shape, values=held[shard.box])
            )
        with self._naming(fetched.manifest, gone=instead_of is not None):
            params = place(self._abstract, by_leaf, instead_of=instead_of)
        self._held = held if self._keep_base else {}
        self.policy_version = fetched.manifest.policy_version
        seconds = fetched.seconds + time.perf_counter() - began
        # The sender counts the share of changed values.
        self.report = PublishReport.of(
            fetched.manifest, fetched.needed, seconds=seconds
        )
        return params

    @contextlib.contextmanager
    def _naming(self, manifest: Manifest, *, gone: bool = False) -> Iterator[None]:
        """Turn errors of the block into a NotReceivedError that names the version."""
        try:
            yield
        except (
            *(LostObjectError, DamagedDeltaError, ValueError, OSError, MemoryError),
            *(TimeoutError, jax.errors.JaxRuntimeError),
        ) as error:
            version, kept = manifest.policy_version, self.policy_version
            full = self.needs_full(manifest)
            before = "no earlier ones exist" if kept is None else f"{kept} stays in use"
            if gone:
                before = f"those of {kept} were deleted to make room for them"
            raise (NeedsFullError if full else NotReceivedError)(
                f"the params of version {version} were not received: {error}; {before}"
            ) from error

    def _needed(self, manifest: Manifest) -> list[ManifestShard]:
        """Return the shards that overlap with those of this process's devices."""
        return [
            shard
            for shard in manifest.shards
            if any(box.overlap(shard.box) for box in self._own.get(shard.leaf, ()))
        ]

    def _check(self, manifest: Manifest) -> None:
        """Check that a manifest has all ranks, this model's leaves, and our base."""
        if not manifest.is_whole:
            raise ValueError(
                f"its manifest is that of ranks {list(manifest.ranks)} of "
                f"{manifest.num_ranks}; merge those of all"
            )
        listed = {shard.leaf: (shard.shape, shard.dtype) for shard in manifest.shards}
        wanted = {
            name: (leaf.shape, leaf.dtype.name) for name, leaf in self._leaves.items()
        }
        for name in [*wanted, *(listed.keys() - wanted.keys())]:
            if listed.get(name) != wanted.get(name):
                raise ValueError(
                    f"leaf {name} is published as {listed.get(name)} and is "
                    f"{wanted.get(name)} here (None: absent)"
                )
        if self.needs_full(manifest):
            raise ValueError(
                f"it is a delta against version {manifest.base_version} and "
                f"{self.policy_version if self._held else None} is held here; ask "
                f"for a full one"
            )

    def _fetch(
        self, manifest: Manifest, needed: list[ManifestShard], deadline: float
    ) -> dict[Region, NDArray]:
        """Return the checked values of shards; objects are fetched concurrently."""
        by_object = collections.defaultdict(list)
        for shard in needed:
            by_object[shard.reference].append(shard)

        def fetch(reference: Reference) -> dict[Region, NDArray]:
            mine = by_object[reference]
            buffers = self._fetch_object(
                manifest.objects[reference], mine[0].box, deadline
            )
            return {
                shard.box: self._decode(shard, buffers[shard.buffer]) for shard in mine
            }

        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            found: dict[Region, NDArray] = {}
            for values in pool.map(fetch, by_object):
                found |= values
        return found

    def _fetch_object(
        self, listed: list[ManifestShard], box: Region, deadline: float
    ) -> list[Buffer]:
        """Return the buffers of the object with shards `listed`; errors name `box`."""
        reference = listed[0].reference
        try:
            buffers = self._channel.fetch(
                reference,
                num_bytes=sum(shard.num_bytes for shard in listed),
                timeout_s=max(deadline - time.perf_counter(), 0.0),
            )
        except (LostObjectError, OSError, ValueError) as error:
            raise LostObjectError(f"shard {box}: {error}") from error
        if len(buffers) != len(listed):
            raise LostObjectError(
                f"shard {box}: {reference} has {len(buffers)} buffers and not "
                f"{len(listed)}"
            )
        return buffers

    def _decode(self, shard: ManifestShard, buffer: Buffer) -> NDArray:
        """Return the values of a shard.

        Raises:
            ValueError: they differ from the published ones.
        """
        dtype = self._leaves[shard.leaf].dtype
        if buffer.nbytes != shard.num_bytes:
            raise ValueError(
                f"shard {shard.box} is {buffer.nbytes} bytes and not {shard.num_bytes}"
            )
        try:
            if shard.form == "full":
                values = buffer.view(dtype).reshape(shard.box.shape)
            else:
                values = apply(self._base(shard.box), buffer)
        except DamagedDeltaError as error:
            raise ValueError(f"shard {shard.box}: {error}") from error
        found = checksum(values)
        if found != shard.checksum:
            raise ValueError(
                f"shard {shard.box} has checksum {found:#018x}, published was "
                f"{shard.checksum:#018x}"
            )
        return values

    def _base(self, box: Region) -> NDArray:
        if box not in self._held:
            raise ValueError(
                f"shard {box} is a delta, and the version held here has other shards; "
                f"ask for a full one"
            )
        return self._held[box]


class PublishedFrom:
    """Returns the params of manifests: of the newest version, and of a pinned one."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        reaching: Reaching = lambda handles: contextlib.nullcontext(),
        in_place: bool = False,
    ) -> None:
        """Store the arguments; fetch nothing.

        Args:
            channel: the channel of the senders.
            abstract: shapes, dtypes and shardings of the params.
            reaching: makes objects with handles available to the channel.
            in_place: a version of `replacing` takes the place of the one before.
        """
        self._reaching = reaching
        self.in_place = in_place
        self.receiver = Receiver(channel, abstract)
        # Receives pinned versions, which are never the base of a delta.
        self._apart = Receiver(channel, abstract, keep_base=False)
        self._newest: tuple[_Bits, Published] | None = None
        self._pinned: tuple[_Bits, Published] | None = None

    def __call__(self, manifest: Manifest) -> Published:
        """Return the params of a manifest; params already held are not fetched again.

        Raises:
            NotReceivedError: it did not arrive whole; the previous params stay.
        """
        held = self._newest
        if held is not None and held[0] == _bits(manifest):
            return held[1]
        if self.in_place:
            raise NotReceivedError(
                f"version {manifest.policy_version} is requested, and with "
                f"generators.versions = 1 the devices hold only version "
                f"{self.receiver.policy_version}"
            )
        return self.replacing(manifest)()

    def replacing(self, manifest: Manifest) -> Callable[[], Published]:
        """Fetch a version; return a function that puts it on the devices.

        With `in_place` that function deletes the previous params.

        Raises:
            NotReceivedError: it did not arrive whole; the previous params stay.
        """
        bits, held = _bits(manifest), self._newest
        if held is not None and held[0] == bits:
            return lambda: held[1]
        lay_out = self.fetch(manifest)

        def replace() -> Published:
            before = None
            if self.in_place and self._newest is not None:
                before, self._newest = self._newest[1].params, None
            self._newest = bits, _published(lay_out(before), manifest)
            return self._newest[1]

        return replace

    def pinned(self, manifest: Manifest) -> Published:
        """Return the params of a version, perhaps an older one, and hold them.

        They are held until `release`, with `in_place` in arrays of their own.

        Raises:
            NotReceivedError: they did not arrive whole.
        """
        bits, held = _bits(manifest), self._newest
        if self._pinned is None or self._pinned[0] != bits:
            self._pinned = None  # at most one is held
            if held is not None and held[0] == bits and not self.in_place:
                self._pinned = held
            else:
                params = self.fetch(manifest, apart=True)(None)
                self._pinned = bits, _published(params, manifest)
        return self._pinned[1]

    def release(self) -> None:
        """Release the pinned params."""
        self._pinned = None

    def fetch(self, manifest: Manifest, *, apart: bool = False) -> LayOut:
        """Fetch a version to the host; return a function that lays it out.

        Args:
            manifest: the merged manifest of all ranks.
            apart: the version is neither a delta nor the base of the next one.

        Raises:
            NotReceivedError: it did not arrive whole; the previous params stay.
        """
        receiver = self._apart if apart else self.receiver
        with self._reaching(manifest.handles):
            fetched = receiver.fetch(manifest)
        return lambda before: receiver.lay_out(fetched, instead_of=before)


def _bits(manifest: Manifest) -> _Bits:
    """Return a key that is equal for two manifests only if their params are equal.

    A restored learner may publish the same version again with different params.
    """
    sums = [shard.checksum for shard in manifest.shards]
    return manifest.policy_version, sums


def _published(params: PyTree, manifest: Manifest) -> Published:
    version = jnp.int32(manifest.policy_version)
    return Published(params=params, policy_version=version, checksums=None)
