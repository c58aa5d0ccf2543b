"""Weights in int8: the nearest integers, and products with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from scalerl_jax.model.layers import linear
from scalerl_jax.model.quantized import quantize


def test_by_hand():
    weights = jnp.array([[1.27, 0.0, -254.0], [-0.5, 0.0, 3.0], [0.014, 0.0, 1.0]])
    found = quantize(weights, dtype=jnp.float32)
    np.testing.assert_allclose(found.scale, [0.01, 1.0, 2.0], rtol=1e-6)
    # 3 / 2 is half way: to the even integer.
    np.testing.assert_array_equal(
        found.values, [[127, 0, -127], [-50, 0, 2], [1, 0, 0]]
    )
    assert found.values.dtype == jnp.int8


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(
        np.float32,
        st.sampled_from([(1, 1), (1, 4), (9, 5)]),  # programs are compiled for each
        elements=st.floats(-100, 100, width=32),
    ),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_every_weight_is_within_half_a_step(weights, dtype):
    found = quantize(jnp.asarray(weights), dtype=dtype)
    assert found.scale.dtype == jnp.dtype(dtype)
    scale = np.asarray(found.scale, np.float64)
    rounded = weights.astype(jnp.dtype(dtype)).astype(np.float64)
    off = np.abs(np.asarray(found.values, np.float64) * scale - rounded)
    # A scale rounded down cuts the largest weight: by at most 127 * 2^-9 of a step.
    assert np.all(off <= scale * 0.5001)
    assert np.all(np.abs(np.asarray(found.values, np.int32)) <= 127)


@pytest.mark.parametrize("form", [lambda f: f, jax.jit], ids=["as is", "compiled"])
def test_weights_that_were_rounded_before_have_the_same_integers(form):
    weights = jax.random.normal(jax.random.key(1), (96, 64))
    to_integers = form(lambda given: quantize(given, dtype=jnp.bfloat16))
    found, expected = map(to_integers, (weights, weights.astype(jnp.bfloat16)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    whole = quantize(weights, dtype=jnp.float32)
    assert np.mean(np.asarray(found.values) != np.asarray(whole.values)) > 0.01


def test_a_product_with_integers_is_one_with_the_whole_matrix():
    x, weights = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            jax.random.split(jax.random.key(0)), [(5, 64), (64, 24)], strict=True
        )
    )
    found = quantize(weights, dtype=jnp.float32)
    whole = np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64)
    exact = np.asarray(x, np.float64) @ whole
    np.testing.assert_allclose(linear(x, found), exact, atol=1e-5)
    half = quantize(weights, dtype=jnp.bfloat16)
    assert linear(x.astype(jnp.bfloat16), half).dtype == jnp.bfloat16


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(value):
    weights = jnp.ones((3, 2)).at[1, 0].set(value)
    product = linear(jnp.ones((1, 3)), quantize(weights, dtype=jnp.float32))
    assert np.isfinite(product).tolist() == [[False, True]]
