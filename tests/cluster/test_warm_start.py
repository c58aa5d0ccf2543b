"""A warm start over the processes of a Ray cluster on this machine."""

import json
import re

import numpy as np
import pytest
import small_run

from scalerl_jax import warmstart
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.process.preemption import PREEMPTED

pytest.importorskip("ray")
# Before its third step a rank is killed, and before its fourth the controller is told
# to end.
DISTURBED = """
import os, signal, sys
from scalerl_jax import warmstart

step = warmstart._step


def disturbed(made):
    if made.step == 2:
        os.kill(made.learner.places[1].pid, signal.SIGKILL)
    if made.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(made)


warmstart._step = disturbed
sys.exit(warmstart.run(sys.argv))
"""
SETTINGS = {
    **small_run.SETTINGS,
    "warmstart.epochs": 2,
    "warmstart.batch_rows": 8,
    "warmstart.learning_rate": 2e-4,  # a step that is too long makes rounding grow
    "warmstart.warmup_steps": 1,
    "checkpoint.every": 2,
    "optimizer.eps": 1e-6,  # with 1e-15 a gradient that is rounding alone counts fully
}
_LIMIT_S = 400


def finish(process):
    try:
        output, errors = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
    return process.returncode, output, errors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ml_collections
def test_two_processes_learn_what_one_does_though_they_are_killed_and_stopped(tmp_path):
    rows = tmp_path / "rows.jsonl"
    asked = [
        {"prompt": f"{n} + 7=?", "completion": f"{n}+7={n + 7}"} for n in range(20)
    ]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in asked))

    def words(directory, **mesh):
        settings = SETTINGS | {f"mesh.{name}": each for name, each in mesh.items()}
        named = [f"--config.{name}={value}" for name, value in settings.items()]
        return [f"--workdir={directory}", "--config=tiny", *named, str(rows)]

    several = tmp_path / "several"
    over = ["--ray=local", *words(several, fsdp=2, processes=2)]
    status, said, errors = finish(small_run.start("-c", DISTURBED, *over))
    assert status == PREEMPTED, errors
    assert f"scalerl warmstart --workdir={several} --ray=local" in said
    assert "warning: the learner is lost (rank " in errors  # or 0, which it leaves
    assert re.search(r"from step [02] and [02] batches that were kept", errors)
    assert small_run.checkpoints(several)[-1].name == "step_00000004"
    again = ("-m", "scalerl_jax", "warmstart", f"--workdir={several}")
    status, _, errors = finish(small_run.start(*again))
    assert status == 2 and "mesh.processes = 2 needs learner processes" in errors
    status, said, errors = finish(small_run.start(*again, "--ray=local"))
    assert status == 0 and f"wrote {several / 'model'}" in said, errors

    one = tmp_path / "one"
    assert warmstart.run(["warmstart", *words(one, fsdp=1)]) == 0
    expected, found = (small_run.rows(at) for at in (one, several))
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert found[-1]["loss"] < found[0]["loss"]
    for name in ("loss", "grad_norm", "train/tokens", "train/rows"):
        np.testing.assert_allclose(
            *([row[name] for row in each] for each in (found, expected)), rtol=1e-4
        )
    expected, found = (
        small_run.saved_arrays(small_run.checkpoints(at)[-1]) for at in (one, several)
    )
    assert expected.keys() == found.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(
            found[name], leaf, rtol=1e-3, atol=1e-6, err_msg=name
        )
    # Rows went to two ranks, each of which has one half of the state.
    roles = parse_json((several / "status.json").read_bytes())["roles"]
    assert [row["role"] for row in roles] == ["learner 0", "learner 1"]
    last = small_run.rows(several)[-1]
    assert last["learner/batch_bytes"] > 0 and last["learner/kept_bytes"] == 0
    assert last["compute/train_chip_s"] > 0
    assert not (several / "weights").exists()  # nothing was published
