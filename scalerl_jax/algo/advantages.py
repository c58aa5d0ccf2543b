"""Advantages of rollouts and their scales, the filter of groups, weights of tokens.

Weights are zero outside their mask and sum to 1 over the GLOBAL batch (except
`constant_weights`).  All are computed before the batch is cut, so that the gradient
does not depend on microbatches, packing or devices.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


def group_advantages(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Float[Array, " B"]:
    """Reward minus the mean of its group:  A[n, g] = r[n, g] - mean_g r[n, g].

    The mean is over the `judged` rollouts (None: all); A is 0 for the others, and
    exactly 0 where all are equal.  ScaleRL, https://arxiv.org/abs/2510.13786, section
    2.
    """
    groups, counted, count = by_group(rewards, judged, group_size)
    total = jnp.where(counted, groups, 0.0).sum(axis=1, keepdims=True)
    mean = total / jnp.maximum(count, 1.0)
    compared = counted & _varied(groups, counted)
    return jnp.where(compared, groups - mean, 0.0).reshape(-1)


def turn_advantages(
    rewards: Float[Array, "B J"],
    taken: Bool[Array, "B J"],
    judged: Bool[Array, " B"],
    *,
    group_size: int,
) -> Float[Array, "B J"]:
    """A turn's reward minus the group's mean of the rewards of that turn.

        A[n, g, j] = r[n, g, j] - mean over h with a turn j of r[n, h, j]

    `taken` is True where a rollout has a turn j.  The mean is over the judged ones; A
    is 0 for the others, and where there is no turn.  It is the group advantage of each
    turn separately, and is added to the episode's.
    """
    groups = rewards.reshape(-1, group_size, rewards.shape[1])
    counted = (taken & judged[:, None]).reshape(groups.shape)
    count = counted.sum(axis=1, keepdims=True)
    total = jnp.where(counted, groups, 0.0).sum(axis=1, keepdims=True)
    centered = groups - total / jnp.maximum(count, 1)
    compared = counted & _varied(groups, counted)
    return jnp.where(compared, centered, 0.0).reshape(rewards.shape)


def leave_one_out(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Float[Array, " B"]:
    """Reward minus the mean of the OTHERS of its group (RLOO).

        A[n, g] = r[n, g] - (sum_h r[n, h] - r[n, g]) / (G - 1)

    which is G / (G - 1) times the advantage over the group's mean, and unbiased.  Sum
    and G count the `judged` rollouts (None: all); A is 0 for the others, and exactly 0
    where all are equal, also where a single one is judged.  Ahmadian et al.,
    https://arxiv.org/abs/2402.14740, section 2.
    """
    groups, counted, count = by_group(rewards, judged, group_size)
    total = jnp.where(counted, groups, 0.0).sum(axis=1, keepdims=True)
    others = (total - groups) / jnp.maximum(count - 1.0, 1.0)
    compared = counted & _varied(groups, counted)
    return jnp.where(compared, groups - others, 0.0).reshape(-1)


def has_reward_variance(
    rewards: Float[Array, " B"],
    judged: Bool[Array, " B"] | None = None,
    *,
    group_size: int,
) -> Bool[Array, " B"]:
    """Mark the rollouts of groups whose judged rewards are not all equal.

    `judged` None: all are.  A group with fewer than two judged rollouts has none.
    A zero-variance group has no gradient; ScaleRL drops it before normalisation and
    averaging and does not refill.  https://arxiv.org/abs/2510.13786, section 3.2.
    """
    groups, counted, _ = by_group(rewards, judged, group_size)
    return jnp.repeat(_varied(groups, counted)[:, 0], group_size)


def normalize_by_batch(
    advantages: Float[Array, "..."], kept: Bool[Array, "..."], *, eps: float
) -> Float[Array, "..."]:
    """A / (spread of all kept A + eps); zero where not kept.

        spread = sqrt(sum over the kept b of A[b]^2 / number of kept)

    The spread is about 0, the mean of A over a whole group; over whole groups it is the
    standard deviation with divisor B.  If cut-off completions are masked, the baselines
    still count them, and the mean of the kept A is not 0: a standard deviation about
    that mean would be 0 if all wrong answers were masked.  Zero-variance groups are
    not kept.  ScaleRL, section 3.2.
    """
    return scaled(advantages, kept, root_mean_square(advantages, kept), eps=eps)


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
    count, including masked ones, as in its baseline.  Unlike `normalize_by_batch`'s
    spread, this std includes the differences between the groups' means: easy and hard
    prompts in one batch shrink each other's advantages.  Lite PPO,
    https://arxiv.org/abs/2508.08221; TRL's scale_rewards="batch", whose divisor is
    B - 1 and which has no filter.
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

    The `judged` rollouts (None: all) are those in the baseline of A, including masked
    ones.  TRL and verl divide by one less; the paper does not give the divisor.
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

    Return the advantages and the new statistics.  The scale does not fluctuate with
    single batches; the first batch is scaled as by `normalize_by_batch`.  PPO's code
    scales rewards like this: https://arxiv.org/abs/2005.12729, section 3.
    """
    statistics = RunningStatistics(
        count=statistics.count + kept.sum(dtype=jnp.float32),
        squares=statistics.squares + jnp.where(kept, advantages**2, 0.0).sum(),
    )
    spread = jnp.sqrt(statistics.squares / jnp.maximum(statistics.count, 1.0))
    return scaled(advantages, kept, spread, eps=eps), statistics


def prompt_weights(mask: Bool[Array, "B T"], *, group_size: int) -> Float[Array, "B T"]:
    """Token weights that give every prompt the same total, spread over its tokens.

        w[b, t] = mask[b, t] / (tokens of b's group) / (groups with a token)

    ScaleRL, https://arxiv.org/abs/2510.13786, equation 4 and section 3.2; DAPO as in
    its paper, https://arxiv.org/abs/2503.14476, equation 8.
    """
    counts = mask.astype(jnp.float32)
    groups = counts.reshape(-1, group_size, mask.shape[1])
    tokens = groups.sum(axis=(1, 2), keepdims=True)
    shares = groups / jnp.maximum(tokens, 1.0)
    return (shares / jnp.maximum((tokens > 0).sum(), 1)).reshape(counts.shape)


def sample_weights(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Token weights that give every rollout the same total, spread over its tokens.

        w[b, t] = mask[b, t] / (tokens of b) / (rollouts with a token)

    GRPO, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return prompt_weights(mask, group_size=1)


def token_weights(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Token weights that are all equal:  w[b, t] = mask[b, t] / (tokens of the batch).

    DAPO as it is implemented, https://arxiv.org/abs/2503.14476.
    """
    counts = mask.astype(jnp.float32)
    return counts / jnp.maximum(counts.sum(), 1.0)


def constant_weights(
    mask: Bool[Array, "B T"], *, max_tokens: int
) -> Float[Array, "B T"]:
    """Token weights that are equal within a batch and from batch to batch.

        w[b, t] = mask[b, t] / (B * max_tokens)

    They sum to the mean length over max_tokens, at most 1: a short batch gives a small
    step.  B counts all rollouts, including filtered ones; max_tokens is the limit of a
    completion.  Dr. GRPO, https://arxiv.org/abs/2503.20783, appendix.
    """
    return mask.astype(jnp.float32) / (mask.shape[0] * max_tokens)


def overlong_penalty(
    lengths: Int[Array, " B"], *, max_tokens: int, cache_tokens: int
) -> Float[Array, " B"]:
    """Penalty in [-1, 0] of completions close to the length limit, in tokens.

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


def by_group(
    values: Float[Array, " B"], judged: Bool[Array, " B"] | None, group_size: int
) -> tuple[Float[Array, "N G"], Bool[Array, "N G"], Float[Array, "N 1"]]:
    """Return values by group, their mask of judged ones, and its count per group."""
    groups = values.reshape(-1, group_size)
    counted = jnp.ones(groups.shape, bool) if judged is None else judged
    counted = counted.reshape(groups.shape)
    return groups, counted, counted.sum(axis=1, keepdims=True, dtype=jnp.float32)


def _varied(
    groups: Float[Array, "N G ..."], counted: Bool[Array, "N G ..."]
) -> Bool[Array, "N 1 ..."]:
    """Mark the groups whose counted values are not all equal.

    Six times 0.9 less its float32 mean is -6e-8, which a division by its own standard
    deviation would make 1.
    """
    highest = jnp.where(counted, groups, -jnp.inf).max(axis=1, keepdims=True)
    return highest > jnp.where(counted, groups, jnp.inf).min(axis=1, keepdims=True)


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
    # Equal rewards without eps would give 0 / 0.
    divisor = jnp.where(spread + eps > 0, spread + eps, 1.0)
    return jnp.where(kept, advantages / divisor, 0.0)
