"""What ranks are sent of batches: each its own rows, once, and all of what it reads."""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small_mesh import mesh_of

from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.cluster.batch_parts import HeldBatches, SentBatches, arrays_of
from scalerl_jax.learner.forward import read_forward
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.parallel.multihost import OwnPart, first_tokens, own_box

SHAPE = StreamShape(
    rows=2, row_tokens=256, shared_tokens=64, own_tokens=384, group_size=4
)


def make_sequences():
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 99, (10, 8)).astype(np.int32)
    return [
        TrainSequence(
            tokens=np.append(prompt, rng.integers(0, 99, length)).astype(np.int32),
            prompt_length=len(prompt),
            weights=rng.random(length).astype(np.float32),
            mask=np.ones(length, bool),
            behavior_logprobs=rng.random(length).astype(np.float32),
            staleness=np.zeros(length, np.int32),
        )
        for prompt in prompts
        for length in rng.integers(30, 200, 4)
    ]


def scored(batch):
    """The batch as it goes to the step, and the scores that ranks have made of it."""
    rng = np.random.default_rng(1)
    made = {"reference": rng.random(batch.weights.shape).astype(np.float32)}
    advantages = rng.random(batch.weights.shape).astype(np.float32)
    return batch.replace(advantages=advantages, scores=made), made


BATCHES = {
    "rows": lambda: pack(make_sequences(), row_tokens=256, rows_per_microbatch=8).batch,
    "streams": lambda: pack_shared(make_sequences(), SHAPE, streams=4).batch,
}


class Gang:
    """Ranks with equal shares of eight devices, and the way to them, which counts."""

    def __init__(self, batch, *, shape, ranks):
        self.sharding = batch_sharding(mesh_of(shape))
        each = 8 // ranks
        devices = jax.devices()
        self.devices = [
            devices[rank * each : (rank + 1) * each] for rank in range(ranks)
        ]
        like = scored(batch)[0]
        self.sent, self.held = SentBatches(), []
        self.start(like)

    def start(self, like):
        self.sent.meet(
            [
                {
                    name: own_box(array.shape[1:], self.sharding, devices)
                    for name, array in arrays_of(like).items()
                    if array.ndim > 1
                }
                for devices in self.devices
            ]
        )
        self.held = [HeldBatches() for _ in self.devices]

    def send(self, batch):
        """What each rank then has, and the bytes that went to all of them."""
        messages = [pickle.dumps(parts) for parts in self.sent.parts(batch)]
        parts = [pickle.loads(message) for message in messages]
        found = [held.take(each) for held, each in zip(self.held, parts, strict=True)]
        return found, parts, sum(map(len, messages))

    def assert_whole(self, found, batch):
        """Every device of every rank reads the numbers of the batch itself."""
        for devices, own in zip(self.devices, found, strict=True):
            theirs = arrays_of(own)
            assert theirs.keys() == arrays_of(batch).keys()
            for name, array in arrays_of(batch).items():
                for number, microbatch in enumerate(array):
                    places = self.sharding.devices_indices_map(microbatch.shape)
                    for device in devices:
                        there = theirs[name][number][places[device]]
                        assert there.dtype == array.dtype
                        np.testing.assert_array_equal(there, microbatch[places[device]])


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    "shape, ranks",
    [
        pytest.param((1, 4, 2, 1), 4, id="rows apart, and halves of them on a rank"),
        pytest.param((2, 4, 1, 1), 8, id="a row of each microbatch"),
        pytest.param((1, 2, 4, 1), 4, id="halves of rows apart"),
        pytest.param((2, 4, 1, 1), 1, id="alone"),
    ],
)
def test_scores_and_step_move_one_batch_over_all_ranks_together(kind, shape, ranks):
    if kind == "streams" and shape != (1, 4, 2, 1):
        pytest.skip("four streams, on four shards of rows")
    batch = BATCHES[kind]()
    gang = Gang(batch, shape=shape, ranks=ranks)
    whole, made = scored(batch)
    read = read_forward(batch)
    found, parts, for_scores = gang.send(read)
    gang.assert_whole(found, read)
    gang.sent.made(read, made)
    for held, each in zip(gang.held, parts, strict=True):
        held.made([each], [made])
    found, _, for_step = gang.send(whole)
    gang.assert_whole(found, whole)
    back = len(pickle.dumps(made))  # of one rank
    assert for_scores + for_step + back <= 1.1 * len(pickle.dumps(whole))
    # A second epoch, whose tokens are older, and the same batch once more.
    older = whole.replace(staleness=whole.staleness + 1)
    found, _, again = gang.send(older)
    gang.assert_whole(found, older)
    assert again <= 1.1 * len(pickle.dumps(whole.staleness)) + 2000 * ranks
    assert gang.sent.num_bytes <= for_scores + for_step + back + again
    assert gang.sent.num_bytes >= 0.9 * (for_scores + for_step + back + again)


def test_what_ranks_have_ends_with_them_and_with_the_window():
    batch = BATCHES["rows"]()
    gang = Gang(batch, shape=(1, 4, 2, 1), ranks=4)
    whole, _ = scored(batch)
    _, _, first = gang.send(whole)
    _, _, nothing = gang.send(whole)
    assert nothing < first / 20
    gang.start(whole)  # others in their place
    found, _, again = gang.send(whole)
    assert abs(again - first) < 100
    gang.assert_whole(found, whole)
    gang.sent.begin()
    found, _, again = gang.send(whole)
    assert abs(again - first) < 100
    gang.assert_whole(found, whole)
    # Two batches of one window are kept apart.
    other = whole.replace(tokens=whole.tokens + 1)
    found, _, _ = gang.send(other)
    gang.assert_whole(found, other)
    found, _, nothing = gang.send(whole)
    gang.assert_whole(found, whole)
    assert nothing < first / 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_cut_short_rows_from_their_own_part(ranks):
    quarters = dict(row_tokens=256, rows_per_microbatch=8, short_rows=(64, 128, 192))
    batch = pack(make_sequences()[:24], **quarters).batch
    most = int(batch.row_ends[-1])
    assert most in (64, 128, 192)
    gang = Gang(batch, shape=(2, 4, 1, 1), ranks=ranks)
    found, _, _ = gang.send(scored(batch)[0])
    for devices, own in zip(gang.devices, found, strict=True):
        np.testing.assert_array_equal(own.row_ends, batch.row_ends)
        cut, whole = first_tokens(own.tokens[-1], most), batch.tokens[-1, :, :most]
        assert cut.shape == whole.shape
        places = gang.sharding.devices_indices_map(cut.shape)
        for device in devices:
            np.testing.assert_array_equal(cut[places[device]], whole[places[device]])


def test_a_part_never_passes_for_the_array():
    part = OwnPart(part=np.ones((3, 2, 4)), starts=(0, 2, 0), shape=(3, 4, 4))
    assert len(part) == 3 and part[1].shape == (4, 4)
    assert part[np.array([0, 2])].shape == (2, 4, 4)
    with pytest.raises(TypeError, match="a part of"):
        np.asarray(part)
    with pytest.raises(AssertionError, match="other processes"):
        part[1][slice(1, 3), slice(None)]
    assert own_box((4, 6), batch_sharding(mesh_of((1, 1, 1, 1)))) == ((0, 4), (0, 6))
    spec = jax.NamedSharding(mesh_of((2, 2, 2, 1)), PartitionSpec("context"))
    assert own_box((4, 6), spec, jax.devices()[:1]) == ((0, 2), (0, 6))
