"""A feed-forward of experts: who takes a token, and what they make of it.

    chosen[t]  = top_k of logits[t] = norm(x[t]) @ router, or what is given
    gates[t]   = softmax, normalised softmax or sigmoid of logits[t], at the chosen
    output[t]  = sum over the chosen of gate * expert(norm(x[t]))

Logits, gates and sums are float32.  Every token reaches every expert that it chose:
nothing has a capacity.  There are three ways to compute it, equal to rounding:

    grouped    tokens sorted by expert, and grouped products; any number of tokens
    dense      every expert for every token: few tokens meet all experts anyhow
    gathered   each token's own experts, copied: fewer tokens than experts

Selection given (`experts`, -1: none) is replayed, and its gates are still those of
the logits here, so that the router keeps its gradient.

Over a mesh each device takes its own tokens: it gathers the experts of the one layer
that it computes over fsdp, and has its part of every expert's inner units over tensor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from scalerl_jax.model.architecture import Architecture, Experts
from scalerl_jax.model.attention import ROWS
from scalerl_jax.model.grouped_matmul import Cut, grouped_matmul
from scalerl_jax.model.layers import CHOSEN, ROUTER, gated, linear, rms_norm
from scalerl_jax.parallel.mesh import over_mesh
from scalerl_jax.types import PyTree

# Tokens decoded together: below the first bound each gathers its own experts, up to
# the second every expert is computed for all of them.
GATHERED_BELOW, DENSE_UP_TO = 16, 160
# How a layer's parameters are cut over a mesh; those for the router are gathered.
_CUT = {
    "router": PartitionSpec(),
    "expert_gate_up": PartitionSpec(None, "fsdp", None, "tensor"),
    "expert_down": PartitionSpec(None, "tensor", "fsdp"),
}


def route(
    logits: Float[Array, "T E"],
    experts: Experts,
    given: Int[Array, "T k"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The experts of every token, the likeliest first, and their gates in float32.

    A token whose `given` are not negative has those.  Qwen3-MoE and Llama 4 as
    transformers has them; Shazeer et al., https://arxiv.org/abs/1701.06538, equation 5.
    """
    chosen = jax.lax.top_k(jax.lax.stop_gradient(logits), experts.top_k)[1]
    if given is not None:
        chosen = jnp.where(given < 0, chosen, given)
    chosen = checkpoint_name(chosen, CHOSEN)
    scores = {
        "softmax": jax.nn.softmax,
        "normalized": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
    }[experts.gate](logits)
    gates = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.gate == "normalized":
        gates = gates / gates.sum(axis=1, keepdims=True)
    return chosen, gates


def to_ids(chosen: Int[Array, "L T k"], experts: Experts) -> UInt[Array, "T L k"]:
    """Experts of every layer as they travel: by token, -1 as the largest value."""
    dtype = experts.id_dtype
    none = jnp.iinfo(dtype).max
    return jnp.moveaxis(jnp.where(chosen < 0, none, chosen), 0, 1).astype(dtype)


def from_ids(ids: UInt[Array, "R S L k"]) -> Int[Array, "L R S k"]:
    """Experts of every layer, and -1 for none, from what travelled."""
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
) -> tuple[Float[Array, "... D"], dict[str, Array]]:
    """The experts' output, without the input that it is added to, and who was chosen.

    Args:
        layer: its parameters, as `architecture.parameter_table` names them.
        arch: a decoder with experts.
        x: hidden states, the layer's own norm not yet taken.
        given: experts to take, int32; -1 where the router chooses.
        decoding: a forward pass of few tokens: the way is chosen by their number.
        mesh: over which x is cut like a batch, and the parameters by
            `model.shardings`; None: on one device.

    Returns:
        The output in the dtype of x, and {"experts": int32 [..., k]}.
    """
    experts = arch.experts
    assert experts is not None, "a family with experts says how many"
    mesh = mesh if mesh is not None and mesh.size > 1 else None
    normed = rms_norm(x, layer["ffn_norm"], arch.rms_eps)
    # [rows, tokens, D] or, of tokens that are decoded together, [tokens, D]
    cut = PartitionSpec(ROWS, *("context",) * (x.ndim - 2), None)
    chosen_ones = over_mesh(
        mesh,
        functools.partial(_chosen_ones, experts, decoding, mesh is not None),
        (_CUT, cut, cut),
        (cut, cut),
    )
    output, chosen = chosen_ones({name: layer[name] for name in _CUT}, normed, given)
    if experts.shared:
        h = gated(
            linear(normed, layer["shared_gate"]), linear(normed, layer["shared_up"])
        )
        output = output + linear(h, layer["shared_down"])
    return output, {"experts": chosen}


def _chosen_ones(
    experts: Experts,
    decoding: bool,
    over_devices: bool,
    layer: PyTree,
    x: Float[Array, "... D"],
    given: Int[Array, "... k"] | None,
) -> tuple[Float[Array, "... D"], Int[Array, "... k"]]:
    """What the chosen experts make of a device's tokens, and who they are."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = router_logits(tokens, layer["router"])
    if given is not None:
        given = given.reshape(-1, experts.top_k)
    chosen, gates = route(logits, experts, given)
    way = functools.partial(_grouped, over_devices)
    if decoding and len(tokens) <= DENSE_UP_TO:
        way = _gathered if len(tokens) < GATHERED_BELOW else _dense
    output = way(layer, experts, tokens, chosen, gates)
    if over_devices:
        output = jax.lax.psum(output, "tensor")
    chosen = chosen.reshape(*x.shape[:-1], experts.top_k)
    return output.astype(x.dtype).reshape(x.shape), chosen


@jax.named_scope(ROUTER)
def router_logits(
    tokens: Float[Array, "T D"], router: Float[Array, "D E"]
) -> Float[Array, "T E"]:
    """Logits of every expert, in float32 at the highest precision, like the head's."""
    return jnp.einsum(
        "td,de->te",
        tokens.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def _mixed(outputs: Array, gates: Array, experts: Experts) -> Float[Array, "T D"]:
    """The sum [T, D] of outputs [T, k, D] with their gates, in float32."""
    outputs = outputs.astype(jnp.float32)
    if experts.gate_input:
        return outputs.sum(axis=1)
    return (outputs * gates[..., None]).sum(axis=1)


def _grouped(
    over_devices: bool,
    layer: PyTree,
    experts: Experts,
    tokens: Array,
    chosen: Array,
    gates: Array,
) -> Float[Array, "T D"]:
    """Rows of (token, expert), sorted by expert."""
    into, out = (Cut("fsdp", 1), Cut("fsdp", 2)) if over_devices else (None, None)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.argsort(order)
    sizes = (flat[:, None] == jnp.arange(experts.count)[None]).sum(
        axis=0, dtype=jnp.int32
    )
    rows: Any = _spread(experts.top_k, tokens, order, place)
    if experts.gate_input:
        sorted_gates = _permuted(gates.reshape(-1), order, place)
        rows = rows * sorted_gates[:, None].astype(rows.dtype)
    gate_up = layer["expert_gate_up"]
    gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
    both: Any = grouped_matmul(rows, gate_up, sizes, "auto", into)
    h = gated(*jnp.split(both, 2, axis=1))
    found = grouped_matmul(h, layer["expert_down"], sizes, "auto", out)
    found = _permuted(found, place, order)
    return _mixed(found.reshape(*chosen.shape, -1), gates, experts)


def _dense(
    layer: PyTree, experts: Experts, tokens: Array, chosen: Array, gates: Array
) -> Float[Array, "T D"]:
    """All experts for all tokens, those that were not chosen with a gate of 0."""
    dtype = tokens.dtype
    taken = jnp.arange(experts.count)[:, None, None] == chosen[None]
    all_gates = jnp.where(taken, gates[None], 0.0).sum(axis=2)  # [E, T]
    inputs = jnp.broadcast_to(tokens[None], (experts.count, *tokens.shape))
    if experts.gate_input:
        inputs = inputs * all_gates[..., None].astype(dtype)
    gate_up = layer["expert_gate_up"].astype(dtype)
    both = jnp.einsum("etd,edpf->eptf", inputs, gate_up)
    found = jnp.einsum(
        "etf,efd->etd",
        gated(both[:, 0], both[:, 1]),
        layer["expert_down"].astype(dtype),
    ).astype(jnp.float32)
    if experts.gate_input:
        return found.sum(axis=0)
    return (found * all_gates[..., None]).sum(axis=0)


def _gathered(
    layer: PyTree, experts: Experts, tokens: Array, chosen: Array, gates: Array
) -> Float[Array, "T D"]:
    """Every token with copies of the matrices of its experts."""
    inputs = jnp.broadcast_to(tokens[:, None], (*chosen.shape, tokens.shape[1]))
    if experts.gate_input:
        inputs = inputs * gates[..., None].astype(tokens.dtype)
    gate_up, down = (
        layer[name][chosen].astype(tokens.dtype)
        for name in ("expert_gate_up", "expert_down")
    )
    both = jnp.einsum("tkd,tkdpf->tkpf", inputs, gate_up)
    h = gated(both[:, :, 0], both[:, :, 1])
    return _mixed(jnp.einsum("tkf,tkfd->tkd", h, down), gates, experts)


@jax.custom_vjp
def _permuted(x: Array, order: Array, place: Array) -> Array:
    """x[order]; `place` is the permutation that undoes it.  Both passes only gather."""
    return x[order]


_permuted.defvjp(
    lambda x, order, place: (x[order], place),
    lambda place, cotangent: (cotangent[place], None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(top_k: int, tokens: Array, order: Array, place: Array) -> Array:
    """A row for each of a token's experts [T * k, D], in `order`."""
    return tokens[order // top_k]


def _spread_forward(
    top_k: int, tokens: Array, order: Array, place: Array
) -> tuple[Array, Array]:
    return _spread(top_k, tokens, order, place), place


def _spread_backward(
    top_k: int, place: Array, cotangent: Array
) -> tuple[Array, None, None]:
    back = cotangent[place].reshape(-1, top_k, cotangent.shape[1])
    return back.sum(axis=1, dtype=jnp.float32).astype(cotangent.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)
