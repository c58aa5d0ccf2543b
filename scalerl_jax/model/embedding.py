"""Rows of the embedding for the tokens of a batch, over a mesh.

The table is cut over vocabulary (tensor) and hidden units (fsdp), the tokens over rows
(data, fsdp) and along them (context).  Each device looks its own columns up for the
tokens of its whole fsdp group, and the group exchanges columns for rows: the table
itself never travels, and neither does its gradient before it is summed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.parallel.mesh import over_mesh

_TABLE = PartitionSpec("tensor", "fsdp")
_TOKENS = PartitionSpec(("data", "fsdp"), "context")
_FOUND = PartitionSpec(("data", "fsdp"), "context", None)


def embed(
    table: Float[Array, "V D"],
    tokens: Int[Array, "R S"],
    *,
    mesh: Mesh | None,
    dtype: DTypeLike,
) -> Float[Array, "R S D"]:
    """table[tokens] in `dtype`; its gradient is summed in the table's own dtype."""
    if mesh is None:
        return table[tokens].astype(dtype)
    return _embed(mesh, jnp.dtype(dtype), table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embed(mesh: Mesh, dtype: DTypeLike, table: Array, tokens: Array) -> Array:
    def local(table: Array, tokens: Array) -> Array:
        tokens = jax.lax.all_gather(tokens, "fsdp", tiled=True)
        places, here = _places(table, tokens)
        found = jnp.where(here[..., None], table[places].astype(dtype), 0)
        # The token's row is on one device of the tensor axis: the sum is exact.
        found = jax.lax.psum(found, "tensor")
        return jax.lax.all_to_all(found, "fsdp", 0, 2, tiled=True)

    return over_mesh(mesh, local, (_TABLE, _TOKENS), _FOUND)(table, tokens)


def _places(table: Array, tokens: Array) -> tuple[Array, Array]:
    """Rows of the local table, and which of the tokens have theirs there."""
    places = tokens - jax.lax.axis_index("tensor") * table.shape[0]
    here = (places >= 0) & (places < table.shape[0])
    return jnp.where(here, places, 0), here


def _forward(
    mesh: Mesh, dtype: DTypeLike, table: Array, tokens: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _embed(mesh, dtype, table, tokens), (table, tokens)


def _backward(
    mesh: Mesh, dtype: DTypeLike, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None]:
    del dtype

    def local(table: Array, tokens: Array, cotangent: Array) -> Array:
        tokens = jax.lax.all_gather(tokens, "fsdp", tiled=True)
        columns = jax.lax.all_to_all(cotangent, "fsdp", 2, 0, tiled=True)
        places, here = _places(table, tokens)
        columns = jnp.where(here[..., None], columns.astype(table.dtype), 0)
        summed = jnp.zeros_like(table).at[places].add(columns)
        return jax.lax.psum(summed, ("data", "context"))

    gradient = over_mesh(mesh, local, (_TABLE, _TOKENS, _FOUND), _TABLE)(
        *saved, cotangent
    )
    return gradient, None


_embed.defvjp(_forward, _backward)
