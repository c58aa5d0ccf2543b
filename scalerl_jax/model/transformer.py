"""The decoder's forward pass, with and without a KV cache, and its float32 head.

Pure functions of a parameter tree (see `architecture.parameter_table`).  The two
passes share every formula; they differ in where keys and values come from:

    hidden_states   whole rows, several segments in a row, layers under a scan
    cached_hidden   tokens of any sequences, attention by whoever keeps their cache

Neither samples, masks a loss nor knows a mesh.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    map_specs,
    parameter_table,
)
from scalerl_jax.model.attention import SAVED, BlockwiseAttention, SegmentAttention
from scalerl_jax.model.embedding import embed
from scalerl_jax.model.layers import gated, linear, rms_norm, rotate, rotations
from scalerl_jax.model.sharing import collect, spread
from scalerl_jax.types import PyTree, Sharing

_INIT_STD = 0.02
_saveable = jax.checkpoint_policies
# Name of a remat policy -> what the backward pass finds of a layer; None: everything.
# The others compute the rest again from the layer's input.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": _saveable.save_from_both_policies(
        _saveable.dots_with_no_batch_dims_saveable,
        _saveable.save_only_these_names(SAVED),
    ),
    "attention": _saveable.save_only_these_names(SAVED),
    "full": _saveable.nothing_saveable,
}


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


# Queries, keys and values of a layer's new tokens -> what attention returns.
Attend = Callable[[Array, Array, Array], Array]
Turns = tuple[Array, Array]  # of `layers.rotations`


def _block(
    layer: PyTree, arch: Architecture, x: Array, turns: Turns, attend: Attend
) -> Array:
    """One layer: attention and a gated feed-forward, each added to its input."""
    dtype = x.dtype
    h = rms_norm(x, layer["attention_norm"], arch.rms_eps)
    q, k, v = (linear(h, layer[name]) for name in ("query", "key", "value"))
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
    mixed = attend(rotate(q, turns), rotate(k, turns), v)
    x = x + linear(mixed.reshape(*x.shape[:-1], -1), layer["output"])

    h = rms_norm(x, layer["ffn_norm"], arch.rms_eps)
    h = gated(linear(h, layer["gate"]), linear(h, layer["up"]))
    return x + linear(h, layer["down"])


def hidden_states(
    params: PyTree,
    arch: Architecture,
    tokens: Int[Array, "R S"],
    *,
    positions: Int[Array, "R S"],
    segment_ids: Int[Array, "R S"],
    dtype: DTypeLike,
    attention: SegmentAttention | None = None,
    remat: str = "none",
    mesh: Mesh | None = None,
    sharing: Sharing | None = None,
    scan_layers: bool = True,
) -> Float[Array, "R S D"]:
    """Final hidden states of whole rows; tokens see earlier ones of their segment.

    With `sharing` tokens and positions are of streams, and so are the hidden states.
    Without a `mesh` it is a program for one device, without `attention` a plain one.
    `remat` is a name in `REMAT`: what of a layer the backward pass computes again.
    Unscanned layers take longer to compile and save the copies in and out of a stack.
    """
    attention = attention or BlockwiseAttention(mesh)
    turns = rotations(positions, rope_frequencies(arch))

    def step(x: Array, layer: PyTree) -> tuple[Array, None]:
        def attend(q: Array, k: Array, v: Array) -> Array:
            if sharing is None:
                return attention(q, k, v, segment_ids)
            q, k, v = (spread(x, sharing) for x in (q, k, v))
            return collect(attention(q, k, v, segment_ids), sharing)

        return cut_rows(_block(layer, arch, x, turns, attend), mesh), None

    if REMAT[remat] is not None:
        step = jax.checkpoint(step, policy=REMAT[remat])
    x = embed(params["embedding"], tokens, mesh=mesh, dtype=dtype)
    x = cut_rows(x, mesh)
    if scan_layers:
        x, _ = jax.lax.scan(step, x, params["layers"])
        return rms_norm(x, params["final_norm"], arch.rms_eps)
    leaves, treedef = jax.tree.flatten(params["layers"])
    # Not slices: their gradients would be padded to stacks, and these added up.
    parts = [jax.lax.split(leaf, (1,) * arch.num_layers) for leaf in leaves]
    for layer in zip(*parts, strict=True):
        x, _ = step(x, jax.tree.unflatten(treedef, [leaf[0] for leaf in layer]))
    return rms_norm(x, params["final_norm"], arch.rms_eps)


def cut_rows(x: Float[Array, "R S D"], mesh: Mesh | None) -> Float[Array, "R S D"]:
    """The same, laid out as a batch is: rows over data and fsdp, tokens over context.

    Said between two layers, it keeps the compiler from cutting hidden units instead.
    """
    if mesh is None:
        return x
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context", None))
    return jax.lax.with_sharding_constraint(x, sharding)


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
    turns = rotations(positions, rope_frequencies(arch))
    x = params["embedding"][tokens].astype(dtype)
    for index, layer in enumerate(params["layers"]):
        x = _block(layer, arch, x, turns, functools.partial(attend, index))
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
