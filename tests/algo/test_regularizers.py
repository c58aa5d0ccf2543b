"""KL estimators and the entropy bonus, by hand and as exact expectations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from small_tokens import floats, make_tokens

from scalerl_jax.algo.losses import MAX_LOG_RATIO
from scalerl_jax.algo.regularizers import (
    easy_prompts,
    entropy_bonus,
    kl_k1,
    kl_k2,
    kl_k3,
    regularized,
)

ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
LOGITS = floats(5, -2, 2)


@pytest.mark.parametrize("probability", [0.9, 0.4, 0.1, 0.01])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_estimators_by_hand(probability, ratio):
    logprob, d = math.log(probability), math.log(ratio)
    expected = {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (1 / ratio - 1 + d, 1 - 1 / ratio),
    }
    for name, values in expected.items():
        logprobs = jnp.float32(logprob), jnp.float32(logprob - d)
        found = jax.value_and_grad(ESTIMATORS[name])(*logprobs)
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6, err_msg=name)


def expectation(function, logits, reference):
    """Over tokens of the policy: the sampling has no gradient of its own."""
    logprobs = jax.nn.log_softmax(logits)
    chances = jax.lax.stop_gradient(jnp.exp(logprobs))
    return (chances * function(logprobs, jax.nn.log_softmax(reference))).sum()


def kl(logits, other):
    """KL(softmax(logits) || softmax(other)), with its whole gradient."""
    logprobs, others = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return (jnp.exp(logprobs) * (logprobs - others)).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, reference=LOGITS)
def test_k1_and_k3_are_unbiased(name, logits, reference):
    found = expectation(ESTIMATORS[name], logits, reference)
    np.testing.assert_allclose(found, kl(logits, reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, gradient",
    [
        pytest.param("k1", lambda x, y: jnp.zeros(5), id="k1: none at all"),
        pytest.param("k2", jax.grad(kl), id="k2: that of the KL"),
        pytest.param("k3", jax.grad(lambda x, y: kl(y, x)), id="k3: the other KL's"),
    ],
)
@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, reference=LOGITS)
def test_the_expected_gradient_in_the_loss(name, gradient, logits, reference):
    found = jax.grad(lambda x: expectation(ESTIMATORS[name], x, reference))(logits)
    np.testing.assert_allclose(found, gradient(logits, reference), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, reference=LOGITS)
def test_in_the_reward_k1_has_the_gradient_of_the_kl(logits, reference):
    def policy_gradient_loss(logprobs, reference_logprobs):
        penalty = jax.lax.stop_gradient(kl_k1(logprobs, reference_logprobs))
        return penalty * logprobs

    found = jax.grad(lambda x: expectation(policy_gradient_loss, x, reference))(logits)
    np.testing.assert_allclose(
        found, jax.grad(kl)(logits, reference), rtol=1e-4, atol=1e-5
    )


def test_far_below_the_reference_k3_is_constant():
    found = jax.value_and_grad(kl_k3)(jnp.float32(-60.0), jnp.float32(-1.0))
    expected = math.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO
    np.testing.assert_allclose(found, (expected, 0.0), rtol=1e-6)


@every_estimator
@settings(deadline=None, max_examples=30)
@given(logprobs=floats(6, -(2.0**127), 0), reference=floats(6, -(2.0**127), 0))
def test_no_finite_logprobs_make_a_nan(name, logprobs, reference):
    arrays = map(jnp.asarray, (logprobs, reference))
    found, back = jax.vjp(ESTIMATORS[name], *arrays)
    assert jnp.isfinite(found).all()
    assert all(jnp.isfinite(part).all() for part in back(jnp.ones(6)))


def test_the_entropy_bonus_by_hand():
    bonus, gradient = jax.value_and_grad(entropy_bonus)(
        jnp.float32(2.0), coefficient=0.25
    )
    assert (bonus, gradient) == (-0.5, -0.25)


def test_easy_prompts_are_those_from_a_pass_rate_on():
    passed = jnp.array([0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1], bool)
    found = easy_prompts(
        passed, jnp.ones_like(passed), group_size=4, from_pass_rate=0.25
    )
    assert found.tolist() == [0.0] * 4 + [1.0] * 12


def test_an_easy_prompts_pass_rate_is_over_its_judged_rollouts():
    passed, judged = (jnp.array(each, bool) for each in ([1, 0, 0], [1, 1, 0]))
    for least, factor in ((0.5, 1.0), (0.51, 0.0)):
        found = easy_prompts(passed, judged, group_size=3, from_pass_rate=least)
        assert found.tolist() == [factor] * 3


def test_terms_are_added_to_a_loss_by_the_factor_of_their_token():
    loss = regularized(
        lambda tokens: tokens.logprobs,
        [lambda tokens: tokens.advantages, lambda tokens: tokens.entropy],
    )
    tokens = make_tokens([-1.0, -2.0], advantages=10.0, entropy=[1.0, 3.0])
    assert loss(tokens).tolist() == [10.0, 11.0]
    tokens = tokens.replace(scores={"regularization": jnp.array([0.0, 0.5])})
    assert loss(tokens).tolist() == [-1.0, 4.5]
