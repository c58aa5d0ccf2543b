"""The verifier's process: it judges one answer after the other until the pipe ends.

It is started by name, not through multiprocessing, whose spawned children import the
main module again, and with it JAX.  For the same reason nothing here imports JAX, and
neither should a score function's module.
"""

import contextlib
import faulthandler
import functools
import importlib
import os
import resource
import sys
from collections.abc import Mapping
from multiprocessing import connection as pipes
from typing import Any, NamedTuple

from scalerl_jax.rewards.verdict import ScoreFunction, Verdict

_MAX_DETAIL = 500  # characters


class Verifier(NamedTuple):
    """A score function by name, and the settings that it takes as keywords."""

    function: str  # "module:function"
    settings: Mapping[str, Any] = {}


class Setup(NamedTuple):
    """What a process is told first."""

    verifiers: Mapping[str, Verifier]
    preload: str  # the name of the one to import at once
    timeout_s: float  # of one answer
    memory_mib: int  # beside what its imports take


class Work(NamedTuple):
    """Answers of one group, with their places in it."""

    verifier: str
    task: str
    answers: list[tuple[int, str]]
    reference: dict[str, Any]


class Loaded(NamedTuple):
    """A verifier has been imported, or why it could not be."""

    verifier: str
    failure: str = ""


class Judged(NamedTuple):
    """The verdict on the answer in one place."""

    place: int
    verdict: Verdict


def serve(descriptor: int) -> None:
    """Judge what comes through the pipe of this number, until it ends."""
    pipe = pipes.Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError), _nowhere() as nowhere:
        setup: Setup = pipe.recv()
        # The pool kills first.  Only if it has died itself does this end a hanging
        # call.
        limit_s = 2 * setup.timeout_s + 10
        scores = {setup.preload: _load(pipe, setup, setup.preload)}
        while True:
            work: Work = pipe.recv()
            if work.verifier not in scores:
                scores[work.verifier] = _load(pipe, setup, work.verifier)
            for place, answer in work.answers:
                faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
                score = scores[work.verifier]
                verdict = _judge(score, work.task, answer, work.reference)
                faulthandler.cancel_dump_traceback_later()
                pipe.send(Judged(place, verdict))


def _nowhere() -> Any:
    return open(os.devnull, "w")


def _load(pipe: pipes.Connection, setup: Setup, name: str) -> ScoreFunction:
    """Import a verifier and say so, or why not, and end."""
    try:
        verifier = setup.verifiers[name]
        module, _, function = verifier.function.partition(":")
        score = getattr(importlib.import_module(module), function)
    except Exception as error:  # noqa: BLE001  raised again by poll() and wait()
        pipe.send(Loaded(name, f"{type(error).__name__}: {error}"))
        sys.exit(1)
    _limit_memory(setup.memory_mib)
    pipe.send(Loaded(name))
    return functools.partial(score, **verifier.settings)


def _limit_memory(memory_mib: int) -> None:
    """An allocation beyond this is a MemoryError here, and no harm to the run."""
    if sys.platform != "linux":  # no other system counts or limits it so
        return
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (held + memory_mib * 2**20, hard))


def _judge(
    score: ScoreFunction, task: str, answer: str, reference: dict[str, Any]
) -> Verdict:
    try:
        found = score(task, answer, reference)
    except Exception as error:  # noqa: BLE001  becomes this rollout's status
        return Verdict("verifier_error", _short(error))
    if isinstance(found, Verdict):
        return found._replace(detail=found.detail[:_MAX_DETAIL])
    # Partial credit, anything below 1, is not a pass.
    return Verdict("correct" if found >= 1.0 else "wrong")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
