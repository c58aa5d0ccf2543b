"""Rewards before they become advantages: their variance, and punishment of length."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def has_reward_variance(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Bool[Array, " B"]:
    """True for the rollouts of groups whose judged rewards are not all equal.

    `judged` None: all are.  With fewer than two of them there is no variance.
    A zero-variance group has no gradient; ScaleRL drops it before normalisation and
    averaging and does not refill.  https://arxiv.org/abs/2510.13786, section 3.2.
    """
    groups = rewards.reshape(-1, group_size)
    counted = True if judged is None else judged.reshape(-1, group_size)
    highest = jnp.where(counted, groups, -jnp.inf).max(axis=1)
    varied = highest > jnp.where(counted, groups, jnp.inf).min(axis=1)
    return jnp.repeat(varied, group_size)


def overlong_penalty(
    lengths: Int[Array, " B"], *, max_tokens: int, cache_tokens: int
) -> Float[Array, " B"]:
    """Soft punishment of completions that come near the longest allowed one.

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
    """Rewards with the penalty, of all (DAPO) or correct completions (ScaleRL)."""
    penalty = overlong_penalty(
        lengths, max_tokens=max_tokens, cache_tokens=cache_tokens
    )
    return rewards + jnp.where(passed | (not correct_only), penalty, 0.0)
