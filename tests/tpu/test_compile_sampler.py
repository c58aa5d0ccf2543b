"""The 8B sampler's programs, compiled for TPUs by a host that has none."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed: pip install -e '.[tpu]'",
    ),
]
SCRIPT = pathlib.Path(__file__).with_name("compile_for_tpu.py")
ROOT = SCRIPT.parents[2]
# The compiler is asked for a machine by name, and must not look for its own.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "PYTHONPATH": str(ROOT),
}


def compile_for_tpu(*arguments):
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "chip, tensor, layers",
    [
        pytest.param("v5e", 8, 2, id="v5e: a kv head on each device"),
        pytest.param("v5e", 1, 2, id="v5e: one device"),
        pytest.param("v5p", 4, 2, id="v5p"),
        pytest.param("v6e", 8, 2, id="v6e"),
        pytest.param("v5e", 8, 32, id="v5e: every layer"),
    ],
)
def test_the_samplers_programs_compile(chip, tensor, layers):
    report = compile_for_tpu("engine", chip, tensor, layers)
    generate, prefill = report["generate"], report["prefill"]
    assert generate["kernels"] == layers
    assert prefill["kernels"] == layers - 1  # the last layer's result is not used
    assert generate["float32_heads"] >= 1
    for program in (generate, prefill):
        # No layer's pages are copied.
        assert program["in_place_bytes"] >= report["pages_bytes"]
        assert program["temporary_bytes"] < report["pages_bytes"] / layers
        assert program["argument_bytes"] > report["pages_bytes"]


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_the_kernel_compiles_at_its_limits(chip):
    assert compile_for_tpu("kernel", chip)["compiled"] == 10
