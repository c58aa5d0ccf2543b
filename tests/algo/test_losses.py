"""CISPO by hand, its gradient in closed form, and what it must not depend on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo.losses import cispo_loss

LOG2 = math.log(2.0)
CAP = 5.0


def summed_loss(logprobs, behavior_logprobs, advantages, cap=CAP):
    return cispo_loss(
        logprobs, behavior_logprobs, advantages, max_importance_ratio=cap
    ).sum()


gradient = jax.jit(jax.grad(summed_loss))


@pytest.mark.parametrize(
    "logprob, behavior_logprob, advantage, expected",
    [
        pytest.param(-1.0, -1.0, 1.0, 1.0, id="on policy, ratio 1"),
        pytest.param(-1.0, -1.0, -1.5, -1.5, id="on policy, wrong answer"),
        pytest.param(-1.0, -1.0 - LOG2, 1.0, 2.0, id="ratio 2"),
        pytest.param(-3.0, -3.0 + LOG2, 1.0, 1.5, id="ratio 1/2"),
        pytest.param(-3.0, -3.0 + LOG2, -2.0, -3.0, id="ratio 1/2, wrong answer"),
        pytest.param(-1.0, -1.0 - 2 * LOG2, 1.0, 4.0, id="ratio 4, at the cap"),
        pytest.param(-1.0, -1.0 - 3 * LOG2, 1.0, 4.0, id="ratio 8 capped to 4"),
        pytest.param(-1.0, -1.0 - 3 * LOG2, -0.5, -2.0, id="capped, wrong answer"),
    ],
)
def test_cispo_by_hand(logprob, behavior_logprob, advantage, expected):
    loss = cispo_loss(
        jnp.float32(logprob),
        jnp.float32(behavior_logprob),
        jnp.float32(advantage),
        max_importance_ratio=4.0,
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0, 7.0, 100.0])
@pytest.mark.parametrize("logprob", [-0.1, -1.0, -2.0, -4.0])
def test_the_gradient_is_the_capped_ratio_times_the_advantage(
    logprob, ratio, advantage
):
    behavior = logprob - math.log(ratio)
    found = gradient(
        jnp.float32(logprob), jnp.float32(behavior), jnp.float32(advantage)
    )
    np.testing.assert_allclose(found, -min(ratio, CAP) * advantage, rtol=2e-6)


def test_no_gradient_flows_into_the_sampler():
    into_behavior = jax.grad(summed_loss, argnums=1)
    found = into_behavior(jnp.float32(-1.0), jnp.float32(-1.5), jnp.float32(2.0))
    assert found == 0.0


TOKENS = hnp.arrays(
    np.float32, (7,), elements=st.floats(-30, 0, width=32, allow_subnormal=False)
)
ADVANTAGES = hnp.arrays(
    np.float32, (7,), elements=st.floats(-4, 4, width=32, allow_subnormal=False)
)


@settings(deadline=None, max_examples=50)
@given(TOKENS, ADVANTAGES)
def test_on_policy_the_gradient_is_that_of_reinforce(logprobs, advantages):
    def reinforce(logprobs):
        return -(advantages * logprobs).sum()

    np.testing.assert_array_equal(
        gradient(logprobs, logprobs, advantages), jax.grad(reinforce)(logprobs)
    )


@settings(deadline=None, max_examples=50)
@given(TOKENS, TOKENS)
def test_without_an_advantage_there_is_no_gradient(logprobs, behavior_logprobs):
    found = gradient(logprobs, behavior_logprobs, np.zeros(7, np.float32))
    np.testing.assert_array_equal(found, 0.0)


@settings(deadline=None, max_examples=50)
@given(TOKENS, TOKENS, ADVANTAGES, st.integers(0, 6))
def test_a_token_is_judged_alone(logprobs, behavior_logprobs, advantages, place):
    options = {"max_importance_ratio": CAP}
    together = cispo_loss(logprobs, behavior_logprobs, advantages, **options)
    alone = cispo_loss(
        logprobs[place], behavior_logprobs[place], advantages[place], **options
    )
    np.testing.assert_allclose(together[place], alone, rtol=1e-5)


@pytest.mark.parametrize(
    "logprob, behavior_logprob, expected_ratio",
    [
        pytest.param(-1.0, -1000.0, CAP, id="the ratio overflows float32"),
        pytest.param(-1000.0, -1.0, 0.0, id="the ratio underflows float32"),
        pytest.param(-1e30, -1e30, 1.0, id="both far out"),
    ],
)
def test_extreme_but_finite_logprobs_make_no_nan(
    logprob, behavior_logprob, expected_ratio
):
    values = (jnp.float32(logprob), jnp.float32(behavior_logprob), jnp.float32(2.0))
    assert jnp.isfinite(summed_loss(*values))
    np.testing.assert_allclose(gradient(*values), -2.0 * expected_ratio)
