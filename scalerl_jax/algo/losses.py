"""ScaleRL's loss per token, CISPO, and the importance ratios of all losses.

No loss masks or averages: weights do both.  A loss divides by the sampler's
probabilities (`tokens.behavior_logprobs`), so that its importance ratio holds staleness
and numerics in one factor.  `config.LOSSES` lists all losses, with the function and the
settings of each.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    truncated = jnp.clip(ratio, min_importance_ratio, max_importance_ratio)
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
