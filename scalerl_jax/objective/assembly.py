"""Build the assembler of batches from a Config: advantages, weights, packing.

What it computes of a batch is compiled: one program each, where each operation by
itself would be one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from scalerl_jax.algo.advantages import add_overlong_penalty
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
from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.objective.advantages import (
    CriticAdvantages,
    GroupAdvantages,
    KlPenalty,
    TaughtAdvantages,
)
from scalerl_jax.objective.terms import (
    AGGREGATIONS,
    BASELINES,
    KL_ESTIMATORS,
    NORMALIZATIONS,
    terms_of,
    with_keywords,
)
from scalerl_jax.types import PackedBatch


def make_advantages(
    config: Config, running: RunningNormalization | None = None
) -> Advantages:
    """Return the function from a batch's rewards and scores to its advantages.

    `running`, if given, scales the groups' advantages.
    """
    teacher = config.teacher
    of_rewards = None if teacher.alone else _of_rewards(config, running)
    if not teacher.on:
        assert of_rewards is not None, "teacher.alone needs a teacher"
        return of_rewards
    return TaughtAdvantages(of_rewards=of_rewards, coefficient=teacher.coefficient)


def _of_rewards(config: Config, running: RunningNormalization | None) -> Advantages:
    objective, penalty = config.objective, make_penalty(config)
    if objective.advantage != "critic":
        return GroupAdvantages(of_rewards=_of_groups(config, running), penalty=penalty)
    by_batch = objective.advantage_normalization == "batch"
    return CriticAdvantages(
        gamma=config.critic.gamma,
        gae_lambda=config.critic.gae_lambda,
        eps=objective.advantage_eps if by_batch else None,
        penalty=penalty,
    )


def _of_groups(
    config: Config, running: RunningNormalization | None
) -> Callable[[Array, Array, Array], Array]:
    """Return a function from rewards [B] to advantages [B]: baseline, then scale."""
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

    return advantages if running else jax.jit(advantages)


def make_penalty(config: Config) -> KlPenalty | None:
    """Return the KL penalty of the reward, or None."""
    objective = config.objective
    if objective.kl_in != "reward":
        return None
    return KlPenalty(
        estimator=KL_ESTIMATORS[objective.kl_estimator],
        coefficient=objective.kl_coefficient,
    )


def make_assembler(config: Config, arch: Architecture) -> Assembler:
    """Return the assembler of batches from groups for this objective."""
    objective, sampler = config.objective, config.sampler
    group_size = config.batch.group_size
    running = shape_rewards = None
    if objective.advantage_normalization == "running":
        running = RunningNormalization(eps=objective.advantage_eps)
    if objective.overlong_cache_tokens:
        shape_rewards = jax.jit(
            functools.partial(
                add_overlong_penalty,
                max_tokens=objective.overlong_max_tokens
                or sampler.max_completion_tokens,
                cache_tokens=objective.overlong_cache_tokens,
                correct_only=objective.overlong_on == "correct",
            )
        )
    return Assembler(
        advantages=make_advantages(config, running),
        weigh=jax.jit(
            with_keywords(
                AGGREGATIONS[objective.aggregation],
                {"group_size": group_size, "max_tokens": sampler.max_completion_tokens},
            )
        ),
        zero_variance_filter=objective.zero_variance_filter,
        mask_cut_off=objective.cut_off_completions == "mask",
        shape_rewards=shape_rewards,
        scores={
            name: score
            for term in terms_of(config)
            if term.on
            for name, score in term.of_verdicts.items()
        },
        running=running,
        group_size=group_size,
        max_completion_tokens=sampler.max_completion_tokens,
        pack=make_pack(config, arch)[0],
        replay=make_replay(config, arch),
        per_turn=config.reward.per_turn,
    )


def make_pack(config: Config, arch: Architecture) -> tuple[Pack, PackedBatch]:
    """Return the function that packs rollouts, and its microbatches' shapes."""
    batch = config.batch
    if not batch.shared_tokens:
        rows = dict(
            row_tokens=batch.row_tokens, rows_per_microbatch=batch.rows_per_microbatch
        )
        packing = functools.partial(
            pack,
            **rows,
            row_segments=batch.packed_segments,
            short_rows=config.short_rows,
        )
        microbatch = abstract_microbatch(**rows)
    else:
        streams = config.mesh.data * config.mesh.fsdp
        shape = StreamShape(
            rows=batch.rows_per_microbatch // streams,
            row_tokens=batch.row_tokens,
            row_segments=batch.row_segments,
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
    """Return the routing replay, or None without objective.routing_replay."""
    return Replay(arch) if config.objective.routing_replay == "on" else None
