"""The objective of a config in words and formulas, for `main --describe`.

Words, formulas and sources are the docstrings of the functions that a run would use,
so that they cannot say anything else.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from scalerl_jax.algo import regularizers, rewards
from scalerl_jax.algo.advantages import gae
from scalerl_jax.algo.losses import anchored, corrected
from scalerl_jax.algo.values import clipped_value_loss
from scalerl_jax.build.tables import (
    AGGREGATIONS,
    BASELINES,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
)
from scalerl_jax.config import Config, InterruptionConfig, losses
from scalerl_jax.data.streams import PromptStream
from scalerl_jax.model.transformer import head_logits
from scalerl_jax.rollout.annotation import KlPenalty
from scalerl_jax.rollout.running import RunningNormalization


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ingredient:
    """A part of the objective: what computes it and the settings that it reads."""

    name: str
    explained_by: Callable[..., Any]  # its docstring has words, formula and source
    settings: tuple[str, ...]
    on: bool = True


def describe(config: Config) -> str:
    """Return one formula for all, every ingredient that is on, and what is off."""
    parts = list(ingredients(config))
    text = ["The objective", "", *_indented(_whole(config)), ""]
    for part in parts:
        if not part.on:
            continue
        where = f"{part.explained_by.__module__}.{part.explained_by.__qualname__}"
        text += [f"{part.name}  ({where})"]
        text += [f"    {name} = {value_of(config, name)!r}" for name in part.settings]
        text += ["", *_indented(inspect.getdoc(part.explained_by) or ""), ""]
    text += ["Off", ""]
    for part in parts:
        if not part.on:
            switch = part.settings[0]
            text += [f"    {part.name}: {switch} = {value_of(config, switch)!r}"]
    return "\n".join(text) + "\n"


def _indented(text: str) -> list[str]:
    return textwrap.indent(text, "    ").splitlines()


def value_of(config: Config, setting: str) -> Any:
    """Return the value of `section.name`."""
    section, name = setting.split(".")
    return getattr(getattr(config, section), name)


def _whole(config: Config) -> str:
    """Return in one formula what an optimizer step minimises."""
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


def _objective(*names: str) -> tuple[str, ...]:
    return tuple(f"objective.{name}" for name in names)


def ingredients(config: Config) -> Iterator[Ingredient]:
    """Every part that there is, on or off, in the order in which a batch meets them."""
    yield from _of_prompts(config)
    yield from _of_rewards(config)
    yield from _of_advantages(config)
    yield from _of_tokens(config)


def _of_prompts(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    yield Ingredient(
        name="No-positive-resampling",
        explained_by=PromptStream,
        settings=("data.no_positive_resampling", "data.max_history_pass_rate"),
        on=config.data.no_positive_resampling,
    )
    yield Ingredient(
        name="Zero-variance filter",
        explained_by=rewards.has_reward_variance,
        settings=(
            *_objective("zero_variance_filter"),
            "batch.dynamic_sampling",
            "batch.max_refills",
        ),
        on=objective.zero_variance_filter,
    )


def _of_rewards(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    yield Ingredient(
        name="Interruption",
        explained_by=InterruptionConfig,
        settings=(
            "interruption.enabled",
            "interruption.min_tokens",
            "interruption.max_tokens",
            "interruption.phrase",
        ),
        on=config.interruption.enabled,
    )
    yield Ingredient(
        name="Overlong punishment",
        explained_by=rewards.overlong_penalty,
        settings=_objective(
            "overlong_cache_tokens", "overlong_max_tokens", "overlong_on"
        ),
        on=objective.overlong_cache_tokens > 0,
    )
    yield Ingredient(
        name="KL in the reward",
        explained_by=KlPenalty,
        settings=_objective("kl_in", "kl_coefficient", "kl_estimator"),
        on=objective.kl_in == "reward",
    )


def _of_advantages(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    if objective.advantage == "critic":
        yield Ingredient(
            name="Advantages of a critic",
            explained_by=gae,
            settings=(
                *_objective("advantage", "advantage_normalization"),
                "critic.gamma",
                "critic.gae_lambda",
            ),
        )
        yield Ingredient(
            name="The critic's loss",
            explained_by=clipped_value_loss,
            settings=(
                "critic.value_clip",
                "critic.learning_rate",
                "critic.minibatches",
            ),
        )
        return
    yield Ingredient(
        name="Advantages",
        explained_by=BASELINES[objective.advantage],
        settings=_objective("advantage"),
    )
    normalization = objective.advantage_normalization
    yield Ingredient(
        name="Their scale",
        explained_by=RunningNormalization
        if normalization == "running"
        else NORMALIZATIONS[normalization],
        settings=_objective("advantage_normalization", "advantage_eps"),
    )


def _of_tokens(config: Config) -> Iterator[Ingredient]:
    objective = config.objective
    yield Ingredient(
        name="Float32 head",
        explained_by=head_logits,
        settings=("model.float32_head", "model.compute_dtype", "model.sampler_dtype"),
        on=config.model.float32_head,
    )
    yield Ingredient(
        name="Weights",
        explained_by=AGGREGATIONS[objective.aggregation],
        settings=_objective("aggregation", "cut_off_completions"),
    )
    yield Ingredient(
        name="Token loss",
        explained_by=LOSSES[objective.loss],
        settings=_objective(
            "loss", *losses.LOSSES[objective.loss].settings, "allow_sampling_filters"
        ),
    )
    yield Ingredient(
        name="Recomputed anchor",
        explained_by=anchored,
        settings=_objective("anchor"),
        on=objective.anchor == "recomputed",
    )
    yield Ingredient(
        name="Correction for the sampler",
        explained_by=corrected,
        settings=_objective("correction_cap"),
        on=objective.correction_cap > 0,
    )
    estimator = objective.kl_estimator
    yield Ingredient(
        name="KL to the reference",
        explained_by=KL_ESTIMATORS.get(estimator, KL_ESTIMATORS["k3"]),
        settings=_objective("kl_coefficient", "kl_estimator", "reference_every"),
        on=objective.kl_coefficient > 0,
    )
    yield Ingredient(
        name="Entropy bonus",
        explained_by=regularizers.entropy_bonus,
        settings=_objective("entropy_coefficient"),
        on=objective.entropy_coefficient > 0,
    )
    yield Ingredient(
        name="Regularisers on easy prompts alone",
        explained_by=regularizers.easy_prompts,
        settings=_objective("regularize", "regularize_from_pass_rate"),
        on=objective.regularize == "easy",
    )
