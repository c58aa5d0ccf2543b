"""Stochastic rounding of params, which few runs ask for."""

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from scalerl_jax.types import PyTree


def round_stochastically(tree: PyTree, *, like: PyTree, seed: Int[Array, ""]) -> PyTree:
    """Round float32 leaves at random to values of the dtypes of the leaves in `like`.

        P(up) = (x - down) / (up - down)

    A bfloat16 weight of 1 ignores every update below 1/256, however often it comes;
    rounded so, it moves by the update on average.  Leaves stay float32; bfloat16 is the
    only narrower dtype.  The draws depend on `seed` and on the leaf's path.
    https://arxiv.org/abs/2010.06192, section 3.
    """
    key = jax.random.fold_in(jax.random.key(0x5EED), seed)

    def leaf(path: tuple, x: Array, target: Array) -> Array:
        if target.dtype == x.dtype:
            return x
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        noise = jax.random.bits(jax.random.fold_in(key, name), x.shape, jnp.uint16)
        # bfloat16 is the upper half of a float32: noise added to the lower half carries
        # into it with the right probability.  An infinity keeps its empty lower half.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        noisy = (bits + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
        return jnp.where(
            jnp.isfinite(x), jax.lax.bitcast_convert_type(noisy, jnp.float32), x
        )

    return jax.tree_util.tree_map_with_path(leaf, tree, like)
