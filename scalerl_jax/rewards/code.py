"""Verdicts on programs: a completion's last block of code, run against tests.

A reference holds "tests", of one kind:

    {"kind": "asserts", "tests": Python, "setup": Python, "entry_point": expression}
    {"kind": "calls", "entry_point": expression, "inputs": [[argument, ...], ...],
     "outputs": [value, ...]}
    {"kind": "stdin", "inputs": [text, ...], "outputs": [text, ...]}

`setup` and, of asserts, `entry_point` may be left out.  The solution runs in one
sandbox and asserts in another (see `harness`); the outputs of calls and programs are
compared here, and what is expected of them enters no sandbox.
"""

import contextlib
import json
import re
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from scalerl_jax.rewards import harness
from scalerl_jax.rewards.modules import missing_of_program, missing_of_tests
from scalerl_jax.rewards.outputs import same_output, same_value
from scalerl_jax.rewards.sandbox import Channel, Limits, OutOfTime, Sandbox
from scalerl_jax.rewards.verdict import Verdict

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.M | re.S)
_LANGUAGES = ("", "python", "py", "python3")
_MAX_OUTPUT = 16 * 2**20  # bytes of a program's output as JSON

Kind = Literal["asserts", "calls", "stdin"]

_WRONG, _CORRECT = Verdict("wrong"), Verdict("correct")


class Tests(NamedTuple):
    """What a reference asks of a solution."""

    kind: Kind
    entry_point: str = ""
    setup: str = ""
    tests: str = ""
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


def extract_code(text: str) -> str | None:
    """The last closed Markdown block of Python in a text; None without one."""
    blocks = [
        block.group(2)
        for block in _BLOCK.finditer(text)
        if block.group(1).lower() in _LANGUAGES
    ]
    return blocks[-1] if blocks else None


def read_tests(reference: dict[str, Any]) -> Tests:
    """The tests of a reference.

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
            compile(getattr(tests, name), f"{name}.py", "exec")
        except (SyntaxError, ValueError, TypeError) as error:
            raise ValueError(f"the {name} are not Python: {error}") from error
    if not tests.tests.strip():
        raise ValueError("tests of kind 'asserts' are empty, and any solution passes")


def check(task: str, answer: str, reference: dict[str, Any]) -> float:
    """1 if a prompt's reference holds tests; for a pool, as `judge` is.

    Raises:
        ValueError: it does not.
    """
    read_tests(reference)
    return 1.0


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
    """Whether a completion's last block of code passes all tests of the reference.

    A solution is wrong that takes more than `wall_s` for all tests, or `cpu_s` or
    `memory_mib`, which a program may take for each input.  Beside
    Python's own modules it can import those of the directory `packages`; where a
    module of `modules.WELL_KNOWN`, or one that the tests import, is missing, the
    verifier has failed and not the solution.  Outputs and returned values are compared
    within the `float_tolerance` (see `outputs`); asserts compare for themselves.

    Raises:
        ValueError: the reference holds no tests that can be run.
        SandboxError: no sandbox can be made; nothing was run.
    """
    source = extract_code(answer)
    if source is None:
        return Verdict("no_answer")
    tests = read_tests(reference)
    for text in (tests.setup, tests.tests):
        if missing := missing_of_tests(text, packages):
            return _lacking("the tests import", missing)
    limits = Limits(cpu_s=cpu_s, memory_mib=memory_mib, packages=packages)
    with contextlib.ExitStack() as opened:
        solution = _open(opened, Sandbox("solution", limits))
        tester = None
        if tests.kind == "asserts":
            tester = _open(opened, Sandbox("tests", limits, solution=solution.channel))
        for sandbox in filter(None, (solution, tester)):
            sandbox.await_ready()
        deadline = time.monotonic() + wall_s
        try:
            return _judge(
                source,
                tests,
                solution.channel,
                tester,
                deadline=deadline,
                float_tolerance=float_tolerance,
            )
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


def _open(opened: contextlib.ExitStack, sandbox: Sandbox) -> Sandbox:
    opened.callback(sandbox.close)
    return sandbox


def _judge(
    source: str,
    tests: Tests,
    solution: Channel,
    tester: Sandbox | None,
    *,
    deadline: float,
    float_tolerance: float,
) -> Verdict:
    if "unreadable" in solution.ask({"source": source}, deadline=deadline):
        return Verdict("unparsable")
    if tests.kind == "stdin":
        return _run_programs(tests, solution, deadline, float_tolerance)
    if "raised" in solution.ask({"do": "define"}, deadline=deadline):
        raise _Failed
    if tester is None:
        return _call(tests, solution, deadline, float_tolerance)
    solution.hand_over()
    job = {name: getattr(tests, name) for name in ("setup", "tests", "entry_point")}
    verdict = tester.channel.ask(job, deadline=deadline)
    return _WRONG if verdict["why"] else _CORRECT


def _run_programs(
    tests: Tests, solution: Channel, deadline: float, tolerance: float
) -> Verdict:
    for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
        request = {"do": "run", "stdin": stdin}
        reply = solution.ask(request, deadline=deadline, most=_MAX_OUTPUT)
        match reply.get("value"):
            case [0, str(output)]:
                if not same_output(output, expected, tolerance):
                    return _WRONG
            case _:
                raise _Failed
    return _CORRECT


def _call(
    tests: Tests, solution: Channel, deadline: float, tolerance: float
) -> Verdict:
    target = {"expression": tests.entry_point}
    for arguments, expected in zip(tests.inputs, tests.outputs, strict=True):
        request = {
            "do": "perform",
            "operation": "call",
            "arguments": {"list": [target, *(_encoded(each) for each in arguments)]},
            "named": {"dict": []},
            "changes": False,
        }
        # An equal value is written in at most 64 times as much: 1e300 and its digits.
        most = 2**16 + 64 * len(json.dumps(_encoded(expected)))
        reply = solution.ask(request, deadline=deadline, most=most)
        if "value" not in reply or not _holds(reply["value"], expected, tolerance):
            return _WRONG
    return _CORRECT


def _encoded(value: Any) -> Any:
    def refuse(value: Any) -> Any:
        raise ValueError(f"an input holds a {type(value).__name__}, which is no JSON")

    return harness.encode(value, refuse)


def _holds(tree: Any, expected: Any, tolerance: float) -> bool:
    """Whether a reply holds the expected JSON value."""
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
