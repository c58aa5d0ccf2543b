"""Which rollouts of a batch a gradient is taken of."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def has_reward_variance(
    rewards: Float[Array, " B"], *, group_size: int
) -> Bool[Array, " B"]:
    """True for the rollouts of groups whose rewards are not all equal.

    A zero-variance group has no gradient; ScaleRL drops it before normalisation and
    averaging and does not refill.  https://arxiv.org/abs/2510.13786, section 3.2.
    """
    groups = rewards.reshape(-1, group_size)
    varied = groups.max(axis=1) > groups.min(axis=1)
    return jnp.repeat(varied, group_size)
