"""Versions that come to a replica of several processes: to all of them or to none."""

import gc

import pytest
import small_weights
from memory_channel import MemoryChannel
from small_weights import ARCH, BFLOAT16, assert_is_version, layout, mesh

from scalerl_jax.generation.followers import Follower, PublishedToAll
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.lockstep import Followed, LeadingEngine
from scalerl_jax.weights.channels import LostObjectError
from scalerl_jax.weights.receiving import (
    NeedsFullError,
    NotReceivedError,
    PublishedFrom,
)
from scalerl_jax.weights.sending import Sender

SETTINGS = EngineSettings(
    arch=ARCH,
    slots=2,
    max_prompt_tokens=8,
    max_completion_tokens=8,
    tokens_per_call=2,
    dtype=BFLOAT16,
    eos_ids=(1,),
    page_size=4,
    prefill_tokens=8,
)


class Lossy:
    """A channel that loses what one side asks for, while it is told to."""

    def __init__(self, channel):
        self.channel, self.losing = channel, False

    def fetch(self, reference, **how):
        if self.losing:
            raise LostObjectError(f"{reference} is lost")
        return self.channel.fetch(reference, **how)


class Direct:
    """Followers of this process: what they are asked is done when it is waited for."""

    def __init__(self, *followers):
        self.followers, self.failing = followers, ""

    def tell(self, call):
        for each in self.followers:
            each.obey(call)

    def ask(self, method, *arguments, in_order=False):
        def wait():
            for each in self.followers:
                getattr(each, method)(*arguments)
            if method == self.failing:
                raise MemoryError("full")

        return wait


class World:
    """A learner, and a replica of two processes that take its versions."""

    def __init__(self, *, in_place=False):
        self.learner, on = mesh(0, 4, fsdp=4), mesh(4, 6, tensor=2)
        channel = MemoryChannel()
        self.sender = Sender(rank=0, num_ranks=1, channel=channel)
        self.ways = [Lossy(channel), Lossy(channel)]
        engine = LeadingEngine(SETTINGS, mesh=on)
        own, others = self.ways
        self.followed = Followed(Engine(SETTINGS, mesh=on))
        source = PublishedFrom(others, layout(on), in_place=in_place)
        followers = self.followers = Direct(Follower(self.followed, source))
        engine.lead(followers.tell)
        self.source = PublishedToAll(
            own, layout(on), engine=engine, followers=followers, in_place=in_place
        )
        self.engine = engine

    def publish(self, version, **how):
        shards = small_weights.shards(version, self.learner)
        return small_weights.published(
            self.sender.send(shards, policy_version=version, **how)
        )

    def there(self):
        """The params that the follower holds."""
        gc.collect(1)  # what is young: all takes half a second after many tests
        self.followed.obey(self.engine.let_go())
        return list(self.followed._held.values())


@pytest.mark.parametrize("in_place", [False, True])
def test_each_version_is_in_both_processes(in_place):
    world, used = World(in_place=in_place), None
    for version in range(4):
        manifest = world.publish(version)
        replace = world.source.replacing(manifest)
        if version and in_place:
            assert_is_version(used.params, version - 1)
        used = replace()
        assert_is_version(used.params, version)
        (there,) = world.there()
        assert_is_version(there, version)
        assert world.source(manifest) is used, "it is not fetched again"


@pytest.mark.parametrize("loser", [0, 1], ids=["the leader", "a follower"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_version_that_one_cannot_get_changes_nothing(loser, in_place):
    world = World(in_place=in_place)
    used = world.source.replacing(world.publish(0))()
    world.ways[loser].losing = True
    with pytest.raises(NotReceivedError, match="version 1 were not received"):
        world.source.replacing(world.publish(1))
    world.ways[loser].losing = False
    for params in (used.params, *world.there()):
        assert_is_version(params, 0)
    with pytest.raises(NeedsFullError):  # of one that it missed
        world.source.replacing(world.publish(2))
    again = small_weights.published(world.sender.send_again())
    used = world.source.replacing(again)()
    for params in (used.params, *world.there()):
        assert_is_version(params, 2)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("after", [0, 2], ids=["while it is used", "later"])
def test_a_pinned_version_is_held_by_both_until_it_is_released(in_place, after):
    world = World(in_place=in_place)
    old = world.publish(0, pinned=True)
    used = world.source.replacing(old)()
    pinned = world.source.pinned(old) if not after else None
    for version in (1, 2):
        used = world.source.replacing(world.publish(version))()
    pinned = pinned or world.source.pinned(old)
    assert_is_version(pinned.params, 0)
    first, last = world.there()  # in the order in which they came
    for version, params in zip((2, 0) if after else (0, 2), (first, last), strict=True):
        assert_is_version(params, version)
    del pinned
    world.source.release()
    (there,) = world.there()
    assert_is_version(there, 2)
    assert_is_version(used.params, 2)


def test_what_fails_on_its_way_to_the_devices_is_let_go_everywhere():
    world = World()
    used = world.source.replacing(world.publish(0))()
    lay_out = world.source.replacing(world.publish(1))
    world.followers.failing = "lay_out"
    with pytest.raises(MemoryError, match="full"):
        lay_out()
    (there,) = world.there()
    assert_is_version(there, 0)
    assert_is_version(used.params, 0)
