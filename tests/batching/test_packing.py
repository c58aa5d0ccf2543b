"""Packing, read back by slow code that shares nothing with them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.batching.packing import (
    ROW_SEGMENTS,
    TrainSequence,
    abstract_microbatch,
    laid_out,
    pack,
    train_sequences,
)
from scalerl_jax.batching.rooms import Rooms
from scalerl_jax.types import Group, Prompt, Rollout


def make_rollout(tokens, *, mask=None, versions=0, reward=0.0, cut_off=False):
    length = len(tokens)
    return Rollout(
        completion_tokens=np.array(tokens, np.int32),
        completion_mask=np.ones(length, bool) if mask is None else np.array(mask, bool),
        behavior_logprobs=-np.arange(1, length + 1, dtype=np.float32),
        policy_versions=np.broadcast_to(np.int32(versions), length).copy(),
        cut_off=cut_off,
        interrupted=False,
        reward=reward,
    )


def make_group(prompt, *rollouts):
    return Group(
        ticket=0,
        prompt=Prompt(
            prompt_id=0,
            epoch=0,
            task="chain_sum",
            text="",
            tokens=np.array(prompt, np.int32),
            reference={},
        ),
        rollouts=rollouts,
        finished_version=0,
    )


GROUPS = (
    make_group(
        [5, 6, 7],
        make_rollout([1, 2], versions=[3, 4], reward=1.0),
        make_rollout([9, 8, 3, 2], mask=[1, 0, 0, 1], versions=4, cut_off=True),
    ),
    make_group(
        [4],
        make_rollout([1], versions=2, reward=-1.0),
        make_rollout([2, 2, 2], versions=4, reward=0.5),
    ),
)


def test_train_sequences_by_hand():
    weights = np.zeros((4, 5), np.float32)
    weights[0, :2] = weights[1, [0, 3]] = weights[3, :3] = 0.1  # 2: a filtered rollout
    sequences = train_sequences(GROUPS, weights=weights, learner_version=5)
    assert [*sequences] == [0, 1, 3]
    sequences = [*sequences.values()]
    assert [each.tokens.tolist() for each in sequences] == [
        [5, 6, 7, 1, 2],
        [5, 6, 7, 9, 8, 3, 2],
        [4, 2, 2, 2],
    ]
    assert [each.prompt_length for each in sequences] == [3, 3, 1]
    assert [each.staleness.tolist() for each in sequences] == [[2, 1], [1] * 4, [1] * 3]
    assert sequences[0].behavior_logprobs.tolist() == [-1.0, -2.0]
    assert sequences[1].mask.tolist() == [True, False, False, True]
    np.testing.assert_allclose(sequences[1].weights, [0.1, 0.0, 0.0, 0.1])
    assert [each.row_length for each in sequences] == [4, 6, 3]


@st.composite
def train_sequence(draw):
    """Random values, so that each can be found again."""
    prompt_length, length = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random(length) > 0.3
    return TrainSequence(
        tokens=rng.integers(0, 1000, prompt_length + length).astype(np.int32),
        prompt_length=prompt_length,
        weights=np.where(mask, rng.random(length), 0.0).astype(np.float32),
        mask=mask,
        behavior_logprobs=-rng.random(length).astype(np.float32),
        staleness=rng.integers(0, 5, length).astype(np.int32),
    )


SEQUENCES = st.lists(train_sequence(), min_size=1, max_size=8)


def pack_all(sequences, *, row_tokens, rows, packing, short_rows=()):
    return pack(
        sequences,
        row_tokens=row_tokens,
        rows_per_microbatch=rows,
        row_segments=ROW_SEGMENTS if packing else 1,
        short_rows=short_rows,
    )


def read_segments(batch):
    """What each segment of each row says, position by position."""
    for row in np.ndindex(batch.tokens.shape[:2]):
        fields = {}
        for place, segment in enumerate(batch.segment_ids[row]):
            if segment:
                fields.setdefault(int(segment), []).append(place)
        assert sorted(fields) == list(range(1, len(fields) + 1))
        for places in fields.values():
            assert places == list(range(places[0], places[-1] + 1))
            yield row, places


def as_read(packed, row, places):
    """(token, predicted token, weight, ...) of each position of a segment."""
    batch, sequence = packed
    return [
        (
            int(batch.positions[row][place]),
            int(batch.tokens[row][place]),
            int(batch.targets[row][place]),
            float(batch.weights[row][place]),
            bool(batch.mask[row][place]),
            float(batch.behavior_logprobs[row][place]),
            int(batch.staleness[row][place]),
            int(sequence[row][place]),
        )
        for place in places
    ]


def as_meant(number, sequence):
    """The same of a sequence: token i predicts token i + 1 of the completion."""
    lines = []
    for place in range(len(sequence.tokens) - 1):
        predicted = place + 1 - sequence.prompt_length  # place in the completion
        values = (0, 0.0, False, 0.0, 0, -1)
        if predicted >= 0:
            values = (
                int(sequence.tokens[place + 1]),
                float(sequence.weights[predicted]),
                bool(sequence.mask[predicted]),
                float(sequence.behavior_logprobs[predicted]),
                int(sequence.staleness[predicted]),
                number,
            )
        lines.append((place, int(sequence.tokens[place]), *values))
    return lines


@settings(deadline=None, max_examples=80)
@given(SEQUENCES, st.integers(11, 40), st.integers(1, 4), st.booleans())
def test_every_sequence_is_in_the_rows_exactly_once(
    sequences, row_tokens, rows, packing
):
    packed = pack_all(sequences, row_tokens=row_tokens, rows=rows, packing=packing)
    batch = packed.batch
    read = [as_read(packed, *segment) for segment in read_segments(batch)]
    assert sorted(read) == sorted(as_meant(*each) for each in enumerate(sequences))
    if not packing:
        assert batch.segment_ids.max() == 1


@settings(deadline=None, max_examples=80)
@given(SEQUENCES, st.sampled_from([12, 16, 40]), st.integers(1, 4), st.booleans())
def test_only_rows_of_the_last_microbatch_are_short(
    sequences, row_tokens, rows, packing
):
    quarters = [row_tokens * part // 4 for part in (1, 2, 3)]
    layout = dict(row_tokens=row_tokens, rows=rows, packing=packing)
    packed = pack_all(sequences, **layout, short_rows=quarters)
    read = [as_read(packed, *segment) for segment in read_segments(packed.batch)]
    assert sorted(read) == sorted(as_meant(*each) for each in enumerate(sequences))
    whole = pack_all(sequences, **layout).batch
    *others, most = packed.batch.row_ends.tolist()
    assert whole.row_ends is None and most in (*quarters, row_tokens)
    assert others == [row_tokens] * (len(whole.tokens) - 1)
    ids = packed.batch.segment_ids
    np.testing.assert_array_equal(ids[:-1], whole.segment_ids[:-1])
    assert not ids[-1, :, most:].any()
    if most == row_tokens:
        np.testing.assert_array_equal(ids, whole.segment_ids)
    # Where one row has all of a microbatch, the fewest quarters are known.
    *_, last = whole.segment_ids
    if rows == 1:
        used = int((last > 0).sum())
        assert most == next((each for each in quarters if each >= used), row_tokens)
    elif (room := most) > quarters[0]:
        # What fits in three quarters of the room could not be cut into shorter rows.
        used = (ids[-1] > 0).sum(axis=1)
        assert used.max() > room - quarters[0] or used.sum() > (rows - 1) * quarters[0]


@settings(deadline=None, max_examples=80)
@given(SEQUENCES, st.integers(11, 40), st.integers(1, 4), st.booleans())
def test_padding_is_empty_and_every_microbatch_is_filled(
    sequences, row_tokens, rows, packing
):
    packed = pack_all(sequences, row_tokens=row_tokens, rows=rows, packing=packing)
    batch = packed.batch
    padding = batch.segment_ids == 0
    assert (packed.sequence[padding] == -1).all()
    for name in ("weights", "mask", "advantages", "tokens", "targets", "positions"):
        assert not getattr(batch, name)[padding].any(), name
    filled = batch.segment_ids.any(axis=(1, 2))
    assert filled.all()
    total = sum(float(sequence.weights.sum()) for sequence in sequences)
    np.testing.assert_allclose(batch.weights.sum(), total, rtol=1e-5)


@settings(deadline=None, max_examples=80)
@given(SEQUENCES, st.integers(11, 40))
def test_packing_never_opens_a_row_that_was_not_needed(sequences, row_tokens):
    batch = pack_all(sequences, row_tokens=row_tokens, rows=1, packing=True).batch
    used = (batch.segment_ids[:, 0] > 0).sum(axis=1)
    # First fit: no two rows would fit into one.
    assert all(a + b > row_tokens for i, a in enumerate(used) for b in used[i + 1 :])


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "set", "ask"]), *[st.integers(-1, 9)] * 2),
        max_size=40,
    )
)
def test_the_first_place_with_room_is_that_of_a_plain_loop(calls):
    rooms, plain = Rooms(), []
    for call, one, other in calls:
        if call == "append":
            rooms.append(one)
            plain.append(one)
        elif call == "set" and plain:
            rooms[other % len(plain)] = plain[other % len(plain)] = one
        need, since = max(one, 0), max(other, 0)
        expected = (at for at in range(since, len(plain)) if plain[at] >= need)
        assert rooms.first(need, since=since) == next(expected, None)


def of_length(row_length):
    return TrainSequence(
        tokens=np.full(row_length + 1, row_length, np.int32),
        prompt_length=1,
        weights=np.ones(row_length, np.float32),
        mask=np.ones(row_length, bool),
        behavior_logprobs=np.zeros(row_length, np.float32),
        staleness=np.zeros(row_length, np.int32),
    )


def test_the_longest_go_first_into_the_first_row_with_room():
    packed = pack(
        [of_length(length) for length in (2, 7, 3, 5)],
        row_tokens=10,
        rows_per_microbatch=1,
    )
    assert packed.batch.tokens[:, 0].tolist() == [
        [7] * 7 + [3] * 3,
        [5] * 5 + [2] * 2 + [0] * 3,
    ]
    assert packed.sequence[:, 0].tolist() == [
        [1] * 7 + [2] * 3,
        [3] * 5 + [0] * 2 + [-1] * 3,
    ]
    of_sequences = laid_out(np.array([0.5, 1.5, 2.5, 3.5]), packed.sequence)
    assert of_sequences[:, 0].tolist() == [
        [1.5] * 7 + [2.5] * 3,
        [3.5] * 5 + [0.5] * 2 + [0.0] * 3,
    ]


def test_short_rows_are_the_shortest_with_room_by_hand():
    sequences = [of_length(length) for length in (12, 10, 9, 7, 6, 6, 4, 1)]
    layout = dict(row_tokens=24, rows_per_microbatch=2)
    whole, short = (
        pack(sequences, **layout, short_rows=each).batch for each in ((), (6, 12, 18))
    )
    assert whole.tokens[1].tolist() == [[6] * 6 + [4] * 4 + [0] * 14, [0] * 24]
    assert short.tokens[1].tolist() == [[6] * 6 + [0] * 18, [4] * 4 + [0] * 20]
    assert whole.row_ends is None and short.row_ends.tolist() == [24, 6]
    # A row takes one sequence, and three are left: two rows have no room for them.
    one_each = dict(row_segments=1, short_rows=(6, 12, 18))
    batch = pack(sequences[:7], **layout, **one_each).batch
    assert batch.row_ends.tolist() == [24, 24, 24, 6]
    twice = [sequences[0], of_length(20)]
    layout["short_rows"] = (6, 12, 18)
    assert pack(twice, **layout).batch.row_ends.tolist() == [24]
    assert pack([], **layout).batch.row_ends.tolist() == []


def test_a_rollout_longer_than_a_row_is_refused():
    (sequence,) = train_sequences(
        GROUPS[:1], weights=np.array([[0.0] * 5, [1.0] * 5]), learner_version=4
    ).values()
    pack([sequence], row_tokens=6, rows_per_microbatch=1)
    with pytest.raises(ValueError, match=r"7 tokens .* batch.row_tokens = 5"):
        pack([sequence], row_tokens=5, rows_per_microbatch=1)


def test_a_row_has_no_more_segments_than_attention_can_be_told_of():
    batch = pack([of_length(1)] * 300, row_tokens=400, rows_per_microbatch=2).batch
    assert batch.segment_ids.max(axis=-1).tolist() == [[128, 128], [44, 0]]


def test_the_shapes_of_a_microbatch_are_those_that_are_packed():
    shapes = dict(row_tokens=10, rows_per_microbatch=2)
    batch = pack([of_length(7)] * 5, **shapes).batch
    assert batch.tokens.shape == (3, 2, 10)
    described = jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_microbatch(**shapes)
    )
    assert described == jax.tree.map(lambda leaf: (leaf[0].shape, leaf.dtype), batch)
