"""Every command against a fake gcloud that refuses, stalls and takes machines away."""

import functools
import json
import re
import runpy
from pathlib import Path

import pytest
import small_bucket
import small_run
from fake_gcloud import FLAGS
from fake_gke import ALWAYS as CLUSTER_FLAGS
from fake_gke import FLAGS as GKE_FLAGS
from small_cloud import cloud as cloud

from scalerl_jax.launch.outcome import Outcome

pytestmark = small_bucket.NEEDS_EXTRA
CLIENTS = ("gcloud", "gke")
COMPLETIONS = Path("/usr/lib/google-cloud-sdk/data/cli/gcloud_completions.py")
REAL = [
    f"--config.{name}={value}"
    for name, value in small_run.SETTINGS.items()
    if name != "train.num_steps"
]

GKE = {
    "place": "gke",
    "bucket": "gs://bucket",
    "mount": "gs://bucket",
    "cluster": "c",
    "image": "image",
    "storage": "runs",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "script, real",
    [
        pytest.param("tpu_vm.sh", [], id="a machine"),
        pytest.param("queued_resource.sh", REAL, id="a slice and a real run"),
    ],
)
def test_a_run_gets_to_its_end_whatever_the_cloud_does(cloud, script, real):
    # A real run goes on while the cloud is looked at: it loses its machine early.
    preempt = [1, 2] if real else [4, 8]
    cloud.script(create=["stock-out", "quota"], ssh=2, preempt=preempt)
    flags = [*real, "--config.train.num_steps=12"]
    looks = {"poll-s": 1.0 if real else 0.1}  # each takes the run's own cores
    done = cloud.launch(
        "run", *flags, script=script, run=not real, timeout=3000, **looks
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stderr
    assert "there are no such machines just now; try 2" in said
    assert "is used up by other machines of the project, or by queued" in said
    assert "that are suspended or failed; try 3" in said
    assert "the run is done after 3 attempts, 2 of them preempted" in said
    assert said.count("lost machines are removed") == 2
    # Once more if it ended between two looks: then it is found to be finished.
    assert said.count("the run starts on 1 hosts") in (3, 4)
    assert not cloud.state()  # nothing is left
    rows = small_run.rows(cloud.folder / "laptop/runs/run-1")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert (cloud.folder / "laptop/runs/run-1/fit.json").is_file()
    installed = (cloud.folder / "installed.txt").read_text().splitlines()
    assert len(installed) == 3 and "constraints.txt" in installed[0]


@pytest.mark.slow
def test_a_slice_of_two_is_made_again_alone_and_the_head_stays(cloud):
    """Ray, its nodes and the run are stand-ins; the mount is the bucket itself."""
    changes = {"topology": "2*v6e:2x4", "mount": "gs://bucket/runs"}
    cloud.script(create=["", "stock-out"], preempt=[4])
    done = cloud.launch("run", script="ray_tpu.sh", **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run-1-head ABSENT, run-1-0 ABSENT, run-1-1 ABSENT" in done.stderr
    # Which slice goes is the cloud's choice: whichever is looked at first then.
    gone = [
        name
        for name, states in (
            ("run-1-0", "run-1-0 SUSPENDED, run-1-1 ACTIVE"),
            ("run-1-1", "run-1-0 ACTIVE, run-1-1 SUSPENDED"),
        )
        if f"run-1-head RUNNING, {states}" in done.stderr
    ]
    assert len(gone) == 1, done.stderr
    assert "the run is done after 1 attempts, 0 of them preempted" in done.stderr
    assert len(cloud.calls("instances create")) == 1
    created = [line.split()[4] for line in cloud.calls("queued-resources create")]
    assert created == ["run-1-0", "run-1-1", "run-1-1", *gone]
    assert not cloud.state()
    # Head and slices, also one that is made again, have one token, from the bucket.
    (row,) = set((cloud.folder / "tokens.txt").read_text().splitlines())
    mode, rights, token = row.split()
    assert (mode, rights) == ("token", "600") and len(bytes.fromhex(token)) == 32
    assert token not in (cloud.folder / "calls.txt").read_text() + done.stderr
    assert sum(line.endswith("tokens/run-1") for line in cloud.calls("storage cp")) == 1


@pytest.mark.slow
def test_a_workload_gets_to_its_end_though_it_fails_once_and_its_nodes_go(cloud):
    cloud.script(jobset="failed", preempt=[4, 8])
    done = cloud.launch("run", script="gke_xpk.sh", flags=["--keep-machines"], **GKE)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        *("machines are QUEUED", "machines are FAILED", "machines are RUNNING"),
        "the run is done after 3 attempts, 2 of them preempted",
    ):
        assert words in done.stderr
    assert len(cloud.calls("xpk workload create")) == 2
    # A workload that has ended starts no other command.
    more = cloud.launch("run", "--config.train.num_steps=13", **GKE)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "the run is done after 4 attempts" in more.stderr
    assert "all machines are removed" in more.stderr
    assert len(cloud.calls("xpk workload create")) == 3
    assert json.loads((cloud.folder / "jobsets.json").read_text()) == {}
    rows = small_run.rows(cloud.folder / "laptop/runs/run-1")
    assert [row["step"] for row in rows] == list(range(1, 14))


@pytest.mark.slow
def test_a_workload_is_looked_at_and_stopped_from_anywhere(cloud):
    cloud.script(**{"mount options": ["implicit-dirs"]})
    said = cloud.launch("create", **GKE)
    assert said.returncode == 0 and "no mount option rename-dir-limit" in said.stderr
    cloud.script()
    assert "machines are QUEUED already" in cloud.launch("create", **GKE).stderr
    other = cloud.launch("create", **GKE | {"mount": "/mnt/other"}, flags=["--yes"])
    assert other.returncode == 2 and "is at gs://bucket" in other.stderr
    assert "machines: RUNNING since" in cloud.launch("status", **GKE).stdout
    logs = cloud.launch("logs", **GKE).stdout
    assert all(line.startswith("[pod/run-1-slice-") for line in logs.splitlines())
    for _ in range(2):
        assert cloud.launch("stop", **GKE).returncode == 0
    assert len(cloud.calls("xpk workload create")) == 1


@pytest.mark.parametrize(
    "changes, troubles, words",
    [
        pytest.param({}, {"cluster": ""}, "xpk cluster create makes one", id="cluster"),
        pytest.param({}, {"cluster": "us-west1"}, "but in us-west1", id="elsewhere"),
        pytest.param({}, {"pools": ["4x8"]}, "have ct6e-standard-4t 4x8", id="pools"),
        pytest.param({"storage": "x"}, {}, "c has no such storage; xpk", id="storage"),
        pytest.param(
            {}, {"storage": {"readonly": True}}, "gs://bucket, read-only", id="readonly"
        ),
        pytest.param({"spot": True}, {}, "--spot with --place=gke", id="spot"),
        pytest.param(
            {"bucket": "gs://bucket/x"}, {}, "mount a whole bucket", id="a path"
        ),
        pytest.param({"image": ""}, {}, "--image is missing", id="no image"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_before_it_is_made(
    cloud, changes, troubles, words
):
    cloud.script(**troubles)
    changes = GKE | changes
    flags = ["--spot"] if changes.pop("spot", False) else []
    done = cloud.launch("create", flags=flags, **changes)
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
    assert done.returncode == 2 and words in line
    calls = cloud.folder / "calls.txt"
    assert not calls.exists() or not cloud.calls("workload create")


@pytest.mark.slow
def test_a_failed_slice_is_made_again_and_a_mistake_ends_it(cloud):
    cloud.script(create=["failed"])
    done = cloud.launch("run", "--config.train.num_steps=2")
    assert done.returncode == 1  # two points make no curve
    assert "machines are FAILED" in done.stderr
    assert "the run is done after 1 attempts" in done.stderr
    assert not cloud.state()
    created = len(cloud.calls("queued-resources create"))
    again = cloud.launch("run", "--config.train.num_steps=2")  # not started again
    assert "the run is done after 1 attempts" in again.stderr
    assert len(cloud.calls("queued-resources create")) == created == 2
    longer = cloud.launch("run", "--config.train.num_steps=3")
    assert "the run is done after 2 attempts" in longer.stderr
    rows = small_run.rows(cloud.folder / "laptop/runs/run-1")
    assert [row["step"] for row in rows] == [1, 2, 3] and not cloud.state()


def test_only_a_command_that_is_done_is_not_started_again(cloud):
    told = ("../venv/bin/python", "-m", "scalerl_jax.main", "--config=configs/tiny.py")
    told += ("--workdir=gs://bucket/runs/run-1", "--config.train.num_steps=2")
    at = "2026-01-01T00:00:00+00:00"

    def goes_on(state, *more):
        outcome = Outcome(state=state, command=told, at=at)
        cloud.bucket.write("runs/run-1/launch.json", outcome.to_json())
        said = cloud.launch("start", *more).stderr
        assert "machines of run-1 are ABSENT; nothing can start" in said
        return f"the run was {state} at {at}; it goes on with this command" in said

    assert not goes_on("done", told[-1])
    assert goes_on("done", f"{told[-1]}0") and goes_on("failed", told[-1])


@pytest.mark.parametrize(
    "changes, troubles, words",
    [
        pytest.param({"zone": "us-east5"}, {}, "us-east5 is no zone", id="region"),
        pytest.param(
            {"topology": "v6e:16x16"}, {}, "us-east5-b has v6e-16, v6e-8", id="topology"
        ),
        pytest.param(
            {}, {"types": []}, "us-east5-b has no TPUs", id="a zone without TPUs"
        ),
        pytest.param(
            {"bucket": "gs://other/x"}, {}, "there is no such bucket", id="no bucket"
        ),
        pytest.param(
            {}, {"location": "EUROPE-WEST4"}, "every checkpoint would travel", id="far"
        ),
        pytest.param({}, {"create": ["no quota"]}, "no quota: TPUV6E", id="no quota"),
        pytest.param(
            {"config": "configs/tinny.py"}, {}, "there is no such file", id="typo"
        ),
        pytest.param(
            {"config": "/etc/x.py"}, {}, "there is no such file", id="elsewhere"
        ),
    ],
)
def test_bad_input_is_a_line_before_anything_is_made(cloud, changes, troubles, words):
    cloud.script(**troubles)
    done = cloud.launch("create", **changes)
    assert done.returncode in (1, 2)
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
    assert words in line and "Traceback" not in done.stderr
    assert not cloud.state()


def test_a_wrong_setting_of_the_run_is_found_here(cloud):
    done = cloud.launch("create", "--config.batch.grup_size=3")
    assert done.returncode == 2 and "no such setting: 'grup_size'" in done.stderr
    assert not cloud.state()


def test_rights_that_lack_are_told_with_the_page_that_lists_them(cloud):
    cloud.bucket.denied = True
    done = cloud.launch("create")
    assert done.returncode == 2
    assert "lacks a right; docs/pods.md lists the roles" in done.stderr


@pytest.mark.slow
def test_a_name_that_another_has_is_not_touched(cloud):
    assert cloud.launch("create").returncode == 0
    other = cloud.launch("create", topology="v6e:4x4")
    assert other.returncode == 2 and "is taken by a v6e-8" in other.stderr
    assert "or `launch stop --topology=v6e-8` first" in other.stderr
    assert cloud.launch("create").returncode == 0  # ours: it is there already
    assert len(cloud.calls("create")) == 1
    other = cloud.launch("stop", topology="v6e:4x4")
    assert other.returncode == 2 and "is taken by a v6e-8" in other.stderr
    assert list(cloud.state()) == ["run-1"]
    assert cloud.launch("stop", topology="v6e-8").returncode == 0 and not cloud.state()


def test_stop_may_be_called_at_any_time_and_tells_what_stays(cloud):
    assert "there are no machines" in cloud.launch("stop").stderr
    cloud.launch("create")
    cloud.script(stuck=["run-1"])
    stuck = cloud.launch("stop", **{"poll-s": 0.01})
    assert stuck.returncode == 1
    assert "NOT stopped: run-1 in us-east5-b, which is still DELETING" in stuck.stderr
    cloud.script()
    assert cloud.launch("stop").returncode == 0
    assert cloud.launch("stop").returncode == 0 and not cloud.state()


@pytest.mark.slow
def test_a_state_that_is_not_known_ends_a_run_and_stop_removes_the_machines(cloud):
    both = {"topology": "2*v6e:2x4", "place": "ray_tpu"}
    cloud.launch("create", **both)
    cloud.script(unheard={"run-1-1": "HIDING"})
    done = cloud.launch("run", **both)
    assert done.returncode == 1
    assert "unknown state: run-1-head RUNNING, run-1-0 " in done.stderr
    assert "HIDING; look at them with gcloud, and remove them with" in done.stderr
    assert cloud.launch("stop", **both).returncode == 0 and not cloud.state()


@pytest.mark.slow
def test_the_status_has_machines_run_forecast_and_cost_and_an_alarm_when_it_stalls(
    cloud,
):
    cloud.launch("create")
    looks = [cloud.launch("status") for _ in range(3)]
    assert looks[-1].stdout.startswith("machines: ACTIVE since ")
    assert "run: never started" in looks[-1].stdout and not looks[-1].returncode
    outcome = Outcome(state="running", command=("run",), at="2026-01-01T00:00:00+00:00")
    cloud.bucket.write("runs/run-1/launch.json", outcome.to_json())
    config = {"config": {"train": {"num_steps": 30}}}
    cloud.bucket.write("runs/run-1/config.json", json.dumps(config).encode())
    rows = [
        {"step": n, "compute_chip_hours": n / 10, "pass_rate": 0.2 + 0.6 * n / (n + 4)}
        for n in range(12)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    cloud.bucket.write("runs/run-1/evals.jsonl", lines.encode())
    done = cloud.launch("status", **{"price-per-chip-hour": 2})
    assert done.returncode == 3, done.stderr
    for words in (
        *("step 0 of 30, pass rate 0.640 at step 11", "forecast at compute_chip_hours"),
        *("the run: 1.1000 chip-hours of compute at step 11", ", 2.20 at 2 each"),
        "ALARM: the run has made no step for",
    ):
        assert words in done.stdout
    assert len(cloud.calls("storage objects describe")) == 1
    done = cloud.launch("status", flags=["--json"], **{"price-per-chip-hour": 2})
    facts = json.loads(done.stdout)
    assert done.returncode == 3 and len(facts["alarms"]) == 1
    assert facts["machines"]["state"] == "up" and facts["run"]["state"] == "running"
    assert facts["status"]["evaluation"]["step"] == 11
    assert facts["cost"]["run_chip_hours"] == pytest.approx(1.1)
    assert 0.6 < facts["forecast"]["forecast"] < 0.8


@pytest.mark.slow
def test_a_slice_of_two_that_is_half_there_is_completed_or_removed(cloud):
    both = {"topology": "2*v6e:2x4", "place": "ray_tpu"}
    cloud.script(create=["", "stock-out", "", "stock-out"])
    done = cloud.launch("create", **both)
    assert (
        done.returncode == 1 and "no such machines just now; try again" in done.stderr
    )
    assert sorted(cloud.state()) == ["run-1-0", "run-1-head"]
    assert cloud.launch("create", **both).returncode == 0  # only what lacks
    assert sorted(cloud.state()) == ["run-1-0", "run-1-1", "run-1-head"]
    assert len(cloud.calls("instances create")) == 1
    assert cloud.launch("stop", **both).returncode == 0 and not cloud.state()


def test_a_dry_run_calls_nobody_and_names_what_it_would(cloud):
    done = cloud.launch("run", "--config.seed=3", flags=["--dry-run", "--spot"])
    assert done.returncode == 0 and not (cloud.folder / "calls.txt").exists()
    assert re.search(r"queued-resources create run-1 .* --spot", done.stdout)
    assert "scalerl_jax.main --config=configs/tiny.py" in done.stdout
    assert "--workdir=gs://bucket/runs/run-1 --config.seed=3" in done.stdout


# Every flag of each command, as the clients of `sources` have them.
TABLE = json.loads((Path(__file__).parent / "client_flags.json").read_text())["flags"]
KNOWN = {f"gcloud {command}": flags for command, flags in FLAGS.items()}
KNOWN |= {
    command: flags | (set() if command.startswith("xpk") else CLUSTER_FLAGS)
    for command, flags in GKE_FLAGS.items()
}


@pytest.mark.parametrize("command", KNOWN)
def test_the_fakes_know_no_flag_but_those_of_the_clients(command):
    assert KNOWN[command] <= set(TABLE[command])


@functools.cache
def gcloud_tree():
    return runpy.run_path(str(COMPLETIONS))["STATIC_COMPLETION_CLI_TREE"]


@pytest.mark.skipif(not COMPLETIONS.is_file(), reason="gcloud is not installed")
@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_those_of_the_real_gcloud(command):
    node = gcloud_tree()
    flags = set(node["flags"])
    for word in command.split():
        node = node["commands"][word]
        flags |= set(node.get("flags", ()))
    assert FLAGS[command] <= flags


def test_every_flag_is_known_to_the_fakes():
    folder = small_run.ROOT / "scalerl_jax/launch"
    files = [(folder / f"{name}.py").read_text() for name in CLIENTS]
    text = "".join(each.rpartition("# -- the command lines;")[2] for each in files)
    known = set().union(*KNOWN.values()) | {"--project", "--quiet", "--workdir"}
    known |= {"--failures"}  # of our own supervisor
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known
