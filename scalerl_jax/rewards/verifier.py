"""Judging completions in processes of their own, which can be killed when they hang.

The pool never blocks its caller: `submit` and `poll` are called between two calls
of the sampler.  What the processes do is in `serving`.
"""

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from multiprocessing import connection as pipes
from typing import Any, NamedTuple

from scalerl_jax.rewards.serving import Judged, Loaded, Setup, Verifier, Work
from scalerl_jax.rewards.verdict import ScoreFunction, Status, Verdict

_MAX_START_S = 120.0  # imports included; does not count for a verdict's timeout
_CHILD = "import sys; from scalerl_jax.rewards import serving; " + (
    "serving.serve(int(sys.argv[1]))"
)
# The verifier of prompts that name none.
_UNNAMED = ""


def verifier_of(reference: Mapping[str, Any], known: Iterable[str]) -> str:
    """The name of the verifier that a reference asks for; "" where it names none.

    Raises:
        ValueError: it is not among the `known`.
    """
    name = reference.get("verifier", _UNNAMED)
    if name and name not in known:
        raise ValueError(
            f"a prompt's reference names the verifier {name!r}; choose from "
            f"{sorted(set(known) - {_UNNAMED})}, or name none for its task's own"
        )
    return name


class Verdicts(NamedTuple):
    """How the answers of one group were judged, in their order."""

    key: Any  # as submitted
    statuses: list[Status]
    detail: str  # why there are timeouts and errors; empty without


@dataclasses.dataclass(kw_only=True)
class _Job:
    """A group, and what is known of it."""

    key: Any
    verifier: str
    task: str
    answers: list[str | None]
    reference: dict[str, Any]
    statuses: list[Status | None]  # None: not judged yet
    details: list[str]

    def settle(self, place: int, verdict: Verdict) -> None:
        """Write down the verdict on one answer."""
        self.statuses[place] = verdict.status
        if verdict.detail:
            self.details.append(verdict.detail)

    def unjudged(self, places: Iterable[int]) -> list[int]:
        """Those of `places` without a verdict, in order."""
        return [place for place in places if self.statuses[place] is None]


class _Share(NamedTuple):
    """The answers of a group that one process is given."""

    job: _Job
    places: list[int]

    def work(self) -> Work:
        job = self.job
        answers = [(place, job.answers[place] or "") for place in self.places]
        return Work(job.verifier, job.task, answers, job.reference)


class _Worker:
    """A verifier process, the pipe to it, and what it is doing until when."""

    def __init__(self, setup: Setup) -> None:
        self.pipe, child_end = pipes.Pipe()
        number = child_end.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_absolute(sys.path))},
            # Its own group: Ctrl-C does not reach it, and what it starts dies with it.
            start_new_session=True,
        )
        child_end.close()
        with contextlib.suppress(BrokenPipeError):  # found again when it is read
            self.pipe.send(setup)
        self.loaded: set[str] = set()
        self.loading: str | None = setup.preload
        self.share: _Share | None = None
        self.deadline = time.monotonic() + _MAX_START_S

    @property
    def free(self) -> bool:
        """Whether it waits for work."""
        return self.share is None and self.loading is None

    def give(self, share: _Share, *, timeout_s: float) -> None:
        """Send it answers to judge.

        Raises:
            OSError: it has ended.
        """
        self.pipe.send(share.work())
        self.share = share
        if share.job.verifier not in self.loaded:
            self.loading, timeout_s = share.job.verifier, _MAX_START_S
        self.deadline = time.monotonic() + timeout_s

    def kill(self) -> None:
        """End the process and all that it started; nothing can ignore this."""
        if self.pipe.closed:
            return  # killed before; its number may be another process's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.pipe.close()

    def exit_code(self) -> int | None:
        """Of a process that has closed its pipe or was killed."""
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None


class VerifierPool:
    """Judges the answers of groups in other processes, each within a time limit.

    Args:
        score: (task, answer, reference) -> verdict, or score, where 1 or more is
            correct, for prompts whose reference names no "verifier"; a module's own
            function, or its name as "module:function".
        named: the verifiers that a reference may name.  Each is imported by a
            process that is given its first answer to judge.
        timeout_s: for one answer.
        num_workers: processes; the answers of a group are dealt out among them.
        memory_mib: that a process may take beside its imports; more is an error of
            the answer that it judges.
    """

    def __init__(
        self,
        *,
        score: str | ScoreFunction,
        timeout_s: float,
        named: Mapping[str, Verifier] | None = None,
        num_workers: int = 1,
        memory_mib: int = 4096,
    ) -> None:
        """Starts the processes, and does not wait for them."""
        assert num_workers >= 1 and timeout_s > 0, (num_workers, timeout_s)
        function = score if isinstance(score, str) else _name_of(score)
        self._setup = Setup(
            verifiers={_UNNAMED: Verifier(function), **(named or {})},
            preload=_UNNAMED,
            timeout_s=timeout_s,
            memory_mib=memory_mib,
        )
        self._timeout_s = timeout_s
        self._waiting: collections.deque[_Share] = collections.deque()
        self._judging = 0  # groups
        self._finished: list[Verdicts] = []
        self._killed: list[_Worker] = []  # not reaped yet
        self._workers = [_Worker(self._setup) for _ in range(num_workers)]
        self._closed = False

    @property
    def pending(self) -> int:
        """Groups submitted whose verdicts `poll` has not returned yet."""
        return self._judging + len(self._finished)

    def submit(
        self,
        key: Any,
        task: str,
        answers: list[str | None],
        reference: dict[str, Any],
    ) -> None:
        """Have the answers of a group judged; None stands for a missing answer.

        Raises:
            ValueError: the reference names a verifier that the pool does not have.
        """
        assert not self._closed, "the pool is closed"
        job = _Job(
            key=key,
            verifier=verifier_of(reference, self._setup.verifiers),
            task=task,
            answers=answers,
            reference=reference,
            statuses=["no_answer" if answer is None else None for answer in answers],
            details=[],
        )
        self._judging += 1
        places = job.unjudged(range(len(answers)))
        count = len(self._workers)
        shares = [_Share(job, places[first::count]) for first in range(count)]
        self._waiting.extend(share for share in shares if share.places)
        self._finish_if_judged(job)
        self._dispatch()

    def poll(self) -> list[Verdicts]:
        """The verdicts that have come since the last call.

        Raises:
            RuntimeError: if a verifier process cannot start at all.
        """
        assert not self._closed, "the pool is closed"
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_s: float) -> None:
        """Return when `poll` has verdicts to give, none is pending, or after so long.

        Raises:
            RuntimeError: if a verifier process cannot start at all.
        """
        assert not self._closed, "the pool is closed"
        end = time.monotonic() + timeout_s
        self._advance()
        while self.pending and not self._finished:
            now = time.monotonic()
            if now >= end:
                return
            deadlines = [worker.deadline for worker in self._workers if not worker.free]
            pause = max(0.0, min(end, *deadlines) - now)
            pipes.wait([worker.pipe for worker in self._workers], timeout=pause)
            self._advance()

    def close(self) -> None:
        """Kill the processes; what is pending is lost."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        for worker in (*self._workers, *self._killed):
            worker.process.wait()
        self._workers, self._killed = [], []

    def _advance(self) -> None:
        """Read what has arrived, kill what is late, hand out what waits."""
        self._killed = [
            worker for worker in self._killed if worker.process.poll() is None
        ]
        for place, worker in enumerate(self._workers):
            # What was judged in time counts, even if the deadline has passed since.
            if not self._read(worker):
                self._workers[place] = self._replace_dead(worker)
            elif not worker.free and time.monotonic() > worker.deadline:
                self._workers[place] = self._replace_late(worker)
        self._dispatch()

    def _dispatch(self) -> None:
        for place, worker in enumerate(self._workers):
            if not (self._waiting and worker.free):
                continue
            try:
                worker.give(self._waiting[0], timeout_s=self._timeout_s)
            except OSError:  # it died with nothing to do; the share is still waiting
                self._workers[place] = self._replace_dead(worker)
                continue
            self._waiting.popleft()

    def _read(self, worker: _Worker) -> bool:
        """Take in a worker's messages; False if its process has ended."""
        try:
            while worker.pipe.poll():
                self._receive(worker, worker.pipe.recv())
        except (EOFError, OSError):
            return False
        return True

    def _receive(self, worker: _Worker, message: Loaded | Judged) -> None:
        worker.deadline = time.monotonic() + self._timeout_s  # of the next answer
        if isinstance(message, Loaded):
            if message.failure:
                raise RuntimeError(f"no verifier process can start: {message.failure}")
            worker.loaded.add(message.verifier)
            worker.loading = None
            return
        assert worker.share is not None, "a verdict without work"
        job, places = worker.share
        job.settle(message.place, message.verdict)
        if not job.unjudged(places):
            worker.share = None
        self._finish_if_judged(job)

    def _finish_if_judged(self, job: _Job) -> None:
        statuses: list[Status] = [status for status in job.statuses if status]
        if len(statuses) < len(job.statuses):
            return
        detail = "; ".join(dict.fromkeys(job.details))
        self._finished.append(Verdicts(job.key, statuses, detail))
        self._judging -= 1

    def _replace_dead(self, worker: _Worker) -> _Worker:
        """A new worker for one whose process has ended, which is its answer's error."""
        self._kill(worker)
        code = worker.exit_code()
        if worker.loading is not None:
            raise RuntimeError(
                f"no verifier process can start: it ended with exit code {code} "
                f"while it imported {self._loading(worker)!r}; its stderr says more"
            )
        reason = f"the verifier process ended with exit code {code}"
        return self._replace(worker, Verdict("verifier_error", reason))

    def _replace_late(self, worker: _Worker) -> _Worker:
        """A new worker for one past its deadline, which is killed."""
        self._kill(worker)
        if worker.loading is not None:
            raise RuntimeError(
                f"no verifier process can start: importing {self._loading(worker)!r} "
                f"took more than {_MAX_START_S} s"
            )
        reason = f"no verdict within reward.timeout_s = {self._timeout_s}"
        return self._replace(worker, Verdict("verifier_timeout", reason))

    def _loading(self, worker: _Worker) -> str:
        return self._setup.verifiers[worker.loading or _UNNAMED].function

    def _replace(self, worker: _Worker, verdict: Verdict) -> _Worker:
        """End the answer that it was judging; those behind it are judged by others."""
        if worker.share is not None:
            job, places = worker.share
            place, *rest = job.unjudged(places)
            job.settle(place, verdict)
            if rest:
                self._waiting.appendleft(_Share(job, rest))
            self._finish_if_judged(job)
        return _Worker(self._setup)

    def _kill(self, worker: _Worker) -> None:
        worker.kill()
        self._killed.append(worker)


def _absolute(paths: list[str]) -> list[str]:
    return [os.path.abspath(path) for path in paths]  # "" is the current directory


def _name_of(score: ScoreFunction) -> str:
    module, name = score.__module__, score.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"the score function {module}:{name} cannot be imported in another "
            f"process; define it at the top level of a module that is not run itself"
        )
    return f"{module}:{name}"
