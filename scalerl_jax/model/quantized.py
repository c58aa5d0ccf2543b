"""Weights of the sampler's matrices in int8, with a scale per output.

    w ~= scale * q,   q in -127 .. 127,   scale = max |w| over the inputs / 127

The weights are rounded to the sampler's dtype first, so that the integers are the same
wherever they are chosen: in the learner, which has float32, or from params that were
sent or loaded in that dtype.  The scale is rounded to it before the integers are
chosen, so that a product rounds nothing but its own result: all integers are exact in
bfloat16, and x @ (scale * q) = scale * (x @ q).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

# Largest integer of a weight; -128 is not used, so that signs are symmetric.
_MOST = 127.0
# Matrices of a layer that are quantized; embeddings, head, norms and biases are not.
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


@struct.dataclass(kw_only=True)
class Quantized:
    """A matrix [inputs, outputs] as integers and scales."""

    values: Int8[Array, "inputs outputs"]
    scale: Float[Array, " outputs"]


def quantize(weights: Float[Array, "inputs outputs"], *, dtype: DTypeLike) -> Quantized:
    """Return the nearest integers of a matrix in `dtype`, with scales of `dtype`.

    An output whose weights are all zero, or subnormal, has a scale of 1.
    """
    kind = jnp.finfo(dtype)
    # XLA may drop a cast to bfloat16 and back.
    weights = jax.lax.reduce_precision(
        weights.astype(jnp.float32), exponent_bits=kind.nexp, mantissa_bits=kind.nmant
    )
    scale = (jnp.max(jnp.abs(weights), axis=0) / _MOST).astype(dtype)
    scale = jnp.where(scale == 0.0, jnp.ones_like(scale), scale)
    steps = jnp.round(weights / scale.astype(jnp.float32))
    # A scale that was rounded down would lift the largest weight above 127.
    values = jnp.clip(steps, -_MOST, _MOST).astype(jnp.int8)
    return Quantized(values=values, scale=scale)
