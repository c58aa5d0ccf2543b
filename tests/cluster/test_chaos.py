"""The short form of `make chaos`: kills, and an audit of what they lose."""

import subprocess
import sys

import pytest
import small_run

from scalerl_jax.formats.reading import parse_json

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_killed_controller_and_replica_lose_no_prompt(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/chaos.py", "--kills=2"),
            *("--no-cut", "--no-hosts"),
            f"--workdir={tmp_path / 'run'}",
        ],
        capture_output=True,
        text=True,
        cwd=small_run.ROOT,
        timeout=1200,
    )
    log = (tmp_path / "run.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    assert "2 kills among 2 events" in done.stdout
    assert "prompts lost or doubled: none" in done.stdout
    assert parse_json((tmp_path / "run" / "chaos.json").read_bytes()) == {"wrong": []}
