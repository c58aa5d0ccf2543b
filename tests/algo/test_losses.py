"""Losses by hand, their gradients in closed form, and what none may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokens import (
    CAP,
    LOSSES,
    TRUST_REGION_LOSSES,
    at_ratio,
    floats,
    make_tokens,
    slope,
    values_and_slopes,
)

from scalerl_jax.algo import losses

LOGPROBS = (-0.1, -1.0, -2.0, -4.0)
every_loss = pytest.mark.parametrize("name", LOSSES)
OF_SEQUENCES = {"gspo", "gspo_token", "sequence_truncated_is"}


@pytest.mark.parametrize(
    "logprob, ratio, advantage, expected",
    [
        pytest.param(-1.0, 1.0, 1.0, 1.0, id="on policy, ratio 1"),
        pytest.param(-1.0, 1.0, -1.5, -1.5, id="on policy, wrong answer"),
        pytest.param(-1.0, 2.0, 1.0, 2.0, id="ratio 2"),
        pytest.param(-3.0, 0.5, 1.0, 1.5, id="ratio 1/2"),
        pytest.param(-3.0, 0.5, -2.0, -3.0, id="ratio 1/2, wrong answer"),
        pytest.param(-1.0, 4.0, 1.0, 4.0, id="ratio 4, at the cap"),
        pytest.param(-1.0, 8.0, 1.0, 4.0, id="ratio 8 capped to 4"),
        pytest.param(-1.0, 8.0, -0.5, -2.0, id="capped, wrong answer"),
        pytest.param(-1.0, 0.1, 1.0, 0.25, id="ratio 0.1 raised to the floor"),
        pytest.param(-1.0, 0.1, -2.0, -0.5, id="at the floor, wrong answer"),
    ],
)
def test_cispo_by_hand(logprob, ratio, advantage, expected):
    tokens = at_ratio(logprob, ratio, advantage)
    bounds = {"max_importance_ratio": 4.0, "min_importance_ratio": 0.25}
    np.testing.assert_allclose(losses.cispo_loss(tokens, **bounds), expected, rtol=1e-6)
    if ratio >= 0.25:
        found = losses.truncated_is_loss(tokens, max_importance_ratio=4.0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0, 7.0, 100.0])
@pytest.mark.parametrize("logprob", LOGPROBS)
def test_a_token_past_cispos_cap_keeps_its_gradient(logprob, ratio, advantage):
    found = slope(LOSSES["cispo"], at_ratio(logprob, ratio, advantage))
    np.testing.assert_allclose(found, -min(ratio, CAP) * advantage, rtol=2e-6)


def test_reinforce_by_hand():
    tokens = at_ratio(-3.0, 7.0, -2.0)
    assert losses.reinforce_loss(tokens) == -6.0
    assert slope(losses.reinforce_loss, tokens) == 2.0


NATS, ADVANTAGES = floats((2, 7), -30, 0), floats((2, 7), -4, 4)
IDS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", TRUST_REGION_LOSSES)
@settings(deadline=None, max_examples=20)
@given(logprobs=NATS, advantages=floats((2, 3), -4, 4))
def test_at_ratio_1_the_gradient_is_that_of_reinforce(name, logprobs, advantages):
    # One advantage per sequence, as GSPO has it.
    advantages = np.take_along_axis(advantages, IDS, axis=1)
    tokens = make_tokens(logprobs, advantages=advantages, sequence_ids=IDS)
    expected = np.where(IDS > 0, -advantages, 0.0)
    found = np.where(IDS > 0, slope(TRUST_REGION_LOSSES[name], tokens), 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@every_loss
@settings(deadline=None, max_examples=20)
@given(logprobs=NATS, behavior=NATS)
def test_without_an_advantage_there_is_no_gradient(name, logprobs, behavior):
    tokens = make_tokens(logprobs, behavior, 0.0, sequence_ids=IDS)
    for found in values_and_slopes(LOSSES[name], tokens):
        np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("name", ["cispo", "truncated_is", "sequence_truncated_is"])
def test_no_gradient_flows_into_the_sampler(name):
    tokens = make_tokens([-1.0, -2.0], [-1.5, -1.7], 2.0)
    found = jax.grad(lambda x: LOSSES[name](tokens.replace(behavior_logprobs=x)).sum())(
        tokens.behavior_logprobs
    )
    np.testing.assert_array_equal(found, 0.0)


@every_loss
@settings(deadline=None, max_examples=20)
@given(
    logprobs=NATS,
    behavior=NATS,
    advantages=ADVANTAGES,
    wild=st.sampled_from([0.0, -1.0, 3e4, -3e4, 1e30, -1e30]),
)
def test_what_the_mask_hides_changes_no_other_token(
    name, logprobs, behavior, advantages, wild
):
    mask = np.array([[1, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]], bool)

    def run(logprobs):
        tokens = make_tokens(
            logprobs,
            np.where(mask, behavior, wild),
            np.where(mask, advantages, 7.0),
            mask=mask,
            sequence_ids=IDS,
        )
        return (np.where(mask, x, 0.0) for x in values_and_slopes(LOSSES[name], tokens))

    expected, gradient = run(logprobs)
    found, strange = run(np.where(mask, logprobs, -wild))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(strange, gradient)


EXTREME = st.sampled_from([0.0, -1e-30, -1.0, -87.5, -1000.0, -3e4, -1e30])


@every_loss
@settings(deadline=None, max_examples=30)
@given(
    logprobs=st.lists(EXTREME, min_size=3, max_size=3),
    behavior=st.lists(EXTREME, min_size=3, max_size=3),
    proximal=st.lists(EXTREME, min_size=3, max_size=3),
    advantage=st.sampled_from([1e6, 1.0, 1e-30, -1e-30, -1.0, -1e6]),
)
def test_extreme_but_finite_inputs_make_no_nan(
    name, logprobs, behavior, proximal, advantage
):
    tokens = make_tokens(logprobs, behavior, advantage, proximal=proximal)
    for found in values_and_slopes(LOSSES[name], tokens):
        assert jnp.isfinite(found).all()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - OF_SEQUENCES))
@settings(deadline=None, max_examples=20)
@given(logprobs=NATS, behavior=NATS, advantages=ADVANTAGES)
def test_a_token_is_judged_alone(name, logprobs, behavior, advantages):
    together, _ = values_and_slopes(
        LOSSES[name], make_tokens(logprobs, behavior, advantages)
    )
    alone, _ = values_and_slopes(
        LOSSES[name], make_tokens(logprobs[1, 3], behavior[1, 3], advantages[1, 3])
    )
    np.testing.assert_allclose(together[1, 3], alone, rtol=1e-5)
