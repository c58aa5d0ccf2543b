"""Judging completions in a process of its own, which can be killed when it hangs.

The pool never blocks its caller: `submit` and `poll` are called between two calls
of the sampler.  The process is started by name, not through multiprocessing, whose
spawned children import the main module again, and with it JAX.  For the same reason
nothing here imports JAX, and neither should the score function's module.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import connection as pipes
from typing import Any, Literal, NamedTuple

Status = Literal["correct", "wrong", "no_answer", "verifier_timeout", "verifier_error"]
ScoreFunction = Callable[[str, str, dict[str, Any]], float]

_MAX_START_S = 120.0  # imports included; does not count for a verdict's timeout
_MAX_DETAIL = 500  # characters
_CHILD = (
    "import sys; from scalerl_jax.rewards import verifier; verifier.serve(sys.argv)"
)


def extract_answer(text: str, *, answer_after: str) -> str | None:
    """What follows the last `answer_after`, without spaces around; None without it."""
    _, found, answer = text.rpartition(answer_after)
    return answer.strip() if found else None


class Verdicts(NamedTuple):
    """How the answers of one group were judged, in their order."""

    key: Any  # as submitted
    statuses: list[Status]
    detail: str  # why there are timeouts and errors; empty without


class _Message(NamedTuple):
    """From a verifier process: a verdict, or without a status how its start went."""

    place: int = 0  # among the answers of the group
    status: Status | None = None
    detail: str = ""


@dataclasses.dataclass(kw_only=True)
class _Job:
    key: Any
    task: str
    answers: list[str | None]
    reference: dict[str, Any]
    statuses: list[Status | None]  # None: not judged yet
    details: list[str]

    def end(self, status: Status, detail: str) -> None:
        """Give what is not judged yet this status."""
        for place, known in enumerate(self.statuses):
            self.statuses[place] = known or status
        self.details.append(detail)


class _Worker:
    """A verifier process, the pipe to it, and what it is doing until when."""

    def __init__(self, score: str, *, timeout_s: float) -> None:
        self.pipe, child_end = pipes.Pipe()
        number = child_end.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(number), score, str(timeout_s)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_absolute(sys.path))},
            # Its own group: Ctrl-C does not reach it, and what it starts dies with it.
            start_new_session=True,
        )
        child_end.close()
        self.ready = False
        self.job: _Job | None = None
        self.deadline = time.monotonic() + _MAX_START_S

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
    """Judges the answers of groups in other processes, within a time limit.

    Args:
        score: (task, answer, reference) -> score, where 1 or more is correct; a
            module's own function, or its name as "module:function".
        timeout_s: for one group's answers together.
        num_workers: processes, each judging one group at a time.
    """

    def __init__(
        self, *, score: str | ScoreFunction, timeout_s: float, num_workers: int = 1
    ) -> None:
        """Starts the processes, and does not wait for them."""
        assert num_workers >= 1 and timeout_s > 0, (num_workers, timeout_s)
        self._score = score if isinstance(score, str) else _name_of(score)
        self._timeout_s = timeout_s
        self._waiting: collections.deque[_Job] = collections.deque()
        self._finished: list[Verdicts] = []
        self._killed: list[_Worker] = []  # not reaped yet
        self._workers = [self._start() for _ in range(num_workers)]
        self._closed = False

    @property
    def pending(self) -> int:
        """Groups submitted whose verdicts `poll` has not returned yet."""
        judging = sum(worker.job is not None for worker in self._workers)
        return len(self._waiting) + judging + len(self._finished)

    def submit(
        self,
        key: Any,
        task: str,
        answers: list[str | None],
        reference: dict[str, Any],
    ) -> None:
        """Have the answers of a group judged; None stands for a missing answer."""
        assert not self._closed, "the pool is closed"
        statuses: list[Status | None] = [
            "no_answer" if answer is None else None for answer in answers
        ]
        job = _Job(
            key=key,
            task=task,
            answers=answers,
            reference=reference,
            statuses=statuses,
            details=[],
        )
        if None in statuses:
            self._waiting.append(job)
            self._dispatch()
        else:
            self._finish(job)

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
            deadlines = [worker.deadline for worker in self._busy()]
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

    def _start(self) -> _Worker:
        return _Worker(self._score, timeout_s=self._timeout_s)

    def _busy(self) -> list[_Worker]:
        """Those that are starting or judging, and have a deadline."""
        return [worker for worker in self._workers if worker.job or not worker.ready]

    def _advance(self) -> None:
        """Read what has arrived, kill what is late, hand out what waits."""
        self._killed = [
            worker for worker in self._killed if worker.process.poll() is None
        ]
        for place, worker in enumerate(self._workers):
            # What was judged in time counts, even if the deadline has passed since.
            if not self._read(worker):
                self._workers[place] = self._replace_dead(worker)
            elif worker in self._busy() and time.monotonic() > worker.deadline:
                self._workers[place] = self._replace_late(worker)
        self._dispatch()

    def _dispatch(self) -> None:
        for place, worker in enumerate(self._workers):
            if not (self._waiting and worker.ready and worker.job is None):
                continue
            job = self._waiting[0]
            try:
                worker.pipe.send((job.task, job.answers, job.reference))
            except OSError:  # it died with nothing to do; the job is still waiting
                self._workers[place] = self._replace_dead(worker)
                continue
            worker.job = self._waiting.popleft()
            worker.deadline = time.monotonic() + self._timeout_s

    def _read(self, worker: _Worker) -> bool:
        """Take in a worker's messages; False if its process has ended."""
        try:
            while worker.pipe.poll():
                self._receive(worker, worker.pipe.recv())
        except (EOFError, OSError):
            return False
        return True

    def _receive(self, worker: _Worker, message: _Message) -> None:
        job = worker.job
        if message.status is None:
            if message.detail:
                raise RuntimeError(f"no verifier process can start: {message.detail}")
            worker.ready = True
            return
        assert job is not None, "a verdict without a job"
        job.statuses[message.place] = message.status
        if message.detail:
            job.details.append(message.detail)
        if None not in job.statuses:
            worker.job = None
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        statuses: list[Status] = [status for status in job.statuses if status]
        detail = "; ".join(dict.fromkeys(job.details))
        self._finished.append(Verdicts(job.key, statuses, detail))

    def _replace_dead(self, worker: _Worker) -> _Worker:
        """A new worker for one whose process has ended; its job ends as an error."""
        self._kill(worker)
        code = worker.exit_code()
        if not worker.ready:
            raise RuntimeError(
                f"no verifier process can start: it ended with exit code {code} "
                f"while it imported {self._score!r}; its stderr says more"
            )
        reason = f"the verifier process ended with exit code {code}"
        return self._replace(worker, "verifier_error", reason)

    def _replace_late(self, worker: _Worker) -> _Worker:
        """A new worker for one past its deadline, which is killed."""
        self._kill(worker)
        if not worker.ready:
            raise RuntimeError(
                f"no verifier process can start: importing {self._score!r} took more "
                f"than {_MAX_START_S} s"
            )
        reason = f"no verdict within reward.timeout_s = {self._timeout_s}"
        return self._replace(worker, "verifier_timeout", reason)

    def _replace(self, worker: _Worker, status: Status, reason: str) -> _Worker:
        if worker.job is not None:
            worker.job.end(status, reason)
            self._finish(worker.job)
        return self._start()

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


def serve(arguments: list[str]) -> None:
    """What the process does: judge one group after the other, until the pipe ends."""
    pipe = pipes.Connection(int(arguments[1]))
    try:
        module, _, name = arguments[2].partition(":")
        score = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001  raised again by poll() and wait()
        pipe.send(_Message(detail=f"{type(error).__name__}: {error}"))
        return
    pipe.send(_Message())
    # The pool kills first.  Only if it has died itself does this end a hanging call.
    limit_s = 2 * float(arguments[3]) + 10
    with open(os.devnull, "w") as nowhere:
        while True:
            try:
                task, answers, reference = pipe.recv()
            except (EOFError, ConnectionResetError):  # the pool's process has ended
                return
            faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
            for place, answer in enumerate(answers):
                if answer is not None:
                    status, detail = _judge(score, task, answer, reference)
                    pipe.send(_Message(place, status, detail))
            faulthandler.cancel_dump_traceback_later()


def _judge(
    score: ScoreFunction, task: str, answer: str, reference: dict[str, Any]
) -> tuple[Status, str]:
    try:
        # Partial credit, anything below 1, is not a pass.
        return ("correct" if score(task, answer, reference) >= 1.0 else "wrong"), ""
    except Exception as error:  # noqa: BLE001  becomes this rollout's status
        return "verifier_error", f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
