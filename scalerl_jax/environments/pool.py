"""A pool of processes that judge completions, and can be killed when they hang.

An environment's episode stays in the process that got its first turn.  Its turns
determine it: if that process has ended, another process gets all of them again.

The pool never blocks its caller: `submit` and `poll` are called between two calls
of the sampler, and a thread gives each process work as soon as it is free.

The file is above 400 lines: submitted, dispatched and lost work share records.
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing import connection as pipes
from typing import Any, NamedTuple

import psutil

from scalerl_jax.environments.verdict import (
    MAX_START_S,
    CallReturned,
    JudgedAnswer,
    JudgingJob,
    Kind,
    Loaded,
    OwnReward,
    Said,
    Setup,
    Share,
    Status,
    Step,
    Verdict,
    Verifier,
    VerifierProcess,
    adopt,
    ended,
    late,
    reap,
)

_MAX_STARTS = 8  # failed starts in a row, per process: over half a minute
_BACKOFF_S = 0.25  # before the second start; doubled for each later one
_IDLE_S = 60.0  # between two checks when nothing happens
_MOST_HOMES = 50_000  # episodes whose process is remembered
_LOOK_S = 0.05  # between two checks for a first process
_END_S = 5.0  # wait for the children of killed processes
UNNAMED = ""  # the verifier of prompts that name none


def verifier_of(reference: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return the verifier that a reference names; "" if it names no verifier.

    Raises:
        ValueError: the verifier is not among the `known`.
    """
    name = reference.get("verifier", UNNAMED)
    if name == "own" and name not in known:
        raise ValueError(
            "a prompt has a 'reference', which a reward function of your own judges; "
            "set environment = 'FILE.py:FUNCTION', or give it an 'answer' or 'tests'"
        )
    if name and name not in known:
        raise ValueError(
            f"a prompt's reference names the verifier {name!r}; choose from "
            f"{sorted(set(known) - {UNNAMED})}, or name none for its task's own"
        )
    return name


class NoVerifierError(RuntimeError):
    """No verifier process can be started, so that nothing can be judged."""


class Verdicts(NamedTuple):
    """The verdicts on one group's answers, or an environment's answer to a turn."""

    key: Any  # as submitted
    verdicts: list[Said]

    @property
    def judgements(self) -> list[Verdict]:
        """Return the verdicts, without the environment's texts between turns."""
        return [each for each in self.verdicts if isinstance(each, Verdict)]

    @property
    def statuses(self) -> list[Status]:
        """Return the status of each."""
        return [each.status for each in self.judgements]

    @property
    def detail(self) -> str:
        """Return the reason why answers have no verdict; empty if all have one."""
        details = (each.detail for each in self.judgements if each.detail)
        return "; ".join(dict.fromkeys(details))


class VerifierPool:
    """Judges the answers of groups in other processes, each within a time limit.

    A process that ends is replaced.  A failed start is tried again after a growing
    pause; `poll` and `wait` raise NoVerifierError only after `_MAX_STARTS` failures in
    a row, or if the first import of a verifier fails.

    Args:
        score: (task, answer, reference) -> verdict, or score, where 1 or more is
            correct, for prompts whose reference names no "verifier"; the name of a
            function, as "module:function".
        named: the verifiers that a reference may name.  A process imports one when
            it gets the first answer for it.
        timeout_s: limit for one answer.
        num_workers: processes; the answers of a group are divided among them.
        memory_mib: limit of a process's memory beside its imports; an answer whose
            judging needs more is too costly.
        passed_at: the score from which on an answer is correct.
        own: the reward functions or the environment of a user, for all answers.
    """

    def __init__(
        self,
        *,
        score: str = "",
        timeout_s: float,
        named: Mapping[str, Verifier] | None = None,
        num_workers: int = 1,
        memory_mib: int = 4096,
        passed_at: float = 1.0,
        own: OwnReward | None = None,
    ) -> None:
        """Start the processes without waiting for them."""
        assert num_workers >= 1 and timeout_s > 0, (num_workers, timeout_s)
        self._setup = Setup(
            verifiers={UNNAMED: Verifier(score), **(named or {})},
            preload=UNNAMED,
            timeout_s=timeout_s,
            memory_mib=memory_mib,
            passed_at=passed_at,
            own=own,
        )
        adopt()
        self._num_workers = num_workers
        self.pending = 0  # groups submitted whose verdicts `poll` has not returned
        self.restarts = 0  # of processes
        self._arrived: list[Verdicts] = []
        self._failure: Exception | None = None
        self._found: queue.SimpleQueue[Kind] = queue.SimpleQueue()
        self._kind = None if own else Kind()
        self._closed = False
        # Passed between the two threads: one appends, the other takes from the left.
        self._waiting: collections.deque[Share] = collections.deque()
        self._judged: queue.SimpleQueue[Verdicts | Exception] = queue.SimpleQueue()
        self._woken, self._wake = pipes.Pipe(duplex=False)
        # Used only by the thread.
        self._workers: list[VerifierProcess] = []
        self._turns = False  # an environment answers turn by turn
        self._homes: dict[Any, VerifierProcess] = {}  # of episodes under way
        self._starts = [0.0] * num_workers  # due times of starts; time.monotonic()
        self._loaded: set[str] = set()  # verifiers that a process has imported
        self._failed: collections.Counter[str] = collections.Counter()  # in a row
        self._killed: list[VerifierProcess] = []  # not reaped yet
        self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: Any,
        task: str,
        answers: list[str | None],
        reference: dict[str, Any],
        *,
        prompt: str = "",
        step: Step | None = None,
    ) -> None:
        """Queue the answers of a group for judging; None stands for a missing answer.

        `prompt` is its text, for a user's reward functions.  `step` is the place of the
        one answer in its episode; an environment may then answer `More`.

        Raises:
            ValueError: the reference names a verifier that the pool does not have.
        """
        assert not self._closed, "the pool is closed"
        known, own = self._setup.verifiers, self._setup.own
        job = JudgingJob(
            key=key,
            verifier=UNNAMED if own else verifier_of(reference, known),
            task=task,
            answers=answers,
            reference=reference,
            verdicts=[
                Verdict("no_answer") if answer is None else None for answer in answers
            ],
            prompt=prompt,
            step=step,
        )
        self.pending += 1
        places = job.unjudged(range(len(answers)))
        if not places:
            self._finish_if_judged(job)
            return
        count = self._num_workers
        shares = [Share(job, places[first::count]) for first in range(count)]
        self._waiting.extend(share for share in shares if share.places)
        self._wake.send_bytes(b"work")

    @property
    def kind(self) -> Kind:
        """Return the kind of a user's file: reward functions, or an environment.

        The first call waits for a process to import the file.

        Raises:
            NoVerifierError: no process can import it.
        """
        while self._kind is None:
            with contextlib.suppress(queue.Empty):
                self._kind = self._found.get(timeout=_LOOK_S)
            with contextlib.suppress(queue.Empty):
                self._arrive(timeout_s=0.0)
        return self._kind

    def poll(self) -> list[Verdicts]:
        """Return the verdicts that have arrived since the last call.

        Raises:
            NoVerifierError: no verifier process can be started.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrive(timeout_s=0.0)
        arrived, self._arrived = self._arrived, []
        self.pending -= len(arrived)
        return arrived

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has verdicts, none is pending, or `timeout_s` has passed.

        Raises:
            NoVerifierError: no verifier process can be started.
        """
        if self.pending and not self._arrived:
            with contextlib.suppress(queue.Empty):
                self._arrive(timeout_s=timeout_s)

    def close(self) -> None:
        """Kill the processes; pending groups get no verdicts."""
        if self._closed:
            return
        self._closed = True
        self._wake.send_bytes(b"end")
        self._thread.join()
        for worker in self._workers:
            worker.kill()
        for worker in (*self._workers, *self._killed):
            worker.process.wait()
            psutil.wait_procs(worker.below, timeout=_END_S)
        reap(wait_s=_END_S)
        self._wake.close()
        self._woken.close()

    def _arrive(self, *, timeout_s: float) -> None:
        """Take the next verdicts from the thread.

        Raises:
            Empty: none came within `timeout_s`.
        """
        assert not self._closed, "the pool is closed"
        if self._failure is None:
            next_one = self._judged.get(timeout=timeout_s)
            if isinstance(next_one, Verdicts):
                self._arrived.append(next_one)
                return
            self._failure = next_one
        raise self._failure

    # Methods of the thread.

    def _run(self) -> None:
        """Keep the processes busy until the pool is closed."""
        try:
            while not self._closed:
                self._start_due()
                self._advance()
                self._dispatch()
                self._sleep()
        except Exception as failure:  # noqa: BLE001  raised again by poll() and wait()
            self._judged.put(failure)

    def _sleep(self) -> None:
        """Wait for a message, a deadline or work."""
        moments = [worker.deadline for worker in self._workers if not worker.free]
        moments += self._starts
        pause = min([_IDLE_S, *(moment - time.monotonic() for moment in moments)])
        pipes.wait(
            [self._woken, *(worker.pipe for worker in self._workers)],
            timeout=max(0.0, pause),
        )
        while self._woken.poll():
            self._woken.recv_bytes()

    def _start_due(self) -> None:
        now = time.monotonic()
        num_due = sum(start <= now for start in self._starts)
        self._starts = [start for start in self._starts if start > now]
        for _ in range(num_due):
            try:
                self._workers.append(VerifierProcess(self._setup))
            except OSError as error:  # no memory, or too many processes
                self._start_later(UNNAMED, f"the system refuses one ({error}) for")

    def _advance(self) -> None:
        """Read messages of the processes; kill the processes that are late."""
        if self._killed:
            reap()
        self._killed = [
            worker for worker in self._killed if worker.process.poll() is None
        ]
        for worker in list(self._workers):
            # A verdict that came in time counts, even if the deadline has passed since.
            if not self._read(worker):
                self._replace(worker, is_late=False)
            elif not worker.free and time.monotonic() > worker.deadline:
                self._replace(worker, is_late=True)

    def _dispatch(self) -> None:
        for worker in list(self._workers):
            if not (self._waiting and worker.free):
                continue
            shares = self._take_for(worker)
            if not shares:
                continue
            try:
                worker.give(shares, timeout_s=self._setup.limit_s)
            except OSError:  # it ended or was stopped while idle
                self._waiting.extendleft(reversed(shares))
                self._replace(worker, is_late=False)

    def _take_for(self, worker: VerifierProcess) -> list[Share]:
        """Take work for a process: a share, or turns of several episodes."""
        if not self._turns:
            return [self._waiting.popleft()]
        assert self._setup.own is not None, "it alone answers so"
        most, found = self._setup.own.max_concurrent, []
        for _ in range(len(self._waiting)):
            share = self._waiting.popleft()
            assert share.job.step is not None, "an environment is given turns alone"
            home = self._homes.get(share.job.step.episode, worker)
            if home is worker and len(found) < most:
                self._homes[share.job.step.episode] = worker
                if len(self._homes) > _MOST_HOMES:  # an abandoned episode's
                    del self._homes[next(iter(self._homes))]
                found.append(share)
            else:
                self._waiting.append(share)
        return found

    def _read(self, worker: VerifierProcess) -> bool:
        """Read a worker's messages; return False if its process has ended."""
        try:
            while worker.pipe.poll():
                self._receive(worker, worker.pipe.recv())
        except (EOFError, OSError):
            return False
        return True

    def _receive(
        self, worker: VerifierProcess, message: Loaded | CallReturned | JudgedAnswer
    ) -> None:
        worker.begun_cpu_s = message.cpu_s
        worker.deadline = time.monotonic() + self._setup.limit_s  # of the next answer
        if isinstance(message, CallReturned):
            return
        if isinstance(message, Loaded):
            if not message.failure:
                worker.loaded.add(message.verifier)
                worker.loading = None
                if not self._loaded:
                    self._turns = message.kind.by_turns
                    self._found.put(message.kind)
                self._loaded.add(message.verifier)
                self._failed[message.verifier] = 0
            elif message.verifier not in self._loaded:
                raise NoVerifierError(
                    f"no verifier process can start: {message.failure}"
                )
            return  # after a failure the process ends, and is replaced
        assert worker.shares, "a verdict without work"
        job = worker.shares[message.share].job
        job.settle(message.place, message.verdict)
        if not any(each.unjudged for each in worker.shares):
            worker.shares = []
        self._finish_if_judged(job)

    def _finish_if_judged(self, job: JudgingJob) -> None:
        verdicts = [verdict for verdict in job.verdicts if verdict]
        if len(verdicts) == len(job.verdicts):
            if job.step is not None and isinstance(verdicts[0], Verdict):
                self._homes.pop(job.step.episode, None)
            self._judged.put(Verdicts(job.key, verdicts))

    def _replace(self, worker: VerifierProcess, *, is_late: bool) -> None:
        """Replace a process that is late or has ended; its answer gets no verdict.

        Other processes get its other answers.
        """
        # The time that a user's function computes says nothing about the answer.
        own = self._setup.own is not None
        computed_s = worker.computed_s() if is_late and not own else 0.0
        worker.kill(ending=not is_late)
        self._workers.remove(worker)
        self._killed.append(worker)
        if is_late:
            verdict = late(computed_s=computed_s, timeout_s=self._setup.limit_s)
            how = f"it took more than {MAX_START_S} s to import"
        else:
            exit_code = worker.exit_code()
            verdict = ended(exit_code, own=own)
            how = f"it ended with exit code {exit_code} while it imported"
        self._homes = {
            episode: home for episode, home in self._homes.items() if home is not worker
        }
        left = [share for share in worker.shares if share.unjudged]
        if left and worker.loading is None:  # it was judging the first one
            job, places = left[0].job, left[0].unjudged
            job.settle(places[0], verdict)
            left[0] = Share(job, places[1:])
            self._finish_if_judged(job)
        self._waiting.extendleft(
            Share(each.job, each.unjudged) for each in reversed(left) if each.unjudged
        )
        self.restarts += 1
        if worker.loading is None:
            self._starts.append(0.0)
        else:
            self._start_later(worker.loading, how)

    def _start_later(self, name: str, how: str) -> None:
        """Start a process after a pause, as the last failed to import verifier `name`.

        Raises:
            NoVerifierError: too many starts have failed in a row; `how` says why.
        """
        failed = self._failed[name] = self._failed[name] + 1
        if failed >= _MAX_STARTS * self._num_workers:
            function = self._setup.verifiers[name].function
            raise NoVerifierError(
                f"no verifier process can start: {how} {function!r}, the last of "
                f"{failed} starts in a row that failed; its stderr says more"
            )
        pause_s = _BACKOFF_S * 2 ** ((failed - 1) // self._num_workers)
        self._starts.append(time.monotonic() + pause_s)
