"""The decoder's forward pass, with and without a KV cache, and its float32 head.

Pure functions of a parameter tree (see `architecture.parameter_table`).  The two
passes share every formula; they differ in where keys and values come from:

    hidden_states   whole rows, several segments in a row, layers under a scan
    cached_hidden   tokens of any sequences, attention by whoever keeps their cache

Neither samples, masks a loss nor knows a mesh.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    map_specs,
    parameter_table,
)
from scalerl_jax.types import PyTree

_INIT_STD = 0.02
MASKED = -1e30  # finite: a row without any key must not make a NaN


def init_params(arch: Architecture, key: Array, *, dtype: DTypeLike) -> PyTree:
    """Random weights: normal with std 0.02, norms at 1, biases at 0."""
    table = parameter_table(arch)
    leaves, treedef = jax.tree.flatten(
        table, is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )

    def start(spec: ParamSpec, key: Array) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        return (jax.random.normal(key, spec.shape) * _INIT_STD).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [*map(start, leaves, keys)])


def abstract_params(arch: Architecture, *, dtype: DTypeLike) -> PyTree:
    """Shapes and dtypes of the parameters, without any memory."""
    return map_specs(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), parameter_table(arch)
    )


def unstack_layers(params: PyTree, arch: Architecture) -> PyTree:
    """The parameters as `architecture.layered_table` lays them out."""
    layers = tuple(
        jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        for index in range(arch.num_layers)
    )
    return params | {"layers": layers}


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / rms(x) * scale, computed in float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)


def rope_frequencies(arch: Architecture) -> Float[Array, " half"]:
    """Rotary frequencies, radians per position; Llama 3 stretches the low ones."""
    half = jnp.arange(arch.head_dim // 2, dtype=jnp.float32)
    frequencies = arch.rope_theta ** (-2.0 * half / arch.head_dim)
    scaling = arch.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2.0 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (share_kept + (1.0 - share_kept) / scaling.factor)


def rotate(
    x: Float[Array, "... heads dim"],
    positions: Int[Array, "..."],
    frequencies: Float[Array, " half"],
) -> Array:
    """Rotary position embedding; dimension i is paired with i + dim / 2."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# Queries, keys and values of a layer's new tokens -> what attention returns.
Attend = Callable[[Array, Array, Array], Array]


def _block(
    layer: PyTree, arch: Architecture, x: Array, positions: Array, attend: Attend
) -> Array:
    """One layer: attention and a gated feed-forward, each added to its input."""
    dtype = x.dtype
    h = rms_norm(x, layer["attention_norm"], arch.rms_eps)
    q, k, v = (h @ layer[name].astype(dtype) for name in ("query", "key", "value"))
    if arch.qkv_bias:
        q = q + layer["query_bias"].astype(dtype)
        k = k + layer["key_bias"].astype(dtype)
        v = v + layer["value_bias"].astype(dtype)
    q = q.reshape(*q.shape[:-1], arch.num_heads, arch.head_dim)
    k = k.reshape(*k.shape[:-1], arch.num_kv_heads, arch.head_dim)
    v = v.reshape(k.shape)
    if arch.qk_norm:
        q = rms_norm(q, layer["query_norm"], arch.rms_eps)
        k = rms_norm(k, layer["key_norm"], arch.rms_eps)
    frequencies = rope_frequencies(arch)
    q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
    mixed = attend(q, k, v)
    x = x + mixed.reshape(*x.shape[:-1], -1) @ layer["output"].astype(dtype)

    h = rms_norm(x, layer["ffn_norm"], arch.rms_eps)
    gate = jax.nn.silu(h @ layer["gate"].astype(dtype))
    return x + (gate * (h @ layer["up"].astype(dtype))) @ layer["down"].astype(dtype)


def _segment_attention(
    q: Float[Array, "R S heads dim"],
    k: Float[Array, "R S kv dim"],
    v: Float[Array, "R S kv dim"],
    segment_ids: Int[Array, "R S"],
) -> Float[Array, "R S heads dim"]:
    """Causal attention within each segment of a row."""
    rows, length, heads, dim = q.shape
    q = q.reshape(rows, length, k.shape[2], -1, dim)
    order = jnp.arange(length)
    allowed = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (
        order[:, None] >= order[None, :]
    )
    scores = jnp.einsum("rqkgd,rskd->rkgqs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed[:, None, None], scores * dim**-0.5, MASKED)
    shares = jax.nn.softmax(scores, axis=-1)  # in float32
    mixed = jnp.einsum("rkgqs,rskd->rqkgd", shares.astype(v.dtype), v)
    return mixed.reshape(rows, length, heads, dim)


def hidden_states(
    params: PyTree,
    arch: Architecture,
    tokens: Int[Array, "R S"],
    *,
    positions: Int[Array, "R S"],
    segment_ids: Int[Array, "R S"],
    dtype: DTypeLike,
    remat: str = "none",
) -> Float[Array, "R S D"]:
    """Final hidden states of whole rows; tokens see earlier ones of their segment."""

    def step(x: Array, layer: PyTree) -> tuple[Array, None]:
        def attend(q: Array, k: Array, v: Array) -> Array:
            return _segment_attention(q, k, v, segment_ids)

        return _block(layer, arch, x, positions, attend), None

    if remat == "full":
        step = jax.checkpoint(step)
    elif remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        step = jax.checkpoint(step, policy=policy)
    x = params["embedding"][tokens].astype(dtype)
    x, _ = jax.lax.scan(step, x, params["layers"])
    return rms_norm(x, params["final_norm"], arch.rms_eps)


def cached_hidden(
    params: PyTree,
    arch: Architecture,
    tokens: Int[Array, " T"],
    *,
    positions: Int[Array, " T"],
    attend: Callable[[int, Array, Array, Array], Array],
    dtype: DTypeLike,
) -> Float[Array, "T D"]:
    """Final hidden states of new tokens, whichever sequences they belong to.

    `attend(layer, q, k, v)` caches the keys and values [T, kv heads, head dim] of a
    layer and returns what the queries [T, heads, head dim] find in the cache.  The
    layers are unrolled, every layer's cache is updated in place, and `params` are laid
    out by `architecture.layered_table`.
    """
    x = params["embedding"][tokens].astype(dtype)
    for index, layer in enumerate(params["layers"]):
        x = _block(layer, arch, x, positions, functools.partial(attend, index))
    return rms_norm(x, params["final_norm"], arch.rms_eps)


def head_weights(params: PyTree) -> Float[Array, "V D"]:
    """The output head: its own matrix, or the embedding where they are tied."""
    return params["head"] if "head" in params else params["embedding"]


def head_logits(
    hidden: Float[Array, "... D"], head: Float[Array, "V D"], *, float32_head: bool
) -> Float[Array, "... V"]:
    """Logits in float32: THE head of the learner and of the sampler.

    With `float32_head` both operands are float32 and the matmul runs at the highest
    precision (a TPU otherwise rounds float32 operands to bfloat16); without it the
    product is taken in the dtype of `hidden`, as most systems do, and then cast.
    ScaleRL section 3.2; MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.2.
    """
    if float32_head:
        hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
    logits = jnp.einsum(
        "...d,vd->...v",
        hidden,
        head.astype(hidden.dtype),
        precision=jax.lax.Precision.HIGHEST if float32_head else None,
    )
    return logits.astype(jnp.float32)
