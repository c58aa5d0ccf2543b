"""The short form of `make chaos`: kills, and what they lose; and `make fleet`."""

import subprocess
import sys

import pytest
import small_run

from scalerl_jax.formats.reading import parse_json

pytest.importorskip("ray")
# It speaks before the policy, asks for two turns, and ends its process now and then.
TALK = """
import os
from scalerl_jax.environments.verdict import Done, More

STEPS = 0

class Talk:
    def begin(self, prompt, reference):
        self.heard = 0
        return "short, please"

    def step(self, completion):
        global STEPS
        STEPS += 1
        if STEPS == 40:
            os._exit(11)
        self.heard += 1
        return More("and?") if self.heard == 1 else self.cut(completion)

    def cut(self, completion=""):
        return Done(len(completion) % 7 / 6)
"""


def run_benchmark(name, *flags, timeout):
    return subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *flags],
        capture_output=True,
        text=True,
        cwd=small_run.ROOT,
        timeout=timeout,
    )


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_killed_controller_and_replica_lose_no_prompt(tmp_path):
    """In episodes that an environment opens, and that it ends with its process."""
    (tmp_path / "talk.py").write_text(TALK)
    settings = {
        "environment": tmp_path / "talk.py:Talk",
        "episode.between": " {observation}<think>",
        "reward.max_unjudged_share": 1.0,
        "data.train_prompts": 512,
    }
    done = run_benchmark(
        *("chaos", "--kills=2", "--no-cut", "--no-hosts"),
        f"--workdir={tmp_path / 'run'}",
        *(f"--set={name}={value}" for name, value in settings.items()),
        timeout=1200,
    )
    log = (tmp_path / "run.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    assert "2 kills among 2 events" in done.stdout
    assert "prompts lost or doubled: none" in done.stdout
    assert parse_json((tmp_path / "run" / "chaos.json").read_bytes()) == {"wrong": []}
    rows = small_run.rows(tmp_path / "run")
    assert all(row["episode/mean_turns"] >= 1.0 for row in rows)
    assert any(row["episode/mean_turns"] > 1.0 for row in rows)
    shares = [row["verifier/error_share"] for row in rows]
    assert max(shares) > 0.0 and sorted(shares)[len(shares) // 2] < 0.2
    for row in small_run.rows(tmp_path / "run", "rollouts.jsonl"):
        first, second, *_ = row["turns"]
        assert (first["sampled"], second["sampled"]) == (False, True)
        assert row["completion"][: first["end"]] == " short, please<think>"


def test_a_fleet_that_makes_no_step_is_told(tmp_path):
    """Its run refuses the number of steps."""
    done = run_benchmark(
        "fleet", "--steps=-3", f"--workdir={tmp_path / 'run'}", timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "the run ended with status 2 before its first step" in done.stdout
    assert "train.num_steps = -3" in done.stderr
    assert "Traceback" not in done.stderr
