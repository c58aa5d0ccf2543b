"""Losses per token.  A loss here neither masks nor averages: weights do both."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cispo_loss(
    logprobs: Float[Array, "..."],
    behavior_logprobs: Float[Array, "..."],
    advantages: Float[Array, "..."],
    *,
    max_importance_ratio: float,
) -> Float[Array, "..."]:
    """REINFORCE with a truncated, gradient-free importance ratio (CISPO).

        ratio = exp(logprob - behavior_logprob)
        loss = -sg(min(ratio, max_importance_ratio)) * advantage * logprob

    Unlike PPO's clip, a token past the bound keeps its gradient and loses only the
    excess weight.  The ratio is the trainer's over the SAMPLER's, so that it carries
    staleness and numerics in one factor.  MiniMax-M1,
    https://arxiv.org/abs/2506.13585; the form here is ScaleRL's,
    https://arxiv.org/abs/2510.13786, equation 4, with its absolute cap.
    """
    importance_ratio = jnp.exp(logprobs - behavior_logprobs)
    truncated = jnp.minimum(importance_ratio, max_importance_ratio)
    return -jax.lax.stop_gradient(truncated) * advantages * logprobs
