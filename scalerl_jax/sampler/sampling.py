"""The distribution from which a token is drawn, and the keys of the draws.

Each draw's key is folded from purpose, prompt, epoch, sample and position, so that a
rollout does not depend on its slot, batch or worker.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Real, UInt32

from scalerl_jax.types import AnyArray

Purpose = Literal["train", "eval", "serve"]
_PURPOSES = {"train": 0, "eval": 1, "serve": 2}
# Folded in after the sample's index; token positions take 0, 1, 2, ...
_INTERRUPTION = 2**31 - 1
_MANY = 2**31 - 1  # tokens, more than in any vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """A distribution: temperature first, then the filters in this order."""

    temperature: float = 1.0  # 0: the likeliest token; of equal ones the first
    top_k: int = 0  # keep this many likeliest tokens; 0: all
    top_p: float = 1.0  # keep the fewest likeliest with this probability; 1: all
    min_p: float = 0.0  # keep tokens with this share of the highest probability; 0: all

    def __post_init__(self) -> None:
        """Refuse values that do not give a distribution."""
        bounds = {
            "temperature": (0.0 <= self.temperature < math.inf, "0 or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0, and 1 (off) at most"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 (off) to 1"),
        }
        for name, (holds, limit) in bounds.items():
            if not holds:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be {limit}")


@struct.dataclass(kw_only=True)
class SamplingRows:
    """One `Sampling` per row."""

    temperature: Float[AnyArray, " rows"]
    top_k: Int[AnyArray, " rows"]
    top_p: Float[AnyArray, " rows"]
    min_p: Float[AnyArray, " rows"]

    @classmethod
    def of(cls, sampling: Sampling, rows: int) -> "SamplingRows":
        """Return the same distribution in every row, as NumPy arrays."""
        return cls(
            temperature=np.full(rows, sampling.temperature, np.float32),
            top_k=np.full(rows, min(sampling.top_k, _MANY), np.int32),
            top_p=np.full(rows, sampling.top_p, np.float32),
            min_p=np.full(rows, sampling.min_p, np.float32),
        )


@struct.dataclass(kw_only=True)
class Draw:
    """One token per row."""

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]  # nats, of the sampled distribution
    full_logprobs: Float[Array, " rows"]  # nats, of the distribution without filters
    failed: Bool[Array, " rows"]  # the logits have a NaN or +inf


@functools.partial(jax.jit, static_argnames="num_samples")
def _sample_keys(
    parts: UInt32[Array, " parts"], *, num_samples: int
) -> UInt32[Array, "samples 2"]:
    key = jax.random.key(parts[0], impl="threefry2x32")
    for part in parts[1:]:
        key = jax.random.fold_in(key, part)
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(
        jnp.arange(num_samples)
    )
    return jax.random.key_data(keys)


def _wrap(key_data: UInt32[Array, "... 2"]) -> Array:
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def _host() -> Any:
    # Keys are made on the host: on the device they would wait behind a decode call.
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return None


def sample_keys(
    seed: int, purpose: Purpose, *, prompt_id: int, epoch: int, num_samples: int
) -> UInt32[np.ndarray, "samples 2"]:
    """Return the data of one threefry key per sample of a prompt."""
    parts = np.array([seed, _PURPOSES[purpose], prompt_id, epoch], np.uint32)
    with jax.default_device(_host()):
        return np.asarray(_sample_keys(parts, num_samples=num_samples))


@jax.jit
def _draw_lengths(keys: Array, low: Array, high: Array) -> Array:
    def draw(key: Array) -> Array:
        return jax.random.randint(
            jax.random.fold_in(_wrap(key), _INTERRUPTION), (), low, high + 1
        )

    return jax.vmap(draw)(keys)


def interruption_lengths(
    keys: UInt32[np.ndarray, "samples 2"], *, min_tokens: int, max_tokens: int
) -> Int[np.ndarray, " samples"]:
    """Draw each sample's interruption length in tokens, uniform on [min, max]."""
    with jax.default_device(_host()):
        return np.asarray(
            _draw_lengths(keys, np.int32(min_tokens), np.int32(max_tokens))
        )


def scaled_logits(
    logits: Float[Array, "rows V"], sampling: SamplingRows
) -> tuple[Float[Array, "rows V"], Float[Array, "rows V"]]:
    """Return logits / temperature, with and without the filters (-inf: left out).

    A temperature of 0 keeps only the likeliest token (all of them, if several are
    exactly equal); without filters it stands for the distribution at temperature 1.
    """
    greedy = sampling.temperature == 0
    full = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    highest = full.max(axis=-1)
    bound = jnp.where(greedy, highest, highest + jnp.log(sampling.min_p))
    ranked = (sampling.top_k > 0) | (sampling.top_p < 1.0)
    bound = jax.lax.cond(
        ranked.any(),
        lambda: jnp.maximum(bound, _rank_bound(full, sampling)),
        lambda: bound,
    )
    kept = jax.lax.cond(
        (bound > -jnp.inf).any(),
        lambda: jnp.where(full < bound[:, None], -jnp.inf, full),
        lambda: full,
    )
    return kept, full


def _rank_bound(scaled: Array, sampling: SamplingRows) -> Float[Array, " rows"]:
    """Return the lowest logit that top-k and then top-p keep."""
    keys = _ordered(scaled)
    everything = jnp.ones_like(scaled)
    count = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1])
    kth = _highest_bound(keys, everything, jnp.minimum(count, scaled.shape[-1]))
    masses = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    masses = jnp.where(keys >= kth[:, None], masses, 0.0)
    nucleus = _highest_bound(keys, masses, sampling.top_p * masses.sum(axis=-1))
    # The maximum is kth only if sums of all masses are rounded differently.
    bound = jnp.where(sampling.top_p < 1.0, jnp.maximum(nucleus, kth), kth)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bound >= sign, bound ^ sign, ~bound)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return unsigned integers that sort like the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _highest_bound(
    keys: UInt32[Array, "rows V"],
    weights: Float[Array, "rows V"],
    target: Real[Array, " rows"],
) -> UInt32[Array, " rows"]:
    """Return the highest bound with at least `target` of the weight at or above it.

    It is found by bisection over the 32 bits: 32 sums cost less than a sort.
    """

    def narrow(bit: Array, bound: Array) -> Array:
        higher = bound | (jnp.uint32(1 << 31) >> bit.astype(jnp.uint32))
        held = jnp.where(keys >= higher[:, None], weights, 0.0).sum(axis=-1)
        return jnp.where(held >= target, higher, bound)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(keys.shape[0], jnp.uint32))


def draw_tokens(
    logits: Float[Array, "rows V"],
    sampling: SamplingRows,
    *,
    keys: UInt32[Array, "rows 2"],
    index: Int[Array, " rows"],
) -> Draw:
    """Draw token `index` of each row's completion with `keys[row]`.

    The draw is by inversion in two stages: a block of the vocabulary, then a token in
    it, with a uniform number for each.  It costs one exp per token of the vocabulary;
    the Gumbel trick needs a random number per token.  A token's probability is exact to
    within 2**-23 of its block's.  At temperature 0 both numbers are 0, so that the
    first of equal tokens is drawn, with log-probability 0.
    """
    kept, full = scaled_logits(logits, sampling)
    rows, vocabulary = kept.shape
    highest = kept.max(axis=-1)
    block = _block_size(vocabulary)
    blocks = kept.reshape(rows, vocabulary // block, block)
    masses = jnp.exp(blocks - highest[:, None, None]).sum(axis=-1)
    total = masses.sum(axis=-1)

    uniform = jax.vmap(
        lambda key, place: jax.random.uniform(jax.random.fold_in(key, place), (2,))
    )(_wrap(keys), index)
    greedy = sampling.temperature == 0
    uniform = jnp.where(greedy[:, None], 0.0, uniform)
    chosen = _invert(masses, uniform[:, 0])
    inside = jnp.take_along_axis(blocks, chosen[:, None, None], axis=1)[:, 0]
    place = _invert(jnp.exp(inside - highest[:, None]), uniform[:, 1])
    tokens = chosen * block + place
    logit = jnp.take_along_axis(inside, place[:, None], axis=-1)[:, 0]

    filtered = greedy | (sampling.top_k > 0)
    filtered |= (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
    logprobs = logit - highest - jnp.log(jnp.where(greedy, 1.0, total))
    full_logprobs = jax.lax.cond(
        filtered.any(),
        lambda: (
            jnp.take_along_axis(full, tokens[:, None], axis=-1)[:, 0]
            - jax.nn.logsumexp(full, axis=-1)
        ),
        lambda: logprobs,
    )
    return Draw(
        tokens=tokens,
        logprobs=logprobs,
        full_logprobs=full_logprobs,
        failed=~jnp.isfinite(total) | ~jnp.isfinite(highest),
    )


def _block_size(vocabulary: int) -> int:
    """Return the divisor of the vocabulary with the fewest sums in the two stages."""
    divisors = (size for size in range(1, vocabulary + 1) if vocabulary % size == 0)
    return min(divisors, key=lambda size: size + vocabulary // size)


def _invert(
    masses: Float[Array, "rows n"], uniform: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """Return the first index whose cumulative mass is above `uniform` * total."""
    cumulative = jnp.cumsum(masses, axis=-1)
    target = uniform * cumulative[:, -1]
    # Rounded sums may decrease by an ulp: never choose an index without mass.
    passed = (cumulative > target[:, None]) & (masses > 0)
    return jnp.where(
        passed.any(axis=-1), jnp.argmax(passed, axis=-1), jnp.argmax(masses, axis=-1)
    ).astype(jnp.int32)
