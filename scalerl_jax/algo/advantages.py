"""Advantages: the reward of a rollout relative to its group, and their scale."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def group_advantages(
    rewards: Float[Array, " B"], *, group_size: int
) -> Float[Array, " B"]:
    """Reward minus the mean of its group:  A[n, g] = r[n, g] - mean_g r[n, g].

    ScaleRL, https://arxiv.org/abs/2510.13786, section 2.
    """
    groups = rewards.reshape(-1, group_size)
    return (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)


def normalize_by_batch(
    advantages: Float[Array, " B"], kept: Bool[Array, " B"], *, eps: float
) -> Float[Array, " B"]:
    """A / (std of all A that are kept + eps); zero where not kept.

    The standard deviation is taken after zero-variance groups have left, about the
    mean of what is left, with divisor B.  ScaleRL, section 3.2.
    """
    count = jnp.maximum(kept.sum(), 1)
    mean = jnp.where(kept, advantages, 0.0).sum() / count
    variance = jnp.where(kept, (advantages - mean) ** 2, 0.0).sum() / count
    return jnp.where(kept, advantages / (jnp.sqrt(variance) + eps), 0.0)


def normalize_by_prompt(
    advantages: Float[Array, " B"],
    kept: Bool[Array, " B"],
    *,
    group_size: int,
    eps: float,
) -> Float[Array, " B"]:
    """A / (std of its group + eps), as in GRPO; zero where not kept.

    https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    groups = advantages.reshape(-1, group_size)
    scaled = groups / (groups.std(axis=1, keepdims=True) + eps)
    return jnp.where(kept, scaled.reshape(-1), 0.0)


def unnormalized(
    advantages: Float[Array, " B"], kept: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """A as it is; zero where not kept.  Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return jnp.where(kept, advantages, 0.0)
