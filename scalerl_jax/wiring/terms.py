"""Parts of a loss that ScaleRL's does without: anchor, regularisers, own metrics."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo.anchors import anchored, corrected, proximal
from scalerl_jax.algo.losses import TokenLoss, importance_ratio, log_ratio, sequence_sum
from scalerl_jax.algo.regularizers import (
    KlEstimator,
    entropy_bonus,
    kl_k1,
    kl_k2,
    kl_k3,
    regularized,
)
from scalerl_jax.config import LOSSES, ObjectiveConfig
from scalerl_jax.learner.step import Objective
from scalerl_jax.types import Tokens

KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def with_terms(plain: Objective, objective: ObjectiveConfig) -> Objective:
    """Return the loss with its anchor, correction, regularisers and own metrics."""
    loss, entry = plain.token_loss, LOSSES[objective.loss]
    if objective.anchor == "recomputed" and entry.anchor != "recomputed":
        loss = anchored(loss)
    if objective.correction_cap:
        loss = corrected(loss, max_importance_ratio=objective.correction_cap)
    return dataclasses.replace(
        plain,
        token_loss=regularized(loss, _regularizers(objective)),
        measures=_measures(objective, loss),
    )


def _regularizers(objective: ObjectiveConfig) -> Sequence[TokenLoss]:
    """Return the terms that are added to the loss of a token."""
    found: list[TokenLoss] = []
    if objective.kl_coefficient and objective.kl_in == "loss":
        found.append(lambda tokens: objective.kl_coefficient * _kl(objective, tokens))
    if objective.entropy_coefficient:
        found.append(
            lambda tokens: entropy_bonus(
                tokens.entropy, coefficient=objective.entropy_coefficient
            )
        )
    return found


def _kl(objective: ObjectiveConfig, tokens: Tokens) -> Array:
    assert tokens.reference_logprobs is not None, "the batch was not annotated"
    return KL_ESTIMATORS[objective.kl_estimator](
        tokens.logprobs, tokens.reference_logprobs
    )


def _measures(objective: ObjectiveConfig, loss: TokenLoss) -> dict[str, TokenLoss]:
    """Return metrics of this objective alone, each only where it has a meaning."""
    found: dict[str, TokenLoss] = {}
    if LOSSES[objective.loss].clips:
        found["ratio/clipped_share"] = functools.partial(_without_gradient, loss)
    if LOSSES[objective.loss].ratio == "sequence_sum":
        found["ratio/capped_share"] = lambda tokens: (
            sequence_sum(
                log_ratio(tokens.logprobs, tokens.behavior_logprobs),
                tokens.sequence_ids,
                tokens.mask,
            )
            > jnp.log(objective.max_importance_ratio)
        )
    if objective.anchor == "recomputed":
        found |= _measures_of_anchor(objective)
    if objective.kl_coefficient:
        found["kl/mean"] = functools.partial(_kl, objective)
    return found


def _without_gradient(loss: TokenLoss, tokens: Tokens) -> Array:
    """Return True on tokens with an advantage and, by a clip or mask, no gradient."""

    def total(logprobs: Array) -> Array:
        return loss(dataclasses.replace(tokens, logprobs=logprobs)).sum()

    return (jax.grad(total)(tokens.logprobs) == 0) & (tokens.advantages != 0)


def _measures_of_anchor(objective: ObjectiveConfig) -> dict[str, TokenLoss]:
    """Return the anchor's distance to the sampler, and which ratios meet their caps."""
    own = LOSSES[objective.loss]
    decoupled = own.anchor == "recomputed"
    cap = objective.max_importance_ratio if decoupled else objective.correction_cap
    found: dict[str, TokenLoss] = {
        "proximal/mean_abs": lambda tokens: jnp.abs(
            proximal(tokens) - tokens.behavior_logprobs
        )
    }
    if cap:
        found["proximal/capped_share"] = lambda tokens: (
            importance_ratio(proximal(tokens), tokens.behavior_logprobs) > cap
        )
    if "max_importance_ratio" in own.settings and not decoupled:
        found["ratio/capped_share"] = lambda tokens: (
            importance_ratio(tokens.logprobs, proximal(tokens))
            > objective.max_importance_ratio
        )
    return found
