"""Versions that come beside the sampling: in order, when asked for, or not at all."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
import small_weights
from small_weights import assert_is_version, layout, mesh, published

from scalerl_jax.parallel.channels import MemoryChannel
from scalerl_jax.parallel.following import Follower
from scalerl_jax.parallel.receiving import Receiver
from scalerl_jax.parallel.sending import Sender

WAIT_S = 60.0


class World:
    """A sender, and a follower that fetches from it."""

    def __init__(self):
        self.channel = MemoryChannel()
        self.learner = mesh(0, 4, fsdp=4)
        self.sender = Sender(rank=0, num_ranks=1, channel=self.channel)
        self.receiver = Receiver(self.channel, layout(mesh(4, 6, tensor=2)))
        self.follower = Follower(self.receiver, timeout_s=0.1)

    def publish(self, version, **options):
        shards = small_weights.shards(version, self.learner)
        return published(self.sender.send(shards, policy_version=version, **options))

    def fail(self, publication, fault="missing"):
        reference = publication.parts[0].objects[0].reference
        self.channel.faults[reference] = fault
        return reference

    def wait_for_refusal(self):
        pause = threading.Event()
        for _ in range(600):
            if self.follower.needs_full:
                return str(self.follower.refusal)
            pause.wait(0.1)
        raise AssertionError("nothing was refused")


@pytest.fixture
def world():
    world = World()
    yield world
    world.follower.stop(WAIT_S)


def test_a_version_is_there_once_it_has_come_and_stays_until_the_next(world):
    assert world.follower.newest() is None
    assert world.follower.used_version is None
    world.follower.follow(world.publish(0))
    assert world.follower.wait(WAIT_S)
    assert (
        world.follower.used_version is None
    )  # it is not in use before it is asked for
    for _ in range(2):
        params, version = world.follower.newest()
        assert version == world.follower.used_version == 0
        assert_is_version(params, 0)
    assert not world.follower.wait(0.0)


def test_deltas_are_received_in_order_and_one_at_a_time(world):
    for version in range(3):
        world.follower.follow(world.publish(version))
    for version in range(3):
        assert world.follower.wait(WAIT_S)
        # The next one is not begun before this one is in use.
        assert world.receiver.policy_version == version
        params, found = world.follower.newest()
        assert found == version
        assert_is_version(params, version)


def test_a_full_version_makes_those_that_wait_superfluous(world):
    world.follower.follow(world.publish(0))
    assert world.follower.wait(WAIT_S)
    world.follower.follow(world.publish(1))
    world.follower.follow(world.publish(2, full=True))
    assert world.follower.newest()[1] == 0
    assert world.follower.wait(WAIT_S)
    params, version = world.follower.newest()
    assert version == 2
    assert_is_version(params, 2)


def test_a_version_that_does_not_come_leaves_the_one_in_use_and_is_told(world):
    world.follower.follow(world.publish(0))
    assert world.follower.wait(WAIT_S)
    world.follower.newest()
    lost = world.publish(1)
    world.fail(lost)
    world.follower.follow(lost)
    assert "version 1 were not received" in world.wait_for_refusal()
    assert "0 stays in use" in world.wait_for_refusal()
    world.follower.follow(world.publish(2))  # against the version that was lost
    params, version = world.follower.newest()
    assert version == 0
    assert_is_version(params, 0)
    world.follower.follow(published(world.sender.send_again()))
    assert world.follower.wait(WAIT_S)
    assert world.follower.newest()[1] == 2
    assert not world.follower.needs_full


def test_a_version_that_is_offered_once_more_is_not_fetched_again(world):
    world.follower.follow(world.publish(0))
    assert world.follower.wait(WAIT_S)
    world.follower.newest()
    again = published(world.sender.send_again())
    world.fail(again)
    world.follower.follow(again)
    world.follower.follow(world.publish(1))
    assert world.follower.wait(WAIT_S)
    assert world.follower.newest()[1] == 1
    assert not world.follower.needs_full


def test_a_learner_that_was_restored_takes_the_replica_back_with_it(world):
    for version in range(3):
        world.follower.follow(world.publish(version))
        assert world.follower.wait(WAIT_S)
        assert world.follower.newest()[1] == version
    world.sender = Sender(rank=0, num_ranks=1, channel=world.channel)
    for version in (1, 2):
        world.follower.follow(world.publish(version))
        assert world.follower.wait(WAIT_S)
        params, found = world.follower.newest()
        assert found == version
        assert_is_version(params, version)


def test_a_version_of_other_bits_is_another_one(world):
    world.follower.follow(world.publish(1))
    assert world.follower.wait(WAIT_S)
    world.follower.newest()
    world.sender = Sender(rank=0, num_ranks=1, channel=world.channel)
    shards = small_weights.shards(2, world.learner)
    other = published(world.sender.send(shards, policy_version=1))
    assert not world.receiver.holds(other)
    world.follower.follow(other)
    assert world.follower.wait(WAIT_S)
    params, version = world.follower.newest()
    assert version == 1
    assert_is_version(params, 2)
    assert world.receiver.holds(other)


def test_an_error_of_our_own_is_raised_where_the_params_are_asked_for(world):
    del world.receiver._leaves  # such as an attribute that is not there
    world.follower.follow(world.publish(0))
    assert world.follower.wait(WAIT_S)
    with pytest.raises(AttributeError, match="_leaves"):
        world.follower.newest()


def test_the_code_of_the_page_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text()
    code = re.search(r"## Weights.*?```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(code.replace("print(", "told = ("), found)
    found["follower"].stop(WAIT_S)
    assert found["told"] == 0
    np.testing.assert_array_equal(
        found["params"]["embedding"],
        found["learned"]["embedding"].astype(found["dtype"]),
    )
