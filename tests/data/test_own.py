"""Rows in the forms of files and of the hub, and rows of other tasks among them."""

import json

import pytest

from scalerl_jax.data import own
from scalerl_jax.data.drafts import Malformed, Refused, Unusable
from scalerl_jax.environments.own import told

STDIN = {"kind": "stdin", "inputs": ["1\n", "4\n"], "outputs": ["2\n", "5\n"]}
PAIRS = {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "5\n"]}
ASKED = [{"role": "user", "content": "Read n, print n + 1."}]


def verl(truth, prompt=ASKED, **more):
    return {"prompt": prompt, "reward_model": {"ground_truth": truth}} | more


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(verl(json.dumps(PAIRS), ability="coding"), id="verl, coding"),
        pytest.param(verl(json.dumps(PAIRS)), id="verl, no ability"),
        pytest.param(verl(json.dumps(PAIRS), ability="math"), id="verl, another"),
        pytest.param(verl(PAIRS), id="verl, no text"),
        pytest.param({"prompt": ASKED, "ground_truth": json.dumps(PAIRS)}, id="plain"),
        pytest.param({"prompt": ASKED, "label": json.dumps(PAIRS)}, id="slime"),
        pytest.param({"prompt": ASKED, "test_cases": PAIRS}, id="test_cases"),
        pytest.param(
            {"prompt": ASKED, "input_output": json.dumps(PAIRS)}, id="APPS, TACO"
        ),
        pytest.param(
            {"prompt": ASKED, "reward_spec": {"ground_truth": json.dumps(PAIRS)}},
            id="SkyRL",
        ),
    ],
)
def test_tests_are_tests_wherever_they_stand(row):
    draft = own.read_own(row)
    assert draft.text == "Read n, print n + 1."
    assert draft.reference == {"verifier": "code", "tests": STDIN}


def test_hashes_in_tests_are_no_worked_answer():
    grids = {"inputs": ["####\n"], "outputs": ["4\n"]}
    row = {"question": "Count the walls.", "ground_truth": json.dumps(grids)}
    tests = own.read_own(row).reference["tests"]
    assert (tests["inputs"], tests["outputs"]) == (["####\n"], ["4\n"])


def test_asserts_are_tests():
    row = {"question": "Write f.", "ground_truth": '["assert f(1) == 2", "assert f"]'}
    tests = own.read_own(row).reference["tests"]
    assert tests == {"kind": "asserts", "tests": "assert f(1) == 2\nassert f"}


def test_functions_of_pytest_are_called_one_by_one():
    given = (
        "from solution import plus\n\ndef test_two():\n    assert plus(2) == 3\n"
        "def test_big():\n    assert plus(9) == 10\n"
    )
    solution = "def plus(x):\n    return x + 1\n"
    row = {"question": "Add one.", "solution": solution, "test": given}
    draft = own.read_own(row)
    assert draft.text == "Add one.\n\nDefine plus."
    assert own.read_own(row | {"question": "Write plus."}).text == "Write plus."
    tests = draft.reference["tests"]["tests"]
    exec(solution + tests, {})
    with pytest.raises(AssertionError):
        exec("def plus(x):\n    return 3\n" + tests, {})


@pytest.mark.parametrize(
    "test",
    [
        "import pytest\ndef test_f():\n    assert f(1)",
        "from solution import *\ndef test_f():\n    assert f(1)",
        "import solution\ndef test_f():\n    assert solution.f(1)",
        "def test_f(tmp_path):\n    assert f(tmp_path)",
        "class TestF:\n    def test(self):\n        assert f(1)\nassert f",
    ],
)
def test_what_needs_pytest_itself_is_unusable(test):
    with pytest.raises(Unusable, match="need pytest or the module"):
        own.read_own({"question": "Write f.", "solution": "f = 1", "test": test})


@pytest.mark.parametrize(
    "expression", ["(" * 5000, "+".join("1" * 900), "+".join("1" * 90_000), "1\0"]
)
def test_tests_that_nest_without_end_are_unusable(expression):
    row = {"question": "Write f.", "test": f"def test_f():\n    assert {expression}"}
    with pytest.raises(Unusable, match="not Python 3"):
        own.read_own(row)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(1, id="an index from 0"),
        pytest.param("B", id="a letter"),
        pytest.param("(B)", id="a letter in brackets"),
        pytest.param("14", id="a choice"),
    ],
)
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(["1", "14", "1.5"], id="MMLU"),
        pytest.param(["A) 1", "B) 14", "C) 1.5"], id="AQuA"),
        pytest.param({"A": "1", "B": "14", "C": "1.5"}, id="MedQA"),
        pytest.param({"label": ["A", "B", "C"], "text": ["1", "14", "1.5"]}, id="ARC"),
        pytest.param('["1", "14", "1.5"]', id="JSON"),
        pytest.param("['1', '14', '1.5']", id="pandas"),
    ],
)
def test_choices_are_shown_and_the_letter_is_right(choices, answer):
    row = {"question": "Which is even?", "choices": choices, "answer": answer}
    draft = own.read_own(row)
    assert draft.text == (
        "Which is even?\n\nA. 1\nB. 14\nC. 1.5\n\n"
        "Answer with the letter of the right choice."
    )
    assert draft.reference == {"verifier": "math", "answer": "B"}


ARC = {"label": ["1", "2", "3"], "text": ["1", "14", "1.5"]}


@pytest.mark.parametrize(
    "more",
    [
        {"choices": {"a": "1", "b": "14", "c": "1.5"}, "answer": "b"},
        {"choices": {"c": "1.5", "a": "1", "b": "14"}, "answer": "(B)"},
        {"choices": {"1": "1", "2": "14", "3": "1.5"}, "answer": 2},
        {"choices": {"0": "1", "1": "14", "2": "1.5"}, "answerKey": "1"},
        {"choices": {"A": "1", "B": "14", "C": "1.5", "D": None}, "answer": "B"},
        {"choices": ["1", "14", "1.5", None], "answer": "B"},
        {"choices": ARC, "answerKey": 2},
        {"choices": ARC, "answer_index": 1},
        {"choices": ARC, "answer": "B"},
        {"choices": [1, 14, 1.5], "answer": 14},
        {"choices": [3, 1, 2], "answer": 1, "shown": "A. 3\nB. 1\nC. 2"},
        {"choices": [3.0, 1.0], "answer": 1, "shown": "A. 3\nB. 1"},
    ],
)
def test_labels_of_the_row_s_own_come_before_an_index(more):
    draft = own.read_own({"question": "Which?"} | more)
    assert more.get("shown", "A. 1\nB. 14\nC. 1.5") in draft.text
    assert draft.reference == {"verifier": "math", "answer": "B"}


def test_a_letter_that_is_a_choice_is_right_where_both_say_the_same():
    for answer, right in (("A", "A"), ("K", "D"), ("(C)", "C")):
        row = {"question": "Vitamin?", "choices": [*"ACDK"], "answer": answer}
        assert own.read_own(row).reference["answer"] == right
    row = {"question": "Vitamin?", "choices": [*"ACDK"], "answerKey": "C"}
    assert own.read_own(row).reference["answer"] == "C"


def test_choices_that_the_question_shows_are_shown_once():
    text = "Which is even?\n(A) 1\n(B) 14"
    row = {"question": text, "options": ["1", "14"], "answer": "B"}
    asked = "Answer with the letter of the right choice."
    assert own.read_own(row).text == f"{text}\n\n{asked}"


@pytest.mark.parametrize(
    "row, why",
    [
        ({"choices": ["1", "14"], "answer": 2}, "names none of the choices"),
        ({"choices": ["1", "4"], "answer": "1"}, "several of the choices"),
        ({"choices": ["A", "C", "D"], "answer": "C"}, "several of the choices"),
        ({"choices": ["1", "4"]}, "no answer to the choices"),
        ({"choices": [1, 4], "answer": 1}, "several of the choices"),
        ({"choices": [1.0, 2.0, 4.0], "answer": 2}, "several of the choices"),
        ({"choices": "A) 1 B) 4", "answer": "B"}, "one text, which is not read"),
        ({"choices": {"1": "2", "2": "1"}, "answer": 2}, "several of the choices"),
        ({"choices": ARC, "answer": 0}, "names none of the choices"),
        ({"choices": {"B": "x", "C": "y"}, "answer": "A"}, "names none of the choices"),
        ({"options": {"first": "1", "second": "4"}, "answer": "1"}, "no letters or nu"),
        ({"choices": ["1"], "answer": 0}, "not between 2 and 26"),
        ({"choices": [], "answer": 1}, "index of choices"),
        ({"question": "Which of these is even?", "answer": 1}, "index of choices"),
        ({"answer_index": 1}, "index of choices"),
    ],
)
def test_an_index_without_its_choice_is_unusable(row, why):
    with pytest.raises(Unusable, match=why):
        own.read_own({"question": "Which is even?"} | row)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which of these numbers is even?", "answer": "14"},
        {"question": "How many of these are even?", "answer": 2},
        {"question": "2 - 1?", "answer": 1, "label": 0},
        {"question": "2 - 1?", "answer": "1", "options": {"hard": True}},
        {"question": "Which? A) 1 B) 4", "answer": "B", "options": "A) 1 B) 4"},
    ],
)
def test_numbers_that_are_answers_stay_answers(row):
    assert own.read_own(row).reference["answer"] == str(row["answer"])


@pytest.mark.parametrize(
    "row, why",
    [
        ({"answer": '{"func_name": "all_lower_case", "N": 3}'}, "a JSON object"),
        ({"answer": "[{'instruction_id': ['a'], 'kwargs': [None]}]"}, "a JSON object"),
        ({"answer": {"target": ["4"]}}, "a JSON object"),
        ({"answer": "x", "dataset": "ifeval"}, "form of text"),
        ({"answer": "x", "ability": "instruction_following"}, "form of text"),
        ({"instruction_id_list": ["no_comma"], "kwargs": [{}]}, "form of text"),
        ({"answer": "def f(x):\n    return x"}, "program, and there are no tests"),
        ({"solution": "```python\nprint(1)\n```"}, "program, and there are no tests"),
        ({"answer": "4", "ability": "code"}, "unknown form"),
        ({"answer": "4", "images": [{"bytes": "..."}]}, "picture"),
        ({"answer": "4", "question": "<image>How long is AB?"}, "picture"),
        ({"solution": "First this.\nThen that."}, "neither .boxed"),
    ],
)
def test_rows_of_other_tasks_are_unusable(row, why):
    with pytest.raises(Unusable, match=why):
        own.read_own({"question": "?"} | row)


@pytest.mark.parametrize(
    "word",
    ["proof", "Proof.", r"\text{proof}", "notfound", "nan", "NaN", "null", "N/A", "?"],
)
def test_a_word_in_the_place_of_an_answer_is_none(word):
    with pytest.raises(Unusable, match="which is no answer"):
        own.read_own({"problem": "Show that 3 divides 6.", "answer": word})
    with pytest.raises(Unusable, match="which is no answer"):
        own.read_own(verl(word))


@pytest.mark.parametrize("answer", [None, "", " ", "$$", r"\boxed{}", r"\text{ }", []])
def test_an_answer_that_is_not_there_is_counted_as_such(answer):
    with pytest.raises(Unusable, match="the answer is empty"):
        own.read_own({"problem": "2 + 2?", "answer": answer})
    with pytest.raises(Unusable, match="the answer is empty"):
        own.read_own(verl(answer))


def test_a_missing_number_of_a_table_is_no_answer():
    with pytest.raises(Unusable, match="'nan', which is no answer"):
        own.read_own({"problem": "2 + 2?", "answer": float("nan")})


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(r"\{\}", id="the empty set"),
        pytest.param("none", id="a word that answers some questions"),
        pytest.param("[0, 1]", id="an interval that is JSON"),
        pytest.param("[[1, 2], [3, 4]]", id="a matrix that is JSON"),
        pytest.param("{1, 2}", id="a set that is Python"),
        pytest.param("proof by cases", id="a longer text"),
        pytest.param("x" + " " * 90 + "= 1", id="an answer with much space"),
        pytest.param("import 3 tons from 4 towns", id="prose with words of programs"),
    ],
)
def test_answers_like_those_of_other_tasks_are_kept(answer):
    assert own.read_own({"problem": "?", "answer": answer}).reference == {
        "verifier": "math",
        "answer": answer,
    }


@pytest.mark.parametrize(
    "written, answer",
    [("3,125", "3125"), ("(3,125)", "(3,125)"), (r"$\{3,125\}$", r"$\{3,125\}$")],
)
def test_a_comma_of_thousands_is_left_out_but_not_that_of_a_point(written, answer):
    row = {"problem": "?", "answer": f"So.\n#### {written}"}
    assert own.read_own(row).reference["answer"] == answer


@pytest.mark.parametrize(
    "solution, answer",
    [
        pytest.param("So.\n#### 1,110\nThe answer is: 1,110", "1110", id="MetaMathQA"),
        pytest.param("#### \n5\n\nLet me check.", "5", id="on the line below"),
        pytest.param(r"So \boxed{5}." "\n#### Check\n2 + 3 = 5", "5", id="a heading"),
        pytest.param("#### Step 1\n2 + 3\n#### Step 2\nIt is 5.", None, id="headings"),
    ],
)
def test_a_marked_answer_is_one_line_and_no_heading(solution, answer):
    row = {"problem": "2 + 3?", "solution": solution}
    if answer is None:
        with pytest.raises(Unusable, match="neither"):
            own.read_own(row)
    else:
        assert own.read_own(row).reference["answer"] == answer


TURN = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            {
                "problem": "2 + 2?",
                "solution": r"So $\boxed{4}$.",
                "messages": [
                    *TURN,
                    {"role": "assistant", "content": r"So $\boxed{4}$."},
                ],
            },
            id="NuminaMath-CoT",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": r"\boxed{4}"},
                ]
            },
            id="ShareGPT",
        ),
        pytest.param({"prompt": json.dumps(TURN), "answer": "4"}, id="JSON in a text"),
        pytest.param({"prompt": str(TURN), "answer": "4"}, id="Python in a text"),
        pytest.param(
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
                ],
                "answer": "4",
            },
            id="parts of content",
        ),
        pytest.param({"question": "2 + 2?", "final_answer": "4"}, id="DeepMath"),
        pytest.param({"prompt": TURN, "label": "4"}, id="slime, OpenRLHF"),
        pytest.param(
            {"prompt": TURN, "reward_spec": {"ground_truth": "4"}, "env_class": "m"},
            id="SkyRL",
        ),
        pytest.param(verl("4", prompt="2 + 2?"), id="verl with a text"),
    ],
)
def test_forms_of_other_trainers(row):
    draft = own.read_own(row)
    assert (draft.text, draft.system) == ("2 + 2?", "")
    assert draft.reference == {"verifier": "math", "answer": "4"}


def test_a_system_turn_is_kept_beside_an_answered_question():
    turns = [{"from": "system", "value": "Be brief."}, *TURN]
    turns += [{"role": "assistant", "content": "4"}]
    draft = own.read_own({"conversations": turns})
    assert (draft.system, draft.reference["answer"]) == ("Be brief.", "4")
    turns[0]["from"] = "developer"
    assert own.read_own({"conversations": turns}) == draft


@pytest.mark.parametrize(
    "row, error, why",
    [
        ({"prompt": "[{'role': 'user', 'content': f(1)}]"}, Unusable, "cannot be read"),
        (
            {"prompt": '[{"role": "user", ' + '"content": [' * 5000},
            Unusable,
            "cannot be read",
        ),
        ({"prompt": TURN * 2}, Unusable, "not one turn"),
        (
            {"prompt": [*TURN, {"role": "assistant", "content": "5?"}]},
            Unusable,
            "not one turn",
        ),
        (
            {"messages": [*TURN, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            Unusable,
            "calls tools",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
            Unusable,
            "picture",
        ),
        (
            {"messages": [*TURN, {"from": "observation", "value": "4"}]},
            Unusable,
            "a turn is of the role 'observation', which is not read",
        ),
        ({"messages": [{"content": "2 + 2?"}]}, Unusable, "a turn has no role"),
        ({"prompt": [{"role": "user", "content": [1]}]}, Malformed, "no text"),
        ({"prompt": [{"role": "user", "content": None}]}, Malformed, "no text"),
    ],
)
def test_turns_that_are_no_question(row, error, why):
    with pytest.raises(error, match=why):
        own.read_own({"answer": "4"} | row)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "run"}}]},
        {"tools": '[{"type": "function"}]'},
        {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": {}}},
    ],
)
def test_tools_are_refused_and_can_be_left_out(more):
    row = {"question": "2 + 2?", "answer": "4"} | more
    with pytest.raises(Refused, match=r"column '\S*tools\S*' .* --column tools="):
        own.read_own(row)
    assert own.read_own(row, [("tools", "")]).reference["answer"] == "4"


@pytest.mark.parametrize("written", [list, json.dumps])
def test_tools_come_with_a_question_whose_environment_answers_their_calls(written):
    tools = [{"type": "function", "function": {"name": "run"}}]
    row = {"question": "2 + 2?", "verifier": "own", "reference": 4}
    found = own.read_own(row | {"tools": written(tools)}).reference
    assert found == {"verifier": "own", "answer": 4, "tools": tools}
    assert "tools" not in own.read_own(row | {"tools": []}).reference
    with pytest.raises(Malformed, match="field 'tools' is no list of objects"):
        own.read_own(row | {"tools": ["run"]})


@pytest.mark.parametrize(
    "more, judged",
    [
        ({"answer": 7}, {"verifier": "math", "answer": "7"}),
        ({"answer": 1, "choices": ["x", "y"]}, {"verifier": "math", "answer": "B"}),
        ({"tests": STDIN}, {"verifier": "code", "tests": STDIN}),
    ],
)
def test_a_row_s_reference_is_kept_beside_what_judges_it(more, judged):
    row = {"question": "2 + 5?", **more}
    mine = {"keys": [1, None]}
    found = own.read_own(row | {"reference": mine}).reference
    assert found == judged | {"own": mine} and told(found) == mine
    for none in ({"reference": None}, {"reference": 0, "verifier": judged["verifier"]}):
        assert own.read_own(row | none).reference == judged
    named = [("reference", "gold"), ("choices", "")]
    by = own.read_own(row | {"reference": mine, "gold": "8"}, named).reference
    assert by == {"verifier": "math", "answer": "8"}


@pytest.mark.parametrize(
    "more",
    [
        {"solution": "of\nseveral lines"},
        {"answer": {"of": "another form"}},
        {"label": True},
        {"answer": 9, "choices": ["x", "y"]},
    ],
)
def test_a_reference_is_enough_whatever_else_cannot_be_read(more):
    row = {"question": "2 + 5?", **more}
    for none in ({}, {"reference": None}, {"reference": 7, "verifier": "math"}):
        with pytest.raises((Malformed, Unusable)):
            own.read_own(row | none)
    found = own.read_own(row | {"reference": 7})
    assert found == ("2 + 5?", {"verifier": "own", "answer": 7}, "", "")
    with pytest.raises(Unusable, match="the question is empty"):
        own.read_own({"question": " ", "reference": 7, "answer": 1})


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_a_column_of_no_tools_is_well(tools):
    row = {"question": "2 + 2?", "answer": "4", "tools": tools}
    assert own.read_own(row).reference["answer"] == "4"


def test_named_columns_take_the_place_of_the_usual_ones():
    row = {
        "prompt": "wrong",
        "answer": "5",
        "text": "2 + 2?",
        "meta": {"gold": r"It is \boxed{4}."},
        "key": 7,
    }
    columns = [("prompt", "text"), ("reference", "meta.gold"), ("id", "key")]
    draft = own.read_own(row, columns)
    assert (draft.text, draft.identity) == ("2 + 2?", "7")
    assert draft.reference == {"verifier": "math", "answer": "4"}
    tests = own.read_own(
        {"q": "Go.", "t": json.dumps(PAIRS)}, [("prompt", "q"), ("reference", "t")]
    )
    assert tests.reference["verifier"] == "code"
    whole = own.read_own(row, [("prompt", "text"), ("reference", "meta")]).reference
    assert whole == {"verifier": "own", "answer": row["meta"]}
    for column in ("gold", "meta.silver", "text.gold"):
        with pytest.raises(Malformed, match=f"column '{column}' is missing"):
            own.read_own(row, [("prompt", "text"), ("reference", column)])
