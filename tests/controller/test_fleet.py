"""Replicas under every schedule: deaths, late answers, joins, orders begun again.

SCHEDULES=10000 pytest tests/controller/test_fleet.py   # more
"""

import dataclasses
import os
from random import Random

import pytest
from fleet_world import FleetWorld, LateLink, Params, SampledByHand
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.contract import JobResult, ReplicaJob

NAMES = dict(
    turn=(5, 20),
    arrive=(5, 20),
    answer=(5, 20),
    swap=(1, 10),
    begin=(5, 20),
    token=(0, 10),
    sample=(5, 20),
    judge=(5, 20),
    step=(5, 20),
    come=(2, 10),
    die=(0, 3),
    leave=(0, 2),
    drop=(0, 2),
    late=(0, 2),
    evaluate=(0, 5),
    work=(0, 10),
    refuse=(0, 3),
)


@st.composite
def worlds(draw):
    staleness = draw(st.integers(0, 4))
    return dict(
        replicas=draw(st.integers(1, 4)),
        capacity=draw(st.integers(1, 4)),
        by_ticket=staleness == 0,
        reissue_after_s=draw(st.sampled_from([0.0, 0.0, 15.0, 60.0])),
        num_prompts=draw(st.integers(1, 4)),
        max_staleness=staleness,
        mode="pipeline",
        max_waiting=draw(st.sampled_from([0, 1, 1, 2])),
        max_refills=draw(st.sampled_from([0, 0, 1])),
    )


@st.composite
def schedules(draw):
    weights = [draw(st.integers(*limits)) for limits in NAMES.values()]
    random = Random(draw(st.integers(0, 2**32)))
    events = random.choices(list(NAMES), weights, k=draw(st.sampled_from([600, 100])))
    return [(name, random.randrange(1000)) for name in events]


@given(worlds(), schedules())
@settings(max_examples=int(os.environ.get("SCHEDULES", "150")), deadline=None)
def test_no_schedule_loses_or_doubles_a_prompt_or_stops_the_learner(kind, events):
    world = FleetWorld(**kind)
    for name, choice in events:
        world.act(name, choice)
    world.now += 1000.0  # whoever is silent has been noticed
    for link in world.links.values():
        link.arrive()
        link.answer()
    for _ in range(3):
        world.calm()
    for _ in range(2 * kind["max_staleness"] + 4):
        if world.window:
            world.step()
        for _ in range(3 + kind["num_prompts"] // kind["replicas"]):
            world.calm()
        assert world.step(), world.queue.snapshot()
        world.step()
    if world.evaluation is None:
        world.evaluate()
    version, *_ = world.evaluation
    for _ in range(2 * kind["replicas"] + 2):
        world.now += 250.0  # what lacked its params is tried again
        world.calm()
    world.evaluate()
    assert world.evaluations[-1] == version
    assert world.evaluations == sorted(world.evaluations)
    totals = world.ledger.report()
    seconds = sum(amount for name, amount in totals.items() if name.endswith("_chip_s"))
    chips = 1 + 2 * kind["replicas"]
    assert seconds == pytest.approx(chips * world.now)


def calm_world(**changes):
    kind = dict(
        replicas=2,
        capacity=2,
        by_ticket=False,
        reissue_after_s=0.0,
        num_prompts=4,
        max_staleness=1,
        mode="pipeline",
    )
    world = FleetWorld(**kind | changes)
    world.dispatcher.turn()  # calls for them
    world.come(0)
    world.come(1)
    return world


def deliver(world):
    """Every replica hears what is new, answers, and is heard."""
    world.dispatcher.turn()
    for link in world.links.values():
        while link.calls:
            link.arrive()
        link.swap()
        link.replica.begin()
        while link.arrived:
            link.answer()
    world.dispatcher.turn()


def open_tickets(world):
    return {number: sorted(link.replica.open) for number, link in world.links.items()}


def test_groups_of_a_lost_replica_are_sampled_by_another_and_charged():
    world = calm_world()
    for _ in range(3):
        deliver(world)
    begun = open_tickets(world)
    assert {len(tickets) for tickets in begun.values()} == {2}
    world.links.pop(0).die()
    world.dispatcher.turn()
    assert world.dispatcher.events["lost"] == 1
    assert world.dispatcher.events["reissued"] == 2
    assert (
        "replica 0 on host 0 is lost (ConnectionError: the machine is gone)"
        in (world.notes[-1])
    )
    # Three tokens of each of its two groups, as it had reported.
    assert world.ledger.report()["compute/wasted_tokens"] == 6
    for ticket in begun[1]:
        world.links[1].replica.sample(ticket)
    for _ in range(3):
        deliver(world)
    assert open_tickets(world)[1] == begun[0]


def test_a_replica_that_gets_a_sigterm_is_replaced_at_once_and_is_no_loss():
    world = calm_world()
    world.dispatcher._limits = dataclasses.replace(world.dispatcher._limits, losses=0)
    for _ in range(3):
        deliver(world)
    begun, leaving = open_tickets(world), world.links.pop(0)
    leaving.replica.orders.leave()
    hear(world, leaving)
    world.dispatcher.turn()
    assert leaving.closed and 0 in world.coming
    assert world.notes[-1] == (
        "warning: replica 0 on host 0 leaves (SIGTERM); 2 groups are sampled again"
    )
    events = world.dispatcher.events
    assert (events["lost"], events["left"], events["reissued"]) == (0, 1, 2)
    for ticket in begun[1]:
        world.links[1].replica.sample(ticket)
    for _ in range(3):
        deliver(world)
    assert open_tickets(world)[1] == begun[0]


def test_a_late_group_is_refused_and_its_tokens_are_waste():
    world = calm_world(reissue_after_s=30.0, capacity=4, max_staleness=0)
    for _ in range(3):
        deliver(world)
    begun = open_tickets(world)
    slow = max(begun, key=lambda number: len(begun[number]))
    other = 1 - slow
    for ticket in begun[other]:
        world.links[other].replica.sample(ticket)
    deliver(world)
    world.now += 31.0
    world.dispatcher.turn()
    assert world.dispatcher.events["reissued"] == len(begun[slow])
    # It finishes one before it hears that nobody wants it any more.
    late = begun[slow][0]
    world.links[slow].replica.sample(late)
    world.links[slow].replica.judge(late)
    wasted = world.ledger.report()["compute/wasted_tokens"]
    deliver(world)
    assert world.dispatcher.events["late"] == 1
    assert world.ledger.report()["compute/wasted_tokens"] == wasted + 3
    assert late in open_tickets(world)[other]
    assert open_tickets(world)[slow] == []


def test_a_job_whose_params_do_not_arrive_is_done_again_with_whole_ones():
    world = calm_world()
    deliver(world)
    result = world.dispatcher.submit(
        ReplicaJob(number=5, kind="probe", publication=Params(0), policy_version=0)
    )
    world.dispatcher.turn()
    (holder,) = [known for known in world.dispatcher.replicas if known.jobs]
    link = world.links[holder.number]
    link.replica.orders.finish(JobResult(number=5, without_params="a torn object"))
    hear(world, link)
    assert "version 0: a torn object" in world.notes[-1] and not result.done()
    for _ in range(2):
        for other in world.links.values():
            hear(world, other)
    (holder,) = [known for known in world.dispatcher.replicas if known.jobs]
    world.links[holder.number].replica.orders.finish(JobResult(number=5, value="done"))
    hear(world, world.links[holder.number])
    assert result.result(0) == "done"


def test_an_evaluation_whose_params_fit_nowhere_goes_to_every_replica_and_then_ends():
    world = calm_world()
    for _ in range(2):
        deliver(world)
    result = world.dispatcher.submit(
        ReplicaJob(
            number=5,
            kind="evaluate",
            publication=Params(0),
            policy_version=0,
            beside=True,
        )
    )
    tried = []
    for _ in range(400):
        world.now += 5.0
        for link in world.links.values():
            hear(world, link)
            if link.replica.jobs:
                tried.append((world.now, link.where))
                link.replica.work(5, arrived=False)
                hear(world, link)
    first, second, *_ = [where for _, where in tried]
    assert {first, second} == {"host 0", "host 1"}
    assert len(tried) <= 20  # in half an hour
    assert tried[-1][0] - tried[0][0] > 600.0  # a learner may start again meanwhile
    with pytest.raises(
        RuntimeError, match="version 0 beside .*0 on host 0, 1 .*: torn; "
    ):
        result.result(0)
    assert world.dispatcher.events["lost"] == world.dispatcher.events["refused"] == 0


def test_replicas_that_are_lost_again_and_again_end_the_run():
    world = calm_world()
    world.dispatcher._limits = dataclasses.replace(world.dispatcher._limits, losses=2)
    for _ in range(2):
        deliver(world)
        world.links.pop(0).die()
        world.dispatcher.turn()
        world.dispatcher.turn()
        world.come(0)
    deliver(world)
    world.links.pop(0).die()
    with pytest.raises(RuntimeError, match="^3 .* more than generators.losses = 2; "):
        world.dispatcher.turn()


def test_an_evaluation_that_ends_each_replica_ends_though_groups_are_finished():
    world = calm_world()
    world.dispatcher._limits = dataclasses.replace(world.dispatcher._limits, losses=2)
    submit = world.dispatcher.submit
    jobs = [
        ReplicaJob(number=at, kind="evaluate", publication=Params(0), policy_version=7)
        for at in (5, 6)
    ]
    deadly, harmless = map(submit, jobs)
    for losses in range(3):
        assert not deadly.done()
        for _ in range(4):  # a group is finished between any two losses
            world.calm()
        (holder,) = [each for each in world.dispatcher.replicas if 5 in each.jobs]
        world.dispatcher._in_row = 0
        world.links.pop(holder.number).die()
        world.dispatcher.turn()
        assert world.dispatcher.events["lost"] == losses + 1
    with pytest.raises(RuntimeError, match="^3 .* version 7, more than .*losses = 2"):
        deadly.result(0)
    assert not harmless.done()


def test_a_silent_replica_is_replaced():
    world = calm_world()
    deliver(world)
    world.dispatcher.turn()
    world.now += 301.0
    world.links[1].arrive()
    world.links[1].answer()
    silent = world.links[0]
    world.dispatcher.turn()
    assert silent.closed and "no answer for 301 s" in world.notes[-1]
    world.dispatcher.turn()
    assert 0 in world.coming


def test_a_replica_that_starts_after_it_was_given_up_is_ended():
    world = calm_world()
    limits = dict(start_timeout_s=600.0, silence_timeout_s=1e6)
    limits = dataclasses.replace(world.dispatcher._limits, **limits)
    world.dispatcher._limits = limits
    deliver(world)
    world.links.pop(0).die()
    world.dispatcher.turn()
    world.dispatcher.turn()
    late = world.coming[0]
    world.now += 601.0
    world.dispatcher.turn()
    assert "did not start in generators.start_timeout_s = 600" in world.notes[-1]
    world.dispatcher.turn()
    assert world.coming[0] is not late
    link = LateLink(SampledByHand(2), 0)
    late.set_result(link)
    assert link.closed
    assert world.dispatcher.replicas[0].link is None
    world.come(0)
    world.dispatcher.turn()
    assert world.dispatcher.replicas[0].link is world.links[0]
    assert not world.links[0].closed


def hear(world, link):
    """The controller hears what the replica has to say."""
    world.dispatcher.turn()
    while link.calls:
        link.arrive()
    while link.arrived:
        link.answer()
    world.dispatcher.turn()


def test_params_that_are_refused_are_sent_again():
    world = calm_world()
    for _ in range(4):
        world.calm()
    assert world.step() and world.step()  # version 1
    link = world.links[0]
    hear(world, link)
    assert link.publications.pop() == 1
    for _ in range(2):
        link.replica.orders.refuse("a leaf has another checksum")
        hear(world, link)
        assert "continues with the params of version 0: a leaf has" in world.notes[-1]
        hear(world, link)
        assert link.publications.pop() == 1
    link.replica.orders.refuse("a leaf has another checksum")
    hear(world, link)
    assert "is lost (3 publications in a row refused)" in world.notes[-1]


def test_a_replica_whose_first_params_are_refused_gets_no_orders_before_the_next():
    world = FleetWorld(
        replicas=1,
        capacity=4,
        by_ticket=False,
        reissue_after_s=0.0,
        num_prompts=2,
        max_staleness=8,
        mode="pipeline",
    )
    world.dispatcher.turn()
    world.come(0)
    world.dispatcher.turn()
    link, known = world.links[0], world.dispatcher.replicas[0]
    link.arrive()
    link.refuse()
    link.answer()
    world.dispatcher.turn()
    assert "continues with the params of version -1: torn" in world.notes[-1]
    assert not known.assignments and world.queue.snapshot().running == ()
    # The same params are sent again, and orders for them.
    world.dispatcher.turn()
    link.arrive()
    world.dispatcher.turn()
    begun = [each.order.begun_version for each in known.assignments.values()]
    assert begun == [0] * 4
    while link.calls:
        link.arrive()
    link.swap()
    link.replica.begin()
    assert len(link.replica.open) == 4
    world.check()


def test_a_replica_that_is_always_behind_but_goes_on_is_not_lost():
    world = calm_world()
    deliver(world)
    link = world.links[0]
    for version in range(1, 6):
        world.dispatcher.turn()
        while link.calls:
            link.arrive()
        link.swap()
        link.replica.orders.admit(link.replica.version)
        link.replica.orders.refuse("an object is gone")  # of the version after it
        world.dispatcher.publish(Params(version), version)
        while link.arrived:
            link.answer()
        world.dispatcher.turn()
        assert world.dispatcher.replicas[0].used_version == version - 1
    assert world.dispatcher.events["refused"] == 5
    assert world.dispatcher.events["lost"] == 0, world.notes[-1]


def test_a_failure_of_a_replica_in_this_process_is_the_runs():
    world = calm_world()
    deliver(world)
    world.links[0].replaceable = False
    world.links[0].replica.orders.fail(FloatingPointError("logits"))
    with pytest.raises(FloatingPointError, match="logits"):
        hear(world, world.links[0])


class OneReplica:
    """A world of one replica, which hands in a group after the other."""

    def __init__(self):
        self.world = FleetWorld(
            replicas=1,
            capacity=1,
            by_ticket=False,
            reissue_after_s=0.0,
            num_prompts=2,
            max_staleness=1,
            mode="pipeline",
        )

    def exchange(self):
        """Have the replica come up if it is not, and do a round of calls."""
        self.world.dispatcher.turn()
        self.world.come(0)
        self.world.dispatcher.turn()
        link = self.world.links[0]
        while link.calls:
            link.arrive()
        while link.publications:
            link.swap()
        link.replica.begin()
        while link.arrived:
            link.answer()
        return link.replica

    def hand_in(self, **fault):
        """Sample the next group, with wrong fields; return its ticket."""
        replica = self.exchange()
        while not replica.open:
            replica = self.exchange()
        (ticket,) = replica.open
        replica.sample(ticket)
        replica.judge(ticket, **fault)
        self.exchange()
        self.world.dispatcher.turn()
        return ticket


def test_what_a_failing_replica_has_finished_is_taken_and_its_work_is_charged():
    of = OneReplica()
    world, replica = of.world, of.exchange()
    while not replica.open:
        replica = of.exchange()
    (ticket,) = replica.open
    replica.sample(ticket)
    replica.judge(ticket)
    replica.orders.fail(RuntimeError("a device"))
    world.dispatcher.turn()
    made = world.ledger.report()["compute/generated_tokens"]
    of.exchange()
    world.dispatcher.turn()
    events = world.dispatcher.events
    assert (world.queue.buffered, events["lost"], events["reissued"]) == (1, 1, 0)
    assert world.ledger.report()["compute/generated_tokens"] == made + 3
    world.check()


def test_bad_groups_are_sampled_again_and_the_third_costs_a_replica_its_place():
    of = OneReplica()
    world = of.world
    assert [of.hand_in(finished_version=99) for _ in range(2)] == [0, 0]
    assert world.orders.refused == 2 and world.queue.buffered == 0
    assert world.notes[-1] == (
        "warning: a group of replica 0 on host 0 is refused and sampled again: ticket "
        "0: finished_version = 99 is not from 0 to 0"
    )
    link = world.links[0]
    assert not link.closed and world.dispatcher.events["reissued"] == 2
    assert of.hand_in(detail=3) == 0
    assert link.closed
    assert (
        "replica 0 on host 0 is lost (3 bad groups, the last: ticket 0: detail is a"
        in ("\n".join(world.notes))
    )
    # Three tokens each were made for nothing; another replica samples the prompt.
    assert world.ledger.report()["compute/wasted_tokens"] >= 9
    world.check()
    assert of.hand_in() == 0
    assert world.queue.buffered == 1 and world.orders.refused == 3


def test_a_group_that_nobody_asked_for_costs_a_replica_its_place_at_once():
    of = OneReplica()
    assert of.hand_in(ticket=55) == 0
    assert of.world.dispatcher.events["lost"] == 1
    assert of.world.orders.refused == 1
    assert any(
        "is lost (1 bad groups, the last: its ticket 55 is not assigned to the replica)"
        in note
        for note in of.world.notes
    )
    of.world.check()
    assert of.hand_in() == 0
    assert of.world.queue.buffered == 1


def test_bad_groups_of_a_replica_in_this_process_end_the_run():
    of = OneReplica()
    for _ in range(2):
        of.hand_in(finished_version=99)
    of.world.links[0].replaceable = False
    with pytest.raises(RuntimeError, match="replica 0 on host 0 made 3 bad groups"):
        of.hand_in(finished_version=99)
