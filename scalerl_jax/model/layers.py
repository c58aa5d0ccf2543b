"""Parts of a decoder; each saves only its inputs for the backward pass.

Gradients of weights are summed in the weights' own dtype: with float32 weights and a
bfloat16 forward pass no gradient is rounded before it reaches the optimizer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.lora import Adapted
from scalerl_jax.model.quantized import Quantized
from scalerl_jax.parallel.mesh import ROWS, SHARDS, over_mesh

# Under a scan the two passes share no code: a barrier would only cost time.
_remember_inputs = functools.partial(jax.checkpoint, prevent_cse=False)
# Names, for remat policies, of the experts that tokens chose and of grouped products.
CHOSEN, GROUPED = "chosen experts", "grouped"
# Scope of a router's products, to find them in a compiled program.
ROUTER = "router"
CLAMPED_GAIN = 1.702
# Shardings of the embedding's table and of the head, of a value per token, and of the
# embeddings and hidden states.
TABLE = PartitionSpec("tensor", SHARDS)
TOKENS = PartitionSpec(ROWS, "context")
HIDDEN = PartitionSpec(ROWS, "context", None)


def linear(
    x: Float[Array, "... K"], weights: Float[Array, "K N"] | Adapted | Quantized
) -> Float[Array, "... N"]:
    """Return x @ weights in the dtype of x; factors are applied one after the other."""
    if isinstance(weights, Quantized):
        return _product(x, weights.values) * weights.scale.astype(x.dtype)
    if not isinstance(weights, Adapted):
        return _linear(x, weights)
    factors: Any = weights.factors
    beside = _linear(_linear(x, factors.down), factors.up)
    return _linear(x, weights.weights) + factors.scale * beside


@jax.custom_vjp
def _linear(
    x: Float[Array, "... K"], weights: Float[Array, "K N"]
) -> Float[Array, "... N"]:
    return _product(x, weights)


def _product(x: Array, weights: Array) -> Array:
    return x @ weights.astype(x.dtype)


def _linear_forward(x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    # Not `_linear` itself: remat policies do not see products inside a custom rule.
    return _product(x, weights), (x, weights)


def _linear_backward(
    saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, weights = saved
    # XLA's CPU backend transposes the left operand of a product over tokens.  Behind a
    # barrier that is a plain copy of x; without it, the transpose is fused into the
    # cotangent's computation, which becomes several times slower.
    x = jax.lax.optimization_barrier(x)
    of_x = jnp.einsum("...n,kn->...k", cotangent, weights.astype(x.dtype))
    of_weights = jnp.einsum(
        "...k,...n->kn", x, cotangent, preferred_element_type=weights.dtype
    )
    return of_x, of_weights


_linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def add_bias(x: Float[Array, "... N"], bias: Float[Array, " N"]) -> Array:
    """Return x + bias in the dtype of x."""
    return x + bias.astype(x.dtype)


@jax.custom_vjp
def _scaled(x: Array, scale: Array) -> Array:
    return x * scale.astype(x.dtype)


def _scaled_backward(
    saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, scale = saved
    products = x.astype(jnp.float32) * cotangent.astype(jnp.float32)
    return cotangent * scale.astype(x.dtype), _over_tokens(products, scale)


def _over_tokens(x: Array, vector: Array) -> Array:
    """Return a vector's cotangents, summed in float32 over what it was repeated for.

    JAX's own rule for a repeated array adds the tokens up in the dtype of x.
    """
    axes = tuple(range(x.ndim - vector.ndim))
    return x.sum(axis=axes, dtype=jnp.float32).astype(vector.dtype)


add_bias.defvjp(
    lambda x, bias: (add_bias(x, bias), bias),
    lambda bias, cotangent: (cotangent, _over_tokens(cotangent, bias)),
)
_scaled.defvjp(lambda x, scale: (_scaled(x, scale), (x, scale)), _scaled_backward)


@functools.partial(_remember_inputs, static_argnums=2)
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / rms(x) * scale, computed in float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return _scaled((x32 * inverse).astype(x.dtype), scale)


@functools.partial(_remember_inputs, static_argnums=(2, 3))
def offset_norm(x: Array, scale: Array, eps: float, offset: float) -> Array:
    """x / rms(x) * (offset + scale), rounded once: Gemma's norm, with offset 1."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * (offset + scale.astype(jnp.float32))).astype(x.dtype)


@_remember_inputs
def gated(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Array:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


@_remember_inputs
def gelu_gated(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Array:
    """gelu(gate) * up, with the approximation by tanh (Gemma)."""
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(_remember_inputs, static_argnums=2)
def clamped_gated(
    gate: Float[Array, "... F"], up: Float[Array, "... F"], limit: float
) -> Array:
    """g * sigmoid(1.702 g) * (u + 1), g = min(gate, limit), u within +-limit (gpt-oss).

    With 1.702 the first factor approximates gelu: https://arxiv.org/abs/1606.08415.
    """
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(CLAMPED_GAIN * gate) * (up + 1)


def norm(x: Array, scale: Array, arch: Architecture) -> Array:
    """Return x normalised by the decoder's kind of norm."""
    if arch.norm_offset:
        return offset_norm(x, scale, arch.rms_eps, arch.norm_offset)
    return rms_norm(x, scale, arch.rms_eps)


# Activation of an `Architecture` -> function (gate, up) -> inner units.
ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": gated,
    "gelu_tanh": gelu_gated,
}


def embed(
    table: Float[Array, "V D"],
    tokens: Int[Array, "R S"],
    *,
    mesh: Mesh | None,
    dtype: DTypeLike,
) -> Float[Array, "R S D"]:
    """Return table[tokens] in `dtype`; the gradient is summed in the table's dtype.

    Over a mesh the table is sharded over vocabulary (tensor) and hidden units (fsdp),
    the tokens over rows (data, fsdp) and along rows (context).  Each device looks up
    its own columns for the tokens of its whole fsdp group, and the group exchanges
    columns for rows: neither the table nor its unsummed gradient is sent.
    """
    if mesh is None:
        return table[tokens].astype(dtype)
    return _embed(mesh, jnp.dtype(dtype), table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embed(mesh: Mesh, dtype: DTypeLike, table: Array, tokens: Array) -> Array:
    def local(table: Array, tokens: Array) -> Array:
        tokens = jax.lax.all_gather(tokens, SHARDS, tiled=True)
        places, here = _places(table, tokens)
        found = jnp.where(here[..., None], table[places].astype(dtype), 0)
        # A token's row is on only one device of the tensor axis: the sum is exact.
        found = jax.lax.psum(found, "tensor")
        return jax.lax.all_to_all(found, SHARDS, 0, 2, tiled=True)

    return over_mesh(mesh, local, (TABLE, TOKENS), HIDDEN)(table, tokens)


def _places(table: Array, tokens: Array) -> tuple[Array, Array]:
    """Return each token's row in the local table, and whether it has one there."""
    places = tokens - jax.lax.axis_index("tensor") * table.shape[0]
    here = (places >= 0) & (places < table.shape[0])
    return jnp.where(here, places, 0), here


def _embed_forward(
    mesh: Mesh, dtype: DTypeLike, table: Array, tokens: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _embed(mesh, dtype, table, tokens), (table, tokens)


def _embed_backward(
    mesh: Mesh, dtype: DTypeLike, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None]:
    del dtype

    def local(table: Array, tokens: Array, cotangent: Array) -> Array:
        tokens = jax.lax.all_gather(tokens, SHARDS, tiled=True)
        columns = jax.lax.all_to_all(cotangent, SHARDS, 2, 0, tiled=True)
        places, here = _places(table, tokens)
        columns = jnp.where(here[..., None], columns.astype(table.dtype), 0)
        summed = jnp.zeros_like(table).at[places].add(columns)
        return jax.lax.psum(summed, ("data", "context"))

    gradient = over_mesh(mesh, local, (TABLE, TOKENS, HIDDEN), TABLE)(*saved, cotangent)
    return gradient, None


_embed.defvjp(_embed_forward, _embed_backward)
