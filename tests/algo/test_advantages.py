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
    leave_one_out,
    normalize_by_batch,
    turn_advantages,
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


def test_a_turn_is_compared_with_the_same_turn_of_its_group():
    # Turn 0 has the mean 2 over 1 and 3, which are judged; turn 1 has 4 alone.
    rewards = jnp.array([[1.0, 4.0], [0.0, 0.0], [3.0, 0.0], [9.0, 9.0]])
    taken = jnp.array([[True, True], [False, False], [True, False], [True, True]])
    judged = jnp.array([True, True, True, False])
    found = turn_advantages(rewards, taken, judged, group_size=4)
    assert found.tolist() == [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]


JUDGED = jnp.array([True, True, True, False, True, False, False, False, *[False] * 4])


@pytest.mark.parametrize(
    "function, expected",
    [
        # Of 1, 1, -2 the mean is 0, and those of the others are -1/2, -1/2 and 1.
        pytest.param(group_advantages, [1.0, 1.0, -2.0], id="mean"),
        pytest.param(leave_one_out, [1.5, 1.5, -3.0], id="leave one out"),
    ],
)
def test_baselines_are_over_the_judged(function, expected):
    # Then one judged rollout alone, and a group without any.
    rewards = jnp.array([1.0, 1.0, -2.0, 9.0, 7.0, *[5.0] * 7])
    found = function(rewards, JUDGED, group_size=4)
    assert found.tolist() == expected + [0.0] * 9


@pytest.mark.parametrize("function", [group_advantages, leave_one_out])
@settings(deadline=None, max_examples=50)
@given(REWARDS, KEPT, REWARDS)
def test_judged_rollouts_have_the_advantages_of_a_group_of_their_own(
    function, rewards, judged, others
):
    """A loop over the judged alone; what the others were given does not matter."""
    marked = np.where(judged, rewards.reshape(-1), others.reshape(-1))
    arrays = map(jnp.asarray, (marked, judged))
    found = function(*arrays, group_size=GROUP_SIZE)
    expected = np.zeros(GROUPS * GROUP_SIZE)
    for group in np.arange(GROUPS * GROUP_SIZE).reshape(GROUPS, GROUP_SIZE):
        own = [place for place in group if judged[place]]
        for place in own:
            rest = own if function is group_advantages else set(own) - {place}
            baseline = [float(rewards.reshape(-1)[each]) for each in rest]
            if baseline:
                expected[place] = rewards.reshape(-1)[place] - np.mean(baseline)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("function", [group_advantages, leave_one_out])
@settings(deadline=None, max_examples=50)
@given(
    rewards=REWARDS,
    order=st.permutations(range(GROUP_SIZE)),
    group=st.integers(0, GROUPS - 1),
)
def test_shuffling_a_group_shuffles_its_advantages(function, rewards, order, group):
    def of(rewards):
        found = function(jnp.asarray(rewards).reshape(-1), group_size=GROUP_SIZE)
        return np.array(found).reshape(GROUPS, GROUP_SIZE)

    shuffled = rewards.copy()
    shuffled[group] = rewards[group, order]
    before, after = of(rewards), of(shuffled)
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
            # (2.25 + 0.25 + 0.25) / 3 about 0, whatever their mean is.
            [1.5, -0.5, -0.5, -0.5],
            [True, True, True, False],
            [a / math.sqrt(2.75 / 3) for a in (1.5, -0.5, -0.5)] + [0.0],
            id="a cut-off completion masked",
        ),
        pytest.param(
            # About their own mean they would have no spread at all.
            [1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0],
            [True, True, False, False] * 2,
            [1.0, 1.0, 0.0, 0.0] * 2,
            id="all wrong answers cut off, equal pass rates",
        ),
        pytest.param(
            # (2.25 + 2.25) / 2: each counts as the one that it is.
            [0.5, -1.5, 0.5, 0.5, 1.5, -0.5, -0.5, -0.5],
            [False, True, False, False, True, False, False, False],
            [0.0, -1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
            id="one rollout left of each group",
        ),
        pytest.param([1.0, -1.0], [False, False], [0.0, 0.0], id="nothing kept"),
    ],
)
def test_batch_normalisation_by_hand(advantages, kept, expected):
    found = normalize_by_batch(jnp.array(advantages), jnp.array(kept), eps=1e-7)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(REWARDS, KEPT)
def test_a_normalised_batch_has_root_mean_square_1(rewards, kept):
    advantages = np.asarray(advantages_of(rewards))
    assume(kept.any() and np.abs(advantages[kept]).max() > 0.05)
    arrays = map(jnp.asarray, (advantages, kept))
    found = np.asarray(normalize_by_batch(*arrays, eps=1e-6))
    np.testing.assert_allclose((found[kept] ** 2).mean(), 1.0, rtol=1e-3)
    np.testing.assert_array_equal(found[~kept], 0.0)


@settings(deadline=None, max_examples=50)
@given(REWARDS)
def test_whole_groups_are_scaled_by_their_standard_deviation(rewards):
    advantages = np.asarray(advantages_of(rewards))
    assume(advantages.std() > 0.05)
    kept = jnp.ones(advantages.shape, bool)
    found = normalize_by_batch(jnp.asarray(advantages), kept, eps=0.0)
    expected = advantages / advantages.astype(np.float64).std()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(REWARDS, KEPT, st.floats(0.5, 20.0))
def test_the_unit_of_the_reward_does_not_matter(rewards, kept, unit):
    advantages, marked = advantages_of(rewards), jnp.asarray(kept)
    assume(kept.any() and np.abs(advantages)[kept].max() > 0.05)
    scaled = normalize_by_batch(advantages * np.float32(unit), marked, eps=0.0)
    plain = normalize_by_batch(advantages, marked, eps=0.0)
    np.testing.assert_allclose(scaled, plain, rtol=1e-4, atol=1e-6)
