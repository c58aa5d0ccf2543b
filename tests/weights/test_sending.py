"""Versions from sender to receiver: the same bits in any layout, or the old ones."""

import dataclasses
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_processes
import small_weights
from memory_channel import MemoryChannel
from small_weights import (
    ARCH,
    assert_is_version,
    layout,
    learner_params,
    mesh,
    published,
)

from scalerl_jax.learner.publish import make_snapshot
from scalerl_jax.model.architecture import sampler_layout
from scalerl_jax.model.transformer import make_lay_out
from scalerl_jax.weights.channels import (
    DirectoryChannel,
    FullChannelError,
)
from scalerl_jax.weights.manifest import Manifest, merge
from scalerl_jax.weights.receiving import NotReceivedError, Receiver
from scalerl_jax.weights.sending import Sender
from scalerl_jax.weights.shards import own_shards


def make_sender(channel, **options):
    return Sender(rank=0, num_ranks=1, channel=channel, **options)


class Pair:
    """A learner's sender and a replica's receiver, joined by a channel."""

    def __init__(self, channel=None, **options):
        self.channel = MemoryChannel() if channel is None else channel
        self.learner, self.replica = mesh(0, 4, fsdp=4), mesh(4, 6, tensor=2)
        self.sender = make_sender(self.channel, **options)
        self.receiver = Receiver(self.channel, layout(self.replica))

    def publish(self, version, **options):
        shards = small_weights.shards(version, self.learner)
        return published(self.sender.send(shards, policy_version=version, **options))

    def pass_on(self, version, **options):
        return self.receiver.receive(self.publish(version, **options), timeout_s=10.0)


LAYOUTS = {
    "one to one": ((0, 1), {}, (0, 1), {}),
    "fsdp to tensor": ((0, 4), dict(fsdp=4), (4, 6), dict(tensor=2)),
    "both to tensor": ((0, 4), dict(fsdp=2, tensor=2), (4, 8), dict(tensor=4)),
    "copies to one": ((0, 8), dict(data=2, fsdp=2, tensor=2), (3, 4), {}),
    "tensor to fewer": ((0, 4), dict(tensor=4), (0, 2), dict(tensor=2)),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_params_arrive_bit_for_bit_in_the_layout_of_the_replica(case):
    learner, axes, replica, others = LAYOUTS[case]
    channel, on = MemoryChannel(), mesh(*replica, **others)
    shards = small_weights.shards(1, mesh(*learner, **axes))
    boxes = [shard.box for shard in shards]
    assert len(set(boxes)) == len(boxes)
    part = make_sender(channel).send(shards, policy_version=1)
    params = Receiver(channel, layout(on)).receive(published(part))
    assert_is_version(params, 1)
    jax.tree.map(
        lambda leaf, wanted: np.testing.assert_(leaf.sharding == wanted.sharding),
        params,
        layout(on),
    )


def test_a_snapshot_has_memory_of_its_own():
    on = mesh(0, 1)
    params = learner_params(0, on)
    snapshot = make_snapshot(ARCH, dtype=np.dtype("float32"), learner_mesh=on)(params)
    addresses = [
        {
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        }
        for tree in (params, snapshot)
    ]
    assert not addresses[0] & addresses[1]


def test_a_chain_of_deltas_gives_each_version(tmp_path):
    pair = Pair(DirectoryChannel(tmp_path, owner="rank0"), base_every=3)
    for version, base in enumerate([None, 0, 1, None, 3, 4, None]):
        publication = pair.publish(version)
        assert publication.base_version == base
        assert_is_version(pair.receiver.receive(publication), version)
        sent, received = pair.sender.report, pair.receiver.report
        assert (sent.policy_version, sent.base_version) == (version, base)
        assert received.num_bytes == sent.num_bytes
        if base is None:
            assert sent.num_bytes == sent.full_bytes == 2 * ARCH.num_params
            assert sent.changed_share is None
        else:
            assert sent.num_bytes < 0.5 * sent.full_bytes
            assert 0.05 < sent.changed_share < 0.15


def test_matrices_in_int8_arrive_and_follow_as_deltas():
    learner, replica = mesh(0, 4, fsdp=2, tensor=2), mesh(4, 6, tensor=2)
    form = dict(dtype=small_weights.BFLOAT16, weights_dtype="int8")
    snapshot = make_snapshot(ARCH, learner_mesh=learner, **form)
    channel = MemoryChannel()
    sender = make_sender(channel)
    receiver = Receiver(channel, sampler_layout(ARCH, mesh=replica, **form))
    for version in (0, 1):
        shards = own_shards(snapshot(learner_params(version, learner)))
        part = published(sender.send(shards, policy_version=version))
        params = receiver.receive(part, timeout_s=10.0)
        own = jax.tree.map(jnp.asarray, small_weights.host_params(version))
        expected = make_lay_out(ARCH, **form)(own)
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        assert params["layers"][0]["query"].values.dtype == np.int8
    assert sender.report.base_version == 0
    assert sender.report.full_bytes < 1.5 * ARCH.num_params


class SharedMemory(MemoryChannel):
    """Hands out memory that others read too, as an object store does."""

    def fetch(self, reference, *, num_bytes, timeout_s):
        super().fetch(reference, num_bytes=num_bytes, timeout_s=timeout_s)
        views = [buffer.view() for buffer in self._objects[reference]]
        for view in views:
            view.flags.writeable = False
        return views


def test_a_channel_may_hand_out_memory_that_nobody_may_change():
    pair = Pair(SharedMemory())
    for version in range(3):
        assert_is_version(pair.pass_on(version), version)


def test_the_last_two_publications_and_the_anchor_are_kept():
    pair = Pair(base_every=10)
    kept = []
    for version in range(5):
        publication = pair.publish(version)
        kept.append(list(publication.objects))
    assert list(pair.channel) == [*kept[0], *kept[3], *kept[4]]
    last = pair.publish(5, full=True)
    references = list(last.objects)
    assert list(pair.channel) == [*kept[4], *references]


def test_a_pinned_version_is_kept_until_the_next_such_one():
    pair = Pair(base_every=3)
    kept = []
    for version in range(6):
        publication = pair.publish(version, pinned=version in (1, 4))
        kept.append(list(publication.objects))
        assert (publication.base_version is None) == (version in (0, 1, 4))
    assert list(pair.channel) == [*kept[4], *kept[5]]
    pair = Pair(base_every=2)
    kept = []
    for version in range(6):
        publication = pair.publish(version, pinned=version == 1)
        kept.append(list(publication.objects))
    assert list(pair.channel) == [*kept[1], *kept[4], *kept[5]]


def test_large_data_are_cut_into_objects():
    pair = Pair(object_bytes=1000)
    publication = pair.publish(0)
    sizes = [
        sum(shard.num_bytes for shard in shards)
        for shards in publication.objects.values()
    ]
    assert len(sizes) > 3
    assert all(1000 <= size < 3000 for size in sizes[:-1])
    assert_is_version(pair.receiver.receive(publication), 0)


def test_a_newcomer_asks_for_a_full_version():
    pair = Pair()
    pair.pass_on(0)
    newcomer = Receiver(pair.channel, layout(pair.replica))
    publication = pair.publish(1)
    assert newcomer.needs_full(publication)
    assert not pair.receiver.needs_full(publication)
    with pytest.raises(NotReceivedError, match="version 1 .* version 0 and None is"):
        newcomer.receive(publication)
    publication = pair.publish(2, full=True)
    assert not newcomer.needs_full(publication)
    assert_is_version(newcomer.receive(publication), 2)
    assert_is_version(newcomer.receive(pair.publish(3)), 3)


def test_the_last_version_is_published_once_more_for_a_newcomer():
    pair = Pair()
    assert pair.publish(0).to_json() == merge([pair.sender.send_again()]).to_json()
    pair.pass_on(1, full=True)
    pair.pass_on(2)
    newcomer = Receiver(pair.channel, layout(pair.replica))
    again = published(pair.sender.send_again())
    assert (again.policy_version, again.base_version) == (2, None)
    assert_is_version(newcomer.receive(again), 2)
    assert pair.sender.send_again() == again  # and nothing more is put
    following = pair.publish(3)
    for receiver in (newcomer, pair.receiver):
        assert_is_version(receiver.receive(following), 3)
    references = list(again.objects)
    pair.publish(4)
    # Beside the last two it, and the anchor before.
    assert len(list(pair.channel)) == 4
    assert set(references) <= set(pair.channel)


def test_newcomers_do_not_take_each_other_s_full_versions_away():
    pair = Pair(base_every=8)
    for version in range(5):
        pair.publish(version)
    first = published(pair.sender.send_again())
    pair.publish(5)
    second = published(pair.sender.send_again())  # of another one, a step later
    pair.publish(6)
    pair.publish(7)
    for publication in (first, second):
        newcomer = Receiver(pair.channel, layout(pair.replica))
        params = newcomer.receive(publication, timeout_s=1.0)
        assert_is_version(params, publication.policy_version)
    pair.publish(8)  # full
    assert set(second.objects) <= set(pair.channel)
    assert not set(first.objects) & set(pair.channel)
    for version in range(9, 17):
        pair.publish(version)
    assert len(list(pair.channel)) == 2  # the last is full


def test_who_missed_a_version_asks_for_a_full_one_and_goes_on_with_it():
    pair = Pair()
    pair.pass_on(0)
    skipped = pair.publish(1)
    late = pair.publish(2)
    assert pair.receiver.needs_full(late)
    with pytest.raises(NotReceivedError, match="against version 1 and 0 is held"):
        pair.receiver.receive(late)
    # Two publications are kept: the one that was missed still is there.
    assert_is_version(pair.receiver.receive(skipped), 1)
    assert_is_version(pair.receiver.receive(late), 2)


def test_without_a_base_every_version_must_be_full():
    pair = Pair()
    receiver = Receiver(pair.channel, layout(pair.replica), keep_base=False)
    assert_is_version(receiver.receive(pair.publish(0)), 0)
    assert receiver.needs_full(pair.publish(1))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "fault, words",
    [("torn", "checksum 0x|shard"), ("late", "not there"), ("missing", "not there")],
)
def test_a_version_that_does_not_arrive_leaves_the_one_before(fault, words, full):
    pair = Pair(object_bytes=1000)
    before = pair.pass_on(0)
    publication = pair.publish(1, full=full)
    reference = list(publication.objects)[-1]
    pair.channel.faults[reference] = fault
    with pytest.raises(NotReceivedError, match=words) as failure:
        pair.receiver.receive(publication, timeout_s=0.05)
    for word in ("params of version 1", "shard layers/", "0 stays in use"):
        assert word in str(failure.value)
    assert pair.receiver.policy_version == 0
    assert pair.receiver.report.policy_version == 0
    assert_is_version(before, 0)
    pair.channel.mend(reference)
    assert_is_version(pair.receiver.receive(publication), 1)


def test_a_version_that_is_late_arrives_when_it_comes():
    pair = Pair()
    publication = pair.publish(0)
    reference = next(iter(publication.objects))
    pair.channel.faults[reference] = "late"
    timer = threading.Timer(0.05, lambda: pair.channel.mend(reference))
    timer.start()
    assert_is_version(pair.receiver.receive(publication, timeout_s=30.0), 0)
    timer.join()


def test_a_flipped_bit_anywhere_in_a_file_is_found(tmp_path):
    pair = Pair(DirectoryChannel(tmp_path, owner="rank0"))
    pair.pass_on(0)
    publication = pair.publish(1)
    (stored,) = publication.objects
    content = (tmp_path / stored).read_bytes()
    rng = np.random.default_rng(0)
    first = 16 + 8 * len(
        publication.shards
    )  # the rest of a header is found by its sizes
    sizes = [-(-each.num_bytes // 64) * 64 for each in publication.shards]
    starts = -(-first // 64) * 64 + np.cumsum([0, *sizes])
    for place in rng.integers(len(sizes), size=20):
        size = publication.shards[place].num_bytes
        at = int(starts[place] + rng.integers(size))
        torn = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (tmp_path / stored).write_bytes(torn)
        with pytest.raises(NotReceivedError, match="shard"):
            pair.receiver.receive(publication)
    (tmp_path / stored).write_bytes(content)
    assert_is_version(pair.receiver.receive(publication), 1)


def test_objects_that_changed_places_are_found():
    pair = Pair(object_bytes=1)
    pair.pass_on(0)
    manifest = pair.publish(1, full=True)
    norms = [
        number
        for number, shard in enumerate(manifest.shards)
        if shard.leaf.endswith("up") and shard.start == (0, 0)
    ]
    shards = list(manifest.shards)
    first, second = norms[:2]
    there = [shards[number].reference for number in (first, second)]
    for number, reference in zip((second, first), there, strict=True):
        shards[number] = dataclasses.replace(shards[number], reference=reference)
    mixed = merge([dataclasses.replace(manifest, shards=tuple(shards))])
    with pytest.raises(NotReceivedError, match="up.* has checksum"):
        pair.receiver.receive(mixed)


def test_a_publication_of_another_model_is_refused():
    pair = Pair()
    manifest = pair.publish(0)
    other = small_weights.with_shards(
        manifest,
        lambda shard: dataclasses.replace(
            shard, leaf=shard.leaf.replace("final_norm", "other_norm")
        ),
    )
    with pytest.raises(NotReceivedError, match="leaf final_norm is published as None"):
        pair.receiver.receive(merge([other]))


def test_shards_that_were_cut_anew_are_sent_in_full():
    pair = Pair()
    pair.pass_on(0)
    other = small_weights.shards(1, mesh(0, 2, tensor=2))
    publication = published(pair.sender.send(other, policy_version=1))
    forms = {shard.form for shard in publication.shards if "up" in shard.leaf}
    assert forms == {"full"}
    assert_is_version(pair.receiver.receive(publication), 1)


def test_a_full_channel_publishes_nothing_and_changes_nothing():
    channel = MemoryChannel(capacity=3 * ARCH.num_params)
    pair = Pair(channel, object_bytes=1000, base_every=1)
    pair.pass_on(0)
    before = list(channel)
    with pytest.raises(FullChannelError, match="of v00000001"):
        pair.publish(1)
    assert list(channel) == before
    channel.capacity = None
    assert_is_version(pair.pass_on(1), 1)


def test_two_publications_and_the_anchor_are_all_that_a_channel_must_hold():
    pair = Pair(MemoryChannel(capacity=4 * ARCH.num_params), base_every=1)
    for version in range(4):
        assert_is_version(pair.pass_on(version), version)


def test_a_version_that_does_not_follow_is_refused():
    pair = Pair()
    pair.publish(1)
    with pytest.raises(ValueError, match="policy_version = 1 does not follow 1"):
        pair.publish(1)


@pytest.mark.parametrize("bits_of", [1, 2])
def test_a_version_of_a_restored_learner_is_fetched_if_it_has_other_bits(bits_of):
    pair = Pair()
    pair.pass_on(1)
    pair.sender = make_sender(pair.channel)
    shards = small_weights.shards(bits_of, pair.learner)
    again = published(pair.sender.send(shards, policy_version=1))
    assert_is_version(pair.receiver.receive(again), bits_of)


def test_ranks_whose_bases_differ_are_asked_for_a_full_version():
    channel, on = MemoryChannel(), mesh(0, 2, fsdp=2)
    senders = [Sender(rank=rank, num_ranks=2, channel=channel) for rank in (0, 1)]

    def send(rank, version, **options):
        halves = small_weights.shards(version, on)
        own = [shard for shard in halves if (max(shard.box.start) > 0) == rank]
        return senders[rank].send(own, policy_version=version, **options)

    receiver = Receiver(channel, layout(mesh(4, 6, tensor=2)))
    assert_is_version(receiver.receive(published(send(0, 0), send(1, 0))), 0)
    send(0, 1)  # the other rank could not
    with pytest.raises(ValueError, match=r"base_version by ranks .* full=True"):
        published(send(0, 2), send(1, 2))
    parts = [send(rank, 3, full=True) for rank in (0, 1)]
    assert_is_version(receiver.receive(published(*parts)), 3)


@pytest.mark.slow  # several processes
def test_two_processes_publish_each_shard_once_and_their_params_arrive(tmp_path):
    processes = small_processes.start("publish", tmp_path)
    for process in processes:
        status, _, errors = small_processes.finish(process, timeout_s=200)
        assert status == 0, errors
    for number, _ in enumerate(small_weights.LEARNERS):
        channel = DirectoryChannel(tmp_path / f"weights{number}")
        receiver = Receiver(channel, layout(mesh(4, 6, tensor=2)))
        for version in range(3):
            parts = [
                Manifest.from_json(
                    (tmp_path / f"{number}-{version}-{rank}").read_bytes()
                )
                for rank in (0, 1)
            ]
            # Of copies in both processes the first one sends all.
            assert bool(parts[1].shards) == (number == 0)
            assert_is_version(receiver.receive(published(*parts)), version)
            assert (receiver.report.base_version is None) == (version == 0)


def test_the_code_of_the_page_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text()
    code = re.search(r"## Weights.*?```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(code.replace("print(", "told = ("), found)
    assert found["told"] == 0
    np.testing.assert_array_equal(
        found["params"]["embedding"],
        found["learned"]["embedding"].astype(found["dtype"]),
    )
