"""Losses that are PPO's clipped surrogate of a token's importance ratio, or like it.

A token whose ratio is past its bound loses its gradient, unlike under CISPO.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.algo.losses import importance_ratio
from scalerl_jax.types import Tokens


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


def _ratio(tokens: Tokens) -> Float[Array, "..."]:
    return importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
