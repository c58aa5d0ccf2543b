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


def test_the_page_shows_what_an_environment_says_to_written_turns(
    tmp_path, monkeypatch, capsys
):
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    _, _, shown = page.partition("makes one. `guess.py`:")
    blocks = [each.split("\n", 1)[1] for each in shown.split("```")[1:8:2]]
    (tmp_path / "guess.py").write_text(blocks[0])
    (tmp_path / "turns.jsonl").write_text(blocks[1])
    monkeypatch.chdir(tmp_path)
    program, *words = blocks[2].split()
    assert program == "scalerl" and main(words) == 0
    assert capsys.readouterr().out.startswith(blocks[3])


OPENED = """
from scalerl_jax.environments.verdict import Done, More


class Opened:
    def begin(self, prompt, reference):
        if reference == "broken":
            raise KeyError("no level")
        self.wanted = reference
        return [More("a door\\nand a key"), More("look", role="tool")]

    def step(self, completion):
        if completion == "ids":
            return More(tokens=[7, 8])
        if completion == self.wanted:
            return Done(2.0, {"keys": 1})
        return More("no", reward=0.25)
"""


def played(capsys, tmp_path, rows, *flags):
    (tmp_path / "opened.py").write_text(OPENED)
    named = f"--environment={tmp_path / 'opened.py'}:Opened"
    return run(capsys, tmp_path, rows, named, *flags)


def test_every_message_of_an_environment_is_shown_and_every_turn_accounted_for(
    capsys, tmp_path
):
    rows = [
        {"reference": "use", "turns": ["go", "ids", "use", "use"]},
        {"reference": "use", "turns": ["go"]},  # no cut(): nobody says its worth
        {"reference": "broken", "turns": ["go", "use"]},
        {"reference": "use", "completion": "use"},
    ]
    status, said, shares = played(capsys, tmp_path, rows, "--json")
    first, unended, broken, last = map(json.loads, said.splitlines())
    at_first = [
        {"text": "a door\nand a key", "role": "user", "reward": None, "tokens": None},
        {"text": "look", "role": "tool", "reward": None, "tokens": None},
    ]
    assert status == 0
    assert [each["after_turn"] for each in first["said"]] == [0, 0, 1, 2]
    heard = [{**each, "after_turn": 0} for each in first["said"]]
    assert heard[:2] == [{**each, "after_turn": 0} for each in at_first]
    assert (heard[2]["text"], heard[2]["reward"]) == ("no", 0.25)
    assert heard[3]["tokens"] == [7, 8]
    assert (first["reward"], first["parts"]) == (2.0, {"keys": 1.0})
    assert (first["unread_turns"], broken["unread_turns"]) == (1, 2)
    assert unended["status"] == "no_end" and "no cut()" in unended["detail"]
    assert broken["status"] == "verifier_error" and "no level" in broken["detail"]
    assert last["reward"] == 2.0 and last["unread_turns"] == 0
    assert "4 rows: correct 2 (50.0%)" in shares
    _, said, _ = played(capsys, tmp_path, rows[:1])
    place = f"{tmp_path / 'rows.jsonl'}, line 1".replace(f"{tmp_path}/", "")
    assert said.splitlines()[:5] == [
        f'{place}, at first, user: "a door\\nand a key"',
        f'{place}, at first, tool: "look"',
        f'{place}, after turn 1, user: "no"  reward 0.25',
        f"{place}, after turn 2, tokens [7, 8]",
        f"{place}  correct  reward 2  keys 1  1 of 4 turns not read",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"turns": []},
        {"turns": "go"},
        {"turns": ["go", 7]},
        {"turns": ["go"], "completion": "use"},
        {"prompt": "a"},
    ],
)
def test_what_is_no_list_of_turns_is_told(capsys, tmp_path, row):
    status, said, error = played(capsys, tmp_path, [row])
    assert (status, said) == (2, "")
    assert "line 1: an environment of several turns needs the field 'turns'" in error


def test_tools_are_called_as_a_row_calls_them(capsys, tmp_path):
    call = {"name": "calculator", "arguments": {"expression": "3*4"}}
    turns = [f"<tool_call>{json.dumps(call)}</tool_call>", r"so \boxed{12}"]
    rows = [{"answer": "12", "turns": turns}]
    tools = ("--environment=tools", "--tools=calculator")
    status, said, _ = run(capsys, tmp_path, rows, *tools)
    assert (status, said.splitlines()[:2]) == (
        0,
        ['rows.jsonl, line 1, after turn 1, tool: "12"', "rows.jsonl, line 1  correct"],
    )
    status, _, error = played(capsys, tmp_path, rows, "--tools=calculator")
    assert status == 2 and "they are of --environment=tools" in error
