"""Discrete-event simulation of a run: admission, waiting, and the cost of losses.

Admission, pacing and refills are those of a real run: the simulation uses
`RolloutQueue`, in simulated time.  Groups are dispatched as by the real dispatcher:
groups of lost replicas first, each to the replica with the most room.

The file is above 400 lines because learner and replicas share one event loop.
"""

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.controller.dealing import deal
from scalerl_jax.controller.queue import RolloutQueue
from scalerl_jax.simulate.lengths import Drawn, SimulatedLengths
from scalerl_jax.simulate.outcome import SimulationNotes, SimulationOutcome
from scalerl_jax.simulate.rates import Rates
from scalerl_jax.simulate.replica import Machine, SimulatedGroup, SimulatedReplica
from scalerl_jax.simulate.scenario import Scenario

_WAITING = "waiting"  # activity of a learner that is ready for a batch
_PAUSE_S = 60.0  # of an evaluation beside training, which is in several pauses
_MOST_LOSSES = 500  # between two steps; with more the run makes none
_USEFUL = 7919  # a prime: spreads zero-variance groups evenly over the tickets


class Simulation:
    """One run in simulated time; `run` returns its outcome."""

    def __init__(
        self,
        scenario: Scenario,
        rates: Rates,
        lengths: SimulatedLengths,
        *,
        make_queue: Callable[..., Any] = RolloutQueue,
    ) -> None:
        """Create the run at time 0, with empty replicas."""
        self.scenario, self.rates = scenario, rates
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.events = 0
        self.queue = scenario.queue(make_queue)
        self.queue.on_change(self._note)
        self._changed = False
        # When it begins the last groups without a pause, and has taken all sent ones.
        self._controller_from_s = self._controller_s = 0.0
        self._controller_work_s = 0.0  # of these groups
        self._drawn = Drawn(lengths, group_size=scenario.group_size)
        self._random = np.random.default_rng([scenario.seed, 1])
        self.machine = Machine(
            slots=scenario.slots,
            tokens_per_call=scenario.tokens_per_call,
            cache_tokens=scenario.cache_tokens,
            prompt_tokens=scenario.prompt_tokens,
            prefill_tokens=scenario.prefill_tokens,
            call_s=rates.call_seconds(scenario.slots),
            context_s=rates.decode_context_s,
            prefill_s=rates.prefill_s,
            place_s=rates.place_s,
        )
        self.replicas = [
            SimulatedReplica(self.machine, number, scenario.group_size)
            for number in range(scenario.replicas)
        ]
        self.version = -1  # published last
        self._again: list[int] = []  # tickets of lost replicas, to dispatch again
        self.judging = 0  # sampled groups that wait for their verdicts
        self.record = SimulationNotes(scenario)
        self._losses = 0  # of machines, since the last step
        self._pauses = evaluation_pauses(scenario, self.machine, lengths)
        self._pause = Pauses(0.0)  # of the evaluation in progress
        self._evaluating: set[int] = set()
        self._evaluated: Callable[[], None] = lambda: None
        self.learner = SimulatedLearner(self, scenario, rates)

    # Time.

    def at(self, time_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Schedule the call `do(*arguments)` at `time_s`."""
        self.events += 1
        heapq.heappush(self._due, (time_s, self.events, do, arguments))

    def run(self) -> SimulationOutcome:
        """Process events until the last step.

        Raises:
            RuntimeError: no event is left before the last step: a deadlock.
            ValueError: machines are lost before a step is made.
        """
        self._begin_failures()
        self.learner.begin()
        events = self._due
        while not self.learner.over:
            if not events:
                raise RuntimeError(
                    f"the simulated run is stuck at version {self.queue.version}"
                )
            self.now_s, _, do, arguments = heapq.heappop(events)
            do(*arguments)
            if self._changed:
                self._changed = False
                self.deal()
        self.queue.close()
        return self.record.outcome(self.events, self.replicas)

    def _note(self) -> None:
        self._changed = True

    # Groups.

    def deal(self) -> None:
        """Dispatch all groups that may begin, those of lost replicas first."""
        if self.version < 0:
            return
        # A replica in the loop's process begins groups with the params it uses now.
        newest = self.replicas[0].version if self._alone else self.version
        for replica, group, version in deal(
            self.replicas,
            self._again,
            newest=newest,
            by_ticket=self.scenario.by_ticket,
            admit=self._admit,
            reissue=self._restart,
        ):
            self._give(replica, group, version)

    def _admit(self, version: int) -> SimulatedGroup | None:
        if self._alone and self.replicas[0].paused:
            return None
        ticket = self.queue.admit(version)
        return None if ticket is None else self._begin(ticket, version)

    def _restart(self, ticket: int, version: int) -> tuple[SimulatedGroup, int]:
        version = self.queue.restart(ticket, version)
        return self._begin(ticket, version), version

    def _begin(self, ticket: int, version: int) -> SimulatedGroup:
        share = self.scenario.zero_variance_share
        useful = not share or ticket * _USEFUL % 1000 >= 1000 * share
        return SimulatedGroup(
            ticket, self._drawn.tokens(ticket, version), useful=useful
        )

    def _give(
        self, replica: SimulatedReplica, group: SimulatedGroup, version: int
    ) -> None:
        replica.give(group, version)
        if self.rates.exchange_s:
            self.at(self.now_s + self.rates.exchange_s, self._wake, replica)
        else:
            self._wake(replica)

    # Replicas.

    def _wake(self, replica: SimulatedReplica) -> None:
        """Schedule the replica's next boundary, at which it looks for new work."""
        if replica.up and not replica.paused:
            token = replica.token
            time_s = replica.interrupt(max(self.now_s, replica.time_s))
            if replica.token != token:
                self.at(time_s, self._boundary, replica, replica.token)

    def _boundary(self, replica: SimulatedReplica, token: int) -> None:
        """Advance a replica: report sampled groups, and fill the free slots."""
        if token != replica.token or not replica.up:
            return
        for group in replica.advance():
            if self._alone:  # the queue is notified before another group begins
                self._sampled(replica, group)
            else:
                self.at(self._taken_s(), self._sampled, replica, group)
        due = replica.number in self._evaluating and self.now_s >= replica.pause_at_s
        if due and not replica.paused:
            replica.paused = True
            replica.token += 1
            end_s = self.now_s + self._pause.seconds
            self.at(end_s, self._resume, replica, replica.token)
            return
        self._fill(replica)
        self._go_on(replica)

    def _taken_s(self) -> float:
        """Return when the controller has taken a group that is sent to it now."""
        arrived_s = self.now_s + self.rates.exchange_s
        if arrived_s > self._controller_s:
            self._controller_from_s = self._controller_s = arrived_s
        self._controller_s += self.rates.group_s
        self._controller_work_s += self.rates.group_s
        return self._controller_s

    @property
    def _alone(self) -> bool:
        """True if the only replica is a thread of the loop's process."""
        return len(self.replicas) == 1

    def _fill(self, replica: SimulatedReplica) -> None:
        """Fill free slots: at once in the loop's process, else after `exchange_s`."""
        if self._alone:
            self._begin_groups(replica)
        elif not replica.asked and replica.room:
            replica.asked = True
            self.at(self.now_s + self.rates.exchange_s, self._note)

    def _begin_groups(self, replica: SimulatedReplica) -> None:
        if self.version < 0:
            return
        while replica.free_slots > 0 and not self._again:
            ticket = self.queue.admit(replica.version)
            if ticket is None:
                return
            replica.give(self._begin(ticket, replica.version), replica.version)

    def _go_on(self, replica: SimulatedReplica) -> None:
        replica.place()
        time_s = replica.plan()
        if time_s < float("inf"):
            self.at(time_s, self._boundary, replica, replica.token)

    def _sampled(self, replica: SimulatedReplica, group: SimulatedGroup) -> None:
        if group.lost:
            return
        self.queue.sampled(group.ticket)
        group.told = True
        self.judging += 1
        self._changed = True  # the replica has room again
        self.at(self.now_s + self.rates.verify_s, self._put, replica, group)

    def _put(self, replica: SimulatedReplica, group: SimulatedGroup) -> None:
        if group.lost:
            return
        del replica.open[group.ticket]
        self.judging -= 1
        self.queue.put(group)
        self.learner.look()

    def publish(self, version: int) -> None:
        """Publish params of `version`; replicas receive them after `transfer_s`."""
        self.version = version
        self.at(self.now_s + self.rates.transfer_s, self._receive, version)

    def _receive(self, version: int) -> None:
        for replica in self.replicas:
            if replica.up:
                had = replica.inbox
                replica.receive(version, self.now_s)
                if had or self.rates.place_s:
                    self._wake(replica)
        self._changed = True

    def note_step(self) -> None:
        """Record the state of the run after a step."""
        self._losses = 0
        levels = dict(
            buffered=self.queue.buffered,
            sampled=self.judging,
            running=self.queue.running,
        )
        spent = self.learner.spent()
        begun_s = max(self.now_s, self._controller_from_s)
        left_s = max(0.0, self._controller_s - begun_s)
        spent["controller"] = self._controller_work_s - left_s
        self.record.step(self.now_s, self.replicas, spent=spent, levels=levels)

    # Evaluations.

    def evaluate(self, then: Callable[[], None], *, beside: bool) -> None:
        """Give every replica its share of an evaluation at its next boundary.

        It starts after an evaluation in progress.  In the loop a replica runs its share
        in one piece.  Beside training its calls alternate with training's in a real
        run: here training pauses every minute, for as long as that costs it.
        """
        if self._evaluating:
            before = self._evaluated

            def after() -> None:
                before()
                self.evaluate(then, beside=beside)

            self._evaluated = after
            return
        self._evaluating = {replica.number for replica in self.replicas}
        self._evaluated, self._pause = then, self._pauses[beside]
        for replica in self.replicas:
            self._begin_evaluation(replica)
            self._wake(replica)

    def _begin_evaluation(self, replica: SimulatedReplica) -> None:
        replica.pauses_left, replica.pause_at_s = self._pause.times, self.now_s

    def _resume(self, replica: SimulatedReplica, token: int) -> None:
        if token != replica.token:
            return
        replica.paused = False
        replica.eval_s += self.now_s - replica.time_s
        replica.time_s = self.now_s
        replica.pauses_left -= 1
        if replica.pauses_left > 0:
            replica.pause_at_s = self.now_s + self._pause.between_s
            self.at(replica.pause_at_s, self._wake, replica)
        else:
            self._evaluating.discard(replica.number)
        self._fill(replica)
        self._go_on(replica)
        if not self._evaluating:
            self._evaluated()

    # Losses.

    def _begin_failures(self) -> None:
        failures = self.scenario.failures
        if failures.replica_mtbf_s:
            for replica in self.replicas:
                self._schedule_loss(replica)
        if failures.learner_mtbf_s:
            self.at(self._wait(failures.learner_mtbf_s), self._lose_learner)

    def _wait(self, mean_s: float) -> float:
        return self.now_s + float(self._random.exponential(mean_s))

    def _schedule_loss(self, replica: SimulatedReplica) -> None:
        mean_s = self.scenario.failures.replica_mtbf_s
        self.at(self._wait(mean_s), self._lose, replica)

    def _count_loss(self) -> None:
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            failures = self.scenario.failures
            raise ValueError(
                f"the simulated run makes no step: {_MOST_LOSSES} machines were lost "
                f"since step {self.queue.version}, a replica every "
                f"{failures.replica_mtbf_s:g} s and the learner every "
                f"{failures.learner_mtbf_s:g} s (0: never); raise --replica_mtbf_h or "
                f"--learner_mtbf_h, or lower the time until they are back"
            )

    def _lose_learner(self) -> None:
        self._count_loss()
        self.learner.lose()
        self.at(self._wait(self.scenario.failures.learner_mtbf_s), self._lose_learner)

    def _lose(self, replica: SimulatedReplica) -> None:
        """Lose a replica; its groups are sampled again by others."""
        failures, record = self.scenario.failures, self.record
        self._count_loss()
        replica.up = False
        replica.token += 1
        record.lost_replicas += 1
        if replica.paused:
            replica.eval_s += self.now_s - replica.time_s
        elif replica.running and self.now_s > replica.time_s:
            replica.busy_s += self.now_s - replica.time_s
            replica.slot_s += (self.now_s - replica.time_s) * replica.running
        for group in replica.open.values():
            group.lost = True
            self.judging -= group.told
        tickets = sorted(replica.open)
        record.lost_tokens += replica.sampled_tokens()
        replica.clear(self.now_s)
        self.at(self.now_s + failures.notice_s, self._reissue, tickets)
        down_s = failures.notice_s + failures.replica_start_s
        self.at(self.now_s + down_s, self._come_up, replica, self.now_s)

    def _reissue(self, tickets: list[int]) -> None:
        self._again += tickets
        self.record.reissued += len(tickets)
        self._changed = True

    def _come_up(self, replica: SimulatedReplica, since_s: float) -> None:
        replica.down_s += self.now_s - since_s
        replica.time_s = self.now_s
        replica.up = True
        replica.receive(self.version, self.now_s)
        self._schedule_loss(replica)
        self._changed = True
        self._begin_evaluation(replica)  # it may have a share of one, from its start
        self._wake(replica)


class SimulatedLearner:
    """The loop of `scalerl_jax.train` in simulated time, activity by activity."""

    def __init__(
        self, simulation: Simulation, scenario: Scenario, rates: Rates
    ) -> None:
        """Create the learner before its first publication."""
        self._simulation = simulation
        self._scenario, self._rates = scenario, rates
        self.over = False
        self.activity = "startup"
        self.since_s = 0.0  # start of `activity`
        self.seconds: dict[str, float] = {}  # by activity, before the current one
        # Batches of the window that are still to be trained on, the next one last.
        self._passes: list[list[SimulatedGroup]] = []
        self._batch: list[SimulatedGroup] = []  # of the current step
        self._saved = 0  # version of the last checkpoint
        self._plan: tuple[float, Callable[[], None]] | None = None
        self._token = 0
        self._train_s = 0.0  # of the last step

    def begin(self) -> None:
        """Publish version 0, and evaluate it if the run has evaluations."""
        self._simulation.publish(0)
        if self._scenario.eval_every and self._scenario.eval_completions:
            self._evaluate(self._wait, beside=self._scenario.eval_beside)
        else:
            self._wait()

    def look(self) -> None:
        """Take a window of batches if the learner waits and the queue has enough."""
        if self.activity != _WAITING:
            return
        queue = self._simulation.queue
        if queue.buffered < self._scenario.num_prompts:
            return
        try:
            groups = queue.take(queue.version, 0.0)
        except TimeoutError:
            return
        # As in `batching.assembly`, groups without a gradient are left over first.
        groups = sorted(groups, key=lambda group: not group.has_reward_variance)
        chosen = sorted(groups[: queue.taken], key=lambda group: group.ticket)
        self._simulation.record.waste(groups[queue.taken :])
        size = self._scenario.num_prompts
        batches = [chosen[at : at + size] for at in range(0, len(chosen), size)]
        self._passes = [each for _ in range(self._scenario.epochs) for each in batches]
        self._passes.reverse()
        self._train()

    def _train(self) -> None:
        """Start a pass over the next batch; zero-variance groups have no gradient."""
        self._batch = self._passes.pop()
        useful = [group for group in self._batch if group.has_reward_variance]
        rates, prompt = self._rates, self._scenario.prompt_tokens
        tokens = sum(each.total + prompt * len(each.tokens) for each in useful)
        self._train_s = rates.train_s + rates.train_token_s * tokens
        if not useful:
            self._simulation.queue.skipped(last=not self._passes)
            self._train() if self._passes else self._wait()
            return
        if rates.assemble_s:
            self._do("assemble", rates.assemble_s, self._step)
        else:
            self._step()

    def _step(self) -> None:
        self._do("train", self._train_s, self._applied)

    def _applied(self) -> None:
        queue, record = self._simulation.queue, self._simulation.record
        version = queue.version + 1
        record.used(queue.version, self._batch)
        last = not self._passes or version == self._scenario.num_steps
        queue.applied(last=last)
        self._do("publish", self._rates.publish_s, self._published)

    def _published(self) -> None:
        simulation, scenario = self._simulation, self._scenario
        version = simulation.queue.version
        simulation.publish(version)
        simulation.note_step()
        last = version == scenario.num_steps
        due = scenario.eval_every and (last or version % scenario.eval_every == 0)
        if due and scenario.eval_completions:
            beside = scenario.eval_beside and not last
            self._evaluate(self._evaluated, beside=beside)
        else:
            self._evaluated()

    def _evaluate(self, then: Callable[[], None], *, beside: bool) -> None:
        """Start an evaluation, and wait for it unless it runs beside training."""
        if beside:
            self._simulation.evaluate(lambda: None, beside=True)
            then()
        else:
            self._enter("eval")
            self._simulation.evaluate(then, beside=False)

    def _evaluated(self) -> None:
        scenario = self._scenario
        version = self._simulation.queue.version
        if version == scenario.num_steps:
            self._enter("over")
            self.over = True
            return
        if self._passes:
            self._train()
            return
        every = scenario.checkpoint_every
        if every and version // every > self._saved // every:
            self._saved = version
            self._do("checkpoint", self._rates.checkpoint_s, self._wait)
        else:
            self._wait()

    def _wait(self) -> None:
        self._enter(_WAITING)
        self.look()

    def lose(self) -> None:
        """Lose the learner: restart it, and repeat the steps since the checkpoint.

        The batches of these steps are kept, so no group is sampled again.
        """
        simulation = self._simulation
        self._simulation.record.lost_learners += 1
        behind = simulation.queue.version - self._saved
        delay_s = self._scenario.failures.learner_start_s + behind * self._train_s
        then, left_s = self._wait, 0.0
        if self._plan is not None:
            done_s, then = self._plan
            left_s = max(0.0, done_s - simulation.now_s)
        elif self.activity not in (_WAITING, "down"):
            return  # an evaluation continues without the learner
        self._do("down", delay_s + left_s, then)

    def _do(self, activity: str, seconds: float, then: Callable[[], None]) -> None:
        self._enter(activity)
        self._token += 1
        self._plan = (self._simulation.now_s + seconds, then)
        self._simulation.at(self._plan[0], self._done, self._token)

    def _done(self, token: int) -> None:
        if token == self._token and self._plan is not None:
            _, then = self._plan
            self._plan = None
            then()

    def _enter(self, activity: str) -> None:
        self.seconds = self.spent()
        self.activity, self.since_s = activity, self._simulation.now_s

    def spent(self) -> dict[str, float]:
        """Return the seconds of each activity so far."""
        passed = self._simulation.now_s - self.since_s
        spent = dict(self.seconds)
        spent[self.activity] = spent.get(self.activity, 0.0) + passed
        return spent


class Pauses(NamedTuple):
    """Times in which a replica samples for an evaluation, and not for training."""

    seconds: float  # of each
    times: int = 1
    between_s: float = 0.0


def evaluation_pauses(
    scenario: Scenario, machine: Machine, lengths: SimulatedLengths
) -> dict[bool, Pauses]:
    """Return a replica's pauses for its share of an evaluation.

    They are those of one beside training (True), and of one in the loop (False), which
    gets the whole cache.  Beside training its calls alternate with training's, each
    with half of the cache, and it takes twice as long as alone with this half.  Of this
    time training loses all but that in which it would sample as much alone.
    """
    if not (scenario.eval_every and scenario.eval_completions):
        return {True: Pauses(0.0), False: Pauses(0.0)}
    cache = machine.cache_tokens or machine.slots * (
        machine.prompt_tokens + lengths.limit
    )
    whole_s, alone_s = _evaluated(scenario, machine, lengths)
    half = machine._replace(cache_tokens=cache // 2)
    _, half_s = _evaluated(scenario, half, lengths)
    count = max(1, round(2 * half_s / _PAUSE_S))
    # Few samples for the slots may end sooner by that rate with half of the cache.
    lost_s = max(0.0, 2 * half_s - alone_s)
    beside = Pauses(lost_s / count, count, alone_s / count)
    return {True: beside, False: Pauses(whole_s)}


def _evaluated(
    scenario: Scenario, machine: Machine, lengths: SimulatedLengths
) -> tuple[float, float]:
    """Return a replica's seconds for its share of an evaluation.

    They are those until its last completion ends, and those at the rate of the time in
    which samples wait for slots.
    """
    replica = SimulatedReplica(machine)
    replica.receive(0, 0.0)
    share = -(-scenario.eval_completions // scenario.replicas)
    drawn = Drawn(lengths, group_size=1)
    for number in range(share):
        replica.give(SimulatedGroup(number, drawn.tokens(number)), 0)
    replica.place()
    full_s, generated, unfinished = 0.0, 0, None  # while samples wait
    while replica.plan() < float("inf"):
        replica.advance()
        replica.place()
        if replica.waiting_samples:
            full_s = replica.time_s
            generated, unfinished = replica.generated, replica.unfinished()
    sampled = generated + unfinished() if unfinished else 0
    whole_s = full_s * replica.generated / sampled if sampled else replica.time_s
    return replica.time_s, whole_s
