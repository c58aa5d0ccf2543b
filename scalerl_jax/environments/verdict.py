"""Verdicts on answers, environments' answers to turns, and the pool's side of both.

`generation.judging.Judging` turns verdicts into rewards.  `environments.process` is
the verifier process.  It is started by name, not through multiprocessing, whose spawned
children import the main module again, and JAX with it.  Its messages are of the classes
below: no JAX here, nor in a score function's module.

The file is above 400 lines: it has the messages and the code that sends and reads them.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection as pipes
from typing import Any, Literal, NamedTuple, Protocol

import psutil

from scalerl_jax.process.child_environment import child_environment, own_python

MAX_START_S = 120.0  # imports included; not part of a verdict's timeout
_MAX_SEND_S = 10.0  # after this time a free process that does not read has stopped
_MAX_END_S = 1.0  # to end, of a process that has closed its pipe or was killed
_SET_CHILD_SUBREAPER = 36  # of prctl, in linux/prctl.h

Status = Literal[
    "correct",
    "wrong",
    "no_answer",  # the completion holds no answer
    "unparsable",  # the completion's answer cannot be read
    "too_costly",  # judging the answer takes all of its time or memory
    "verifier_timeout",
    "verifier_error",
    "bad_reward",  # a reward function returned something that is not a reward
    "bad_observation",  # an environment returned nothing to read, or too much of it
    "no_end",  # an environment did not end within the limits of an episode
]
_FAILURES: tuple[Status, ...] = (
    "verifier_timeout",
    "verifier_error",
    "bad_reward",
    "bad_observation",
    "no_end",
)
# Share of an answer's time.  Ordinary answers take a thousandth of the time, and the
# first one of a process a tenth at most.
_COMPUTING = 0.25


class Done(NamedTuple):
    """The end of an episode: its reward, and named parts of it, for the metrics."""

    reward: float
    parts: Mapping[str, float] = {}


class More(NamedTuple):
    """An environment's answer to a turn: what to read before the next turn.

    A text is framed and tokenised.  Token ids are read unchanged, with their frame.
    """

    text: str = ""
    role: str = "user"  # of the message, in a chat template: "tool", perhaps
    reward: float | None = None  # of the turn that it answers, for reward.per_turn
    tokens: Sequence[int] | None = None  # in place of a text


class Opening(NamedTuple):
    """An environment's messages before the first turn, behind the prompt."""

    messages: tuple[More, ...] = ()


class Environment(Protocol):
    """One episode of a user's environment; its methods may be `async`.

    It may also have `cut() -> Done`, which is called if the limits of an episode leave
    no room for another turn, and `close()`, which is called last.
    """

    def begin(self, prompt: str, reference: Any) -> Any:
        """Begin with a prompt's text and what belongs to it.

        Return None, or what the policy reads behind the prompt: a text, a `More`, or
        several.  If annotated `-> None`, it is called only with the first turn.
        """
        ...

    def step(self, completion: str) -> Any:
        """Answer a turn's text: `More`, or at the end `Done` or a number."""
        ...


class Verdict(NamedTuple):
    """The judgement of one answer."""

    status: Status
    detail: str = ""  # the reason, if there is no verdict
    reward: float | None = None  # None: what the settings give for the status
    parts: Mapping[str, float | None] = {}  # of the reward, by name; None: unjudged


# The answer of a verifier process: a verdict, or an environment's messages.
Said = Verdict | More | Opening


def count_as_judged(
    statuses: Sequence[str], *, max_too_costly_share: float
) -> list[bool]:
    """Return for each of a prompt's answers whether it counts as judged.

    Answers on which a verifier failed do not.  Answers that are too costly to judge do
    not either, if they are at most `max_too_costly_share` of the prompt's answers; if
    there are more, all count as wrong, so that no policy gains by preferring them.
    """
    costly = statuses.count("too_costly")
    excused = costly <= max_too_costly_share * len(statuses)
    return [
        status not in _FAILURES and not (status == "too_costly" and excused)
        for status in statuses
    ]


def lacks_verdict(status: str, *, judged: bool) -> bool:
    """Return whether an answer has no verdict, though it may count as a wrong one.

    A too costly answer that is judged wrong for that has a verdict.
    """
    return status in _FAILURES or (status == "too_costly" and not judged)


def figures_of_parts(
    parts: Sequence[Mapping[str, float | None]],
) -> dict[str, float]:
    """Return each part's mean over the rollouts that have it, and its unjudged share.

    They are called `reward/NAME` and `reward/NAME/unjudged_share`.
    """
    figures = {}
    for name in sorted({name for each in parts for name in each}):
        found = [each[name] for each in parts if name in each]
        values = [value for value in found if value is not None]
        figures[f"reward/{name}"] = (
            math.fsum(values) / len(values) if values else math.nan
        )
        figures[f"reward/{name}/unjudged_share"] = 1 - len(values) / len(found)
    return figures


def late(*, computed_s: float, timeout_s: float) -> Verdict:
    """Return the verdict on an answer that was not judged within `timeout_s`.

    It is too costly if its process computed in that time.  A process that was stopped,
    or got hardly any time on a busy machine, shows nothing about the answer.
    """
    if computed_s >= _COMPUTING * timeout_s:
        reason = f"still computing after reward.timeout_s = {timeout_s}"
        return Verdict("too_costly", reason)
    reason = f"no verdict within reward.timeout_s = {timeout_s}"
    return Verdict("verifier_timeout", reason)


def ended(exit_code: int | None, *, own: bool = False) -> Verdict:
    """Return the verdict on an answer whose process ended while it judged it.

    `own`: a user's function judged it, and is at fault whatever the answer.
    """
    reason = f"the verifier process ended with exit code {exit_code}"
    # The stack is full of calls, as deep as the answer's text nests.
    full = exit_code == -signal.SIGSEGV and not own
    return Verdict("too_costly" if full else "verifier_error", reason)


# (task, answer, reference) -> a verdict, or a score: 1 or more is correct
ScoreFunction = Callable[[str, str, dict[str, Any]], float | Verdict]


class Verifier(NamedTuple):
    """A score function by name, and the settings that it takes as keywords."""

    function: str  # "module:function"
    settings: Mapping[str, Any] = {}


class OwnReward(NamedTuple):
    """A user's reward functions or environment: their source, weights and limits."""

    file: str  # or the name of a module
    text: str | None  # of the file; None: the module is imported
    functions: tuple[str, ...]
    weights: tuple[float, ...]  # of the functions, in a sum
    max_magnitude: float  # of the reward that a function returns
    max_concurrent: int  # calls of `async` functions in one process
    variables: tuple[str, ...] = ()  # environment variables for the process
    prints: bool = False  # its output goes to stderr; else it is discarded
    max_observation_tokens: int = 1024
    given: Mapping[str, Any] = {}  # arguments that an environment's maker may take
    answer_after: str = ""  # for the prompt's own verifier, if the maker uses it
    by_turns: bool = False  # it is an environment, as a process found that loaded it


class Setup(NamedTuple):
    """The first message to a process."""

    verifiers: Mapping[str, Verifier]
    preload: str  # the name of the verifier to import at once
    timeout_s: float  # of one answer
    memory_mib: int  # limit, beside the memory of the imports
    passed_at: float = 1.0  # a score from which on an answer is correct
    own: OwnReward | None = None  # judges all answers, in place of the verifiers

    @property
    def limit_s(self) -> float:
        """Return the time for one answer, in which all functions are called."""
        return self.timeout_s * (len(self.own.functions) if self.own else 1)


class Step(NamedTuple):
    """The place of a turn in its episode."""

    episode: Any  # identifies the episode in a pool
    turns: tuple[tuple[str, More], ...] = ()  # earlier completions and observations
    last: bool = False  # the limits of an episode leave no room for another
    cut: bool = False  # the turn was answered, and there is no room for another
    begins: bool = False  # no turn yet: the environment opens the episode
    opened: Opening = Opening()  # the environment's opening of the episode
    refused: Verdict | None = None  # ends the episode: a failed opening, or a limit


class GroupAnswers(NamedTuple):
    """Answers of one group, with their places in it."""

    verifier: str
    task: str
    answers: list[tuple[int, str]]
    reference: dict[str, Any]
    prompt: str = ""  # its text
    step: Step | None = None  # of the one answer, if it is a turn of an episode


class Kind(NamedTuple):
    """The kind of a user's file, as the process that loaded it found."""

    by_turns: bool = False  # an environment, which answers turn by turn
    opens: bool = False  # which may have messages before the first turn


class Loaded(NamedTuple):
    """A message that a verifier has been imported, or why it could not be."""

    verifier: str
    failure: str = ""
    cpu_s: float = 0.0  # of the process so far
    kind: Kind = Kind()


class JudgedAnswer(NamedTuple):
    """The verdict on one answer by its index, or an environment's answer to it."""

    place: int
    verdict: Said
    cpu_s: float  # of the process so far
    share: int = 0  # index among the shares that the process got together


class CallReturned(NamedTuple):
    """A message that one of several calls has returned, and the time begins anew."""

    cpu_s: float  # of the process so far


# The pool's side.


@dataclasses.dataclass(kw_only=True)
class JudgingJob:
    """A submitted group, and the verdicts on it so far."""

    key: Any
    verifier: str
    task: str
    answers: list[str | None]
    reference: dict[str, Any]
    verdicts: list[Said | None]  # None: not judged yet
    prompt: str = ""  # its text
    step: Step | None = None  # of the one answer, if it is a turn of an episode

    def settle(self, place: int, verdict: Said) -> None:
        """Record the verdict on one answer."""
        self.verdicts[place] = verdict

    def unjudged(self, places: Iterable[int]) -> list[int]:
        """Return the members of `places` that have no verdict, in order."""
        return [place for place in places if self.verdicts[place] is None]


class Share(NamedTuple):
    """The answers of a group that one process gets."""

    job: JudgingJob
    places: list[int]

    @property
    def unjudged(self) -> list[int]:
        """Return the places without a verdict, in order."""
        return self.job.unjudged(self.places)


class VerifierProcess:
    """A verifier process with the pipe to it, its work and its deadline."""

    def __init__(self, setup: Setup) -> None:
        """Start the process without waiting for it.

        Raises:
            OSError: the system cannot start a process.
        """
        self.pipe, child_end = pipes.Pipe()
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            limit = struct.pack("ll", int(_MAX_SEND_S), 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        number, own, output = child_end.fileno(), setup.own, None
        given: dict[str, str] = {}
        if own:
            # A user's function prints nothing into the output of a run or command.
            output = sys.__stderr__ if own.prints else subprocess.DEVNULL
            given = {name: os.environ[name] for name in own.variables}
        self.process = subprocess.Popen(
            [*own_python(), "-m", "scalerl_jax.environments.process", str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(**given),
            # Its own group: Ctrl-C does not reach it, and its children end with it.
            start_new_session=True,
        )
        child_end.close()
        with contextlib.suppress(BrokenPipeError):  # the next read finds it again
            self.pipe.send(setup)
        self.below: list[psutil.Process] = []  # its children when it was killed
        self.loaded: set[str] = set()
        self.loading: str | None = setup.preload
        self.shares: list[Share] = []  # sent and not yet judged
        self.deadline = time.monotonic() + MAX_START_S
        self.begun_cpu_s = 0.0  # of the process, before the answer that it judges

    @property
    def free(self) -> bool:
        """Return whether the process waits for work."""
        return not self.shares and self.loading is None

    def give(self, shares: Sequence[Share], *, timeout_s: float) -> None:
        """Send the process answers to judge: a share, or turns of several episodes.

        Raises:
            OSError: the process has ended, or is stopped and does not read.
        """
        works = [
            GroupAnswers(
                job.verifier,
                job.task,
                [(place, job.answers[place] or "") for place in places],
                job.reference,
                job.prompt,
                job.step,
            )
            for job, places in shares
        ]
        self.pipe.send(works)
        self.shares = list(shares)
        verifier = shares[0].job.verifier
        if verifier not in self.loaded:
            self.loading, timeout_s = verifier, MAX_START_S
        self.deadline = time.monotonic() + timeout_s

    def kill(self, *, ending: bool = False) -> None:
        """End the process and all that it started; nothing can ignore this.

        Children that left its process group are found as long as the process exists.

        `ending`: it has closed its pipe, and gets a moment to end by itself: an error
        that Python reports has another exit code than this signal.
        """
        if self.pipe.closed:
            return  # already killed; its id may belong to another process by now
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            self.below = process.children(recursive=True)
            end = time.monotonic() + _MAX_END_S * ending
            while time.monotonic() < end and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for each in self.below:
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.pipe.close()

    def computed_s(self) -> float:
        """Return the CPU time that the process has spent on the answer it judges."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:  # it has ended
            return 0.0
        return times.user + times.system - self.begun_cpu_s

    def exit_code(self) -> int | None:
        """Return the exit code of a process that closed its pipe or was killed."""
        try:
            return self.process.wait(timeout=_MAX_END_S)
        except subprocess.TimeoutExpired:
            return None


# Reaping of sandboxes whose verifier process has ended: no other process does it.


def adopt() -> None:
    """Make this process the new parent of its descendants whose own parent ends.

    Otherwise the machine's first process becomes their parent and may never reap them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(*, wait_s: float = 0.0) -> None:
    """Reap adopted sandboxes that have ended; wait up to `wait_s` for the others."""
    orphans = [each for each in psutil.Process().children() if each.name() == "bwrap"]
    psutil.wait_procs(orphans, timeout=wait_s)
