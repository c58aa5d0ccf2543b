"""Rotary position embeddings: frequencies, their scalings, and the rotation.

    frequency[i] = theta ^ (-2 i / head_dim)

https://arxiv.org/abs/2104.09864, section 3.2.2.  A scaling maps positions beyond the
pretraining's between known ones; each is as in transformers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """No scaling up to the decoder's `max_positions`, which no sequence may exceed.

    Above, frequencies would change with every token, but not in cached keys.
    """

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies divided, high ones unchanged, a ramp between them.

    https://arxiv.org/abs/2309.00071.  Cosines and sines are multiplied by
    `attention_factor`; None: 0.1 log(factor) + 1, equation 22 there.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0  # turns in the original positions: above it, unchanged
    beta_slow: float = 1.0  # turns in the original positions: below it, divided
    truncate: bool = True  # round the ramp's ends to whole dimensions
    attention_factor: float | None = None


Scaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer."""

    theta: float
    scaling: Scaling | None = None

    @property
    def magnitude(self) -> float:
        """Return the factor of cosines and sines."""
        scaling = self.scaling
        if not isinstance(scaling, YarnScaling):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rope_frequencies(rope: Rope, head_dim: int) -> Float[Array, " half"]:
    """Return the rotary frequencies, in radians per position."""
    half = jnp.arange(head_dim // 2, dtype=jnp.float32)
    frequencies = rope.theta ** (-2.0 * half / head_dim)
    if rope.scaling is None:
        return frequencies
    return _SCALED[type(rope.scaling)](rope, frequencies)


def _as_llama3(rope: Rope, frequencies: Array) -> Array:
    scaling: Any = rope.scaling
    turns = scaling.original_max_positions * frequencies / (2.0 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (share_kept + (1.0 - share_kept) / scaling.factor)


def _as_yarn(rope: Rope, frequencies: Array) -> Array:
    scaling: Any = rope.scaling
    half = len(frequencies)

    def place(turns: float) -> float:
        """Return the dimension with `turns` turns in the original positions."""
        radians = scaling.original_max_positions / (turns * 2 * math.pi)
        return half * math.log(radians) / math.log(rope.theta)

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high += 0.001 * (low == high)
    divided = jnp.clip((jnp.arange(half) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1.0 - divided + divided / scaling.factor)


_SCALED: dict[type, Callable[[Rope, Array], Array]] = {
    Llama3Scaling: _as_llama3,
    LinearScaling: lambda rope, frequencies: frequencies / rope.scaling.factor,  # type: ignore[union-attr]
    DynamicScaling: lambda rope, frequencies: frequencies,
    YarnScaling: _as_yarn,
}


def rotations(
    positions: Int[Array, "..."],
    frequencies: Float[Array, " half"],
    magnitude: float = 1.0,
) -> tuple[Float[Array, "... 1 half"], Float[Array, "... 1 half"]]:
    """Return cosines and sines of the heads' rotation angles at each position."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def rotate(
    x: Float[Array, "... heads dim"],
    turns: tuple[Float[Array, "... 1 half"], Float[Array, "... 1 half"]],
    *,
    neighbours: bool = False,
) -> Array:
    """Return x with its heads rotated; dimension i is paired with i + dim / 2.

    With `neighbours` dimension 2 i is paired with 2 i + 1.
    """
    cos, sin = turns
    x32 = x.astype(jnp.float32)
    if neighbours:
        pairs = x32.reshape(*x.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(x32, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if neighbours:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
