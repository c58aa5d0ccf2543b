"""The terms of the objective: the function of each, and its needs.

`terms_of` makes all terms from a config, on or off.  The rest is derived from them: the
loss, a batch's scores, the models that the learner keeps beside the policy, the passes
that the ledger counts, and the text of `main --describe`.

Here names of settings become functions.  The facts about a loss that the config's
checks need are in `config.LOSSES`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.algo import losses
from scalerl_jax.algo.advantages import (
    constant_weights,
    group_advantages,
    has_reward_variance,
    leave_one_out,
    normalize_by_batch,
    normalize_by_prompt,
    normalize_by_reward_std,
    overlong_penalty,
    prompt_weights,
    sample_weights,
    token_weights,
    unnormalized,
)
from scalerl_jax.algo.anchors import anchored, corrected, decoupled_loss
from scalerl_jax.algo.losses import TokenLoss
from scalerl_jax.algo.regularizers import (
    KlEstimator,
    easy_prompts,
    entropy_bonus,
    kl_k1,
    kl_k2,
    kl_k3,
    regularized,
)
from scalerl_jax.algo.values import clipped_value_loss, gae
from scalerl_jax.batching.assembly import OfVerdicts, RunningNormalization
from scalerl_jax.batching.replay import replayed_experts
from scalerl_jax.config import LOSSES, Config, InterruptionConfig
from scalerl_jax.data.curriculum import CurriculumStream
from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.model.transformer import head_logits
from scalerl_jax.objective.advantages import KlPenalty, TaughtAdvantages
from scalerl_jax.objective.balance import LoadBalancing
from scalerl_jax.objective.loss import Objective
from scalerl_jax.objective.measures import (
    Measure,
    measures_of_anchor,
    measures_of_loss,
)
from scalerl_jax.objective.scores import OF_PARAMS, OF_POLICY, SCORES
from scalerl_jax.types import PackedBatch, Tokens

T = TypeVar("T")
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
# The scale "running" has a state, an argument of `assembly.make_advantages`.
NORMALIZATIONS: dict[str, Callable[..., Any]] = {
    "batch": normalize_by_batch,
    "none": unnormalized,
    "prompt": normalize_by_prompt,
    "reward_std": normalize_by_reward_std,
    "running": RunningNormalization,
}
KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A part of the objective."""

    name: str
    function: Callable[..., Any]  # its docstring has words, formula and source
    settings: tuple[str, ...]  # settings that it reads, first the one that enables it
    on: bool = True
    # Effect on a token's loss: `changes` replaces the loss, `added` is added to it,
    # scaled by the token's regulariser factor.
    changes: Callable[[TokenLoss], TokenLoss] | None = None
    added: TokenLoss | None = None
    formula: str = ""  # of `added`, with its sign: "+ 0.01 * k3[t]"
    measures: Mapping[str, Measure] = dataclasses.field(default_factory=dict)
    # Needs: scores (names of `SCORES`), and a model that the learner must have beside
    # the policy, or the router.
    scores: tuple[str, ...] = ()
    # Score name -> function that computes it from the verdicts of a token's group.
    of_verdicts: Mapping[str, OfVerdicts] = dataclasses.field(default_factory=dict)
    beside: Literal["", "reference", "critic", "router"] = ""


@dataclasses.dataclass(frozen=True)
class Needs:
    """The needs of all active terms together."""

    scores: tuple[str, ...]  # names of `SCORES`, in its order
    reference: bool  # params of the reference policy in the train state
    critic: bool  # a critic with its own optimizer
    router: bool  # a mixture, whose router's choices are read

    @property
    def passes(self) -> int:
        """Forward passes of the policy's size over a window before its first step."""
        return sum(name in OF_POLICY for name in self.scores)

    @property
    def of_params(self) -> tuple[str, ...]:
        """Scores that the learner adds to a window before its first step."""
        return tuple(name for name in self.scores if name in OF_PARAMS)


def needs_of(config: Config) -> Needs:
    """Return the needs of the active terms."""
    parts = [term for term in terms_of(config) if term.on]
    scores = {name for term in parts for name in term.scores}
    beside = {term.beside for term in parts}
    return Needs(
        scores=tuple(name for name in SCORES if name in scores),
        reference="reference" in beside,
        critic="critic" in beside,
        router="router" in beside,
    )


def with_scores(batch: PackedBatch, needs: Needs) -> PackedBatch:
    """Return a microbatch's shapes with those of the needed scores added."""
    return dataclasses.replace(batch, scores=dict.fromkeys(needs.scores, batch.weights))


def make_objective(config: Config) -> Objective:
    """Return the config's loss, with its regularisers and metrics."""
    objective, entry = config.objective, LOSSES[config.objective.loss]
    recomputed = objective.anchor == "recomputed"
    capped = "max_importance_ratio" in entry.settings
    plain = capped and not recomputed and not entry.of_sequences
    parts = [term for term in terms_of(config) if term.on]
    loss = with_keywords(TOKEN_LOSSES[objective.loss], vars(objective))
    for term in parts:
        if term.changes is not None:
            loss = term.changes(loss)
    added = [term.added for term in parts if term.added is not None]
    return Objective(
        token_loss=regularized(loss, added) if added else loss,
        elementwise=not entry.of_sequences,
        max_importance_ratio=objective.max_importance_ratio if plain else jnp.inf,
        measures={
            name: functools.partial(measure, loss)
            for term in parts
            for name, measure in term.measures.items()
        },
    )


def with_keywords(
    function: Callable[..., T], values: Mapping[str, Any]
) -> Callable[..., T]:
    """Bind those of `values` that are names of keyword-only parameters."""
    asked = inspect.signature(function).parameters.values()
    names = [each.name for each in asked if each.kind is each.KEYWORD_ONLY]
    found = {name: values[name] for name in names if name in values}
    return functools.partial(function, **found)


# ---- every term, in the order of a batch's computation


def terms_of(config: Config) -> Iterator[Term]:
    """Yield every term, on or off."""
    yield from _of_rollouts(config)
    if config.objective.advantage == "critic":
        yield from _of_critic()
    else:
        yield from _of_groups(config)
    yield _term(
        "Teacher",
        TaughtAdvantages,
        "teacher.checkpoint teacher.endpoint teacher.coefficient teacher.alone",
        config.teacher.on,
        scores=("teacher",),
        measures={
            "teacher/kl": lambda _, tokens: tokens.logprobs - tokens.scores["teacher"]
        },
    )
    yield from _of_model(config)
    yield from _of_tokens(config)


def _term(
    name: str,
    function: Callable[..., Any],
    settings: str,
    on: bool = True,
    **more: Any,
) -> Term:
    """Return a term; settings without a section are in `objective`."""
    names = (each if "." in each else f"objective.{each}" for each in settings.split())
    return Term(name=name, function=function, settings=tuple(names), on=on, **more)


def _of_rollouts(config: Config) -> Iterator[Term]:
    objective = config.objective
    if config.data.order != "shuffled":
        yield _term(
            "Order of prompts",
            CurriculumStream,
            "data.order data.difficulty data.open_share data.open_steps",
        )
    yield _term(
        "No-positive-resampling",
        PromptStream,
        "data.no_positive_resampling data.max_history_pass_rate",
        config.data.no_positive_resampling,
    )
    yield _term(
        "Zero-variance filter",
        has_reward_variance,
        "zero_variance_filter batch.dynamic_sampling batch.max_refills",
        objective.zero_variance_filter,
    )
    yield _term(
        "Interruption",
        InterruptionConfig,
        "interruption.enabled interruption.min_tokens interruption.max_tokens "
        "interruption.phrase",
        config.interruption.enabled,
    )
    yield _term(
        "Overlong punishment",
        overlong_penalty,
        "overlong_cache_tokens overlong_max_tokens overlong_on",
        objective.overlong_cache_tokens > 0 and not config.teacher.alone,
    )
    yield _term(
        "KL in the reward",
        KlPenalty,
        "kl_in kl_coefficient kl_estimator",
        objective.kl_in == "reward",
        scores=("reference",),
        beside="reference",
    )


def _of_critic() -> Iterator[Term]:
    yield _term(
        "Advantages of a critic",
        gae,
        "advantage advantage_normalization critic.gamma critic.gae_lambda",
        scores=("values", "returns"),
        beside="critic",
    )
    yield _term(
        "The critic's loss",
        clipped_value_loss,
        "critic.value_clip critic.learning_rate critic.minibatches",
        scores=("values", "returns"),
        beside="critic",
    )


def _of_groups(config: Config) -> Iterator[Term]:
    objective, on = config.objective, not config.teacher.alone
    yield _term("Advantages", BASELINES[objective.advantage], "advantage", on)
    yield _term(
        "Their scale",
        NORMALIZATIONS[objective.advantage_normalization],
        "advantage_normalization advantage_eps",
        on,
    )


def _of_model(config: Config) -> Iterator[Term]:
    objective = config.objective
    yield _term(
        "Float32 head",
        head_logits,
        "model.float32_head model.head_weights_dtype model.compute_dtype "
        "model.sampler_dtype",
        config.model.float32_head,
    )
    yield _term(
        "Routing replay",
        replayed_experts,
        "routing_replay",
        objective.routing_replay == "on",
        beside="router",
    )
    yield _term(
        "Even experts",
        LoadBalancing,
        "expert_balance expert_bias_rate",
        bool(objective.expert_balance or objective.expert_bias_rate),
        beside="router",
    )


def _of_tokens(config: Config) -> Iterator[Term]:
    objective = config.objective
    entry = LOSSES[objective.loss]
    yield _term(
        "Weights",
        AGGREGATIONS[objective.aggregation],
        "aggregation cut_off_completions",
    )
    yield _term(
        "Token loss",
        TOKEN_LOSSES[objective.loss],
        " ".join(["loss", *entry.settings, "allow_sampling_filters"]),
        measures=measures_of_loss(objective),
    )
    yield _term(
        "Recomputed anchor",
        anchored,
        "anchor",
        objective.anchor == "recomputed",
        changes=None if entry.anchor == "recomputed" else anchored,
        measures=measures_of_anchor(objective),
        scores=("proximal",),
    )
    cap = objective.correction_cap
    yield _term(
        "Correction for the sampler",
        corrected,
        "correction_cap",
        cap > 0,
        changes=functools.partial(corrected, max_importance_ratio=cap),
    )
    yield from _of_regularizers(config)


def _of_regularizers(config: Config) -> Iterator[Term]:
    objective = config.objective
    estimator = KL_ESTIMATORS.get(objective.kl_estimator, KL_ESTIMATORS["k3"])
    kl, entropy = objective.kl_coefficient, objective.entropy_coefficient
    in_loss = kl > 0 and objective.kl_in == "loss"

    def divergence(tokens: Tokens) -> Array:
        assert "reference" in tokens.scores, "the batch was not annotated"
        return estimator(tokens.logprobs, tokens.scores["reference"])

    yield _term(
        "KL to the reference",
        estimator,
        "kl_coefficient kl_estimator reference_every",
        kl > 0,
        added=(lambda tokens: kl * divergence(tokens)) if in_loss else None,
        formula=f"+ {kl} * {objective.kl_estimator}[t]" if in_loss else "",
        measures={"kl/mean": lambda _, tokens: divergence(tokens)},
        scores=("reference",),
        beside="reference",
    )
    yield _term(
        "Entropy bonus",
        entropy_bonus,
        "entropy_coefficient",
        entropy > 0,
        added=lambda tokens: entropy_bonus(tokens.entropy, coefficient=entropy),
        formula=f"- {entropy} * entropy[t]",
    )
    yield _term(
        "Regularisers only on easy prompts",
        easy_prompts,
        "regularize regularize_from_pass_rate",
        objective.regularize == "easy",
        scores=("regularization",),
        of_verdicts={
            "regularization": functools.partial(
                easy_prompts,
                group_size=config.batch.group_size,
                from_pass_rate=objective.regularize_from_pass_rate,
            )
        },
    )
