"""The receiving of published params on a replica: fetched, checked, and laid out.

A version arrives whole or not at all.  The fetched values stay on the host as the base
of the next delta, apart from the arrays on the devices: the sampler goes on with the
old arrays, and swaps between two calls.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from numpy.typing import NDArray

from scalerl_jax.types import PyTree
from scalerl_jax.weights.channels import Buffer, Channel, LostObjectError
from scalerl_jax.weights.deltas import DamagedDeltaError, apply
from scalerl_jax.weights.manifest import (
    Offer,
    OfferedShard,
    Publication,
    PublishReport,
)
from scalerl_jax.weights.shards import (
    Region,
    Shard,
    checksum,
    named_leaves,
    own_boxes,
    place,
)

_Needed = list[tuple[Offer, OfferedShard]]


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A version on the host, checked and on no device yet."""

    publication: Publication
    needed: _Needed
    held: dict[Region, NDArray]  # values of the shards
    seconds: float  # that it took


class NotReceivedError(RuntimeError):
    """A version that did not arrive whole; the one before it is still good."""


class NeedsFullError(NotReceivedError):
    """A delta against a version that is not held here."""


class Receiver:
    """Fetches versions for the devices of this process, one at a time.

    Only shards that these devices hold a part of are fetched.
    """

    policy_version: int | None = None  # of what was received last
    report: PublishReport | None = None  # of it

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        keep_base: bool = True,
        threads: int = 4,
    ) -> None:
        """A receiver that holds no version yet.

        Args:
            channel: of the senders.
            abstract: `jax.ShapeDtypeStruct`s with shardings, in the sampler's tree.
            keep_base: holds each version on the host, so that the next can be a
                delta; without, every one must be full.
            threads: that fetch, decode and sum up.
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

    def needs_full(self, publication: Publication) -> bool:
        """Return whether its deltas are against a version that is not held here."""
        return any(
            shard.form == "delta" for _, shard in self._needed(publication)
        ) and not (self._held and publication.base_version == self.policy_version)

    def receive(self, publication: Publication, *, timeout_s: float = 600.0) -> PyTree:
        """Return the params of a version, on this process's devices.

        It takes memory on the host for the version held and for the new one, and on
        the devices for the new one.

        Raises:
            NotReceivedError: names the version, the shard and the cause; what was
                received before stays as it is.
        """
        return self.lay_out(self.fetch(publication, timeout_s=timeout_s))

    def fetch(self, publication: Publication, *, timeout_s: float = 600.0) -> Fetched:
        """Return a version on the host, every shard of it checked.

        Raises:
            NotReceivedError: as `receive`.
        """
        began = time.perf_counter()
        with self._naming(publication):
            self._check(publication)
            needed = self._needed(publication)
            held = self._fetch(needed, began + timeout_s)
        return Fetched(publication, needed, held, time.perf_counter() - began)

    def lay_out(self, fetched: Fetched, *, instead_of: PyTree | None = None) -> PyTree:
        """Return params on this process's devices; from then on they are held.

        Args:
            fetched: of `fetch`; nothing else has been laid out since.
            instead_of: params that are deleted leaf by leaf to make room, and are gone
                even if this fails.

        Raises:
            NotReceivedError: as `receive`.
        """
        began, held = time.perf_counter(), fetched.held
        by_leaf = collections.defaultdict(list)
        for _, shard in fetched.needed:
            by_leaf[shard.leaf].append(
                Shard(box=shard.box, shape=shard.shape, values=held[shard.box])
            )
        with self._naming(fetched.publication, gone=instead_of is not None):
            params = place(self._abstract, by_leaf, instead_of=instead_of)
        self._held = held if self._keep_base else {}
        self.policy_version = fetched.publication.policy_version
        seconds = fetched.seconds + time.perf_counter() - began
        # The share of changed values is counted by the sender.
        shards = [shard for _, shard in fetched.needed]
        self.report = PublishReport.of(fetched.publication, shards, seconds=seconds)
        return params

    @contextlib.contextmanager
    def _naming(
        self, publication: Publication, *, gone: bool = False
    ) -> Iterator[None]:
        """Have errors in a block name the version."""
        try:
            yield
        except (
            *(LostObjectError, DamagedDeltaError, ValueError, OSError, MemoryError),
            *(TimeoutError, jax.errors.JaxRuntimeError),
        ) as error:
            version, kept = publication.policy_version, self.policy_version
            full = self.needs_full(publication)
            before = "there are none before" if kept is None else f"{kept} stays in use"
            if gone:
                before = f"those of {kept} had made room for them"
            raise (NeedsFullError if full else NotReceivedError)(
                f"the params of version {version} were not received: {error}; {before}"
            ) from error

    def _needed(self, publication: Publication) -> _Needed:
        """Shards that a device of this process holds a part of."""
        return [
            (part, shard)
            for part, shard in publication.shards
            if any(box.overlap(shard.box) for box in self._own.get(shard.leaf, ()))
        ]

    def _check(self, publication: Publication) -> None:
        """Refuse a publication of another model, or against another base."""
        offered = {
            shard.leaf: (shard.shape, shard.dtype) for _, shard in publication.shards
        }
        wanted = {
            name: (leaf.shape, leaf.dtype.name) for name, leaf in self._leaves.items()
        }
        for name in [*wanted, *(offered.keys() - wanted.keys())]:
            if offered.get(name) != wanted.get(name):
                raise ValueError(
                    f"leaf {name} is offered as {offered.get(name)} and is "
                    f"{wanted.get(name)} here (None: absent)"
                )
        if self.needs_full(publication):
            raise ValueError(
                f"it is a delta against version {publication.base_version} and "
                f"{self.policy_version if self._held else None} is held here; ask "
                f"for a full one"
            )

    def _fetch(self, needed: _Needed, deadline: float) -> dict[Region, NDArray]:
        """The values of shards, checked; objects are fetched side by side."""
        objects: dict[tuple[int, int], list[OfferedShard]]
        objects = collections.defaultdict(list)
        parts = {part.rank: part for part, _ in needed}
        for part, shard in needed:
            objects[part.rank, shard.object].append(shard)

        def fetch(key: tuple[int, int]) -> dict[Region, NDArray]:
            rank, number = key
            buffers = self._fetch_object(parts[rank], number, deadline, objects[key])
            return {
                shard.box: self._decode(shard, buffers[shard.buffer])
                for shard in objects[key]
            }

        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            found: dict[Region, NDArray] = {}
            for values in pool.map(fetch, objects):
                found |= values
        return found

    def _fetch_object(
        self, part: Offer, number: int, deadline: float, shards: list[OfferedShard]
    ) -> list[Buffer]:
        offered = part.objects[number]
        try:
            buffers = self._channel.fetch(
                offered.reference,
                num_bytes=offered.num_bytes,
                timeout_s=max(deadline - time.perf_counter(), 0.0),
            )
        except (LostObjectError, OSError, ValueError) as error:
            raise LostObjectError(
                f"shard {shards[0].box} of rank {part.rank}: {error}"
            ) from error
        if len(buffers) != offered.num_buffers:
            raise LostObjectError(
                f"shard {shards[0].box} of rank {part.rank}: {offered.reference} has "
                f"{len(buffers)} buffers and not {offered.num_buffers}"
            )
        return buffers

    def _decode(self, shard: OfferedShard, buffer: Buffer) -> NDArray:
        """The values of a shard.

        Raises:
            ValueError: they are not those that were offered.
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
        if found != shard.crc32:
            raise ValueError(
                f"shard {shard.box} has checksum {found:#010x}, offered was "
                f"{shard.crc32:#010x}"
            )
        return values

    def _base(self, box: Region) -> NDArray:
        if box not in self._held:
            raise ValueError(
                f"shard {box} is a delta and was cut in another way in the version "
                f"held here; ask for a full one"
            )
        return self._held[box]
