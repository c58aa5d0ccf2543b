"""The soft punishment of long completions, which is added to their rewards."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def overlong_penalty(
    lengths: Int[Array, " B"], *, max_tokens: int, cache_tokens: int
) -> Float[Array, " B"]:
    """Penalty in [-1, 0] of completions whose length nears the limit, in tokens.

        penalty = clip((max_tokens - length) / cache_tokens - 1, -1, 0)

    0 up to max_tokens - cache_tokens, then linear, -1 from max_tokens on.  DAPO,
    https://arxiv.org/abs/2503.14476, equation 13 (which writes the three parts; 20,480
    and 4,096); ScaleRL, https://arxiv.org/abs/2510.13786 (this form; 14k and 2k).
    """
    left = (max_tokens - cache_tokens - lengths).astype(jnp.float32)
    return jnp.clip(left / cache_tokens, -1.0, 0.0)


def add_overlong_penalty(
    rewards: Float[Array, " B"],
    lengths: Int[Array, " B"],
    passed: Bool[Array, " B"],
    *,
    max_tokens: int,
    cache_tokens: int,
    correct_only: bool,
) -> Float[Array, " B"]:
    """Add `overlong_penalty` to rewards: of all completions (DAPO), or of the correct
    ones only (ScaleRL).
    """
    penalty = overlong_penalty(
        lengths, max_tokens=max_tokens, cache_tokens=cache_tokens
    )
    return rewards + jnp.where(passed | (not correct_only), penalty, 0.0)
