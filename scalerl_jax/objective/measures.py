"""Metrics of a token's loss, each only for losses for which it has a meaning."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo.anchors import proximal
from scalerl_jax.algo.losses import TokenLoss, importance_ratio, log_ratio, sequence_sum
from scalerl_jax.config import LOSSES, ObjectiveConfig
from scalerl_jax.types import Tokens

# (loss of a token before regularisers, tokens) -> a value per token.
Measure = Callable[[TokenLoss, Tokens], Array]


def measures_of_loss(objective: ObjectiveConfig) -> dict[str, Measure]:
    """Return measures of the tokens that a clip, mask or cap of the loss bounds."""
    entry, found = LOSSES[objective.loss], {}
    if entry.clips:
        found["ratio/clipped_share"] = _without_gradient
    if entry.ratio == "sequence_sum":
        found["ratio/capped_share"] = lambda _, tokens: (
            sequence_sum(
                log_ratio(tokens.logprobs, tokens.behavior_logprobs),
                tokens.sequence_ids,
                tokens.mask,
            )
            > jnp.log(objective.max_importance_ratio)
        )
    return found


def _without_gradient(loss: TokenLoss, tokens: Tokens) -> Array:
    """Return True on tokens with an advantage but, by a clip or mask, no gradient."""

    def total(logprobs: Array) -> Array:
        return loss(dataclasses.replace(tokens, logprobs=logprobs)).sum()

    return (jax.grad(total)(tokens.logprobs) == 0) & (tokens.advantages != 0)


def measures_of_anchor(objective: ObjectiveConfig) -> dict[str, Measure]:
    """Return measures of the anchor's distance to the sampler, and of its caps."""
    own = LOSSES[objective.loss]
    decoupled = own.anchor == "recomputed"
    cap = objective.max_importance_ratio if decoupled else objective.correction_cap
    found: dict[str, Measure] = {
        "proximal/mean_abs": lambda _, tokens: jnp.abs(
            proximal(tokens) - tokens.behavior_logprobs
        )
    }
    if cap:
        found["proximal/capped_share"] = lambda _, tokens: (
            importance_ratio(proximal(tokens), tokens.behavior_logprobs) > cap
        )
    if "max_importance_ratio" in own.settings and not decoupled:
        found["ratio/capped_share"] = lambda _, tokens: (
            importance_ratio(tokens.logprobs, proximal(tokens))
            > objective.max_importance_ratio
        )
    return found
