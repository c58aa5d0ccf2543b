"""Other recipes' baselines and scales by hand, and what no scale may do."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo.advantages import (
    RunningStatistics,
    group_advantages,
    leave_one_out,
    normalize_by_batch,
    normalize_by_prompt,
    normalize_by_reward_std,
    normalize_by_running,
    unnormalized,
)

GROUPS, GROUP_SIZE = 3, 4
REWARDS = hnp.arrays(
    np.float32,
    (GROUPS, GROUP_SIZE),
    elements=st.floats(-2, 2, width=16, allow_subnormal=False),
)
KEPT = hnp.arrays(np.bool_, GROUPS * GROUP_SIZE)
JUDGED = jnp.array([True, True, True, False])


def advantages_of(rewards):
    return group_advantages(jnp.asarray(rewards).reshape(-1), group_size=GROUP_SIZE)


def test_leave_one_out_takes_off_the_mean_of_the_others():
    rewards = jnp.array([1.0, 0.0, 0.0, 2.0, 2.0, 5.0])
    expected = [1.0, -0.5, -0.5, -1.5, -1.5, 3.0]
    assert leave_one_out(rewards, group_size=3).tolist() == expected


def test_the_std_of_a_group_is_over_the_judged():
    advantages = group_advantages(
        jnp.array([1.0, 1.0, -2.0, 9.0]), JUDGED, group_size=4
    )
    found = normalize_by_prompt(
        advantages, JUDGED, judged=JUDGED, group_size=4, eps=0.0
    )
    std = math.sqrt((1 + 1 + 4) / 3)
    np.testing.assert_allclose(found, np.array([1, 1, -2, 0]) / std, rtol=1e-6)
    # A masked one counts as ever: rewards 1, 1, -2 are of that std too.
    found = normalize_by_reward_std(
        advantages,
        jnp.array([True, True, False, False]),
        rewards=jnp.array([1.0, 1.0, -2.0, 9.0]),
        judged=JUDGED,
        group_size=4,
        eps=0.0,
    )
    np.testing.assert_allclose(found, np.array([1, 1, 0, 0]) / math.sqrt(2), rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(REWARDS)
def test_leave_one_out_is_that_of_a_loop(rewards):
    expected = [
        reward - np.delete(group.astype(float), place).mean()
        for group in rewards
        for place, reward in enumerate(group)
    ]
    found = leave_one_out(jnp.asarray(rewards).reshape(-1), group_size=GROUP_SIZE)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_masked_completions_count_in_the_spread_of_their_group():
    # One right answer, three wrong ones cut off: A = 1.5 and -0.5, std sqrt(0.75).
    advantages = jnp.array([1.5, -0.5, -0.5, -0.5])
    kept = jnp.array([True, False, False, False])
    rewards = jnp.array([1.0, -1.0, -1.0, -1.0])
    for found in (
        normalize_by_prompt(advantages, kept, group_size=4, eps=0.0),
        normalize_by_reward_std(
            advantages, kept, rewards=rewards, group_size=4, eps=0.0
        ),
    ):
        np.testing.assert_allclose(found, [math.sqrt(3), 0, 0, 0], rtol=1e-6)


NORMALIZED = {
    "batch": normalize_by_batch,
    "prompt": functools.partial(normalize_by_prompt, group_size=GROUP_SIZE),
    "reward_std": lambda *arrays, rewards, **options: normalize_by_reward_std(
        *arrays, rewards=rewards, group_size=GROUP_SIZE, **options
    ),
    "running": lambda *arrays, **options: normalize_by_running(
        *arrays, RunningStatistics(), **options
    )[0],
}


@pytest.mark.parametrize("name", NORMALIZED)
@settings(deadline=None, max_examples=50)
@given(REWARDS, KEPT)
def test_no_mask_makes_an_advantage_larger_than_its_batch_allows(name, rewards, kept):
    """At most sqrt(B), whatever is cut off: no spread is that of the luck of a mask."""
    advantages = advantages_of(rewards)
    options = {"rewards": jnp.ravel(rewards)} if name == "reward_std" else {}
    found = NORMALIZED[name](advantages, jnp.asarray(kept), eps=1e-12, **options)
    # Equal rewards leave advantages of some rounding errors.
    clear = np.repeat(np.ptp(rewards, axis=1) > 1e-3, GROUP_SIZE)
    bound = math.sqrt(GROUPS * GROUP_SIZE) * 1.001
    assert (np.abs(found)[clear] <= bound).all()


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


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("reward", [0.0, -1.0, 0.1])
def test_equal_rewards_make_no_nan(reward, eps):
    rewards = jnp.full(GROUPS * GROUP_SIZE, reward)
    advantages = jnp.zeros_like(rewards)
    for kept in (rewards == reward, rewards != reward):
        for found in (
            normalize_by_batch(advantages, kept, eps=eps),
            normalize_by_prompt(advantages, kept, group_size=GROUP_SIZE, eps=eps),
            normalize_by_reward_std(
                advantages, kept, rewards=rewards, group_size=GROUP_SIZE, eps=eps
            ),
            normalize_by_running(advantages, kept, RunningStatistics(), eps=eps)[0],
            unnormalized(advantages, kept),
        ):
            np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("baseline", [group_advantages, leave_one_out])
def test_equal_rewards_pull_at_nothing_whatever_their_mean_rounds_to(baseline, eps):
    # The mean of six times 0.9 in float32 is not 0.9; the second group is -1, 1, ...
    equal, judged = jnp.full(6, 0.9), jnp.array([True] * 12)
    mixed = jnp.concatenate([equal, jnp.array([-1.0, 1.0] * 3)])
    own = baseline(mixed, judged, group_size=6)
    found = normalize_by_prompt(own, judged, group_size=6, eps=eps)
    assert found[:6].tolist() == [0.0] * 6
    factor = 1.2 if baseline is leave_one_out else 1.0
    np.testing.assert_allclose(own[6:], [-factor, factor] * 3, rtol=1e-6)
    np.testing.assert_allclose(found[6:], [-1.0, 1.0] * 3, rtol=1e-5)
    whole = normalize_by_reward_std(
        baseline(equal, group_size=6),
        judged[:6],
        rewards=equal,
        group_size=6,
        eps=eps,
    )
    assert whole.tolist() == [0.0] * 6


def test_the_std_of_the_rewards_counts_what_the_groups_differ_by():
    # Rewards 1, 0 and 3, 2: their variance is (2.25 + 0.25) * 2 / 4.
    rewards = jnp.array([1.0, 0.0, 3.0, 2.0, 50.0, 50.0])
    advantages = jnp.array([0.5, -0.5, 0.5, -0.5, 9.0, -9.0])
    kept = jnp.array([True, True, True, False, False, False])
    found = normalize_by_reward_std(
        advantages, kept, rewards=rewards, group_size=2, eps=0.0
    )
    expected = np.array([0.5, -0.5, 0.5, 0.0, 0.0, 0.0]) / math.sqrt(1.25)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(REWARDS, REWARDS, KEPT, KEPT)
def test_running_statistics_are_those_of_all_batches_together(first, second, one, two):
    statistics = RunningStatistics()
    for batch in ((first.reshape(-1), one), (second.reshape(-1), two)):
        values, kept = map(jnp.asarray, batch)
        found, statistics = normalize_by_running(values, kept, statistics, eps=0.5)
    seen = np.concatenate([first.reshape(-1)[one], second.reshape(-1)[two]])
    spread = math.sqrt((seen.astype(float) ** 2).mean()) if len(seen) else 0.0
    expected = np.where(two, second.reshape(-1) / (spread + 0.5), 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert statistics.count == len(seen)


@settings(deadline=None, max_examples=30)
@given(REWARDS, KEPT)
def test_the_first_batch_is_scaled_by_itself(rewards, kept):
    advantages, start = advantages_of(rewards), RunningStatistics()
    kept = jnp.asarray(kept)
    found, _ = normalize_by_running(advantages, kept, start, eps=1e-2)
    expected = normalize_by_batch(advantages, kept, eps=1e-2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
