"""Jobs from flags and files, and each way to write one that cannot be."""

import argparse
import json
import os
import subprocess
import sys

import pytest
import small_run

from scalerl_jax.launch.job import Job, add_flags, make_job, read_job

CLOUD = {
    "place": "queued_resource",
    "name": "run-1",
    "bucket": "gs://bucket/runs",
    "project": "project",
    "zone": "us-east5-b",
    "topology": "v6e:4x4",
    "config": "configs/8b.py",
}


def read(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_job(parser.parse_args(flags))


def test_a_file_has_the_names_of_the_flags_and_flags_win(tmp_path):
    lines = [f"{name} = {json.dumps(value)}" for name, value in CLOUD.items()]
    toml, plain = tmp_path / "job.toml", tmp_path / "job.json"
    toml.write_text("\n".join([*lines, "spot = true", "price_per_chip_hour = 2"]))
    plain.write_text(json.dumps(CLOUD | {"spot": True, "price_per_chip_hour": 2}))
    expected = make_job(CLOUD | {"spot": True, "price_per_chip_hour": 2.0})
    assert read(f"--job={toml}") == read(f"--job={plain}") == expected
    changed = read(f"--job={toml}", "--no-spot", "--zone=us-central2-b")
    assert (changed.spot, changed.zone) == (False, "us-central2-b")


@pytest.mark.parametrize(
    "changes, workdir, ray",
    [
        pytest.param({}, "/mnt/scalerl_jax/run-1", "slice", id="several hosts"),
        pytest.param({"topology": "v6e:2x4"}, "gs://bucket/runs/run-1", "", id="one"),
        pytest.param(
            {"place": "ray_tpu", "topology": "2*v6e:2x4"},
            *("/mnt/scalerl_jax/run-1", "auto"),
            id="slices and a head",
        ),
        pytest.param(
            {"place": "local", "bucket": "runs"}, "runs/run-1", "", id="this machine"
        ),
    ],
)
def test_the_command_of_a_run(changes, workdir, ray):
    job = make_job(CLOUD | changes)
    flags = [f"--ray={ray}"] * bool(ray)
    assert job.command(["--config.seed=3"])[3:] == [
        "--config=configs/8b.py",
        f"--workdir={workdir}",
        *flags,
        "--config.seed=3",
    ]
    assert job.command(["--ray=local"]).count("--ray=local") == 1
    assert job.directory == ("runs/run-1" if not job.zone else job.directory)


def test_a_run_may_save_for_as_long_as_its_machines_stay():
    def grace(**changes):
        (word,) = [
            each
            for each in make_job(CLOUD | changes).supervised(["x"])
            if each.startswith("--grace-s=")
        ]
        return word.removeprefix("--grace-s=")

    assert grace() == grace(place="tpu_vm", topology="v6e:2x4") == "55"
    gke = {"place": "gke", "cluster": "c", "image": "i", "storage": "s"}
    assert grace(**gke, bucket="gs://bucket") == "55"
    assert grace(spot=True) == grace(place="local", bucket="runs") == "30"


WRONG = {
    "place": ("moon", "--place=moon: choose from local, tpu_vm"),
    "name": ("Run_1", "--name=Run_1 must begin with a letter"),
    "bucket": ("bucket", "--bucket=bucket is no bucket of Google Cloud Storage"),
    "zone": ("us-east5", "--zone=us-east5 is no zone"),
    "topology": ("v6e:3x3", "3x3 is no slice of v6e; choose from"),
    "project": ("", "--project is missing (of Google Cloud); --place=queued_resource"),
    "preflight": ("maybe", "--preflight=maybe: choose from require, skip"),
    "price_per_chip_hour": (-1.0, "--price-per-chip-hour=-1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_named(name):
    value, words = WRONG[name]
    with pytest.raises(ValueError) as caught:
        make_job(CLOUD | {name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"spot": True, "reserved": True}, "--spot and --reserved exclude each other"),
        ({"topology": "2*v6e:4x4"}, "several slices are --place=ray_tpu"),
        ({"place": "tpu_vm"}, "--place=queued_resource"),
        ({"place": "local"}, "--place=local"),
        ({"topology": "0*v6e:4x4"}, "--topology=0*v6e:4x4: write v6e:4x4"),
        ({"bucket": "gs://bucket/runs/"}, "with no / at the end"),
    ],
)
def test_settings_that_do_not_fit_together(changes, words):
    with pytest.raises(ValueError) as caught:
        make_job(CLOUD | changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("zoone = 'x'", "zoone"),
        ("spot = 1", "spot = 1 must be of the type bool"),
        ("name = ", "is neither TOML nor JSON"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, words):
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read(f"--job={file}")
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match="there is no such file"):
        read("--job=no_such.toml")


def test_every_setting_says_what_it_is():
    fields = Job.__dataclass_fields__.values()
    assert all(field.metadata["meaning"] for field in fields)


def test_no_command_loads_jax():
    code = "import sys, scalerl_jax.launch.__main__ as m; m.make_parser();"
    code += "assert not {'jax', 'ray', 'scipy'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(small_run.ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
