"""Readers of rows: each makes a question of one row in a data set's own form.

A reader gives a `Draft`, or says why there is none: `Malformed` of a row that is not
in the form, which hints at a wrong file, `Unusable` of one that is and cannot be judged
or asked.  Neither says more than the reason, so that rows can be counted by it.
"""

import ast
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scalerl_jax.data.files import Row
from scalerl_jax.rewards.finding import last_boxed
from scalerl_jax.utils.reading import parse_json

_SINGLE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


class Draft(NamedTuple):
    """A question, before its reference was looked at."""

    text: str
    reference: dict[str, Any]
    identity: str = ""  # the data set's own; empty: its rows have none
    system: str = ""


class Unusable(ValueError):
    """A reason for which a row in the right form cannot become a question."""


class Malformed(ValueError):
    """A reason for which a row is not in the data set's form."""


Reader = Callable[[Row], Draft]


def _first(row: Row, *names: str) -> Any:
    """The first of these fields that is there; None counts as missing."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _field(row: Row, *names: str, kind: type = str) -> Any:
    found = _first(row, *names)
    if found is None:
        raise Malformed(f"field {' or '.join(map(repr, names))} is missing")
    if not isinstance(found, kind):
        name = next(name for name in names if row.get(name) is not None)
        raise Malformed(
            f"field {name!r} is of type {type(found).__name__}, not {kind.__name__}"
        )
    return found


def _identity(row: Row, *names: str) -> str:
    found = _first(row, *names)
    return str(found) if isinstance(found, str | int) else ""


def maths(text: str, answer: Any, **more: str) -> Draft:
    """Make a question with an answer: a text, a number, or a list of right ones."""
    if not text.strip():
        raise Unusable("the question is empty")
    written = []
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise Malformed(f"the answer is of type {type(each).__name__}")
        if isinstance(each, float) and not math.isfinite(each):
            raise Malformed("the answer is no finite number")
        # 142.0 is how tables write 142.
        whole = isinstance(each, float) and each.is_integer()
        written.append(str(int(each) if whole else each))
    if not written or not all(each.strip() for each in written):
        raise Unusable("the answer is empty")
    kept = written if isinstance(answer, list) else written[0].strip()
    return Draft(text, {"verifier": "math", "answer": kept}, **more)


def _code(text: str, tests: dict[str, Any], **more: str) -> Draft:
    if not text.strip():
        raise Unusable("the question is empty")
    return Draft(text, {"verifier": "code", "tests": tests}, **more)


def _worked_answer(worked: str) -> str | None:
    r"""The answer behind a worked solution's last "####", else in its last \boxed{}."""
    _, found, answer = worked.rpartition("####")
    if found:
        return _THOUSANDS.sub("", answer)
    return last_boxed(worked)


def read_gsm8k(row: Row) -> Draft:
    """Read `question`, and `answer`: a worked solution that ends in "#### 1,234"."""
    worked = _field(row, "answer")
    if "####" not in worked:
        raise Unusable("the answer has no '####'")
    return maths(_field(row, "question"), _worked_answer(worked))


def read_maths(row: Row) -> Draft:
    r"""Read `problem`, and `answer`, or a `solution` whose last \boxed{} it is."""
    text = _field(row, "problem", "Problem", "question")
    answer = _first(row, "answer", "Answer")
    if answer is None:
        answer = last_boxed(_field(row, "solution", "answer"))
        if answer is None:
            raise Unusable("the solution has no \\boxed{} answer")
    return maths(text, answer, identity=_identity(row, "unique_id", "id", "ID"))


def read_humaneval(row: Row) -> Draft:
    """Read `prompt`, the head of a function; `test` defines check(candidate)."""
    prompt, entry_point = _field(row, "prompt"), _field(row, "entry_point")
    text = (
        "Complete the function below. Answer with one block of Python code that holds "
        f"all of it, with its imports.\n\n```python\n{prompt.rstrip()}\n```"
    )
    tests = f"{_field(row, 'test')}\n\ncheck({entry_point})\n"
    return _code(
        text,
        {"kind": "asserts", "tests": tests, "entry_point": entry_point},
        identity=_field(row, "task_id"),
    )


def read_mbpp(row: Row) -> Draft:
    """Read `prompt`, or `text` of the set that is not sanitized, and asserts.

    The asserts are shown, as in the paper (https://arxiv.org/abs/2108.07732): without
    them nothing says what the function is called.
    """
    task = _field(row, "prompt", "text").strip()
    asserts = "\n".join(map(str, _field(row, "test_list", kind=list)))
    setup = "\n".join(map(str, row.get("test_imports") or []))
    text = (
        f"{task}\n\nYour code should pass these tests:\n\n```python\n{asserts}\n```\n\n"
        "Answer with one block of Python code."
    )
    tests = {
        "kind": "asserts",
        "tests": asserts,
        "setup": "\n".join(filter(None, [setup, row.get("test_setup_code")])),
        "entry_point": _tested_function(_field(row, "code"), asserts),
    }
    return _code(text, tests, identity=str(_field(row, "task_id", kind=int)))


def _tested_function(code: str, asserts: str) -> str:
    """The function of a solution that its asserts call; the last one, if several."""
    try:
        solution, tests = ast.walk(ast.parse(code)), ast.walk(ast.parse(asserts))
    except (SyntaxError, ValueError) as error:
        raise Unusable("the code or its tests are not Python 3") from error
    calls = [node.func for node in tests if isinstance(node, ast.Call)]
    called = {each.id for each in calls if isinstance(each, ast.Name)}
    defined = [node.name for node in solution if isinstance(node, ast.FunctionDef)]
    found = [name for name in defined if name in called]
    if not found:
        raise Unusable("the tests call no function of the code")
    return found[-1]


def mbpp_split(row: Row) -> str:
    """Return the split of a task, by its number (the paper's section 2.1)."""
    number = _field(row, "task_id", kind=int)
    limits = (("prompt", 10), ("test", 510), ("validation", 600))
    return next((split for split, last in limits if number <= last), "train")


def read_deepcoder(row: Row) -> Draft:
    """Read `problem` and `tests`, JSON of several forms; perhaps `starter_code`.

    The instruction says whether a program or a function is asked for, as that of
    LiveCodeBench, which DeepCoder's own training appends.
    """
    problem, starter = _field(row, "problem"), str(row.get("starter_code") or "")
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        metadata = _from_json(metadata or "null", "the metadata are not JSON")
    function = (metadata or {}).get("func_name") or ""
    tests = read_tests(row.get("tests"), starter=starter, function=function)
    if tests["kind"] == "stdin":
        asked = (
            "Write a program that reads the input from stdin and writes the answer to "
            "stdout; do not run it on the sample inputs yourself."
        )
        start = "# YOUR CODE HERE"
    else:
        asked = "Write your solution by completing this code."
        name = tests.get("entry_point", "solve").rpartition(" ")[2].rpartition(".")[2]
        start = starter.rstrip() or f"def {name}(...):"
    text = (
        f"{problem.strip()}\n\n{asked} Answer with one block of Python code:"
        f"\n\n```python\n{start}\n```"
    )
    return _code(text, tests, identity=_identity(row, "id", "question_id"))


def read_tests(given: Any, *, starter: str = "", function: str = "") -> dict[str, Any]:
    """Read tests of several published forms, as `rewards.code` wants them.

    Its own (with "kind"); {"functional": Python}, rllm's LeetCode; {"inputs": [...],
    "outputs": [...], "fn_name"?}, that of APPS and TACO; [{"input": ..., "output": ...,
    "type" or "testtype", "fn_name" or "metadata": {"func_name"}}, ...], that of
    PrimeIntellect's and LiveCodeBench's problems; any of them as JSON.
    """
    if isinstance(given, str):
        given = _from_json(given, "the tests are not JSON")
    match given:
        case None:
            raise Malformed("field 'tests' is missing")
        case {"kind": _}:
            return given
        case {"functional": str(tests)}:
            return {"kind": "asserts", "tests": tests}
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
            raise Unusable("the tests have an unknown form, or there are none")
    if not inputs or len(inputs) != len(outputs):
        raise Unusable("the tests have no inputs, or other than outputs")
    if function:
        return _calls(function, inputs, outputs, starter=starter)
    inputs, outputs = ([_joined(each) for each in part] for part in (inputs, outputs))
    return {"kind": "stdin", "inputs": inputs, "outputs": outputs}


def _function_of(tests: Sequence[dict[str, Any]], function: str) -> str:
    kinds = {each.get("testtype") or each.get("type") or "stdin" for each in tests}
    if kinds <= {"stdin", "stdin_stdout"}:
        return ""
    if kinds not in ({"functional"}, {"function_call"}):
        raise Unusable("the tests are of an unknown type, or of several")
    first = tests[0]
    found = first.get("fn_name") or (first.get("metadata") or {}).get("func_name")
    if not (found or function):
        raise Unusable("the tests do not name the function to call")
    return found or function


def _calls(
    function: str, inputs: list[Any], outputs: list[Any], *, starter: str
) -> dict[str, Any]:
    """Tests that call a function, a method of class Solution where there is one."""
    if all(isinstance(each, str) for each in inputs):
        # LiveCodeBench: one argument to a line, each of them JSON.
        reason = "the arguments of a call are not JSON"
        inputs = [
            [_from_json(line, reason) for line in each.splitlines() if line.strip()]
            for each in inputs
        ]
        outputs = [_from_json(each, reason) for each in outputs]
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
    """Input or output of a program; APPS also has it as a list of lines."""
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise Unusable("the input or output of a program is no text")
    return given


def _from_json(text: Any, reason: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, TypeError) as error:
        raise Unusable(reason) from error


def read_own(row: Row) -> Draft:
    r"""Read this project's form or a usual one; verl's where it has a `reward_model`.

        {"question" | "problem" | "prompt" | "messages",
         "answer" | "ground_truth" | "completion" | "solution" | "tests",
         "id"?, "system"?, "verifier"?}

    `prompt` may be a text or turns.  The answer in a completion or a solution is what
    follows its last "####", else its last \boxed{}, else all of it.  Those with `tests`
    are judged as code, all others as maths, unless "verifier" says it.
    """
    if "reward_model" in row:
        return read_verl(row)
    turns = row.get("messages") or row.get("prompt")
    if isinstance(turns, list):
        text, system = _single_turn(turns)
    else:
        text = _field(row, "question", "problem", "prompt")
        system = row.get("system") or ""
        if not isinstance(system, str):
            raise Malformed("field 'system' is no text")
    more = {"identity": _identity(row, "id", "unique_id"), "system": system}
    verifier = row.get("verifier", "math" if row.get("tests") is None else "code")
    if verifier == "code":
        return _code(text, read_tests(row.get("tests")), **more)
    if verifier != "math":
        raise Malformed("field 'verifier' is neither 'math' nor 'code'")
    return maths(text, read_answer(row), **more)


def read_answer(row: Row) -> Any:
    """Return the right answer, or several, under any of its usual names."""
    answer = _first(row, "answer", "ground_truth")
    if isinstance(answer, str) and "####" in answer:
        return _worked_answer(answer)
    if answer is not None:
        return answer
    for name in ("completion", "solution"):
        if (worked := row.get(name)) is not None:
            if isinstance(worked, list):  # turns
                worked, _ = _single_turn(worked, role="assistant")
            if not isinstance(worked, str):
                raise Malformed(f"field {name!r} is no text")
            found = _worked_answer(worked)
            return worked if found is None else found
    raise Malformed("field 'answer' or 'tests' is missing")


def read_verl(row: Row) -> Draft:
    """Read verl's form: `prompt` of turns, `reward_model.ground_truth`, `ability`.

    https://verl.readthedocs.io/en/latest/preparation/prepare_data.html
    """
    text, system = _single_turn(_field(row, "prompt", kind=list))
    truth = _field(row, "reward_model", kind=dict).get("ground_truth")
    if truth is None:
        raise Malformed("field 'reward_model.ground_truth' is missing")
    ability = row.get("ability") or ""
    if str(ability).startswith("code"):
        return _code(text, read_tests(truth), system=system)
    if isinstance(truth, str) and not _SINGLE_BACKSLASH.search(truth):
        truth = truth.replace(r"\\", "\\")  # GURU's were escaped twice
    return maths(text, truth, system=system)


def _single_turn(messages: list[Any], *, role: str = "user") -> tuple[str, str]:
    """The turn of a role, the user's, and the system's before it or none."""
    for each in messages:
        if not (isinstance(each, dict) and isinstance(each.get("content"), str)):
            raise Malformed("a message has no text 'content'")
    match [(each.get("role"), each["content"]) for each in messages]:
        case [(found, text)] if found == role:
            return text, ""
        case [("system", system), (found, text)] if found == role:
            return text, system
    raise Unusable("the prompt is not one turn of a user")
