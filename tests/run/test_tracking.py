"""W&B and the profiler's trace."""

import sys
import time
import types
from unittest import mock

import jax.numpy as jnp
import pytest

from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.tracking import StepProfile, Wandb


def traces(directory):
    return len(list(directory.glob("plugins/profile/*/*.xplane.pb")))


@pytest.mark.parametrize("last", [3, 9])
def test_a_trace_ends_with_its_last_step_or_with_the_run(tmp_path, last):
    profile = StepProfile((2, last), tmp_path)
    for version in range(4):
        profile.reached(version)
        jnp.square(3.0).block_until_ready()
        assert traces(tmp_path) == (version == last)
    profile.close()
    profile.close()
    assert traces(tmp_path) == 1


def test_runs_of_a_study_that_begin_together_are_apart_at_wandb(tmp_path, monkeypatch):
    begun = []
    fake = types.SimpleNamespace(
        init=lambda **given: begun.append(given) or mock.MagicMock(), Settings=dict
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for arm in ("one/ab/seed0", "one/b/seed0", "two/b/seed0", "one/b/seed0"):
        (tmp_path / arm).mkdir(parents=True, exist_ok=True)
        (tmp_path / arm / "config.json").write_text('{"started": "2026-01-02T03:04"}')
        Wandb("tests", tmp_path / arm, {})
    assert [each["name"] for each in begun] == ["ab/seed0", *3 * ["b/seed0"]]
    ids = [each["id"] for each in begun]
    assert len(set(ids)) == 3 and ids[1] == ids[3] and "".join(ids).isalnum()


@pytest.mark.slow
def test_numbers_and_settings_go_to_wandb(tmp_path, monkeypatch):
    """Offline, W&B keeps what it would send in a file of its own."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.json").write_text('{"started": "2026-01-02T03:04"}')
    options = {"settings": {"data.order": "sorted"}, "wandb_project": "tests"}
    with MetricsWriter(tmp_path, after=-1, **options) as writer:
        writer.write_step(7, {"loss": 0.515625})
        writer.write_eval({"step": 7, "pass_rate": 0.265625, "rates": [0, 1]})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while b"data.order" not in (kept := file.read_bytes()):  # a process of W&B's writes
        assert time.monotonic() < deadline, kept
        time.sleep(0.1)
    for words in ("data.order", "sorted", "loss", "0.515625", "eval/pass_rate"):
        assert words.encode() in kept
    assert b"0.265625" in kept and b"rates" not in kept
