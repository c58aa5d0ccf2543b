"""Files for other clients, read by the clients themselves where they are installed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import small_run
import yaml

LAUNCH = small_run.ROOT / "launch"
JOB = {
    "NAME": "run-1",
    "PROJECT": "p",
    "ZONE": "us-east5-b",
    "CLUSTER": "c",
    "IMAGE": "image",
    "STORAGE": "runs",
    "TPU_TYPE": "v6e-16",
    "WORKDIR": "/data/run-1",
    "CONFIG": "configs/8b.py",
}


def without_storage(path):
    """The script's text; storages are asked of a cluster, which is not there."""
    text = (LAUNCH / "gke_xpk.sh").read_text()
    path.write_text(text.replace('--storage="$STORAGE" ', ""))
    return path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("xpk") is None, reason="xpk is not installed")
def test_xpk_makes_a_job_set_that_restarts_on_preemptions_alone(tmp_path):
    manifest = tmp_path / "job.yaml"
    dry = ["--dry-run", "--skip-validation", f"--output-manifest-file={manifest}"]
    done = subprocess.run(
        ["bash", without_storage(tmp_path / "gke.sh"), *dry],
        env=os.environ | JOB,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = yaml.safe_load(manifest.read_text())
    assert (found["kind"], found["metadata"]["name"]) == ("JobSet", "run-1")
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 50
    (job,) = found["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (1, 4)
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    restarted = rule["onExitCodes"]["values"]
    assert rule["onExitCodes"]["operator"] == "NotIn"
    assert 75 in restarted and not {0, 1, 2} & set(restarted)
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60
    (container,) = pod["containers"]
    assert "launch supervise --workdir=/data/run-1 -- " in container["command"][-1]


@pytest.mark.skipif(shutil.which("xpk") is None, reason="xpk is not installed")
def test_xpk_knows_every_flag():
    done = subprocess.run(
        ["xpk", "workload", "create", "--help"], capture_output=True, text=True
    )
    used = re.findall(r" (--[a-z-]+)=", (LAUNCH / "gke_xpk.sh").read_text())
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    ours = {"--workdir", "--config", "--ray"}
    delete = {"--workload"}
    assert set(used) - ours <= known | delete


@pytest.mark.parametrize("name", JOB)
def test_a_missing_name_ends_the_script_before_it_calls_xpk(name):
    environment = {key: value for key, value in JOB.items() if key != name}
    done = subprocess.run(
        ["/bin/bash", LAUNCH / "gke_xpk.sh"], env=environment, capture_output=True
    )
    assert done.returncode == 1 and name.encode() in done.stderr


@pytest.mark.skipif(shutil.which("sky") is None, reason="SkyPilot is not installed")
def test_skypilot_knows_every_name():
    first = Path(shutil.which("sky")).read_text().splitlines()[0]
    code = f"""
import jsonschema, yaml
from sky.utils import schemas
values = yaml.safe_load(open({str(LAUNCH / "skypilot.yaml")!r}))
jsonschema.validate(values, schemas.get_task_schema())
jsonschema.validate(values["resources"], schemas.get_resources_schema())
"""
    python = first.removeprefix("#!").strip()
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_image_has_what_its_file_copies():
    text = (LAUNCH / "Dockerfile").read_text()
    names = [
        name
        for line in re.findall(r"^COPY (.+)$", text, re.M)
        for name in line.split()[:-1]
    ]
    assert {"setup.py", "constraints.txt", "README.md", "configs"} <= set(names)
    assert all((small_run.ROOT / name).exists() for name in names)
    (extras,) = re.findall(r"ARG EXTRAS=(\S+)", text)
    setup = (small_run.ROOT / "setup.py").read_text()
    assert all(f'"{extra}":' in setup for extra in extras.split(","))
