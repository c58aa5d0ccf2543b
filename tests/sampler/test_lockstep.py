"""A second engine that follows the first holds what the first holds, bit for bit."""

import gc

import jax
import numpy as np
import pytest

from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.lockstep import EngineCall, Followed, LeadingEngine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.scheduler import Scheduler

PROMPTS = [[4, 1, 9, 2], [5, 6], [7, 8, 9, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3]]


class Pair:
    """An engine that leads and one that follows, each on a device of its own."""

    def __init__(self, make_bench, params, **changes):
        self.bench = make_bench(**changes)
        settings, on = self.bench.settings, self.bench.engine.mesh
        self.engine = self.bench.engine = LeadingEngine(settings, mesh=on)
        self.calls = []
        self.engine.lead(self.tell)
        other = make_bench(devices=jax.devices()[1:2], **changes).engine
        self.followed = Followed(other)
        self.loaded = self.know(params)

    def know(self, params):
        """Params that both have, as the leader holds them."""
        number = self.engine.new_number()
        loaded = self.engine.load_params(params)
        self.engine.know(loaded, number)
        there = jax.device_put(jax.device_get(loaded), jax.devices()[1])
        self.followed.know(there, number)
        return loaded

    def tell(self, call):
        self.calls.append(call.method)
        self.followed.obey(call)

    @property
    def held(self):
        """What the follower holds once it has let go what it may."""
        gc.collect(1)  # what is young: all takes half a second after many tests
        self.followed.obey(self.engine.let_go())
        return list(self.followed._held.values())


def of_pages(part):
    return isinstance(part, tuple)


def assert_same(one, other):
    for here, there in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(here), np.asarray(there))


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(0, id="room"),
        pytest.param(13, id="suspended", marks=pytest.mark.slow),
    ],
)
def test_a_follower_has_the_leaders_state_after_every_step(
    make_bench, talkative_params, pages
):
    params = talkative_params(0)
    pair = Pair(make_bench, params, cache_tokens=4 * pages)
    requests = [pair.bench.request(at, prompt) for at, prompt in enumerate(PROMPTS)]
    scheduler = pair.bench.scheduler(*requests)
    found = {}
    while scheduler.busy:
        for each in pair.bench.step(scheduler, pair.loaded):
            found[each.request_id, each.sample] = each
        if scheduler.stats.calls == 2:
            scheduler.cancel(0)  # in the midst of it
        parts = [each for each in pair.held if not isinstance(each, dict)]
        assert_same(scheduler._state, sorted(parts, key=of_pages, reverse=True))
    assert {request for request, _ in found} >= {1, 2, 3}
    assert {"prefill", "insert", "generate", "free_resource"} <= set(pair.calls)
    if pages:
        assert scheduler.stats.suspended
    expected = pair.bench.expected(params, *requests)
    for name, completion in found.items():
        np.testing.assert_array_equal(completion.tokens, expected[name].tokens)


def test_what_the_leader_drops_its_follower_lets_go(make_bench, random_params):
    pair = Pair(make_bench, random_params(0))
    pool = PagePool(pair.engine)
    schedulers = [Scheduler(pool) for _ in range(3)]
    assert len(pair.held) == 1 + 1 + 3  # the params, the pages, and rows of each
    del schedulers[1:]
    assert len(pair.held) == 1 + 1 + 1
    del schedulers[:], pool
    assert len(pair.held) == 1
    other = pair.know(random_params(1))
    pair.loaded = None
    assert len(pair.held) == 1, "the engine holds what was loaded last"
    assert_same([other], [each for each in pair.held if isinstance(each, dict)])


def test_a_call_for_what_is_not_held_is_an_error(make_bench, random_params):
    followed = Pair(make_bench, random_params(0)).followed
    with pytest.raises(KeyError):
        followed.obey(EngineCall(method="generate", state=(1, 2), params=3))


def test_params_that_have_given_place_are_refused_before_followers_hear(
    make_bench, random_params
):
    pair = Pair(make_bench, random_params(0))
    scheduler = pair.bench.scheduler(pair.bench.request(0, PROMPTS[0]))
    pair.calls.clear()
    jax.tree.map(lambda leaf: leaf.delete(), pair.loaded)
    with pytest.raises(RuntimeError, match="deleted to make room"):
        pair.bench.step(scheduler, pair.loaded)
    assert pair.calls == []


def test_every_verb_of_an_engine_that_dispatches_is_told():
    """A program that only the leader runs would wait for the others for ever."""
    alone = {"load_params", "init_decode_state"}  # checks; made of others
    verbs = {
        name
        for name, member in vars(Engine).items()
        if callable(member) and not name.startswith("_") and name != "notice"
    }
    overridden = {name for name in vars(LeadingEngine) if name in vars(Engine)}
    assert verbs - alone == {each for each in overridden if not each.startswith("_")}
