"""Rows of each data set's form, made by hand after the published ones."""

import json

import pytest

from scalerl_jax.data import own, program_tests, rows
from scalerl_jax.data.drafts import Malformed, Unusable

MBPP = {
    "task_id": 7,
    "prompt": "Write a function to find the larger square. ",
    "code": "def square(x):\n  return x * x\ndef larger(a, b):\n  return max("
    "square(a), square(b))",
    "test_imports": ["import math"],
    "test_list": ["assert larger(2, 3) == 9", "assert larger(-4, 3) == 16"],
}
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'def double(x: int) -> int:\n    """ Twice x. """\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


@pytest.mark.parametrize(
    "solution, answer",
    [
        ("48/2 = <<48/2=24>>24\n#### 72", "72"),
        ("Much.\n#### 1,234,500", "1234500"),
        ("Down to\n#### -5", "-5"),
        ("First #### 3, then\n#### 4.5", "4.5"),
    ],
)
def test_the_answer_of_gsm8k_follows_the_last_hashes(solution, answer):
    draft = rows.read_gsm8k({"question": "How many?", "answer": solution})
    assert draft.text == "How many?"
    assert draft.reference == {"verifier": "math", "answer": answer}


def test_an_answer_of_gsm8k_without_hashes_is_unusable():
    with pytest.raises(Unusable, match="no '####'"):
        rows.read_gsm8k({"question": "How many?", "answer": "72"})


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"problem": "2 + 2?", "answer": "4"}, "4"),
        ({"Problem": "2 + 2?", "Answer": 4}, "4"),
        ({"question": "2 + 2?", "answer": 4.0}, "4"),
        ({"problem": "1 / 4?", "answer": 0.25}, "0.25"),
        ({"problem": "Avogadro?", "answer": 6.02e23}, "602" + 21 * "0"),
        (
            {"problem": "?", "solution": r"$\boxed{3}$, no, $\boxed{\frac{1}{2}}$."},
            r"\frac{1}{2}",
        ),
    ],
)
def test_maths_rows_of_several_publishers(row, answer):
    assert rows.read_maths(row).reference["answer"] == answer


@pytest.mark.parametrize(
    "row, error, why",
    [
        ({"problem": "2 + 2?"}, Malformed, "'solution' or 'answer' is missing"),
        ({"answer": "4"}, Malformed, "'problem' or 'Problem' or 'question'"),
        ({"problem": 5, "answer": "4"}, Malformed, "of type int, not str"),
        ({"problem": "?", "answer": {"a": 1}}, Malformed, "answer is of type dict"),
        ({"problem": "?", "answer": True}, Malformed, "answer is of type bool"),
        ({"problem": "?", "answer": "  "}, Unusable, "answer is empty"),
        ({"problem": "?", "answer": []}, Unusable, "answer is empty"),
        ({"problem": " \n", "answer": "4"}, Unusable, "question is empty"),
        ({"problem": "?", "solution": "It is 4."}, Unusable, "no .boxed"),
    ],
)
def test_maths_rows_that_are_no_questions(row, error, why):
    with pytest.raises(error, match=why):
        rows.read_maths(row)


def test_the_data_sets_own_id_is_kept():
    row = {"problem": "?", "answer": "4", "unique_id": "test/algebra/1.json"}
    assert rows.read_maths(row).identity == "test/algebra/1.json"
    assert rows.read_maths({"problem": "?", "answer": "4", "id": 60}).identity == "60"


def test_humaneval_asks_for_the_function_and_its_tests_judge_it():
    draft = rows.read_humaneval(HUMANEVAL)
    assert HUMANEVAL["prompt"].strip() in draft.text and "```python\n" in draft.text
    tests = draft.reference["tests"]
    assert tests["entry_point"] == "double"
    solution = HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    exec(solution + tests["tests"], {})
    with pytest.raises(AssertionError):
        exec(solution.replace("2 * x", "3 * x") + tests["tests"], {})


LEETCODE = {
    "task_id": "two-sum",
    "prompt": "import random\nfrom typing import *\n\ninf = float('inf')\n",
    "entry_point": "Solution().twoSum",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
    "problem_description": "Sum two numbers of nums.",
    "starter_code": "class Solution:\n    def twoSum(self, nums: List[int]) -> int:",
}


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, ("Sum two numbers", "def twoSum(self")),
        ({"query": "Sum. Use:\nclass Solution: def twoSum"}, ("Sum. Use:",)),
        ({"starter_code": None}, ("Sum two numbers", "Define Solution().twoSum.")),
        (
            {"problem_description": None, "prompt": "Write a sum of two numbers."},
            ("Write a sum of two numbers.", "def twoSum(self"),
        ),
    ],
)
def test_a_problem_whose_prompt_is_imports_is_asked_by_its_statement(change, words):
    draft = own.read_own(LEETCODE | change)
    assert all(each in draft.text for each in words)
    assert "import random" not in draft.text and draft.identity == "two-sum"
    tests = draft.reference["tests"]
    assert tests["entry_point"] == "Solution().twoSum"
    exec(
        f"class Solution:\n  def twoSum(self, n): return 2 * n\n{tests['tests']}",
        {},
    )


def test_a_problem_without_a_statement_is_unusable():
    with pytest.raises(Unusable, match="code without the function or a statement"):
        own.read_own(LEETCODE | {"problem_description": None})
    assert own.read_own(HUMANEVAL) == rows.read_humaneval(HUMANEVAL)


def test_mbpp_shows_its_asserts_and_names_the_function_that_they_call():
    draft = rows.read_mbpp(MBPP)
    assert all(each in draft.text for each in MBPP["test_list"])
    tests = draft.reference["tests"]
    assert tests["entry_point"] == "larger"
    assert tests["setup"] == "import math"
    exec(MBPP["code"] + "\n" + tests["tests"], {})


@pytest.mark.parametrize(
    "change, why",
    [
        ({"code": "def other(x): ..."}, "call no function of the code"),
        ({"code": "print 1"}, "not Python 3"),
    ],
)
def test_mbpp_without_a_function_to_call_is_unusable(change, why):
    with pytest.raises(Unusable, match=why):
        rows.read_mbpp(MBPP | change)


def test_the_setup_of_mbpp_is_a_text_or_its_lines():
    setups = {"test_imports": "import math", "test_setup_code": ["a = 1", "b = 2"]}
    tests = rows.read_mbpp(MBPP | setups).reference["tests"]
    assert tests["setup"] == "import math\na = 1\nb = 2"
    with pytest.raises(Malformed, match="'test_imports' is neither a text nor a list"):
        rows.read_mbpp(MBPP | {"test_imports": [1]})


def test_the_splits_of_mbpp_go_by_number():
    """Section 2.1 of the paper: 10 for prompts, 500 to test, 90 to validate, 374."""
    splits = [rows.mbpp_split({"task_id": number}) for number in range(1, 975)]
    counts = {split: splits.count(split) for split in dict.fromkeys(splits)}
    assert counts == {"prompt": 10, "test": 500, "validation": 90, "train": 374}


CHECK = "def check(c):\n    assert c(1) == 1\ncheck(f)"
STDIN = {"kind": "stdin", "inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def calls(entry_point, inputs, outputs):
    return {
        "kind": "calls",
        "entry_point": entry_point,
        "inputs": inputs,
        "outputs": outputs,
    }


@pytest.mark.parametrize(
    "given, starter, expected",
    [
        pytest.param(
            {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
            "",
            STDIN,
            id="TACO, a program",
        ),
        pytest.param(
            {"inputs": [["1 2", ""], "3 4\n"], "outputs": [["3", ""], "7\n"]},
            "",
            STDIN,
            id="APPS, lists of lines",
        ),
        pytest.param(
            [
                {"input": "1 2\n", "output": "3\n", "type": "stdin_stdout"},
                {"input": "3 4\n", "output": "7\n", "type": "stdin_stdout"},
            ],
            "",
            STDIN,
            id="PrimeIntellect, a program",
        ),
        pytest.param(
            [
                {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
                {"input": "3 4\n", "output": "7\n", "testtype": "stdin"},
            ],
            "",
            STDIN,
            id="LiveCodeBench, a program",
        ),
        pytest.param(
            {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
            "",
            calls(
                "Solution().f if 'Solution' in globals() else f",
                [[1, 2], [3, 4]],
                [3, 7],
            ),
            id="TACO, a function; what it returns is wrapped",
        ),
        pytest.param(
            {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]},
            "class Solution:\n    def f(self, n):",
            calls("Solution().f", [[1], [2]], [[1], [1, 2]]),
            id="a function that returns lists",
        ),
        pytest.param(
            [
                {
                    "input": "[1, 2]\n3",
                    "output": "true",
                    "testtype": "functional",
                    "metadata": {"func_name": "f"},
                }
            ],
            "class Solution:\n    def f(self, values, n):",
            calls("Solution().f", [[[1, 2], 3]], [True]),
            id="LiveCodeBench, a function; arguments as lines of JSON",
        ),
        pytest.param(
            [
                {
                    "input": "1",
                    "output": "2",
                    "testtype": "functional",
                    "metadata": '{"func_name": "f"}',
                }
            ],
            "def f(x):",
            calls("f", [[1]], [2]),
            id="LiveCodeBench, a function named in a text of JSON",
        ),
        pytest.param(
            [{"input": [5], "output": [25], "type": "function_call", "fn_name": "f"}],
            "def f(x):",
            calls("f", [[5]], [25]),
            id="PrimeIntellect, a function",
        ),
        pytest.param(
            {"functional": CHECK},
            "",
            {
                "kind": "asserts",
                "tests": "def check(c):\n    assert c(1) == 1\ncheck(f)",
            },
            id="LeetCode, asserts",
        ),
        pytest.param(STDIN, "", STDIN, id="the project's own"),
    ],
)
def test_tests_of_published_forms(given, starter, expected):
    assert program_tests.read_tests(given, starter=starter) == expected
    assert program_tests.read_tests(json.dumps(given), starter=starter) == expected


@pytest.mark.parametrize(
    "given, why",
    [
        ("[1, ", "not JSON"),
        ([], "unknown form"),
        ({"inputs": [], "outputs": []}, "no inputs"),
        ({"inputs": ["1"], "outputs": []}, "no inputs"),
        ({"inputs": [1], "outputs": ["1"]}, "is no text"),
        ([{"input": "1", "output": "1", "type": "image"}], "unknown type"),
        (
            [
                {"input": "1", "output": "1", "type": "stdin"},
                {"input": "1", "output": "1", "type": "function_call", "fn_name": "f"},
            ],
            "or of several",
        ),
        ([{"input": "1", "output": "1", "type": ["stdin"]}], "unknown type"),
        ([{"input": [1], "output": 1, "type": "function_call"}], "do not name"),
        ({"fn_name": ["f"], "inputs": [[1]], "outputs": [1]}, "by no text"),
        ({"fn_name": "f", "inputs": ["one"], "outputs": ["1"]}, "not JSON"),
    ],
)
def test_tests_of_no_known_form_are_unusable(given, why):
    with pytest.raises(Unusable, match=why):
        program_tests.read_tests(given)


def test_deepcoder_s_metadata_are_an_object():
    row = {"problem": "Add.", "tests": STDIN, "metadata": "[1]"}
    with pytest.raises(Malformed, match="'metadata' is no object"):
        rows.read_deepcoder(row)


def test_deepcoder_says_what_form_of_answer_it_wants():
    program = rows.read_deepcoder(
        {"problem": "Add two numbers.", "tests": json.dumps(STDIN)}
    )
    assert program.text.startswith("Add two numbers.") and "stdin" in program.text
    starter = "class Solution:\n    def f(self, values, n):\n        "
    function = rows.read_deepcoder(
        {
            "problem": "Find n.",
            "tests": '[{"input": "[1]\\n1", "output": "0", "testtype": "functional"}]',
            "starter_code": starter,
            "metadata": '{"func_name": "f"}',
        }
    )
    assert starter.rstrip() in function.text and "stdin" not in function.text
    assert function.reference["tests"]["entry_point"] == "Solution().f"


def test_the_projects_own_form():
    plain = own.read_own({"id": 3, "question": "2 + 2?", "answer": 4})
    assert plain.identity == "3"
    assert plain.reference == {"verifier": "math", "answer": "4"}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
    ]
    code = own.read_own({"messages": turns, "tests": STDIN})
    assert (code.text, code.system) == ("Add.", "Be brief.")
    assert code.reference == {"verifier": "code", "tests": STDIN}


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"answer": "4"}, "4"),
        ({"ground_truth": 4}, "4"),
        ({"answer": None, "ground_truth": ["4", "four"]}, ["4", "four"]),
        ({"answer": "Two and two.\n#### 4,000"}, "4000"),
        ({"completion": " 4 "}, "4"),
        ({"completion": r"So it is $\boxed{\frac{8}{2}}$."}, r"\frac{8}{2}"),
        ({"completion": "Two and two\n#### 4"}, "4"),
        ({"completion": [{"role": "assistant", "content": "4"}]}, "4"),
        ({"completion": "wrong", "answer": "4"}, "4"),
        ({"solution": r"\boxed{4}"}, "4"),
    ],
)
@pytest.mark.parametrize("prompt", ["2 + 2?", [{"role": "user", "content": "2 + 2?"}]])
def test_rows_with_a_prompt_and_the_usual_names_of_an_answer(prompt, row, answer):
    draft = own.read_own({"prompt": prompt, **row})
    assert draft.text == "2 + 2?"
    assert draft.reference == {"verifier": "math", "answer": answer}


@pytest.mark.parametrize("answer", [float("inf"), [1, float("-inf")]])
def test_an_answer_that_is_no_finite_number_is_malformed(answer):
    with pytest.raises(Malformed, match="no finite number"):
        own.read_own({"question": "?", "answer": answer})


@pytest.mark.parametrize(
    "row, error, why",
    [
        ({"question": "?"}, Malformed, "'answer' or 'tests' is .* 'reference'"),
        ({"question": "?", "answer": "1", "verifier": "essay"}, Malformed, "neither"),
        ({"messages": [{"role": "user"}], "answer": "1"}, Malformed, "no text"),
        (
            {
                "messages": [
                    {"role": role, "content": "hm"}
                    for role in ("user", "assistant", "user")
                ],
                "answer": "1",
            },
            Unusable,
            "not one turn",
        ),
    ],
)
def test_rows_of_the_own_form_that_are_no_questions(row, error, why):
    with pytest.raises(error, match=why):
        own.read_own(row)


def test_verls_form_is_told_by_its_reward_model():
    row = {
        "data_source": "math__deepscaler",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"index": 5},
    }
    draft = own.read_own(row)
    assert draft.text == "2 + 2?"
    assert draft.reference == {"verifier": "math", "answer": "4"}
    row |= {"ability": "code", "reward_model": {"ground_truth": json.dumps(STDIN)}}
    assert own.read_own(row).reference == {"verifier": "code", "tests": STDIN}


@pytest.mark.parametrize(
    "truth, answer",
    [
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        (r"5.88\\%", r"5.88\%"),
        (r"\begin{matrix} 1 \\ 2 \end{matrix}", r"\begin{matrix} 1 \\ 2 \end{matrix}"),
        ("7", "7"),
    ],
)
def test_answers_whose_backslashes_were_all_doubled_are_mended(truth, answer):
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": truth},
    }
    assert own.read_own(row).reference["answer"] == answer
