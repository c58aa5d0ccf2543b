"""Studies whose runs have machines of their own, by the launcher's fake cloud."""

import dataclasses
import json
import sys

import pytest
import small_bucket
from small_cloud import cloud as cloud
from small_study import keep_record

from scalerl_jax.run.directory import why_ended
from scalerl_jax.run.progress import Progress
from scalerl_jax.study import __main__ as command_line
from scalerl_jax.study.design import Planned, Study, interleaved
from scalerl_jax.study.launched import read_launched
from scalerl_jax.study.runs import RELEASED_FILE, Runner, look

STUDY = Study(
    base="configs/tiny.py",
    common={"eval.every": 1},
    arms={"prompt": {}, "Token_mean": {"objective.aggregation": "token"}},
    seeds=(0, 1),
    steps=4,
)
CLOUD = {
    "place": "queued_resource",
    "bucket": "gs://bucket/runs",
    "project": "p",
    "zone": "us-east5-b",
    "topology": "v6e:2x4",
    "preflight": "skip",
}


@pytest.fixture
def launched(tmp_path):
    """A function: the jobs of a study, by a file of these settings."""

    def make(study=STUDY, **settings):
        file = tmp_path / "job.json"
        file.write_text(json.dumps(settings))
        root = tmp_path / "study"
        found = read_launched(str(file), study, title="small", root=root)
        return dataclasses.replace(found, look_s=0.2)

    return make


def run(found, stopped=lambda: False):
    found.root.mkdir(exist_ok=True)
    found.keep()
    with Progress() as progress:
        return Runner(
            found.study,
            found.root,
            progress,
            jobs=2,
            command=found.command,
            release=found.release,
            on_cores=False,
        ).run(stopped)


@pytest.fixture
def laptop(cloud, monkeypatch):
    """The fake cloud, whose commands this process finds."""
    for name, value in cloud.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(cloud.folder / "laptop")
    return cloud


@pytest.mark.slow
@small_bucket.NEEDS_EXTRA
def test_each_run_gets_machines_and_its_files_come_to_the_study(laptop, launched):
    found = launched(**CLOUD)
    found.check_names()
    found.check_place(interleaved(STUDY))
    assert run(found) == {}
    for planned in interleaved(STUDY):
        assert look(STUDY, found.root, planned).finished
    assert not laptop.state()  # no machine is left
    elsewhere = dataclasses.replace(found, root=found.root / "other")
    with pytest.raises(ValueError, match="has a run small-prompt-s0 already, which"):
        elsewhere.check_place(interleaved(STUDY))
    made = laptop.calls("queued-resources create")
    assert len(made) == 4 and "small-token-mean-s1" in "".join(made)
    assert run(found) == {} and laptop.calls("queued-resources create") == made
    # A budget ends runs that would make a million steps, and their machines.
    endless = dataclasses.replace(STUDY, steps=10**6, tokens=35, seeds=(5,))
    found = dataclasses.replace(found, study=endless)
    assert run(found) == {} and not laptop.state()
    for planned in interleaved(endless):
        assert look(endless, found.root, planned).finished
        assert why_ended(found.root / planned.name) == "the study's budget is used"


@pytest.mark.slow
@small_bucket.NEEDS_EXTRA
def test_machines_outlive_the_command_and_stop_removes_them(laptop, launched):
    endless = dataclasses.replace(STUDY, steps=10**6, seeds=(0,))
    found = launched(endless, **CLOUD)

    def begun():
        states = [look(endless, found.root, each) for each in interleaved(endless)]
        return all(state.step for state in states)

    run(found, begun)
    assert len(laptop.state()) == 2
    # Arms that the study no longer has are ended, too.
    flags = ["stop", "smoke", f"--root={found.root}"]
    assert command_line.main(flags) == 0
    assert not laptop.state()


def test_only_a_folder_with_launched_runs_can_be_stopped(tmp_path):
    with pytest.raises(ValueError, match="has no run on machines of its own"):
        command_line.main(["stop", "smoke", f"--root={tmp_path}"])


def test_a_run_that_failed_is_released_and_one_that_was_cut_is_not(tmp_path):
    released = []

    def release(planned):
        released.append(planned.name)
        return "machines of it may remain"

    def command(study, root, planned):
        status = {0: 3, 1: 75}[planned.seed]
        return ["sh", "-c", f"echo error: no quota; exit {status}"]

    study = dataclasses.replace(STUDY, arms={"prompt": {}})
    with Progress() as progress:
        runner = Runner(study, tmp_path, progress, command=command, release=release)
        assert runner.run(lambda: False) == {"prompt/seed0": "no quota"}
    assert released == ["prompt/seed0"]
    assert runner.left == {"prompt/seed0": "machines of it may remain"}


def test_what_could_not_be_released_is_tried_again(tmp_path):
    """The budget was used, but the machines stayed; the next command tries again."""
    study = dataclasses.replace(STUDY, arms={"prompt": {}}, seeds=(0,))
    script = """
import json, pathlib, sys, time
row = {"step": 4, "pass_rate": 0.5, "generated_tokens": 9, "compute_chip_hours": 1}
folder = pathlib.Path(sys.argv[1])
(folder / "evals.jsonl").write_text(json.dumps(row) + "\\n")
"""
    answers = ["they stay", ""]

    def runner(progress):
        return Runner(
            study,
            tmp_path,
            progress,
            command=lambda *_: [sys.executable, "-c", script + end, str(folder)],
            release=lambda planned: answers.pop(0),
        )

    folder, end = tmp_path / "prompt/seed0", "sys.exit(3)"
    with Progress() as progress:
        first = runner(progress)
        first.run(lambda: False)
        assert first.left == {"prompt/seed0": "they stay"}
        second = runner(progress)
        assert second.run(lambda: False) == {} and second.left == {}
        assert not answers and (folder / RELEASED_FILE).exists()
        runner(progress).run(lambda: False)  # asks for nothing more


def test_jobs_are_named_by_study_arm_and_seed(launched, tmp_path):
    found = launched(place="local", bucket="runs")
    job = found.job(Planned("Token_mean", 1))
    assert (job.name, job.config) == ("small-token-mean-s1", "configs/tiny.py")
    assert job.files == str(tmp_path / "study/Token_mean/seed1")
    found = launched(place="local", bucket="runs", name="mine")
    assert found.job(Planned("prompt", 0)).name == "mine-prompt-s0"


@pytest.mark.parametrize(
    "arms, settings, words",
    [
        ({"a_b": {}, "a-b": {}}, {}, "a_b/seed0 and a-b/seed0 would both be machines"),
        ({"a" * 40: {}}, {}, "for the run a{40}/seed0: --name=small-a{40}-s0 must"),
        ({"a": {}}, {"config": "tiny"}, "leave config out; it is the study's base"),
        ({"a": {}}, {"topolgy": "v6e:2x4"}, "did you mean topology?"),
        ({"a": {}}, {"place": "tpu_vm"}, "--project is missing"),
    ],
)
def test_what_no_job_can_be_is_said_before_there_is_one(
    launched, arms, settings, words
):
    study = dataclasses.replace(STUDY, arms=arms)
    with pytest.raises(ValueError, match=words):
        launched(
            study, **({"place": "local", "bucket": "runs"} | settings)
        ).check_names()


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_the_price_is_that_of_all_runs(launched, monkeypatch):
    found = launched(**(CLOUD | {"preflight": "require", "price_per_chip_hour": 2.0}))
    answer = '{"fits": true, "step_seconds": 3600, "chip_hours_per_step": 8}'
    monkeypatch.setattr(
        "scalerl_jax.launch.estimate.subprocess.run",
        lambda line, **_: type("Done", (), {"returncode": 0, "stdout": answer}),
    )
    *arms, last = found.price(interleaved(STUDY)[:3])
    assert [line[:12] for line in arms] == ["1 x prompt: ", "2 x Token_me"]
    # By hand: three runs of four steps of 8 chip-hours.
    assert last == "3 runs: 96 chip-hours, 192.00 at 2 each"


def test_arms_and_seeds_can_be_added_to_machines(launched):
    first = launched(**CLOUD).record
    more = dataclasses.replace(
        STUDY, arms={"new": {"seed": 1}, **STUDY.arms}, seeds=(9,)
    )
    assert launched(more, **CLOUD).record == first
    assert launched(**(CLOUD | {"zone": "us-east1-c"})).record != first


def test_a_study_does_not_change_its_machines(tmp_path):
    here = {"place": "queued_resource", "bucket": "gs://a", "topology": "v6e:2x4"}
    keep_record(STUDY, tmp_path, here)
    keep_record(STUDY, tmp_path, here)
    for other in ({}, here | {"topology": "v5e:2x4"}):
        with pytest.raises(ValueError, match="are on place queued_resource, bucket"):
            keep_record(STUDY, tmp_path, other)
