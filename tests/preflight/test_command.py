"""Mistakes on the command line: one line, and exit status 2."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl_jax.preflight.command import run

# ml_collections loads a config file in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'configs' / '8b.py'}"
TOPOLOGY = "--topology=v5p:4x4x4"


@pytest.mark.parametrize(
    "flags, said",
    [
        pytest.param([TOPOLOGY], "--config is missing", id="no config"),
        pytest.param([CONFIG], "--topology is missing", id="no topology"),
        pytest.param([CONFIG, "--topology=v9:2x2"], "choose from v4:", id="topology"),
        pytest.param(
            ["--config=nowhere.py", TOPOLOGY], "nowhere.py", id="no such file"
        ),
        pytest.param(
            [CONFIG, TOPOLOGY, "--config.batch.rows=1"],
            "no such setting",
            id="no such setting",
        ),
        pytest.param(
            [CONFIG, TOPOLOGY, "--config.batch.row_tokens=4096"],
            "batch.row_tokens = 4096 cannot hold",
            id="a setting that cannot be",
        ),
        pytest.param([CONFIG, TOPOLOGY, "--jsn"], "jsn", id="no such flag"),
        pytest.param([CONFIG, TOPOLOGY, "more"], "unknown arguments", id="a word"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(flags, said, capsys):
    assert run(["preflight", *flags]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert said in error
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="the compiler is installed"
)
def test_without_the_compiler_it_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax.preflight", CONFIG, TOPOLOGY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert 'pip install -e ".[tpu]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_to_import_it_changes_no_environment_and_starts_no_jax():
    """On a TPU VM the compiler's variables would hide the machine."""
    code = (
        "import os, sys; before = dict(os.environ); "
        "import scalerl_jax.preflight.__main__; "
        "assert dict(os.environ) == before and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=True)
