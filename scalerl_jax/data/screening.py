"""Screening of drafts: are their references usable, and are they doubtful?

Tests of programs must fail without a solution: tests that only define functions would
give a constant reward.  Doubtful questions are kept and counted.
"""

import ast
import builtins
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from scalerl_jax.data.drafts import Draft
from scalerl_jax.environments import sandbox
from scalerl_jax.environments.judges import code
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.sandbox import SandboxError
from scalerl_jax.environments.verdict import Verifier

_CHECK = "scalerl_jax.environments.judges.maths:check"
_TIMEOUT_S = 10.0  # to parse one answer: a grammar may never end
_VACUOUS = "the tests pass without a solution"
_NO_ANSWER = "the answer cannot be read"
_UNREADABLE = {
    "correct": "",
    **dict.fromkeys(
        ("too_costly", "verifier_timeout"), "reading the answer takes too long"
    ),
}
_MAX_PROCESSES = 32
_CHUNK = 64  # drafts checked together
_NAMED = {
    "math": Verifier(_CHECK),
    "code": Verifier(
        "scalerl_jax.environments.judges.code:judge",
        {"cpu_s": 5, "wall_s": 0.5 * _TIMEOUT_S, "memory_mib": 1024},
    ),
}
# Answers that need no grammar, and so no process: most of them.
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

# Behaviours without a solution: everything that tests call does one of these.
_BEHAVIORS = ("raises", "returns None", "empties its arguments", "returns a NaN")
_NO_SOLUTION = """
def _answer(*given, **named):
    if _behavior == "raises":
        raise Exception("no solution")
    if _behavior == "returns a NaN":
        return float("nan")
    emptied = [each for each in (*given, *named.values()) if hasattr(each, "clear")]
    if _behavior == "empties its arguments" and emptied:
        [each.clear() for each in emptied]
        return emptied[0]

class _Anything:
    def __init__(self, *given, **named): pass
    def __getattr__(self, name): return _answer

def _behave(behavior):
    global _behavior
    _behavior = behavior

"""
# Passes if the tests pass with one of these behaviours.
_PASS_WITHOUT = """
{names}

def _pass_without(behavior):
    _behave(behavior)
    try:
        exec({tests!r}, globals())
    except SystemExit as end:
        return not end.code
    except BaseException:
        return False
    return True

assert any(map(_pass_without, {behaviors!r}))
"""

Place = TypeVar("Place")


class Screen:
    """Checker of references; other processes, which can be killed, parse answers.

    Args:
        try_tests: run the tests of programs without a solution, which they must refuse.
    """

    def __init__(self, *, try_tests: bool = True) -> None:
        """Start no process before an answer needs one."""
        self._try_tests = try_tests
        self._pool: VerifierPool | None = None
        self._sandboxed = False

    def close(self) -> None:
        """End the processes."""
        if self._pool:
            self._pool.close()

    def sift(
        self, drafts: Iterable[tuple[Place, Draft]]
    ) -> Iterator[tuple[Place, Draft, str]]:
        """Yield each draft in order, with the reason why it cannot be judged, or ""."""
        iterator = iter(drafts)
        while chunk := list(itertools.islice(iterator, _CHUNK)):
            reasons = self._reasons([draft for _, draft in chunk])
            for (place, draft), reason in zip(chunk, reasons, strict=True):
                yield place, draft, reason

    def _reasons(self, drafts: list[Draft]) -> list[str]:
        reasons = [""] * len(drafts)
        for number, draft in enumerate(drafts):
            if draft.reference["verifier"] == "code":
                reasons[number] = self._why_no_tests(number, draft)
            elif draft.reference["verifier"] == "math" and not _NUMBER.fullmatch(
                str(draft.reference["answer"])
            ):
                self._started().submit(number, "", [""], draft.reference)
        while self._pool and self._pool.pending:
            self._pool.wait(_TIMEOUT_S)
            for verdicts in self._pool.poll():
                draft, status = drafts[verdicts.key], verdicts.statuses[0]
                if draft.reference["verifier"] == "code":
                    reasons[verdicts.key] = _VACUOUS if status == "correct" else ""
                else:
                    reasons[verdicts.key] = _UNREADABLE.get(status, _NO_ANSWER)
        return reasons

    def _why_no_tests(self, number: int, draft: Draft) -> str:
        """Return the reason why tests are unusable; "": no reason is known yet.

        Asserts are tried in the sandbox; its verdict says later whether they are
        vacuous.
        """
        try:
            tests = code.read_tests(draft.reference)
        except ValueError:
            return "the tests cannot be run"
        if not self._try_tests:
            return ""
        if tests.kind == "asserts":
            answer, reference = _without_solution(tests)
            self._check_sandbox()
            self._started().submit(number, "", [answer], reference)
            return ""
        if tests.kind == "stdin":
            vacuous = all(code.same_output("", expected) for expected in tests.outputs)
        else:
            vacuous = all(expected is None for expected in tests.outputs)
        return _VACUOUS if vacuous else ""

    def _check_sandbox(self) -> None:
        """Check once that programs can be run."""
        if self._sandboxed:
            return
        try:
            sandbox.check()
        except SandboxError as error:
            raise ValueError(
                f"tests are tried without a solution, which they must refuse: {error}; "
                f"or prepare them untried, by --no-check"
            ) from error
        self._sandboxed = True

    def _started(self) -> VerifierPool:
        if self._pool is None:
            self._pool = VerifierPool(
                score=_CHECK,
                named=_NAMED,
                timeout_s=_TIMEOUT_S,
                num_workers=min(_MAX_PROCESSES, os.cpu_count() or 1),
            )
        return self._pool


def _without_solution(tests: code.Tests) -> tuple[str, dict[str, Any]]:
    """Return an answer that solves nothing, and a reference that it must not pass.

    Capitalized names are classes, whose methods do what functions do.
    """
    parts = f"{tests.setup}\n{tests.tests}\n{tests.entry_point or 'candidate'}"
    names = {
        node.id
        for node in ast.walk(ast.parse(parts))
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id)
    }
    defined = "\n".join(
        f"{name} = {'_Anything' if name[0].isupper() else '_answer'}"
        for name in sorted(names)
    )
    pass_without = _PASS_WITHOUT.format(
        names="\n".join(sorted(names)), tests=tests.tests, behaviors=_BEHAVIORS
    )
    wrapped = tests._replace(tests=pass_without)._asdict()
    reference = {"verifier": "code", "tests": wrapped}
    return f"```python\n{_NO_SOLUTION}{defined}\n```", reference


# Doubts.

ONE_TEST = "code with one test"
SHOWN = "code whose first test is in the statement"
SEVERAL = "code with several right outputs, by its wording"
INTERACTIVE = "code with an interactive judge, by its wording"
PROSE = "an answer of over ten words, which no other words equal"
_MOST_WORDS = 10  # the longest answers of MATH and DeepScaleR have four
_WORD = re.compile(r"\\[A-Za-z]+|\b([^\W\d_]{2,})\b")  # or a command of LaTeX

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
_SHORT = 6  # characters of arguments that many statements contain by chance


def doubts(draft: Draft) -> list[str]:
    """Return the reasons to doubt the verdicts on a question."""
    if draft.reference["verifier"] == "math":
        given = draft.reference["answer"]
        answers = given if isinstance(given, list) else [given]
        words = [[*filter(None, _WORD.findall(each))] for each in answers]
        return [PROSE] if max(map(len, words)) > _MOST_WORDS else []
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
    """Return whether the statement has the first test's input, then its output."""
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
    """Return the arguments of a call, without their names."""
    given = list(call.args)
    for keyword in call.keywords:
        value = keyword.value
        if isinstance(value, ast.Dict) and keyword.arg is None:  # **{...}
            given += value.values
        else:
            given.append(value)
    return [ast.unparse(each) for each in given]


def _behind(lines: list[str], text: str) -> list[str]:
    """Return the lines after those of a text, and an empty one; [] if not found."""
    wanted = [line.strip() for line in text.splitlines() if line.strip()]
    for start in range(len(lines) - len(wanted) + 1 if wanted else 0):
        if lines[start : start + len(wanted)] == wanted:
            return [*lines[start + len(wanted) :], ""]
    return []


def _stand_in(statement: str, values: list[str]) -> bool:
    """Return whether a statement contains values, one after the other."""
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
