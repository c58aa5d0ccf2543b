"""`scalerl study` with real runs, killed once on the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_run

ROOT = Path(__file__).parents[2]
STUDY = f"""
from scalerl_jax.study.design import Study


def get_study():
    common = {small_run.SETTINGS | {"eval.every": 1, "eval.num_prompts": 60}}
    del common["train.num_steps"]
    return Study(
        base="configs/tiny.py",
        common=common,
        arms={{"prompt": {{}}, "token": {{"objective.aggregation": "token"}}}},
        seeds=(0,),
        steps=8,
    )
"""


def finish(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_that_is_killed_goes_on_and_is_reported(tmp_path):
    file = tmp_path / "short.py"
    file.write_text(STUDY)
    command = [sys.executable, "-m", "scalerl_jax", "study"]
    flags = [str(file), f"--root={tmp_path}"]
    begun = subprocess.Popen([*command, "run", *flags], cwd=ROOT)
    evals = tmp_path / "prompt" / "seed0" / "evals.jsonl"
    while not evals.exists():
        assert begun.poll() is None, "it ended before its first evaluation"
        time.sleep(0.2)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    for _ in range(2):  # goes on with what was cut; then there is nothing to do
        done = finish([*command, "run", *flags])
        assert done.returncode == 0, done.stderr
        assert "2 of 2 runs finished" in done.stdout
    done = finish([*command, "report", *flags])
    assert done.returncode == 0, done.stderr
    assert "prompt against token:" in done.stdout
    assert (tmp_path / "report" / "report.html").stat().st_size > 100_000
