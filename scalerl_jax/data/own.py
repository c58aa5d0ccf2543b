r"""Reader of rows in the common forms of files and of data sets of the hub.

A row asks in turns or a text, and is judged by tests or an answer:

    "messages" | "conversations" | "prompt" | "question" | "problem"
    "tests" | "test_cases" | "input_output" | "test"
    "answer" | "final_answer" | "ground_truth" | "label",
    "reward_model" | "reward_spec": {"ground_truth"}
    "completion" | "solution", or an assistant's turn after the question

or by the user's reward function, which gets its "reference" unchanged, whatever else
the row is judged by, or cannot be; or the user's environment ("verifier": "own"), which
answers calls of its "tools".  It may also have "choices" or "options", "system", "id"
or "unique_id", and "verifier".  An answer in the form of tests is tests, whatever else
the row says.  The answer of a completion, a solution or a turn is the line after its
last "####", else is in its last \boxed{}, else is all of a short text.  Rows of other
tasks are recognised by their content, and dropped with the reason.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from scalerl_jax.data import choices
from scalerl_jax.data.drafts import (
    Draft,
    Malformed,
    Refused,
    Unusable,
    field,
    first,
    from_text,
    identity,
    is_filled,
    maths,
    program,
    worked_answer,
)
from scalerl_jax.data.files import Row
from scalerl_jax.data.program_tests import (
    TESTS,
    are_pytests,
    are_tests,
    read_pytest,
    read_tests,
)
from scalerl_jax.data.rows import read_checked, read_mbpp
from scalerl_jax.data.turns import (
    HAS_PICTURE,
    check_no_pictures,
    has_picture,
    listed_tools,
    read_turns,
)

ANSWERS = ("answer", "final_answer", "ground_truth", "label")
_REWARDS = ("reward_model", "reward_spec")  # verl's, SkyRL's
OWN = "own"  # the verifier of rows that the user's reward function judges
_OF_OWN = ("reference", *ANSWERS)
_WORKED = ("completion", "solution")
_CONSTRAINTS = ("instruction_id_list", "constraint", "constraint_type")
_KINDS = ("ability", "dataset", "data_source", "task_type")  # say what a row asks for
_INSTRUCTIONS = re.compile(r"if_?eval|instruction[ _-]?follow|if_multi", re.IGNORECASE)
_LONGEST_ANSWER = 200  # characters of a worked solution that is all answer
_SINGLE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")
_SOURCE = re.compile(
    r"^(?:```|#include\b|def \w+\(|class \w+[^\n]*:\s*$|import \w+\s*$"
    r"|from [\w.]+ import |SELECT\b[^\n]*\bFROM\b)",
    re.MULTILINE,
)
# The columns that hold one part of a question, as --column names the part.
PARTS: dict[str, tuple[str, ...]] = {
    "prompt": ("messages", "conversations", "prompt", "question", "problem"),
    "reference": (*TESTS, "test", *ANSWERS, *_REWARDS, *_WORKED),
    "choices": choices.COLUMNS,
    "system": ("system",),
    "id": ("id", "unique_id"),
    "tools": ("tools", "extra_info"),
}


class _Judged(NamedTuple):
    verifier: str  # "math" or "code"
    by: Any  # an answer, or tests


def read_own(row: Row, columns: Iterable[tuple[str, str]] = ()) -> Draft:
    """Read a row; `columns` are pairs of a part and the column that holds it."""
    row = _with_columns(row, columns)
    _check_task(row)
    mine = row.get("reference")
    if mine is None or row.get("verifier"):
        return _read(row)
    try:
        draft = _read(row)
    except (Malformed, Unusable):  # of what else the row has, perhaps
        draft = _read({**row, "verifier": OWN})
        if not draft.text.strip():
            raise
    if draft.reference["verifier"] == OWN:
        return draft
    return draft._replace(reference={**draft.reference, OWN: mine})


def _read(row: Row) -> Draft:
    if row.get("test_list") is not None and row.get("code") is not None:
        return read_mbpp(row)
    if row.get("entry_point") and row.get("test") is not None:
        return read_checked(row)
    text, system, worked = _question(row)
    reward = _reward(row)
    more = {
        "system": system,
        # verl's "id" is not one of questions.
        "identity": "" if reward else identity(row, "id", "unique_id"),
    }
    unknown = reward is None and first(row, *TESTS, *ANSWERS, *_WORKED) is None
    if row.get("verifier") == OWN or ("reference" in row and unknown):
        given: dict[str, Any] = {"verifier": OWN, "answer": first(row, *_OF_OWN)}
        if tools := listed_tools(row):
            given["tools"] = tools
        return Draft(text, given, **more)
    if listed := choices.read_choices(row, text):
        answer = first(reward or row, *ANSWERS)
        letter = choices.letter_of(row, listed, answer)
        return maths(choices.show(text, listed), letter, **more)
    if are_pytests(row.get("test")) and first(row, *TESTS) is None:
        tests, names = read_pytest(row["test"])
        return program(_naming(text, names), tests, **more)
    judged = read_reference(row, worked)
    if judged.verifier == "code":
        return program(text, judged.by, **more)
    choices.check_no_index(row, text, judged.by)
    return maths(text, judged.by, **more)


def _with_columns(row: Row, columns: Iterable[tuple[str, str]]) -> Row:
    """Return the row under the usual names; a part without a column is left out."""
    changed = dict(row)
    for part, column in columns:
        for name in PARTS[part]:
            changed.pop(name, None)
        value = _value(row, column) if column else None
        if part == "reference":  # the named column is it
            changed.pop("reference", None)
            if isinstance(value, dict):  # which the user's function may read
                changed["reference"] = value
            part, value = "answer", _marked(value)
        if column:
            changed[part] = value
    return changed


def _value(row: Row, column: str) -> Any:
    """Return the value of a column, or of its field: "reward_model.ground_truth"."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise Malformed(f"column {column!r} is missing")
        value = value[name]
    return value


def _check_task(row: Row) -> None:
    """Raise for rows that need more than a question and its answer.

    Raises:
        Refused: the row gives tools to the policy.
        Unusable: the row has pictures, or asks for a form of text.
    """
    extra = row.get("extra_info")
    kwargs = isinstance(extra, dict) and extra.get("need_tools_kwargs")
    own = row.get("verifier") == OWN  # whose environment answers their calls
    if kwargs or (is_filled(row.get("tools")) and not own):
        column = "extra_info.tools_kwargs" if kwargs else "tools"
        raise Refused(
            f"column {column!r} gives the policy tools to call, which no environment "
            f"of data sets runs; take the column out, or ask the questions without "
            f"tools by --column tools= (in a run: NAME?tools= in data.tasks)"
        )
    check_no_pictures(row)
    said = " ".join(str(row.get(name) or "") for name in _KINDS)
    if _INSTRUCTIONS.search(said) or any(map(is_filled, map(row.get, _CONSTRAINTS))):
        raise Unusable("it asks for a form of text, which nothing here verifies")


def _question(row: Row) -> tuple[str, str, Any]:
    """Return the question's text, the system's, and an assistant's answer or None."""
    for name in ("messages", "conversations", "prompt"):
        turns = read_turns(row.get(name), answered=name != "prompt")
        if turns is not None:
            return turns
    text = field(row, "question", "problem", "prompt")
    if has_picture(text):
        raise Unusable(HAS_PICTURE)
    system = row.get("system") or ""
    if not isinstance(system, str):
        raise Malformed("field 'system' is no text")
    return text, system, None


def _naming(text: str, names: list[str]) -> str:
    """Return the text, with the names that the tests call if it lacks them."""
    unsaid = [name for name in names if not re.search(rf"\b{name}\b", text)]
    return f"{text}\n\nDefine {', '.join(unsaid)}." if unsaid else text


def _reward(row: Row) -> dict[str, Any] | None:
    found = first(row, *_REWARDS)
    return found if isinstance(found, dict) else None


def read_reference(row: Row, worked: Any = None) -> _Judged:
    """Return the verifier of a row and the answer or tests that it judges by.

    `worked` is an answer of the row's conversation.
    """
    verifier = row.get("verifier")
    if verifier not in (None, "math", "code"):
        raise Malformed("field 'verifier' is neither 'math' nor 'code'")
    tests = first(row, *TESTS)
    if tests is not None and verifier != "math":
        return _Judged("code", read_tests(tests))
    truth = _truth(row, worked)
    if verifier == "math":
        return _Judged("math", truth)
    value = from_text(truth)
    ability = str(row.get("ability") or "").lower()
    if verifier == "code" or are_tests(value) or ability.startswith(("code", "coding")):
        return _Judged("code", read_tests(value))
    if isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(each, dict) for each in value)
    ):
        raise Unusable("the answer is a JSON object, and no tests of a program")
    if isinstance(truth, str) and _SOURCE.search(truth):
        raise Unusable("the answer is a program, and there are no tests")
    return _Judged("math", truth)


def _truth(row: Row, turn: Any) -> Any:
    """Return the right answer, or several, or tests, under any of the usual names."""
    if reward := _reward(row):
        return _of_reward(reward)
    answer = first(row, *ANSWERS)
    if answer is not None:
        worked = isinstance(answer, str) and "####" in answer
        return _marked(answer) if worked else answer
    for name, found in [*((name, row.get(name)) for name in _WORKED), ("turn", turn)]:
        if found is not None:
            return _answer_of(name, found)
    if first(row, *choices.INDICES) is not None:
        raise Unusable(choices.NO_INDEX)
    if any(name in row for name in (*ANSWERS, *_WORKED)):
        raise Unusable("the answer is empty")
    raise Malformed(
        "field 'answer' or 'tests' is missing, and so is 'reference' (null where a "
        "reward function of your own needs none)"
    )


def _of_reward(reward: dict[str, Any]) -> Any:
    """Return the right answer or the tests in verl's or SkyRL's column."""
    if "ground_truth" not in reward:
        raise Malformed("field 'ground_truth' of the reward's column is missing")
    truth = reward["ground_truth"]
    if truth is None:
        raise Unusable("the answer is empty")
    if isinstance(truth, str) and not _SINGLE_BACKSLASH.search(truth):
        if not are_tests(from_text(truth)):
            return truth.replace(r"\\", "\\")  # GURU's were escaped twice
    return truth


def _marked(answer: Any) -> Any:
    """Return the marked answer in a worked one, or all of it; tests stay unchanged."""
    if not isinstance(answer, str) or are_tests(from_text(answer)):
        return answer
    found = worked_answer(answer)
    return answer if found is None else found


def _answer_of(name: str, worked: Any) -> str:
    """Return the answer in a completion or a solution, which may be a turn."""
    if isinstance(worked, list):
        turns = read_turns(worked, role="assistant")
        worked = turns and turns[0]
    if not isinstance(worked, str):
        raise Malformed(f"field {name!r} is no text")
    found = worked_answer(worked)
    if found is None and _SOURCE.search(worked):
        return worked  # a program: its reader raises the reason to drop it
    if found is None and (
        "\n" in worked.strip() or len(worked.strip()) > _LONGEST_ANSWER
    ):
        raise Unusable("the solution has neither \\boxed{} nor '####'")
    return worked if found is None else found
