"""A wheel of the source archive, in an empty folder, without the clone beside it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import small_run

import scalerl_jax

ROOT = small_run.ROOT
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "third_party")
SHORT = (
    "--config.train.num_steps=5",
    "--config.batch.num_prompts=2",
    "--config.eval.every=1",
    "--config.eval.num_prompts=20",
    "--config.eval.samples_per_prompt=1",
)
ARCHIVE = "from setuptools import build_meta; print(build_meta.build_sdist('made'))"


def run(*words, cwd, statuses=(0,), **environment):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in statuses, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of a wheel's packages; those that it requires are the tests' own."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*LEFT_OUT))
    *_, archive = run("-c", ARCHIVE, cwd=clone).split()
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*build, "-w", str(folder), str(clone / "made" / archive), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    shutil.rmtree(clone)
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_has_every_config_and_runs_the_demo(installed, tmp_path):
    names = {file.relative_to(ROOT) for file in (ROOT / "configs").rglob("*.py")}
    inside = installed / "scalerl_jax"
    found = {file.relative_to(inside) for file in (inside / "configs").rglob("*.py")}
    assert found == names

    def scalerl(*words, statuses=(0,)):
        command = ("-m", "scalerl_jax", *words)
        where = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
        return run(*command, statuses=statuses, **where)

    assert scalerl("--version") == f"scalerl {scalerl_jax.__version__}\n"
    assert (
        "dapo" in scalerl("train", "--config=recipes/dapo:tiny", "--describe").lower()
    )
    assert "prompt/seed0" in scalerl("study", "status", "smoke")
    # Five steps may not climb; then the fit refuses them with status 2.
    said = scalerl("demo", "--workdir=r", *SHORT, statuses=(0, 2))
    assert "$ scalerl train --config=tiny --workdir=r" in said
    assert "finished after step 5" in said
    assert "$ scalerl fit r" in said
    settings = json.loads((tmp_path / "r" / "config.json").read_text())
    assert settings["config"]["model"]["checkpoint"].startswith(str(installed))
