"""ScaleRL's advantages of rollouts, filter of groups, and weights of tokens.

The weights are zero outside their mask and sum to 1 over the GLOBAL batch.  They are
computed before it is cut, so that the gradient does not depend on microbatches, packing
or devices.  Other recipes' advantages and weights: `scales`, `weights`, `overlong`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def group_advantages(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Float[Array, " B"]:
    """Reward minus the mean of its group:  A[n, g] = r[n, g] - mean_g r[n, g].

    The mean is over the `judged` rollouts (None: all); A is 0 for the others.
    ScaleRL, https://arxiv.org/abs/2510.13786, section 2.
    """
    groups, counted, count = by_group(rewards, judged, group_size)
    total = jnp.where(counted, groups, 0.0).sum(axis=1, keepdims=True)
    mean = total / jnp.maximum(count, 1.0)
    return jnp.where(counted, groups - mean, 0.0).reshape(-1)


def normalize_by_batch(
    advantages: Float[Array, "..."], kept: Bool[Array, "..."], *, eps: float
) -> Float[Array, "..."]:
    """A / (spread of all A that are kept + eps); zero where not kept.

        spread = sqrt(sum over the kept b of A[b]^2 / number of kept)

    The spread is taken about 0, the mean of A over a whole group; over whole groups it
    is the standard deviation with divisor B.  Where cut-off completions are masked, the
    baselines still count them, and the mean of the kept A is not 0: a standard
    deviation about that mean would be 0 if all wrong answers were masked.
    Zero-variance groups are not among the kept.  ScaleRL, section 3.2.
    """
    return scaled(advantages, kept, root_mean_square(advantages, kept), eps=eps)


def has_reward_variance(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Bool[Array, " B"]:
    """Return which rollouts belong to groups whose judged rewards are not all equal.

    `judged` None: all are.  A group with fewer than two judged ones has no variance.
    A zero-variance group has no gradient; ScaleRL drops it before normalisation and
    averaging and does not refill.  https://arxiv.org/abs/2510.13786, section 3.2.
    """
    groups = rewards.reshape(-1, group_size)
    counted = True if judged is None else judged.reshape(-1, group_size)
    highest = jnp.where(counted, groups, -jnp.inf).max(axis=1)
    varied = highest > jnp.where(counted, groups, jnp.inf).min(axis=1)
    return jnp.repeat(varied, group_size)


def prompt_weights(mask: Bool[Array, "B T"], *, group_size: int) -> Float[Array, "B T"]:
    """Token weights that give every prompt the same total, spread over its tokens.

        w[b, t] = mask[b, t] / (tokens of b's group) / (groups with a token)

    ScaleRL, https://arxiv.org/abs/2510.13786, equation 4 and section 3.2; DAPO as its
    paper has it, https://arxiv.org/abs/2503.14476, equation 8.
    """
    counts = mask.astype(jnp.float32)
    groups = counts.reshape(-1, group_size, mask.shape[1])
    tokens = groups.sum(axis=(1, 2), keepdims=True)
    shares = groups / jnp.maximum(tokens, 1.0)
    return (shares / jnp.maximum((tokens > 0).sum(), 1)).reshape(counts.shape)


def by_group(
    values: Float[Array, " B"], judged: Bool[Array, " B"] | None, group_size: int
) -> tuple[Float[Array, "N G"], Bool[Array, "N G"], Float[Array, "N 1"]]:
    """Return values by group, which of them are judged, and how many in each group."""
    groups = values.reshape(-1, group_size)
    counted = jnp.ones(groups.shape, bool) if judged is None else judged
    counted = counted.reshape(groups.shape)
    return groups, counted, counted.sum(axis=1, keepdims=True, dtype=jnp.float32)


def root_mean_square(
    values: Float[Array, "..."], counted: Bool[Array, "..."]
) -> Float[Array, ""]:
    """Return the root mean square of the counted values; 0 if there are none."""
    count = counted.sum(dtype=jnp.float32)
    squares = jnp.where(counted, values**2, 0.0).sum()
    return jnp.sqrt(squares / jnp.maximum(count, 1.0))


def scaled(
    advantages: Float[Array, "..."],
    kept: Bool[Array, "..."],
    spread: Float[Array, "..."],
    *,
    eps: float,
) -> Float[Array, "..."]:
    """Return A / (spread + eps), zero where not kept."""
    # Equal rewards without eps would be 0 / 0.
    divisor = jnp.where(spread + eps > 0, spread + eps, 1.0)
    return jnp.where(kept, advantages / divisor, 0.0)
