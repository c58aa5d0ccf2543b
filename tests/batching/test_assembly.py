"""Groups into a batch, worked out by hand."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.algo import advantages
from scalerl_jax.algo.advantages import (
    add_overlong_penalty,
    group_advantages,
    prompt_weights,
)
from scalerl_jax.algo.regularizers import easy_prompts
from scalerl_jax.batching.assembly import Assembler, RunningNormalization
from scalerl_jax.batching.group_metrics import group_metrics
from scalerl_jax.batching.packing import pack
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.objective.advantages import GroupAdvantages
from scalerl_jax.types import Group, Prompt, Rollout, Turn

G = 2


def make_rollout(length, reward, *, first, versions=0, **changes):
    """Tokens first, first + 1, ...: they tell whose position a position is."""
    fields = dict(
        completion_tokens=np.arange(first, first + length, dtype=np.int32),
        completion_mask=np.ones(length, bool),
        behavior_logprobs=np.full(length, -1.0, np.float32),
        policy_versions=np.broadcast_to(np.int32(versions), length).copy(),
        cut_off=False,
        interrupted=False,
        reward=reward,
        passed=reward > 0,
        status="correct" if reward > 0 else "wrong",
    )
    return Rollout(**(fields | changes))


def make_group(*rollouts, task="chain_sum", finished_version=0):
    prompt = Prompt(
        prompt_id=0,
        epoch=0,
        task=task,
        text="",
        tokens=np.array([1, 2], np.int32),
        reference={},
    )
    return Group(
        ticket=0, prompt=prompt, rollouts=rollouts, finished_version=finished_version
    )


# Lengths 2 + 3, rewards 1 and -1; then equal rewards; then a cut-off completion, of
# whose 4 tokens one was forced.
MIXED = make_group(
    make_rollout(2, 1.0, first=10),
    make_rollout(3, -1.0, first=20, versions=[2, 3, 3], status="no_answer"),
    finished_version=3,
)
EQUAL = make_group(
    make_rollout(1, 1.0, first=30, versions=4),
    make_rollout(4, 1.0, first=40, versions=4),
    finished_version=4,
)
CUT = make_group(
    make_rollout(1, 3.0, first=50, versions=3),
    make_rollout(
        4,
        -3.0,
        first=60,
        versions=3,
        cut_off=True,
        interrupted=True,
        completion_mask=np.array([True, False, True, True]),
        status="verifier_timeout",
    ),
    task="spell_backward",
    finished_version=4,
)
GROUPS = [MIXED, EQUAL, CUT]


ROWS = dict(row_tokens=12, rows_per_microbatch=2)


def packing_as(packing):
    return functools.partial(pack, **ROWS, row_segments=12 if packing else 1)


def batch_advantages(rewards, judged, kept):
    centered = group_advantages(rewards, judged, group_size=G)
    return advantages.normalize_by_batch(centered, kept, eps=0.0)


def assembler(*, advantages=batch_advantages, penalty=None, **changes):
    fields = dict(
        advantages=GroupAdvantages(of_rewards=advantages, penalty=penalty),
        weigh=functools.partial(prompt_weights, group_size=G),
        zero_variance_filter=True,
        mask_cut_off=False,
        group_size=G,
        max_completion_tokens=6,
        pack=functools.partial(pack, **ROWS),
    )
    return Assembler(**(fields | changes))


def assembled(groups, *, learner_version, given=None, **changes):
    """The batch of these groups, complete."""
    assemble = assembler(**changes)
    batch = assemble(groups, learner_version=learner_version)
    return assemble.complete(batch, given or {})


def by_token(batch):
    """(weight, advantage, staleness) of each trained token; tokens are distinct."""
    return {
        int(batch.targets[place]): (
            float(batch.weights[place]),
            float(batch.advantages[place]),
            int(batch.staleness[place]),
        )
        for place in zip(*np.nonzero(batch.mask), strict=True)
    }


def assert_tokens(found, expected):
    assert found.keys() == expected.keys()
    for token, values in expected.items():
        np.testing.assert_allclose(found[token], values, rtol=1e-6, err_msg=str(token))


def test_a_batch_by_hand():
    batch = assembled(GROUPS, learner_version=5)
    # Advantages 1, -1 and 3, -3: the std of all four is sqrt(5).  Two prompts are
    # kept: a token of the first counts 1 / 2 / 5, one of the third 1 / 2 / 4.
    std = np.sqrt(5.0)
    expected = {token: (0.1, 1 / std, 5) for token in (10, 11)}
    expected |= {20: (0.1, -1 / std, 3), 21: (0.1, -1 / std, 2), 22: (0.1, -1 / std, 2)}
    expected |= {50: (0.125, 3 / std, 2)}
    expected |= {token: (0.125, -3 / std, 2) for token in (60, 62, 63)}
    assert_tokens(by_token(batch.packed), expected)
    assert batch.train_tokens == 9
    assert batch.wasted_tokens == 5  # both completions of the second group
    # Positions: prompt of 2 and completions of 2, 3, 1, 4, less the last token each.
    assert batch.row_tokens == 3 + 4 + 2 + 5
    # Position i of a segment sees i + 1 tokens.
    sums = (1 + 2 + 3) + (1 + 2 + 3 + 4) + (1 + 2) + (1 + 2 + 3 + 4 + 5)
    np.testing.assert_allclose(batch.mean_context, sums / 14)


def test_a_shared_prompt_is_computed_once_and_attends_in_every_sequence():
    group = make_group(make_rollout(2, 1.0, first=10), make_rollout(4, -1.0, first=20))
    prompt = group.prompt.replace(tokens=np.array([1, 2, 3], np.int32))
    shape = StreamShape(
        rows=2, row_tokens=12, shared_tokens=4, own_tokens=12, group_size=G
    )
    shared = functools.partial(pack_shared, shape=shape, streams=1)
    found = {
        pack: assembled([group.replace(prompt=prompt)], learner_version=0, pack=pack)
        for pack in (packing_as(True), shared)
    }
    # Positions 3 + 2 - 1 and 3 + 4 - 1; the first 2 of the prompt are shared.
    assert [each.row_tokens for each in found.values()] == [4 + 6, 4 + 6 - 2]
    assert [each.sequence_tokens for each in found.values()] == [4 + 6] * 2
    for each in found.values():
        attended = each.row_tokens * each.mean_context
        assert attended == pytest.approx(4 * 5 / 2 + 6 * 7 / 2)


def test_turns_have_advantages_of_their_own_beside_the_episodes():
    """Rewards 1 and -1 of length 3 and 5, A = 1 and -1; the spread of A is 1.

    Of turn 0 the rewards are 0.5 and 0, with a mean of 0.25; turn 1 has none.
    """
    first, second = (
        make_rollout(
            end,
            reward,
            first=10 * end,
            completion_mask=np.array([True, False] + [True] * (end - 2)),
            turns=(Turn(0, 1, True, given), Turn(1, 2, False), Turn(2, end, True)),
        )
        for end, reward, given in ((3, 1.0, 0.5), (5, -1.0, None))
    )
    batch = assembled([make_group(first, second)], learner_version=4, per_turn=True)
    found = {token: each[1] for token, each in by_token(batch.packed).items()}
    expected = {30: 1.25, 32: 1.0, 50: -1.25, 52: -1.0, 53: -1.0, 54: -1.0}
    assert found == pytest.approx(expected, abs=1e-4)
    metrics = group_metrics(batch.groups, learner_version=4)
    assert metrics["episode/mean_turns"] == 2.0
    assert metrics["episode/sampled_share"] == 6 / 8


def test_a_masked_completion_does_not_shrink_the_turns_of_the_others():
    """Rewards 1, 1, 1 and 0, the last masked: A is 1/4 for three, whose spread is 1/4.

    They are scaled by 4, and so are their turns.  Of turn 0 the rewards are 1, 0, 0
    and 0, with a mean of 1/4; turn 1 has none.
    """

    def scaled(rewards, judged, kept):
        centered = group_advantages(rewards, judged, group_size=4)
        return advantages.normalize_by_batch(centered, kept, eps=0.0)

    def of(place, reward, given):
        turns = (Turn(0, 1, True, given), Turn(1, 2, True))
        changes = {"turns": turns, "cut_off": place == 3}
        return make_rollout(2, reward, first=10 * place, **changes)

    group = make_group(
        of(0, 1.0, 1.0), *(of(at, float(at < 3), 0.0) for at in (1, 2, 3))
    )
    batch = assembled(
        [group],
        learner_version=0,
        per_turn=True,
        mask_cut_off=True,
        group_size=4,
        advantages=scaled,
        weigh=functools.partial(prompt_weights, group_size=4),
    )
    found = {token: each[1] for token, each in by_token(batch.packed).items()}
    expected = {0: 1 + 4 * 0.75, 10: 1 - 4 * 0.25, 20: 1 - 4 * 0.25}
    expected |= dict.fromkeys((1, 11, 21), 1.0)
    assert found == pytest.approx(expected, abs=1e-6)


def test_masked_cut_off_completions_enter_neither_normalisation_nor_loss():
    batch = assembled(GROUPS, learner_version=5, mask_cut_off=True)
    # Kept: 1, -1, 3, of root mean square (1 + 1 + 9) / 3; the reward of the cut-off
    # completion still is in the mean of its group.
    std = np.sqrt(11 / 3)
    expected = {token: (0.1, 1 / std, 5) for token in (10, 11)}
    expected |= {20: (0.1, -1 / std, 3), 21: (0.1, -1 / std, 2), 22: (0.1, -1 / std, 2)}
    expected |= {50: (0.5, 3 / std, 2)}
    assert_tokens(by_token(batch.packed), expected)
    assert batch.wasted_tokens == 5 + 4
    assert batch.train_tokens == 6


def cut_off(group, *places):
    """The group with the rollouts at these places cut off."""
    return group.replace(
        rollouts=tuple(
            rollout.replace(cut_off=place in places)
            for place, rollout in enumerate(group.rollouts)
        )
    )


NORMALIZATIONS = {
    "batch": advantages.normalize_by_batch,
    "prompt": functools.partial(advantages.normalize_by_prompt, group_size=G),
    "running": lambda *arrays, eps: RunningNormalization(eps=eps)(*arrays),
}


@pytest.mark.parametrize("name", [*NORMALIZATIONS, "reward_std"])
def test_where_all_wrong_answers_are_cut_off_the_right_ones_have_advantage_1(name):
    def scaled(rewards, judged, kept):
        centered = group_advantages(rewards, judged, group_size=G)
        if name != "reward_std":
            return NORMALIZATIONS[name](centered, kept, eps=1e-6)
        return advantages.normalize_by_reward_std(
            centered, kept, rewards=rewards, group_size=G, eps=1e-6
        )

    # Rewards 1 and -1 in both groups, and the mean that is taken off is 0.
    other = make_group(make_rollout(1, -1.0, first=80), make_rollout(3, 1.0, first=90))
    groups = [cut_off(MIXED, 1), cut_off(other, 0)]
    found = assembled(groups, learner_version=5, mask_cut_off=True, advantages=scaled)
    tokens = by_token(found.packed)
    assert tokens.keys() == {10, 11, 90, 91, 92}
    for _, advantage, _ in tokens.values():
        np.testing.assert_allclose(advantage, 1.0, rtol=1e-5)
    np.testing.assert_allclose(tokens[10][0], 1 / 2 / 2)
    np.testing.assert_allclose(tokens[90][0], 1 / 2 / 3)


def test_masked_completions_are_nothing_to_a_critic():
    found = assembled(
        GROUPS, learner_version=5, zero_variance_filter=False, mask_cut_off=True
    )
    assert set(found.rewards.rollout.flat) == {-1, 0, 1, 2, 3, 4}


def test_a_batch_of_masked_completions_alone_is_none():
    found = assembled([cut_off(MIXED, 0, 1)], learner_version=5, mask_cut_off=True)
    assert found.packed is None and found.wasted_tokens == 5


def test_a_filter_wastes_what_was_generated_and_no_observation():
    """The middle 2 of 4 tokens are an observation; the other group is filtered."""
    turns = (Turn(0, 1, True), Turn(1, 3, False), Turn(3, 4, True))
    mask = np.array([True, False, False, True])
    changes = dict(completion_mask=mask, turns=turns)
    kept, equal = (
        make_group(
            make_rollout(4, reward, first=first, **changes),
            make_rollout(4, 1.0, first=first + 10, **changes),
        )
        for first, reward in ((10, -1.0), (30, 1.0))
    )
    batch = assembled([kept, equal], learner_version=5)
    assert (batch.wasted_tokens, batch.carried_tokens) == (2 + 2, 2 + 2)
    refilled = dataclasses.replace(batch, refilled=[equal])
    assert refilled.wasted_tokens == 2 + 2 + 2 + 2


def unjudged(group, *places, reward=0.0):
    """The group with the rollouts at these places unjudged."""
    return group.replace(
        rollouts=tuple(
            rollout.replace(judged=False, passed=False, reward=reward)
            if place in places
            else rollout
            for place, rollout in enumerate(group.rollouts)
        )
    )


FOUR = make_group(
    make_rollout(1, 1.0, first=10),
    make_rollout(2, -1.0, first=20),
    make_rollout(3, -1.0, first=30),
    make_rollout(1, 1.0, first=40),
)


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 1e30])
def test_an_unjudged_rollout_is_in_nothing_that_is_trained(reward):
    def scaled(rewards, judged, kept):
        centered = group_advantages(rewards, judged, group_size=4)
        return advantages.normalize_by_batch(centered, kept, eps=0.0)

    batch = assembled(
        [unjudged(FOUR, 2, reward=reward)],
        learner_version=0,
        group_size=4,
        advantages=scaled,
        weigh=functools.partial(advantages.prompt_weights, group_size=4),
        scores={
            "regularization": functools.partial(
                easy_prompts, group_size=4, from_pass_rate=0.6
            )
        },
    )
    # Of 1, -1, 1 the mean is 1/3; the root mean square of what is left sqrt(8/9).
    std = np.sqrt(8 / 9)
    expected = {10: (1 / 4, 2 / 3 / std, 0), 40: (1 / 4, 2 / 3 / std, 0)}
    expected |= {token: (1 / 4, -4 / 3 / std, 0) for token in (20, 21)}
    assert_tokens(by_token(batch.packed), expected)
    assert batch.wasted_tokens == 3
    # A pass rate of 2/3, where 2 of 4 would be hard from 0.6 on.
    assert batch.packed.scores["regularization"][batch.packed.mask].all()


@pytest.mark.parametrize("places", [(1,), (0, 1)], ids=["one left", "none left"])
@pytest.mark.parametrize("filtered", [True, False])
def test_a_group_with_fewer_than_two_verdicts_pulls_at_nothing(places, filtered):
    group = unjudged(MIXED, *places)
    assert not group.has_reward_variance
    found = assembled([group, CUT], learner_version=5, zero_variance_filter=filtered)
    tokens = by_token(found.packed)
    left = {10, 11} if places == (1,) and not filtered else set()
    assert tokens.keys() == {50, 60, 62, 63} | left
    assert all(tokens[token][1] == 0.0 for token in left)
    alone = assembled([group], learner_version=5, zero_variance_filter=filtered)
    assert (alone.packed is None) == (not left)


def test_rewards_that_are_one_number_in_float32_have_no_variance_anywhere():
    rewards = 0.1 + 0.2, 0.3
    assert rewards[0] != rewards[1] and np.float32(rewards[0]) == np.float32(0.3)
    group = make_group(*(make_rollout(1, each, first=10) for each in rewards))
    batch = assembled([group], learner_version=0)
    assert batch.packed is None
    assert not group.has_reward_variance and batch.num_useful == 0
    metrics = group_metrics([group], learner_version=0)
    assert metrics["group/zero_variance_share"] == 1.0


def test_a_group_is_rated_by_its_judged_rollouts():
    assert unjudged(FOUR, 2).pass_rate == 2 / 3
    assert np.isnan(unjudged(FOUR, 0, 1, 2, 3).pass_rate)
    found = group_metrics([unjudged(MIXED, 0, 1), unjudged(CUT, 1)], learner_version=6)
    assert found["reward/mean"] == 3.0 and found["pass_rate/mean"] == 1.0
    assert np.isnan(found["pass_rate/chain_sum"])
    assert found["group/zero_variance_share"] == 1.0


def test_without_the_filter_equal_groups_count_and_pull_at_nothing():
    batch = assembled(GROUPS, learner_version=5, zero_variance_filter=False)
    found = by_token(batch.packed)
    std = np.sqrt((1 + 1 + 9 + 9) / 6)
    np.testing.assert_allclose(found[10], (1 / 3 / 5, 1 / std, 5), rtol=1e-6)
    np.testing.assert_allclose(found[30], (1 / 3 / 5, 0.0, 1), rtol=1e-6)
    assert batch.wasted_tokens == 0
    assert batch.train_tokens == 14


@pytest.mark.parametrize("least, factor", [(0.75, 0.0), (0.5, 1.0)])
def test_regularisers_are_on_from_a_pass_rate(least, factor):
    group = make_group(make_rollout(1, 1.0, first=10), make_rollout(2, -1.0, first=20))
    found = assembled(
        [group],
        learner_version=0,
        scores={
            "regularization": functools.partial(
                easy_prompts, group_size=G, from_pass_rate=least
            )
        },
    )
    on_tokens = found.packed.scores["regularization"][found.packed.mask]
    assert (on_tokens == factor).all()  # one of two passed


@pytest.mark.parametrize("correct_only, second", [(True, -1.0), (False, -1.25)])
def test_lengths_enter_the_reward_and_make_no_group_worth_its_gradient(
    correct_only, second
):
    # Lengths 2 and 3: clip((6 - length) / 4 - 1, -1, 0) = 0 and -0.25.
    shape = functools.partial(
        add_overlong_penalty, max_tokens=6, cache_tokens=4, correct_only=correct_only
    )
    batch = assembled(
        [MIXED, EQUAL],
        learner_version=5,
        shape_rewards=shape,
        advantages=lambda rewards, judged, kept: group_advantages(
            rewards, judged, group_size=G
        ),
    )
    found = by_token(batch.packed)
    np.testing.assert_allclose(found[10][1], (1.0 - second) / 2)
    np.testing.assert_allclose(found[20][1], (second - 1.0) / 2)
    assert 30 not in found and 40 not in found


def test_regularisers_are_scaled_by_the_pass_rate_of_the_group():
    batch = assembled(
        GROUPS,
        learner_version=5,
        zero_variance_filter=False,
        scores={
            "regularization": functools.partial(
                easy_prompts, group_size=G, from_pass_rate=0.75
            )
        },
    )
    factors = batch.packed.scores["regularization"]
    easy = {int(token) for token in batch.packed.targets[factors > 0]}
    assert easy == {30, 40, 41, 42, 43}  # of EQUAL, which passed always
    assert set(factors.flat) == {0.0, 1.0}


def test_what_is_packed_has_no_advantages_until_it_is_complete():
    batch = assembler()(GROUPS, learner_version=5)
    assert not batch.packed.advantages.any() and batch.packed.scores == {}
    assert {int(place) for place in batch.rewards.rollout.flat} == {-1, 0, 1, 4, 5}
    assert set(batch.packed.targets[batch.rewards.rollout == 5]) == {60, 61, 62, 63}
    given = {"proximal": np.zeros(batch.packed.mask.shape, np.float32)}
    complete = assembler().complete(batch, given)
    assert complete.packed.scores == given and complete.packed.advantages.any()
    assert complete.groups is batch.groups and complete.rewards is batch.rewards


def test_the_reward_of_a_completion_without_a_sampled_token_is_in_its_groups_mean():
    forced = make_rollout(1, 1.0, first=70, completion_mask=np.zeros(1, bool))
    group = make_group(forced, make_rollout(2, -1.0, first=80))
    found = assembled(
        [EQUAL, group],
        learner_version=5,
        advantages=lambda rewards, judged, kept: group_advantages(
            rewards, judged, group_size=G
        ),
    )
    assert {int(place) for place in found.rewards.rollout.flat} == {-1, 3}
    tokens = by_token(found.packed)
    assert {values[1] for values in tokens.values()} == {-1.0}


@settings(deadline=None, max_examples=5)
@given(
    order=st.permutations(range(len(GROUPS))),
    swapped=st.lists(st.booleans(), min_size=len(GROUPS), max_size=len(GROUPS)),
    weigh=st.sampled_from(
        [
            functools.partial(advantages.constant_weights, max_tokens=6),
            functools.partial(advantages.prompt_weights, group_size=G),
            advantages.sample_weights,
            advantages.token_weights,
        ]
    ),
)
def test_no_order_of_groups_or_rollouts_changes_a_token(order, swapped, weigh):
    groups = [
        GROUPS[place].replace(rollouts=GROUPS[place].rollouts[:: -1 if swap else 1])
        for place, swap in zip(order, swapped, strict=True)
    ]
    found = assembled(groups, learner_version=5, weigh=weigh).packed
    expected = assembled(GROUPS, learner_version=5, weigh=weigh).packed
    assert_tokens(by_token(found), by_token(expected))


def test_running_statistics_go_on_after_a_checkpoint_as_if_nothing_had_been():
    def fresh():
        running = RunningNormalization(eps=0.0)

        def scaled(rewards, judged, kept):
            return running(group_advantages(rewards, judged, group_size=G), kept)

        return assembler(advantages=scaled, running=running)

    def tokens(assemble, group):
        batch = assemble([group], learner_version=5)
        return by_token(assemble.complete(batch, {}).packed)

    through, before, after = fresh(), fresh(), fresh()
    for each in (through, before):
        tokens(each, MIXED)
    after.restore(json.loads(json.dumps(before.state())))
    found, expected = (tokens(each, CUT) for each in (after, through))
    assert found == expected
    # 1, -1 and then 3, -3: of all four.
    np.testing.assert_allclose(found[50][1], 3 / np.sqrt(5.0), rtol=1e-6)
    assert assembler().state() == {}


def test_running_squares_about_a_mean_become_those_about_0():
    running = RunningNormalization(eps=0.0)
    running.restore({"count": 2.0, "mean": 1.0, "squares": 8.0})  # of -1 and 3
    assert running.state() == {"count": 2.0, "squares": 10.0}


@pytest.mark.parametrize("packing", [True, False])
def test_packing_changes_no_token(packing):
    plain = assembled(GROUPS, learner_version=5)
    other = assembled(GROUPS, learner_version=5, pack=packing_as(packing))
    assert by_token(other.packed) == by_token(plain.packed)
    assert len(other.packed.tokens) == (1 if packing else 2)  # two or four rows


def test_weights_of_the_batch_sum_to_1():
    batch = assembled(GROUPS, learner_version=5).packed
    np.testing.assert_allclose(batch.weights.sum(), 1.0, rtol=1e-6)
    assert (batch.weights > 0).tolist() == batch.mask.tolist()


def test_where_every_group_is_of_equal_rewards_there_is_no_batch():
    batch = assembled([EQUAL, EQUAL], learner_version=5)
    assert batch.packed is None
    assert batch.train_tokens == batch.row_tokens == 0
    assert batch.wasted_tokens == 10
    assert batch.mean_context == 0.0


def test_microbatches_have_the_shape_of_the_settings_and_are_as_many_as_filled():
    for groups, microbatches in ([MIXED], 1), (GROUPS, 2), (GROUPS * 2, 4):
        batch = assembled(groups, learner_version=5, pack=packing_as(False)).packed
        shapes = {leaf.shape for leaf in jax.tree.leaves(batch)}
        assert shapes == {(microbatches, 2, 12)}


def test_metrics_by_hand():
    found = group_metrics(GROUPS, learner_version=6)
    expected = {
        "reward/mean": (1 - 1 + 1 + 1 + 3 - 3) / 6,
        "pass_rate/mean": (0.5 + 1.0 + 0.5) / 3,
        "pass_rate/chain_sum": 0.75,
        "pass_rate/spell_backward": 0.5,
        "group/zero_variance_share": 1 / 3,
        "completion/mean_tokens": 15 / 6,
        "completion/max_tokens": 4,
        "completion/cut_off_share": 1 / 6,
        "completion/interrupted_share": 1 / 6,
        "verifier/no_answer_share": 1 / 6,
        "verifier/unparsable_share": 0.0,
        "verifier/timeout_share": 1 / 6,
        "verifier/error_share": 0.0,
        "verifier/bad_reward_share": 0.0,
        "verifier/bad_observation_share": 0.0,
        "verifier/no_end_share": 0.0,
        "verifier/too_costly_share": 0.0,
        "verifier/unjudged_share": 1 / 6,
        # Oldest versions 0, 4, 3; finished at 3, 4, 4; used at 6.
        "staleness/mean": (6 + 2 + 3) / 3,
        "staleness/max": 6,
        "staleness/in_flight_mean": (3 + 0 + 1) / 3,
        "staleness/in_flight_max": 3,
        "staleness/queued_mean": (3 + 2 + 2) / 3,
        "staleness/queued_max": 3,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
