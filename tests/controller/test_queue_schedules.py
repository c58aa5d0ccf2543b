"""The queue under every schedule: both bounds, liveness, no group lost or doubled.

SCHEDULES=10000 pytest tests/controller/test_queue_schedules.py   # more
"""

import itertools
import os
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from queue_world import World


@st.composite
def queues(draw):
    """Settings of a queue; half of them without epochs and refills."""
    mode = draw(st.sampled_from(["pipeline", "batched"]))
    epochs = draw(st.sampled_from([1, 1, 1, 2, 3]))
    if mode == "batched":
        staleness = epochs * draw(st.integers(1, 4))
    else:
        staleness = draw(st.integers(epochs - 1, epochs + 3))
    return dict(
        num_prompts=draw(st.integers(1, 4)),
        max_staleness=staleness,
        mode=mode,
        max_waiting=draw(st.sampled_from([0, 1, 1, 2, 3])),
        epochs=epochs,
        max_refills=draw(st.sampled_from([0, 0, 1, 3])),
        useless=draw(st.integers(0, 10)),
    )


@st.composite
def schedules(draw):
    """300 events; how often each kind comes differs from schedule to schedule."""
    ranges = {
        "admit": (5, 20),
        "sample": (0, 20),
        "finish": (5, 20),
        "step": (5, 20),
        "publish": (0, 20),
        "drop": (0, 2),
        "restart": (0, 2),
        "checkpoint": (0, 2),
    }
    weights = [draw(st.integers(*limits)) for limits in ranges.values()]
    random = Random(draw(st.integers(0, 2**32)))
    events = random.choices(
        list(ranges), weights, k=draw(st.sampled_from([300, 60, 20]))
    )
    return [(name, random.randrange(1000)) for name in events]


actions = schedules()


@given(queues(), actions)
@settings(max_examples=int(os.environ.get("SCHEDULES", "500")), deadline=None)
def test_no_schedule_breaks_the_bound_or_the_books_or_stops_the_learner(kind, events):
    world = World(**kind)
    for action, choice in events:
        world.act(action, choice)
    for _ in range(2 * kind["max_staleness"] + 3):
        world.finish_window()
        world.worker_version = world.version
        assert world.can_still_step()


@given(queues(), actions)
@settings(max_examples=200, deadline=None)
def test_a_publish_may_be_late_by_the_whole_bound(kind, events):
    world = World(**kind)
    for action, choice in events:
        world.act(action, choice)
    world.finish_window()
    first = world.version
    if kind["mode"] == "pipeline":
        first -= kind["max_staleness"] + 1 - kind["epochs"]
    if world.worker_version >= first:
        assert world.can_still_step()


@given(
    queues(),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 10),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_a_simulated_run_reaches_its_last_step(
    kind, durations, step_time, lag, verdict_time, slots
):
    world = World(**kind, num_steps=12)
    durations = itertools.cycle(durations)
    ends, verdicts, publishes = {}, {}, []  # times by ticket; (time, version)
    step_end = None
    for now in itertools.count():
        assert now < 20_000, "the run stands still"
        for time_, version in [item for item in publishes if item[0] <= now]:
            world.worker_version = max(world.worker_version, version)
            publishes.remove((time_, version))
        for ticket in [ticket for ticket, end in ends.items() if end <= now]:
            world.sample(ticket)
            verdicts[ticket] = now + verdict_time
            del ends[ticket]
        for ticket in [ticket for ticket, end in verdicts.items() if end <= now]:
            world.finish(ticket)
            del verdicts[ticket]
        while len(ends) < slots and world.admit():
            ends[world.admitted - 1] = now + next(durations)
        if step_end is None and (world.batch or world.take()):
            step_end = now + step_time
        if step_end == now:
            world.finish_step()
            publishes.append((now + lag, world.version))
            step_end = None
        world.check_books()
        if world.version == 12:
            break
    # Nothing is sampled that no step needs, but what was refilled.
    trained = [ticket for _, batch, _ in world.batches for ticket, _ in batch]
    assert len(trained) == len(set(trained))
    assert len(trained) == -(-12 // kind["epochs"]) * kind["num_prompts"]
    assert not world.first_version and not world.buffered
    if kind["mode"] == "pipeline" and kind["max_waiting"]:
        most = kind["max_waiting"] * kind["num_prompts"] - 1 + slots
        windows = -(-most // kind["num_prompts"])
        assert all(world.windows_waited[ticket] <= windows for ticket in trained)


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, 4]),
    st.integers(0, 9),
    st.lists(st.integers(0, 1000), max_size=120),
)
@settings(max_examples=200, deadline=None)
def test_without_staleness_no_schedule_changes_what_a_step_gets(
    num_prompts, epochs, max_refills, useless, choices
):
    """Tickets one after the other, each useless one asking for one more at the end."""
    world = World(
        num_prompts=num_prompts,
        max_staleness=epochs - 1,
        mode="pipeline",
        epochs=epochs,
        max_refills=max_refills,
        useless=useless,
    )
    kinds = ["admit", "finish", "step", "publish"]
    for choice in choices:
        action = kinds[choice % 4]
        # Neither drops nor skips: `step` skips on multiples of 7.
        world.act(action, choice + 1 if choice % 7 == 0 else choice)
    assert world.skips == 0
    start = 0
    for number, (version, batch, refilled) in enumerate(world.batches):
        assert version == number * epochs
        end, useless_so_far = start + num_prompts, 0
        for ticket in itertools.count(start):
            if ticket == end:
                break
            if not world.is_useful(ticket) and (
                useless_so_far < max_refills * num_prompts
            ):
                useless_so_far += 1
                end += 1
        tickets = sorted([*refilled, *(ticket for ticket, _ in batch)])
        assert tickets == list(range(start, end))
        assert {first for _, first in batch} == {version}
        start = end


@given(queues(), actions)
@settings(max_examples=200, deadline=None)
def test_a_batched_window_is_sampled_at_its_first_version(kind, events):
    epochs = kind["epochs"]
    world = World(**kind | dict(mode="batched", max_staleness=2 * epochs))
    for action, choice in events:
        world.act(action, choice)
    for version, batch, _ in world.batches:
        assert {first for _, first in batch} == {version}
    if world.skips == 0:
        assert all(version % (2 * epochs) == 0 for version, *_ in world.batches)
