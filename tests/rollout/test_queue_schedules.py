"""The queue under every schedule: bound, liveness, no group lost or doubled."""

import itertools
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from queue_world import World

queues = st.one_of(
    st.builds(
        lambda n, k: dict(num_prompts=n, max_staleness=k, mode="pipeline"),
        st.integers(1, 4),
        st.integers(0, 4),
    ),
    st.builds(
        lambda n, k: dict(num_prompts=n, max_staleness=k, mode="batched"),
        st.integers(1, 4),
        st.integers(1, 4),
    ),
)


@st.composite
def schedules(draw):
    """300 events; how often each kind comes differs from schedule to schedule."""
    names = ["admit", "finish", "step", "publish", "drop", "checkpoint"]
    ranges = [(5, 20), (5, 20), (5, 20), (0, 20), (0, 2), (0, 2)]
    weights = [draw(st.integers(*limits)) for limits in ranges]
    random = Random(draw(st.integers(0, 2**32)))
    events = random.choices(names, weights, k=draw(st.sampled_from([300, 60, 20])))
    return [(name, random.randrange(1000)) for name in events]


actions = schedules()


@given(queues, actions)
@settings(max_examples=500, deadline=None)
def test_no_schedule_breaks_the_bound_or_the_books_or_stops_the_learner(kind, events):
    world = World(**kind)
    for action, choice in events:
        world.act(action, choice)
    for _ in range(2 * kind["max_staleness"] + 3):
        world.worker_version = world.version + (1 if world.batch else 0)
        if world.batch:
            world.finish_step()
        assert world.can_still_step()


@given(queues, actions)
@settings(max_examples=200, deadline=None)
def test_a_publish_may_be_late_by_the_whole_bound(kind, events):
    world = World(**kind)
    for action, choice in events:
        world.act(action, choice)
    if world.batch:
        world.finish_step()
    staleness = kind["max_staleness"]
    if kind["mode"] == "batched":
        first = world.version - world.version % staleness
    else:
        first = world.version - staleness
    if world.worker_version >= first:
        assert world.can_still_step()


@given(
    queues,
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 10),
    st.integers(0, 12),
    st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_a_simulated_run_reaches_its_last_step(kind, durations, step_time, lag, slots):
    world = World(**kind)
    durations = itertools.cycle(durations)
    ends, publishes = {}, []  # end by ticket; (time, version)
    step_end = None
    for now in itertools.count():
        assert now < 20_000, "the run stands still"
        for time_, version in [item for item in publishes if item[0] <= now]:
            world.worker_version = max(world.worker_version, version)
            publishes.remove((time_, version))
        for ticket in [ticket for ticket, end in ends.items() if end <= now]:
            world.finish(ticket)
            del ends[ticket]
        while len(ends) < slots and world.admit():
            ends[world.admitted - 1] = now + next(durations)
        if step_end is None and world.take():
            step_end = now + step_time
        if step_end == now:
            world.finish_step()
            publishes.append((now + lag, world.version))
            step_end = None
        world.check_books()
        if world.version == 12:
            break
    consumed = [ticket for _, batch in world.batches for ticket, _ in batch]
    assert len(consumed) == len(set(consumed)) == 12 * kind["num_prompts"]


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), max_size=120))
@settings(max_examples=100, deadline=None)
def test_without_staleness_the_order_is_the_synchronous_one(num_prompts, choices):
    world = World(num_prompts=num_prompts, max_staleness=0, mode="pipeline")
    kinds = ["admit", "finish", "step", "publish"]
    for choice in choices:
        action = kinds[choice % 4]
        # Neither drops nor skips: `step` skips on multiples of 7.
        world.act(action, choice + 1 if choice % 7 == 0 else choice)
    assert world.skips == 0
    for version, batch in world.batches:
        start = version * num_prompts
        assert batch == [(start + i, version) for i in range(num_prompts)]


@given(st.integers(1, 4), st.integers(1, 4), actions)
@settings(max_examples=200, deadline=None)
def test_a_batched_phase_is_sampled_at_its_first_version(num_prompts, k, events):
    world = World(num_prompts=num_prompts, max_staleness=k, mode="batched")
    for action, choice in events:
        if action == "checkpoint":
            continue  # re-issues what was running with newer params
        world.act(action, choice)
    for version, batch in world.batches:
        for _, first in batch:
            assert version - first < k
            assert first // k == version // k
            if world.skips == 0:
                assert first == version - version % k
