"""Losses per token whose importance ratio is that of the whole sequence.

They too neither mask nor average; what the mask hides has no part in a ratio.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.algo.losses import reinforce_loss, surrogate_loss
from scalerl_jax.algo.ratios import bounded_exp, log_ratio
from scalerl_jax.algo.sequences import sequence_mean, sequence_sum
from scalerl_jax.types import Tokens


def gspo_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> Float[Array, "*rows S"]:
    """The clipped surrogate of the length-normalised sequence ratio (GSPO).

        ratio = exp(mean over the sequence of (logprob - behavior_logprob))
        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    at each of its tokens: with sample weights their sum is the paper's objective.
    https://arxiv.org/abs/2507.18071, equations 5 and 7 (clips 3e-4 and 4e-4).  ScaleRL
    writes the ratio without the mean, but its clips, 3e-3 to 5e-3, are of this one.
    """
    ratio = bounded_exp(
        sequence_mean(_log_ratio(tokens), tokens.sequence_ids, tokens.mask)
    )
    return surrogate_loss(
        ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high
    )


def gspo_token_loss(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> Float[Array, "*rows S"]:
    """GSPO whose gradient each token takes for itself, with its own advantage.

        ratio[t] = sg(sequence ratio) * exp(logprob[t] - sg(logprob[t]))

    Of equal value to `gspo_loss`; with one advantage and one weight per sequence, of
    equal gradient too.  https://arxiv.org/abs/2507.18071, equations 13 and 14.
    """
    mean = sequence_mean(_log_ratio(tokens), tokens.sequence_ids, tokens.mask)
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

    The sum, and so unbiased until it is cut, unlike a ratio per token.  Liu et al.
    2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse.
    """
    total = sequence_sum(_log_ratio(tokens), tokens.sequence_ids, tokens.mask)
    truncated = jnp.minimum(bounded_exp(total), max_importance_ratio)
    return jax.lax.stop_gradient(truncated) * reinforce_loss(tokens)


def _log_ratio(tokens: Tokens) -> Float[Array, "*rows S"]:
    return log_ratio(tokens.logprobs, tokens.behavior_logprobs)
