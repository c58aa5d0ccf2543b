"""Verdicts on programs: the block of a completion that is one, run against tests.

A reference holds "tests", of one kind:

    {"kind": "asserts", "tests": Python, "setup": Python, "entry_point": expression}
    {"kind": "calls", "entry_point": expression, "inputs": [[argument, ...], ...],
     "outputs": [value, ...]}
    {"kind": "stdin", "inputs": [text, ...], "outputs": [text, ...]}

`setup` and, of asserts, `entry_point` may be left out.  The solution runs in one
sandbox and asserts in another (see `harness`); the outputs of calls and programs are
compared here, and expected outputs enter no sandbox.
"""

import contextlib
import decimal
import json
import math
import re
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from scalerl_jax.environments import harness
from scalerl_jax.environments.judges import blocks
from scalerl_jax.environments.requirements import (
    any_digits,
    missing_of_program,
    missing_of_tests,
    names_asked,
)
from scalerl_jax.environments.sandbox import (
    FrameChannel,
    OutOfTime,
    Sandbox,
    SandboxLimits,
)
from scalerl_jax.environments.verdict import Verdict

_MAX_OUTPUT = 16 * 2**20  # bytes of a program's output as JSON

Kind = Literal["asserts", "calls", "stdin"]

_WRONG, _CORRECT = Verdict("wrong"), Verdict("correct")


class Tests(NamedTuple):
    """The tests of a reference, which a solution must pass."""

    kind: Kind
    entry_point: str = ""
    setup: str = ""
    tests: str = ""
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


def read_tests(reference: dict[str, Any]) -> Tests:
    """Read the tests of a reference.

    Raises:
        ValueError: they are missing, empty or of another form.
    """
    given = reference.get("tests")
    if not isinstance(given, dict) or given.get("kind") not in get_args(Kind):
        raise ValueError(
            f"a code prompt's reference needs 'tests' with a 'kind' of asserts, calls "
            f"or stdin, and has {str(given)[:200]}"
        )
    unknown = given.keys() - set(Tests._fields)
    if unknown:
        raise ValueError(f"tests have unknown fields {sorted(unknown)}")
    tests = Tests(**given)
    if not isinstance(tests.entry_point, str):
        raise ValueError(f"the entry_point of tests is {tests.entry_point!r}, no text")
    if tests.kind == "asserts":
        _check_asserts(tests)
        return tests
    lists = [each for each in (tests.inputs, tests.outputs) if isinstance(each, list)]
    if len(lists) < 2 or not lists[0] or len(lists[0]) != len(lists[1]):
        raise ValueError(
            f"tests of kind {tests.kind!r} need lists of inputs and of as many "
            f"outputs, and have {str(tests.inputs)[:80]} and {str(tests.outputs)[:80]}"
        )
    if tests.kind == "calls" and not tests.entry_point:
        raise ValueError("tests of kind 'calls' need an 'entry_point'")
    kind = str if tests.kind == "stdin" else list
    texts = tests.outputs if tests.kind == "stdin" else ()
    if not all(isinstance(each, kind) for each in (*tests.inputs, *texts)):
        raise ValueError(f"inputs of kind {tests.kind!r} must be of {kind.__name__}")
    return tests


def _check_asserts(tests: Tests) -> None:
    for name in ("tests", "setup"):
        try:
            with any_digits():
                compile(getattr(tests, name), f"{name}.py", "exec")
        except (SyntaxError, ValueError, TypeError) as error:
            raise ValueError(f"the {name} are not Python: {error}") from error
    if not tests.tests.strip():
        raise ValueError("tests of kind 'asserts' are empty, and any solution passes")


def find_solution(answer: str, reference: dict[str, Any]) -> str | None:
    """Return the source of the program in a completion; None without one.

    This is the program that `judge` runs; without usable tests, the last program.
    """
    try:
        return _find_solution(answer, read_tests(reference))
    except ValueError:
        return blocks.find_program(answer)


def _find_solution(answer: str, tests: Tests) -> str | None:
    if tests.kind == "stdin":
        return blocks.find_program(answer, reads=any(map(str.strip, tests.inputs)))
    if tests.entry_point:
        return blocks.find_program(answer, re.findall(r"^\w+", tests.entry_point))
    return blocks.find_program(answer, names_asked(tests.setup, tests.tests))


def judge(
    task: str,
    answer: str,
    reference: dict[str, Any],
    *,
    cpu_s: int,
    wall_s: float,
    memory_mib: int,
    packages: str = "",
    float_tolerance: float = 0.0,
) -> Verdict:
    """Judge the program in a completion by all tests of the reference.

    A solution is wrong if it takes more than `wall_s` for all tests, or more than
    `cpu_s` or `memory_mib`; for a program these two hold for each input.  It can import
    Python's own modules and those of the directory `packages`.  If a module of
    `WELL_KNOWN`, or one that the tests import, is missing, the verifier has failed and
    not the solution.
    Outputs and returned values are compared within the `float_tolerance` (see
    `same_value`); asserts compare for themselves.

    Raises:
        ValueError: the reference holds no tests that can be run.
        SandboxError: no sandbox can be made; nothing was run.
    """
    tests = read_tests(reference)
    source = _find_solution(answer, tests)
    if source is None:
        return Verdict("no_answer")
    for text in (tests.setup, tests.tests):
        if missing := missing_of_tests(text, packages):
            return _lacking("the tests import", missing)
    limits = SandboxLimits(cpu_s=cpu_s, memory_mib=memory_mib, packages=packages)
    with contextlib.ExitStack() as opened:
        solution, tester = Sandbox("solution", limits), None
        opened.callback(solution.close)
        if tests.kind == "asserts":
            tester = Sandbox("tests", limits, solution=solution.channel)
            opened.callback(tester.close)
        for sandbox in filter(None, (solution, tester)):
            sandbox.await_ready()
        deadline = time.monotonic() + wall_s
        trial = _Trial(tests, solution.channel, deadline, float_tolerance)
        try:
            return trial.judge(source, tester)
        except (OutOfTime, EOFError):
            return _WRONG
        except _Failed:
            missing = missing_of_program(source, packages)
            return _lacking("the solution imports", missing) if missing else _WRONG


class _Failed(Exception):
    """The solution ended with an error of its own before it could be judged."""


def _lacking(who: str, module: str) -> Verdict:
    return Verdict(
        "verifier_error",
        f"{who} {module!r}, which the sandbox does not have; "
        f"`pip install --target=DIRECTORY` it; reward.code_packages = DIRECTORY",
    )


class _Trial(NamedTuple):
    """A solution in its sandbox, with its tests and limits."""

    tests: Tests
    solution: FrameChannel
    deadline: float  # time.monotonic()
    tolerance: float

    def judge(self, source: str, tester: Sandbox | None) -> Verdict:
        """Run the solution, against asserts in the tester's sandbox."""
        tests, ask = self.tests, self.solution.ask
        if "unreadable" in ask({"source": source}, deadline=self.deadline):
            return Verdict("unparsable")
        if tests.kind == "stdin":
            return self._run_programs()
        if "raised" in ask({"do": "define"}, deadline=self.deadline):
            raise _Failed
        if tester is None:
            return self._call()
        self.solution.hand_over()
        job = {name: getattr(tests, name) for name in ("setup", "tests", "entry_point")}
        verdict = tester.channel.ask(job, deadline=self.deadline)
        return _WRONG if verdict["why"] else _CORRECT

    def _run_programs(self) -> Verdict:
        for stdin, expected in zip(self.tests.inputs, self.tests.outputs, strict=True):
            request = {"do": "run", "stdin": stdin}
            reply = self.solution.ask(request, deadline=self.deadline, most=_MAX_OUTPUT)
            match reply.get("value"):
                case [0, str(output)]:
                    if not same_output(output, expected, self.tolerance):
                        return _WRONG
                case _:
                    raise _Failed
        return _CORRECT

    def _call(self) -> Verdict:
        target = {"expression": self.tests.entry_point}
        for given, expected in zip(self.tests.inputs, self.tests.outputs, strict=True):
            request = {
                "do": "perform",
                "operation": "call",
                "arguments": {"list": [target, *map(_encoded, given)]},
                "named": {"dict": []},
                "changes": False,
            }
            # An equal value is at most 64 times as long in text: 1e300 and its digits.
            most = 2**16 + 64 * len(json.dumps(_encoded(expected)))
            reply = self.solution.ask(request, deadline=self.deadline, most=most)
            value, tolerance = reply.get("value"), self.tolerance
            if "value" not in reply or not _holds(value, expected, tolerance):
                return _WRONG
        return _CORRECT


def _encoded(value: Any) -> Any:
    def refuse(value: Any) -> Any:
        raise ValueError(f"an input holds a {type(value).__name__}, which is no JSON")

    return harness.encode(value, refuse)


def _holds(tree: Any, expected: Any, tolerance: float) -> bool:
    """Return whether a reply holds the expected JSON value."""
    try:
        return same_value(_plain(tree), expected, tolerance)
    except (ValueError, TypeError, RecursionError):
        return False


def _plain(tree: Any) -> Any:
    """The JSON value that a reply holds.

    No set is built and no key but texts is hashed: numbers can be chosen to collide.

    Raises:
        ValueError: it holds another value.
    """
    match tree:
        case {"list": list(parts)}:
            return [_plain(part) for part in parts]
        case {"tuple": list(parts)}:
            return tuple(_plain(part) for part in parts)
        case {"dict": list(pairs)}:
            return {str(_plain(key)): _plain(value) for key, value in pairs}
        case dict():
            raise ValueError("neither a list nor a dictionary")
    return tree


# Comparison of outputs with the expected ones, exactly or with a tolerance.

_WHOLE = re.compile(r"[-+]?\d+")


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare outputs word by word and line by line, numbers by their value.

    Spaces around and between words, and empty lines at both ends, do not count.
    With a tolerance, numbers are compared as in `same_value`.
    """
    lines, wanted = (
        [line.split() for line in text.strip().splitlines()]
        for text in (output, expected)
    )
    return len(lines) == len(wanted) and all(
        len(words) == len(others)
        and all(
            _same_word(*pair, tolerance) for pair in zip(words, others, strict=True)
        )
        for words, others in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    try:
        if decimal.Decimal(word) == decimal.Decimal(expected):
            return True
        both_whole = _WHOLE.fullmatch(word) and _WHOLE.fullmatch(expected)
        return not both_whole and _is_close(float(word), float(expected), tolerance)
    except (decimal.InvalidOperation, ValueError):
        return False


def _is_close(number: float, expected: float, tolerance: float) -> bool:
    try:
        finite = math.isfinite(number) and math.isfinite(expected)
        close = abs(number - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # a whole number beyond the range of floats
        return False
    return bool(tolerance) and finite and close


def same_value(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return whether a value is the expected JSON value; tuples count as lists.

    Keys of dictionaries are texts, as in JSON.  With a tolerance t > 0, a number with
    a decimal point or an exponent may differ from the expected y by t * max(1, |y|),
    as in programming contests; whole numbers may not.
    """
    if isinstance(value, list | tuple) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            same_value(*pair, tolerance) for pair in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        named = {str(key): each for key, each in value.items()}
        return named.keys() == expected.keys() and all(
            same_value(named[key], expected[key], tolerance) for key in expected
        )
    if value == expected:
        return True
    if not (_is_number(value) and _is_number(expected)):
        return False
    if isinstance(value, int) and isinstance(expected, int):
        return False
    return _is_close(value, expected, tolerance)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
