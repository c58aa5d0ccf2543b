"""A verifier process: it imports verifiers, and judges what comes through its pipe.

Run by `VerifierProcess`, as `python -m scalerl_jax.environments.process DESCRIPTOR`.
"""

import contextlib
import faulthandler
import functools
import importlib
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing import connection as pipes
from typing import IO, Any, NoReturn

from scalerl_jax.environments.instances import Environments, OwnVerify, load_own
from scalerl_jax.environments.verdict import (
    CallReturned,
    GroupAnswers,
    JudgedAnswer,
    Kind,
    Loaded,
    Said,
    ScoreFunction,
    Setup,
    Verdict,
    Verifier,
    adopt,
)

_MAX_DETAIL = 500  # characters


def serve(descriptor: int) -> None:
    """Judge the answers that come through the pipe `descriptor`, until it closes."""
    pipe = pipes.Connection(descriptor)
    with (
        contextlib.suppress(EOFError, ConnectionError),
        open(os.devnull, "w") as nowhere,
    ):
        setup: Setup = pipe.recv()
        # The pool kills a late process; this alarm ends a hanging call if the pool is
        # dead.
        limit_s = 2 * setup.limit_s + 10
        if setup.own:
            _serve_own(pipe, setup, functools.partial(_alarm, limit_s, nowhere))
        scores = {setup.preload: _load(pipe, setup, setup.preload)}
        while True:
            (work,) = pipe.recv()
            if work.verifier not in scores:
                scores[work.verifier] = _load(pipe, setup, work.verifier)
            for place, answer in work.answers:
                _alarm(limit_s, nowhere)
                score = scores[work.verifier]
                verdict = judge_by(
                    score, work.task, answer, work.reference, setup.passed_at
                )
                faulthandler.cancel_dump_traceback_later()
                pipe.send(JudgedAnswer(place, verdict, time.process_time()))


def _alarm(limit_s: float, nowhere: IO[str]) -> None:
    """End this process after `limit_s` seconds, unless the alarm is cancelled."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)


def _serve_own(
    pipe: pipes.Connection, setup: Setup, alarm: Callable[[], None]
) -> NoReturn:
    """Judge by a user's functions until the pipe closes, which raises EOFError."""
    assert setup.own is not None, "the caller has looked"
    adopt()  # children of these functions stay below this process, and end with it

    def goes_on() -> None:
        alarm()
        pipe.send(CallReturned(time.process_time()))

    try:
        own = load_own(setup, OwnVerify(setup, find_verifier, judge_by), goes_on)
    except ValueError as error:  # raised again by poll() and wait()
        pipe.send(Loaded(setup.preload, str(error)))
        sys.exit(1)
    _limit_memory(setup.memory_mib)
    kind = own.kind if isinstance(own, Environments) else Kind()
    pipe.send(Loaded(setup.preload, cpu_s=time.process_time(), kind=kind))

    def send(share: int, place: int, verdict: Said) -> None:
        alarm()
        if isinstance(verdict, Verdict):
            verdict = verdict._replace(detail=verdict.detail[:_MAX_DETAIL])
        pipe.send(JudgedAnswer(place, verdict, time.process_time(), share))

    while True:
        works: list[GroupAnswers] = pipe.recv()
        alarm()
        own.judge(works, send)
        faulthandler.cancel_dump_traceback_later()


def _load(pipe: pipes.Connection, setup: Setup, name: str) -> ScoreFunction:
    """Import a verifier and report to the pool; on failure report why and exit."""
    try:
        score = find_verifier(setup.verifiers[name])
    except Exception as error:  # noqa: BLE001  raised again by poll() and wait()
        pipe.send(Loaded(name, f"{type(error).__name__}: {error}"))
        sys.exit(1)
    _limit_memory(setup.memory_mib)
    pipe.send(Loaded(name, cpu_s=time.process_time()))
    return score


def find_verifier(verifier: Verifier) -> ScoreFunction:
    """Import a verifier, and return its function with its settings."""
    module, _, function = verifier.function.partition(":")
    score = getattr(importlib.import_module(module), function)
    return functools.partial(score, **verifier.settings)


def _limit_memory(memory_mib: int) -> None:
    """Limit this process's memory, so that allocating more is a MemoryError here."""
    if sys.platform != "linux":  # other systems do not count or limit it this way
        return
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (held + memory_mib * 2**20, hard))


def judge_by(
    score: ScoreFunction,
    task: str,
    answer: str,
    reference: dict[str, Any],
    passed_at: float,
) -> Verdict:
    """Return a verifier's verdict on an answer, or the verdict of its failure."""
    try:
        found = score(task, answer, reference)
    except Exception as error:  # noqa: BLE001  becomes this rollout's status
        reason = f"{type(error).__name__}: {error}"
        # Memory and stack belong to this process: only the answer's text can fill them.
        full = isinstance(error, MemoryError | RecursionError)
        status = "too_costly" if full else "verifier_error"
        return Verdict(status, reason[:_MAX_DETAIL])
    if isinstance(found, Verdict):
        return found._replace(detail=found.detail[:_MAX_DETAIL])
    return Verdict("correct" if found >= passed_at else "wrong")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
