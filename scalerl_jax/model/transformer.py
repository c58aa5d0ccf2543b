"""The decoder's forward pass, with and without a KV cache, and its float32 head.

Pure functions of a parameter tree (see `architecture.parameter_table`).  The two passes
share every formula; they differ in the source of keys and values:

    hidden_states   whole rows, several segments in a row, layers under a scan
    cached_hidden   tokens of any sequences, attention by a function with their cache

Neither samples or masks a loss.  The file is above 400 lines: it has both passes and
their common parts.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    layered_table,
    parameter_table,
)
from scalerl_jax.model.attention import (
    SAVED,
    BlockwiseAttention,
    SegmentAttention,
    capped,
    is_cudnns,
)
from scalerl_jax.model.ffn_moe import expert_feed_forward
from scalerl_jax.model.layers import (
    ACTIVATIONS,
    CHOSEN,
    GROUPED,
    add_bias,
    embed,
    linear,
    norm,
)
from scalerl_jax.model.local_layers import chunked, placed
from scalerl_jax.model.lora import Adapted
from scalerl_jax.model.products import float32_einsum
from scalerl_jax.model.prompt_sharing import collect, spread
from scalerl_jax.model.quantized import Quantized, quantize
from scalerl_jax.model.rope import Rope, rope_frequencies, rotate, rotations
from scalerl_jax.parallel.mesh import ROWS, constrain
from scalerl_jax.types import AnyArray, PyTree, Sharing
from scalerl_jax.weights.publication import outside_layers

_saveable = jax.checkpoint_policies


def _with_attention(*names: str) -> Callable[..., Any]:
    """Return a policy that saves attention's arrays and those of these names."""
    named = _saveable.save_only_these_names(SAVED, *names)
    return _saveable.save_from_both_policies(named, is_cudnns)


# Name of a remat policy -> the values of a layer that are saved; None: all.  The others
# are recomputed from the layer's input.  Chosen experts are always saved: recomputed
# router logits could round to other experts than in the forward pass.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": _saveable.save_from_both_policies(
        _saveable.dots_with_no_batch_dims_saveable,
        _with_attention(GROUPED, CHOSEN),
    ),
    "attention": _with_attention(CHOSEN),
    "full": _saveable.save_only_these_names(CHOSEN),
}

_INIT_STD = 0.02


def abstract_params(arch: Architecture, *, dtype: DTypeLike) -> PyTree:
    """Return shapes and dtypes of the parameters, without arrays."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), parameter_table(arch)
    )


def unstack_layers(params: PyTree, arch: Architecture) -> PyTree:
    """Return the parameters in the tree of `architecture.layered_table`."""
    layers = (_layer_of(params, arch, index) for index in range(arch.num_layers))
    return params | {"layers": tuple(layers)}


def _layer_of(params: PyTree, arch: Architecture, index: int | Array) -> PyTree:
    """Return the parameters of a layer.

    Factors are merged with a layer's weight at a time: the float32 product of a whole
    stack would take twice the memory of its weights.
    """

    def one(leaf: Any, spec: ParamSpec) -> AnyArray:
        own = jax.tree.map(lambda stack: stack[index], leaf)
        return (own.merged() if isinstance(own, Adapted) else own).reshape(spec.shape)

    return jax.tree.map(
        one,
        params["layers"],
        layered_table(arch)["layers"][0],
        is_leaf=lambda leaf: isinstance(leaf, Adapted),
    )


def make_lay_out(
    arch: Architecture,
    *,
    dtype: DTypeLike,
    weights_dtype: str,
    shardings: PyTree | None = None,
) -> Callable[[PyTree], PyTree]:
    """Make a function from parameters to a cast copy in the tree of `layered_table`."""
    by_parts = make_lay_out_parts(
        arch,
        (lambda others: others, lambda layer: layer),
        dtype=dtype,
        weights_dtype=weights_dtype,
        shardings=shardings and (outside_layers(shardings), shardings["layers"][0]),
    )

    def lay_out(params: PyTree) -> PyTree:
        others, *layers = by_parts(params)
        return others | {"layers": tuple(layers)}

    return lay_out


def make_lay_out_parts(
    arch: Architecture,
    finish: tuple[Callable[..., Any], Callable[..., Any]],
    *,
    dtype: DTypeLike,
    weights_dtype: str,
    shardings: tuple[PyTree, PyTree] | None = None,
) -> Callable[..., list[Any]]:
    """Make a function from parameters to what `finish` makes of them, part by part.

    The first one of `finish` gets a cast copy of what no layer has, the second one that
    of each layer in the form of `layered_table`; both get what the function gets
    besides the parameters.  There is one program for all layers: a program of all of
    them takes a compiler as many times as long.  `shardings` are those of the results.
    """

    def is_quantized(leaf: Any) -> bool:
        return isinstance(leaf, Quantized)

    def cast(spec: ParamSpec | Quantized, leaf: Array) -> Array | Quantized:
        if is_quantized(spec):
            return quantize(leaf, dtype=dtype)
        return jnp.array(leaf, dtype=dtype, copy=True)

    table = layered_table(arch, weights_dtype)

    # The number of the next layer stays on the devices.
    def of_others(others: PyTree, *more: Any) -> tuple[Any, Array]:
        cast_others = jax.tree.map(cast, outside_layers(table), others)
        return finish[0](cast_others, *more), jnp.int32(0)

    def of_layer(layers: PyTree, index: Array, *more: Any) -> tuple[Any, Array]:
        layer = _layer_of({"layers": layers}, arch, index)
        cast_layer = jax.tree.map(cast, table["layers"][0], layer, is_leaf=is_quantized)
        return finish[1](cast_layer, *more), index + 1

    first, each = shardings or (None, None)
    others_program = jax.jit(of_others, out_shardings=(first, None))
    layer_program = jax.jit(of_layer, out_shardings=(each, None))

    def by_parts(params: PyTree, *more: Any) -> list[Any]:
        part, index = others_program(outside_layers(params), *more)
        parts = [part]
        for _ in range(arch.num_layers):
            part, index = layer_program(params["layers"], index, *more)
            parts.append(part)
        return parts

    return by_parts


# (queries, keys, values) of a layer's new tokens -> attention's output.
Attend = Callable[[Array, Array, Array], Array]
# Further outputs of a layer by name: "experts" are those that tokens chose.
Said = dict[str, Array]


Turns = tuple[Array, Array]  # result of `rope.rotations`


class Kind(NamedTuple):
    """The properties in which layers differ: Python values, or traced under a scan.

    None if the layers of the decoder do not differ in it.
    """

    near: Any = None  # a bool; see `architecture.LocalLayers`
    window: Any = None  # tokens that a token sees
    near_rope: Any = None  # a bool: positions by `Architecture.window_rope`
    rotated: Any = None  # a bool: the layer has positions


class Where(NamedTuple):
    """Positions of the tokens in a layer, and the kind of the layer."""

    positions: Array
    turns: Turns
    near_turns: Turns | None  # by `Architecture.window_rope`
    kind: Kind


def _choose(flag: Any, chosen: Any, other: Any) -> Any:
    """Return one of two trees of arrays, by a Python or a traced bool."""
    if isinstance(flag, bool):
        return chosen if flag else other
    return jax.tree.map(lambda one, two: jnp.where(flag, one, two), chosen, other)


def _all_turns(arch: Architecture, positions: Array) -> tuple[Turns, Turns | None]:
    """Return the rotations of the layers, and of layers with windows if they differ."""

    def turns(rope: Rope) -> Turns:
        frequencies = rope_frequencies(rope, arch.head_dim)
        return rotations(positions, frequencies, rope.magnitude)

    near = None if arch.window_rope is None else turns(arch.window_rope)
    return turns(arch.rope), near


def _turned(q: Array, k: Array, arch: Architecture, where: Where) -> tuple[Array, ...]:
    """Return queries and keys, rotated if the layer has positions."""
    turns, kind = where.turns, where.kind
    if where.near_turns is not None:
        turns = _choose(kind.near_rope, where.near_turns, turns)
    if arch.attention_scale is not None:
        # Attention divides scores by the root of head_dim.
        q = (q * (arch.attention_scale * arch.head_dim**0.5)).astype(q.dtype)
    if kind.rotated is False:
        return q, k
    turned = rotate(q, turns), rotate(k, turns)
    return turned if kind.rotated is None else _choose(kind.rotated, turned, (q, k))


def _attention(
    layer: PyTree, arch: Architecture, x: Array, where: Where, attend: Attend
) -> Array:
    """Return attention's output, without the residual input."""
    h = x if arch.norms == "after" else norm(x, layer["attention_norm"], arch)
    q, k, v = (linear(h, layer[name]) for name in ("query", "key", "value"))
    if arch.qkv_bias:
        q = add_bias(q, layer["query_bias"])
        k = add_bias(k, layer["key_bias"])
        v = add_bias(v, layer["value_bias"])
    if arch.qk_norm and arch.whole_qk_norm:
        q, k = norm(q, layer["query_norm"], arch), norm(k, layer["key_norm"], arch)
    q = q.reshape(*q.shape[:-1], arch.num_heads, arch.head_dim)
    k = k.reshape(*k.shape[:-1], arch.num_kv_heads, arch.head_dim)
    v = v.reshape(k.shape)
    if arch.qk_norm and not arch.whole_qk_norm:
        q, k = norm(q, layer["query_norm"], arch), norm(k, layer["key_norm"], arch)
    if arch.local is None:
        q, k = _turned(q, k, arch, where)
    else:
        q, k = placed(
            q,
            k,
            where.turns,
            where.positions,
            local=arch.local,
            near=where.kind.near,
            eps=arch.rms_eps,
        )
    mixed = attend(q, k, v)
    found = linear(mixed.reshape(*x.shape[:-1], -1), layer["output"])
    return add_bias(found, layer["output_bias"]) if arch.output_bias else found


def _gated_feed_forward(layer: PyTree, arch: Architecture, x: Array) -> Array:
    """Return the output of a gated feed-forward, without the residual input.

    https://arxiv.org/abs/2002.05202, equation 6.
    """
    h = x if arch.norms == "after" else norm(x, layer["ffn_norm"], arch)
    activation = ACTIVATIONS[arch.activation]
    gate, up = linear(h, layer["gate"]), linear(h, layer["up"])
    if arch.ffn_bias:
        gate = add_bias(gate, layer["gate_bias"])
        up = add_bias(up, layer["up_bias"])
    found = linear(activation(gate, up), layer["down"])
    return add_bias(found, layer["down_bias"]) if arch.ffn_bias else found


def _block(
    layer: PyTree,
    arch: Architecture,
    x: Array,
    where: Where,
    attend: Attend,
    **options: Any,
) -> tuple[Array, Said]:
    """Return a layer's output: attention and a feed-forward, each added to its input.

    `options` are arguments of `ffn_moe.expert_feed_forward`.
    """

    def after(found: Array, name: str) -> Array:
        return found if arch.norms == "before" else norm(found, layer[name], arch)

    found = _attention(layer, arch, x, where, attend)
    x = x + after(found, "attention_out_norm")
    if arch.experts is None:
        found = _gated_feed_forward(layer, arch, x)
        return x + after(found, "ffn_out_norm"), {}

    found, said = expert_feed_forward(layer, arch, x, **options)
    return x + after(found, "ffn_out_norm"), said


def _scaled(x: Array, arch: Architecture) -> Array:
    """Return the embeddings scaled for the first layer."""
    if not arch.scaled_embeddings:
        return x
    return x * jnp.asarray(arch.hidden_size**0.5, x.dtype)


def hidden_states(
    params: PyTree,
    arch: Architecture,
    tokens: Int[Array, "rows tokens"],
    *,
    positions: Int[Array, "rows tokens"],
    segment_ids: Int[Array, "R S"],
    dtype: DTypeLike,
    attention: SegmentAttention | None = None,
    remat: str = "none",
    mesh: Mesh | None = None,
    sharing: Sharing | None = None,
    scan_layers: bool = True,
    experts: Int[Array, "layers rows tokens k"] | None = None,
    with_scores: bool = False,
) -> tuple[Float[Array, "rows tokens D"], Said]:
    """Return final hidden states of whole rows, and the layers' other outputs, stacked.

    A token sees the earlier tokens of its segment.  With `sharing`, tokens, positions
    and hidden states are streams [D, U], and segment ids are rows [R, S].  `mesh` None:
    one device; `attention` None: plain XLA.  `remat`, a name in `REMAT`, chooses what
    the backward pass recomputes.  Unscanned layers take longer to compile, but need no
    copies into and out of a stack.

    A mixture also returns {"experts": int32 [layers, rows, tokens, k]}, and takes
    `experts` of that shape in place of its own choice; -1: the router chooses.  With
    `with_scores` it also returns {"scores": float32 [layers, rows, tokens, experts]}.
    """
    attention = attention or BlockwiseAttention(mesh)
    turns, near_turns = _all_turns(arch, positions)
    kinds, chunks = _layer_kinds(arch, segment_ids)
    options: Any = dict(mesh=mesh, with_scores=with_scores)

    def step(x: Array, of_layer: _OfLayer) -> tuple[Array, Said]:
        def attend(q: Array, k: Array, v: Array) -> Array:
            seen, more = segment_ids, _attention_options(layer, arch, kind)
            if arch.local is not None:
                seen = jnp.where(kind.near, chunks, segment_ids)
            if sharing is None:
                return attention(q, k, v, seen, **more)

            q, k, v = (spread(x, sharing) for x in (q, k, v))
            return collect(attention(q, k, v, seen, **more), sharing)

        layer, given, kind = of_layer
        where = Where(positions, turns, near_turns, kind)
        x, said = _block(layer, arch, x, where, attend, given=given, **options)
        return cut_rows(x, mesh), said

    if REMAT[remat] is not None:
        step = jax.checkpoint(step, policy=REMAT[remat])
    x = embed(params["embedding"], tokens, mesh=mesh, dtype=dtype)
    stack = _OfLayer(params["layers"], experts, kinds)
    over = jax.lax.scan if scan_layers else _unscanned
    x, said = over(step, cut_rows(_scaled(x, arch), mesh), stack)
    return norm(x, params["final_norm"], arch), said


def _attention_options(layer: PyTree, arch: Architecture, kind: Kind) -> dict[str, Any]:
    """Return the keyword arguments of a layer's `SegmentAttention`."""
    options: dict[str, Any] = {}
    if kind.window is not None:
        options["window"] = kind.window
    if arch.sinks:
        options["sinks"] = layer["sinks"]
    if arch.attention_cap:
        options["cap"] = arch.attention_cap
    return options


def _layer_kinds(arch: Architecture, segment_ids: Array) -> tuple[Kind, Array]:
    """Return the kinds of all layers, and segment ids of chunks for local layers."""
    if arch.local is not None:
        kinds = Kind(near=jnp.array(arch.local.with_positions))
        return kinds, chunked(segment_ids, arch.local.chunk)

    length = segment_ids.shape[1]
    windows = arch.windows_within(length)
    apart, rotated = arch.window_rope is not None, arch.rotated
    kinds = Kind(
        window=jnp.array([each or length for each in windows]) if windows else None,
        near_rope=jnp.array([each > 0 for each in arch.windows]) if apart else None,
        rotated=jnp.array(rotated) if rotated else None,
    )
    return kinds, segment_ids


class _OfLayer(NamedTuple):
    """The inputs of one layer, or, stacked, of all layers."""

    params: PyTree
    given: Array | None  # experts
    kind: Kind


def _unscanned(
    step: Callable[[Array, Any], tuple[Array, Said]], x: Array, stack: Any
) -> tuple[Array, Said]:
    """Apply `step` to each layer's params in turn, like `jax.lax.scan` but unrolled."""
    leaves, treedef = jax.tree.flatten(stack)
    # Not slices: their gradients would be padded to stacks, and the stacks summed.
    parts = [jax.lax.split(leaf, (1,) * len(leaf)) for leaf in leaves]
    each = []
    for layer in zip(*parts, strict=True):
        x, said = step(x, jax.tree.unflatten(treedef, [leaf[0] for leaf in layer]))
        each.append(said)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *each)


def cut_rows(x: Float[Array, "R S D"], mesh: Mesh | None) -> Float[Array, "R S D"]:
    """Constrain hidden states to a batch's sharding: rows, and tokens over context.

    Between two layers this keeps the compiler from sharding hidden units instead.
    """
    if mesh is None:
        return x
    return constrain(x, mesh, PartitionSpec(ROWS, "context", None))


def over_copies(x: Float[Array, "T D"], mesh: Mesh | None) -> Float[Array, "T D"]:
    """Shard the rows of hidden states over the copies of a replica's weights.

    A mixture's replica may hold its non-expert weights several times, along the mesh
    axis "expert": each copy then computes its share of the rows, if they divide evenly.
    """
    if mesh is None or mesh.shape["expert"] == 1 or len(x) % mesh.shape["expert"]:
        return x
    return constrain(x, mesh, PartitionSpec("expert", None))


def everywhere(x: Float[Array, "T heads d"], mesh: Mesh | None) -> Array:
    """Gather the rows of keys or values in each copy of a replica's weights."""
    if mesh is None or mesh.shape["expert"] == 1:
        return x
    return constrain(x, mesh, PartitionSpec(None, "tensor", None))


def cached_hidden(
    params: PyTree,
    arch: Architecture,
    tokens: Int[Array, " T"],
    *,
    positions: Int[Array, " T"],
    attend: Callable[[int, Array, Array, Array], Array],
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    experts: Int[Array, "layers T k"] | None = None,
) -> tuple[Float[Array, "T D"], Said]:
    """Return final hidden states of T new tokens of any sequences.

    `attend(layer, q, k, v)` caches the keys and values [T, kv heads, head dim] of a
    layer and returns the attention of the queries [T, heads, head dim] to the cache.
    The layers are unrolled, every layer's cache is updated in place, and `params` are
    in the tree of `architecture.layered_table`.  The other outputs, and `experts`, are
    as in `hidden_states`, for T tokens.
    """
    turns, near_turns = _all_turns(arch, positions)
    x = over_copies(_scaled(params["embedding"][tokens].astype(dtype), arch), mesh)
    each = []

    def attend_all(index: int, q: Array, k: Array, v: Array) -> Array:
        # Every copy of the cache has all rows.
        return attend(index, q, everywhere(k, mesh), everywhere(v, mesh))

    for index, layer in enumerate(params["layers"]):
        kind = Kind(
            near=arch.local is not None and arch.local.with_positions[index],
            near_rope=bool(arch.windows and arch.windows[index]),
            rotated=arch.rotated[index] if arch.rotated else None,
        )
        x, said = _block(
            layer,
            arch,
            x,
            Where(positions, turns, near_turns, kind),
            functools.partial(attend_all, index),
            given=None if experts is None else experts[index],
            decoding=True,
            mesh=mesh,
        )
        x = over_copies(x, mesh)
        each.append(said)
    said = jax.tree.map(lambda *layers: jnp.stack(layers), *each)
    return norm(x, params["final_norm"], arch), said


def head_weights(params: PyTree) -> Float[Array, "V D"]:
    """Return the output head: its own matrix, or the embedding if they are tied."""
    return params["head"] if "head" in params else params["embedding"]


def head_logits(
    hidden: Float[Array, "... D"],
    head: Float[Array, "V D"],
    *,
    float32_head: bool,
    cap: float = 0.0,
) -> Float[Array, "... V"]:
    """Logits in float32: THE head of the learner and of the sampler.

    With `float32_head` the product is one of float32 numbers (`model/products.py`);
    without it the product is taken in the dtype of `hidden`, as most systems do, and
    then cast.
    ScaleRL section 3.2; MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.2.
    `cap` is the decoder's `logit_cap`.
    """
    if float32_head:
        return capped(float32_einsum("...d,vd->...v", hidden, head), cap)
    logits = jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype))
    return capped(logits.astype(jnp.float32), cap)


def init_params(arch: Architecture, key: Array, *, dtype: DTypeLike) -> PyTree:
    """Return random weights: normal with std 0.02, norms at 1, biases at 0."""
    leaves, treedef = jax.tree.flatten(parameter_table(arch))

    def start(spec: ParamSpec, key: Array) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        return (jax.random.normal(key, spec.shape) * _INIT_STD).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [*map(start, leaves, keys)])
