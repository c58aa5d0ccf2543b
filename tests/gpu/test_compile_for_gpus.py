"""The preflight for GPUs, with XLA's compiler for them and without a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from scalerl_jax.preflight import gpus

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not gpus.is_installed(),
        reason="the GPU compiler is not installed: pip install -e '.[cuda]'",
    ),
]


def preflight(*flags):
    """The answer of the command for tiny.py's model in bfloat16."""
    config = ROOT / "configs" / "tiny.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scalerl_jax.preflight", "--json"),
            *(f"--config={config}", "--config.model.compute_dtype=bfloat16", *flags),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_a_run_on_one_gpu_is_compiled(name):
    found = preflight(f"--topology={name}:1", "--config.batch.row_segments=8")
    assert found["fits"] and found["can_start"]
    step = found["programs"]["train_step"]["programs"]
    assert step["accumulate"]["float32_head"]
    assert found["programs"]["decode"]["float32_head"]
    packed = name != "a100"  # cuDNN takes packed rows from Hopper on
    assert found["attention"]["learner"].startswith("cudnn" if packed else "blockwise")
    # 8 bytes x 8 rows of 128 tokens x 8 segments x 4 heads of 32
    reserved = step["accumulate"]["memory"].get("cuDNN's workspace", 0)
    assert reserved == packed * 8 * 8 * 128 * 8 * 4 * 32


def test_learner_and_replicas_can_be_on_gpus_of_their_own():
    found = preflight(
        "--topology=h100:4",
        "--config.generators.devices=1",
        "--config.generators.count=3",
    )
    devices = found["devices"]
    assert (devices["learner"], devices["generators"], devices["sampler"]) == (1, 3, 1)
    assert found["fits"] and not devices["shared"]
