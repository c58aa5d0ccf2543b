"""Losses whose ratio is over the policy at the window's start, not over the sampler.

This anchor's log-probabilities are computed by the learner: the score "proximal".
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.algo.losses import TokenLoss, clipped_loss, importance_ratio
from scalerl_jax.types import Tokens


def anchored(loss: TokenLoss) -> TokenLoss:
    """Return the loss with the policy at the window's start as its anchor.

    The ratio, exp(logprob - proximal_logprob), then has no part from staleness or
    numerics: it is 1 on the first optimizer step of a window.
    """

    def of_tokens(tokens: Tokens) -> Float[Array, "..."]:
        return loss(dataclasses.replace(tokens, behavior_logprobs=proximal(tokens)))

    return of_tokens


def corrected(loss: TokenLoss, *, max_importance_ratio: float) -> TokenLoss:
    """Return the loss times the truncated ratio of window policy to sampler (TIS).

        weight = sg(min(exp(proximal_logprob - behavior_logprob), max_importance_ratio))

    The weight corrects an anchored loss for the staleness and numerics that its ratio
    leaves out; in any other loss they would count twice.  Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl.
    """

    def of_tokens(tokens: Tokens) -> Float[Array, "..."]:
        ratio = importance_ratio(proximal(tokens), tokens.behavior_logprobs)
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
    https://arxiv.org/abs/2505.24298.  AReaL's code can drop the tokens above
    the cap (its action "mask"); here they are capped ("clamp").
    """
    clipped = functools.partial(clipped_loss, clip_low=clip_low, clip_high=clip_high)
    loss = corrected(anchored(clipped), max_importance_ratio=max_importance_ratio)
    return loss(tokens)


def proximal(tokens: Tokens) -> Float[Array, "..."]:
    """Return the log-probabilities under the params at the window's start."""
    assert "proximal" in tokens.scores, "the batch was not annotated"
    return tokens.scores["proximal"]
