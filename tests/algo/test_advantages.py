"""Advantages by hand, and what normalising may not change."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo.advantages import (
    group_advantages,
    normalize_by_batch,
    normalize_by_prompt,
    unnormalized,
)

GROUPS, GROUP_SIZE = 3, 4
REWARDS = hnp.arrays(
    np.float32,
    (GROUPS, GROUP_SIZE),
    elements=st.floats(-2, 2, width=16, allow_subnormal=False),
)
KEPT = hnp.arrays(np.bool_, GROUPS * GROUP_SIZE)


def advantages_of(rewards):
    return group_advantages(jnp.asarray(rewards).reshape(-1), group_size=GROUP_SIZE)


def test_the_mean_of_the_group_is_taken_off():
    rewards = jnp.array([1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1])
    expected = [1.0, 1.0, -1.0, -1.0, 1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, group_size=4).tolist() == expected


@settings(deadline=None, max_examples=50)
@given(REWARDS, st.permutations(range(GROUP_SIZE)), st.integers(0, GROUPS - 1))
def test_shuffling_a_group_shuffles_its_advantages(rewards, order, group):
    shuffled = rewards.copy()
    shuffled[group] = rewards[group, order]
    before = np.array(advantages_of(rewards)).reshape(GROUPS, GROUP_SIZE)
    after = np.array(advantages_of(shuffled)).reshape(GROUPS, GROUP_SIZE)
    before[group] = before[group, order]
    np.testing.assert_allclose(after, before, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(REWARDS, st.floats(-5, 5))
def test_a_reward_that_all_get_changes_nothing(rewards, bonus):
    shifted = advantages_of(rewards + np.float32(bonus))
    np.testing.assert_allclose(shifted, advantages_of(rewards), atol=1e-5)
    sums = np.asarray(shifted).reshape(GROUPS, GROUP_SIZE).sum(axis=1)
    np.testing.assert_allclose(sums, 0.0, atol=1e-5)


@pytest.mark.parametrize(
    "advantages, kept, expected",
    [
        pytest.param(
            # var = (2 * 1.5^2 + 6 * 0.5^2) / 8 = 6 / 8
            [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5],
            [True] * 8,
            [a / math.sqrt(0.75) for a in (1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5)],
            id="all kept",
        ),
        pytest.param(
            # Were the zeros of the second group counted, the std would be sqrt(1/2).
            [2.0, 2.0, -2.0, -2.0, 0.0, 0.0, 0.0, 0.0],
            [True] * 4 + [False] * 4,
            [1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0],
            id="a zero-variance group dropped",
        ),
        pytest.param(
            # Mean 1/3, var = 1 - 1/9: scaled, but not centred anew.
            [1.0, 1.0, -1.0, -1.0],
            [True, True, True, False],
            [1 / math.sqrt(8 / 9), 1 / math.sqrt(8 / 9), -1 / math.sqrt(8 / 9), 0.0],
            id="a cut-off completion masked",
        ),
        pytest.param([1.0, -1.0], [False, False], [0.0, 0.0], id="nothing kept"),
    ],
)
def test_batch_normalisation_by_hand(advantages, kept, expected):
    found = normalize_by_batch(jnp.array(advantages), jnp.array(kept), eps=0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_prompt_normalisation_by_hand():
    advantages = jnp.array([1.5, -0.5, -0.5, -0.5, 2.0, 2.0, -2.0, -2.0])
    kept = jnp.array([True] * 7 + [False])
    found = normalize_by_prompt(advantages, kept, group_size=4, eps=0.0)
    third = math.sqrt(1 / 3)  # 0.5 / sqrt(0.75)
    expected = [3 * third, -third, -third, -third, 1.0, 1.0, -1.0, 0.0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_eps_is_added_to_the_standard_deviation():
    advantages, kept = jnp.array([3.0, -3.0]), jnp.array([True, True])
    by_batch = normalize_by_batch(advantages, kept, eps=1.0)
    by_prompt = normalize_by_prompt(advantages, kept, group_size=2, eps=1.0)
    assert by_batch.tolist() == by_prompt.tolist() == [0.75, -0.75]


def test_without_normalisation_the_kept_stay_as_they_are():
    found = unnormalized(jnp.array([1.5, -0.5, 3.0]), jnp.array([True, True, False]))
    assert found.tolist() == [1.5, -0.5, 0.0]


@settings(deadline=None, max_examples=50)
@given(REWARDS, KEPT)
def test_a_normalised_batch_has_standard_deviation_1(rewards, kept):
    advantages = np.asarray(advantages_of(rewards))
    assume(kept.any() and advantages[kept].std() > 0.05)
    found = np.asarray(normalize_by_batch(advantages, kept, eps=1e-6))
    np.testing.assert_allclose(found[kept].std(), 1.0, rtol=1e-3)
    np.testing.assert_array_equal(found[~kept], 0.0)


@settings(deadline=None, max_examples=50)
@given(REWARDS, KEPT, st.floats(0.5, 20.0))
def test_the_unit_of_the_reward_does_not_matter(rewards, kept, unit):
    advantages = np.asarray(advantages_of(rewards))
    assume(kept.any() and advantages[kept].std() > 0.05)
    scaled = normalize_by_batch(advantages * np.float32(unit), kept, eps=0.0)
    plain = normalize_by_batch(advantages, kept, eps=0.0)
    np.testing.assert_allclose(scaled, plain, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(KEPT, st.sampled_from(["batch", "prompt", "none"]))
def test_equal_rewards_make_no_nan(kept, normalization):
    advantages = jnp.zeros(GROUPS * GROUP_SIZE)
    found = {
        "batch": lambda: normalize_by_batch(advantages, kept, eps=1e-6),
        "prompt": lambda: normalize_by_prompt(
            advantages, kept, group_size=GROUP_SIZE, eps=1e-6
        ),
        "none": lambda: unnormalized(advantages, kept),
    }[normalization]()
    np.testing.assert_array_equal(found, 0.0)
