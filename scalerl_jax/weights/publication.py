"""Params of one version on their way from the learner to generators, and their check.

The learner sends a checksum of each leaf, and the receiver computes it again before it
uses the params: a version arrives whole or not at all.  Params that came as files or
objects have been checked shard by shard (`receiving`), and have no checksums here.
"""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, UInt32

from scalerl_jax.types import PyTree


@struct.dataclass(kw_only=True)
class Published:
    """Params of one version, as they are handed to the sampler."""

    params: PyTree  # laid out by `architecture.layered_table`
    policy_version: Int[Array, ""]  # optimizer steps behind them
    # Results of `checksums` on the learner's mesh; None: its shards have been checked.
    checksums: UInt32[Array, " leaves"] | None

    def for_replica(self, number: int, held_version: int) -> "Published":
        """Return itself: whoever shares the devices takes all of it."""
        del number, held_version
        return self


@dataclasses.dataclass(frozen=True)
class PublishedToEach:
    """Params of one version on the devices of every replica of this process."""

    copies: tuple[Published, ...]  # by the replica's number

    def for_replica(self, number: int, held_version: int) -> Published:
        """Return the copy on that replica's devices."""
        del held_version
        return self.copies[number]


@jax.jit
def checksums(params: PyTree, policy_version: Int[Array, ""]) -> UInt32[Array, " n"]:
    """Return a checksum of each leaf's bits, the same however the leaf is cut.

        checksum = mix(version) + sum_i mix(bits[i] ^ (i * golden))   mod 2^32

    Integer sums wrap around, so their order does not matter.  `mix` is a bijection
    (the finalizer of MurmurHash3, public domain, Austin Appleby): a change of one
    element always shows, any other is missed once in 2^32.
    """
    return jnp.stack(
        [_checksum(leaf) + _mix(policy_version) for leaf in jax.tree.leaves(params)]
    )


def digest_of(frozen: PyTree | None) -> str:
    """Return a text that names params by their bits, however they are cut; "" of none.

    It is the SHA-256 of names, dtypes, shapes and `checksums`.
    """
    if frozen is None:
        return ""
    sums = jax.device_get(checksums(frozen, jnp.int32(0))).tolist()
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    told = [
        (jax.tree_util.keystr(path), str(leaf.dtype), list(leaf.shape), number)
        for (path, leaf), number in zip(leaves, sums, strict=True)
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _checksum(leaf: Array) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.itemsize}"))
    places, stride = jnp.zeros((), jnp.uint32), 0x9E3779B1  # 2^32 / golden ratio
    for dimension in reversed(range(leaf.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dimension)
        places += along * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[dimension]
    return jnp.sum(_mix(bits.astype(jnp.uint32) ^ places), dtype=jnp.uint32)


def _mix(bits: Array) -> UInt32[Array, "..."]:
    bits = bits.astype(jnp.uint32)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def receive(published: Published, *, policy_version: int) -> PyTree:
    """Return the published params if every bit of them has arrived.

    Raises:
        RuntimeError: they are of another version than the learner says, or a leaf
            is not what was sent.
    """
    version = int(published.policy_version)
    if version != policy_version:
        raise RuntimeError(
            f"the sampler received the params of version {version} as those of version "
            f"{policy_version}; it goes on with those it has"
        )
    if published.checksums is None:
        return published.params
    found, sent = jax.device_get(
        (
            checksums(published.params, published.policy_version),
            published.checksums,
        )
    )
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(published.params)
    ]
    wrong = [
        f"{name} has checksum {here:#010x}, sent was {there:#010x}"
        for name, here, there in zip(names, found, sent, strict=True)
        if here != there
    ]
    if wrong:
        raise RuntimeError(
            f"the params of version {policy_version} did not reach the sampler whole: "
            f"{'; '.join(wrong[:3])} ({len(wrong)} of {len(names)} differ); it goes on "
            f"with those it has. Resume from the last checkpoint; if it comes back, "
            f"suspect a device or the link between the two meshes"
        )
    return published.params
