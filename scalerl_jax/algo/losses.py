"""Losses per token, and regularisers.  None masks or averages: weights do both.

A loss divides by the sampler's probabilities (`tokens.behavior_logprobs`), so that its
importance ratio holds staleness and numerics in one factor; `anchored` uses the
learner's own log-probabilities at the start of the window instead.  A sequence loss
(GSPO) has one ratio for all tokens of a sequence, computed over the unmasked ones.  A
sequence lies in one row; its id is from 1 to the row's length, and id 0 marks tokens of
no sequence.  `config.LOSSES` lists the settings that each loss reads.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.types import Tokens

TokenLoss = Callable[[Tokens], Float[Array, "..."]]
# Bound past which a ratio is constant and has no gradient: e^20 = 5e8 is no useful
# weight, and e^89 is infinite in float32, so that 0 times it is NaN.  verl's bound.
MAX_LOG_RATIO = 20.0
# Bound of a log-probability difference: no float32 softmax gives a log-probability
# below its negative; past it there is no gradient.
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
    """exp(logprob - anchor_logprob): probability of the policy over the anchor's.

    The ratio is constant past e^20; see `MAX_LOG_RATIO`.
    """
    return bounded_exp(log_ratio(logprobs, anchor_logprobs))


def _ratio(tokens: Tokens) -> Float[Array, "..."]:
    return importance_ratio(tokens.logprobs, tokens.behavior_logprobs)


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

    Unlike PPO's clip, a token past the bound keeps its gradient and loses only the
    excess weight.  MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5
    (bounds 1 - eps_low, 1 + eps_high); the form here is ScaleRL's,
    https://arxiv.org/abs/2510.13786, equation 4, with its absolute cap and no floor.
    """
    truncated = jnp.clip(_ratio(tokens), min_importance_ratio, max_importance_ratio)
    return jax.lax.stop_gradient(truncated) * reinforce_loss(tokens)


def truncated_is_loss(
    tokens: Tokens, *, max_importance_ratio: float
) -> Float[Array, "..."]:
    """REINFORCE with truncated importance sampling per token (TIS).

        loss = -sg(min(ratio, max_importance_ratio)) * advantage * logprob

    It is CISPO without a floor, found by another way.  Ionides 2008; Yao et al. 2025,
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
    past its bound has no gradient; a ratio at the bound has one.
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
    """The clipped surrogate, with the ratio of a punished token bounded above too.

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


def gspo_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> Float[Array, "*rows S"]:
    """The clipped surrogate of the length-normalised sequence ratio (GSPO).

        ratio = exp(mean over the sequence of (logprob - behavior_logprob))
        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    at each token of the sequence: with `sample_weights` the sum over tokens is the
    paper's objective.
    https://arxiv.org/abs/2507.18071, equations 5 and 7 (clips 3e-4 and 4e-4).  ScaleRL
    writes the ratio without the mean, but its clips, 3e-3 to 5e-3, are of this one.
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

    With the sum the ratio is unbiased until it is truncated, unlike a ratio per token.
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


def anchored(loss: TokenLoss) -> TokenLoss:
    """Return the loss with log-probabilities of the window's start as its anchor.

    The ratio, exp(logprob - proximal_logprob), then holds no staleness and no numerics:
    it is 1 on the first optimizer step of a window.
    """

    def of_tokens(tokens: Tokens) -> Float[Array, "..."]:
        anchor = _proximal(tokens)
        return loss(dataclasses.replace(tokens, behavior_logprobs=anchor))

    return of_tokens


def corrected(loss: TokenLoss, *, max_importance_ratio: float) -> TokenLoss:
    """Return the loss times the truncated ratio of window policy to sampler (TIS).

        weight = sg(min(exp(proximal_logprob - behavior_logprob), max_importance_ratio))

    The weight of an anchored loss puts back the staleness and numerics that the anchor
    leaves out; on any other loss they would count twice.  Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl.
    """

    def of_tokens(tokens: Tokens) -> Float[Array, "..."]:
        ratio = importance_ratio(_proximal(tokens), tokens.behavior_logprobs)
        weight = jnp.minimum(ratio, max_importance_ratio)
        return jax.lax.stop_gradient(weight) * loss(tokens)

    return of_tokens


def decoupled_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float, max_importance_ratio: float
) -> Float[Array, "..."]:
    """PPO clipped around the window-start policy, weighted by its ratio to the sampler.

        ratio = exp(logprob - proximal_logprob)
        weight = sg(min(exp(proximal_logprob - behavior_logprob), max_importance_ratio))
        loss = -weight * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    Hilton et al., https://arxiv.org/abs/2110.00641; AReaL,
    https://arxiv.org/abs/2505.24298.  AReaL's code may drop the tokens past
    the cap (its action "mask"); here they are capped ("clamp").
    """

    clipped = functools.partial(clipped_loss, clip_low=clip_low, clip_high=clip_high)
    loss = corrected(anchored(clipped), max_importance_ratio=max_importance_ratio)
    return loss(tokens)


def _proximal(tokens: Tokens) -> Float[Array, "..."]:
    assert tokens.proximal_logprobs is not None, "nobody recomputed the batch"
    return tokens.proximal_logprobs


def sequence_sum(
    values: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """Give every token the sum of its sequence's values where the mask is True.

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
    """Give every token the mean of its sequence's values where the mask is True.

    The mean is 0 in a sequence where the mask is nowhere True.
    """
    ones = jnp.ones_like(values)
    count = jnp.maximum(sequence_sum(ones, sequence_ids, mask), 1.0)
    return sequence_sum(values, sequence_ids, mask) / count


# Regularisers: terms beside a token's loss, a KL to a reference policy and an entropy
# bonus.  A KL estimator is a function of d = logprob - reference_logprob of the sampled
# token alone.  Its expected value and its expected gradient are two different things.
# For tokens sampled from the policy, and KL = KL(policy || reference):
#
#     estimator             expected value     expected gradient, used in the loss
#     k1 = d                KL                 0: it regularises nothing
#     k2 = d^2 / 2          KL + O(d^3)        that of KL
#     k3 = exp(-d) + d - 1  KL                 that of KL(reference || policy)
#
# In the reward, where no gradient flows through the estimator, k1 gives the policy
# gradient of the KL.  Schulman 2020, http://joschu.net/blog/kl-approx.html; Tang and
# Munos, https://arxiv.org/abs/2506.09477.  Off policy the expectations are over the
# behavior policy's tokens: no estimator is weighted by a ratio.

# logprobs, reference_logprobs -> nats of each token
KlEstimator = Callable[[Array, Array], Float[Array, "..."]]


def kl_k1(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """d = logprob - reference_logprob, in nats.

    Use it in the reward only: in the loss its expected gradient is E[grad logprob] = 0.
    """
    return log_ratio(logprobs, reference_logprobs)


def kl_k2(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """d^2 / 2.  Its gradient, d * grad logprob, has the KL's gradient as its mean."""
    return 0.5 * log_ratio(logprobs, reference_logprobs) ** 2


def kl_k3(
    logprobs: Float[Array, "..."], reference_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """exp(-d) + d - 1: unbiased, never negative, of small variance.

    Its expected gradient is that of KL(reference || policy).  exp(-d) is constant where
    the reference is more than e^MAX_LOG_RATIO times as probable as the policy.  GRPO,
    https://arxiv.org/abs/2402.03300, equation 4.
    """
    difference = log_ratio(logprobs, reference_logprobs)
    difference = jnp.maximum(difference, -MAX_LOG_RATIO)
    return jnp.expm1(-difference) + difference


def entropy_bonus(
    entropy: Float[Array, "..."], *, coefficient: float
) -> Float[Array, "..."]:
    """Return the loss term of the exact entropy:  -coefficient * entropy.

    A3C, https://arxiv.org/abs/1602.01783, section 4.
    """
    return -coefficient * entropy


def easy_prompts(
    pass_rates: Float[Array, "..."], *, from_pass_rate: float
) -> Float[Array, "..."]:
    """Factor of the regularisers: 1 where pass rate >= from_pass_rate, else 0.

    IsoCompute, https://arxiv.org/abs/2603.12151: KL and entropy bonus steady training
    on easy problems, and hold back exploration on hard ones.
    """
    return (pass_rates >= from_pass_rate).astype(jnp.float32)
