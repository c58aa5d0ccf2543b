"""What makes one doubt the verdicts on a program: its tests, or what is asked of it."""

import ast
import json
import re
from typing import Any

from scalerl_jax.data.rows import Draft

ONE_TEST = "code with one test"
SHOWN = "code whose first test is in the statement"
SEVERAL = "code with several right outputs, by its wording"
INTERACTIVE = "code with an interactive judge, by its wording"

_SEVERAL = re.compile(
    r"\bif there (?:are|is|exist) (?:multiple|several|many|more than one)"
    r"|\b(?:in|return|print|output) (?:\w+ ){0,4}any order\b|\bany order\b"
    r"|\b(?:print|output|return|find) any\b"
    r"|\bany (?:one )?of them\b"
    r"|\bany (?:valid|correct|such|possible) (?:answer|solution)"
    r"|\b(?:multiple|several) (?:\w+ )?(?:answers|solutions)\b",
    re.IGNORECASE,
)
_INTERACTIVE = re.compile(
    r"\binteractive (?:problem|task|judge|version)|\binteractor\b"
    r"|\bflush (?:the )?(?:output|stdout|standard output)|\bfflush\b"
    r"|\bthis (?:problem|task) is interactive",
    re.IGNORECASE,
)
_SHORT = 6  # characters of arguments that stand in many a statement by chance


def doubts(draft: Draft) -> list[str]:
    """The reasons that a question of code gives; none for others."""
    tests = draft.reference.get("tests")
    if draft.reference["verifier"] != "code" or not isinstance(tests, dict):
        return []
    asserts = _asserts(str(tests.get("tests", "")))
    inputs = tests.get("inputs") or []
    found = {
        ONE_TEST: len(asserts if tests["kind"] == "asserts" else inputs) == 1,
        SHOWN: _first_is_shown(draft.text, tests, asserts),
        SEVERAL: _SEVERAL.search(draft.text),
        INTERACTIVE: _INTERACTIVE.search(draft.text),
    }
    return [reason for reason, holds in found.items() if holds]


def _asserts(tests: str) -> list[ast.Assert]:
    return [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Assert)]


def _first_is_shown(
    statement: str, tests: dict[str, Any], asserts: list[ast.Assert]
) -> bool:
    """Whether the statement has the first test's input, and after it its output."""
    if tests["kind"] == "stdin":
        lines = [line.strip() for line in statement.splitlines() if line.strip()]
        after = _behind(lines, tests["inputs"][0])
        return bool(after) and bool(_behind(after, tests["outputs"][0]))
    if tests["kind"] == "calls":
        return _stand_in(statement, [json.dumps(each) for each in tests["inputs"][0]])
    for call in ast.walk(asserts[0]) if asserts else ():
        if isinstance(call, ast.Call) and (values := _values(call)):
            return _stand_in(statement, values)
    return False


def _values(call: ast.Call) -> list[str]:
    """The arguments of a call, without their names."""
    given = list(call.args)
    for keyword in call.keywords:
        value = keyword.value
        if isinstance(value, ast.Dict) and keyword.arg is None:  # **{...}
            given += value.values
        else:
            given.append(value)
    return [ast.unparse(each) for each in given]


def _behind(lines: list[str], text: str) -> list[str]:
    """What follows the lines of a text among others, and is not empty then."""
    wanted = [line.strip() for line in text.splitlines() if line.strip()]
    for start in range(len(lines) - len(wanted) + 1 if wanted else 0):
        if lines[start : start + len(wanted)] == wanted:
            return [*lines[start + len(wanted) :], ""]
    return []


def _stand_in(statement: str, values: list[str]) -> bool:
    """Whether values stand in a statement, one after the other."""
    rest, wanted = _bare(statement), [_bare(value) for value in values]
    if sum(map(len, wanted)) < _SHORT:
        wanted = [f"({','.join(wanted)})"]
    for value in wanted:
        _, found, rest = rest.partition(value)
        if not found:
            return False
    return True


def _bare(text: str) -> str:
    return "".join(text.split()).replace('"', "'")
