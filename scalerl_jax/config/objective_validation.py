"""What of the objective's settings cannot work together, or would do nothing."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from scalerl_jax.config.objective import (
    CLIPPING_LOSSES,
    LOSS_SETTINGS,
    ObjectiveConfig,
)

if TYPE_CHECKING:
    from scalerl_jax.config import Config

_DEFAULTS = ObjectiveConfig()
_SEQUENCE_CLIP = 0.05  # no clip of a length-normalised ratio comes near it


def validate_objective(config: "Config") -> None:
    """Refuse an objective that contradicts itself, or of which a part is inert.

    Raises:
        ValueError: names the setting, its value, the limit and the way out.
    """
    _validate_read(config.objective)
    _validate_bounds(config.objective)
    _validate_anchor(config)
    _validate_filters(config)
    _validate_kl(config.objective)
    _validate_regularization(config.objective)
    _validate_overlong(config)


def _require_default(
    objective: ObjectiveConfig, names: Iterable[str], *, reason: str
) -> None:
    for name in names:
        value, default = getattr(objective, name), getattr(_DEFAULTS, name)
        if value != default:
            raise ValueError(
                f"objective.{name} = {value!r} is not read {reason}, or leave it at "
                f"{default!r}"
            )


def _validate_read(objective: ObjectiveConfig) -> None:
    """A setting that the chosen loss does not read was meant for another."""
    read = LOSS_SETTINGS[objective.loss]
    for name in sorted({each for names in LOSS_SETTINGS.values() for each in names}):
        readers = sorted(loss for loss, names in LOSS_SETTINGS.items() if name in names)
        if name not in read:
            _require_default(
                objective,
                [name],
                reason=f"with objective.loss = {objective.loss!r}; {readers} read it: "
                f"choose one of them",
            )
        elif name != "min_importance_ratio" and not getattr(objective, name) > 0:
            raise ValueError(
                f"objective.{name} = {getattr(objective, name)} must be above 0 with "
                f"objective.loss = {objective.loss!r}, which reads {list(read)}"
            )


def _validate_bounds(objective: ObjectiveConfig) -> None:
    loss, most = objective.loss, objective.max_importance_ratio
    caps = {"max_importance_ratio": most, "correction_cap": objective.correction_cap}
    for name, cap in caps.items():
        if 0 < cap < 1:
            raise ValueError(
                f"objective.{name} = {cap} is an absolute cap, and would cut ratios of "
                f"1: where a paper gives epsilon, set 1 + epsilon"
            )
    if objective.min_importance_ratio > 1:
        raise ValueError(
            f"objective.min_importance_ratio = {objective.min_importance_ratio} is an "
            f"absolute floor, and would lift ratios of 1; use 1 or less"
        )
    if objective.clip_low > 1:
        raise ValueError(
            f"objective.clip_low = {objective.clip_low} puts the lower bound of the "
            f"ratio, 1 - clip_low, below 0; use 1 or less"
        )
    widest = max(objective.clip_low, objective.clip_high)
    if loss in ("gspo", "gspo_token") and widest >= _SEQUENCE_CLIP:
        raise ValueError(
            f"objective.clip_low = {objective.clip_low}, objective.clip_high = "
            f"{objective.clip_high} are clips of a token's ratio: that of "
            f"objective.loss = {loss!r} is a mean over the sequence, stays within some "
            f"1e-3 of 1 and would never be clipped; use 3e-4 and 4e-4 (GSPO) or 4e-3 "
            f"(ScaleRL), below {_SEQUENCE_CLIP}"
        )
    if loss == "dual_clip" and objective.dual_clip <= 1 + objective.clip_high:
        raise ValueError(
            f"objective.dual_clip = {objective.dual_clip} must be above 1 + "
            f"objective.clip_high = {1 + objective.clip_high}: it bounds the ratio of "
            f"punished tokens, not its distance to 1; 3 in the paper"
        )
    for name in ("mask_low", "mask_high"):
        if getattr(objective, name) >= 1:
            raise ValueError(
                f"objective.{name} = {getattr(objective, name)} is a difference of "
                f"probabilities and from 1 on would drop nothing; prime-rl has 0.2"
            )


def _validate_anchor(config: "Config") -> None:
    objective = config.objective
    loss, cap = objective.loss, objective.correction_cap
    if objective.anchor == "behavior":
        if loss == "decoupled":
            raise ValueError(
                "objective.loss = 'decoupled' clips around recomputed log-probabilities"
                "; set objective.anchor = 'recomputed'"
            )
        if cap:
            raise ValueError(
                f"objective.correction_cap = {cap} with objective.anchor = 'behavior' "
                f"would count the mismatch twice: the ratio over the sampler's "
                f"log-probabilities holds it already; set it to 0, or anchor = "
                f"'recomputed'"
            )
        return
    if cap and loss == "decoupled":
        raise ValueError(
            f"objective.correction_cap = {cap} would count the mismatch twice: "
            f"objective.loss = 'decoupled' is weighted by the same ratio, up to "
            f"objective.max_importance_ratio; set it to 0"
        )
    if loss in ("truncated_is", "sequence_truncated_is"):
        raise ValueError(
            f"objective.loss = {loss!r} corrects for the sampler, and objective.anchor "
            f"= 'recomputed' takes the sampler out of its ratio; set anchor = "
            f"'behavior', or loss = 'reinforce' with objective.correction_cap"
        )
    if loss == "decoupled" or cap:
        return
    if loss == "reinforce":
        raise ValueError(
            "objective.anchor = 'recomputed' is not read with objective.loss = "
            "'reinforce', which has no ratio; set anchor = 'behavior', or a "
            "objective.correction_cap above 0"
        )
    batched = config.queue.mode == "batched"
    steps = config.queue.max_staleness if batched else config.batch.epochs
    if steps <= 1:
        raise ValueError(
            f"objective.anchor = 'recomputed' with one optimizer step per window makes "
            f"objective.loss = {loss!r} inert: its ratio is always 1, and nothing "
            f"corrects for the sampler; set anchor = 'behavior', or "
            f"objective.correction_cap, or take more steps (batch.epochs, or "
            f"queue.mode = 'batched' with queue.max_staleness above 1)"
        )


def _validate_filters(config: "Config") -> None:
    """Refuse a ratio of the whole distribution over a part of it.

    With a filter the sampler's log-probabilities are of the tokens that it keeps and
    the learner's of all.  At equal params their ratio is what those tokens have of the
    probability: below 1, and least where the policy is least certain.
    """
    sampler, objective = config.sampler, config.objective
    filters = [f"sampler.{name} = {getattr(sampler, name)}" for name in sampler.filters]
    if not filters or objective.allow_sampling_filters:
        return
    recomputed = objective.anchor == "recomputed"
    if objective.loss == "decoupled" or objective.correction_cap:
        effect = "the correction for the sampler weakens the tokens it is least sure of"
    elif recomputed or objective.loss == "reinforce":
        return  # no ratio is over the sampler's
    elif objective.loss in CLIPPING_LOSSES:
        effect = "its clip takes the gradient of tokens that have not moved"
    elif objective.loss == "sequence_truncated_is":
        effect = "its product over a completion takes the gradient of long ones"
    else:
        effect = "it weakens the tokens that the policy is least sure of"
    raise ValueError(
        f"{', '.join(filters)} with objective.loss = {objective.loss!r}: its ratio is "
        f"over the log-probabilities of the filtered distribution and hence below 1 at "
        f"equal params, so that {effect}; turn the filter off, set objective.anchor = "
        f"'recomputed' without a correction, or objective.allow_sampling_filters = True"
    )


def _validate_kl(objective: ObjectiveConfig) -> None:
    coefficient, estimator = objective.kl_coefficient, objective.kl_estimator
    if not coefficient:
        _require_default(
            objective,
            ("kl_estimator", "kl_in", "reference_every"),
            reason="with objective.kl_coefficient = 0, for no reference is held; set "
            "the coefficient above 0",
        )
        return
    if estimator == "none":
        raise ValueError(
            f"objective.kl_coefficient = {coefficient} needs "
            f"objective.kl_estimator: k2 or k3 in the loss, k1, k2 or k3 in the reward"
        )
    if objective.kl_in == "loss" and estimator == "k1":
        raise ValueError(
            "objective.kl_estimator = 'k1' with objective.kl_in = 'loss' regularises "
            "nothing: its gradient is 0 in expectation; use 'k2' (the gradient of the "
            "KL) or 'k3' (GRPO's), or kl_in = 'reward'"
        )
    if objective.kl_in == "reward" and objective.cut_off_completions == "mask":
        raise ValueError(
            "objective.cut_off_completions = 'mask' with objective.kl_in = 'reward': "
            "the mean of a group needs the KL of all its completions, and masked ones "
            "have none; use 'keep' or 'wrong', or kl_in = 'loss'"
        )


def _validate_regularization(objective: ObjectiveConfig) -> None:
    if objective.regularize == "all":
        _require_default(
            objective,
            ("regularize_from_pass_rate",),
            reason="with objective.regularize = 'all'; set it to 'easy'",
        )
        return
    if not (objective.kl_coefficient or objective.entropy_coefficient):
        raise ValueError(
            "objective.regularize = 'easy' has nothing to switch off on hard prompts: "
            "objective.kl_coefficient and objective.entropy_coefficient are 0; set one "
            "of them, or 'all'"
        )
    rate = objective.regularize_from_pass_rate
    if not 0 < rate <= 1:
        raise ValueError(
            f"objective.regularize_from_pass_rate = {rate} must be above 0 and at most "
            f"1 with objective.regularize = 'easy'; IsoCompute's easy prompts begin at "
            f"0.3"
        )


def _validate_overlong(config: "Config") -> None:
    objective = config.objective
    cache, most = objective.overlong_cache_tokens, objective.overlong_max_tokens
    if not cache:
        _require_default(
            objective,
            ("overlong_max_tokens", "overlong_on"),
            reason="with objective.overlong_cache_tokens = 0; set that above 0",
        )
        return
    longest = config.sampler.max_completion_tokens
    most = most or longest
    if cache > most:
        raise ValueError(
            f"objective.overlong_cache_tokens = {cache} is more than "
            f"objective.overlong_max_tokens = {most}: every completion would be "
            f"punished; lower the first"
        )
    if most - cache >= longest:
        raise ValueError(
            f"objective.overlong_max_tokens - objective.overlong_cache_tokens = "
            f"{most - cache}, where the punishment begins, must be below "
            f"sampler.max_completion_tokens = {longest}; lower the first"
        )


def objective_numbers() -> list[str]:
    """Names of the objective's numbers, none of which may be negative."""
    values: dict[str, Any] = dataclasses.asdict(_DEFAULTS)
    return [
        f"objective.{name}"
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
