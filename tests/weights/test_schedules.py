"""Any schedule of versions, losses, newcomers and restarts: exact bits or the old ones.

Two ranks and some replicas over one channel, with a leaf so small that a schedule of
fifty events takes no time.
"""

import pickle

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from memory_channel import MemoryChannel

from scalerl_jax.weights.manifest import Manifest, merge
from scalerl_jax.weights.receiving import NotReceivedError, Receiver
from scalerl_jax.weights.sending import Sender
from scalerl_jax.weights.shards import Region, Shard

SHAPE, RANKS, BASE_EVERY = (6, 100), 2, 4
HALVES = [Region(leaf="up", start=(0, 0), stop=(3, 100))]
HALVES += [Region(leaf="up", start=(3, 0), stop=(6, 100))]


class Replica:
    """A receiver, and the params in use with the bits that they had."""

    def __init__(self, channel):
        where = SingleDeviceSharding(jax.devices()[0])
        leaf = jax.ShapeDtypeStruct(SHAPE, ml_dtypes.bfloat16, sharding=where)
        self.receiver = Receiver(channel, {"up": leaf}, threads=1)
        self.params, self.bits = None, None

    def receive(self, publication, truth):
        """Return whether the version came; if not, all is as it was."""
        version = self.receiver.policy_version
        try:
            params = self.receiver.receive(publication, timeout_s=0.0)
        except NotReceivedError as error:
            assert f"version {publication.policy_version} were not" in str(error)
            assert self.receiver.policy_version == version
            came = False
        else:
            self.params, self.bits, came = params, truth.copy(), True
            assert self.receiver.policy_version == publication.policy_version
        if self.params is not None:
            found = np.asarray(self.params["up"]).view(np.uint16)
            np.testing.assert_array_equal(found, self.bits)
        return came


class World:
    """The learner's ranks, the channel, and whoever receives."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.channel = MemoryChannel()
        self.truth = self.rng.integers(0, 2**16, SHAPE, np.uint16)
        self.version = 0
        self.replicas = [Replica(self.channel)]
        self.restart()

    def restart(self):
        """New senders; objects of the old ones are gone with their processes."""
        for reference in self.channel:
            self.channel.discard(reference)
        self.senders = [
            Sender(
                rank=rank,
                num_ranks=RANKS,
                channel=self.channel,
                base_every=BASE_EVERY,
                object_bytes=1,
                threads=1,
            )
            for rank in range(RANKS)
        ]

    def step(self):
        changed = self.rng.random(SHAPE) < self.rng.choice([0.0, 0.02, 1.0])
        new = self.rng.integers(0, 2**16, SHAPE, np.uint16)
        self.truth = np.where(changed, new, self.truth)
        self.version += 1

    def publish(self, **options):
        self.step()
        parts = []
        for rank, half in enumerate(HALVES):
            rows = slice(half.start[0], half.stop[0])
            values = self.truth[rows].view(ml_dtypes.bfloat16)
            shard = Shard(box=half, shape=SHAPE, values=values)
            sender = self.senders[rank]
            parts.append(sender.send([shard], policy_version=self.version, **options))
        return self.merged(parts)

    def merged(self, parts):
        found = merge([pickle.loads(pickle.dumps(part)) for part in parts])
        return Manifest.from_json(found.to_json())

    def lose(self, publication, fault):
        references = list(publication.objects)
        reference = references[self.rng.integers(len(references))]
        self.channel.faults[reference] = fault
        return reference


EVENTS = ["delta"] * 4 + ["full", "again", "torn", "missing", "newcomer", "miss"]
EVENTS += ["restart"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), events=st.lists(st.sampled_from(EVENTS)))
def test_a_replica_has_the_bits_of_a_version_or_those_before(seed, events):
    world = World(seed)
    world.replicas[0].receive(world.publish(), world.truth)
    for event in events:
        if event == "newcomer":
            world.replicas.append(Replica(world.channel))
            continue
        if event == "restart":  # from a checkpoint of some versions before
            world.restart()
            world.version = max(world.version - 2, 0)
        publication = (
            world.merged([sender.send_again() for sender in world.senders])
            if event == "again"
            else world.publish(full=event == "full")
        )
        told = world.replicas[1:] if event == "miss" else world.replicas
        lost = event in ("torn", "missing") and world.lose(publication, event)
        for replica in told:
            needed = replica.receiver.needs_full(publication)
            came = replica.receive(publication, world.truth)
            assert not (came and needed)
            if event in ("full", "again", "restart"):
                assert came
        if lost:  # a second try has what the first one lacked
            world.channel.mend(lost)
            for replica in told:
                needed = replica.receiver.needs_full(publication)
                assert replica.receive(publication, world.truth) != needed
        # Two publications and two anchors, of each rank.
        assert len(list(world.channel)) <= 4 * RANKS
    for replica in world.replicas:
        assert replica.receive(world.publish(full=True), world.truth)


def test_a_base_of_the_same_version_and_other_bits_is_noticed():
    world = World(0)
    replica = world.replicas[0]
    assert replica.receive(world.publish(), world.truth)
    world.restart()
    world.version -= 1
    world.truth ^= 1
    other = world.publish()  # the same version again, which the replica is not told
    assert other.policy_version == replica.receiver.policy_version
    world.rng = np.random.default_rng(3)  # a delta of few values
    delta = world.publish()
    assert {shard.form for shard in delta.shards} == {"delta"}
    assert not replica.receiver.needs_full(delta)
    with pytest.raises(NotReceivedError, match="checksum"):
        replica.receiver.receive(delta)
