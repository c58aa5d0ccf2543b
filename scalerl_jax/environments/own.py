"""A user's reward functions: one file of Python, and the weights of its functions.

    def score(prompt: str, completion: str, reference: Any) -> float | Done

`async def` does as well.  Only verifier processes execute the file, and import this
module; elsewhere it is a text (`own_file`).  A reward function is an environment of
one step: what it returns is the episode's end, `Done`.  Environments of several are
in `instances`.  No JAX here.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import math
import numbers
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from scalerl_jax.environments.verdict import (
    Done,
    GroupAnswers,
    OwnReward,
    Said,
    Setup,
    Status,
    Verdict,
)

T = TypeVar("T")
MODULE = "own_reward"  # the name under which the file's functions are defined
_CALL_SHARE = 0.9  # of reward.timeout_s, for one call; at the whole time the pool kills
_MAX_TEXT = 80  # characters of a value that is shown


class BadReward(ValueError):
    """A reward function returned something that is not a reward."""

    status: Status = "bad_reward"


class BadObservation(BadReward):
    """An environment returned something that is not a text, or too long a text."""

    status: Status = "bad_observation"


def read_result(found: Any, *, max_magnitude: float, form: str = "a number") -> Done:
    """Return the end of an episode from what a reward function returned.

    `form` is what it may return, for a message.

    Raises:
        BadReward: it or a part of it is not a finite number, or it exceeds the limit.
    """
    if not isinstance(found, Done):
        return Done(number(found, max_magnitude, form))
    parts = {str(name): number(part, math.inf) for name, part in found.parts.items()}
    return Done(number(found.reward, max_magnitude), parts)


def read_verdict(found: Verdict, *, max_magnitude: float) -> Verdict:
    """Return the end of an episode from a verdict, perhaps made by a user.

    Raises:
        BadReward: its status is not known, or a number in it is no reward.
    """
    if found.status not in get_args(Status):
        raise BadReward(
            f"the verdict's status is {found.status!r}, and must be one of "
            f"{', '.join(get_args(Status))}"
        )
    parts = {
        str(name): None if part is None else number(part, math.inf)
        for name, part in found.parts.items()
    }
    reward = None if found.reward is None else number(found.reward, max_magnitude)
    return Verdict(found.status, str(found.detail), reward, parts)


def number(found: Any, most: float, form: str = "a number") -> float:
    """Return a reward as a float.

    Raises:
        BadReward: it is not a finite number within the limit.
    """
    shown = repr(found)[:_MAX_TEXT]
    if getattr(found, "ndim", None) == 0:  # of NumPy, torch or JAX
        found = found.item()
    if not isinstance(found, numbers.Real):
        raise BadReward(
            f"the reward is {shown} of type {type(found).__name__}, and must be {form}"
        )
    try:
        value = float(found)
    except OverflowError:  # a whole number beyond the range of floats
        value = math.inf
    if not math.isfinite(value):
        raise BadReward(f"the reward is {shown}, and must be a finite number")
    if abs(value) > most:
        raise BadReward(
            f"the reward is {shown}, further from 0 than reward.max_magnitude = {most}"
        )
    return value


class OwnFile:
    """A user's file, executed, or a module, imported; and its errors by line."""

    def __init__(self, own: OwnReward) -> None:
        """Execute it.

        Raises:
            ValueError: it raises.
        """
        self._own = own
        try:
            if own.text is None:
                self._module = importlib.import_module(own.file)
            else:
                self._module = self._execute(own.text)
        except BaseException as error:  # whatever a program does
            raise ValueError(self.said(error)) from error

    def _execute(self, text: str) -> types.ModuleType:
        module = types.ModuleType(MODULE)
        module.__file__ = self._own.file
        sys.modules[MODULE] = module
        sys.path.insert(0, str(Path(self._own.file).absolute().parent))
        exec(compile(text, self._own.file, "exec"), module.__dict__)
        return module

    def find(self, name: str) -> Callable[..., Any]:
        """Return what the file defines by that name, which can be called.

        Raises:
            ValueError: there is none.
        """
        function = getattr(self._module, name, None)
        if function is None:
            raise ValueError(f"{self._own.file} has no function {name!r}")
        if not callable(function):
            raise ValueError(f"{self._own.file} has {name!r}, which is no function")
        return function

    def said(self, error: BaseException) -> str:
        """Return the first line of an error, and where in the file it was raised."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == self._own.file
        ]
        place = self._own.file
        said = str(error)
        if isinstance(error, SyntaxError) and self._own.text is not None:
            lines, said = [error.lineno], error.msg
        if lines:
            place += f", line {lines[-1]}"
        first = said.strip().splitlines()[:1]
        return f"{place}: {': '.join([type(error).__name__, *first])}"


class Calls:
    """Calls of a user's functions with a timeout; each failure becomes a verdict."""

    def __init__(self, file: OwnFile, own: OwnReward, *, timeout_s: float) -> None:
        """Let at most `own.max_concurrent` wait at a time."""
        self._file, self._own = file, own
        self._limit_s = _CALL_SHARE * timeout_s
        self._process = os.getpid()
        self._gate = asyncio.Semaphore(own.max_concurrent)

    async def __call__(
        self, read: Callable[[Any], T], function: Callable[..., Any], *arguments: Any
    ) -> T | Verdict:
        """Return what `read` makes of a call's result, or the verdict of a failure.

        `read` raises BadReward for a result that cannot be used.
        """
        limit = asyncio.timeout(None)
        try:
            found = function(*arguments)
            if inspect.isawaitable(found):
                async with self._gate, limit:
                    limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)
                    found = await found
            return read(found)
        except BadReward as error:
            return Verdict(error.status, f"{self._own.file}: {error}")
        except TimeoutError as error:
            if limit.expired():
                return Verdict(
                    "verifier_timeout",
                    f"no reward within {_CALL_SHARE} x reward.timeout_s = "
                    f"{self._limit_s:g} s",
                )
            return Verdict("verifier_error", self._file.said(error))
        except BaseException as error:  # noqa: BLE001  becomes this rollout's status
            return Verdict("verifier_error", self._file.said(error))
        finally:
            if os.getpid() != self._process:  # a child that the function has forked
                os._exit(0)


def takes(function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Return whether a function takes these arguments; True if that is not known."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # it has no known signature
        pass
    return True


def takes_in_order(function: Callable[..., Any], *names: str) -> bool:
    """Return whether a function takes these arguments, none of them at another's place.

    They are given by their places: score(completion, prompt, reference) would judge the
    prompt.
    """
    if not takes(function, *names):
        return False
    try:
        parameters = enumerate(inspect.signature(function).parameters)
    except ValueError:  # it has no known signature
        return True
    return all(
        names[place : place + 1] == (name,)
        for place, name in parameters
        if name in names
    )


class Rewards:
    """The functions of a user's file, in the verifier process that executes it."""

    def __init__(
        self,
        file: OwnFile,
        own: OwnReward,
        setup: Setup,
        goes_on: Callable[[], None],
    ) -> None:
        """Look at the file's functions.

        `goes_on` is called after each plain function where `async` ones follow.

        Raises:
            ValueError: it has no such functions.
        """
        self._own, self._passed_at, self._goes_on = own, setup.passed_at, goes_on
        self._runner = asyncio.Runner()
        self._call = Calls(file, own, timeout_s=setup.timeout_s)
        self._functions = {name: file.find(name) for name in own.functions}
        for name, function in self._functions.items():
            if not takes_in_order(function, "prompt", "completion", "reference"):
                raise ValueError(
                    f"{own.file} has {name}{inspect.signature(function)}, which must "
                    f"take (prompt, completion, reference) in this order, or as an "
                    f"environment's maker no arguments"
                )

    def judge(
        self,
        works: Sequence[GroupAnswers],
        send: Callable[[int, int, Said], None],
    ) -> None:
        """Judge the answers, those of `async` functions beside each other."""
        for number, work in enumerate(works):
            self._runner.run(self._judge(work, functools.partial(send, number)))

    async def _judge(
        self, work: GroupAnswers, send: Callable[[int, Verdict], None]
    ) -> None:
        async def one(place: int, answer: str) -> None:
            calls = {
                name: self._call(
                    self._read, function, work.prompt, answer, told(work.reference)
                )
                for name, function in self._functions.items()
            }
            # Plain functions first: one that hangs delays no earlier answer's verdict.
            beside = [
                name
                for name, function in self._functions.items()
                if inspect.iscoroutinefunction(function)
            ]
            ends = {}
            for name in [each for each in calls if each not in beside]:
                ends[name] = await calls[name]
                if beside:  # the others begin when all completions' plain ones are done
                    self._goes_on()
            found = await asyncio.gather(*map(calls.__getitem__, beside))
            ends |= dict(zip(beside, found, strict=True))
            send(place, self._verdict({name: ends[name] for name in calls}))

        async with asyncio.TaskGroup() as group:
            for place, answer in work.answers:
                group.create_task(one(place, answer))

    def _read(self, found: Any) -> Done:
        return read_result(found, max_magnitude=self._own.max_magnitude)

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


def told(reference: Mapping[str, Any]) -> Any:
    """Return what a user's function gets: the row's own, the answer or the tests.

    It is a copy: what a function does to it reaches no other completion of the prompt.
    """
    names = ("own", "answer", "tests")
    found = next((reference[name] for name in names if name in reference), None)
    return copy.deepcopy(found)


def judged_by(reward: float, passed_at: float) -> Verdict:
    """Return the verdict of a reward: from `passed_at` on it is correct."""
    status: Status = "correct" if reward >= passed_at else "wrong"
    return Verdict(status, reward=reward)
