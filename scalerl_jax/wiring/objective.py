"""The objective from a Config: loss, advantages, weights of tokens, batches."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.batching.assembly import Advantages, Assembler, Pack
from scalerl_jax.batching.packing import abstract_microbatch, pack
from scalerl_jax.config import LOSSES, Config, ObjectiveConfig
from scalerl_jax.learner.step import Objective
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import PackedBatch

T = TypeVar("T")
# Functions by the names that settings of the objective give them, each imported where
# a config asks for it.  Losses: `config.LOSSES`.
_ALGO = "scalerl_jax.algo"
AGGREGATIONS = {
    "constant": f"{_ALGO}.weights:constant_weights",
    "prompt": f"{_ALGO}.advantages:prompt_weights",
    "sample": f"{_ALGO}.weights:sample_weights",
    "token": f"{_ALGO}.weights:token_weights",
}
BASELINES = {
    "group_mean": f"{_ALGO}.advantages:group_advantages",
    "leave_one_out": f"{_ALGO}.scales:leave_one_out",
}
NORMALIZATIONS = {
    "batch": f"{_ALGO}.advantages:normalize_by_batch",
    "none": f"{_ALGO}.scales:unnormalized",
    "prompt": f"{_ALGO}.scales:normalize_by_prompt",
    "reward_std": f"{_ALGO}.scales:normalize_by_reward_std",
    "running": "scalerl_jax.batching.running:RunningNormalization",
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
        token_loss=with_keywords(resolve_name(entry.function), vars(objective)),
        elementwise=not entry.of_sequences,
        max_importance_ratio=objective.max_importance_ratio if plain else jnp.inf,
    )
    regularized = objective.kl_coefficient or objective.entropy_coefficient
    if regularized or recomputed or entry.clips or entry.of_sequences:
        from scalerl_jax.wiring.terms import with_terms  # ScaleRL's loss has none

        made = with_terms(made, objective)
    return made


def make_advantages(config: Config, running: Any = None) -> Advantages:
    """Return a map of rewards to advantages: a baseline, then a scale.

    The scale is `running` if there is one, a `batching.running.RunningNormalization`.
    """
    objective, group_size = config.objective, config.batch.group_size
    baseline = resolve_name(BASELINES[objective.advantage])
    scale = running or resolve_name(NORMALIZATIONS[objective.advantage_normalization])

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
        running = resolve_name(NORMALIZATIONS["running"])(eps=objective.advantage_eps)
    if objective.regularize == "easy":
        from scalerl_jax.algo.regularizers import easy_prompts  # loaded by few runs

        regularization = functools.partial(
            easy_prompts,
            group_size=group_size,
            from_pass_rate=objective.regularize_from_pass_rate,
        )
    if objective.overlong_cache_tokens:
        from scalerl_jax.algo.overlong import add_overlong_penalty  # loaded by few runs

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
            resolve_name(AGGREGATIONS[objective.aggregation]),
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
    if replay := make_replay(config, arch):
        microbatch = replay.of_microbatch(microbatch)
    return packing, microbatch


def make_replay(config: Config, arch: Architecture) -> Any:
    """Return a `batching.replay.Replay` if routing is to be replayed, else None."""
    if config.objective.routing_replay == "off":
        return None
    from scalerl_jax.batching.replay import Replay  # loaded by few runs

    return Replay(arch)
