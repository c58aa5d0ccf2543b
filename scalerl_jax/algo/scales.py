"""Baselines and scales of advantages that other recipes have in place of ScaleRL's."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from scalerl_jax.algo.advantages import by_group, root_mean_square, scaled


def leave_one_out(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Float[Array, " B"]:
    """Reward minus the mean of the OTHERS of its group (RLOO).

        A[n, g] = r[n, g] - (sum_h r[n, h] - r[n, g]) / (G - 1)

    which is G / (G - 1) times the advantage over the group's mean, and unbiased.  Sum
    and G count the `judged` rollouts (None: all); A is 0 for the others, and for the
    only judged one of a group.  Ahmadian et al., https://arxiv.org/abs/2402.14740,
    section 2.
    """
    groups, counted, count = by_group(rewards, judged, group_size)
    total = jnp.where(counted, groups, 0.0).sum(axis=1, keepdims=True)
    others = (total - groups) / jnp.maximum(count - 1.0, 1.0)
    return jnp.where(counted & (count > 1.0), groups - others, 0.0).reshape(-1)


def unnormalized(
    advantages: Float[Array, " B"], kept: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """A unscaled, zero where not kept.  Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return jnp.where(kept, advantages, 0.0)


def normalize_by_reward_std(
    advantages: Float[Array, " B"],
    kept: Bool[Array, " B"],
    *,
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    group_size: int,
    eps: float,
) -> Float[Array, " B"]:
    """A / (std of the REWARDS of the kept groups + eps); zero where not kept.

    A group is kept if any of its rollouts is; all its `judged` rollouts (None: all)
    count, masked ones too, as in its baseline.  This std also holds the differences
    between the groups' means, which `normalize_by_batch`'s spread does not: easy and
    hard prompts in one batch shrink each other's advantages.  Lite PPO,
    https://arxiv.org/abs/2508.08221; TRL's scale_rewards="batch", whose divisor is
    B - 1 and which filters nothing.
    """
    _, counted, _ = by_group(rewards, judged, group_size)
    of_kept = kept.reshape(-1, group_size).any(axis=1, keepdims=True)
    counted = (counted & of_kept).reshape(-1)
    mean = jnp.where(counted, rewards, 0.0).sum() / jnp.maximum(counted.sum(), 1)
    return scaled(advantages, kept, root_mean_square(rewards - mean, counted), eps=eps)


def normalize_by_prompt(
    advantages: Float[Array, " B"],
    kept: Bool[Array, " B"],
    *,
    judged: Bool[Array, " B"] | None = None,
    group_size: int,
    eps: float,
) -> Float[Array, " B"]:
    """A / (std of its group + eps), as in GRPO; zero where not kept.

        std = sqrt(sum over the judged g of A[n, g]^2 / number of judged)

    The `judged` rollouts (None: all) are the ones in the baseline of A, masked ones
    included.  TRL and verl divide by one less, and the paper does not say.
    https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    groups, counted, count = by_group(advantages, judged, group_size)
    squares = jnp.where(counted, groups**2, 0.0).sum(axis=1, keepdims=True)
    deviations = jnp.sqrt(squares / jnp.maximum(count, 1.0))
    deviations = jnp.broadcast_to(deviations, groups.shape).reshape(-1)
    return scaled(advantages, kept, deviations, eps=eps)


@struct.dataclass(kw_only=True)
class RunningStatistics:
    """Sums over all values seen so far, for their spread about 0."""

    count: Float[Array, ""] | float = 0.0
    squares: Float[Array, ""] | float = 0.0  # sum of the squared values


def normalize_by_running(
    advantages: Float[Array, " B"],
    kept: Bool[Array, " B"],
    statistics: RunningStatistics,
    *,
    eps: float,
) -> tuple[Float[Array, " B"], RunningStatistics]:
    """A / (spread of all A kept in this and earlier batches + eps), zero if not kept.

    Return the advantages and the new statistics.  The scale does not follow the luck of
    one batch; the first batch is scaled as by `normalize_by_batch`.  PPO's code scales
    rewards so: https://arxiv.org/abs/2005.12729, section 3.
    """
    statistics = RunningStatistics(
        count=statistics.count + kept.sum(dtype=jnp.float32),
        squares=statistics.squares + jnp.where(kept, advantages**2, 0.0).sum(),
    )
    spread = jnp.sqrt(statistics.squares / jnp.maximum(statistics.count, 1.0))
    return scaled(advantages, kept, spread, eps=eps), statistics
