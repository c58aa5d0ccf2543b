"""What a decoder layer is made of; for the backward pass each keeps only its inputs.

Gradients of weights are summed in the weights' own dtype: with float32 weights and a
bfloat16 forward pass nothing of a gradient is rounded before it reaches the optimizer.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Under a scan nothing is merged across the two passes: a barrier would only cost.
_remember_inputs = functools.partial(jax.checkpoint, prevent_cse=False)


@jax.custom_vjp
def linear(
    x: Float[Array, "... K"], weights: Float[Array, "K N"]
) -> Float[Array, "... N"]:
    """x @ weights, in the dtype of x."""
    return x @ weights.astype(x.dtype)


def _linear_forward(x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(x, weights), (x, weights)


def _linear_backward(
    saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, weights = saved
    # XLA's CPU backend transposes the left operand of a product over tokens.  Behind a
    # barrier that is a plain copy of x, and not part of what computes the cotangent,
    # which it makes several times as slow.
    x = jax.lax.optimization_barrier(x)
    of_x = jnp.einsum("...n,kn->...k", cotangent, weights.astype(x.dtype))
    of_weights = jnp.einsum(
        "...k,...n->kn", x, cotangent, preferred_element_type=weights.dtype
    )
    return of_x, of_weights


linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(_remember_inputs, static_argnums=2)
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / rms(x) * scale, computed in float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)


@_remember_inputs
def gated(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Array:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


def rotations(
    positions: Int[Array, "..."], frequencies: Float[Array, " half"]
) -> tuple[Float[Array, "... 1 half"], Float[Array, "... 1 half"]]:
    """Cosines and sines of the angles by which heads are turned at each position."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "... heads dim"],
    turns: tuple[Float[Array, "... 1 half"], Float[Array, "... 1 half"]],
) -> Array:
    """Rotary position embedding; dimension i is paired with i + dim / 2."""
    cos, sin = turns
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
