"""A user's reward functions: one file of Python, and how its functions count.

    def score(prompt: str, completion: str, reference: Any) -> float | Done

`async def` does as well.  Only verifier processes execute the file, and import this
module; elsewhere it is a text (`own_file`).  A reward function is an environment of
one step: what it returns is the episode's end, `Done`.  No JAX here.
"""

import asyncio
import inspect
import math
import numbers
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.environments.verdict import (
    Done,
    GroupAnswers,
    OwnReward,
    Status,
    Verdict,
)

MODULE = "own_reward"  # the name under which the file's functions are defined
_CALL_SHARE = 0.9  # of reward.timeout_s, for one call; the pool kills at all of it
_MAX_TEXT = 80  # characters of a value that is shown


class BadReward(ValueError):
    """A reward function returned what is no reward."""


def read_result(found: Any, *, max_magnitude: float) -> Done:
    """Return the end of an episode from what a reward function returned.

    Raises:
        BadReward: it is no finite number within the limit, or a part of it is none.
    """
    done = found if isinstance(found, Done) else Done(found)
    parts = {str(name): _number(part, math.inf) for name, part in done.parts.items()}
    return Done(_number(done.reward, max_magnitude), parts)


def _number(found: Any, most: float) -> float:
    shown = repr(found)[:_MAX_TEXT]
    if getattr(found, "ndim", None) == 0:  # of NumPy, torch or JAX
        found = found.item()
    if not isinstance(found, numbers.Real):
        raise BadReward(
            f"the reward is {shown} of type {type(found).__name__}, and must be a "
            f"number"
        )
    value = float(found)
    if not math.isfinite(value):
        raise BadReward(f"the reward is {shown}, and must be a finite number")
    if abs(value) > most:
        raise BadReward(
            f"the reward is {shown}, further from 0 than reward.max_magnitude = {most}"
        )
    return value


class Rewards:
    """The functions of a user's file, in the verifier process that executes it."""

    def __init__(self, own: OwnReward, *, timeout_s: float, passed_at: float) -> None:
        """Execute the file, and look at its functions.

        Raises:
            ValueError: the file raises, or has no such functions.
        """
        self._own, self._passed_at = own, passed_at
        self._limit_s = _CALL_SHARE * timeout_s
        self._process = os.getpid()
        self._runner = asyncio.Runner()
        self._gate = asyncio.Semaphore(own.max_concurrent)
        module = types.ModuleType(MODULE)
        module.__file__ = own.file
        sys.modules[MODULE] = module
        sys.path.insert(0, str(Path(own.file).absolute().parent))
        try:
            exec(compile(own.text, own.file, "exec"), module.__dict__)  # noqa: S102
        except BaseException as error:  # noqa: BLE001  whatever a program does
            raise ValueError(self._said(error)) from error
        self._functions = {
            name: self._checked(getattr(module, name, None), name)
            for name in own.functions
        }

    def _checked(self, function: Any, name: str) -> Callable[..., Any]:
        where = f"{self._own.file} has"
        if function is None:
            raise ValueError(f"{where} no function {name!r}")
        if not callable(function):
            raise ValueError(f"{where} {name!r}, which is no function")
        try:
            inspect.signature(function).bind("", "", None)
        except TypeError as error:
            raise ValueError(
                f"{where} {name}{inspect.signature(function)}, which must take "
                f"(prompt, completion, reference): {error}"
            ) from error
        except ValueError:  # no signature is known of it
            pass
        return function

    def judge(self, work: GroupAnswers, send: Callable[[int, Verdict], None]) -> None:
        """Judge the answers, those of `async` functions beside each other."""
        self._runner.run(self._judge(work, send))

    async def _judge(
        self, work: GroupAnswers, send: Callable[[int, Verdict], None]
    ) -> None:
        reference = work.reference.get("answer", work.reference.get("tests"))

        async def one(place: int, answer: str) -> None:
            calls = {
                name: self._call(function, work.prompt, answer, reference)
                for name, function in self._functions.items()
            }
            # Plain ones at once: one that hangs keeps no verdict before it back.
            beside = [
                name
                for name, function in self._functions.items()
                if inspect.iscoroutinefunction(function)
            ]
            ends = {name: await calls[name] for name in calls if name not in beside}
            found = await asyncio.gather(*map(calls.__getitem__, beside))
            ends |= dict(zip(beside, found, strict=True))
            send(place, self._verdict({name: ends[name] for name in calls}))

        async with asyncio.TaskGroup() as group:
            for place, answer in work.answers:
                group.create_task(one(place, answer))

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the `Done` of a function, or the `Verdict` that it has none."""
        limit = asyncio.timeout(None)
        try:
            found = function(*arguments)
            if inspect.isawaitable(found):
                async with self._gate, limit:
                    limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)
                    found = await found
            return read_result(found, max_magnitude=self._own.max_magnitude)
        except BadReward as error:
            return Verdict("bad_reward", f"{self._own.file}: {error}")
        except TimeoutError as error:
            if limit.expired():
                return Verdict(
                    "verifier_timeout",
                    f"no reward within {_CALL_SHARE} x reward.timeout_s = "
                    f"{self._limit_s:g} s",
                )
            return Verdict("verifier_error", self._said(error))
        except BaseException as error:  # noqa: BLE001  becomes this rollout's status
            return Verdict("verifier_error", self._said(error))
        finally:
            if os.getpid() != self._process:  # a child that the function has forked
                os._exit(0)

    def _verdict(self, ends: Mapping[str, Done | Verdict]) -> Verdict:
        """Return the verdict of a completion from what its functions gave."""
        parts: dict[str, float | None] = {}
        failed = None
        for name, end in ends.items():
            if isinstance(end, Verdict):
                failed = failed or end
                if len(ends) > 1:
                    parts[name] = None
                continue
            if len(ends) > 1:
                parts[name] = end.reward
            prefix = f"{name}." if len(ends) > 1 else ""
            parts |= {f"{prefix}{part}": value for part, value in end.parts.items()}
        if failed:
            return failed._replace(parts=parts)
        rewards = [end.reward for end in ends.values() if isinstance(end, Done)]
        reward = math.fsum(map(math.prod, zip(self._own.weights, rewards, strict=True)))
        return judged_by(reward, self._passed_at)._replace(parts=parts)

    def _said(self, error: BaseException) -> str:
        """Return the first line of an error, and where in the file it was raised."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == self._own.file
        ]
        place = self._own.file
        said = str(error)
        if isinstance(error, SyntaxError):
            lines, said = [error.lineno], error.msg
        if lines:
            place += f", line {lines[-1]}"
        first = said.strip().splitlines()[:1]
        return f"{place}: {': '.join([type(error).__name__, *first])}"


def judged_by(reward: float, passed_at: float) -> Verdict:
    """Return the verdict of a reward: from `passed_at` on it is correct."""
    status: Status = "correct" if reward >= passed_at else "wrong"
    return Verdict(status, reward=reward)
