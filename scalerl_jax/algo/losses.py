"""Losses per token, and the importance ratios that they share.

ScaleRL's is CISPO.  No loss masks or averages: weights do both.  A loss divides by the
sampler's probabilities (`tokens.behavior_logprobs`), so that its importance ratio has
staleness and numerics in one factor.  Losses with one ratio for all tokens of a
sequence compute it over the unmasked ones.  A sequence is in one row, its id is from 1
to the row's length, and id 0 marks tokens of no sequence.  `objective.terms` maps
names to functions; `config.LOSSES` lists the settings that each reads.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.types import Tokens

TokenLoss = Callable[[Tokens], Float[Array, "..."]]
# Bound above which a ratio is constant and has no gradient: e^20 = 5e8 is no useful
# weight, and e^89 is infinite in float32, so that 0 times it is NaN.  verl's bound.
MAX_LOG_RATIO = 20.0
# Bound of the absolute difference of log-probabilities: no float32 softmax gives a
# log-probability below -MAX_NATS.  Outside there is no gradient.
MAX_NATS = 1e4


def log_ratio(
    logprobs: Float[Array, "..."], anchor_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """clip(logprob - anchor_logprob, -MAX_NATS, MAX_NATS), in nats."""
    return jnp.clip(logprobs - anchor_logprobs, -MAX_NATS, MAX_NATS)


def bounded_exp(log_ratios: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(min(log_ratio, MAX_LOG_RATIO)); value and gradient are finite."""
    return jnp.exp(jnp.minimum(log_ratios, MAX_LOG_RATIO))


def importance_ratio(
    logprobs: Float[Array, "..."], anchor_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """exp(logprob - anchor_logprob): the policy's probability over the anchor's.

    The ratio is constant above e^20; see `MAX_LOG_RATIO`.
    """
    return bounded_exp(log_ratio(logprobs, anchor_logprobs))


def reinforce_loss(tokens: Tokens) -> Float[Array, "..."]:
    """REINFORCE, the policy gradient without a ratio:  loss = -advantage * logprob.

    Williams 1992.  It is biased off policy.
    """
    return -tokens.advantages * tokens.logprobs


def cispo_loss(
    tokens: Tokens, *, max_importance_ratio: float, min_importance_ratio: float = 0.0
) -> Float[Array, "..."]:
    """REINFORCE with a truncated, gradient-free importance ratio (CISPO).

        ratio = exp(logprob - behavior_logprob)
        truncated = clip(ratio, min_importance_ratio, max_importance_ratio)
        loss = -sg(truncated) * advantage * logprob

    Unlike with PPO's clip, a token outside the bounds keeps its gradient and loses only
    the excess weight.  MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5
    (bounds 1 - eps_low, 1 + eps_high); the form here is ScaleRL's,
    https://arxiv.org/abs/2510.13786, equation 4, with its absolute cap and no floor.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    truncated = jnp.clip(ratio, min_importance_ratio, max_importance_ratio)
    return jax.lax.stop_gradient(truncated) * reinforce_loss(tokens)


def truncated_is_loss(
    tokens: Tokens, *, max_importance_ratio: float
) -> Float[Array, "..."]:
    """REINFORCE with truncated importance sampling per token (TIS).

        loss = -sg(min(ratio, max_importance_ratio)) * advantage * logprob

    It equals CISPO without a floor.  Ionides 2008; Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl (cap 2 in verl); PipelineRL,
    https://arxiv.org/abs/2509.19128 (cap 5).
    """
    return cispo_loss(tokens, max_importance_ratio=max_importance_ratio)


def surrogate_loss(
    ratio: Float[Array, "..."],
    advantages: Float[Array, "..."],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Float[Array, "..."]:
    """PPO's clipped surrogate of a differentiable ratio.

        bounded = min(ratio, 1 + clip_high)                 if advantage > 0
                  clip(ratio, 1 - clip_low, dual_clip)      otherwise
        loss = -advantage * bounded

    which is -min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) *
    advantage), and for a negative advantage at most -dual_clip * advantage.  A ratio
    outside its bounds has no gradient; a ratio at a bound has one.
    """
    rewarded = advantages > 0
    lowest = jnp.where(rewarded, 0.0, 1.0 - clip_low)
    highest = jnp.where(rewarded, 1.0 + clip_high, dual_clip)
    constant = jnp.clip(jax.lax.stop_gradient(ratio), lowest, highest)
    inside = (ratio >= lowest) & (ratio <= highest)
    return -advantages * jnp.where(inside, ratio, constant)


def clipped_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> Float[Array, "..."]:
    """The clipped surrogate of PPO, GRPO (clip_low = clip_high) and DAPO (higher).

        ratio = exp(logprob - behavior_logprob)
        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    PPO, https://arxiv.org/abs/1707.06347, equation 7; GRPO,
    https://arxiv.org/abs/2402.03300, equation 3; DAPO, https://arxiv.org/abs/2503.14476,
    equation 8 (clips 0.2 and 0.28).  With a negative advantage only `MAX_LOG_RATIO`
    bounds the ratio from above.
    """
    return surrogate_loss(
        _ratio(tokens), tokens.advantages, clip_low=clip_low, clip_high=clip_high
    )


def dual_clip_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> Float[Array, "..."]:
    """The clipped surrogate, with an upper bound on the ratio of punished tokens, too.

        loss = -max(min(ratio * A, clip(ratio, ...) * A), dual_clip * A)   if A < 0

    dual_clip > 1 + clip_high; 3 in Ye et al., https://arxiv.org/abs/1912.09729.  TRL's
    `delta` is the same bound.
    """
    return surrogate_loss(
        _ratio(tokens),
        tokens.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def dppo_loss(
    tokens: Tokens, *, mask_low: float, mask_high: float
) -> Float[Array, "..."]:
    """The importance-weighted surrogate without the tokens that moved too far (DPPO).

        moved = exp(logprob) - exp(behavior_logprob)
        dropped = moved > mask_high    if advantage > 0
                  moved < -mask_low    otherwise
        loss = -ratio * advantage, or 0 where dropped

    |moved| is the total variation between the two policies, seen as "this token or
    another".  https://arxiv.org/abs/2602.04879 (Binary-TV); prime-rl's default, with
    0.2 and 0.2, which adds 1e-3 * (logprob - behavior_logprob)^2.
    """
    moved = jnp.exp(tokens.logprobs) - jnp.exp(tokens.behavior_logprobs)
    dropped = jnp.where(tokens.advantages > 0, moved > mask_high, moved < -mask_low)
    return jnp.where(dropped, 0.0, -_ratio(tokens) * tokens.advantages)


def _ratio(tokens: Tokens) -> Float[Array, "..."]:
    return importance_ratio(tokens.logprobs, tokens.behavior_logprobs)


def gspo_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> Float[Array, "*rows S"]:
    """The clipped surrogate of the length-normalised sequence ratio (GSPO).

        ratio = exp(mean over the sequence of (logprob - behavior_logprob))
        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    at each token of the sequence: with `sample_weights` the sum over tokens is the
    paper's objective.
    https://arxiv.org/abs/2507.18071, equations 5 and 7 (clips 3e-4 and 4e-4).  ScaleRL
    writes the ratio without the mean, but its clips, 3e-3 to 5e-3, fit only the mean.
    """
    ratio = bounded_exp(_over_sequence(sequence_mean, tokens))
    return surrogate_loss(
        ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high
    )


def gspo_token_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> Float[Array, "*rows S"]:
    """GSPO with a gradient and an advantage per token (GSPO-token).

        ratio[t] = sg(sequence ratio) * exp(logprob[t] - sg(logprob[t]))

    Its value equals `gspo_loss`'s, and its gradient too if a sequence has one advantage
    and one weight.  https://arxiv.org/abs/2507.18071, equations 13 and 14.
    """
    mean = _over_sequence(sequence_mean, tokens)
    own = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)
    return surrogate_loss(
        jax.lax.stop_gradient(bounded_exp(mean)) * jnp.exp(own),
        tokens.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def sequence_truncated_is_loss(
    tokens: Tokens, *, max_importance_ratio: float
) -> Float[Array, "*rows S"]:
    """REINFORCE with truncated importance sampling per sequence.

        ratio = exp(sum over the sequence of (logprob - behavior_logprob))
        loss = -sg(min(ratio, max_importance_ratio)) * advantage * logprob

    With the sum the ratio is unbiased unless truncated, in contrast to a token's ratio.
    Liu et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse.
    """
    ratio = bounded_exp(_over_sequence(sequence_sum, tokens))
    truncated = jnp.minimum(ratio, max_importance_ratio)
    return jax.lax.stop_gradient(truncated) * reinforce_loss(tokens)


def _over_sequence(
    reduce: Callable[..., Array], tokens: Tokens
) -> Float[Array, "*rows S"]:
    ratios = log_ratio(tokens.logprobs, tokens.behavior_logprobs)
    return reduce(ratios, tokens.sequence_ids, tokens.mask)


def sequence_sum(
    values: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """Return at every token the sum of its sequence's values where the mask is True.

    sum[s] = sum over u with sequence_ids[u] = sequence_ids[s] of mask[u] * values[u]
    """

    def of_row(values: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(values, ids, num_segments=ids.size + 1)[ids]

    masked = jnp.where(mask & (sequence_ids > 0), values, 0.0)
    return jnp.vectorize(of_row, signature="(s),(s)->(s)")(masked, sequence_ids)


def sequence_mean(
    values: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """Return at every token the mean of its sequence's values where the mask is True.

    The mean is 0 in a sequence without a True in the mask.
    """
    ones = jnp.ones_like(values)
    count = jnp.maximum(sequence_sum(ones, sequence_ids, mask), 1.0)
    return sequence_sum(values, sequence_ids, mask) / count
