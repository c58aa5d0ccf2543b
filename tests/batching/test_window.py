"""Windows: how groups become batches, and in which order steps are made on them."""

import dataclasses

import numpy as np
import pytest
from queue_world import make_group

from scalerl_jax.batching.assembly import Batch
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.batching.window import open_window


def assemble(groups, *, learner_version):
    """A batch whose targets are the tickets of its groups; none of equal rewards."""
    packed = pack(
        [prediction_of(group.ticket) for group in groups],
        row_tokens=len(groups),
        rows_per_microbatch=1,
    ).batch
    useful = any(group.has_reward_variance for group in groups)
    return Batch(
        groups=groups,
        version=learner_version,
        packed=packed if useful else None,
        rewards=None,
        sequences=(),
        train_tokens=0,
        row_tokens=0,
        filtered_tokens=100,
        carried_tokens=0,
        mean_context=0.0,
    )


def prediction_of(target):
    return TrainSequence(
        tokens=np.array([0, target], np.int32),
        prompt_length=1,
        weights=np.ones(1, np.float32),
        mask=np.ones(1, bool),
        behavior_logprobs=np.zeros(1, np.float32),
        staleness=np.zeros(1, np.int32),
    )


def make_window(useful, *, num_prompts=2, num_batches=2, version=7):
    """Of groups with reward variance where `useful` has a 1."""
    groups = [
        make_group(ticket, 0, 1, rewards=(0.0, float(digit)))
        for ticket, digit in enumerate(map(int, useful))
    ]
    return open_window(
        groups,
        num_prompts=num_prompts,
        num_batches=num_batches,
        version=version,
        assemble=assemble,
    )


def tickets(groups):
    return [group.ticket for group in groups]


def test_groups_are_cut_into_batches_by_ticket():
    window = make_window("1011")
    assert [tickets(batch.groups) for batch in window.batches] == [[0, 1], [2, 3]]
    assert [batch.num_useful for batch in window.batches] == [1, 2]
    assert not any(batch.refilled for batch in window.batches)


@pytest.mark.parametrize(
    "useful, batches, refilled",
    [
        pytest.param("0111001", [[1, 2], [3, 6]], [[0, 5], [4]], id="enough"),
        pytest.param("0100001", [[0, 1], [2, 6]], [[3, 5], [4]], id="at the limit"),
    ],
)
def test_what_is_left_over_has_no_variance_and_is_wasted(useful, batches, refilled):
    window = make_window(useful)
    assert [tickets(batch.groups) for batch in window.batches] == batches
    assert [tickets(batch.refilled) for batch in window.batches] == refilled
    # Two rollouts of two tokens in each group.
    wasted = [batch.wasted_tokens for batch in window.batches]
    assert wasted == [100 + 2 * 2 * len(each) for each in refilled]


def test_the_first_epoch_goes_in_order_and_later_ones_as_the_seed_says():
    window = make_window("1" * 12, num_batches=6)
    passes = window.passes(epochs=3, seed=0)
    order = [window.batches.index(each.batch) for each in passes]
    assert [each.epoch for each in passes] == [0] * 6 + [1] * 6 + [2] * 6
    epochs = [order[:6], order[6:12], order[12:]]
    assert epochs[0] == list(range(6))
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
    assert epochs[1] != epochs[2]
    assert [each.last for each in passes] == [False] * 17 + [True]

    def orders(window, seed):
        passes = window.passes(epochs=3, seed=seed)
        return [window.batches.index(each.batch) for each in passes]

    assert orders(window, 0) == order
    assert orders(window, 1) != order
    assert orders(make_window("1" * 12, num_batches=6, version=8), 0) != order


def test_a_batch_without_a_gradient_is_looked_at_once():
    window = make_window("110011", num_batches=3)
    passes = window.passes(epochs=3, seed=0)
    order = [window.batches.index(each.batch) for each in passes]
    assert order[:3] == [0, 1, 2]
    assert sorted(order[3:]) == [0, 0, 2, 2]
    alone = make_window("00", num_batches=1).passes(epochs=3, seed=0)
    assert [each.last for each in alone] == [True]


def test_scores_go_to_the_batches_that_have_a_gradient():
    window = make_window("110011", num_batches=3)

    def complete(batch, scores):
        packed = dataclasses.replace(batch.packed, advantages=scores["own"])
        return dataclasses.replace(batch, packed=packed)

    # Batches of one window may differ in their microbatches: the last has two.
    scores = [
        {"own": np.full((number + 1, 1, 2), number, np.float32)}
        for number, _ in enumerate(window.packed())
    ]
    completed = window.completed(scores, complete)
    found = [batch.packed for batch in completed.batches]
    assert found[1] is None
    for number, tickets, each in ((0, [0, 1], found[0]), (1, [4, 5], found[2])):
        assert each.targets.tolist() == [[tickets]]
        assert each.advantages.tolist() == [[[number] * 2]] * (number + 1)


def test_tokens_age_with_the_steps_of_their_window():
    window = make_window("11", num_batches=1)
    (batch,) = window.batches
    for version in (7, 9):
        aged = window.at(version, batch).packed
        assert aged.staleness.tolist() == [[[version - 7] * 2]]
    empty = make_window("00", num_batches=1)
    assert empty.at(9, empty.batches[0]).packed is None
