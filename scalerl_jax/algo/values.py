"""A critic's rewards, advantages and loss per token, which weights mask and average."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.algo.sequences import ends


def final_rewards(
    rewards: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """The reward of a completion, given on its last sampled token; 0 on all others."""
    return jnp.where(ends(sequence_ids, mask), rewards, 0.0)


def whiten(
    advantages: Float[Array, "..."], mask: Bool[Array, "..."], *, eps: float
) -> Float[Array, "..."]:
    """(A - mean) / (std + eps) over the tokens of the mask; 0 on all others.

    Mean and std are of the same tokens, those that the critic learns from too: where
    completions are masked none is larger than the square root of their number.
    PPO as published in code: https://arxiv.org/abs/2005.12729, section 3.
    """
    count = jnp.maximum(mask.sum(), 1)
    kept = jnp.where(mask, advantages, 0.0)
    centred = jnp.where(mask, advantages - kept.sum() / count, 0.0)
    # What rounding has left of the mean: a spread of its size would be noise alone.
    centred = jnp.where(mask, centred - centred.sum() / count, 0.0)
    std = jnp.sqrt((centred**2).sum() / count)
    rounding = jnp.finfo(advantages.dtype).eps * jnp.abs(kept).max(initial=0.0)
    std = jnp.where(std > rounding, std, 0.0)
    # Equal advantages and no eps: 0 / 0.
    return centred / jnp.where(std + eps > 0, std + eps, 1.0)


def clipped_value_loss(
    values: Float[Array, "..."],
    old_values: Float[Array, "..."],
    returns: Float[Array, "..."],
    *,
    value_clip: float,
) -> Float[Array, "..."]:
    """Squared error that is not rewarded for leaving the old value by much.

        clipped = old_value + clip(value - old_value, -value_clip, value_clip)
        loss = max((value - return)^2, (clipped - return)^2) / 2

    A value that is past the clip, and nearer to the return than the clipped one, has no
    gradient.  `value_clip` is in the unit of the reward; 0 leaves the plain squared
    error.  PPO as published in code: https://arxiv.org/abs/2005.12729, section 3.
    """
    loss = 0.5 * (values - returns) ** 2
    if not value_clip:
        return loss
    clipped = old_values + jnp.clip(values - old_values, -value_clip, value_clip)
    return jnp.maximum(loss, 0.5 * (clipped - returns) ** 2)
