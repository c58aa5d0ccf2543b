"""How parameters and batches are cut over a mesh: one table, applied by name.

The mesh has the axes of `parallel.mesh.AXES`.  Cuts that would be uneven are
refused here, before anything is compiled, instead of being padded.
"""

import math
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    layered_table,
    parameter_table,
)
from scalerl_jax.parallel.mesh import ROWS, SHARDS, Device, make_mesh
from scalerl_jax.types import PyTree

OF_EXPERTS = ("expert", "tensor")  # axes that divide experts in the sampler

# Logical axis of a `ParamSpec` -> mesh axes that cut it.
MESH_AXES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "hidden": SHARDS,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("expert",),
    "router": (),
    "pair": (),
    "both": ("tensor",),
    "layers": (),
    "width": (),
    "head_dim": (),
}


def param_shardings(arch: Architecture, mesh: Mesh) -> PyTree:
    """A `NamedSharding` per parameter, in the tree of `parameter_table`.

    Raises:
        ValueError: a mesh axis does not divide what it cuts.  Heads count whole: a
            cut through a head would move its halves around in every layer.
    """
    pieces = {"heads": arch.num_heads, "kv_heads": arch.num_kv_heads}

    def shard(path: tuple, spec: ParamSpec) -> NamedSharding:
        for dimension, (axis, extent) in enumerate(
            zip(spec.axes, spec.shape, strict=True)
        ):
            cut = _cut(spec, axis)
            if not cut:
                continue
            shards, count = _size(mesh, cut), pieces.get(axis, extent)
            if count % shards:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"mesh.{cut[0]} = {shards} does not divide dimension "
                    f"{dimension} of parameter {name}: {axis} = {count}; "
                    f"set mesh.{cut[0]} to a divisor of {count}"
                )
        return NamedSharding(mesh, _spec(_cut(spec, axis) for axis in spec.axes))

    return jax.tree_util.tree_map_with_path(shard, parameter_table(arch))


def _cut(spec: ParamSpec, axis: str) -> tuple[str, ...]:
    """Mesh axes that cut an axis of a parameter; no axis cuts two of them."""
    cut = MESH_AXES[axis]
    if axis != "experts" and "experts" in spec.axes:
        return tuple(name for name in cut if name not in MESH_AXES["experts"])
    return cut


def _spec(cuts: Iterable[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(
        *(cut[0] if len(cut) == 1 else cut or None for cut in cuts),
    )


def _size(mesh: Mesh, axes: Iterable[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def layered_shardings(arch: Architecture, mesh: Mesh) -> PyTree:
    """`param_shardings` per parameter of `layered_table`: each layer cut alike."""
    param_shardings(arch, mesh)  # refuses what cannot be cut
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, _spec(_cut(spec, axis) for axis in spec.axes)),
        layered_table(arch),
    )


def sampler_copies(arch: Architecture, devices: int) -> int:
    """How many times a replica of so many devices holds all but the experts.

    Once; a mixture may have more devices than kv heads, for each of them has other
    experts.
    """
    return devices // math.gcd(arch.num_kv_heads, devices) if arch.experts else 1


def check_replica(arch: Architecture, devices: int) -> None:
    """Refuse a number of devices that kv heads, or experts, cannot be shared among."""
    if not is_divisible(arch, devices):
        count, what = _divided(arch)
        raise ValueError(
            f"generators.devices = {devices} cannot share the {count} {what} of the "
            f"model evenly; use a divisor"
        )


def is_divisible(arch: Architecture, devices: int) -> bool:
    """Return whether a replica of so many devices can be made."""
    return _divided(arch)[0] % devices == 0


def _divided(arch: Architecture) -> tuple[int, str]:
    experts = arch.experts
    return (experts.count, "experts") if experts else (arch.num_kv_heads, "kv heads")


def sampler_mesh(arch: Architecture, devices: Sequence[Device]) -> Mesh:
    """The mesh of a replica; see `check_replica`, which may refuse."""
    check_replica(arch, len(devices))
    copies = sampler_copies(arch, len(devices))
    tensor = len(devices) // copies
    return make_mesh(devices, fsdp=copies, expert=copies, tensor=tensor)


def sampler_shardings(arch: Architecture, mesh: Mesh) -> PyTree:
    """A `NamedSharding` per parameter of `layered_table`, on a `sampler_mesh`.

    Whole experts are divided among all devices; all else is cut over "tensor" alone.
    """

    def shard(spec: ParamSpec) -> NamedSharding:
        if "experts" in spec.axes:
            cuts = (OF_EXPERTS if axis == "experts" else () for axis in spec.axes)
        else:
            cuts = (
                tuple(name for name in MESH_AXES[axis] if name == "tensor")
                for axis in spec.axes
            )
        return NamedSharding(mesh, _spec(cuts))

    return jax.tree.map(shard, layered_table(arch))


def sampler_layout(arch: Architecture, *, dtype: DTypeLike, mesh: Mesh) -> PyTree:
    """Shapes, dtypes and shardings of what the sampler is given."""
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape, dtype, sharding=sharding
        ),
        layered_table(arch),
        sampler_shardings(arch, mesh),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a microbatch [R, S]: R over replicas and shards, S over context."""
    return NamedSharding(mesh, PartitionSpec(ROWS, "context"))
