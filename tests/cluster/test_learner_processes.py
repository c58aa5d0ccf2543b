"""What replicas get of a learner over processes, which may start again."""

import pytest
import small_weights
from memory_channel import MemoryChannel
from small_weights import assert_is_version, layout, mesh, published

from scalerl_jax.weights.receiving import Receiver
from scalerl_jax.weights.sending import Sender

pytest.importorskip("ray")
from scalerl_jax.cluster.learner_processes import WeightsOf  # noqa: E402


class Learner:
    """A rank that publishes versions, and may be followed by another one."""

    def __init__(self):
        self.channel = MemoryChannel()
        self.start()

    def start(self):
        for reference in list(self.channel):
            self.channel.discard(reference)
        self.sender = Sender(rank=0, num_ranks=1, channel=self.channel, base_every=3)

    def publish(self, version):
        shards = small_weights.shards(version, mesh(0, 1))
        self.last = published(self.sender.send(shards, policy_version=version))


def test_a_version_that_restarted_processes_publish_as_deltas_is_had_in_full():
    learner = Learner()
    for version in range(4):
        learner.publish(version)  # 0 and 3 in full
    weights = WeightsOf(
        policy_version=3,
        manifest=lambda: learner.last,
        whole=lambda: published(learner.sender.send_again()),
    )
    assert weights.for_replica(0, -1) == learner.last
    learner.start()
    for version in (2, 3):  # from the checkpoint of step 2
        learner.publish(version)
    assert learner.last.base_version == 2
    newcomer = Receiver(learner.channel, layout(mesh(0, 1)))
    assert_is_version(newcomer.receive(weights.for_replica(0, -1), timeout_s=1.0), 3)
    for held in (2, 3):
        assert weights.for_replica(0, held) == learner.last
