"""The whole command on one small topology: what it says, and how it ends."""

import json
import os
import subprocess
import sys

import pytest
from tpu_compiler import NEEDS_COMPILER, ROOT, compile_for_tpu

pytestmark = NEEDS_COMPILER
# tiny.py's model: 2 kv heads of 32, 128 hidden units.  A sampler of 2 devices, hence a
# learner of 4 of v5e's 8.
FLAGS = (
    f"--config={ROOT / 'configs' / 'tiny.py'}",
    "--topology=v5e:2x4",
    "--config.mesh.fsdp=0",
    "--config.generators.devices=2",
    "--config.batch.rows_per_microbatch=0",
)


def preflight(*flags):
    """Exit status, stdout and stderr of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax.preflight", *FLAGS, *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_config_that_fits():
    status, out, error = preflight(
        "--json", "--config.batch.row_tokens=512", "--config.batch.short_rows=True"
    )
    assert status == 0, error
    answer = json.loads(out)
    assert answer["fits"]
    learning = answer["programs"]["train_step"]["programs"]
    assert [*learning] == [
        *("start", "accumulate"),
        *(f"accumulate_{tokens}" for tokens in (128, 256, 384)),
        "update",
    ]
    saved = [learning[name]["memory"]["saved activations"] for name in [*learning][1:5]]
    assert [4 * each for each in saved] == [saved[0] * part for part in (4, 1, 2, 3)]
    assert answer["devices"] == {
        "all": 8,
        "learner": 4,
        "sampler": 2,
        "shared": False,
        "unused": 2,
        "learner_topology": "v5e:2x2",
        "sampler_topology": "v5e:1x2",
    }
    # 16 GiB, of which the compiler keeps a quarter of one.
    assert answer["hbm_limit_bytes"] == int(15.75 * 2**30)
    programs = answer["programs"]
    assert {"train_step", "prefill", "decode"} <= set(programs)
    for name in ("train_step", "prefill", "decode"):
        found = programs[name]
        assert found["float32_head"]
        assert found["flops"] > 0 and found["roofline_seconds"] > 0
        assert found["peak_bytes"] == sum(found["memory"].values())
    assert programs["train_step"]["collectives"]["all-gather"]["count"] > 0
    # The kernels take neither heads of 32, and it says so.
    for side in ("learner", "sampler"):
        assert "head_dim = 32" in answer["attention"][side]


def test_a_cache_that_does_not_fit_is_named_and_ends_with_status_1():
    status, out, _ = preflight("--config.sampler.cache_tokens=100_000_000")
    assert status == 1
    assert "DOES NOT FIT" in out
    assert "sampler.cache_tokens" in out.split("what to change")[1].splitlines()[1]


def test_a_head_below_float32_is_noticed():
    status, out, error = preflight("--json", "--config.model.float32_head=False")
    assert status == 0, error
    programs = json.loads(out)["programs"]
    assert not programs["train_step"]["float32_head"]
    assert not programs["decode"]["float32_head"]


@pytest.mark.parametrize(
    "flag, said",
    [
        pytest.param("--topology=v5p:3x5x7", "compiler refuses it", id="no such slice"),
        pytest.param(
            "--config.generators.devices=99", "generators.devices", id="too many"
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(flag, said):
    status, out, error = preflight(flag)
    assert (status, out) == (2, "")
    assert said in error and "Traceback" not in error


def test_the_8b_config_gets_the_kernels_and_its_parts_add_up():
    answer = compile_for_tpu("preflight", "v5e:2x4", 2)
    assert answer["attention"] == {"learner": "splash", "sampler": "pallas"}
    programs = answer["programs"]
    names = ("train_step", "prefill", "decode")
    assert all(programs[name]["float32_head"] for name in names)
    memory = programs["train_step"]["programs"]["accumulate"]["memory"]
    # 2 layers of 218 million params, embedding and head: float32, over 4 shards.
    params = (2 * 218_112_000 + 2 * 128_256 * 4096) * 4 / 4
    assert memory["params"] == pytest.approx(params, rel=1e-4)
    assert memory["optimizer"] == pytest.approx(2 * params, rel=1e-4)
    assert memory["saved activations"] == 2 * 16_384 * 4096 * 2
    kinds = programs["train_step"]["collectives"]
    assert {"all-gather", "all-to-all"} <= set(kinds)
