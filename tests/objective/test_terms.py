"""Objectives that make sense, filters that do not go with one, and the tables of parts.

What is refused is in `hostile.tsv`, with the text of each refusal.
"""

import dataclasses
import inspect
import typing

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.config import LOSSES
from scalerl_jax.learner.window_scores import PARAMS
from scalerl_jax.objective.scores import SCORES
from scalerl_jax.objective.terms import (
    AGGREGATIONS,
    BASELINES,
    KL_ESTIMATORS,
    NORMALIZATIONS,
    TOKEN_LOSSES,
    terms_of,
)

CLIPPED = {"loss": "clipped", "clip_low": 0.2, "clip_high": 0.28}
GSPO = {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
RECOMPUTED = CLIPPED | {"anchor": "recomputed"}
KL = {"kl_coefficient": 0.01, "kl_estimator": "k3"}
DECOUPLED = RECOMPUTED | {"loss": "decoupled"}


def resolved(objective, more=None):
    config = config_lib.defaults()
    config.model.architecture = "tiny"
    config.update_from_flattened_dict(
        {f"objective.{name}": value for name, value in objective.items()} | (more or {})
    )
    return config_lib.resolve(config).objective


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
OVER_THE_SAMPLER = [
    {"loss": "cispo"},
    {"loss": "truncated_is"},
    {"loss": "sequence_truncated_is"},
    {"loss": "dppo", "mask_low": 0.2, "mask_high": 0.2},
    *(CLIPPED, GSPO, DECOUPLED, TIS),
]
FILTERS = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}]


@pytest.mark.parametrize("on", FILTERS, ids=str)
@pytest.mark.parametrize("objective", OVER_THE_SAMPLER, ids=lambda each: each["loss"])
def test_a_filter_under_a_ratio_over_the_sampler_is_refused(objective, on):
    ((name, value),) = on.items()
    more, loss = {f"sampler.{name}": value}, objective["loss"]
    setting = f"^sampler.{name} = {value} with objective.loss = '{loss}'"
    with pytest.raises(ValueError, match=setting):
        resolved(objective, more)
    assert resolved(objective | {"allow_sampling_filters": True}, more)


TAUGHT = {"teacher.checkpoint": "theirs"}
IN_REWARD = KL | {"kl_in": "reward", "allow_sampling_filters": True}


@pytest.mark.parametrize("on", FILTERS, ids=str)
@pytest.mark.parametrize(
    "objective, more, words",
    [
        ({}, TAUGHT, "teacher.checkpoint = 'theirs'"),
        (
            {"loss": "reinforce"},
            {"teacher.endpoint": "http://a/v1"},
            "teacher.endpoint = 'http://a/v1'",
        ),
        ({"allow_sampling_filters": True}, TAUGHT, "teacher.checkpoint = 'theirs'"),
        (IN_REWARD, {}, "objective.kl_in = 'reward'"),
        (
            RECOMPUTED | IN_REWARD,
            {"batch.epochs": 2},
            "objective.kl_in = 'reward'",
        ),
    ],
)
def test_a_filter_under_a_kl_of_the_advantages_is_refused(objective, more, words, on):
    """Whatever the loss: the sampler's log-probabilities are in the advantages."""
    ((name, value),) = on.items()
    filtered = more | {f"sampler.{name}": value}
    with pytest.raises(ValueError, match=f"^sampler.{name} = {value} with {words}"):
        resolved(objective, filtered)
    assert resolved(objective, more)
    if more.keys() <= {"batch.epochs"}:
        assert resolved(objective | {"kl_in": "loss"}, filtered)


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


def test_every_score_has_its_maker_and_a_term():
    models = ("policy", "reference", "critic")
    assert PARAMS.keys() == {name for name in SCORES if SCORES[name] in models}
    terms = [
        term
        for advantage in ("group_mean", "critic")
        for term in terms_of(_of_advantage(advantage))
    ]
    # A teacher's params are not of the state.
    assert {name for name in SCORES if SCORES[name] == "teacher"} == {"teacher"}
    of_verdicts = {name for term in terms for name in term.of_verdicts}
    assert of_verdicts == {name for name in SCORES if SCORES[name] == "groups"}
    assert {name for term in terms for name in term.scores} == SCORES.keys()


def _of_advantage(advantage):
    objective = config_lib.ObjectiveConfig(advantage=advantage)
    return dataclasses.replace(config_lib.Config(), objective=objective)


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
