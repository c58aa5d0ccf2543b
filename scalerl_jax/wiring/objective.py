"""The objective from a Config: loss, regularisers, advantages, weights, annotation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from scalerl_jax.algo import advantages, regularizers
from scalerl_jax.algo.losses import (
    TokenLoss,
    anchored,
    corrected,
    importance_ratio,
    log_ratio,
    sequence_sum,
)
from scalerl_jax.batching.assembly import (
    Advantages,
    Assembler,
    Pack,
    RunningNormalization,
    ShapeRewards,
    Weigh,
)
from scalerl_jax.config import Config, ObjectiveConfig, losses
from scalerl_jax.learner.forward import Forward, Scorer, make_logprobs
from scalerl_jax.learner.step import Objective, TrainState
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import PackedBatch, Tokens
from scalerl_jax.wiring.tables import (
    AGGREGATIONS,
    BASELINES,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    with_keywords,
)

if TYPE_CHECKING:  # loaded only where a window is annotated
    from scalerl_jax.learner.window_scores import Annotator


def make_objective(config: Config) -> Objective:
    """Return the loss that is set, with its regularisers and metrics."""
    objective, entry = config.objective, losses.LOSSES[config.objective.loss]
    loss = make_token_loss(objective)
    capped = "max_importance_ratio" in entry.settings
    plain = capped and objective.anchor == "behavior" and not entry.of_sequences
    return Objective(
        token_loss=loss,
        elementwise=not entry.of_sequences,
        regularizers=make_regularizers(objective),
        max_importance_ratio=objective.max_importance_ratio if plain else jnp.inf,
        measures=make_measures(objective, loss),
    )


def make_token_loss(objective: ObjectiveConfig) -> TokenLoss:
    """Return the loss around its anchor, and times its correction where one is set."""
    entry = losses.LOSSES[objective.loss]
    loss: TokenLoss = with_keywords(LOSSES[objective.loss], vars(objective))
    if objective.anchor == "recomputed" and entry.anchor != "recomputed":
        loss = anchored(loss)
    if objective.correction_cap:
        loss = corrected(loss, max_importance_ratio=objective.correction_cap)
    return loss


def make_regularizers(objective: ObjectiveConfig) -> Sequence[TokenLoss]:
    """Return the terms that are added to the loss of a token."""
    found: list[TokenLoss] = []
    if objective.kl_coefficient and objective.kl_in == "loss":
        found.append(
            lambda tokens: objective.kl_coefficient * _kl(objective, tokens),
        )
    if objective.entropy_coefficient:
        found.append(
            lambda tokens: regularizers.entropy_bonus(
                tokens.entropy, coefficient=objective.entropy_coefficient
            )
        )
    return found


def _kl(objective: ObjectiveConfig, tokens: Tokens) -> Array:
    assert tokens.reference_logprobs is not None, "the batch was not annotated"
    return KL_ESTIMATORS[objective.kl_estimator](
        tokens.logprobs, tokens.reference_logprobs
    )


def make_measures(objective: ObjectiveConfig, loss: TokenLoss) -> dict[str, TokenLoss]:
    """Return metrics of this objective alone, each only where it has a meaning."""
    found: dict[str, TokenLoss] = {}
    if losses.LOSSES[objective.loss].clips:
        found["ratio/clipped_share"] = functools.partial(_without_gradient, loss)
    if losses.LOSSES[objective.loss].ratio == "sequence_sum":
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
    """True on the tokens with an advantage whose gradient a clip or mask took away."""

    def total(logprobs: Array) -> Array:
        return loss(dataclasses.replace(tokens, logprobs=logprobs)).sum()

    return (jax.grad(total)(tokens.logprobs) == 0) & (tokens.advantages != 0)


def _measures_of_anchor(objective: ObjectiveConfig) -> dict[str, TokenLoss]:
    """Return the anchor's distance to the sampler, and which ratios meet their caps."""
    own = losses.LOSSES[objective.loss]
    decoupled = own.anchor == "recomputed"
    cap = objective.max_importance_ratio if decoupled else objective.correction_cap

    def moved(tokens: Tokens) -> Array:
        return jnp.abs(_proximal(tokens) - tokens.behavior_logprobs)

    def correction_capped(tokens: Tokens) -> Array:
        return importance_ratio(_proximal(tokens), tokens.behavior_logprobs) > cap

    def capped(tokens: Tokens) -> Array:
        ratio = importance_ratio(tokens.logprobs, _proximal(tokens))
        return ratio > objective.max_importance_ratio

    found: dict[str, TokenLoss] = {"proximal/mean_abs": moved}
    if cap:
        found["proximal/capped_share"] = correction_capped
    if "max_importance_ratio" in own.settings and not decoupled:
        found["ratio/capped_share"] = capped
    return found


def _proximal(tokens: Tokens) -> Array:
    assert tokens.proximal_logprobs is not None, "the batch was not annotated"
    return tokens.proximal_logprobs


def make_advantages(config: Config, running: RunningNormalization | None) -> Advantages:
    """Return a map of rewards to advantages: a baseline, then a scale."""
    objective, group_size = config.objective, config.batch.group_size
    baseline = BASELINES[objective.advantage]
    normalization = NORMALIZATIONS[objective.advantage_normalization]

    def advantages(rewards: Array, judged: Array, kept: Array) -> Array:
        centered = baseline(rewards, judged, group_size=group_size)
        if running is not None:
            return running(centered, kept)
        known: dict[str, Any] = {
            "rewards": rewards,
            "judged": judged,
            "group_size": group_size,
            "eps": objective.advantage_eps,
        }
        return with_keywords(normalization, known)(centered, kept)

    return advantages


def make_weigh(config: Config) -> Weigh:
    """Return the weighting of tokens."""
    known = {
        "group_size": config.batch.group_size,
        "max_tokens": config.sampler.max_completion_tokens,
    }
    return with_keywords(AGGREGATIONS[config.objective.aggregation], known)


def make_shape_rewards(config: Config) -> ShapeRewards | None:
    """Return the soft punishment of long completions, where it is set."""
    objective = config.objective
    if not objective.overlong_cache_tokens:
        return None
    most = objective.overlong_max_tokens or config.sampler.max_completion_tokens
    return functools.partial(
        advantages.add_overlong_penalty,
        max_tokens=most,
        cache_tokens=objective.overlong_cache_tokens,
        correct_only=objective.overlong_on == "correct",
    )


def scored_first(objective: ObjectiveConfig) -> bool:
    """Say whether advantages wait for what the window's annotation finds."""
    return objective.advantage == "critic" or objective.kl_in == "reward"


def make_assembler(
    config: Config, pack: Pack, *, replay: Architecture | None = None
) -> Assembler:
    """Return the objective's part that runs on whole batches."""
    objective = config.objective
    running = None
    if objective.advantage_normalization == "running":
        running = RunningNormalization(eps=objective.advantage_eps)
    regularization = None
    if objective.regularize == "easy":
        regularization = functools.partial(
            regularizers.easy_prompts,
            from_pass_rate=objective.regularize_from_pass_rate,
        )
    return Assembler(
        advantages=None
        if scored_first(objective)
        else make_advantages(config, running),
        weigh=make_weigh(config),
        zero_variance_filter=objective.zero_variance_filter,
        mask_cut_off=objective.cut_off_completions == "mask",
        shape_rewards=make_shape_rewards(config),
        regularization=regularization,
        running=running,
        group_size=config.batch.group_size,
        max_completion_tokens=config.sampler.max_completion_tokens,
        pack=pack,
        replay=replay,
    )


def with_annotations(batch: PackedBatch, objective: ObjectiveConfig) -> PackedBatch:
    """Return a microbatch's shapes with the fields that this objective adds."""
    shape, extra = batch.weights, {}
    if objective.anchor == "recomputed":
        extra["proximal_logprobs"] = shape
    if objective.kl_coefficient:
        extra["reference_logprobs"] = shape
    if objective.regularize == "easy":
        extra["regularization"] = shape
    if objective.advantage == "critic":
        extra["values"] = extra["returns"] = shape
    return dataclasses.replace(batch, **extra)


def make_annotator(
    config: Config,
    forward: Forward,
    mesh: Mesh,
    *,
    state: TrainState,
    batch: PackedBatch,
    assemble: Assembler,
) -> "Annotator | None":
    """Return what fills in a window's batches; None where nothing is asked for.

    `state` and `batch`, a microbatch, may be abstract.
    """
    objective = config.objective
    proximal, reference = (
        objective.anchor == "recomputed",
        bool(objective.kl_coefficient),
    )
    if not (proximal or reference or scored_first(objective)):
        return None
    from scalerl_jax.learner.window_scores import Annotator, KlPenalty

    penalty, critic = None, None
    if objective.kl_in == "reward":
        penalty = KlPenalty(
            estimator=KL_ESTIMATORS[objective.kl_estimator],
            coefficient=objective.kl_coefficient,
        )
    if objective.advantage == "critic":
        from scalerl_jax.wiring.critic import make_critic_advantages

        assert state.critic is not None, "the objective has a critic"
        critic = make_critic_advantages(
            config,
            forward,
            critic=state.critic,
            batch=batch,
            mesh=mesh,
            # Of each token, which takes it off its own reward.
            penalties=penalty.of_tokens if penalty else None,
        )
        penalty = None
    return Annotator(
        score=Scorer(
            make_logprobs(forward), params=state.params, batch=batch, mesh=mesh
        ),
        proximal=proximal,
        reference=reference,
        penalty=penalty,
        advantages=make_advantages(config, assemble.running) if penalty else None,
        group_size=config.batch.group_size,
        critic=critic,
    )
