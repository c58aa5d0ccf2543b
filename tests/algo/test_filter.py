"""Groups that are dropped."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo.advantages import has_reward_variance

REWARDS = hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([-1.0, 0.1, 1.0]))


@pytest.mark.parametrize(
    "group, kept",
    [
        pytest.param([1.0, 1.0, 1.0], False, id="all right"),
        pytest.param([-1.0, -1.0, -1.0], False, id="all wrong"),
        pytest.param([0.1, 0.1, 0.1], False, id="equal, but std is 7e-9"),
        pytest.param([1.0, -1.0, -1.0], True, id="one right"),
        pytest.param([1.0, 1.0, np.nextafter(np.float32(1), 0)], True, id="one ulp"),
    ],
)
def test_a_group_is_kept_if_its_rewards_differ(group, kept):
    mixed = [-1.0, 1.0, 1.0]  # a neighbour that is kept in any case
    rewards = jnp.array(mixed + group, jnp.float32)
    found = has_reward_variance(rewards, group_size=3)
    assert found.tolist() == [True] * 3 + [kept] * 3


@pytest.mark.parametrize(
    "judged, kept",
    [
        pytest.param([True, True, False], True, id="two judged differ"),
        pytest.param([False, True, True], False, id="two judged are alike"),
        pytest.param([True, False, False], False, id="one judged"),
        pytest.param([False, False, False], False, id="none judged"),
    ],
)
def test_only_what_is_judged_makes_a_difference(judged, kept):
    rewards = jnp.array([1.0, -1.0, -1.0])
    found = has_reward_variance(rewards, jnp.array(judged), group_size=3)
    assert found.tolist() == [kept] * 3


@settings(deadline=None, max_examples=50)
@given(REWARDS)
def test_it_keeps_the_groups_with_more_than_one_reward(rewards):
    found = has_reward_variance(jnp.asarray(rewards.reshape(-1)), group_size=4)
    expected = [len(set(group.tolist())) > 1 for group in rewards for _ in group]
    assert found.tolist() == expected
