"""`scalerl study` with real runs, killed once on the way."""

import os
import signal
import subprocess
import sys
import time

import pytest

STUDY = """
from scalerl_jax.study.design import Study

def get_study():
    return Study(
        base="configs/tiny.py",
        common={
            "batch.num_prompts": 4,
            "optimizer.warmup_steps": 1,
            "eval.every": 1,
            "eval.num_prompts": 20,
            "eval.samples_per_prompt": 1,
            "checkpoint.every": 2,
            "queue.max_staleness": 0,
        },
        arms={"prompt": {}, "token": {"objective.aggregation": "token"}},
        seeds=(3,),
        steps=5,
    )
"""


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_and_is_reported(tmp_path):
    file, root = tmp_path / "short.py", tmp_path / "runs"
    file.write_text(STUDY)
    command = [sys.executable, "-m", "scalerl_jax", "study"]
    flags = [str(file), f"--root={root}"]
    begun = subprocess.Popen([*command, "run", *flags])
    evals = root / "prompt" / "seed3" / "evals.jsonl"
    while not evals.exists():
        assert begun.poll() is None, "it ended before its first evaluation"
        time.sleep(0.2)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    for _ in range(2):  # goes on with what was cut; then there is nothing to do
        done = subprocess.run([*command, "run", *flags], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "2 of 2 runs finished" in done.stdout
    done = subprocess.run([*command, "report", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "prompt against token:" in done.stdout
    assert (root / "report" / "report.html").stat().st_size > 100_000
