"""What a run will cost and has cost, and what ends it before it costs anything."""

import dataclasses
import datetime
import json

import pytest
import small_run

from scalerl_jax.launch import estimate, gcloud
from scalerl_jax.launch.job import make_job
from scalerl_jax.launch.place import Machines
from scalerl_jax.launch.ray_place import RayPlace

NOON = datetime.datetime(2026, 11, 23, 12, 0, tzinfo=datetime.UTC)
JOB = make_job(
    {
        "place": "queued_resource",
        "name": "run-1",
        "bucket": "gs://bucket/runs",
        "project": "p",
        "zone": "us-east5-b",
        "topology": "v6e:4x4",
        "config": "configs/8b.py",
        "price_per_chip_hour": 2.5,
    }
)
MODEL = "--config.model.checkpoint=gs://bucket/models/Llama-3.1-8B"
KNOWN = estimate.RunEstimate(num_steps=1000, chips=16, price=2.5)


def test_steps_times_seconds_times_chips_times_price():
    found = {"fits": True, "can_start": True, "step_seconds": 36.0}
    said = estimate.read_preflight(KNOWN, found, JOB).lines(NOON)
    assert (
        "16 chips, 1,000 optimizer steps of 36.0 s: 10.0 h, 160 chip-hours" in said[0]
    )
    assert "until about 2026-11-23 22:00" in said[0]
    assert said[1] == "price: 400.00 at 2.5 each"


def test_the_preflight_says_what_a_step_takes_of_chips_that_it_uses():
    found = {"fits": True, "step_seconds": 36.0, "chip_hours_per_step": 0.12}
    said = estimate.read_preflight(KNOWN, found, JOB).lines(NOON)
    assert "120 chip-hours" in said[0] and "300.00 at 2.5" in said[1]


def test_a_preflight_without_a_time_leaves_it_open():
    (said,) = estimate.read_preflight(KNOWN, {"fits": True}, JOB).lines(NOON)
    assert "how long a step takes is not known" in said


@pytest.mark.parametrize(
    "found, words",
    [
        ({"fits": False}, "configs/8b.py does not fit v6e:4x4"),
        ({"fits": False, "advice": ["more chips"]}, "does not fit v6e:4x4: more chips"),
        ({"fits": True, "can_start": False}, "cannot be started on v6e:4x4"),
    ],
)
def test_what_does_not_fit_or_start_is_refused(found, words):
    with pytest.raises(ValueError) as caught:
        estimate.read_preflight(KNOWN, found, JOB)
    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore:the load_module")  # ml_collections'
def test_a_preflight_that_fails_is_told_with_the_way_around(monkeypatch):
    monkeypatch.chdir(small_run.ROOT)
    monkeypatch.setattr(
        estimate,
        "preflight_command",
        lambda *_: ["bash", "-c", "echo 'error: no compiler' >&2; exit 2"],
    )
    with pytest.raises(ValueError, match="fails: no compiler; --preflight=skip"):
        estimate.make_estimate(JOB, [MODEL])


@pytest.mark.filterwarnings("ignore:the load_module")  # ml_collections'
def test_a_model_or_tokenizer_that_hosts_lack_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(small_run.ROOT)
    job = dataclasses.replace(JOB, preflight="skip")
    with pytest.raises(ValueError, match="8b.py has neither model.checkpoint nor data"):
        estimate.make_estimate(job, [])
    own = f"--config.data.tokenizer={tmp_path}"
    with pytest.raises(ValueError, match=f"data.tokenizer = '{tmp_path}' is on this"):
        estimate.make_estimate(job, [MODEL, own])
    smollm2 = f"configs/smollm2.py:{tmp_path}"
    with pytest.raises(ValueError, match=f"model.checkpoint = '{tmp_path}' is on this"):
        estimate.make_estimate(dataclasses.replace(job, config=smollm2), [])
    # What hosts may have: an image's file, the bucket's mount, what is not here.
    mounted = dataclasses.replace(job, mount=str(tmp_path))
    image = dataclasses.replace(job, place="gke")
    nowhere = f"--config.data.tokenizer={tmp_path}/none"
    for each, more in ((job, nowhere), (mounted, own), (image, own)):
        assert estimate.make_estimate(each, [MODEL, more]).chips == 16
    tiny = dataclasses.replace(job, config="tiny")  # its file is of the package
    assert estimate.make_estimate(tiny, []).chips == 16


def test_the_cost_so_far(tmp_path):
    there = Machines(state="up", said="ACTIVE", created="2026-11-23T10:30:00Z")
    row = {"step": 20, "compute_chip_hours": 30.0}
    (tmp_path / "evals.jsonl").write_text(json.dumps(row) + '\n{"step": 3')
    machines, run = estimate.cost_so_far(JOB, there, tmp_path, NOON).lines()
    assert "16 chips x 1.50 h" in machines
    assert "24.00 chip-hours at most, 60.00 at 2.5 each" in machines
    assert "30.0000 chip-hours of compute at step 20" in run and "75.00 at" in run
    absent = Machines(state="absent", said="ABSENT")
    nothing = estimate.cost_so_far(JOB, absent, tmp_path / "none", NOON).lines()
    assert nothing == ["nothing was spent"]


def test_machines_of_several_kinds_cost_since_the_first_of_them():
    class Cloud:
        dry_run = False

        def ask(self, command):
            if "instances" in command:  # 10:00 UTC
                at, labels = "2026-11-23T02:00:00.000-08:00", {gcloud.LABEL: "run-1"}
                return {"status": "RUNNING", "labels": labels, "creationTimestamp": at}
            return {"state": {"state": "ACTIVE"}, "createTime": "2026-11-23T04:00:00Z"}

    job = dataclasses.replace(JOB, place="ray_tpu", topology="2*v6e:4x4")
    there = RayPlace(job, [], Cloud()).machines()
    assert (there.state, there.created) == ("up", "2026-11-23T04:00:00Z")


def test_further_flags_of_a_run_are_flags():
    with pytest.raises(ValueError, match="'num_steps=3' after --"):
        estimate.resolve_config(JOB, ["num_steps=3"])
