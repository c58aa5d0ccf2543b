"""Which rollouts of a batch a gradient is taken of."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
