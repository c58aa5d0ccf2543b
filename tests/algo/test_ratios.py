"""Ratios by hand, and that no finite log-probability makes an infinite one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from small_tokens import floats

from scalerl_jax.algo.losses import (
    MAX_LOG_RATIO,
    MAX_NATS,
    bounded_exp,
    importance_ratio,
    log_ratio,
)


@pytest.mark.parametrize("ratio", [1e-6, 0.5, 1.0, 3.0, 1e6])
def test_a_ratio_is_the_probability_over_the_anchors(ratio):
    logprob, anchor = jnp.float32(-2.0), jnp.float32(-2.0 - math.log(ratio))
    found, gradient = jax.value_and_grad(importance_ratio)(logprob, anchor)
    np.testing.assert_allclose([found, gradient], ratio, rtol=2e-6)


def test_past_the_bound_a_ratio_is_constant():
    function = jax.value_and_grad(importance_ratio)
    found, gradient = function(jnp.float32(-1.0), jnp.float32(-22.0))
    np.testing.assert_allclose(found, math.exp(MAX_LOG_RATIO), rtol=1e-6)
    assert gradient == 0.0


@settings(deadline=None, max_examples=50)
@given(floats(6, -(2.0**127), 0), floats(6, -(2.0**127), 0))
def test_no_two_finite_logprobs_are_infinitely_apart(logprobs, anchor):
    logprobs, anchor = jnp.asarray(logprobs), jnp.asarray(anchor)
    difference, back = jax.vjp(log_ratio, logprobs, anchor)
    assert (jnp.abs(difference) <= MAX_NATS).all()
    assert all(jnp.isfinite(part).all() for part in back(jnp.ones(6)))
    ratio, back = jax.vjp(lambda x: bounded_exp(log_ratio(x, anchor)), logprobs)
    assert jnp.isfinite(ratio).all() and jnp.isfinite(back(jnp.ones(6))[0]).all()
