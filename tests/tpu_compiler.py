"""How tests reach the TPU compiler: a process of its own, with its own environment."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from scalerl_jax.preflight.__main__ import ENVIRONMENT

NEEDS_COMPILER = [
    pytest.mark.slow,
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed: pip install -e '.[tpu]'",
    ),
]
ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "tpu" / "compile_for_tpu.py"


def compile_for_tpu(*arguments):
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
