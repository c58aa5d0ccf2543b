"""The loop's side of several generator replicas."""

import concurrent.futures
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_jax.contract import Orders, Publication, QueueClosed, ReplicaJob
from scalerl_jax.controller.dispatch import Dispatcher
from scalerl_jax.generation.evaluation import Abandoned, Probed, never
from scalerl_jax.run.progress import Progress

_TICK_S = 0.5  # between two calls of `Dispatcher.turn` if nothing happens
_POLL_S = 0.2  # between two checks whether an evaluation must stop
_END_S = 10.0  # for replicas to report that they have ended


class Fleet:
    """Replicas as `contract.Generators`; a thread calls `Dispatcher.turn`."""

    def __init__(
        self,
        *,
        make_dispatcher: Callable[[Callable[[], None]], Dispatcher],
        orders: Orders,
        summarize: Callable[..., Any],
        num_held_out: int,
        job_timeout_s: float,
        progress: Progress,
    ) -> None:
        """Make the dispatcher and start the thread.

        `make_dispatcher` gets a function that requests a turn.  `summarize` turns
        judged prompts into an `Evaluation`.
        """
        self._due = threading.Event()
        self.dispatcher = make_dispatcher(self._due.set)
        self._orders = orders
        self._summarize = summarize
        self._num_held_out = num_held_out
        self._job_timeout_s = job_timeout_s
        self._progress = progress
        self._numbers = itertools.count()
        self._version = -1  # the last published version
        self._over = False
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start to assign orders."""
        self.dispatcher.order()
        self._due.set()

    def stop(self, timeout_s: float) -> None:
        """End every replica; do not wait for one that does not answer."""
        self._over = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def publish(self, publication: Publication, *, policy_version: int) -> None:
        """Publish params for all further sampling."""
        self._version = policy_version
        self.dispatcher.publish(publication, policy_version)
        self._due.set()

    def sample(self, publication: Publication) -> list[Probed]:
        """Return every replica's completions of the same prompts, in turn."""
        numbers = range(len(self.dispatcher.replicas))
        jobs = [self._job("probe", publication, self._version) for _ in numbers]
        parts = self._done(list(zip(jobs, numbers, strict=True)))
        return [each for part in parts for each in part]

    def evaluate(
        self,
        publication: Publication,
        *,
        policy_version: int,
        stopped: Callable[[], bool],
        beside: bool = False,
        probe: bool = True,
    ) -> tuple[Any, list[Probed]]:
        """Return the evaluation at a version, and completions for the mismatch.

        With `beside` sampling continues, with newer params.  Then, and without `probe`,
        no completions are returned.

        Raises:
            Abandoned: `stopped` has returned True.
        """
        jobs = self._parts(publication, policy_version, beside=beside)
        if beside:
            judged = self._done([(job, None) for job in jobs], stopped=stopped)
            return self._summary(judged, policy_version), []
        count = len(jobs)
        if probe:
            jobs.append(self._job("probe", publication, policy_version))
        text = f"evaluation at step {policy_version}: part"
        with self._progress.bar(text, total=len(jobs)) as bar:
            done = self._done(
                [(job, None) for job in jobs],
                stopped=stopped,
                ended=lambda _: self._progress.advance(bar),
            )
        pairs = [each for part in done[count:] for each in part]
        return self._summary(done[:count], policy_version), pairs

    def _parts(
        self, publication: Publication, policy_version: int, *, beside: bool
    ) -> list[ReplicaJob[Publication]]:
        """Return the jobs into which an evaluation is cut."""
        parts = 2 * len(self.dispatcher.replicas)  # so that a slow replica does fewer
        return [
            self._job(
                "evaluate",
                publication,
                policy_version,
                places=tuple(range(first, self._num_held_out, parts)),
                beside=beside,
            )
            for first in range(min(parts, self._num_held_out))
        ]

    def _summary(self, judged: Sequence[Sequence[Any]], policy_version: int) -> Any:
        everything = [each for part in judged for each in part]
        return self._summarize(everything, policy_version=policy_version)

    def hang(self) -> str:
        """Return which replicas hang, and where in the code; "": none does."""
        return "; ".join(
            f"in replica {replica.number} ({replica.where}) {replica.hang}"
            for replica in list(self.dispatcher.replicas)
            if replica.hang
        )

    def in_flight(self) -> dict[int, int]:
        """Return the tokens that each ticket under way has so far."""
        return self.dispatcher.in_flight()

    @property
    def metrics(self) -> dict[str, int]:
        """Return the samplers' metrics, summed over replicas, and replica counts."""
        total: Counter[str] = Counter()
        replicas = list(self.dispatcher.replicas)
        for replica in replicas:
            total.update(replica.metrics)
        versions = [replica.used_version for replica in replicas if replica.up]
        replicas = {
            "up": len(versions),
            "oldest_version": min(versions, default=-1),
        } | self.dispatcher.events
        return dict(total) | {f"replicas/{name}": n for name, n in replicas.items()}

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each replica: its host and its state."""
        return [
            {
                "role": f"replica {replica.number}",
                "where": replica.where,
                "version": replica.used_version,
                "groups": len(replica.assignments),
                "lost": replica.losses,
            }
            for replica in list(self.dispatcher.replicas)
        ]

    @property
    def verifier_restarts(self) -> int:
        """Return the number of verifier processes that have been replaced."""
        return sum(
            replica.verifier_restarts for replica in list(self.dispatcher.replicas)
        )

    def _job(
        self, kind: Any, publication: Publication, version: int, **more: Any
    ) -> ReplicaJob[Publication]:
        return ReplicaJob(
            number=next(self._numbers),
            kind=kind,
            publication=publication,
            policy_version=version,
            **more,
        )

    def _done(
        self,
        jobs: Sequence[tuple[ReplicaJob[Publication], int | None]],
        *,
        stopped: Callable[[], bool] = never,
        ended: Callable[[Any], None] = lambda future: None,
    ) -> list[Any]:
        """Return the jobs' results; each job is for a numbered replica or for any."""
        futures = [self.dispatcher.submit(job, number) for job, number in jobs]
        for future in futures:
            future.add_done_callback(ended)
        self._due.set()
        left, since = len(futures), time.monotonic()
        try:
            while waiting := concurrent.futures.wait(futures, _POLL_S).not_done:
                if stopped():
                    raise Abandoned
                self._orders.raise_if_over()
                if len(waiting) < left:
                    left, since = len(waiting), time.monotonic()
                # A part may take long: only with a hang is it given up.
                late = time.monotonic() - since > self._job_timeout_s
                if late and (hang := self.hang()):
                    raise TimeoutError(
                        f"replicas finished no part of an evaluation in "
                        f"queue.batch_timeout_s = {self._job_timeout_s:g}: {hang}"
                    )
            return [future.result() for future in futures]
        finally:
            self.dispatcher.withdraw(job for job, _ in jobs)
            self._due.set()

    def _run(self) -> None:
        try:
            while not self._over:
                self._due.wait(_TICK_S)
                self._due.clear()
                self.dispatcher.turn()
        except QueueClosed:
            pass
        except BaseException as failure:  # noqa: BLE001  raised again in the loop
            self._orders.fail(failure)
        finally:
            self.dispatcher.end(_END_S)
