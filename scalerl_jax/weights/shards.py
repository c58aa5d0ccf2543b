"""Shards of arrays on the host: extract a process's own, and build arrays from any.

A shard is identified by its leaf and the box of elements that it covers, independent of
its mesh.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import xxhash
from numpy.typing import NDArray

from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Region:
    """A box of elements of a leaf: from `start` to before `stop`, by dimension."""

    leaf: str  # its path in the tree, such as layers/0/query
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __str__(self) -> str:
        """Return a name such as layers/0/query[0:16, 8:16]."""
        ranges = zip(self.start, self.stop, strict=True)
        return f"{self.leaf}[{', '.join(f'{first}:{last}' for first, last in ranges)}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(
            last - first for first, last in zip(self.start, self.stop, strict=True)
        )

    def overlap(self, other: "Region") -> "Region | None":
        """Return the elements in both boxes; None: no common ones, or another leaf."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if self.leaf != other.leaf or any(map(int.__ge__, start, stop)):
            return None
        return Region(leaf=self.leaf, start=start, stop=stop)

    def within(self, other: "Region") -> tuple[slice, ...]:
        """Return the index of this box in an array with the elements of `other`."""
        return tuple(
            slice(first - origin, last - origin)
            for first, last, origin in zip(
                self.start, self.stop, other.start, strict=True
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard of a leaf, in host memory."""

    box: Region
    shape: tuple[int, ...]  # of the whole leaf
    values: NDArray


def box_of(leaf: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Region:
    """Return the box of a shard's index in JAX."""
    bounds = [
        part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True)
    ]
    return Region(
        leaf=leaf,
        start=tuple(first for first, _ in bounds),
        stop=tuple(last for _, last in bounds),
    )


def checksum(values: NDArray) -> int:
    """Return the 64-bit XXH3 of the values' bytes in C order."""
    values = np.ascontiguousarray(values).reshape(-1)
    return xxhash.xxh3_64_intdigest(values.view(np.uint8).data)


def named_leaves(tree: PyTree, *, separator: str = "/") -> dict[str, Any]:
    """Return the leaves by path ("embedding", "layers/query"), in the tree's order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=separator): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def own_shards(params: PyTree) -> list[Shard]:
    """Return the shards that this process publishes: the first copy of each shard.

    Over all processes that hold a part of `params`, each element is in one shard.
    """
    leaves = named_leaves(params)
    mine = [
        (name, leaf.shape, shard)
        for name, leaf in leaves.items()
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    for _, _, shard in mine:  # all transfers at once
        shard.data.copy_to_host_async()
    return [
        Shard(
            box=box_of(name, shape, shard.index),
            shape=shape,
            values=np.asarray(shard.data),
        )
        for name, shape, shard in mine
    ]


def own_boxes(abstract: PyTree) -> set[Region]:
    """Return the boxes that this process's devices hold of arrays like `abstract`."""
    return {
        box_of(name, leaf.shape, index)
        for name, leaf in named_leaves(abstract).items()
        for index in _indices(leaf).values()
    }


def place(
    abstract: PyTree,
    shards: Mapping[str, list[Shard]],
    *,
    instead_of: PyTree | None = None,
) -> PyTree:
    """Build arrays on devices from shards of any layout.

    Args:
        abstract: shapes, dtypes and shardings of the arrays.
        shards: by leaf, shards that cover the elements of this process's devices.
        instead_of: old arrays of the same tree; each is deleted just before its new
            array is made, so that the devices hold about one tree.
    """
    before = {} if instead_of is None else named_leaves(instead_of)

    def put(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        cut = _cutter(name, leaf, shards[name])
        if name in before:
            before[name].delete()
        arrays = [
            jax.device_put(cut(index), device)
            for device, index in _indices(leaf).items()
        ]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, arrays
        )

    return jax.block_until_ready(jax.tree_util.tree_map_with_path(put, abstract))


def _indices(leaf: jax.ShapeDtypeStruct) -> Mapping[Any, tuple[slice, ...]]:
    sharding = leaf.sharding
    assert sharding is not None, "abstract arrays have shardings"
    return sharding.addressable_devices_indices_map(leaf.shape)  # type: ignore


def _cutter(
    name: str, leaf: jax.ShapeDtypeStruct, shards: list[Shard]
) -> Callable[[tuple[slice, ...]], NDArray]:
    """Return a function that returns a device's part of a leaf, and caches parts."""
    made: dict[Region, NDArray] = {}

    def cut(index: tuple[slice, ...]) -> NDArray:
        wanted = box_of(name, leaf.shape, index)
        if wanted not in made:
            made[wanted] = _gather(wanted, leaf.dtype, shards)
        return made[wanted]

    return cut


def _gather(wanted: Region, dtype: np.dtype, shards: list[Shard]) -> NDArray:
    for shard in shards:
        if shard.box == wanted:
            return shard.values
    whole = np.empty(wanted.shape, dtype)
    for shard in shards:
        common = wanted.overlap(shard.box)
        if common is not None:
            whole[common.within(wanted)] = shard.values[common.within(shard.box)]
    return whole
