"""Objectives that contradict themselves, or of which a part would do nothing."""

import inspect
import typing

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.config import LOSSES
from scalerl_jax.objective.terms import (
    AGGREGATIONS,
    BASELINES,
    KL_ESTIMATORS,
    NORMALIZATIONS,
    TOKEN_LOSSES,
)

CLIPPED = {"loss": "clipped", "clip_low": 0.2, "clip_high": 0.28}
GSPO = {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
RECOMPUTED = CLIPPED | {"anchor": "recomputed"}
KL = {"kl_coefficient": 0.01, "kl_estimator": "k3"}
DECOUPLED = RECOMPUTED | {"loss": "decoupled"}
REFUSED = {
    "a clip for a loss without one": (
        {"clip_high": 0.2},
        r"clip_high = 0\.2 is not read with objective\.loss = 'cispo'; \['clipped'",
    ),
    "a cap for a loss without one": (
        CLIPPED | {"max_importance_ratio": 4.0},
        r"max_importance_ratio = 4\.0 is not read .* leave it at 5\.0",
    ),
    "a loss without its clip": (
        {"loss": "clipped", "clip_low": 0.2},
        r"clip_high = 0\.0 must be above 0 with objective\.loss = 'clipped'",
    ),
    "a negative clip": (
        CLIPPED | {"clip_low": -0.1},
        r"objective\.clip_low = -0\.1 must be 0 or more",
    ),
    "a clip below 0": (CLIPPED | {"clip_low": 1.5}, r"clip_low = 1\.5 .* 1 or less"),
    "an epsilon for a cap": (
        {"max_importance_ratio": 0.2},
        r"max_importance_ratio = 0\.2 is an absolute cap.* set 1 \+ epsilon",
    ),
    "a floor above 1": (
        {"min_importance_ratio": 1.5},
        r"min_importance_ratio = 1\.5 is an absolute floor",
    ),
    "token clips for GSPO": (
        GSPO | {"clip_high": 0.2},
        r"clip_high = 0\.2 are clips of a token's ratio.* use 3e-4 and 4e-4",
    ),
    "a dual clip inside the clip": (
        CLIPPED | {"loss": "dual_clip", "dual_clip": 1.0},
        r"dual_clip = 1\.0 must be above 1 \+ objective\.clip_high = 1\.28",
    ),
    "a DPPO mask that drops nothing": (
        {"loss": "dppo", "mask_low": 0.2, "mask_high": 1.0},
        r"mask_high = 1\.0 is a difference of probabilities",
    ),
    "TIS over the sampler's own ratio": (
        {"correction_cap": 2.0},
        r"correction_cap = 2\.0 with .*'behavior' would count the mismatch twice",
    ),
    "TIS over the decoupled loss": (
        DECOUPLED | {"correction_cap": 2.0},
        r"correction_cap = 2\.0 would count the mismatch twice",
    ),
    "TIS without the sampler": (
        {"loss": "truncated_is", "anchor": "recomputed"},
        r"loss = 'truncated_is' corrects for the sampler",
    ),
    "the decoupled loss without its anchor": (
        DECOUPLED | {"anchor": "behavior"},
        r"set objective\.anchor = 'recomputed'",
    ),
    "an anchor without a ratio": (
        {"loss": "reinforce", "anchor": "recomputed"},
        r"anchor = 'recomputed' is not read with objective\.loss = 'reinforce'",
    ),
    "a ratio that is always 1": (
        RECOMPUTED,
        r"makes objective\.loss = 'clipped' inert: its ratio is always 1",
    ),
    "an estimator without a coefficient": (
        {"kl_estimator": "k3"},
        r"kl_estimator = 'k3' is not read with objective\.kl_coefficient = 0",
    ),
    "a KL in the reward without a reference": (
        {"kl_in": "reward"},
        r"kl_in = 'reward' is not read .* set objective.kl_coefficient above 0",
    ),
    "a refresh of no reference": (
        {"reference_every": 10},
        r"reference_every = 10 is not read",
    ),
    "a coefficient without an estimator": (
        {"kl_coefficient": 0.01},
        r"kl_coefficient = 0\.01 needs objective\.kl_estimator",
    ),
    "k1 in the loss": (
        KL | {"kl_estimator": "k1"},
        r"'k1' .* regularises nothing: its gradient is 0",
    ),
    "masked completions in the KL of a group": (
        KL | {"kl_in": "reward", "cut_off_completions": "mask"},
        r"'mask' with objective\.kl_in = 'reward'",
    ),
    "nothing to switch off": (
        {"regularize": "easy", "regularize_from_pass_rate": 0.3},
        r"regularize = 'easy' has nothing to switch off",
    ),
    "a threshold that nothing reads": (
        KL | {"regularize_from_pass_rate": 0.3},
        r"regularize_from_pass_rate = 0\.3 is not read",
    ),
    "a threshold that all prompts pass": (
        KL | {"regularize": "easy"},
        r"regularize_from_pass_rate = 0\.0 must be above 0",
    ),
    "a punishment of no tokens": (
        {"overlong_on": "correct"},
        r"overlong_on = 'correct' is not read .*overlong_cache_tokens = 0",
    ),
    "a punishment of all lengths": (
        {"overlong_cache_tokens": 20_000},
        r"overlong_cache_tokens = 20000 is more than .* = 14336",
    ),
    "a punishment past the longest": (
        {"overlong_cache_tokens": 100, "overlong_max_tokens": 20_000},
        r"= 19900, where the punishment begins, must be below",
    ),
    "an unknown loss": ({"loss": "ppo"}, r"choose from \['cispo', 'clipped', 'deco"),
    "an unknown estimator": ({"kl_estimator": "k4"}, r"\['k1', 'k2', 'k3', 'none'\]"),
}


def resolved(objective, more=None):
    config = config_lib.defaults()
    config.model.architecture = "tiny"
    config.update_from_flattened_dict(
        {f"objective.{name}": value for name, value in objective.items()} | (more or {})
    )
    return config_lib.resolve(config).objective


@pytest.mark.parametrize("objective, message", REFUSED.values(), ids=REFUSED)
def test_an_objective_is_refused_with_the_reason(objective, message):
    with pytest.raises(ValueError, match=message):
        resolved(objective)


@pytest.mark.parametrize(
    "objective, more",
    [
        pytest.param(RECOMPUTED, {"batch.epochs": 2}, id="two epochs"),
        pytest.param(RECOMPUTED, {"queue.mode": "batched"}, id="eight batches"),
        pytest.param(RECOMPUTED | {"correction_cap": 2.0}, {}, id="corrected"),
        pytest.param(DECOUPLED, {}, id="decoupled, one update"),
        pytest.param(
            {"loss": "reinforce", "anchor": "recomputed", "correction_cap": 2.0},
            {},
            id="REINFORCE with TIS",
        ),
        pytest.param(KL | {"kl_in": "reward", "kl_estimator": "k1"}, {}, id="k1"),
        pytest.param(GSPO | {"clip_low": 3e-3, "clip_high": 5e-3}, {}, id="GSPO"),
    ],
)
def test_what_makes_sense_is_accepted(objective, more):
    found = resolved(objective, more)
    assert all(getattr(found, name) == value for name, value in objective.items())


TIS = {"loss": "reinforce", "anchor": "recomputed", "correction_cap": 2.0}
OVER_THE_SAMPLER = {
    "CISPO": ({}, "weakens the tokens that the policy is least sure of"),
    "TIS": ({"loss": "truncated_is"}, "weakens the tokens"),
    "clipped": (CLIPPED, "clip takes the gradient of tokens that have not moved"),
    "GSPO": (GSPO, "takes the gradient of tokens that have not moved"),
    "DPPO": ({"loss": "dppo", "mask_low": 0.2, "mask_high": 0.2}, "its clip takes"),
    "sequence TIS": ({"loss": "sequence_truncated_is"}, "its product over a comple"),
    "decoupled": (DECOUPLED, "the correction for the sampler weakens"),
    "corrected": (TIS, "the correction for the sampler weakens"),
}
FILTERS = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}]


@pytest.mark.parametrize("on", FILTERS, ids=str)
@pytest.mark.parametrize(
    "objective, effect", OVER_THE_SAMPLER.values(), ids=OVER_THE_SAMPLER
)
def test_a_filter_under_a_ratio_over_the_sampler_is_refused(objective, effect, on):
    ((name, value),) = on.items()
    more = {f"sampler.{name}": value}
    with pytest.raises(ValueError) as refusal:
        resolved(objective, more)
    message = str(refusal.value)
    assert message.startswith(f"sampler.{name} = {value} with objective.loss = ")
    assert effect in message and "objective.allow_sampling_filters" in message
    assert resolved(objective | {"allow_sampling_filters": True}, more)


@pytest.mark.parametrize(
    "objective, more",
    [
        pytest.param({}, {"sampler.temperature": 0.6}, id="a temperature"),
        pytest.param({"loss": "reinforce"}, {"sampler.top_k": 5}, id="no ratio"),
        pytest.param(
            RECOMPUTED, {"sampler.top_p": 0.7, "batch.epochs": 2}, id="recomputed"
        ),
    ],
)
def test_a_filter_beside_no_ratio_over_the_sampler_is_accepted(objective, more):
    assert resolved(objective, more)


def test_every_loss_has_its_function():
    assert list(TOKEN_LOSSES) == list(LOSSES)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_settings_of_a_loss_are_the_keywords_of_its_function(loss):
    function = TOKEN_LOSSES[loss]
    assert function.__name__ == f"{loss}_loss"  # as docs/settings.md calls it
    parameters = inspect.signature(function).parameters.values()
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert set(LOSSES[loss].settings) == keywords


@pytest.mark.parametrize(
    "setting, table",
    [
        ("aggregation", AGGREGATIONS),
        ("advantage_normalization", NORMALIZATIONS),
        ("advantage", {*BASELINES, "critic"}),
        ("kl_estimator", {*KL_ESTIMATORS, "none"}),
    ],
)
def test_every_name_has_its_function(setting, table):
    names = typing.get_args(config_lib.SETTINGS[f"objective.{setting}"].kind)
    assert set(names) == set(table)
