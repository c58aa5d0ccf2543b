"""Folders of `examples/`: what each README promises is there, and its runs begin."""

import re
import shlex

import pytest
import small_run

FOLDERS = sorted((small_run.ROOT / "examples").glob("*/README.md"))
TRAINED = re.compile(r"^scalerl train (.+?)(?<!\\)$", re.MULTILINE | re.DOTALL)
# A step of few prompts.
SHORT = {
    "train.num_steps": 1,
    "batch.num_prompts": 4,
    "batch.group_size": 4,
    "sampler.slots": 8,  # a program for each power of two above
    "eval.num_prompts": 4,
    "eval.samples_per_prompt": 1,
    "eval.every": 1,
    "optimizer.warmup_steps": 1,
    "compile_cache": "",
}


def readme(path):
    return pytest.param(path, id=path.parent.name)


@pytest.mark.parametrize("path", list(map(readme, FOLDERS)))
def test_a_readme_has_command_time_memory_result_and_picture(path):
    text = path.read_text()
    assert re.search(r"^scalerl \w+", text, re.MULTILINE)
    for row in ("time", "memory", "result"):
        assert re.search(rf"^\| {row}[^|]* \| \S", text, re.MULTILINE), row
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert (path.parent / picture).is_file()
    listed = path.parents[1] / "README.md"
    assert f"({path.parent.name}/README.md)" in listed.read_text()


def is_short(command):
    """Whether it needs no model and no rows, and no other test makes the run."""
    other = ("smollm2", "own_data", "--workdir=runs/tools")  # test_episode_run.py
    return not any(word in command for word in other)


RUNS = [
    pytest.param(command, id=path.parent.name)
    for path in FOLDERS
    for command in TRAINED.findall(path.read_text())
    if is_short(command)
]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_run_of_an_example_makes_a_step(command, tmp_path):
    words = shlex.split(command.replace("\\\n", " "))
    words = [f"--workdir={tmp_path}" if "--workdir" in x else x for x in words]
    words += [f"--config.{name}={value}" for name, value in SHORT.items()]
    process = small_run.start("-m", "scalerl_jax.main", *words)
    _, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert [row["step"] for row in small_run.rows(tmp_path)] == [1]
    assert len(small_run.rows(tmp_path, "evals.jsonl")) == 2


def test_the_runs_are_found():
    assert len(RUNS) == 3
