"""One verifier process as the pool sees it: what it is given, and until when."""

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing import connection as pipes
from typing import Any, NamedTuple

from scalerl_jax.rewards.serving import Setup, Work
from scalerl_jax.rewards.verdict import Status, Verdict

MAX_START_S = 120.0  # imports included; does not count for a verdict's timeout
_MAX_SEND_S = 10.0  # to a process that is free, and has stopped if it does not read
_CHILD = "import sys; from scalerl_jax.rewards import serving; " + (
    "serving.serve(int(sys.argv[1]))"
)


@dataclasses.dataclass(kw_only=True)
class Job:
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


class Share(NamedTuple):
    """The answers of a group that one process is given."""

    job: Job
    places: list[int]

    def work(self) -> Work:
        """The message for the process."""
        job = self.job
        answers = [(place, job.answers[place] or "") for place in self.places]
        return Work(job.verifier, job.task, answers, job.reference)


class VerifierProcess:
    """A verifier process, the pipe to it, and what it is doing until when."""

    def __init__(self, setup: Setup) -> None:
        """Start the process, and do not wait for it.

        Raises:
            OSError: the system does not start one.
        """
        self.pipe, child_end = pipes.Pipe()
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            limit = struct.pack("ll", int(_MAX_SEND_S), 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
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
        self.share: Share | None = None
        self.deadline = time.monotonic() + MAX_START_S

    @property
    def free(self) -> bool:
        """Whether it waits for work."""
        return self.share is None and self.loading is None

    def give(self, share: Share, *, timeout_s: float) -> None:
        """Send it answers to judge.

        Raises:
            OSError: it has ended, or was stopped and does not read.
        """
        self.pipe.send(share.work())
        self.share = share
        if share.job.verifier not in self.loaded:
            self.loading, timeout_s = share.job.verifier, MAX_START_S
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


def _absolute(paths: list[str]) -> list[str]:
    return [os.path.abspath(path) for path in paths]  # "" is the current directory
