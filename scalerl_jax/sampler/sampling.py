"""The distribution that a token is drawn from, and the keys that draw it.

Every draw has a key folded from what it is for, so that a rollout does not depend on
the slot, the batch or the worker that makes it.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Purpose = Literal["train", "eval"]
_PURPOSES = {"train": 0, "eval": 1}
# Folded in after the sample's index; token positions take 0, 1, 2, ...
_INTERRUPTION = 2**31 - 1


@functools.partial(jax.jit, static_argnames="num_samples")
def _sample_keys(parts: Int[Array, " parts"], *, num_samples: int) -> Array:
    key = jax.random.key(parts[0])
    for part in parts[1:]:
        key = jax.random.fold_in(key, part)
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(
        jnp.arange(num_samples)
    )


def sample_keys(
    seed: int, purpose: Purpose, *, prompt_id: int, epoch: int, num_samples: int
) -> Array:
    """One key per sample of a prompt: typed PRNG keys, [num_samples]."""
    parts = np.array([seed, _PURPOSES[purpose], prompt_id, epoch], np.uint32)
    return _sample_keys(parts, num_samples=num_samples)


@jax.jit
def _draw_lengths(keys: Array, low: Array, high: Array) -> Array:
    def draw(key: Array) -> Array:
        return jax.random.randint(
            jax.random.fold_in(key, _INTERRUPTION), (), low, high + 1
        )

    return jax.vmap(draw)(keys)


def interruption_lengths(
    keys: Array, *, min_tokens: int, max_tokens: int
) -> Int[Array, " samples"]:
    """Thinking length at which each sample is interrupted, even on [min, max]."""
    return _draw_lengths(keys, jnp.int32(min_tokens), jnp.int32(max_tokens))


def token_logprobs(
    logits: Float[Array, "... V"],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Float[Array, "... V"]:
    """Log-probabilities in nats of the distribution that is sampled from.

    Temperature first, then the `top_k` likeliest tokens (0: all), then the fewest
    likeliest tokens that hold `top_p` of the probability (1.0: all); what is left out
    has probability 0, and the rest is normalised again.
    """
    logits = logits / temperature
    if top_k > 0:
        bound = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < bound, -jnp.inf, logits)
    if top_p < 1.0:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        # The likeliest token always has nothing before it: one is always kept.
        kept = jnp.where(before < top_p, ordered, jnp.inf)
        bound = kept.min(axis=-1, keepdims=True)
        logits = jnp.where(logits < bound, -jnp.inf, logits)
    return jax.nn.log_softmax(logits, axis=-1)


def draw_token(
    logprobs: Float[Array, " V"], key: Array, index: Int[Array, ""]
) -> Int[Array, ""]:
    """The token at place `index` of the completion whose key is `key`."""
    return jax.random.categorical(jax.random.fold_in(key, index), logprobs)
