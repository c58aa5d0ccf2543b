"""Publish one process's shards: encode them, and put them into a channel.

An anchor is a version sent in full: the first, every `base_every`-th, and each version
for which it is requested.  Other versions are deltas against the previous one: an
optimizer step changes a few percent of 16-bit values.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from scalerl_jax.weights.channels import Buffer, Channel, Reference
from scalerl_jax.weights.deltas import delta
from scalerl_jax.weights.manifest import (
    WIDTHS,
    Manifest,
    ManifestShard,
    PublishReport,
)
from scalerl_jax.weights.shards import Region, Shard, checksum

_KEPT = 2  # publications kept besides the anchor: one in use, one in transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Coded:
    """A shard's entry in the manifest, not yet in an object, and its bytes."""

    shard: ManifestShard
    buffer: Buffer
    changed: int  # values that differ from the base


class Sender:
    """Publishes one rank's shards; the last published version is the next one's base.

    Call all ranks' senders for the same versions in the same order, so that they have
    the same base; otherwise `merge` raises.  After an error on one rank, request a full
    version from all.
    """

    report: PublishReport | None = None  # of the last version

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        channel: Channel,
        base_every: int = 20,
        frozen_digest: str = "",
        object_bytes: int = 64 << 20,
        threads: int = 4,
    ) -> None:
        """Store the arguments; publish nothing.

        Args:
            rank: rank of this process among the `num_ranks` that publish.
            num_ranks: number of manifests that are merged into one.
            channel: channel for the bytes.
            base_every: versions from one anchor to the next; 1: no deltas.
            frozen_digest: digest of the frozen params, which are not sent.
            object_bytes: size at which an object of the channel is closed.
            threads: number of threads that encode and compute checksums.
        """
        self._rank, self._num_ranks = rank, num_ranks
        self._channel = channel
        self._base_every = base_every
        self._frozen_digest = frozen_digest
        self._object_bytes = object_bytes
        self._threads = threads
        self._last: Manifest | None = None
        self._again: Manifest | None = None
        self._shards: tuple[Shard, ...] = ()  # of `_last`, the base of the next version
        self._since_anchor = 0
        self._anchor: list[Reference] = []
        # The one before, if this or that was sent again: a newcomer may be fetching it.
        self._anchor_before: list[Reference] = []
        self._pinned: list[Reference] = []
        self._recent: list[list[Reference]] = []
        self._stored: set[Reference] = set()  # all objects in the channel

    def send(
        self,
        shards: Sequence[Shard],
        *,
        policy_version: int,
        full: bool = False,
        pinned: bool = False,
    ) -> Manifest:
        """Publish the shards of a version.

        Their values are kept as the base of the next version: do not change them.
        Objects of older versions are discarded, except the last `_KEPT` versions, the
        anchor (see `send_again`), and the last `pinned` one.  A pinned version is sent
        in full.

        Raises:
            ValueError: the version is not after the last one.
            FullChannelError: the channel is full; nothing was published.
        """
        last, began = self._last, time.perf_counter()
        if last is not None and policy_version <= last.policy_version:
            raise ValueError(
                f"policy_version = {policy_version} does not follow "
                f"{last.policy_version}, which is published already; to start again, "
                f"make a new sender"
            )
        if pinned:
            self._pinned = []  # one pinned version at a time
        full = (
            full or pinned or last is None or self._since_anchor + 1 >= self._base_every
        )
        coded = self._code(shards, {} if full else self._base)
        self._discard(keep=_KEPT - 1)
        manifest = self._put(coded, policy_version, None if full else last)
        references = list(manifest.objects)
        self._since_anchor = 0 if full else self._since_anchor + 1
        if full:
            again = list(self._again.objects) if self._again else []
            self._anchor_before = self._anchor if self._anchor == again else []
            self._anchor = references
        self._pinned = references if pinned else self._pinned
        self._recent.append(references)
        self._discard(keep=_KEPT)
        if self._base_every > 1:
            self._shards = tuple(shards)
        self._last = manifest
        values = sum(each.full_bytes // WIDTHS[each.dtype] for each in manifest.shards)
        changed = sum(each.changed for each in coded)
        compared = manifest.base_version is not None and values > 0
        self.report = PublishReport.of(
            manifest,
            manifest.shards,
            seconds=time.perf_counter() - began,
            changed_share=changed / values if compared else None,
        )
        return manifest

    def send_again(self) -> Manifest:
        """Publish the last version again in full, for replicas without its base.

        Other replicas are not affected.  Call it on all ranks.  The version becomes
        the anchor; the one before is kept until the next, for who still fetches it.
        """
        last = self._last
        assert last is not None, "no version was sent"
        if last.base_version is None:
            return last
        if self._again is None or self._again.policy_version != last.policy_version:
            coded = self._code(self._shards, {})
            self._again = self._put(coded, last.policy_version, None)
            self._anchor_before, self._anchor = self._anchor, list(self._again.objects)
            self._discard(keep=_KEPT)
        return self._again

    @property
    def _base(self) -> dict[Region, NDArray]:
        return {each.box: each.values for each in self._shards}

    def _code(
        self, shards: Sequence[Shard], base: dict[Region, NDArray]
    ) -> list[_Coded]:
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda shard: _code(shard, base), shards))

    def _put(
        self, coded: list[_Coded], policy_version: int, base: Manifest | None
    ) -> Manifest:
        """Put coded shards into objects, all or none; return their manifest."""
        references: list[Reference] = []
        listed: list[ManifestShard] = []
        try:
            for group in _groups(coded, self._object_bytes):
                name = f"v{policy_version:08d}-{len(references)}"
                buffers = [each.buffer for each in group]
                references.append(self._channel.put(name, buffers))
                listed += [
                    dataclasses.replace(
                        each.shard, reference=references[-1], buffer=place
                    )
                    for place, each in enumerate(group)
                ]
        except BaseException:
            for reference in references:
                self._channel.discard(reference)
            raise
        self._stored.update(references)
        return Manifest(
            ranks=(self._rank,),
            num_ranks=self._num_ranks,
            policy_version=policy_version,
            base_version=None if base is None else base.policy_version,
            frozen_digest=self._frozen_digest,
            shards=tuple(listed),
        )

    def _discard(self, *, keep: int) -> None:
        """Discard all but the last `keep` publications, anchors and a pinned one."""
        self._recent = self._recent[-keep:]
        full = (self._anchor, self._anchor_before, self._pinned)
        kept = set[Reference]().union(*full, *self._recent)
        for reference in self._stored - kept:
            self._channel.discard(reference)
        self._stored &= kept


def _code(shard: Shard, base: dict[Region, NDArray]) -> _Coded:
    """Encode a shard: as a delta if it has a base and the delta is shorter."""
    values = np.ascontiguousarray(shard.values)
    dtype = values.dtype.name
    if dtype not in WIDTHS:
        raise ValueError(
            f"shard {shard.box} is {dtype}; a sampler's params are of {sorted(WIDTHS)}"
        )
    before = base.get(shard.box)
    buffer, changed, coded = values.reshape(-1).view(np.uint8), 0, None
    if before is not None and before.dtype == values.dtype:
        compared = delta(before, values)
        changed, coded = compared.changed, compared.coded
    buffer = buffer if coded is None else coded
    listed = ManifestShard(
        leaf=shard.box.leaf,
        shape=shard.shape,
        dtype=dtype,
        start=shard.box.start,
        stop=shard.box.stop,
        checksum=checksum(values),
        form="full" if coded is None else "delta",
        reference="",
        buffer=0,
        num_bytes=buffer.nbytes,
    )
    return _Coded(shard=listed, buffer=buffer, changed=changed)


def _groups(coded: list[_Coded], least_bytes: int) -> Iterator[list[_Coded]]:
    """Yield groups of shards, one per object, of `least_bytes` each but the last."""
    group, size = [], 0
    for each in coded:
        group.append(each)
        size += each.buffer.nbytes
        if size >= least_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group
