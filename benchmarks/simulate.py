"""Compare the simulator with arithmetic, published runs, and runs of this machine.

    make simulate                     # everything: half an hour on two idle cores
    python benchmarks/simulate.py --only=published,speed

One Markdown table per part: the simulated figure, the known one, and their ratio.

- speed: 1,000 steps of an 8B run with 24 replicas.
- published: Applied Compute's six runs of Qwen3-8B
  (https://www.appliedcompute.com/research/staleness-in-fully-async-rl).  Their rollout
  engines never stop, and a full queue drops its oldest groups; both of their closed
  forms follow from that.  Such a queue replaces ours.  Their group size is not given:
  8 here; the spread of lengths follows from their M, E[longest of a group] / E[length].
- sleepers: a controller's own fleet (dispatcher, order book, queue) in real time, with
  replicas that sleep instead of sampling, and with kills of them.
- tiny: configs/tiny.py over staleness, slots and batches, with seconds and lengths
  measured in the run itself.
"""

import argparse
import collections
import json
import math
import os
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from sleepers import NoParams, make_fleet, pool_names

from scalerl_jax import config as config_lib
from scalerl_jax import wiring
from scalerl_jax.contract import Instructions, QueueClosed, ReplicaReport
from scalerl_jax.controller.queue import Pacing
from scalerl_jax.generation.replica_orders import ReplicaOrders
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.warming import warm_up
from scalerl_jax.simulate.lengths import Drawn, SimulatedLengths
from scalerl_jax.simulate.outcome import SimulationOutcome
from scalerl_jax.simulate.rates import Rates
from scalerl_jax.simulate.replica import LAG_CALLS
from scalerl_jax.simulate.run import Simulation
from scalerl_jax.simulate.scenario import Failures, Scenario, scenario_of
from scalerl_jax.train import train
from scalerl_jax.types import Group, Rollout

ROOT = Path(__file__).parents[1]

# C, B, q, rho, M, measured staleness, and that of their closed form.
PUBLISHED = (
    (120, 240, 2, 0.63, 1.42, 1.26, 1.34),
    (240, 120, 2, 0.92, 1.43, 3.59, 3.86),
    (128, 128, 2, 1.07, 1.44, 3.09, 3.29),
    (240, 120, 1, 0.86, 1.42, 3.40, 3.34),
    (120, 120, 1, 0.67, 1.42, 1.92, 1.95),
    (128, 128, 1, 1.14, 1.45, 2.01, 2.24),
)
GROUP_SIZE = 8


def say(*cells: Any, rule: bool = False) -> None:
    """Print a row of a table, with a rule below a heading."""
    texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |")
    if rule:
        print("|" + "---|" * len(cells))
    sys.stdout.flush()


class DroppingQueue:
    """A queue without a bound on staleness; when full, it drops its oldest group."""

    def __init__(self, pacing: Pacing, *, capacity: int, **_: Any) -> None:
        """Hold `capacity` groups at most."""
        self._capacity, self._num_prompts = capacity, pacing.num_prompts
        self._groups: collections.deque[Any] = collections.deque()
        self.version = self.running = self.taken = self.dropped = self._next = 0
        self._changed: Callable[[], None] = lambda: None

    @property
    def buffered(self) -> int:
        """Finished groups."""
        return len(self._groups)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Set the listener of changes; a group may always begin."""
        self._changed = listener

    def admit(self, version: int) -> int:
        """Return the next ticket."""
        self._next += 1
        self.running += 1
        return self._next - 1

    def sampled(self, ticket: int) -> None:
        """Do nothing."""

    def put(self, group: Any) -> None:
        """Add a group; drop the oldest one if the queue is full."""
        self.running -= 1
        self._groups.append(group)
        if len(self._groups) > self._capacity:
            self._groups.popleft()
            self.dropped += 1

    def take(self, version: int, timeout_s: float) -> list[Any]:
        """Return the oldest groups of a batch."""
        self.taken = self._num_prompts
        return [self._groups.popleft() for _ in range(self._num_prompts)]

    def applied(self, *, last: bool = True) -> None:
        """Note a new version."""
        self.version += 1
        self.taken = 0

    def close(self) -> None:
        """Do nothing."""


def tail_of(longest: float) -> float:
    """Return p99 over median at which E[longest of a group] / E[length] is this."""
    low, high = 1.0, 50.0
    for _ in range(12):
        middle = math.sqrt(low * high)
        drawn = Drawn(published_lengths(middle), group_size=GROUP_SIZE)
        rows = np.array([drawn.tokens(ticket) for ticket in range(3000)])
        if rows.max(axis=1).mean() / rows.mean() < longest:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def published_lengths(tail: float) -> SimulatedLengths:
    """Return lengths of their mean, 1,354 tokens; prompts vary as completions do."""
    return SimulatedLengths(mean_tokens=1354.0, tail=tail, alike=0.5, limit=32_000)


def published() -> None:
    """Print their runs beside ours."""
    say(
        *("C", "B", "q", "rho", "M", "measured", "closed form", "simulated"),
        "of measured",
        rule=True,
    )
    for slots, batch, queued, rho, longest, measured, formula in PUBLISHED:
        found = published_staleness(slots, batch, queued, rho, longest)
        say(
            slots,
            batch,
            queued,
            rho,
            longest,
            measured,
            formula,
            found,
            f"{found / measured:.0%}",
        )


def published_staleness(
    slots: int, batch: int, queued: int, rho: float, longest: float
) -> float:
    """Return the mean staleness of one of their runs, simulated."""
    lengths = published_lengths(tail_of(longest))
    call_s, per_call = 0.2, 16
    calls = lengths.mean_tokens / per_call + LAG_CALLS + 0.5
    train_s = rho * batch * calls * call_s / slots
    scenario = Scenario(
        num_prompts=batch // GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_staleness=10**6,
        num_steps=400,
        slots=slots,
        tokens_per_call=per_call,
        prompt_tokens=0,
    )
    tokens = batch * lengths.mean_tokens
    rates = Rates(decode_s=((1, call_s),), train_token_s=train_s / tokens)

    def make(pacing: Pacing, **how: Any) -> DroppingQueue:
        return DroppingQueue(pacing, capacity=queued * batch // GROUP_SIZE, **how)

    simulation = Simulation(scenario, rates, lengths, make_queue=make)
    return simulation.run().figures()["staleness"]


def speed() -> None:
    """Print the CPU seconds of 1,000 steps."""
    began, clock = time.process_time(), time.monotonic()
    outcome = thousand_steps()
    used, took = time.process_time() - began, time.monotonic() - clock
    say("steps", "replicas", "rollouts", "events", "CPU s", "s", rule=True)
    say(1000, 24, 768_000, outcome.counts["events"], used, took)


def thousand_steps() -> SimulationOutcome:
    """Return 1,000 steps of an 8B run with 24 replicas."""
    rates = Rates(
        decode_s=((1, 0.08), (64, 0.12)),
        decode_context_s=1e-8,
        prefill_s=0.02,
        train_token_s=9e-6,
        publish_s=0.5,
        transfer_s=2.0,
        verify_s=1.0,
        exchange_s=0.05,
    )
    scenario = Scenario(
        num_prompts=48,
        group_size=16,
        max_staleness=8,
        num_steps=1000,
        replicas=24,
        slots=64,
        eval_every=100,
        eval_completions=16_000,
        checkpoint_every=50,
    )
    lengths = SimulatedLengths(mean_tokens=8000.0, limit=14_336)
    return Simulation(scenario, rates, lengths).run()


class Sleeper:
    """A replica whose groups take a given time, without work."""

    replaceable = True
    where = "a thread that sleeps"

    def __init__(self, capacity: int, seconds: Callable[[int], float]) -> None:
        """Begin to wait for orders; `seconds` gives a ticket's time."""
        self._orders, self._version, self._seconds = ReplicaOrders(), -1, seconds
        self._capacity = capacity
        self._calls = ThreadPoolExecutor(3)
        self.killed = False
        for _ in range(capacity):
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self.killed:
            try:
                order = self._orders.admit(self._version)
                if order is None:
                    self._orders.wait(0.05)
                    continue
            except QueueClosed:
                return
            begun = self._version
            time.sleep(max(0.0, self._seconds(order.ticket) - CALL_S))
            ended = self._version  # of the step that waits for the last call
            time.sleep(CALL_S)
            versions = np.array([begun, ended], np.int32)
            rollout = Rollout(
                completion_tokens=np.zeros(2, np.int32),
                completion_mask=np.ones(2, bool),
                behavior_logprobs=np.zeros(2, np.float32),
                policy_versions=versions,
                cut_off=False,
                interrupted=False,
                reward=0.0,
                status="wrong",
            )
            group = Group(
                ticket=order.ticket,
                prompt=order.prompt,
                rollouts=(rollout,),
                finished_version=ended,
            )
            self._orders.sampled(order.ticket)
            self._orders.put(group)

    def exchange(
        self, instructions: Instructions, wait_s: float
    ) -> Future[ReplicaReport]:
        """Take instructions, and report; a killed replica does not answer."""
        return self._calls.submit(self._exchange, instructions, wait_s)

    def _exchange(self, instructions: Instructions, wait_s: float) -> ReplicaReport:
        if instructions.publication is not None:
            self._version = max(self._version, instructions.policy_version)
            self._orders.wake()
        self._orders.deliver(instructions)
        self._orders.await_news(wait_s)
        if self.killed:
            raise ConnectionError("killed")
        return ReplicaReport(**self._orders.news(), capacity=self._capacity)

    def close(self) -> None:
        """End it."""
        self.killed = True
        self._calls.shutdown(wait=False)


def fleet_of(replicas: list[Sleeper], make: Callable[[], Sleeper], **how: Any) -> Any:
    """Return a controller's fleet of sleepers, and its queue."""
    fresh = list(replicas)

    def connect(number: int) -> Future[Any]:
        future: Future[Any] = Future()
        if fresh:
            future.set_result(fresh[number])
            if number == len(replicas) - 1:
                fresh.clear()
            return future
        # Another machine comes up.
        threading.Timer(START_S, lambda: _come(future, replicas, number, make)).start()
        return future

    pools = pool_names(len(replicas))
    return make_fleet(pools, connect, prompt_tokens=1, group_shape=(1, 2), **how)


START_S, TRAIN_S, CALL_S = 4.0, 0.8, 0.2
# Replicas, groups at a time of each, N, k, W, kills.
FLEETS = (
    (4, 2, 4, 8, 1, 0),
    (4, 4, 4, 8, 1, 0),
    (8, 2, 4, 2, 0, 0),
    (4, 2, 4, 8, 1, 4),
)


def _come(
    future: Future[Any], replicas: list[Sleeper], number: int, make: Callable[..., Any]
) -> None:
    replicas[number] = make()
    future.set_result(replicas[number])


def sleepers(seconds: float) -> None:
    """Print real controllers with sleeping replicas, beside simulated ones."""
    say(
        "replicas",
        "groups each",
        "N",
        "k",
        "W",
        "kills",
        "s a step",
        "simulated",
        "staleness in flight",
        "simulated",
        "queued",
        "simulated",
        "learner idle",
        "simulated",
        rule=True,
    )
    lengths = SimulatedLengths(mean_tokens=10.0, tail=2.5, alike=0.0, limit=40)
    for count, capacity, size, most, waiting, kills in FLEETS:
        settings = dict(num_prompts=size, max_staleness=most, max_waiting=waiting)
        real = run_fleet(count, capacity, settings, lengths, kills, seconds)
        steps = int(real.pop("steps"))
        mtbf_s = count * seconds / kills if kills else 0.0
        scenario = Scenario(
            **settings,
            group_size=1,
            num_steps=400 if kills else steps + WARM,
            replicas=count,
            slots=capacity,
            tokens_per_call=1,
            prompt_tokens=0,
            failures=Failures(
                replica_mtbf_s=mtbf_s, notice_s=0.0, replica_start_s=START_S
            ),
        )
        rates = Rates(decode_s=((1, CALL_S),), train_s=TRAIN_S, exchange_s=EXCHANGE_S)
        # The same groups as in the real fleet, except for those around kills.
        found = Simulation(scenario, rates, lengths).run().figures(first_step=WARM)
        cells: list[Any] = []
        for name in (
            "step_s",
            "staleness_in_flight",
            "staleness_queued",
            "learner_idle",
        ):
            cells += [real[name], found[name]]
        say(count, capacity, size, most, waiting, kills, *cells)


EXCHANGE_S, WARM = 0.005, 5


def run_fleet(
    count: int,
    capacity: int,
    settings: dict[str, int],
    lengths: SimulatedLengths,
    kills: int,
    seconds: float,
) -> dict[str, float]:
    """Return figures of a fleet in real time, whose learner sleeps as well."""
    drawn, lock = Drawn(lengths, group_size=1), threading.Lock()

    def take_s(ticket: int) -> float:
        with lock:
            return CALL_S * (drawn.tokens(ticket)[0] + LAG_CALLS)

    def make() -> Sleeper:
        return Sleeper(capacity, take_s)

    replicas = [make() for _ in range(count)]
    fleet, queue = fleet_of(replicas, make, **settings)
    fleet.publish(NoParams(), policy_version=0)
    fleet.start()
    version, waited_s, began = 0, 0.0, 0.0
    ages: list[tuple[int, int]] = []
    due = [seconds * (place + 0.5) / kills for place in range(kills)]
    while not began or time.monotonic() - began < seconds:
        if began and due and time.monotonic() - began > due[0]:
            due.pop(0)
            replicas[len(due) % count].killed = True
        looked = time.monotonic()
        groups = queue.take(version, 60.0)
        waited_s += time.monotonic() - looked
        ages += [
            (
                each.finished_version - each.oldest_version,
                version - each.finished_version,
            )
            for each in groups
        ]
        time.sleep(TRAIN_S)
        version += 1
        queue.applied()
        fleet.publish(NoParams(), policy_version=version)
        if version == WARM:
            began, waited_s, ages = time.monotonic(), 0.0, []
    took = time.monotonic() - began
    queue.close()
    fleet.stop(10.0)
    flight, queued = np.mean(ages, axis=0)
    return {
        "steps": version - WARM,
        "step_s": took / (version - WARM),
        "staleness_in_flight": float(flight),
        "staleness_queued": float(queued),
        "learner_idle": waited_s / took,
    }


# Of configs/tiny.py: k, slots, N.
RUNS = (
    (0, 128, 32),
    (1, 128, 32),
    (4, 128, 32),
    (8, 128, 32),
    (8, 64, 32),
    (8, 32, 32),
    (8, 64, 16),
    (2, 128, 16),
)


class Watch:
    """Seconds and lengths of a run, recorded while it is running."""

    def __init__(self, run: Any) -> None:
        """Observe its sampling thread and its queue."""
        # Time, seconds, sequences that were waited for, groups that were started.
        self.calls: list[tuple[float, float, int, int]] = []
        self.rested: list[tuple[float, float]] = []  # time, seconds without work
        self.groups: dict[int, list[int]] = {}
        self.verify: list[tuple[float, float]] = []  # time, seconds
        self.applied: list[float] = []  # times
        self.publish_s: list[float] = []
        self._sampled: dict[int, float] = {}
        self._watch_calls(run.generators)
        self._watch_groups(run.generators._driver.sampler, run.queue)
        self._watch_learner(run)

    def _watch_calls(self, generators: Any) -> None:
        """Record the thread's turns: calls, and waits for work."""
        scheduler = generators._driver.sampler
        step, submit = scheduler.step, scheduler.submit
        rows, begun, turned = 0, 0, time.monotonic()

        def timed(*arguments: Any, **how: Any) -> Any:
            """Record a call: from one step's end to the next, without idle time."""
            nonlocal rows, begun, turned
            ended = step(*arguments, **how)
            now, call = time.monotonic(), scheduler._call
            rest_s = sum(took for at, took in self.rested if at >= turned)
            waited = 0 if rest_s else rows  # else that call was over long ago
            self.calls.append((turned, now - turned - rest_s, waited, begun))
            turned, rows, begun = now, len(call.samples) if call else 0, 0
            return ended

        def counted(request: Any) -> None:
            nonlocal begun
            begun += 1
            submit(request)

        def rested(wait: Callable[..., Any]) -> Callable[..., Any]:
            def timed_wait(*arguments: Any) -> Any:
                began = time.monotonic()
                wait(*arguments)
                self.rested.append((began, time.monotonic() - began))

            return timed_wait

        orders, episodes = generators._orders, generators._episodes
        scheduler.step, scheduler.submit = timed, counted
        orders.wait, episodes.wait = rested(orders.wait), rested(episodes.wait)

    def _watch_groups(self, scheduler: Any, queue: Any) -> None:
        put, sampled = queue.put, queue.sampled

        def note_put(group: Any) -> None:
            now = time.monotonic()
            took = now - self._sampled.pop(group.ticket, now)
            if not scheduler.busy:  # else it was judged before anyone looked
                self.verify.append((now, took))
            self.groups[group.ticket] = [
                len(each.completion_tokens) for each in group.rollouts
            ]
            put(group)

        def note_sampled(ticket: int) -> None:
            self._sampled[ticket] = time.monotonic()
            sampled(ticket)

        queue.put, queue.sampled = note_put, note_sampled

    def _watch_learner(self, run: Any) -> None:
        applied, publish = run.queue.applied, run.learner.publish

        def note_applied(**how: Any) -> None:
            self.applied.append(time.monotonic())
            applied(**how)

        def timed_publish(state: Any, **how: Any) -> Any:
            began = time.monotonic()
            publication = publish(state, **how)
            self.publish_s.append(time.monotonic() - began)
            return publication

        run.queue.applied, run.learner.publish = note_applied, timed_publish

    def rates(
        self,
        calls: list[tuple[float, float, int, int]],
        *,
        slots: int,
        train_s: float,
        busy_s: float,
        since_s: float,
    ) -> Rates:
        """Return the means of the records: a line over sequences, and per group."""
        seconds = np.array([each[1] for each in calls])
        seen = np.array([[each[2] > 0, each[2], each[3]] for each in calls], float)
        (fixed, a_row, a_group), _ = nnls(seen, seconds)
        publish_s = float(np.mean(self.publish_s[len(self.publish_s) // 3 :]))
        verify = [took for at, took in self.verify if at >= since_s]
        return Rates(
            decode_s=((0, fixed), (slots, fixed + a_row * slots)),
            prefill_s=float(a_group),
            train_s=train_s,
            publish_s=publish_s,
            assemble_s=max(0.0, busy_s - train_s - publish_s),
            verify_s=float(np.mean(verify)),
        )


def tiny(directory: Path, num_steps: int) -> None:
    """Print runs of configs/tiny.py beside simulations of the same.

    A program has one core, as each role has its own machines: otherwise the seconds of
    one role would depend on the other's work.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    names = (
        "step_s",
        "learner_idle",
        "generators_idle",
        "staleness_in_flight",
        "staleness_queued",
        "groups_buffered",
    )
    heads = [head for name in names for head in (name, "simulated")]
    say("k", "slots", "N", *heads, rule=True)
    for most, slots, size in RUNS:
        real, found = tiny_run(
            directory / f"k{most}-slots{slots}-n{size}", most, slots, size, num_steps
        )
        cells = [value for name in names for value in (real[name], found[name])]
        say(most, slots, size, *cells)


def tiny_run(
    directory: Path, most: int, slots: int, size: int, num_steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of a run, and those of its simulation, by name."""
    settings = runpy.run_path(str(ROOT / "configs" / "tiny.py"))["get_config"]()
    settings.update_from_flattened_dict(
        {
            "queue.max_staleness": most,
            "sampler.slots": slots,
            "batch.num_prompts": size,
            "batch.group_size": 8,
            "train.num_steps": num_steps,
            # Lengths, and groups without a gradient, stay as they are.
            "optimizer.learning_rate": 1e-12,
            "eval.every": num_steps,
            "eval.num_prompts": 12,
            "eval.samples_per_prompt": 1,
            "checkpoint.every": num_steps,
            "data.train_prompts": 3000,
        }
    )
    config = config_lib.resolve(settings)
    config = wiring.fit_devices(config, wiring.make_architecture(config), 1)
    ledger = wiring.make_ledger(config)
    ledger.start()
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier comparison
    directory.mkdir(parents=True)
    run = wiring.make_run(config, directory, ledger, Progress())
    watch = Watch(run)
    compile_first(run.generators)
    try:
        train(config, run, directory)
    finally:
        run.close()
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first = num_steps // 3  # the queue is full by then
    late, since, until = rows[first:], watch.applied[first - 1], watch.applied[-1]
    count = len(late)
    calls = [each for each in watch.calls if since <= each[0] < until]
    rests = [took for at, took in watch.rested if since <= at < until]
    means = {
        name: float(np.mean([row[name] for row in late]))
        for name in (
            "time/wait_s",
            "time/train_s",
            "staleness/in_flight_mean",
            "staleness/queued_mean",
            "queue/buffered",
        )
    }
    step_s = (until - since) / count
    real = {
        "step_s": step_s,
        "learner_idle": means["time/wait_s"] / step_s,
        "generators_idle": sum(rests) / (until - since),
        "staleness_in_flight": means["staleness/in_flight_mean"],
        "staleness_queued": means["staleness/queued_mean"],
        "groups_buffered": means["queue/buffered"],
    }
    rates = watch.rates(
        calls,
        slots=slots,
        train_s=means["time/train_s"],
        busy_s=step_s - means["time/wait_s"],
        since_s=since,
    )
    alone = dict(eval_every=0, checkpoint_every=0, prompt_tokens=20, prefill_tokens=20)
    scenario = scenario_of(config, **alone)
    measured = tuple(tuple(each) for _, each in sorted(watch.groups.items()))
    lengths = SimulatedLengths(limit=64, measured=measured)
    found = Simulation(scenario, rates, lengths).run().figures(first_step=first)
    return real, found


def compile_first(generators: Any) -> None:
    """Make the sampler compile all its programs before it starts.

    Else a run compiles one when it pays, which may be in the steps that count: sampling
    then stands still for a second or more, in which the learner uses up its groups.
    """
    start = generators.start

    def start_compiled() -> None:
        params, _ = generators._published
        warm_up(generators._driver.sampler._pool, params)
        start()

    generators.start = start_compiled


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="speed,published,sleepers,tiny")
    parser.add_argument("--seconds", default=60.0, type=float, help="of a fleet")
    parser.add_argument("--steps", default=60, type=int, help="of a run of tiny")
    parser.add_argument("--workdir", default=Path("runs/simulate"), type=Path)
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "speed": speed,
        "published": published,
        "sleepers": lambda: sleepers(options.seconds),
        "tiny": lambda: tiny(options.workdir, options.steps),
    }
    for name in options.only.split(","):
        print(f"\n{name}\n")
        parts[name]()


if __name__ == "__main__":
    main()
