"""Shell, read by shellcheck: the scripts, and what hosts are told by ssh."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_run

from scalerl_jax.launch import hosts
from scalerl_jax.launch.job import make_job

SCRIPTS = sorted((small_run.ROOT / "launch").glob("*.sh"))
SHELLCHECK = shutil.which("shellcheck", path=Path(sys.executable).parent) or (
    shutil.which("shellcheck")
)
checked = pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
JOB = make_job(
    {
        "place": "queued_resource",
        "name": "run-1",
        "bucket": "gs://bucket/path/runs",
        "project": "p",
        "zone": "us-east5-b",
        "topology": "v6e:4x4",
        "config": "configs/8b.py",
    }
)
TOLD = {
    "start": hosts.start_script(
        JOB, "0" * 64, JOB.command(["--config.data.tasks=('a',)"]), extras="tpu"
    ),
    "end": hosts.end_script(JOB, grace_s=60),
    "logs": hosts.log_script(JOB, 50),
    "python": hosts.python_script(JOB, "print('1')"),
}


def shellcheck(text):
    # A tilde in quotes and cd that may fail are what -e is for.
    command = [SHELLCHECK, "--shell=bash", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_number_of_a_supervisor_that_ended_is_no_supervisor(tmp_path):
    """After a restart of the host another program may have it."""
    host, programs = tmp_path / "scalerl_jax" / "run-1", tmp_path / "bin"
    host.mkdir(parents=True)
    programs.mkdir()
    for name in ("cat", "grep", "mkdir", "hostname", "seq", "sleep"):
        (programs / name).symlink_to(shutil.which(name))

    def told(name):
        return subprocess.run(
            [shutil.which("bash"), "-c", TOLD[name]],
            env={"HOME": str(tmp_path), "PATH": str(programs)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    with subprocess.Popen(["sleep", "600"]) as other:
        (host / "run.pid").write_text(f"{other.pid}\n")
        assert told("end").returncode == 0
        assert other.poll() is None
        started = told("start")  # which finds no program to mount the bucket
        assert started.returncode and "runs already" not in started.stdout
        other.kill()


@checked
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(path):
    shellcheck(path.read_text())


@checked
@pytest.mark.parametrize("name", TOLD)
def test_so_is_what_hosts_are_told(name):
    shellcheck(TOLD[name])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_what_it_makes_what_it_costs_and_how_it_is_stopped(path):
    text = path.read_text()
    head = text[: text.index("set -euo pipefail")]
    assert all(f"# {word}:" in head for word in ("Makes", "Costs", "Stopped"))
    assert "-m scalerl_jax.launch stop" in head
    assert path.stat().st_mode & 0o111
    assert len(text.splitlines()) < 40  # the logic is Python's


@pytest.mark.parametrize(
    "config, name",
    [("configs/8b_32k.py", "launch-8b-32k"), ("recipes/dapo:tiny", "launch-dapo-tiny")],
)
def test_any_name_of_a_config_gives_a_name_of_a_run(config, name):
    done = subprocess.run(
        [small_run.ROOT / "launch" / "local.sh", config],
        env={**os.environ, "PYTHON": "echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f" --name={name} " in done.stdout and f"={config} " in done.stdout


def test_the_archive_is_the_same_bytes_and_has_what_an_installation_needs():
    digest, data = hosts.pack_code()
    assert (digest, data) == hosts.pack_code()
    names = subprocess.run(["tar", "tz"], input=data, capture_output=True, check=True)
    found = set(names.stdout.decode().split())
    assert {"setup.py", "constraints.txt", "configs/tiny.py", "README.md"} <= found
    assert "scalerl_jax/assets/tiny_base/config.json" in found
    assert not [name for name in found if re.search(r"__pycache__|\.git|runs/", name)]


def test_an_installed_package_has_no_code_to_send(tmp_path):
    with pytest.raises(ValueError, match="is no source tree of this package"):
        hosts.pack_code(tmp_path)
