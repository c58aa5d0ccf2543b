"""The objective from a Config: loss, regularisers, advantages, weights, batches."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo import advantages, losses
from scalerl_jax.algo.losses import TokenLoss, importance_ratio
from scalerl_jax.batching.assembly import (
    Advantages,
    Assembler,
    Pack,
    RunningNormalization,
)
from scalerl_jax.batching.packing import abstract_microbatch, pack
from scalerl_jax.config import LOSSES, Config, ObjectiveConfig
from scalerl_jax.learner.step import Objective
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import PackedBatch, Tokens

T = TypeVar("T")
# Functions by the names that settings of the objective give them.
LOSS_FUNCTIONS: dict[str, Callable[..., Array]] = {
    name: getattr(losses, f"{name}_loss") for name in LOSSES
}
AGGREGATIONS: dict[str, Callable[..., Array]] = {
    "constant": advantages.constant_weights,
    "prompt": advantages.prompt_weights,
    "sample": advantages.sample_weights,
    "token": advantages.token_weights,
}
BASELINES: dict[str, Callable[..., Array]] = {
    "group_mean": advantages.group_advantages,
    "leave_one_out": advantages.leave_one_out,
}
NORMALIZATIONS: dict[str, Callable[..., Any]] = {
    "batch": advantages.normalize_by_batch,
    "none": advantages.unnormalized,
    "prompt": advantages.normalize_by_prompt,
    "reward_std": advantages.normalize_by_reward_std,
    "running": RunningNormalization,
}
KL_ESTIMATORS: dict[str, losses.KlEstimator] = {
    "k1": losses.kl_k1,
    "k2": losses.kl_k2,
    "k3": losses.kl_k3,
}


def with_keywords(
    function: Callable[..., T], values: Mapping[str, Any]
) -> Callable[..., T]:
    """Return the function with the values bound for which it has keywords."""
    asked = inspect.signature(function).parameters.values()
    names = [each.name for each in asked if each.kind is each.KEYWORD_ONLY]
    found = {name: values[name] for name in names if name in values}
    return functools.partial(function, **found)


def make_objective(config: Config) -> Objective:
    """Return the loss that is set, with its regularisers and metrics."""
    objective, entry = config.objective, LOSSES[config.objective.loss]
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
    entry = LOSSES[objective.loss]
    loss: TokenLoss = with_keywords(LOSS_FUNCTIONS[objective.loss], vars(objective))
    if objective.anchor == "recomputed" and entry.anchor != "recomputed":
        loss = losses.anchored(loss)
    if objective.correction_cap:
        loss = losses.corrected(loss, max_importance_ratio=objective.correction_cap)
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
            lambda tokens: losses.entropy_bonus(
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
    if LOSSES[objective.loss].clips:
        found["ratio/clipped_share"] = functools.partial(_without_gradient, loss)
    if LOSSES[objective.loss].ratio == "sequence_sum":
        found["ratio/capped_share"] = lambda tokens: (
            losses.sequence_sum(
                losses.log_ratio(tokens.logprobs, tokens.behavior_logprobs),
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
            _proximal(tokens) - tokens.behavior_logprobs
        )
    }
    if cap:
        found["proximal/capped_share"] = lambda tokens: (
            importance_ratio(_proximal(tokens), tokens.behavior_logprobs) > cap
        )
    if "max_importance_ratio" in own.settings and not decoupled:
        found["ratio/capped_share"] = lambda tokens: (
            importance_ratio(tokens.logprobs, _proximal(tokens))
            > objective.max_importance_ratio
        )
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


def scored_first(objective: ObjectiveConfig) -> bool:
    """Return whether advantages depend on scores of the window's annotation."""
    return objective.advantage == "critic" or objective.kl_in == "reward"


def make_assembler(config: Config, arch: Architecture) -> Assembler:
    """Return the assembler, which makes batches of groups for this objective."""
    objective, sampler = config.objective, config.sampler
    group_size = config.batch.group_size
    running = regularization = shape_rewards = None
    if objective.advantage_normalization == "running":
        running = RunningNormalization(eps=objective.advantage_eps)
    if objective.regularize == "easy":
        regularization = functools.partial(
            losses.easy_prompts,
            from_pass_rate=objective.regularize_from_pass_rate,
        )
    if objective.overlong_cache_tokens:
        shape_rewards = functools.partial(
            advantages.add_overlong_penalty,
            max_tokens=objective.overlong_max_tokens or sampler.max_completion_tokens,
            cache_tokens=objective.overlong_cache_tokens,
            correct_only=objective.overlong_on == "correct",
        )
    return Assembler(
        advantages=None
        if scored_first(objective)
        else make_advantages(config, running),
        weigh=with_keywords(
            AGGREGATIONS[objective.aggregation],
            {"group_size": group_size, "max_tokens": sampler.max_completion_tokens},
        ),
        zero_variance_filter=objective.zero_variance_filter,
        mask_cut_off=objective.cut_off_completions == "mask",
        shape_rewards=shape_rewards,
        regularization=regularization,
        running=running,
        group_size=group_size,
        max_completion_tokens=sampler.max_completion_tokens,
        pack=make_pack(config, arch)[0],
        replay=arch if objective.routing_replay == "on" else None,
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


def make_pack(config: Config, arch: Architecture) -> tuple[Pack, PackedBatch]:
    """Return the packing of rollouts, and the shapes of a microbatch of theirs."""
    batch = config.batch
    if not batch.shared_tokens:
        rows = dict(
            row_tokens=batch.row_tokens, rows_per_microbatch=batch.rows_per_microbatch
        )
        packing = functools.partial(pack, **rows, packing=batch.packing)
        microbatch = abstract_microbatch(**rows)
    else:
        from scalerl_jax.batching.stream_packing import (  # few runs share prompts
            StreamShape,
            abstract_streams,
            pack_shared,
        )

        streams = config.mesh.data * config.mesh.fsdp
        shape = StreamShape(
            rows=batch.rows_per_microbatch // streams,
            row_tokens=batch.row_tokens,
            shared_tokens=batch.shared_tokens,
            own_tokens=batch.own_tokens,
            group_size=batch.group_size,
        )
        packing = functools.partial(pack_shared, shape=shape, streams=streams)
        microbatch = abstract_streams(shape, streams=streams)
    if config.objective.routing_replay == "on":
        assert arch.experts is not None, "`make_architecture` has looked"
        taken = (*microbatch.tokens.shape, arch.num_layers, arch.experts.top_k)
        experts = jax.ShapeDtypeStruct(taken, arch.experts.id_dtype)
        microbatch = dataclasses.replace(microbatch, experts=experts)
    return packing, microbatch
