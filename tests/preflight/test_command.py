"""Mistakes on the command line: one line, and exit status 2."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.preflight import check, command
from scalerl_jax.preflight.command import run
from scalerl_jax.preflight.fitting import fit_topology
from scalerl_jax.preflight.topologies import parse_topology
from scalerl_jax.wiring.learning import make_architecture

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


@pytest.mark.slow
def test_a_search_keeps_the_split_that_it_began_with(monkeypatch, capsys):
    """What is chosen for more rows may be another split, or none: 12 x 32 fit here."""
    topology = parse_topology("v5p:4x4x4")
    open_ = config_lib.resolve(config_lib.named("8b"))
    arch = make_architecture(open_)
    fitted = fit_topology(open_, arch, topology).config
    tried = []

    def make_parts(config, topology):
        tried.append(fit_topology(config, arch, topology).config)
        if config.batch.rows_per_microbatch > 12 * fitted.mesh.num_devices:
            raise ValueError("no rows are left")
        return None, SimpleNamespace(lower_accumulate=lambda: None)

    monkeypatch.setattr(command, "make_parts", make_parts)
    monkeypatch.setattr(command, "program_memory", lambda *_: {})
    monkeypatch.setattr(
        command, "compile_program", lambda *_: SimpleNamespace(too_large="")
    )
    known = check.Checked(parts={"saved activations": 1})
    result: Any = SimpleNamespace(
        parts=SimpleNamespace(config=fitted), limit=10, programs={"accumulate": known}
    )
    assert command.search_rows(topology, result) == 12 * 32
    assert "= 416: does not fit: no rows are left" in capsys.readouterr().err
    assert len(tried) > 2
    for each in tried:
        assert dataclasses.replace(each, batch=fitted.batch) == fitted


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
