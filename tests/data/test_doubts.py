"""What is said of questions whose verdicts are to be doubted."""

import json

import pytest
from small_sandbox import sandboxed

from scalerl_jax.data import screening
from scalerl_jax.data.__main__ import main
from scalerl_jax.data.drafts import Draft
from scalerl_jax.data.preparing import prepared_path
from scalerl_jax.data.records import read_report

TWO = {"kind": "stdin", "inputs": ["1 2\n", "4 4"], "outputs": ["3\n", "8"]}
CALLS = {
    "kind": "calls",
    "entry_point": "add",
    "inputs": [[[1, 2], "ab"], [[3], "c"]],
    "outputs": [3, 3],
}


def asserts(text):
    return {"kind": "asserts", "tests": text, "entry_point": "add"}


@pytest.mark.parametrize(
    "text, tests, expected",
    [
        ("Add two numbers.", TWO, []),
        ("Add.\nInput:\n 1 2\n\nOutput:\n3\n", TWO, [screening.SHOWN]),
        ("Add 1 2 and print 3.", TWO, []),  # no lines of their own
        ("3\n1 2", TWO, []),  # the output stands before
        ("Add.", TWO | {"inputs": ["1"], "outputs": ["2"]}, [screening.ONE_TEST]),
        ("Add, as nums = [1, 2], s = 'ab' gives 3", CALLS, [screening.SHOWN]),
        ("Add, as nums = [1, 3], s = 'ab'", CALLS, []),
        ("add(1, 2) is 3", asserts("assert add(1, 2) == 3"), None),
        ("Add: 1, 2", asserts("assert add(1, 2) == 3\nassert add(1, 1) == 2"), []),
        (
            "As [1, 2, 3]",
            asserts(
                "def check(f):\n  assert f(x=[1,2,3]) == 6\n  assert f([]) == 0\n"
                "check(add)"
            ),
            [screening.SHOWN],
        ),
        ("If there are multiple answers, print any.", TWO, [screening.SEVERAL]),
        ("You may return the pairs in any order.", TWO, [screening.SEVERAL]),
        ("This is an interactive problem.", TWO, [screening.INTERACTIVE]),
        ("Remember to flush the output.", TWO, [screening.INTERACTIVE]),
        ("Sort the words in order; there are multiple words.", TWO, []),
    ],
)
def test_what_is_doubted(text, tests, expected):
    found = screening.doubts(Draft(text, {"verifier": "code", "tests": tests}))
    if expected is None:
        expected = [screening.ONE_TEST, screening.SHOWN]
    assert found == expected


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("7", []),
        (["the left one", "left", "it is the one on the left side"], []),
        (r"\frac{\sin \alpha + \cos \beta}{\sqrt{2} \tan \gamma \cdot \pi \log x}", []),
        ("It is blue, since air scatters short wavelengths more than long ones.", None),
    ],
)
def test_answers_of_many_words_are_doubted(answer, expected):
    reference = {"verifier": "math", "answer": answer}
    expected = [screening.PROSE] if expected is None else expected
    assert screening.doubts(Draft("Print any.", reference)) == expected


@sandboxed
def test_prepare_counts_them_and_says_so(capsys, tmp_path):
    rows = [
        {"question": "If there are several solutions, print any.", "tests": TWO},
        {"question": "Print any.", "tests": asserts("assert add(1, 2) == 3")},
        {"question": "What is 3 + 4?", "answer": "7"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = tmp_path / "prepared"
    status = main(["prepare", f"--dataset=jsonl:{path}", f"--directory={where}"])
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert status == 0
    wording = (
        "kept, doubtful: code with several right outputs, by its wording 2".split()
    )
    assert [*wording, *"first: rows.jsonl, line 1".split()] in said
    report = read_report(prepared_path(f"jsonl:{path}", "train", where))
    assert report.kept == 3
    assert report.doubtful == {
        screening.SEVERAL: {"count": 2, "first": "rows.jsonl, line 1"},
        screening.ONE_TEST: {"count": 1, "first": "rows.jsonl, line 2"},
    }
