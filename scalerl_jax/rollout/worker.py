"""The sampling thread: prompt -> completions -> verdicts -> group -> queue.

It starts as many groups as the queue admits, makes one `generate` call after the
other with the newest published params (the KV cache is kept), and never waits for a
verifier while there is something to sample.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from scalerl_jax.data.streams import Stream
from scalerl_jax.data.thinking import extract_answer
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.learner.publish import Published, receive
from scalerl_jax.rewards.verdict import UNJUDGED
from scalerl_jax.rewards.verifier import Verdicts, VerifierPool
from scalerl_jax.rollout.queue import QueueClosed, RolloutQueue
from scalerl_jax.sampler.requests import (
    Completion,
    Request,
    Samples,
    SchedulerStats,
)
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Group, Prompt, PyTree, Rollout
from scalerl_jax.utils.ledger import Ledger

_IDLE_WAIT_S = 0.05  # between two looks, when there is nothing to sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judging:
    """How completions become rewards."""

    tokenizer: Tokenizer
    answer_after: str
    correct: float
    wrong: float
    cut_off_is_wrong: bool = False  # whatever the verifier says of it
    unjudged_is_wrong: bool = False  # else nothing is learned from it

    def answer(self, tokens: np.ndarray) -> str | None:
        """What the verifier is given; None where there is no answer."""
        text = self.tokenizer.decode(tokens.tolist())
        return extract_answer(text, answer_after=self.answer_after)

    def rollout(self, completion: Completion, status: str) -> Rollout:
        """A completion with its verdict."""
        counted_wrong = completion.cut_off and self.cut_off_is_wrong
        passed = status == "correct" and not counted_wrong
        judged = status not in UNJUDGED or self.unjudged_is_wrong or counted_wrong
        return Rollout(
            completion_tokens=completion.tokens,
            completion_mask=completion.mask,
            behavior_logprobs=completion.logprobs,
            policy_versions=completion.versions,
            cut_off=completion.cut_off,
            interrupted=completion.interrupted,
            reward=(self.correct if passed else self.wrong) if judged else 0.0,
            passed=passed,
            judged=judged,
            status=status,
        )


@dataclasses.dataclass(kw_only=True)
class _Open:
    """A group that is being sampled or judged."""

    prompt: Prompt
    begun_version: int  # sets its length budget
    started_s: float
    completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
    finished_version: int = -1

    @property
    def finished_tokens(self) -> int:
        """Tokens of those of its completions that have ended."""
        return sum(len(each.tokens) for each in self.completions.values())


class RolloutWorker:
    """Runs `run` in a thread of its own; the learner calls everything else."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        stream: Stream,
        queue: RolloutQueue,
        verifier: VerifierPool,
        judging: Judging,
        sampling: Sampling,
        make_samples: Callable[[Prompt, int], Samples],
        ledger: Ledger,
        flops: Callable[[SchedulerStats], float],
        pool: str,
        group_size: int,
        group_timeout_s: float,
    ) -> None:
        """A worker without params; `publish` must come before `start`."""
        self._scheduler = scheduler
        self._stream = stream
        self._queue = queue
        self._verifier = verifier
        self._judging = judging
        self._sampling = sampling
        self._make_samples = make_samples  # of a prompt begun at a version
        self._ledger = ledger
        self._flops = flops  # of the passes that a scheduler has counted
        self._counted: dict[str, float] = {}  # what the ledger has of them
        self._pool = pool
        self._group_size = group_size
        self._group_timeout_s = group_timeout_s
        self._open: dict[int, _Open] = {}
        self.sampler_metrics: dict[str, int] = {}  # as of the last call
        self._published: tuple[PyTree, int] | None = None
        self._parking = threading.Condition()
        self._pauses = 0
        self._parked = False
        self._stopped = False
        self._thread = threading.Thread(target=self.run, name="rollout", daemon=True)

    def publish(self, published: Published, *, policy_version: int) -> None:
        """Params for the next call; the one under way keeps those that it has.

        Raises:
            RuntimeError: they are not what was sent; those before stay in use.
        """
        params = receive(published, policy_version=policy_version)
        self._published = (params, policy_version)
        self._queue.wake()

    def start(self) -> None:
        """Begin to sample."""
        assert self._published is not None, "publish params first"
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Close the queue and wait for the thread; a second call does nothing.

        A call that has not ended by then may do so later: it changes nothing more.
        """
        self._queue.close()
        if not self._stopped and self._thread.is_alive():
            self._thread.join(timeout_s)
        self._stopped = True

    @contextlib.contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """The worker stands still between two calls while the block runs.

        One that has failed or was stopped stands still for good.
        """
        with self._parking:
            self._pauses += 1
            self._queue.wake()
            still = self._parking.wait_for(
                lambda: self._parked or self._stopped or not self._thread.is_alive(),
                timeout_s,
            )
        try:
            if not still:
                raise TimeoutError(
                    f"the sampling thread did not finish its call in {timeout_s} s"
                )
            yield
        finally:
            with self._parking:
                self._pauses -= 1
                self._parking.notify_all()

    def in_flight(self) -> list[dict[str, int]]:
        """The open groups, as JSON values; call it while paused."""
        return [
            {
                "ticket": ticket,
                "prompt_id": opened.prompt.prompt_id,
                "epoch": opened.prompt.epoch,
                "begun_version": opened.begun_version,
                "tokens": opened.finished_tokens
                + self._scheduler.unfinished_tokens(ticket),
            }
            for ticket, opened in sorted(self._open.items())
        ]

    def reissue(self, in_flight: list[dict[str, int]], *, version: int) -> None:
        """Start the groups of a checkpoint again, from their prompts.

        What had been generated for them by then leads to no gradient.
        """
        for entry in in_flight:
            self._ledger.waste_tokens(entry["tokens"])
            prompt = self._stream.prompt(entry["prompt_id"], epoch=entry["epoch"])
            self._queue.readmit(entry["ticket"], version)
            self._begin(entry["ticket"], prompt, version=entry["begun_version"])

    def run(self) -> None:
        """Sample until the queue is closed; hand a failure to the learner."""
        try:
            while True:
                self._park()
                if not self._turn():
                    self._rest()
        except QueueClosed:
            pass
        except BaseException as failure:  # noqa: BLE001  raised again by take()
            self._queue.fail(failure)
        finally:
            with self._parking:
                self._parked = True
                self._parking.notify_all()

    def _turn(self) -> bool:
        """Admit, sample once, collect verdicts; whether there was anything to do."""
        assert self._published is not None, "start() has checked it"
        params, version = self._published
        self._admit(version)
        self._drop_late()
        worked = self._scheduler.busy
        if worked:
            with self._ledger.activity("generate", pool=self._pool):
                finished = self._scheduler.step(params, version=version)
            self._count_work()
            self._queue.raise_if_over()  # before the books of a stopped run change
            for completion in finished:
                self._collect(completion, version)
        verdicts = self._verifier.poll()
        for each in verdicts:
            self._settle(each)
        return worked or bool(verdicts)

    def _admit(self, version: int) -> None:
        """As many groups as the queue allows and the slots can begin."""
        while self._scheduler.free_slots > 0:
            ticket = self._queue.admit(version)
            if ticket is None:
                return
            try:
                prompt = self._stream.next(version)
            except BaseException:
                self._queue.drop(ticket, "failed")  # no checkpoint is to wait for it
                raise
            self._begin(ticket, prompt, version=version)

    def _begin(self, ticket: int, prompt: Prompt, *, version: int) -> None:
        self._open[ticket] = _Open(
            prompt=prompt, begun_version=version, started_s=time.monotonic()
        )
        self._scheduler.submit(
            Request(
                request_id=ticket,
                tokens=prompt.tokens,
                samples=self._make_samples(prompt, version),
                sampling=self._sampling,
            )
        )

    def _collect(self, completion: Completion, version: int) -> None:
        if completion.failure:
            raise FloatingPointError(
                f"sample {completion.sample} of prompt "
                f"{self._open[completion.request_id].prompt.prompt_id} failed: "
                f"{completion.failure}"
            )
        opened = self._open[completion.request_id]
        opened.completions[completion.sample] = completion
        if len(opened.completions) < self._group_size:
            return
        opened.finished_version = version
        self._queue.sampled(completion.request_id)
        answers = [
            self._judging.answer(opened.completions[sample].tokens)
            for sample in range(self._group_size)
        ]
        self._verifier.submit(
            completion.request_id, opened.prompt.task, answers, opened.prompt.reference
        )

    def _settle(self, verdicts: Verdicts) -> None:
        """A judged group goes into the queue."""
        opened = self._open[verdicts.key]
        group = Group(
            ticket=verdicts.key,
            prompt=opened.prompt,
            rollouts=tuple(
                self._judging.rollout(opened.completions[sample], status)
                for sample, status in enumerate(verdicts.statuses)
            ),
            finished_version=opened.finished_version,
            detail=verdicts.detail,
        )
        self._queue.put(group)
        del self._open[verdicts.key]

    def _drop_late(self) -> None:
        """Give up groups that have been sampled for longer than the limit."""
        limit = time.monotonic() - self._group_timeout_s
        late = [
            ticket
            for ticket, opened in self._open.items()
            if opened.started_s < limit and opened.finished_version < 0
        ]
        for ticket in late:
            opened = self._open.pop(ticket)
            self._scheduler.cancel(ticket)
            self._count_work()
            self._ledger.waste_tokens(opened.finished_tokens)
            self._queue.drop(ticket, "timeout")

    def _count_work(self) -> None:
        """What the sampler has done since the last time, into the ledger."""
        stats = self._scheduler.stats
        self.sampler_metrics = stats.metrics()
        before, self._counted = (
            self._counted,
            {
                "generated_tokens": stats.generated_tokens,
                "wasted_tokens": stats.wasted_tokens,
                "generate_flops": self._flops(stats),
            },
        )
        self._ledger.count(
            **{
                name: amount - before.get(name, 0)
                for name, amount in self._counted.items()
            }
        )

    def _rest(self) -> None:
        """Wait for a verdict if one is due, else for room in the queue."""
        if self._verifier.pending:
            with self._ledger.activity("verify", pool=self._pool):
                self._verifier.wait(_IDLE_WAIT_S)
        else:
            self._queue.wait(_IDLE_WAIT_S)

    def _park(self) -> None:
        with self._parking:
            if self._pauses:
                self._parked = True
                self._parking.notify_all()
                self._parking.wait_for(lambda: not self._pauses)
                self._parked = False
