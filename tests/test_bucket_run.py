"""A run whose directory, prompts and base are in a bucket: killed, and gone on with."""

import json
import os
import shutil
import time

import pytest
import small_bucket
import small_run

pytestmark = [pytest.mark.slow, small_bucket.NEEDS_EXTRA]  # whole runs

URL = "gs://bucket/runs/x"
RUN = "runs/x/"
SETTINGS = {
    "queue.max_staleness": 0,
    "train.num_steps": 3,
    "checkpoint.every": 1,
    "eval.every": 1000,
    "eval.num_prompts": 3,
    "sampler.slots": 16,
    "mesh.fsdp": 2,
    "model.checkpoint": "gs://bucket/base",
}
# Two ranks of a learner and a replica, which see nothing of each other's disks.
SEVERAL = (
    "--ray=local",
    "--config.mesh.processes=2",
    *("--config.generators.count=1", "--config.generators.placement=auto"),
)
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
WAIT_S = 300.0


@pytest.fixture
def bucket():
    bucket = small_bucket.empty()
    for file in (small_run.ROOT / "scalerl_jax/assets/tiny_base").iterdir():
        bucket.write(f"base/{file.name}", file.read_bytes())
    return bucket


def start(home, *, settings=SETTINGS):
    (home / "assets").mkdir(parents=True, exist_ok=True)
    command = ("-m", "scalerl_jax.main", *small_run.arguments(URL, settings))
    return small_run.start(*command, environment={"HOME": str(home), **TWO_DEVICES})


def goes_on(home, *flags):
    command = ("-m", "scalerl_jax.main", f"--workdir={URL}", *flags)
    return small_run.start(*command, environment={"HOME": str(home), **TWO_DEVICES})


def rows(bucket, name):
    return [json.loads(row) for row in bucket.objects[RUN + name][0].splitlines()]


def until(process, holds):
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, (
            process.communicate()
        )
        time.sleep(0.005)


def test_a_killed_run_goes_on_from_the_bucket_alone(bucket, tmp_path):
    """Another machine has neither the files nor the checkpoints of the first one."""
    bucket.hold("step_00000002/host.json")  # the save of step 3 waits for that
    process = start(tmp_path / "first")
    manifest = f"{RUN}checkpoints/step_00000001/manifest.json"
    until(process, lambda: manifest in bucket.names())
    assert [row["step"] for row in rows(bucket, "metrics.jsonl")][:1] == [1]
    second = goes_on(tmp_path / "second")
    output, errors = second.communicate(timeout=WAIT_S)
    assert second.returncode == 1
    assert f"process {process.pid} on {os.uname().nodename} is using" in errors
    assert len(errors.strip().splitlines()) == 1
    process.kill()
    process.communicate(timeout=60)
    bucket.release()
    assert bucket.names(f"{RUN}checkpoints/step_00000002/")

    shutil.rmtree(tmp_path / "first")
    # The process of the lock is gone.
    process = goes_on(tmp_path / "second", *SEVERAL)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert "taking over the lock of process" in errors
    assert "resumed after step 1\n" in errors
    assert output.startswith("finished after step 3:")
    assert f"everything is in {URL};" in output
    assert [row["step"] for row in rows(bucket, "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in rows(bucket, "evals.jsonl")] == [0, 3]
    names = {name.removeprefix(RUN) for name in bucket.names(RUN)}
    assert {"config.json", "data.json", "ledger.json", "rollouts.jsonl"} < names
    assert any(name.startswith("tensorboard/events") for name in names)
    assert ".lock" not in names
    assert {
        name.split("/")[1] for name in names if name.startswith("checkpoints/")
    } == {f"step_{step:08d}" for step in (1, 2, 3)}

    last = exported(URL, tmp_path / "step-newest")
    assert last == exported(f"{URL}/checkpoints/step_00000003", tmp_path / "step-3")
    assert last != exported(f"{URL}/checkpoints/step_00000002", tmp_path / "step-2")


def exported(place, out):
    """The weights of a policy in the bucket, written by a machine of its own."""
    process = small_run.start(
        *("-m", "scalerl_jax.export", f"--checkpoint={place}", f"--out={out}"),
        environment={"HOME": str(out.parent / f"home-{out.name}")},
    )
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return (out / "model.safetensors").read_bytes()


def test_a_bucket_that_is_not_there_is_told_before_anything_is_compiled(
    bucket, tmp_path
):
    for name, value, words in [
        ("workdir", "gs://nowhere/x", "--workdir=gs://nowhere/x: there is no bucket"),
        ("config.model.checkpoint", "gs://bucket/none", "there is nothing of this na"),
        ("config.data.tasks", "('jsonl:gs://nowhere/x',)", "there is no bucket"),
    ]:
        command = ["--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
        process = small_run.start(
            *("-m", "scalerl_jax.main", *command, f"--{name}={value}"),
            environment={"HOME": str(tmp_path)},
        )
        output, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2, errors
        assert words in errors
        assert "compiling" not in errors and "Traceback" not in errors
