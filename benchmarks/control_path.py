"""The controller's cost with groups of an 8B run's size; replicas only sleep.

    python benchmarks/control_path.py [--seconds=20] [--replicas 1 2 4 8]

Each replica is a process on Ray that "samples" two groups at a time, each for a second,
and hands in 16 rollouts of 8,000 tokens: 1.7 MB.  Queue, order book, dispatcher and
links are the real ones; the learner takes batches at once.  Prints groups/s against the
replicas' maximum, the controller's CPU time per group, and the delay from the end of a
batch's last group until the loop has the batch.
"""

import argparse
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from sleepers import NoParams, make_fleet, pool_names

from scalerl_jax.cluster.actors import RoleProcessInfo
from scalerl_jax.cluster.run import RayLink
from scalerl_jax.contract import Instructions, QueueClosed, ReplicaReport
from scalerl_jax.controller.fleet import Fleet
from scalerl_jax.controller.queue import RolloutQueue
from scalerl_jax.generation.replica_orders import ReplicaOrders
from scalerl_jax.types import Group, Rollout

CAPACITY, GROUP_S, ROLLOUTS, TOKENS = 2, 1.0, 16, 8_000
NUM_PROMPTS = 8  # of a batch


class Sleeper:
    """A replica that sleeps instead of sampling."""

    def __init__(self) -> None:
        """Begin to wait for orders."""
        self._orders, self._version = ReplicaOrders(), -1
        for _ in range(CAPACITY):
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            try:
                order = self._orders.admit(self._version)
                if order is None:
                    self._orders.wait(0.05)
                    continue
            except QueueClosed:
                return
            time.sleep(GROUP_S)
            versions = np.full(TOKENS, self._version, np.int32)
            rollouts = tuple(
                Rollout(
                    completion_tokens=np.zeros(TOKENS, np.int32),
                    completion_mask=np.ones(TOKENS, bool),
                    behavior_logprobs=np.zeros(TOKENS, np.float32),
                    policy_versions=versions,
                    cut_off=False,
                    interrupted=False,
                    reward=time.time(),
                    status="wrong",
                )
                for _ in range(ROLLOUTS)
            )
            group = Group(
                ticket=order.ticket,
                prompt=order.prompt,
                rollouts=rollouts,
                finished_version=self._version,
            )
            self._orders.sampled(order.ticket)
            self._orders.put(group)

    def exchange(self, instructions: Instructions, wait_s: float) -> ReplicaReport:
        """Take instructions, and report."""
        if instructions.publication is not None:
            self._version = max(self._version, instructions.policy_version)
        self._orders.deliver(instructions)
        self._orders.await_news(wait_s)
        return ReplicaReport(**self._orders.news(), capacity=CAPACITY)


def fleet_of(replicas: int) -> tuple[Fleet, RolloutQueue]:
    """Return the controller's side of a number of sleepers, and its queue."""
    make: Any = ray.remote(Sleeper)

    def connect(number: int) -> Future:
        actor = make.options(num_cpus=0, max_concurrency=4).remote()
        future: Future = Future()
        place = RoleProcessInfo(host=f"sleeper {number}", pid=0, chip="none")
        future.set_result(RayLink([actor], [place]))
        return future

    return make_fleet(
        pool_names(replicas),
        connect,
        prompt_tokens=1000,
        group_shape=(ROLLOUTS, TOKENS),
        num_prompts=NUM_PROMPTS,
        max_staleness=8,
    )


def measure(replicas: int, seconds: float) -> dict[str, float]:
    """Return groups/s, its share of the maximum, and CPU seconds per group."""
    fleet, queue = fleet_of(replicas)
    fleet.publish(NoParams(), policy_version=0)
    fleet.start()
    version, groups, late, began = 0, 0, 0.0, 0.0
    while not began or time.monotonic() - began < seconds:
        taken = queue.take(version, 60.0)
        # The last of them was handed in by its replica then.
        handed_in = max(group.rollouts[0].reward for group in taken)
        late += time.time() - handed_in
        version += 1
        queue.applied()
        fleet.publish(NoParams(), policy_version=version)
        if not began and version > 2:  # all are at work
            began, groups, late = time.monotonic(), 0, 0.0
            cpu, first = time.process_time(), version
        elif began:
            groups += len(taken)
    took, used = time.monotonic() - began, time.process_time() - cpu
    queue.close()
    fleet.stop(10.0)
    rate = groups / took
    return {
        "replicas": replicas,
        "groups/s": rate,
        "share": rate / (replicas * CAPACITY / GROUP_S),
        "CPU ms a group": 1000 * used / groups,
        "ms to the loop": 1000 * late / (version - first),
    }


def main() -> int:
    """Measure each number of replicas, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", default=20.0, type=float)
    parser.add_argument("--replicas", default=[1, 2, 4, 8], type=int, nargs="+")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)
    say = sys.stdout.write
    say("| replicas | groups/s | of possible | CPU ms a group | ms to the loop |\n")
    say("|---|---|---|---|---|\n")
    for replicas in arguments.replicas:
        found = measure(replicas, arguments.seconds)
        say(
            f"| {found['replicas']} | {found['groups/s']:.2f} | {found['share']:.0%} "
            f"| {found['CPU ms a group']:.1f} | {found['ms to the loop']:.0f} |\n"
        )
        sys.stdout.flush()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
