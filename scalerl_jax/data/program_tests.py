"""Readers of tests of programs, in the forms that data sets publish."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from scalerl_jax.data.drafts import Malformed, Unusable, from_json, from_text

TESTS = ("tests", "test_cases", "input_output")  # columns of them
# Reasons for rows that are left out, which are counted by their texts.
NOT_PYTHON = "the code or its tests are not Python 3"
_NEEDS_PYTEST = "the tests need pytest or the module 'solution'"
_KINDS = ("stdin", "calls", "asserts")
_IS_TEST = re.compile(r"^[ \t]*(?:def test|assert\b)", re.MULTILINE)


def are_tests(value: Any) -> bool:
    """Return whether a value has one of the forms of tests that `read_tests` reads."""
    match value:
        case {"kind": str(kind)}:
            return kind in _KINDS
        case {"functional": str()} | {"inputs": list(), "outputs": list()}:
            return True
        case [{"input": _, "output": _}, *_]:
            return True
    return _are_asserts(value)


def _are_asserts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, str) for each in value)
        and all(each.lstrip().startswith("assert") for each in value)
    )


def are_pytests(value: Any) -> bool:
    """Return whether a text has functions or asserts that test a program."""
    return isinstance(value, str) and bool(_IS_TEST.search(value))


def read_pytest(text: str) -> tuple[dict[str, Any], list[str]]:
    """Read a file of tests for pytest, and the names that it imports from `solution`.

    Its functions are called one by one.  Fixtures and classes, which need pytest
    itself, raise Unusable.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unusable(NOT_PYTHON) from error
    names: list[str] = []
    kept: list[ast.stmt] = []
    called: list[str] = []
    for node in module.body:
        match node:
            case ast.ImportFrom(module="solution", names=found):
                names += [each.name for each in found]
                continue
            case ast.Import(names=found) | ast.ImportFrom(names=found) if (
                any(each.name.startswith(("pytest", "solution")) for each in found)
                or getattr(node, "module", "") == "pytest"
            ):
                raise Unusable(_NEEDS_PYTEST)
            case ast.ClassDef(name=name) if name.startswith("Test"):
                raise Unusable(_NEEDS_PYTEST)
            case ast.FunctionDef(name=name) if name.startswith("test"):
                if node.decorator_list or node.args.args:
                    raise Unusable(_NEEDS_PYTEST)
                called.append(f"{name}()")
        kept.append(node)
    module.body = kept
    if "*" in names:
        raise Unusable(_NEEDS_PYTEST)
    try:
        tests = "\n".join([ast.unparse(module), *called])
    except RecursionError as error:
        raise Unusable(NOT_PYTHON) from error
    return {"kind": "asserts", "tests": tests}, names


def read_tests(given: Any, *, starter: str = "", function: str = "") -> dict[str, Any]:
    """Read tests of several published forms, as `environments.judges.code` needs them.

    Its own (with "kind"); ["assert ...", ...]; {"functional": Python}, rllm's LeetCode;
    {"inputs": [...], "outputs": [...], "fn_name"?}, that of APPS and TACO;
    [{"input": ..., "output": ...,
    "type" or "testtype", "fn_name" or "metadata": {"func_name"}}, ...], that of
    PrimeIntellect's and LiveCodeBench's problems; any of them as JSON.
    """
    if isinstance(given, str):
        given = from_json(given, "the tests are not JSON")
    match given:
        case None:
            raise Malformed("field 'tests' is missing")
        case {"kind": _}:
            return given
        case {"functional": str(tests)}:
            return {"kind": "asserts", "tests": tests}
        case _ if _are_asserts(given):
            return {"kind": "asserts", "tests": "\n".join(given)}
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            function = function or given.get("fn_name") or ""
        case [{"input": _, "output": _}, *_] if all(
            isinstance(each, dict) and {"input", "output"} <= each.keys()
            for each in given
        ):
            inputs = [each["input"] for each in given]
            outputs = [each["output"] for each in given]
            function = _function_of(given, function)
        case _:
            raise Unusable("the tests have an unknown form, or are missing")
    if not inputs or len(inputs) != len(outputs):
        raise Unusable("the tests have no inputs, or other than outputs")
    if function:
        return _calls(function, inputs, outputs, starter=starter)
    inputs, outputs = ([_joined(each) for each in part] for part in (inputs, outputs))
    return {"kind": "stdin", "inputs": inputs, "outputs": outputs}


def _function_of(tests: Sequence[dict[str, Any]], function: str) -> str:
    kinds = {str(each.get("testtype") or each.get("type") or "stdin") for each in tests}
    if kinds <= {"stdin", "stdin_stdout"}:
        return ""
    if kinds not in ({"functional"}, {"function_call"}):
        raise Unusable("the tests are of an unknown type, or of several")
    metadata = from_text(tests[0].get("metadata"))  # LiveCodeBench's is JSON
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    function = tests[0].get("fn_name") or named or function
    if not function:
        raise Unusable("the tests do not name the function to call")
    return function


def _calls(
    function: str, inputs: list[Any], outputs: list[Any], *, starter: str
) -> dict[str, Any]:
    """Return tests that call a function, or a method of class Solution if it exists."""
    if not isinstance(function, str):
        raise Unusable("the tests name the function to call by no text")
    if all(isinstance(each, str) for each in inputs):
        # LiveCodeBench: one argument to a line, each of them JSON.
        reason = "the arguments of a call are not JSON"
        inputs = [
            [from_json(line, reason) for line in each.splitlines() if line.strip()]
            for each in inputs
        ]
        outputs = [from_json(each, reason) for each in outputs]
    elif all(isinstance(each, list) and len(each) == 1 for each in outputs):
        # APPS puts what a function returns into a list.
        outputs = [each[0] for each in outputs]
    method = f"Solution().{function}"
    entry_point = f"{method} if 'Solution' in globals() else {function}"
    if starter:
        entry_point = method if "class Solution" in starter else function
    return {
        "kind": "calls",
        "entry_point": entry_point,
        "inputs": inputs,
        "outputs": outputs,
    }


def _joined(given: Any) -> str:
    """Return a program's input or output as text; APPS may have a list of lines."""
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise Unusable("the input or output of a program is no text")
    return given
