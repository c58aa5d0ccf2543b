"""Layers with positions that see only a chunk, and others without (Llama 4).

https://arxiv.org/abs/2305.19466 for layers without positions, and
https://arxiv.org/abs/2501.19399 for the temperature of their queries; the rest is as in
transformers.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.model.architecture import LocalLayers
from scalerl_jax.model.attention import segment_starts
from scalerl_jax.model.layers import rms_norm
from scalerl_jax.model.rope import rotate


def placed(
    q: Float[Array, "... heads dim"],
    k: Float[Array, "... kv dim"],
    turns: tuple[Array, Array],
    positions: Int[Array, "..."],
    *,
    local: LocalLayers,
    near: bool | Bool[Array, ""],
    eps: float,
) -> tuple[Array, Array]:
    """Return a layer's positioned q and k; `near`: it has positions, sees a chunk."""
    turned = [rotate(x, turns, neighbours=True) for x in (q, k)]
    if local.normalized:
        turned = [rms_norm(x, jnp.ones(()), eps) for x in turned]
    steps = jnp.floor((positions + 1).astype(jnp.float32) / local.floor_positions)
    scale = 1.0 + local.scale * jnp.log1p(steps)
    far = (q * scale[..., None, None]).astype(q.dtype)
    return jnp.where(near, turned[0], far), jnp.where(near, turned[1], k)


def chunked(segment_ids: Int[Array, "R S"], chunk: int) -> Int[Array, "R S"]:
    """Return ids of the rows' segments, divided into chunks of `chunk` tokens.

    Chunks are counted from a segment's first token.  The ids in a row are distinct, but
    not 1, 2, ...  A row of at most `chunk` tokens keeps its ids, since cuDNN's
    attention looks for 1, 2, ..., and for 0 on padding.
    """
    length = segment_ids.shape[1]
    places = jnp.arange(length)[None] - segment_starts(segment_ids)
    return segment_ids * -(-length // chunk) + places // chunk
