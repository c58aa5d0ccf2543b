"""Keys and values as the cache holds them: in a float dtype, or in int8 with scales.

A key or value in int8 is a vector of integers from -127 to 127 times one float32 scale:

    scale = max |x| / 127,   stored = round(x / scale)

with a scale per token and head, so that a new token changes nothing that is stored.
Keys are stored after their rotation.  Every token reads the stored form of all tokens,
its own included: results do not depend on how a prompt is cut into chunks, nor on
whether a sequence was suspended.  No array of dequantised keys or values is made: the
integers, exact in bfloat16, go into the products, and the scales multiply scores and
weights in float32.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# A factor, as is 1 / scale: whether XLA divides or multiplies depends on the program.
_STEP = np.float32(1 / 127)


@struct.dataclass(kw_only=True)
class Stored:
    """Keys, values and their scales; the axes depend on who holds them.

    The scales are None in a float dtype.  Of T tokens keys and values are
    [T, kv, dim], and scales [T, kv].
    """

    keys: Array
    values: Array
    key_scales: Array | None = None
    value_scales: Array | None = None


def marked(k: Array, v: Array) -> tuple[Array, Array]:
    """Return keys and values in which only keys can be NaN.

    A token with a non-finite key or value gets a NaN key and a finite value.  Then only
    queries that attend to it become NaN: a masked score is replaced, but a masked value
    is multiplied by 0, and 0 * NaN is NaN.
    """
    k = jnp.where(jnp.isfinite(k) & jnp.isfinite(v), k, jnp.nan)
    return k, jnp.where(jnp.isfinite(v), v, 0)


def stored(
    k: Float[Array, "*T kv dim"], v: Float[Array, "*T kv dim"], dtype: DTypeLike
) -> Stored:
    """Return new keys and values as a cache of this dtype holds them.

    Non-finite ones are `marked`; in int8 a NaN key has integers 0 and a NaN scale.
    """
    k, v = marked(k, v)
    if not is_quantized(dtype):
        return Stored(keys=k.astype(dtype), values=v.astype(dtype))
    keys, key_scales = _quantize(k)
    values, value_scales = _quantize(v)
    return Stored(
        keys=keys, values=values, key_scales=key_scales, value_scales=value_scales
    )


def _quantize(x: Float[Array, "*T kv dim"]) -> tuple[Array, Array]:
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1) * _STEP  # NaN if any number is
    inverse = 1.0 / jnp.where(scales > 0, scales, 1.0)
    integers = jnp.where(jnp.isfinite(x), jnp.round(x * inverse[..., None]), 0.0)
    return integers.astype(jnp.int8), scales


def is_quantized(dtype: DTypeLike) -> bool:
    """Return whether a cache of this dtype has scales."""
    return jnp.dtype(dtype) == jnp.int8


def read_back(k: Array, v: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return the keys and values that tokens read from a cache of this dtype.

    It is for passes without a cache; they are float32 if the cache is int8.
    """
    if not is_quantized(dtype):
        return k, v
    (keys, key_scales), (values, value_scales) = map(_quantize, marked(k, v))
    return keys * key_scales[..., None], values * value_scales[..., None]
