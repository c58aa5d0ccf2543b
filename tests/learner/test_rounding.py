"""Stochastic rounding: to a neighbour, with the right mean, by draws that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.learner.optimizer import round_stochastically

BFLOAT16 = jnp.zeros(0, jnp.bfloat16)


@jax.jit
def rounded(values, seed):
    like = jax.tree.map(lambda _: BFLOAT16, values)
    return round_stochastically(values, like=like, seed=seed)


def neighbours(values):
    """The bfloat16 values towards zero and away from it, as float32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    inner = bits & np.uint32(0xFFFF0000)
    outer = np.where(bits == inner, inner, inner + np.uint32(0x10000))
    return inner.view(np.float32), outer.astype(np.uint32).view(np.float32)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=50)
@given(st.lists(FINITE, min_size=8, max_size=8), st.integers(0, 2**31 - 1))
def test_a_value_becomes_one_of_its_two_neighbours(values, seed):
    values = np.array(values, np.float32)
    found = np.asarray(rounded(values, seed))
    inner, outer = neighbours(values)
    assert found.dtype == np.float32
    assert np.all((found == inner) | (found == outer))


@settings(deadline=None, max_examples=20)
@given(st.lists(FINITE, min_size=8, max_size=8), st.integers(0, 2**31 - 1))
def test_what_bfloat16_can_say_stays(values, seed):
    with np.errstate(over="ignore"):
        exact = np.array(values, np.float32).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(rounded(exact, seed), exact)


def test_infinities_and_nan_stay():
    for seed in range(20):
        values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
        found = np.asarray(rounded(values, seed))
        np.testing.assert_array_equal(found, values)
        assert np.signbit(found[4])


@pytest.mark.parametrize("share", [1 / 256, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("start, step", [(1.0, 2.0**-7), (-3.0, -(2.0**-6))])
def test_the_mean_of_many_draws_is_the_value(start, step, share):
    value = np.float32(start + share * step)
    seeds, copies = 64, 1000
    draws = np.stack(
        [rounded(np.full(copies, value), seed) for seed in range(seeds)]
    ).astype(np.float64)
    up = (draws - start) / step
    assert set(np.unique(up)) == {0.0, 1.0}
    exact = (float(value) - start) / step
    error = (exact * (1 - exact) / draws.size) ** 0.5
    assert abs(up.mean() - exact) < 4 * error
    # Neither does a place, or a seed, have odds of its own: counts spread as draws do.
    for axis, count in ((0, seeds), (1, copies)):
        spread = up.mean(axis=axis).std() / (exact * (1 - exact) / count) ** 0.5
        assert 0.6 < spread < 1.4


def test_draws_differ_by_leaf_and_by_seed_and_not_from_call_to_call():
    values = {name: np.full(1000, 1.001, np.float32) for name in ("query", "key")}
    first, again, later = rounded(values, 3), rounded(values, 3), rounded(values, 4)
    for name in values:
        np.testing.assert_array_equal(first[name], again[name])
        assert np.any(first[name] != later[name])
    assert np.any(first["query"] != first["key"])


def test_float32_leaves_are_left_alone():
    values = {"wide": jnp.full(3, 1.001)}
    found = round_stochastically(
        values, like={"wide": jnp.zeros(3)}, seed=jnp.zeros((), jnp.int32)
    )
    np.testing.assert_array_equal(found["wide"], values["wide"])
