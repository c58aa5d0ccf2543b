"""Readers of the known data sets: each makes a question of one row in its form."""

import ast
import re

from scalerl_jax.data.drafts import (
    Draft,
    Malformed,
    Unusable,
    field,
    first,
    from_json,
    identity,
    maths,
    program,
    worked_answer,
)
from scalerl_jax.data.files import Row
from scalerl_jax.data.program_tests import NOT_PYTHON, read_tests
from scalerl_jax.environments.judges.finding import last_boxed

# Columns that state a problem whose `prompt` is code, first what states the most.
_STATED = ("query", "problem_description", "question", "problem")


def read_gsm8k(row: Row) -> Draft:
    """Read `question`, and `answer`: a worked solution that ends in "#### 1,234"."""
    worked = field(row, "answer")
    answer = worked_answer(worked) if "####" in worked else None
    if answer is None:
        raise Unusable("the answer has no '####'")
    return maths(field(row, "question"), answer)


def read_maths(row: Row) -> Draft:
    r"""Read `problem`, and `answer`, or a `solution` whose last \boxed{} it is."""
    text = field(row, "problem", "Problem", "question")
    answer = first(row, "answer", "Answer")
    if answer is None:
        answer = last_boxed(field(row, "solution", "answer"))
        if answer is None:
            raise Unusable("the solution has no \\boxed{} answer")
    return maths(text, answer, identity=identity(row, "unique_id", "id", "ID"))


def read_humaneval(row: Row) -> Draft:
    """Read `prompt`, the head of a function; `test` defines check(candidate)."""
    prompt, entry_point = field(row, "prompt"), field(row, "entry_point")
    text = (
        "Complete the function below. Answer with one block of Python code that holds "
        f"all of it, with its imports.\n\n```python\n{prompt.rstrip()}\n```"
    )
    tests = f"{field(row, 'test')}\n\ncheck({entry_point})\n"
    return program(
        text,
        {"kind": "asserts", "tests": tests, "entry_point": entry_point},
        identity=field(row, "task_id"),
    )


def read_checked(row: Row) -> Draft:
    """Read a row whose `test` defines check(candidate) for its `entry_point`.

    HumanEval's `prompt` is the head of the function.  That of LeetCodeDataset only has
    the imports of the tests; the row states the problem elsewhere.
    """
    entry_point, prompt = field(row, "entry_point"), row.get("prompt")
    name = (re.findall(r"\w+", entry_point) or [""])[-1]
    if not name:
        raise Unusable("the entry point is no name")
    if isinstance(prompt, str):
        if re.search(rf"\b(?:def|class)\s+{name}\b", prompt):
            return read_humaneval(row)
    stated = first(row, *_STATED)
    if stated is None:
        stated = field(row, "prompt")
        if _is_code(stated):
            raise Unusable("the prompt is code without the function or a statement")
    if not isinstance(stated, str):
        raise Malformed("the statement of the problem is no text")
    asked = [stated.strip()]
    starter = str(row.get("starter_code") or "").strip()
    if starter and starter not in stated:
        asked.append(f"Complete this code:\n\n```python\n{starter}\n```")
    elif not re.search(rf"\b{name}\b", stated):
        asked.append(f"Define {entry_point}.")
    asked.append("Answer with one block of Python code that holds all of it.")
    tests = f"{field(row, 'test')}\n\ncheck({entry_point})\n"
    return program(
        "\n\n".join(asked),
        {"kind": "asserts", "tests": tests, "entry_point": entry_point},
        identity=identity(row, "task_id", "id"),
    )


def _is_code(text: str) -> bool:
    """Return whether a text is Python that says nothing in words."""
    try:
        return ast.get_docstring(ast.parse(text)) is None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def read_mbpp(row: Row) -> Draft:
    """Read `prompt`, or `text` of the set that is not sanitized, and asserts.

    The asserts are shown, as in the paper (https://arxiv.org/abs/2108.07732): only they
    name the function.
    """
    task = field(row, "prompt", "text").strip()
    asserts = "\n".join(map(str, field(row, "test_list", kind=list)))
    setup = (_code_in(row, name) for name in ("test_imports", "test_setup_code"))
    text = (
        f"{task}\n\nYour code should pass these tests:\n\n```python\n{asserts}\n```\n\n"
        "Answer with one block of Python code."
    )
    tests = {
        "kind": "asserts",
        "tests": asserts,
        "setup": "\n".join(filter(None, setup)),
        "entry_point": _tested_function(field(row, "code"), asserts),
    }
    return program(text, tests, identity=str(field(row, "task_id", kind=int)))


def _code_in(row: Row, name: str) -> str:
    """Return the code in a field: a text, a list of lines, or missing."""
    given = row.get(name) or []
    lines = [given] if isinstance(given, str) else given
    if not isinstance(lines, list) or not all(isinstance(each, str) for each in lines):
        raise Malformed(f"field {name!r} is neither a text nor a list of texts")
    return "\n".join(lines)


def _tested_function(code: str, asserts: str) -> str:
    """Return the function of a solution that its asserts call; the last if several."""
    try:
        solution, tests = ast.walk(ast.parse(code)), ast.walk(ast.parse(asserts))
    except (SyntaxError, ValueError) as error:
        raise Unusable(NOT_PYTHON) from error
    calls = [node.func for node in tests if isinstance(node, ast.Call)]
    called = {each.id for each in calls if isinstance(each, ast.Name)}
    defined = [node.name for node in solution if isinstance(node, ast.FunctionDef)]
    found = [name for name in defined if name in called]
    if not found:
        raise Unusable("the tests call no function of the code")
    return found[-1]


def mbpp_split(row: Row) -> str:
    """Return the split of a task, by its number (the paper's section 2.1)."""
    number = field(row, "task_id", kind=int)
    limits = (("prompt", 10), ("test", 510), ("validation", 600))
    return next((split for split, last in limits if number <= last), "train")


def read_deepcoder(row: Row) -> Draft:
    """Read `problem` and `tests`, JSON of several forms; perhaps `starter_code`.

    The instruction asks for a program or for a function, like that of LiveCodeBench,
    which DeepCoder's own training appends.
    """
    problem, starter = field(row, "problem"), str(row.get("starter_code") or "")
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        metadata = from_json(metadata or "null", "the metadata are not JSON")
    if not isinstance(metadata, dict | None):
        raise Malformed("field 'metadata' is no object")
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
        called = str(tests.get("entry_point", "solve"))
        name = called.rpartition(" ")[2].rpartition(".")[2]
        start = starter.rstrip() or f"def {name}(...):"
    text = (
        f"{problem.strip()}\n\n{asked} Answer with one block of Python code:"
        f"\n\n```python\n{start}\n```"
    )
    return program(text, tests, identity=identity(row, "id", "question_id"))
