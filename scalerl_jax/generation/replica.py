"""A generator replica: a sampling thread that a controller reaches by exchanges.

`Replica.exchange` is the only call that a controller makes.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax

from scalerl_jax.contract import Instructions, JobResult, ReplicaJob, ReplicaReport
from scalerl_jax.generation.driver import LocalGenerators
from scalerl_jax.generation.replica_orders import ReplicaOrders
from scalerl_jax.run.work_log import WorkLog
from scalerl_jax.weights.publication import Published
from scalerl_jax.weights.receiving import NeedsFullError

_log = logging.getLogger(__name__)


class ReplicaThread(LocalGenerators):
    """The sampling thread of a replica, whose params can be replaced in place."""

    def replace(self, make: Callable[[], Published], *, policy_version: int) -> None:
        """Replace the params in use by those that `make` returns, between two steps.

        Raises:
            Exception: `make` failed; no params are left, and sampling ends.
        """

        def job() -> None:
            self._published = None
            self.publish(make(), policy_version=policy_version)

        self.between_steps(job)

    def await_use(self) -> None:
        """Return once the thread holds only the params published last.

        This waits for the current step, or for the end of the thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._in_use or not self._jobs.running)

    def lacking(self) -> list[int]:
        """Return the missing completions of each group that is not fully sampled."""
        return [
            each.lacking
            for each in list(self._episodes.open.values())
            if each.ended_version < 0
        ]


class Fetch(Protocol):
    """A function that fetches the params of a publication."""

    def __call__(self, publication: Any, /) -> Published:
        """Return the params of the next publication."""
        ...

    in_place: bool  # a new version takes the place of the one in use

    def replacing(self, publication: Any, /) -> Callable[[], Published]:
        """Fetch a publication, and return a function that installs it.

        With `in_place` that function is called between two steps, and deletes the
        params in use.
        """
        ...

    def pinned(self, publication: Any, /) -> Published:
        """Return the params of any publication; hold them until `release`."""
        ...

    def release(self) -> None:
        """Release the pinned params."""
        ...


class Replica:
    """One sampling thread with its engine and verifiers, and its reports."""

    def __init__(
        self,
        generators: ReplicaThread,
        orders: ReplicaOrders,
        *,
        slots: int,
        group_size: int,
        verifier_restarts: Callable[[], int],
        fetch: Fetch | None = None,
        work: WorkLog | None = None,
        where: str = "this process",
    ) -> None:
        """Wrap a thread that is not started.

        `fetch` turns publications into params; None: publications are params.  With
        `work` the replica reports busy seconds and counts; without it the ledger gets
        them directly.
        """
        self.where = where
        self._generators = generators
        self._orders = orders
        self._slots, self._group_size = slots, group_size
        self._verifier_restarts = verifier_restarts
        self._fetch = fetch
        self._work = work
        self._started = False
        self._version = -1  # the last version fetched
        self._missed: int | None = None  # a later version, which did not come
        self._abandoned: set[int] = set()
        self._pinned_for: set[int] = set()  # numbers of jobs with their own params
        # Params are fetched one after the other, while the thread samples.
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="params")

    def exchange(self, instructions: Instructions, wait_s: float) -> ReplicaReport:
        """Take instructions, wait until there is something to report, and report."""
        if instructions.publication is not None:
            self._fetching.submit(
                self._install, instructions.publication, instructions.policy_version
            )
        self._abandoned.update(instructions.abandoned)
        if self._fetch and self._pinned_for & self._abandoned:
            self._pinned_for = set()
            self._fetching.submit(self._fetch.release)
        self._orders.deliver(instructions)
        for job in instructions.jobs:
            if job.beside:
                self._pinned_for.add(job.number)
            threading.Thread(
                target=self._do, args=(job,), name=f"job {job.number}", daemon=True
            ).start()
        self._orders.await_news(wait_s)
        seconds, counts = self._work.take() if self._work else ({}, {})
        return ReplicaReport(
            **self._orders.news(),
            seconds=seconds,
            counts=counts,
            capacity=self._capacity(),
            tokens=self._generators.in_flight(),
            metrics=dict(self._generators.metrics),
            hang=self._generators.hang(),
            verifier_restarts=self._verifier_restarts(),
        )

    def _capacity(self) -> int:
        """Return the number of groups that fit, including the present ones."""
        lacking, waiting = self._generators.lacking(), self._orders.waiting
        free = self._slots - sum(lacking) - waiting * self._group_size
        return len(lacking) + waiting + max(0, -(-free // self._group_size))

    def leave(self) -> None:
        """Ask the controller to reassign this replica's work and to replace it."""
        self._orders.leave()

    def stop(self, timeout_s: float) -> None:
        """End the sampling thread, which may be in a step."""
        self._orders.deliver(Instructions(over=True))
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._generators.stop(timeout_s)

    def _install(self, publication: Any, policy_version: int) -> None:
        """Publish params to the sampling thread; keep the old ones if the fetch fails.

        A publication that arrives during another fetch is fetched after it.
        """
        try:
            if policy_version < self._version:
                return  # a newer publication was fetched first
            if self._fetch and self._fetch.in_place:
                self._generators.replace(
                    self._fetch.replacing(publication), policy_version=policy_version
                )
            else:
                if self._fetch:  # the devices hold two versions, never three
                    self._generators.await_use()
                received = self._params(publication)
                self._generators.publish(received, policy_version=policy_version)
            self._version, self._missed = policy_version, None
            if not self._started:
                self._started = True
                self._generators.start()
        except Exception as error:  # noqa: BLE001  reported to the controller
            _log.warning("params of version %d are not used: %s", policy_version, error)
            # Deltas against it were on their way already, and are not reported again.
            follows = isinstance(error, NeedsFullError) and (
                publication.base_version == self._missed
            )
            if not follows:
                self._orders.refuse(f"{error}")
            self._missed = policy_version

    def _params(self, publication: Any, *, pinned: bool = False) -> Published:
        if self._fetch is None:
            return publication
        return (self._fetch.pinned if pinned else self._fetch)(publication)

    def _do(self, job: ReplicaJob) -> None:
        """Do a job and report its result."""
        end = functools.partial(JobResult, number=job.number)
        try:
            # The job waits for a publication of the same call.
            received = self._fetching.submit(
                self._params, job.publication, pinned=job.beside
            ).result()
        except Exception as error:  # noqa: BLE001  reported to the controller
            self._orders.finish(end(without_params=f"{error}"))
            return
        try:
            value = self._value(job, received)
        except BaseException as error:  # noqa: BLE001  raised in the caller
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(received.params)):
                gone = f"version {job.policy_version} was replaced by the next"
                self._orders.finish(end(without_params=gone))
            else:
                self._orders.finish(end(error=error))
        else:
            self._orders.finish(end(value=value))

    def _value(self, job: ReplicaJob, received: Published) -> Any:
        if job.kind == "probe":
            return self._generators.sample(received)
        return self._generators.judge(
            received,
            policy_version=job.policy_version,
            places=job.places,
            stopped=lambda: job.number in self._abandoned,
            beside=job.beside,
        )


class ThreadLink:
    """The link to a replica that is threads of the controller's process."""

    replaceable = False

    def __init__(self, replica: Replica) -> None:
        """Connect to this replica."""
        self.where = replica.where
        self._replica = replica
        self._calls = ThreadPoolExecutor(3, thread_name_prefix="exchange")

    def exchange(
        self, instructions: Instructions, wait_s: float
    ) -> Future[ReplicaReport]:
        """Call the replica in a thread."""
        return self._calls.submit(self._replica.exchange, instructions, wait_s)

    def close(self) -> None:
        """End the replica."""
        with contextlib.suppress(RuntimeError):  # already closed
            self._calls.submit(self._replica.stop, 0.0)
        self._calls.shutdown(wait=False)
