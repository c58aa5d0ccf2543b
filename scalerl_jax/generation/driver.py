"""The generators of one process: one thread with one sampler.

The thread starts as many groups as the order book admits, makes one step after the
other with the newest published params (the KV cache is kept), and never waits for a
verifier while there is something to sample.  Jobs from other threads, such as an
evaluation, run between two steps: nothing else samples then, and all their tokens are
of one version.  An evaluation beside the sampling instead alternates with it step by
step, with its own slots and params.  All take pages from one pool (`sampler.pool`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from scalerl_jax.contract import Orders, Publication, QueueClosed
from scalerl_jax.generation.episodes import Episode, Episodes
from scalerl_jax.generation.evaluation import (
    Evaluation,
    Evaluator,
    JudgedPrompt,
    Probe,
    Probed,
    never,
)
from scalerl_jax.generation.jobs import AGAIN, Jobs
from scalerl_jax.generation.judging import Judging
from scalerl_jax.process.step_watch import StepWatch
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.sampler.protocol import Driver, Sampler
from scalerl_jax.sampler.requests import Request, SamplerStats, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.types import Group, Prompt, PyTree
from scalerl_jax.weights.publication import Published, receive

_IDLE_WAIT_S = 0.05  # between two checks, when there is nothing to sample
_Result = TypeVar("_Result")


class LocalGenerators:
    """The `contract.Generators` of one process; the thread's methods come last."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        orders: Orders,
        episodes: Episodes,
        judging: Judging,
        sampling: Sampling,
        make_samples: Callable[[Prompt, int], Samples],
        evaluator: Evaluator,
        probe: Probe,
        ledger: Ledger,
        flops: Callable[[SamplerStats], float],
        pool: str,
        group_timeout_s: float,
        batch_timeout_s: float = 3600.0,
    ) -> None:
        """Make the thread, without params: call `publish` before `start`."""
        self._driver = Driver(sampler)
        self._orders = orders
        self._episodes = episodes
        self._judging = judging
        self._sampling = sampling
        self._make_samples = make_samples  # (prompt, version) -> its samples
        self.evaluator = evaluator
        self.probe = probe
        self._ledger = ledger
        self._flops = flops  # sampler's counts -> model FLOPs
        self._counted: dict[str, float] = {}  # counts already in the ledger
        self._pool = pool
        self._group_timeout_s = group_timeout_s
        self._batch_timeout_s = batch_timeout_s
        self.metrics: dict[str, int] = {}  # the sampler's, as of the last step
        # Guards the published params, and the list of `_jobs`.
        self._changed = threading.Condition()
        self._published: tuple[PyTree, int] | None = None
        self._in_use = False  # the thread uses the newest params, and no older ones
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._watch = StepWatch(self._thread)
        self._jobs = Jobs(self._changed, self._watch, wake=orders.wake)

    def publish(self, publication: Publication, *, policy_version: int) -> None:
        """Deliver params for the next step; the current step keeps its own.

        Raises:
            RuntimeError: they differ from the params sent; the older ones stay in use.
        """
        published = _own(publication)
        params = receive(published, policy_version=policy_version)
        with self._changed:
            self._published, self._in_use = (params, policy_version), False
        self._orders.wake()

    def start(self) -> None:
        """Start to sample the groups of the order book."""
        assert self._published is not None, "publish params first"
        self._jobs.start(self._thread)

    def stop(self, timeout_s: float) -> None:
        """Wait for the thread, once the order book's run is over.

        A step that takes longer than `timeout_s` may end later, without any effect.
        There is no wait for a thread that hangs.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._thread.is_alive():
            if self._watch.hang(self._batch_timeout_s):
                break
            self._thread.join(_IDLE_WAIT_S)
        self._jobs.stop()

    def hang(self) -> str:
        """Return the thread's location, if a step has lasted half the time limit."""
        return self._watch.hang(self._batch_timeout_s / 2)

    def in_flight(self) -> dict[int, int]:
        """Return the tokens that each ticket under way has so far."""
        return {key: each.tokens for key, each in list(self._episodes.open.items())}

    def evaluate(
        self,
        publication: Publication,
        *,
        policy_version: int,
        stopped: Callable[[], bool],
        beside: bool = False,
        probe: bool = True,
    ) -> tuple[Evaluation, list[Probed]]:
        """Return the evaluation at a version, and completions for the mismatch.

        With `beside` sampling continues, with newer params.  Then, and without `probe`,
        no completions are returned.

        Raises:
            Abandoned: `stopped` has returned True, or the run is over.
        """
        evaluator, params = self.evaluator, _own(publication).params
        stopped = self._watch.noting(stopped)

        def job() -> tuple[Evaluation, list[Probed]]:
            evaluation = evaluator(
                params, policy_version=policy_version, stopped=stopped
            )
            return evaluation, self.probe(params, stopped=stopped) if probe else []

        if not beside:
            return self.between_steps(job)
        groups = self.judge(
            publication, policy_version=policy_version, stopped=stopped, beside=True
        )
        return evaluator.summary(groups, policy_version=policy_version), []

    def judge(
        self,
        publication: Publication,
        *,
        policy_version: int,
        places: Sequence[int] | None = None,
        stopped: Callable[[], bool],
        beside: bool = False,
    ) -> list[JudgedPrompt]:
        """Return the held-out prompts `places`, completed and judged at a version.

        With `beside` sampling continues meanwhile.

        Raises:
            Abandoned: `stopped` has returned True, or the run is over.
        """
        steps = self.evaluator.steps(
            _own(publication).params,
            policy_version=policy_version,
            places=places,
            stopped=self._watch.noting(stopped),
            wait_s=lambda: 0.0 if self._trains(beside) else _IDLE_WAIT_S,
        )
        found: list[JudgedPrompt] = []

        def job() -> list[JudgedPrompt]:
            with self._ledger.activity("eval", pool=self._pool, beside=beside):
                for each in steps:
                    found.extend(each)
                    if beside:
                        return AGAIN
            return found

        return self.between_steps(job)

    def sample(self, publication: Publication) -> list[Probed]:
        """Return (prompt, completion) pairs of the probe, whose prompts are fixed."""
        stopped = self._watch.noting(never)
        return self.between_steps(
            lambda: self.probe(_own(publication).params, stopped=stopped)
        )

    def between_steps(self, job: Callable[[], _Result]) -> _Result:
        """Run `job` between two steps, or at once if none runs; return its result.

        A job that returns `AGAIN` is called again after the next step.

        Raises:
            Abandoned: the run has ended before the job.
            TimeoutError: the thread hangs, before the job or in it.
        """
        return self._jobs.run(job, timeout_s=self._batch_timeout_s)

    # -- in the thread ----------------------------------------------------------------

    def _run(self) -> None:
        """Sample until the run is over; pass a failure to the loop."""
        try:
            while True:
                self._turn()
        except QueueClosed:
            pass
        except BaseException as failure:  # noqa: BLE001  raised again in the loop
            self._orders.fail(failure)
        finally:
            self._jobs.end()

    def _turn(self) -> None:
        """Start groups, make a step with the newest params, put judged groups."""
        self._watch.ended()
        self._do_jobs()
        self._watch.ended()
        version = self._load_newest()
        self._episodes.fill(self._driver.sampler, lambda: self._next_episode(version))
        self._drop_late()
        busy = self._driver.sampler.busy
        if busy:
            with self._ledger.activity("generate", pool=self._pool):
                completions = self._driver.step()
            self._count_work()
            self._orders.raise_if_over()  # before the state of a stopped run changes
            for completion in completions:
                if self._episodes.add(completion, version):
                    self._orders.sampled(completion.request_id)
        for episode in self._episodes.judged(self._driver.sampler):
            if not self._orders.put(self._group(episode)):
                self._ledger.count(wasted_tokens=episode.tokens)
            busy = True
        if busy or self._jobs.waiting or self._driver.sampler.busy:
            return
        if self._episodes.waiting:
            with self._ledger.activity("verify", pool=self._pool):
                self._episodes.wait(_IDLE_WAIT_S)
        else:
            self._orders.wait(_IDLE_WAIT_S)

    def _load_newest(self) -> int:
        """Load the newest params into the sampler; return their version."""
        with self._changed:
            if self._published is None:
                raise RuntimeError(
                    "the params were lost: replacing them in place has failed"
                )
            params, version = self._published
            self._driver.sampler.load(params, version)
            self._in_use = True
            self._changed.notify_all()
            return version

    def _do_jobs(self) -> None:
        """Run the jobs of other threads; the groups stand still meanwhile."""
        took_s = self._jobs.do()
        for episode in self._episodes.open.values():
            episode.begun_s += took_s

    def _trains(self, beside: bool) -> bool:
        return beside and self._jobs.running and self._driver.sampler.busy

    def _next_episode(self, version: int) -> Episode | None:
        """Start another group if the order book admits one."""
        order = self._orders.admit(version)
        if order is None:
            return None
        samples = self._make_samples(order.prompt, order.begun_version)
        episode = self._episodes.begin(order.ticket, order.prompt, len(samples.keys))
        episode.request = Request(
            request_id=order.ticket,
            tokens=order.prompt.tokens,
            samples=samples,
            sampling=self._sampling,
            listener=episode.listen,
        )
        return episode

    def _group(self, episode: Episode) -> Group:
        """Return a judged episode as the group for the queue."""
        return Group(
            ticket=episode.key,
            prompt=episode.given,
            rollouts=self._judging.rollouts(
                episode.in_order, episode.verdicts, episode.turns
            ),
            finished_version=episode.ended_version,
            detail=episode.detail,
        )

    def _drop_late(self) -> None:
        """Drop groups that are withdrawn, or sampled for longer than the limit."""
        limit = time.monotonic() - self._group_timeout_s
        withdrawn = self._orders.withdrawn()
        late = [
            episode
            for episode in self._episodes.open.values()
            if (episode.begun_s < limit or episode.key in withdrawn)
            and episode.ended_version < 0
        ]
        for episode in late:
            lost = self._driver.sampler.cancel(episode.key)
            self._count_work()
            # `lost` tokens are in no completion, and counted as wasted by the sampler.
            self._ledger.count(wasted_tokens=episode.tokens - lost)
            reason = "withdrawn" if episode.key in withdrawn else "timeout"
            self._orders.drop(episode.key, reason)
            self._episodes.drop(episode)

    def _count_work(self) -> None:
        """Add the sampler's work since the last call to the ledger."""
        stats = self._driver.sampler.stats
        self.metrics = stats.metrics()
        amounts = {
            "generated_tokens": stats.generated_tokens,
            "wasted_tokens": stats.wasted_tokens,
            "generate_flops": self._flops(stats),
        }
        self._ledger.count(
            **{
                name: amount - self._counted.get(name, 0)
                for name, amount in amounts.items()
            }
        )
        self._counted = amounts


def _own(publication: Publication) -> Published:
    """Return the params for the one sampler of a process."""
    params = publication.for_replica(0, -1)
    assert isinstance(params, Published), f"{type(params)} is for another process"
    return params
