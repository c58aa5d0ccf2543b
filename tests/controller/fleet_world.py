"""Replicas, their links and a learner, moved one event at a time by a test.

The controller's side (dispatcher, order book, queue, ledger) and the replicas' order
books are the real ones.  Written by hand are the sampling, which finishes what it is
told to, and the way between the two: calls arrive late, answers arrive late or never.
"""

import dataclasses
import itertools
from concurrent.futures import Future

import numpy as np
from queue_world import make_rollout
from small_model import small_architecture

from scalerl_jax.contract import JobResult, QueueClosed, ReplicaJob, ReplicaReport
from scalerl_jax.controller.dispatch import Dispatcher
from scalerl_jax.controller.group_check import GroupCheck
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.queue import Pacing, RolloutQueue
from scalerl_jax.controller.replicas import FleetLimits
from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.generation.replica_orders import ReplicaOrders
from scalerl_jax.run.work_log import RemoteLedger
from scalerl_jax.types import Group, Prompt

NUM_PROMPTS_OF_DATA = 7
HELD_OUT = 5  # prompts of an evaluation


def make_prompt(number):
    return Prompt(
        prompt_id=number,
        epoch=0,
        task="none",
        text=str(number),
        tokens=np.zeros(1, np.int32),
        reference={},
    )


@dataclasses.dataclass(frozen=True)
class Params:
    """Stands for the params of a version; every replica takes them as they are."""

    version: int

    def for_replica(self, number, held_version):
        return self


class SampledByHand:
    """A replica whose completions end when a test says so."""

    def __init__(self, capacity):
        self.orders = ReplicaOrders()
        self.capacity = capacity
        self.version = -1
        self.open = {}  # ticket -> [order, version of its first token or None]
        self.judging = {}  # ticket -> (order, first version, last version)
        self.jobs = {}  # number -> job; of evaluations beside the sampling

    def begin(self):
        """Begin all that may begin, as the sampling thread would."""
        try:
            while len(self.open) < self.capacity and self.version >= 0:
                order = self.orders.admit(self.version)
                if order is None:
                    break
                assert order.ticket not in self.open, "one group twice in a replica"
                self.open[order.ticket] = [order, None]
        except QueueClosed:
            return
        for ticket in self.orders.withdrawn() & self.open.keys():
            del self.open[ticket]
            self.orders.drop(ticket, "withdrawn")

    def token(self):
        for entry in self.open.values():
            entry[1] = self.version if entry[1] is None else entry[1]

    def sample(self, ticket):
        order, first = self.open.pop(ticket)
        first = self.version if first is None else first
        self.judging[ticket] = (order, first, self.version)
        self.orders.sampled(ticket)

    def judge(self, ticket, /, **fault):
        """Hand in a group, with fields that are wrong if a test says so."""
        order, first, last = self.judging.pop(ticket)
        group = Group(
            ticket=ticket,
            prompt=order.prompt,
            rollouts=(make_rollout((first, last), 1.0), make_rollout((last,), 0.0)),
            finished_version=last,
        )
        self.orders.put(group.replace(**fault))

    def work(self, number, *, arrived):
        """Do a part of an evaluation, if its params have arrived."""
        job = self.jobs.pop(number)
        if arrived:
            value = (job.publication, job.policy_version, job.places)
            self.orders.finish(JobResult(number=number, value=value))
        else:
            self.orders.finish(JobResult(number=number, without_params="torn"))

    def drop(self, ticket):
        del self.open[ticket]
        self.orders.drop(ticket, "timeout")

    def report(self):
        running = self.open.keys() | self.judging.keys()
        return ReplicaReport(
            **self.orders.news(),
            capacity=self.capacity,
            tokens=dict.fromkeys(running, 3),
            seconds={"generate": 0.5},
            counts={"generated_tokens": 3},
        )


class LateLink:
    """A way on which calls and answers wait until a test moves them."""

    replaceable = True

    def __init__(self, replica, number):
        self.replica = replica
        self.where = f"host {number}"
        self.calls = []  # not yet arrived
        self.arrived = []  # not yet answered
        self.publications = []
        self.closed = self.dead = False

    def exchange(self, instructions, wait_s):
        future = Future()
        if self.dead:
            future.set_exception(ConnectionError("the machine is gone"))
        else:
            self.calls.append((instructions, future))
        return future

    def arrive(self):
        if self.calls:
            instructions, future = self.calls.pop(0)
            if instructions.publication is not None:
                self.publications.append(instructions.policy_version)
            for job in instructions.jobs:
                if job.beside:
                    assert job.number not in self.replica.jobs
                    self.replica.jobs[job.number] = job
            for number in instructions.abandoned:
                self.replica.jobs.pop(number, None)
            self.replica.orders.deliver(instructions)
            self.arrived.append(future)

    def answer(self, which=0):
        if self.arrived:
            future = self.arrived.pop(which % len(self.arrived))
            future.set_result(self.replica.report())

    def swap(self):
        """The newest params that have come are used from now on."""
        if self.publications:
            version = self.publications.pop(0)
            self.replica.version = max(version, self.replica.version)

    def refuse(self):
        """The params that have come are torn, and are not used."""
        if self.publications:
            self.publications.pop(0)
            self.replica.orders.refuse("torn")

    def die(self):
        """All that is under way is lost, answers too."""
        self.dead = True
        lost = [future for _, future in self.calls] + self.arrived
        self.calls, self.arrived = [], []
        for future in lost:
            future.set_exception(ConnectionError("the machine is gone"))

    def close(self):
        self.closed = True


class FleetWorld:
    """A run of several replicas, with books of its own."""

    def __init__(
        self,
        *,
        replicas,
        capacity,
        by_ticket,
        reissue_after_s,
        max_refills=0,
        **queue,
    ):
        self.settings = queue
        self.capacity, self.by_ticket = capacity, by_ticket
        self.now = 0.0
        self.queue = RolloutQueue(Pacing(**queue), max_refills=max_refills)
        prompts = [make_prompt(number) for number in range(NUM_PROMPTS_OF_DATA)]
        self.ledger = RemoteLedger(
            pools={"learner": 1} | {f"r{n}": 2 for n in range(replicas)},
            chip="none",
            remote=[f"r{n}" for n in range(replicas)],
            clock=lambda: self.now,
        )
        self.ledger.start()
        stream = PromptStream(prompts, seed=0, max_pass_rate=None)
        check = GroupCheck(
            arch=small_architecture(), group_size=2, length_limit=lambda version: 8
        )
        self.orders = OrderBook(self.queue, stream, check=check)
        self.links = {}
        self.coming = {}  # number -> future
        self.prompts = {}  # ticket -> prompt id and epoch at its first order
        self.consumed, self.version, self.window = [], 0, []
        self.notes = []
        self.job_numbers = itertools.count()
        self.evaluation = None  # its version and the futures of its parts
        self.evaluations = []  # versions of those that have ended
        self.dispatcher = Dispatcher(
            orders=self.orders,
            ledger=self.ledger,
            connect=self.connect,
            pools=[f"r{n}" for n in range(replicas)],
            limits=FleetLimits(
                start_timeout_s=1e6,
                silence_timeout_s=300.0,
                reissue_after_s=reissue_after_s,
                losses=10**6,
            ),
            by_ticket=by_ticket,
            note=self.notes.append,
            clock=lambda: self.now,
        )
        self.dispatcher.publish(Params(0), 0)
        self.dispatcher.order()

    def connect(self, number):
        self.coming[number] = Future()
        return self.coming[number]

    def come(self, number):
        """The replica of a place comes up, if one is on its way."""
        future = self.coming.pop(number, None)
        if future is not None:
            link = LateLink(SampledByHand(self.capacity), number)
            self.links[number] = link
            future.set_result(link)

    def link(self, choice):
        up = sorted(self.links)
        return self.links[up[choice % len(up)]] if up else None

    def act(self, name, choice):
        self.now += choice % 5
        number = choice % len(self.dispatcher.replicas)
        link = self.link(choice)
        if name == "turn":
            self.dispatcher.turn()
        elif name == "come":
            self.come(number)
        elif name == "step":
            self.step(skip=choice % 7 == 0)
        elif name == "evaluate":
            self.evaluate()
        elif name == "late":
            self.now += 20.0
        elif link is not None:
            self.act_on(link, name, choice)
        self.check()

    def act_on(self, link, name, choice):
        replica = link.replica
        running, judging = sorted(replica.open), sorted(replica.judging)
        moves = dict(
            arrive=link.arrive,
            swap=link.swap,
            refuse=link.refuse,
            begin=replica.begin,
            token=replica.token,
        )
        if name in moves:
            moves[name]()
        elif name == "answer":
            link.answer(choice)
        elif name == "sample" and running:
            replica.sample(running[choice % len(running)])
        elif name == "judge" and judging:
            replica.judge(judging[choice % len(judging)])
        elif name == "drop" and running:
            replica.drop(running[choice % len(running)])
        elif name == "work" and replica.jobs:
            number = sorted(replica.jobs)[choice % len(replica.jobs)]
            replica.work(number, arrived=choice % 5 > 0)
        elif name == "leave":
            replica.orders.leave()
        elif name == "die":
            link.die()
            self.links = {n: each for n, each in self.links.items() if each != link}

    def step(self, *, skip=False):
        """Take a window, or finish the step on the one in hand."""
        if not self.window:
            try:
                self.window = self.queue.take(self.version, 0.0)
            except TimeoutError:
                return False
            for group in self.window:
                age = self.version - group.oldest_version
                assert 0 <= age <= self.settings["max_staleness"]
            return True
        self.consumed += [group.ticket for group in self.window]
        self.window = []
        if skip:
            self.queue.skipped()
        else:
            self.version += 1
            self.queue.applied()
            self.dispatcher.publish(Params(self.version), self.version)
        return True

    def evaluate(self):
        """Take the evaluation that has ended, or begin one at the newest version."""
        if self.evaluation is None:
            parts = 2 * len(self.dispatcher.replicas)
            jobs = [
                ReplicaJob(
                    number=next(self.job_numbers),
                    kind="evaluate",
                    publication=Params(self.version),
                    policy_version=self.version,
                    places=tuple(range(first, HELD_OUT, parts)),
                    beside=True,
                )
                for first in range(min(parts, HELD_OUT))
            ]
            futures = [self.dispatcher.submit(job) for job in jobs]
            self.evaluation = (self.version, jobs, futures)
            return
        version, jobs, futures = self.evaluation
        if all(future.done() for future in futures):
            found = [future.result() for future in futures]
            pinned = (Params(version), version)
            assert {part[:2] for part in found} == {pinned}
            assert sorted(p for part in found for p in part[2]) == [*range(HELD_OUT)]
            self.dispatcher.withdraw(jobs)
            self.evaluations.append(version)
            self.evaluation = None

    def check(self):
        """No prompt is lost or doubled; a ticket keeps its prompt and place."""
        state = self.queue.snapshot() if not self.window else None
        assert len(self.consumed) == len(set(self.consumed))
        given = list(
            itertools.chain.from_iterable(
                known.assignments for known in self.dispatcher.replicas
            )
        )
        assert len(given) == len(set(given)), "a ticket in two names"
        for known in self.dispatcher.replicas:
            for ticket, assignment in known.assignments.items():
                home = ticket % len(self.dispatcher.replicas)
                assert known.number == home or not self.by_ticket
                assert 0 <= assignment.order.begun_version <= assignment.version
                assert assignment.version <= known.newest_version or self.by_ticket
                prompt = assignment.order.prompt
                drawn = (prompt.prompt_id, prompt.epoch)
                assert self.prompts.setdefault(ticket, drawn) == drawn
        if state is not None:
            buffered = [group.ticket for group in state.buffered]
            running = [ticket for ticket, _ in state.running]
            dropped = sum(state.dropped.values())
            known = [*self.consumed, *buffered, *running]
            assert len(known) == len(set(known))
            assert len(known) + dropped == state.next_ticket
            assert set(given) <= set(running)

    def calm(self):
        """Let everything that is under way happen, without faults."""
        for number in list(self.coming):
            self.come(number)
        for _ in range(3):
            self.dispatcher.turn()
            for link in self.links.values():
                while link.calls:
                    link.arrive()
                while link.publications:
                    link.swap()
                link.replica.begin()
                for ticket in sorted(link.replica.open):
                    link.replica.sample(ticket)
                for ticket in sorted(link.replica.judging):
                    link.replica.judge(ticket)
                for number in sorted(link.replica.jobs):
                    link.replica.work(number, arrived=True)
                while link.arrived:
                    link.answer()
        self.dispatcher.turn()
        self.check()
