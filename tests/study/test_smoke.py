"""`scalerl study` with real runs, killed once on the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def finish(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_study_that_is_killed_goes_on_and_is_reported(tmp_path):
    command = [sys.executable, "-m", "scalerl_jax", "study"]
    flags = ["smoke", f"--root={tmp_path}"]
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
        assert "6 of 6 runs finished" in done.stdout
    done = finish([*command, "report", *flags])
    assert done.returncode == 0, done.stderr
    assert "prompt against token:" in done.stdout
    assert (tmp_path / "report" / "report.html").stat().st_size > 100_000
