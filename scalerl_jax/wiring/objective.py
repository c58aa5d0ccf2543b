"""The objective from a Config: loss, advantages, weights of tokens, batches."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo import losses
from scalerl_jax.algo.advantages import (
    add_overlong_penalty,
    constant_weights,
    group_advantages,
    leave_one_out,
    normalize_by_batch,
    normalize_by_prompt,
    normalize_by_reward_std,
    prompt_weights,
    sample_weights,
    token_weights,
    unnormalized,
)
from scalerl_jax.algo.anchors import decoupled_loss
from scalerl_jax.algo.regularizers import easy_prompts
from scalerl_jax.batching.assembly import (
    Advantages,
    Assembler,
    Pack,
    RunningNormalization,
)
from scalerl_jax.batching.packing import abstract_microbatch, pack
from scalerl_jax.batching.replay import Replay
from scalerl_jax.batching.stream_packing import (
    StreamShape,
    abstract_streams,
    pack_shared,
)
from scalerl_jax.config import LOSSES, Config, ObjectiveConfig
from scalerl_jax.learner.step import Objective
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import PackedBatch
from scalerl_jax.wiring.terms import with_terms

T = TypeVar("T")
# Functions by the names that settings of the objective give them; what each loss reads
# stands in `config.LOSSES`.
TOKEN_LOSSES: dict[str, Callable[..., Array]] = {
    "cispo": losses.cispo_loss,
    "clipped": losses.clipped_loss,
    "decoupled": decoupled_loss,
    "dppo": losses.dppo_loss,
    "dual_clip": losses.dual_clip_loss,
    "gspo": losses.gspo_loss,
    "gspo_token": losses.gspo_token_loss,
    "reinforce": losses.reinforce_loss,
    "sequence_truncated_is": losses.sequence_truncated_is_loss,
    "truncated_is": losses.truncated_is_loss,
}
AGGREGATIONS: dict[str, Callable[..., Array]] = {
    "constant": constant_weights,
    "prompt": prompt_weights,
    "sample": sample_weights,
    "token": token_weights,
}
BASELINES: dict[str, Callable[..., Array]] = {
    "group_mean": group_advantages,
    "leave_one_out": leave_one_out,
}
# The scale "running" has a state: `make_advantages` is given one.
NORMALIZATIONS: dict[str, Callable[..., Any]] = {
    "batch": normalize_by_batch,
    "none": unnormalized,
    "prompt": normalize_by_prompt,
    "reward_std": normalize_by_reward_std,
    "running": RunningNormalization,
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
    recomputed = objective.anchor == "recomputed"
    capped = "max_importance_ratio" in entry.settings
    plain = capped and not recomputed and not entry.of_sequences
    made = Objective(
        token_loss=with_keywords(TOKEN_LOSSES[objective.loss], vars(objective)),
        elementwise=not entry.of_sequences,
        max_importance_ratio=objective.max_importance_ratio if plain else jnp.inf,
    )
    regularized = objective.kl_coefficient or objective.entropy_coefficient
    if regularized or recomputed or entry.clips or entry.of_sequences:
        made = with_terms(made, objective)
    return made


def make_advantages(
    config: Config, running: RunningNormalization | None = None
) -> Advantages:
    """Return a map of rewards to advantages: a baseline, then a scale.

    The scale is `running` if there is one.
    """
    objective, group_size = config.objective, config.batch.group_size
    baseline = BASELINES[objective.advantage]
    scale = running or NORMALIZATIONS[objective.advantage_normalization]

    def advantages(rewards: Array, judged: Array, kept: Array) -> Array:
        known: dict[str, Any] = {
            "rewards": rewards,
            "judged": judged,
            "group_size": group_size,
            "eps": objective.advantage_eps,
        }
        centered = baseline(rewards, judged, group_size=group_size)
        return with_keywords(scale, known)(centered, kept)

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
            easy_prompts,
            group_size=group_size,
            from_pass_rate=objective.regularize_from_pass_rate,
        )
    if objective.overlong_cache_tokens:
        shape_rewards = functools.partial(
            add_overlong_penalty,
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
        replay=make_replay(config, arch),
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
    if replay := make_replay(config, arch):
        microbatch = replay.of_microbatch(microbatch)
    return packing, microbatch


def make_replay(config: Config, arch: Architecture) -> Replay | None:
    """Return the replay of routing, if the objective asks for it."""
    return Replay(arch) if config.objective.routing_replay == "on" else None
