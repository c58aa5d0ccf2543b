"""The objective of a config in words and formulas, for `main --describe`.

Words, formulas and sources are the docstrings of the functions that a run would use,
so that they cannot say anything else.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from scalerl_jax.algo.advantages import has_reward_variance, overlong_penalty
from scalerl_jax.algo.anchors import anchored, corrected
from scalerl_jax.algo.regularizers import easy_prompts, entropy_bonus
from scalerl_jax.algo.values import clipped_value_loss, gae
from scalerl_jax.batching.replay import replayed_experts
from scalerl_jax.config import LOSSES, Config, InterruptionConfig
from scalerl_jax.data.curriculum import CurriculumStream
from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.learner.balance import LoadBalancing
from scalerl_jax.learner.window_scores import KlPenalty
from scalerl_jax.model.transformer import head_logits
from scalerl_jax.wiring.objective import (
    AGGREGATIONS,
    BASELINES,
    NORMALIZATIONS,
    TOKEN_LOSSES,
)
from scalerl_jax.wiring.terms import KL_ESTIMATORS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ingredient:
    """A part of the objective: what computes it and the settings that it reads."""

    name: str
    explained_by: Callable[..., Any]  # its docstring has words, formula and source
    settings: tuple[str, ...]
    on: bool = True


def describe(config: Config) -> str:
    """Return the text: a formula for all, every ingredient that is on, what is off."""
    parts = list(ingredients(config))
    text = ["The objective", "", *_indented(_whole(config)), ""]
    for part in parts:
        if not part.on:
            continue
        where = f"{part.explained_by.__module__}.{part.explained_by.__qualname__}"
        text += [f"{part.name}  ({where})"]
        text += [f"    {name} = {attrgetter(name)(config)!r}" for name in part.settings]
        text += ["", *_indented(inspect.getdoc(part.explained_by) or ""), ""]
    text += ["Off", ""]
    for part in parts:
        if not part.on:
            switch = part.settings[0]
            text += [f"    {part.name}: {switch} = {attrgetter(switch)(config)!r}"]
    return "\n".join(text) + "\n"


def _indented(text: str) -> list[str]:
    return textwrap.indent(text, "    ").splitlines()


def _whole(config: Config) -> str:
    """Return what an optimizer step minimises, in one formula."""
    objective, batch = config.objective, config.batch
    token = "loss[t]"
    factor = "regularization[t] * " if objective.regularize == "easy" else ""
    if objective.kl_coefficient and objective.kl_in == "loss":
        token += f" + {factor}{objective.kl_coefficient} * {objective.kl_estimator}[t]"
    if objective.entropy_coefficient:
        token += f" - {factor}{objective.entropy_coefficient} * entropy[t]"
    lines = [
        "minimise  sum over the tokens t of a batch of  weight[t] * token[t]",
        f"token[t] = {token}",
        f"loss = {objective.loss}, weight = {objective.aggregation}, advantages = "
        f"{objective.advantage} / {objective.advantage_normalization}",
        f"{batch.num_prompts} prompts x {batch.group_size} completions a batch, "
        f"optimizer steps on what is taken together: {config.steps_per_window} "
        f"(batch.epochs = {batch.epochs}, queue.mode = {config.queue.mode!r}, "
        f"queue.max_staleness = {config.queue.max_staleness})",
    ]
    return "\n".join(lines)


def ingredients(config: Config) -> Iterator[Ingredient]:
    """Yield every part that there is, on or off, in the order that a batch meets them.

    The first setting of a part that can be off is its switch.
    """
    yield from _of_rollouts(config)
    if config.objective.advantage == "critic":
        yield from _of_critic()
    else:
        yield from _of_groups(config)
    yield from _of_tokens(config)


def _part(
    name: str, explained_by: Callable[..., Any], settings: str, on: bool = True
) -> Ingredient:
    """Return an ingredient; settings without a section are the objective's."""
    names = (each if "." in each else f"objective.{each}" for each in settings.split())
    return Ingredient(
        name=name, explained_by=explained_by, settings=tuple(names), on=on
    )


def _of_rollouts(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    if config.data.order != "shuffled":
        yield _part(
            "Order of prompts",
            CurriculumStream,
            "data.order data.difficulty data.open_share data.open_steps",
        )
    yield _part(
        "No-positive-resampling",
        PromptStream,
        "data.no_positive_resampling data.max_history_pass_rate",
        config.data.no_positive_resampling,
    )
    yield _part(
        "Zero-variance filter",
        has_reward_variance,
        "zero_variance_filter batch.dynamic_sampling batch.max_refills",
        objective.zero_variance_filter,
    )
    yield _part(
        "Interruption",
        InterruptionConfig,
        "interruption.enabled interruption.min_tokens interruption.max_tokens "
        "interruption.phrase",
        config.interruption.enabled,
    )
    yield _part(
        "Overlong punishment",
        overlong_penalty,
        "overlong_cache_tokens overlong_max_tokens overlong_on",
        objective.overlong_cache_tokens > 0,
    )
    yield _part(
        "KL in the reward",
        KlPenalty,
        "kl_in kl_coefficient kl_estimator",
        objective.kl_in == "reward",
    )


def _of_critic() -> Iterator[Ingredient]:
    yield _part(
        "Advantages of a critic",
        gae,
        "advantage advantage_normalization critic.gamma critic.gae_lambda",
    )
    yield _part(
        "The critic's loss",
        clipped_value_loss,
        "critic.value_clip critic.learning_rate critic.minibatches",
    )


def _of_groups(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    yield _part("Advantages", BASELINES[objective.advantage], "advantage")
    yield _part(
        "Their scale",
        NORMALIZATIONS[objective.advantage_normalization],
        "advantage_normalization advantage_eps",
    )


def _of_tokens(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    yield _part(
        "Float32 head",
        head_logits,
        "model.float32_head model.compute_dtype model.sampler_dtype",
        config.model.float32_head,
    )
    yield _part(
        "Routing replay",
        replayed_experts,
        "routing_replay",
        objective.routing_replay == "on",
    )
    yield _part(
        "Even experts",
        LoadBalancing,
        "expert_balance expert_bias_rate",
        bool(objective.expert_balance or objective.expert_bias_rate),
    )
    yield _part(
        "Weights",
        AGGREGATIONS[objective.aggregation],
        "aggregation cut_off_completions",
    )
    yield _part(
        "Token loss",
        TOKEN_LOSSES[objective.loss],
        " ".join(["loss", *LOSSES[objective.loss].settings, "allow_sampling_filters"]),
    )
    yield _part(
        "Recomputed anchor", anchored, "anchor", objective.anchor == "recomputed"
    )
    yield _part(
        "Correction for the sampler",
        corrected,
        "correction_cap",
        objective.correction_cap > 0,
    )
    yield _part(
        "KL to the reference",
        KL_ESTIMATORS.get(objective.kl_estimator, KL_ESTIMATORS["k3"]),
        "kl_coefficient kl_estimator reference_every",
        objective.kl_coefficient > 0,
    )
    yield _part(
        "Entropy bonus",
        entropy_bonus,
        "entropy_coefficient",
        objective.entropy_coefficient > 0,
    )
    yield _part(
        "Regularisers on easy prompts alone",
        easy_prompts,
        "regularize regularize_from_pass_rate",
        objective.regularize == "easy",
    )
