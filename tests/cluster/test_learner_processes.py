"""What replicas get of a learner over processes, which may start again."""

import dataclasses
import types

import pytest
import small_weights
from memory_channel import MemoryChannel
from small_weights import assert_is_version, layout, mesh, published

from scalerl_jax.config import Config
from scalerl_jax.weights.receiving import Receiver
from scalerl_jax.weights.sending import Sender

pytest.importorskip("ray")
from scalerl_jax.cluster.calls import RoleLost
from scalerl_jax.cluster.kept_batches import KeptBatches
from scalerl_jax.cluster.learner_processes import (
    LearnerProcesses,
    WeightsOf,
)


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


class LosesRanks(LearnerProcesses):
    """A learner some of whose calls lose its ranks, which are not really there."""

    def __init__(self, *lost, kept=None, files=None):
        self.lost = [*lost]  # numbers of calls
        self.calls, self.failures = [], []
        super().__init__(
            Config(),
            "",
            cluster=None,
            files=files,
            kept=kept or KeptBatches(None, limit_bytes=1e9),
            note=lambda text: None,
            before_save=lambda: None,
            fail=self.failures.append,
        )

    def _start(self):
        self.calls.append("start")

    def _ask(self, method, *arguments, each=None):
        self.calls.append(method)
        if len(self.calls) in self.lost:
            raise RoleLost("a machine is gone")
        return [(100, {}, ()) if method == "restore" else method]


def test_a_process_may_be_lost_while_a_run_resumes_and_after_that():
    learner = LosesRanks(2, 5)
    restored = learner.restore()
    assert (restored.step, learner.version, learner.restarts) == (100, 100, 1)
    assert learner.calls == ["start", "restore", "start", "restore"]
    assert learner.call("score") == ["score"]
    assert learner.calls[4:] == ["score", "start", "restore", "score"]
    assert learner.restarts == 2


def test_ranks_that_end_between_two_calls_are_replaced_once_and_not_for_ever():
    learner = LosesRanks(3, *range(8, 100))
    learner.restore()
    ranks = learner._ranks
    for _ in range(2):  # the second time others are in their place
        learner._replace_ended(ranks)
    again = ["versions", "start", "restore", "versions"]
    assert learner.calls == ["start", "restore", *again]
    assert (learner.restarts, learner.failures) == (1, [])
    learner.call("score")
    learner._replace_ended(learner._ranks)
    (failure,) = learner.failures
    assert str(failure).startswith("the learner was lost 6 times in a row, more than")


def test_batches_are_kept_while_a_damaged_checkpoint_of_the_step_is_written_again():
    kept = KeptBatches(None, limit_bytes=1e9)
    on_disk = types.SimpleNamespace(steps=lambda: [100, 110])  # 110 is damaged
    learner = LosesRanks(kept=kept, files=on_disk)
    assert learner.restore().step == 100
    made_of = types.SimpleNamespace(
        version=100, groups=[types.SimpleNamespace(ticket=0)]
    )
    kept._batches[100, 0] = None  # private: it is not packed again here
    for version in range(100, 110):
        kept.add(None, made_of, version=version)
    learner.save(110, 110, host={}, groups=())
    assert kept.has_all_since(100)  # for a rank that is lost now
    learner.save(120, 120, host={}, groups=())  # once 110 is complete
    assert kept.has_all_since(110) and not kept.has_all_since(100)


def test_params_whose_objects_ended_with_their_ranks_are_not_sent():
    learner, ranks = Learner(), LosesRanks()
    learner.publish(0)
    in_files = learner.last
    in_store = dataclasses.replace(in_files, handles={"an object": None})
    for up in (True, False):
        ranks._up = up
        for each, expected in ((in_files, in_files), (in_store, up and in_store)):
            weights = WeightsOf(
                policy_version=0,
                manifest=lambda each=each: ranks._reachable(each),
                whole=lambda: None,
            )
            assert weights.for_replica(0, -1) == (expected or None)
