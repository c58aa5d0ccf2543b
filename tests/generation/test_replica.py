"""Versions that come to a replica: in order, or not at all; groups that it can have."""

import threading

import jax
import pytest
import small_weights
from memory_channel import MemoryChannel
from small_weights import assert_is_version, layout, mesh

from scalerl_jax.contract import Assignment, Instructions, Order, ReplicaJob
from scalerl_jax.generation.replica import Replica
from scalerl_jax.generation.replica_orders import ReplicaOrders
from scalerl_jax.run.work_log import WorkLog
from scalerl_jax.weights.publication import receive
from scalerl_jax.weights.receiving import PublishedFrom
from scalerl_jax.weights.sending import Sender

WAIT_S = 60.0


class StepsByHand:
    """A sampling thread whose steps a test makes."""

    def __init__(self):
        self.metrics = {}
        self.params = self.version = None  # published last
        self.begun = False
        self.evaluated = []
        self.lacks = []
        self.hangs = ""
        self.came = threading.Semaphore(0)
        self.used = threading.Event()
        self.used.set()

    def publish(self, publication, *, policy_version):
        self.params = receive(publication, policy_version=policy_version)
        self.version = policy_version
        self.used.clear()
        self.came.release()

    def replace(self, make, *, policy_version):
        self.publish(make(), policy_version=policy_version)

    def lacking(self):
        return self.lacks

    def await_use(self):
        assert self.used.wait(WAIT_S)

    def start(self):
        assert not self.begun
        self.begun = True

    def step(self):
        """Use the version that comes next; return its number."""
        assert self.came.acquire(timeout=WAIT_S), "no version came"
        assert_is_version(self.params, self.version)
        version = self.version
        self.used.set()
        return version

    def sample(self, publication):
        assert_is_version(publication.params, int(publication.policy_version))
        return int(publication.policy_version)

    def judge(self, publication, *, policy_version, places, stopped, beside):
        assert beside and int(publication.policy_version) == policy_version
        assert_is_version(publication.params, policy_version)
        self.evaluated.append(publication)
        return list(places)

    def hang(self):
        return self.hangs

    def in_flight(self):
        return {}

    def stop(self, timeout_s):
        self.used.set()


class World:
    """A sender, and a replica that fetches from it."""

    def __init__(self, *, in_place=False):
        self.channel = MemoryChannel()
        self.learner = mesh(0, 4, fsdp=4)
        self.sender = Sender(rank=0, num_ranks=1, channel=self.channel)
        self.fetch = PublishedFrom(
            self.channel, layout(mesh(4, 6, tensor=2)), in_place=in_place
        )
        self.receiver = self.fetch.receiver
        self.generators = StepsByHand()
        self.refused = []  # what its reports said
        self.replica = Replica(
            self.generators,
            ReplicaOrders(),
            slots=8,
            group_size=4,
            verifier_restarts=int,
            fetch=self.fetch,
            work=WorkLog("remote"),
        )

    def publish(self, version, **options):
        shards = small_weights.shards(version, self.learner)
        return small_weights.published(
            self.sender.send(shards, policy_version=version, **options)
        )

    def give(self, publication):
        report = self.replica.exchange(
            Instructions(
                publication=publication,
                policy_version=publication.policy_version,
            ),
            0.0,
        )
        self.refused.append(report.refused)

    def lose(self, publication):
        reference = next(iter(publication.objects))
        self.channel.discard(reference)

    def wait_for_refusal(self):
        for _ in range(600):
            if refused := self.refused.pop() if self.refused else "":
                return refused
            self.refused.append(self.replica.exchange(Instructions(), 0.1).refused)
        raise AssertionError("nothing was refused")


@pytest.fixture
def world():
    world = World()
    yield world
    world.replica.stop(WAIT_S)


def test_versions_come_in_order_and_none_before_the_last_is_in_use(world):
    for version in range(3):
        world.give(world.publish(version))
    for version in range(3):
        assert world.generators.came.acquire(timeout=WAIT_S)
        # The fetch of the next one waits, so that two are on the devices and not three.
        assert world.receiver.policy_version == version
        world.generators.came.release()
        assert world.generators.step() == version
    assert world.generators.begun


def test_a_report_says_where_the_sampling_thread_hangs(world):
    assert world.replica.exchange(Instructions(), 0.0).hang == ""
    world.generators.hangs = "in one step"
    assert world.replica.exchange(Instructions(), 0.0).hang == "in one step"


def lose_the_second(world, monkeypatch):
    """Version 0 is in use, and 1 does not come."""
    world.give(world.publish(0))
    world.generators.step()
    lost = world.publish(1)
    world.lose(lost)
    monkeypatch.setattr(MemoryChannel, "fetch", _impatient(MemoryChannel.fetch))
    world.give(lost)
    said = world.wait_for_refusal()
    assert "version 1 were not received" in said and "0 stays in use" in said


def test_a_version_that_does_not_come_leaves_the_one_in_use_and_is_told(
    world, monkeypatch
):
    lose_the_second(world, monkeypatch)
    world.give(world.publish(2))  # against the version that was lost
    lost = small_weights.published(world.sender.send_again())
    world.lose(lost)
    world.give(lost)  # after the delta, which is no second fault
    assert "the params of version 2 were not received: shard" in (
        world.wait_for_refusal()
    )
    assert_is_version(world.generators.params, 0)
    world.publish(3)
    world.give(small_weights.published(world.sender.send_again()))
    assert world.generators.step() == 3


def test_a_delta_that_was_sent_for_a_full_version_is_told(world, monkeypatch):
    lose_the_second(world, monkeypatch)
    world.publish(2)
    world.give(world.publish(3))  # against one that was never on its way here
    assert "version 3 were not received" in world.wait_for_refusal()
    assert_is_version(world.generators.params, 0)


@pytest.mark.parametrize(
    ("lacks", "waiting", "capacity"),
    [
        ((), 0, 2),
        ((4, 4), 0, 2),
        ((1, 4), 0, 3),  # three slots are free, and one more sample waits for a fourth
        ((1, 4), 1, 3),
        ((1, 1), 0, 4),
        ((1, 1, 4, 3), 0, 4),  # nine samples for eight slots
        ((1, 1, 1, 1), 0, 5),
        ((1, 1, 1, 1), 2, 6),
    ],
)
def test_a_replica_has_groups_for_all_slots_that_long_completions_leave(
    world, lacks, waiting, capacity
):
    world.generators.lacks = list(lacks)
    orders = tuple(
        Assignment(order=Order(prompt=None, ticket=ticket, begun_version=0), version=0)
        for ticket in range(waiting)
    )
    report = world.replica.exchange(Instructions(assignments=orders), 0.0)
    assert report.capacity == capacity


def _impatient(fetch):
    def soon(self, reference, *, num_bytes, timeout_s):
        return fetch(self, reference, num_bytes=num_bytes, timeout_s=0.05)

    return soon


def test_a_version_that_is_offered_once_more_is_not_fetched_again(world):
    world.give(world.publish(0))
    world.generators.step()
    again = small_weights.published(world.sender.send_again())
    world.lose(again)
    world.give(again)
    world.generators.step()
    world.give(world.publish(1))
    assert world.generators.step() == 1


def test_a_job_whose_params_do_not_come_is_not_begun(world, monkeypatch):
    monkeypatch.setattr(MemoryChannel, "fetch", _impatient(MemoryChannel.fetch))
    first = world.publish(0)
    world.give(first)
    world.generators.step()
    lost = world.publish(1)
    world.lose(lost)
    results = []
    for number, publication in enumerate([first, lost]):
        job = ReplicaJob(
            number=number,
            kind="probe",
            publication=publication,
            policy_version=publication.policy_version,
        )
        results += world.replica.exchange(Instructions(jobs=(job,)), WAIT_S).results
    for _ in range(600):
        if len(results) == 2:
            break
        results += world.replica.exchange(Instructions(), 0.1).results
    done, refused = sorted(results, key=lambda each: each.number)
    assert done.value == 0 and not done.without_params
    assert "version 1 were not received" in refused.without_params


@pytest.fixture
def small_world():
    """A replica whose devices hold one version."""
    world = World(in_place=True)
    yield world
    world.replica.stop(WAIT_S)


def test_a_version_takes_the_place_of_the_one_before(small_world):
    world, before = small_world, None
    for version in range(4):
        world.give(world.publish(version))  # a delta, but for the first
        assert world.generators.step() == version
        if before is not None:
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        before = world.generators.params
    again = small_weights.published(world.sender.send_again())
    world.give(again)  # these very bits: nothing is replaced
    assert world.generators.step() == 3
    assert world.generators.params is before


def test_what_does_not_arrive_takes_no_place(small_world, monkeypatch):
    lose_the_second(small_world, monkeypatch)
    assert_is_version(small_world.generators.params, 0)


def test_a_job_at_another_version_than_the_one_held_is_not_begun(small_world):
    world = small_world
    world.give(world.publish(0))
    world.generators.step()
    other = world.publish(1)
    found = done(world, 0, other, kind="probe", beside=False)
    assert "version 1 is requested" in found.without_params
    assert "hold only version 0" in found.without_params


def test_a_job_whose_version_is_replaced_meanwhile_is_given_back(
    small_world, monkeypatch
):
    world = small_world
    first, second = world.publish(0), world.publish(1)
    world.give(first)
    world.generators.step()

    def sample(publication):
        world.give(second)
        assert world.generators.step() == 1
        return float(jax.tree.leaves(publication.params)[0].sum())

    monkeypatch.setattr(world.generators, "sample", sample)
    found = done(world, 0, first, kind="probe", beside=False)
    assert "version 0 was replaced by the next" in found.without_params


def done(world, number, publication, *, kind="evaluate", beside=True):
    """The result of a part of an evaluation beside the sampling."""
    job = ReplicaJob(
        number=number,
        kind=kind,
        publication=publication,
        policy_version=publication.policy_version,
        places=(number,),
        beside=beside,
    )
    results = list(world.replica.exchange(Instructions(jobs=(job,)), 0.0).results)
    for _ in range(600):
        if results:
            (result,) = results
            return result
        results += world.replica.exchange(Instructions(), 0.1).results
    raise AssertionError("the job did not end")


@pytest.mark.parametrize("of", ["world", "small_world"])
def test_a_pinned_version_is_evaluated_while_newer_ones_come_and_go(
    of, request, monkeypatch
):
    world = request.getfixturevalue(of)
    monkeypatch.setattr(MemoryChannel, "fetch", _impatient(MemoryChannel.fetch))
    world.give(world.publish(0))
    world.generators.step()
    pinned = world.publish(1, pinned=True)
    world.give(pinned)
    world.generators.step()
    assert done(world, 0, pinned).value == [0]
    for version in range(2, 6):
        world.give(world.publish(version))
        assert world.generators.step() == version
    # The channel still has it, and the replica has not let it go.
    assert done(world, 1, pinned).value == [1]
    held, again = world.generators.evaluated
    assert held is again
    world.replica.exchange(Instructions(abandoned=(0, 1)), 0.0)
    assert done(world, 2, pinned).value == [2]
    assert world.generators.evaluated[-1] is not held  # it was let go, and fetched
    assert_is_version(world.generators.params, 5)
    world.give(world.publish(6))  # a delta against 5, whatever was fetched between
    assert world.generators.step() == 6
    world.publish(7, pinned=True)
    world.replica.exchange(Instructions(abandoned=(2,)), 0.0)
    assert "not there" in done(world, 3, pinned).without_params
