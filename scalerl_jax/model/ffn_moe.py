"""A mixture-of-experts feed-forward: routing, and the experts' outputs.

    logits[t]  = norm(x[t]) @ router
    chosen[t]  = top_k of logits[t], or, with a bias, of scores[t] + bias, or given
    gates[t]   = scores[t] at the chosen: softmax, normalised softmax or sigmoid
    output[t]  = sum over the chosen of gate * expert(norm(x[t]))

Logits, gates and sums are float32.  Every token reaches every expert that it chose:
there is no capacity limit.  There are three methods, equal up to rounding:

    grouped    tokens sorted by expert, and grouped products; any number of tokens
    dense      every expert for every token: few tokens choose all experts anyway
    gathered   each token's own experts, copied: fewer tokens than experts

Given experts (-1: none) are replayed instead of the top k; their gates still come from
the logits computed here, so that the router keeps its gradient.

Over a mesh a learner's device holds some experts (axis expert) and some of their inner
units (tensor).  It gathers the other parts of these experts for the layer that it
computes (fsdp), and exchanges tokens with the devices of other experts (expert).  If
the axis "expert" has at most top_k devices, a device gathers all tokens of the axis,
sums its own experts' outputs, and sends each device its sums: that moves at most one
row per choice.  Otherwise every token is sent to its experts and back.  A sampler's
device has whole experts and sees all tokens; the outputs are summed over devices.  The
file is above 400 lines: the methods share shardings and biases.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from scalerl_jax.model.architecture import OF_EXPERTS, Architecture, Experts
from scalerl_jax.model.expert_rows import (
    Cut,
    grouped_matmul,
    permuted,
    send_rows,
    spread,
)
from scalerl_jax.model.layers import (
    CHOSEN,
    HIDDEN,
    ROUTER,
    clamped_gated,
    gated,
    linear,
    norm,
)
from scalerl_jax.model.lora import merged
from scalerl_jax.parallel.mesh import over_mesh
from scalerl_jax.types import PyTree

# Bounds on the tokens decoded together: "gathered" below the first, "dense" up to the
# second.
GATHERED_BELOW, DENSE_UP_TO = 16, 160
# Shardings of the experts' params over a learner's mesh, and over a sampler's; the
# router's are gathered.
_LEARNER_CUT = {
    "router": PartitionSpec(),
    "expert_gate_up": PartitionSpec("expert", "fsdp", None, "tensor"),
    "expert_down": PartitionSpec("expert", "tensor", "fsdp"),
}
_OVER_SHARDS = (Cut("fsdp", 1), Cut("fsdp", 2))  # of gate_up and down, per expert
_SAMPLER_CUT = {
    "router": PartitionSpec(),
    "expert_gate_up": PartitionSpec(OF_EXPERTS),
    "expert_down": PartitionSpec(OF_EXPERTS),
}
# Shardings of their biases.
_LEARNER_BIASES = {
    "router_logit_bias": PartitionSpec(),
    "expert_gate_up_bias": PartitionSpec("expert", None, "tensor"),
    "expert_down_bias": PartitionSpec("expert"),
}
_SAMPLER_BIASES = {
    "router_logit_bias": PartitionSpec(),
    "expert_gate_up_bias": PartitionSpec(OF_EXPERTS),
    "expert_down_bias": PartitionSpec(OF_EXPERTS),
}


def route(
    logits: Float[Array, "T E"],
    experts: Experts,
    given: Int[Array, "T k"] | None = None,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Float[Array, "T E"]]:
    """Return every token's experts, the likeliest first, their gates, and all scores.

    Experts in `given` that are not negative replace the choice.  Qwen3-MoE and Llama 4
    as in transformers; Shazeer et al., https://arxiv.org/abs/1701.06538, equation 5.
    The bias affects only the choice: DeepSeek-V3, https://arxiv.org/abs/2412.19437,
    equation 16.  Gates and scores are float32.
    """
    scores = {
        "softmax": jax.nn.softmax,
        "normalized": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
    }[experts.gate](logits)
    ranks = logits if bias is None else scores + bias.astype(jnp.float32)
    chosen = jax.lax.top_k(jax.lax.stop_gradient(ranks), experts.top_k)[1]
    if given is not None:
        chosen = jnp.where(given < 0, chosen, given)
    chosen = checkpoint_name(chosen, CHOSEN)
    gates = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.gate == "normalized":
        gates = gates / gates.sum(axis=1, keepdims=True)
    return chosen, gates, scores


def to_ids(chosen: Int[Array, "L T k"], experts: Experts) -> UInt[Array, "T L k"]:
    """Return expert ids by token, as in rollouts, with -1 as the largest value."""
    dtype = experts.id_dtype
    none = jnp.iinfo(dtype).max
    return jnp.moveaxis(jnp.where(chosen < 0, none, chosen), 0, 1).astype(dtype)


def from_ids(ids: UInt[Array, "R S L k"]) -> Int[Array, "L R S k"]:
    """Return expert ids by layer, -1 for none: the inverse of `to_ids`."""
    none = jnp.iinfo(ids.dtype).max
    chosen = jnp.where(ids == none, -1, ids.astype(jnp.int32))
    return jnp.moveaxis(chosen, 2, 0)


def expert_feed_forward(
    layer: PyTree,
    arch: Architecture,
    x: Float[Array, "... D"],
    given: Int[Array, "... k"] | None = None,
    *,
    decoding: bool = False,
    mesh: Mesh | None = None,
    with_scores: bool = False,
) -> tuple[Float[Array, "... D"], dict[str, Array]]:
    """Return the experts' output, without the residual input, and the chosen experts.

    Args:
        layer: the layer's parameters, named as in `architecture.parameter_table`.
        arch: a decoder with experts.
        x: hidden states, before the layer's norm.
        given: experts to use, int32; -1 where the router chooses.
        decoding: a sampler's pass; the number of tokens chooses the method.
        mesh: the mesh over which `model.architecture` shards the parameters, and, for a
            learner, x like a batch; None: on one device.

    Returns:
        The output in the dtype of x, and {"experts": int32 [..., k]}; `with_scores`
        also {"scores": float32 [..., E]}, scaled to a sum of 1 per token.
    """
    experts = arch.experts
    assert experts is not None, "only a family with experts calls this"
    mesh = mesh if mesh is not None and mesh.size > 1 else None
    normed = x if arch.norms == "after" else norm(x, layer["ffn_norm"], arch)
    cuts, cut = _SAMPLER_CUT, PartitionSpec()
    if not decoding:
        cuts, cut = _LEARNER_CUT, HIDDEN
    if experts.bias:
        cuts = cuts | {"router_bias": PartitionSpec()}
    if experts.biased:
        cuts = cuts | (_SAMPLER_BIASES if decoding else _LEARNER_BIASES)
    chosen_ones = over_mesh(
        mesh,
        functools.partial(_chosen_ones, experts, decoding, mesh),
        (cuts, cut, cut),
        (cut, cut, cut),
    )
    output, chosen, scores = chosen_ones(
        merged({name: layer[name] for name in cuts}), normed, given
    )
    if experts.shared:
        h = gated(
            linear(normed, layer["shared_gate"]), linear(normed, layer["shared_up"])
        )
        output = output + linear(h, layer["shared_down"])
    said = {"experts": chosen}
    if with_scores:
        said["scores"] = scores / scores.sum(axis=-1, keepdims=True)
    return output, said


def _chosen_ones(
    experts: Experts,
    decoding: bool,
    mesh: Mesh | None,
    layer: PyTree,
    x: Float[Array, "... D"],
    given: Int[Array, "... k"] | None,
) -> tuple[Float[Array, "... D"], Int[Array, "... k"], Float[Array, "... E"]]:
    """Return the chosen experts' outputs for a device's tokens, their ids, all scores.

    A method gets experts numbered from the device's first one: experts of other devices
    have numbers outside of its own.
    """
    tokens = x.reshape(-1, x.shape[-1])
    logits = router_logits(tokens, layer["router"])
    if experts.biased:
        logits = logits + layer["router_logit_bias"].astype(jnp.float32)
        if mesh is not None and not decoding:
            layer = layer | {"expert_down_bias": _once(layer["expert_down_bias"])}
    if given is not None:
        given = given.reshape(-1, experts.top_k)
    chosen, gates, scores = route(logits, experts, given, layer.get("router_bias"))
    if mesh is None:
        way = _way(len(tokens), decoding=decoding)
        output = way(layer, experts, tokens, chosen, gates)
    elif decoding:
        way = _way(len(tokens), decoding=decoding, alone=False)
        own = chosen - jax.lax.axis_index(OF_EXPERTS) * len(layer["expert_down"])
        output = way(layer, experts, tokens, own, gates)
        output = jax.lax.psum(output, OF_EXPERTS)
    else:
        way = _learners_way(mesh.shape["expert"], experts)
        output = jax.lax.psum(way(layer, experts, tokens, chosen, gates), "tensor")
    output = output.astype(x.dtype).reshape(x.shape)
    chosen, scores = (
        each.reshape(*x.shape[:-1], each.shape[-1]) for each in (chosen, scores)
    )
    return output, chosen, scores


def _once(bias: Array) -> Array:
    """Return the bias on one device of "tensor", and 0 on the others."""
    return jnp.where(jax.lax.axis_index("tensor") == 0, bias, 0)


def _activated(experts: Experts, both: Array, axis: int) -> Array:
    """Return the experts' inner units from gates and ups, side by side along `axis`."""
    gate, up = jnp.split(both, 2, axis=axis)
    return clamped_gated(gate, up, experts.clamp) if experts.clamp else gated(gate, up)


def _way(tokens: int, *, decoding: bool, alone: bool = True) -> Callable[..., Array]:
    """Return the cheapest method; "gathered" only if all experts are on this device."""
    if not decoding or tokens > DENSE_UP_TO:
        return _grouped
    return _gathered if alone and tokens < GATHERED_BELOW else _dense


def _learners_way(parts: int, experts: Experts) -> Callable[..., Array]:
    """Return a learner's method for `parts` devices on "expert"; see the module."""
    if parts == 1:
        return functools.partial(_grouped, cuts=_OVER_SHARDS)
    return _gathering if experts.top_k >= parts else _sending


@jax.named_scope(ROUTER)
def router_logits(
    tokens: Float[Array, "T D"], router: Float[Array, "D E"]
) -> Float[Array, "T E"]:
    """Return every expert's logits, in float32 at the highest precision."""
    return jnp.einsum(
        "td,de->te",
        tokens.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def _mixed(outputs: Array, gates: Array, experts: Experts) -> Float[Array, "T D"]:
    """Return the gated sum [T, D] of outputs [T, k, D], in float32."""
    outputs = outputs.astype(jnp.float32)
    if experts.gate_input:
        return outputs.sum(axis=1)
    return (outputs * gates[..., None]).sum(axis=1)


def _grouped(
    layer: PyTree,
    experts: Experts,
    tokens: Array,
    chosen: Array,
    gates: Array,
    cuts: tuple[Cut | None, Cut | None] = (None, None),
) -> Float[Array, "T D"]:
    """Compute rows of (token, expert) sorted by expert, other devices' rows last."""
    here = len(layer["expert_down"])
    flat = chosen.reshape(-1)
    if here < experts.count:
        flat = jnp.where((flat < 0) | (flat >= here), here, flat)
    order, place, sizes = _by_group(flat, here)
    rows = _gated_rows(experts, tokens, gates, order, place)
    found = permuted(_products(layer, experts, rows, sizes, cuts), place, order)
    return _mixed(found.reshape(*chosen.shape, -1), gates, experts)


def _by_group(groups: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the order of rows by group, its inverse, and the rows of each group.

    Rows of group `count` come last, and are not counted.
    """
    order = jnp.argsort(groups, stable=True)
    sizes = (groups[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
    return order, jnp.argsort(order), sizes


def _gated_rows(
    experts: Experts, tokens: Array, gates: Array, order: Array, place: Array
) -> Array:
    """Return a row for each choice, in `order`, gated if the gate scales the input."""
    rows: Any = spread(experts.top_k, tokens, order, place)
    if experts.gate_input:
        sorted_gates: Any = permuted(gates.reshape(-1), order, place)
        rows = rows * sorted_gates[:, None].astype(rows.dtype)
    return rows


def _products(
    layer: PyTree,
    experts: Experts,
    rows: Array,
    sizes: Array,
    cuts: tuple[Cut | None, Cut | None],
) -> Array:
    """Return the experts' outputs for rows sorted by expert; 0 for other rows."""
    into, out = cuts
    rows = _of_groups(rows, sizes, experts)
    both: Any = grouped_matmul(rows, _gate_up(layer), sizes, "auto", into)
    group = None
    if experts.biased:
        ends = jnp.cumsum(sizes)[:-1]
        group = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right")
        both = both + _gate_up_bias(layer)[group].astype(both.dtype)
    h = _activated(experts, _of_groups(both, sizes, experts), 1)
    found: Any = grouped_matmul(h, layer["expert_down"], sizes, "auto", out)
    if experts.biased:
        found = found + layer["expert_down_bias"][group].astype(found.dtype)
    return _of_groups(found, sizes, experts)


def _gate_up(layer: PyTree) -> Float[Array, "E D both"]:
    """Return gate and up matrices side by side, of a learner or a sampler."""
    gate_up = layer["expert_gate_up"]
    return gate_up.reshape(*gate_up.shape[:2], -1)


def _gate_up_bias(layer: PyTree) -> Float[Array, "E both"]:
    """Return the biases of gates and ups, in the layout of `_gate_up`."""
    bias = layer["expert_gate_up_bias"]
    return bias.reshape(len(bias), -1)


def _gathering(
    layer: PyTree, experts: Experts, tokens: Array, chosen: Array, gates: Array
) -> Float[Array, "T D"]:
    """Compute all devices' tokens with the experts here; send each device its sums."""
    tokens, chosen, gates = (
        jax.lax.all_gather(each, "expert", tiled=True)
        for each in (tokens, chosen, gates)
    )
    own = chosen - jax.lax.axis_index("expert") * len(layer["expert_down"])
    found = _grouped(layer, experts, tokens, own, gates, _OVER_SHARDS)
    return jax.lax.psum_scatter(found, "expert", tiled=True)


def _sending(
    layer: PyTree, experts: Experts, tokens: Array, chosen: Array, gates: Array
) -> Float[Array, "T D"]:
    """Send every choice's row to its expert, and the output back."""
    flat, here = chosen.reshape(-1), len(layer["expert_down"])
    parts = experts.count // here
    order, place, counts = _by_group(flat, experts.count)
    # Rows that a device has for each expert of each device.
    counts = jax.lax.all_gather(counts, "expert").reshape(parts, parts, here)
    sizes, mine = counts.sum(axis=2), counts[:, jax.lax.axis_index("expert")]
    rows = _gated_rows(experts, tokens, gates, order, place)
    room = parts * len(flat)
    rows = send_rows("expert", room, rows, sizes)
    # Received rows are ordered by device, then by expert; unused rows come last.
    ends, number = jnp.cumsum(mine.reshape(-1)), jnp.arange(room)
    of_pair = jnp.searchsorted(ends, number, side="right")
    expert = jnp.where(of_pair < len(ends), of_pair % here, here)
    by_expert, back, of_expert = _by_group(expert, here)
    rows = permuted(rows, by_expert, back)
    found = _products(layer, experts, rows, of_expert, _OVER_SHARDS)
    found = permuted(found, back, by_expert)
    found = send_rows("expert", len(flat), found, sizes.T)
    found = permuted(found, place, order)
    return _mixed(found.reshape(*chosen.shape, -1), gates, experts)


def _of_groups(rows: Any, sizes: Array, experts: Experts) -> Array:
    """Return the rows with 0 for rows of no group, which a kernel leaves undefined.

    The gradient's kernel does too, and is masked in the same way.
    """
    if len(sizes) == experts.count:
        return rows
    return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], rows, 0)


def _dense(
    layer: PyTree, experts: Experts, tokens: Array, chosen: Array, gates: Array
) -> Float[Array, "T D"]:
    """Compute all experts for all tokens, with a gate of 0 for unchosen ones."""
    dtype = tokens.dtype
    here = len(layer["expert_down"])
    taken = jnp.arange(here)[:, None, None] == chosen[None]
    all_gates = jnp.where(taken, gates[None], 0.0).sum(axis=2)  # [E, T]
    inputs = jnp.broadcast_to(tokens[None], (here, *tokens.shape))
    if experts.gate_input:
        inputs = inputs * all_gates[..., None].astype(dtype)
    both = jnp.einsum("etd,edf->etf", inputs, _gate_up(layer).astype(dtype))
    if experts.biased:
        both = both + _gate_up_bias(layer)[:, None].astype(dtype)
    found = jnp.einsum(
        "etf,efd->etd",
        _activated(experts, both, 2),
        layer["expert_down"].astype(dtype),
    )
    if experts.biased:
        found = found + layer["expert_down_bias"][:, None].astype(dtype)
    found = found.astype(jnp.float32)
    if experts.gate_input:
        return found.sum(axis=0)
    return (found * all_gates[..., None]).sum(axis=0)


def _gathered(
    layer: PyTree, experts: Experts, tokens: Array, chosen: Array, gates: Array
) -> Float[Array, "T D"]:
    """Compute every token with copies of its experts' matrices."""
    inputs = jnp.broadcast_to(tokens[:, None], (*chosen.shape, tokens.shape[1]))
    if experts.gate_input:
        inputs = inputs * gates[..., None].astype(tokens.dtype)
    gate_up, down = (
        matrices[chosen].astype(tokens.dtype)
        for matrices in (_gate_up(layer), layer["expert_down"])
    )
    both = jnp.einsum("tkd,tkdf->tkf", inputs, gate_up)
    if experts.biased:
        both = both + _gate_up_bias(layer)[chosen].astype(both.dtype)
    found = jnp.einsum("tkf,tkfd->tkd", _activated(experts, both, 2), down)
    if experts.biased:
        found = found + layer["expert_down_bias"][chosen].astype(found.dtype)
    return _mixed(found, gates, experts)
