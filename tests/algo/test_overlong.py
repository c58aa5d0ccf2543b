"""The overlong penalty by hand and by its two sources."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.algo.advantages import add_overlong_penalty, overlong_penalty

LENGTHS = jnp.array([0, 12_000, 12_500, 13_000, 14_000, 15_000])
BY_HAND = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
SCALERL = {"max_tokens": 14_000, "cache_tokens": 2_000}


def test_the_penalty_by_hand():
    assert overlong_penalty(LENGTHS, **SCALERL).tolist() == BY_HAND


def dapo(length, longest, cache):
    """Equation 13 of the paper, part by part."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40_000), st.integers(1, 30_000), st.integers(1, 30_000))
def test_the_three_parts_of_dapo_are_the_clip_of_scalerl(length, longest, cache):
    cache = min(cache, longest)
    found = overlong_penalty(
        jnp.array([length]), max_tokens=longest, cache_tokens=cache
    )
    np.testing.assert_allclose(found, [dapo(length, longest, cache)], atol=1e-6)


@pytest.mark.parametrize("correct_only", [False, True])
def test_who_is_punished(correct_only):
    passed = jnp.array([True, False, True, False, True, False])
    rewards = jnp.where(passed, 1.0, -1.0)
    found = add_overlong_penalty(
        rewards, LENGTHS, passed, correct_only=correct_only, **SCALERL
    )
    wrong = [-1.0, -1.5, -2.0] if not correct_only else [-1.0, -1.0, -1.0]
    assert found[::2].tolist() == [1.0, 0.75, 0.0]
    assert found[1::2].tolist() == wrong
