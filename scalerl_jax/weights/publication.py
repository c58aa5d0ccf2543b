"""Params of one published version, and their check by checksums.

The learner sends a checksum of each leaf, and the receiver recomputes it before it uses
the params: a version arrives whole or not at all.  Params that came as files or objects
were checked shard by shard (`receiving`), and have no checksums here.
"""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, UInt32

from scalerl_jax.types import PyTree


@struct.dataclass(kw_only=True)
class Published:
    """Params of one version, as given to the sampler."""

    params: PyTree  # laid out by `architecture.layered_table`
    policy_version: Int[Array, ""]  # optimizer steps behind the params
    # Result of `checksums` on the learner's mesh; None: the shards have been checked.
    checksums: tuple[UInt32[Array, " leaves"], ...] | None

    def for_replica(self, number: int, held_version: int) -> "Published":
        """Return itself: replicas that share the devices use the same arrays."""
        del number, held_version
        return self


@dataclasses.dataclass(frozen=True)
class PublishedToEach:
    """Params of one version on the devices of every replica of this process."""

    copies: tuple[Published, ...]  # by the replica's number

    def for_replica(self, number: int, held_version: int) -> Published:
        """Return the copy on the replica's devices."""
        del held_version
        return self.copies[number]


def outside_layers(params: PyTree) -> PyTree:
    """Return the parameters that no layer has."""
    return {name: leaf for name, leaf in params.items() if name != "layers"}


def parts_of(params: PyTree) -> list[PyTree]:
    """Return what no layer has, then each layer's params."""
    return [outside_layers(params), *params.get("layers", ())]


def checksums(
    params: PyTree, policy_version: Int[Array, ""]
) -> tuple[UInt32[Array, " leaves"], ...]:
    """Return `leaf_checksums` of each of `parts_of`; layers share a program."""
    return tuple(leaf_checksums(part, policy_version) for part in parts_of(params))


@jax.jit
def leaf_checksums(
    params: PyTree, policy_version: Int[Array, ""]
) -> UInt32[Array, " leaves"]:
    """Return a checksum of each leaf's bits, which does not depend on the sharding.

        checksum = mix(version) + sum_i mix(bits[i] ^ (i * golden))   mod 2^32

    Integer sums wrap around, so their order does not matter.  `mix` is a bijection
    (the finalizer of MurmurHash3, public domain, Austin Appleby): a change of one
    element is always detected, any other change is missed once in 2^32.
    """
    return jnp.stack(
        [_checksum(leaf) + _mix(policy_version) for leaf in jax.tree.leaves(params)]
    )


def digest_of(frozen: PyTree | None) -> str:
    """Return the SHA-256 of the params' names, dtypes, shapes and `leaf_checksums`.

    It does not depend on the sharding; without params it is "".
    """
    if frozen is None:
        return ""
    sums = jax.device_get(leaf_checksums(frozen, jnp.int32(0))).tolist()
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
    """Return the published params, after checking that every bit has arrived.

    Raises:
        RuntimeError: the version is not the announced one, or a checksum differs.
    """
    version = int(published.policy_version)
    if version != policy_version:
        raise RuntimeError(
            f"the sampler received the params of version {version} as those of version "
            f"{policy_version}; it continues with its current params"
        )
    if published.checksums is None:
        return published.params
    found, sent = jax.device_get(
        (
            checksums(published.params, published.policy_version),
            published.checksums,
        )
    )
    others, *layers = parts_of(published.params)
    names = [
        jax.tree_util.keystr(path[1:], simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path((others, {"layers": layers}))
    ]
    sums = (np.concatenate(each) for each in (found, sent))
    wrong = [
        f"{name} has checksum {here:#010x}, sent was {there:#010x}"
        for name, here, there in zip(names, *sums, strict=True)
        if here != there
    ]
    if wrong:
        raise RuntimeError(
            f"the params of version {policy_version} did not reach the sampler whole: "
            f"{'; '.join(wrong[:3])} ({len(wrong)} of {len(names)} differ); it keeps "
            f"its current params. Resume from the last checkpoint; if this recurs, "
            f"suspect a device or the link between the two meshes"
        )
    return published.params
