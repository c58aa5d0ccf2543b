"""Losses with one importance ratio for all tokens of a sequence (GSPO), and their sums.

The ratio is computed over the unmasked tokens.  A sequence lies in one row; its id is
from 1 to the row's length, and id 0 marks tokens of no sequence.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.algo.losses import bounded_exp, log_ratio, reinforce_loss
from scalerl_jax.algo.surrogates import surrogate_loss
from scalerl_jax.types import Tokens


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
