"""The command that judges completions of a file, as a user runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_sandbox import sandboxed

from scalerl_jax.data.judging import main

PAGE = (Path(__file__).parents[2] / "docs/verdicts.md").read_text()


def run(capsys, tmp_path, rows, *flags):
    path = tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    status = main(["judge", str(path), *flags])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_page_shows_what_the_command_prints(tmp_path):
    rows, command, printed = (
        re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1]
        for kind in ("json", "sh", "text")
    )
    (tmp_path / "completions.jsonl").write_text(rows)
    words = command.split()
    assert words[:2] == ["scalerl", "judge"]
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax", *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


MATHS = [
    {"completion": r"<think>\boxed{7}</think>so \boxed{8}", "answer": 8},
    {"completion": r"\boxed{8}", "answer": "8"},
    "",
    {"completion": "</think>it is 8.0", "answer": ["7", "8"]},
    {"completion": r"</think>\boxed{8}", "answer": "?!"},
]


def test_verdicts_are_objects_and_the_settings_are_flags(capsys, tmp_path):
    flags = (
        "--json",
        "--answer-after=</think>",
        "--math-answer=boxed_else_last_number",
    )
    status, said, shares = run(capsys, tmp_path, MATHS, *flags, "--num-workers=2")
    assert status == 0
    unreadable = "ValueError: the reference's answer cannot be read: '?!'"
    assert [tuple(json.loads(line).values()) for line in said.splitlines()] == [
        ("rows.jsonl, line 1", "correct", ""),
        ("rows.jsonl, line 2", "no_answer", ""),
        ("rows.jsonl, line 4", "correct", ""),
        ("rows.jsonl, line 5", "verifier_error", unreadable),
    ]
    assert shares == (
        "4 rows: correct 2 (50.0%), no_answer 1 (25.0%), verifier_error 1 (25.0%)\n"
    )


@sandboxed
def test_programs_are_judged_too(capsys, tmp_path):
    block = "```python\nprint(0.1 + 0.2)\n```"
    rows = [
        {"completion": block, "tests": {"inputs": [""], "outputs": ["0.3"]}},
        {"completion": r"\boxed{8}", "answer": "8"},
    ]
    _, said, _ = run(capsys, tmp_path, rows)
    assert said.splitlines()[:2] == [
        "rows.jsonl, line 1  wrong",
        "rows.jsonl, line 2  correct",
    ]
    _, said, _ = run(capsys, tmp_path, rows, "--code-float-tolerance=1e-6")
    assert said.splitlines()[-1] == "2 rows: correct 2 (100.0%)"


GOOD = {"completion": r"\boxed{8}", "answer": "8"}


@pytest.mark.parametrize(
    "rows, flags, message",
    [
        ([GOOD, "", {"answer": "8"}], (), "line 3: field 'completion' is missing"),
        ([{"completion": 8, "answer": "8"}], (), "line 1: field 'completion' is mis"),
        ([{"completion": "8"}], (), "line 1: field 'answer' or 'tests'"),
        ([{"completion": "8", "answer": True}], (), "line 1: the answer is of type b"),
        ([{"completion": "8", "answer": " "}], (), "line 1: the answer is empty"),
        ([GOOD, "{"], (), "line 2: broken JSON"),
        ([{"completion": "8", "tests": "{"}], (), "line 1: the tests are not JSON"),
        ([{"completion": "8", "tests": {"kind": "?"}}], (), "line 1: a code prompt's"),
        ([], (), "holds no rows"),
        ([GOOD], ("--timeout-s=0",), "--timeout-s=0.0 must be above 0"),
        ([GOOD], ("--code-float-tolerance=-1",), "=-1.0 must be 0 or more"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_status_2(
    capsys, tmp_path, rows, flags, message
):
    status, said, error = run(capsys, tmp_path, rows, *flags)
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and message in error


def test_a_missing_file_is_named(capsys, tmp_path):
    assert main(["judge", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: there is no such file" in capsys.readouterr().err
