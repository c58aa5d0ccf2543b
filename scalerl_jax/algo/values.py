"""A critic's rewards, advantages and loss per token.  Weights mask and average."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def ends(
    sequence_ids: Int[Array, "*rows S"], mask: Bool[Array, "*rows S"]
) -> Bool[Array, "*rows S"]:
    """Return True on the last unmasked token of every sequence."""
    places = jnp.arange(1.0, mask.shape[-1] + 1.0)

    def of_row(ids: Array, seen: Array) -> Array:
        reached = jax.ops.segment_max(
            jnp.where(seen, places, 0.0), ids, num_segments=ids.size + 1
        )
        return seen & (reached[ids] == places)

    return jnp.vectorize(of_row, signature="(s),(s)->(s)")(
        sequence_ids, mask & (sequence_ids > 0)
    )


def final_rewards(
    rewards: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """Return each completion's reward on its last sampled token, 0 on all others."""
    return jnp.where(ends(sequence_ids, mask), rewards, 0.0)


def gae(
    rewards: Float[Array, "*rows S"],
    values: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
    *,
    gamma: float,
    gae_lambda: float,
) -> Float[Array, "*rows S"]:
    """Generalised advantage estimates of the tokens of packed rows (GAE).

        delta[s] = rewards[s] + gamma * values[next] - values[s]
        A[s] = delta[s] + gamma * gae_lambda * A[next]

    where values[s] is the value of the state before token s, and next is the next
    unmasked token of the same sequence; if there is no next one, its value and
    advantage are 0, also for a completion that was cut off.  Forced tokens are skipped.
    A + values is the return that the critic learns.  A is 0 where the mask is False.
    https://arxiv.org/abs/1506.02438, equation 16.
    """

    def back(following: tuple, token: tuple) -> tuple[tuple, Array]:
        advantage, value, sequence_id = following
        reward, own_value, own_id, seen = token
        gone_on = own_id == sequence_id
        delta = reward + gamma * jnp.where(gone_on, value, 0.0) - own_value
        own = delta + gamma * gae_lambda * jnp.where(gone_on, advantage, 0.0)
        found = (own, own_value, own_id)
        carry = (jnp.where(seen, x, y) for x, y in zip(found, following, strict=True))
        return tuple(carry), jnp.where(seen, own, 0.0)

    tokens = (rewards, values, sequence_ids, mask)
    tokens = tuple(jnp.moveaxis(jnp.asarray(x), -1, 0) for x in tokens)
    end = tuple(jnp.zeros_like(x[0]) for x in (tokens[0], tokens[1], tokens[2]))
    _, advantages = jax.lax.scan(back, end, tokens, reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def whiten(
    advantages: Float[Array, "..."], mask: Bool[Array, "..."], *, eps: float
) -> Float[Array, "..."]:
    """(A - mean) / (std + eps) over the tokens of the mask; 0 on all others.

    Mean and std are over the same tokens that train the critic.  With eps = 0 no
    result is larger than the square root of their number, even if few are unmasked.
    PPO as published in code: https://arxiv.org/abs/2005.12729, section 3.
    """
    count = jnp.maximum(mask.sum(), 1)
    kept = jnp.where(mask, advantages, 0.0)
    centred = jnp.where(mask, advantages - kept.sum() / count, 0.0)
    # A spread as small as the mean's rounding error would be only noise.
    centred = jnp.where(mask, centred - centred.sum() / count, 0.0)
    std = jnp.sqrt((centred**2).sum() / count)
    rounding = jnp.finfo(advantages.dtype).eps * jnp.abs(kept).max(initial=0.0)
    std = jnp.where(std > rounding, std, 0.0)
    # Equal advantages without eps would give 0 / 0.
    return centred / jnp.where(std + eps > 0, std + eps, 1.0)


def clipped_value_loss(
    values: Float[Array, "..."],
    old_values: Float[Array, "..."],
    returns: Float[Array, "..."],
    *,
    value_clip: float,
) -> Float[Array, "..."]:
    """Half squared error, clipped so that moving far from the old value gains nothing.

        clipped = old_value + clip(value - old_value, -value_clip, value_clip)
        loss = max((value - return)^2, (clipped - return)^2) / 2

    A value outside the clip that is nearer to the return than the clipped value has no
    gradient.  `value_clip` is in the unit of the reward; 0 gives the plain squared
    error.  PPO as published in code: https://arxiv.org/abs/2005.12729, section 3.
    """
    loss = 0.5 * (values - returns) ** 2
    if not value_clip:
        return loss
    clipped = old_values + jnp.clip(values - old_values, -value_clip, value_clip)
    return jnp.maximum(loss, 0.5 * (clipped - returns) ** 2)
