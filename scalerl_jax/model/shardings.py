"""How parameters and batches are cut over a mesh: one table, applied by name.

The mesh has the axes of `parallel.mesh.AXES`.  Cuts that would be uneven are
refused here, before anything is compiled, instead of being padded.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    layered_table,
    parameter_table,
)
from scalerl_jax.types import PyTree

# Logical axis of a `ParamSpec` -> mesh axis that cuts it; None: not cut.
MESH_AXES: dict[str, str | None] = {
    "vocab": "tensor",
    "hidden": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "experts": None,
    "router": None,
    "pair": None,
    "layers": None,
    "width": None,
    "head_dim": None,
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
            mesh_axis = MESH_AXES[axis]
            if mesh_axis is None:
                continue
            shards, count = mesh.shape[mesh_axis], pieces.get(axis, extent)
            if count % shards:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"mesh.{mesh_axis} = {shards} does not divide dimension "
                    f"{dimension} of parameter {name}: {axis} = {count}; "
                    f"set mesh.{mesh_axis} to a divisor of {count}"
                )
        return NamedSharding(
            mesh, PartitionSpec(*(MESH_AXES[axis] for axis in spec.axes))
        )

    return jax.tree_util.tree_map_with_path(shard, parameter_table(arch))


def layered_shardings(arch: Architecture, mesh: Mesh) -> PyTree:
    """`param_shardings` per parameter of `layered_table`: each layer cut alike."""
    table = param_shardings(arch, mesh)
    layer = {
        name: NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
        for name, sharding in table["layers"].items()
    }
    return table | {"layers": (layer,) * arch.num_layers}


def sampler_shardings(arch: Architecture, mesh: Mesh) -> PyTree:
    """A `NamedSharding` per parameter of `layered_table`, cut over "tensor" alone."""

    def shard(spec: ParamSpec) -> NamedSharding:
        axes = (MESH_AXES[axis] for axis in spec.axes)
        names = (axis if axis == "tensor" else None for axis in axes)
        return NamedSharding(mesh, PartitionSpec(*names))

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
    """Sharding of a microbatch [R, S]: rows over data and fsdp, S over context."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))
