"""Runs of a study in processes that write a run's files without training."""

import dataclasses
import functools
import json
import math
import sys

import pytest
from small_study import keep_record

from scalerl_jax.process.preemption import PREEMPTED
from scalerl_jax.run.directory import why_ended
from scalerl_jax.run.progress import Progress
from scalerl_jax.study import __main__ as command_line
from scalerl_jax.study.__main__ import status_text
from scalerl_jax.study.design import Planned, Study, interleaved
from scalerl_jax.study.report import describe, find
from scalerl_jax.study.runs import STUDY_FILE, Runner, changed_arms, look

STUDY = Study(
    base="configs/tiny.py",
    common={"eval.every": 1},
    arms={"prompt": {}, "token": {"objective.aggregation": "token"}},
    seeds=(0, 1),
    steps=4,
)
# Goes on where its file ends, like a run; an evaluation a step.
TRAIN = """
import json, pathlib, sys, time
folder, steps, seed, fails = sys.argv[1:]
folder = pathlib.Path(folder)
file = folder / "evals.jsonl"
done = len(file.read_text().splitlines()) if file.exists() else 0
with (folder / "starts").open("a") as starts:
    starts.write("x")
if fails in str(folder):
    sys.exit("error: data.tasks: no such file")
for step in range(done, int(steps) + 1):
    row = {"step": step, "pass_rate": 0.1 * step, "generated_tokens": 10.0 * step,
           "compute_chip_hours": step / 100}
    with file.open("a") as out:
        out.write(json.dumps(row) + "\\n")
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": step}) + "\\n")
while "slow" in str(folder):
    time.sleep(0.1)
"""


def training(fails="nobody"):
    def command(study, root, planned):
        folder = str(root / planned.name)
        return [sys.executable, "-c", TRAIN, folder, "4", str(planned.seed), fails]

    return command


def run(root, study=STUDY, **options):
    with Progress() as progress:
        return Runner(study, root, progress, **options).run(lambda: False)


def starts(root):
    return {
        each.name: len((root / each.name / "starts").read_text())
        for each in interleaved(STUDY)
        if (root / each.name / "starts").exists()
    }


def test_what_is_finished_is_skipped_and_what_failed_is_tried_again(tmp_path):
    failed = run(tmp_path, command=training(fails="token/seed1"), jobs=2)
    assert failed == {"token/seed1": "data.tasks: no such file"}
    assert "3 of 4 runs finished" in status_text(STUDY, tmp_path)
    assert "failed: data.tasks: no such file" in status_text(STUDY, tmp_path)
    assert why_ended(tmp_path / "token/seed1") == "data.tasks: no such file"
    assert run(tmp_path, command=training()) == {}
    counts = {"prompt/seed0": 1, "token/seed0": 1, "prompt/seed1": 1, "token/seed1": 2}
    assert starts(tmp_path) == counts
    assert "4 of 4 runs finished" in status_text(STUDY, tmp_path)
    assert "failed" not in status_text(STUDY, tmp_path)


def test_seeds_of_an_arm_whose_settings_are_wrong_are_not_tried(tmp_path):
    def command(study, root, planned):
        status = 2 if planned.arm == "token" else 1
        return ["sh", "-c", f"echo error: no such model; exit {status}"]

    study = dataclasses.replace(STUDY, seeds=(0, 1, 2))
    failed = run(tmp_path, study, command=command)
    # Another failure may be gone for the next seed.
    assert set(failed) == {
        "token/seed0",
        "prompt/seed0",
        "prompt/seed1",
        "prompt/seed2",
    }
    assert not (tmp_path / "token/seed1").exists()


def test_a_budget_leaves_the_evaluations_that_a_fit_needs(tmp_path):
    """One before the first step and four after it, though the first uses it up."""
    arms = {"slow": {}, "slow2": {"objective.aggregation": "token"}}
    study = dataclasses.replace(
        STUDY, arms=arms, seeds=(0,), steps=100, chip_hours=1e-9
    )
    assert run(tmp_path, study, command=training(), jobs=2) == {}
    assert look(study, tmp_path, Planned("slow", 0)).finished
    file = tmp_path / "slow/seed0/evals.jsonl"
    first = file.read_text().splitlines(keepends=True)
    file.write_text("".join(first[:4]))
    assert not look(study, tmp_path, Planned("slow", 0)).finished


def test_a_study_of_another_version_is_refused_by_every_command(tmp_path, capsys):
    (tmp_path / STUDY_FILE).write_text('{"version": 7}')
    for name in ("run", "status", "report", "export"):
        with pytest.raises(ValueError, match="is of version 7 of studies, and this"):
            command_line.main([name, "smoke", f"--root={tmp_path}"])


def test_a_run_that_was_cut_goes_on(tmp_path):
    folder = tmp_path / "prompt/seed0"
    folder.mkdir(parents=True)
    row = {"step": 0, "pass_rate": 0.0, "generated_tokens": 0, "compute_chip_hours": 0}
    (folder / "evals.jsonl").write_text(json.dumps(row) + "\n")
    assert not look(STUDY, tmp_path, Planned("prompt", 0)).finished
    run(tmp_path, command=training())
    steps = [
        json.loads(line)["step"]
        for line in (folder / "evals.jsonl").read_text().splitlines()
    ]
    assert steps == [0, 1, 2, 3, 4]


def test_a_run_that_a_signal_ended_is_told_and_resumed(tmp_path, capsys, monkeypatch):
    """Only the run got SIGTERM, the study did not: it has not failed, nor finished.

    A run that is done before the study's last step was not interrupted.
    """
    file = tmp_path / "two.py"
    file.write_text(
        "from scalerl_jax.study.design import Study\n"
        "def get_study():\n"
        f"    return Study(base={STUDY.base!r}, common={STUDY.common!r}, "
        f"arms={STUDY.arms!r}, seeds=(0,), steps=4)\n"
    )
    cut = f"import sys\nif 'token' in sys.argv[1]: sys.exit({PREEMPTED})\n"
    for script, last, status in (
        (cut + TRAIN, 4, PREEMPTED),
        (TRAIN, 3, 0),
        (TRAIN, 4, 0),
    ):

        def command(study, root, planned, script=script, last=str(last)):
            folder = str(root / planned.name)
            return [sys.executable, "-c", script, folder, last, "0", "nobody"]

        runner = functools.partial(Runner, command=command)
        monkeypatch.setattr(command_line, "Runner", runner)
        flags = ["run", str(file), f"--root={tmp_path / 'runs'}"]
        assert command_line.main(flags) == status
        told = "interrupted: 1 of 2 runs (token/seed0); the same command resumes them"
        assert (told in capsys.readouterr().err) == (status == PREEMPTED)


@pytest.mark.parametrize(
    "name, row",
    [
        ("evals.jsonl", {"step": 1, "pass_rate": 0.5}),
        ("evals.jsonl", {"step": "1"}),
        ("metrics.jsonl", {"step": None}),
        ("metrics.jsonl", {"step": math.inf}),
        ("metrics.jsonl", {"step": math.nan}),
        (
            "evals.jsonl",
            {"step": 1, "pass_rate": math.nan}
            | {"generated_tokens": 5, "compute_chip_hours": 0.1},
        ),
    ],
)
def test_a_row_that_says_nothing_of_its_run_is_named(tmp_path, name, row):
    file = tmp_path / "prompt/seed0" / name
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"{name} is broken"):
        status_text(STUDY, tmp_path)


def test_a_run_ends_with_its_budget_of_tokens(tmp_path):
    """It would sample for ever; evaluations come after 10, 20, 30, 40 tokens."""
    arms = {"slow": {}, "slow2": {"objective.aggregation": "token"}}
    study = dataclasses.replace(STUDY, arms=arms, seeds=(0,), steps=100, tokens=35.0)
    assert run(tmp_path, study, command=training(), jobs=2) == {}
    assert "2 of 2 runs finished" in status_text(study, tmp_path)
    assert why_ended(tmp_path / "slow/seed0") == "the study's budget is used"


# A run of twenty evaluations whose plateau is its arm's; it waits for ever at half.
CLIMB = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
top = 0.3 if "low" in str(folder) else 0.8
file = folder / "evals.jsonl"
done = len(file.read_text().splitlines()) if file.exists() else 0
for step in range(done, 21):
    while step == 11 and top == 0.3 and not (folder / "go_on").exists():
        time.sleep(0.05)
    rate = 0.1 + (top - 0.1) * (step ** 2 / (step ** 2 + 9)) + 0.004 * (-1) ** step
    row = {"step": step, "pass_rate": rate, "generated_tokens": 10.0 * step,
           "compute_chip_hours": step / 100}
    with file.open("a") as out:
        out.write(json.dumps(row) + "\\n")
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": step}) + "\\n")
"""


def test_a_run_that_cannot_reach_a_finished_one_is_stopped_and_goes_on(tmp_path):
    def command(study, root, planned):
        return [sys.executable, "-c", CLIMB, str(root / planned.name)]

    arms = {"high": {}, "low": {"objective.aggregation": "token"}}
    study = dataclasses.replace(STUDY, arms=arms, seeds=(0,), steps=20)
    assert run(tmp_path, study, command=command, prune=True) == {}
    low = look(study, tmp_path, Planned("low", 0))
    assert (low.behind, low.finished) == ("high", False)
    assert "stopped: it cannot reach high" in status_text(study, tmp_path)
    assert "it cannot reach high" in find(study, tmp_path).left_out["low/seed0"]
    steps = low.step
    assert run(tmp_path, study, command=command, prune=True) == {}
    assert look(study, tmp_path, Planned("low", 0)).step == steps < 20
    (tmp_path / "low/seed0/go_on").touch()
    assert run(tmp_path, study, command=command) == {}
    assert look(study, tmp_path, Planned("low", 0)).finished
    found = find(study, tmp_path)
    assert found.pruned.saved > 0.1 and not found.pruned.stopped[0].wrong
    assert "--prune would have stopped 1 of 2 runs" in describe(study, found)


def test_a_changed_base_is_refused_by_name(tmp_path):
    assert keep_record(STUDY, tmp_path) == []
    changed = dataclasses.replace(
        STUDY, common={"eval.every": 1, "batch.group_size": 4}
    )
    with pytest.raises(ValueError, match=r"batch\.group_size = 8, and is 4"):
        keep_record(changed, tmp_path)
    (warning,) = changed_arms(changed, tmp_path)  # of a report
    assert "batch.group_size = 8, and is 4" in warning
    assert changed_arms(STUDY, tmp_path) == []
    record = json.loads((tmp_path / STUDY_FILE).read_text())
    assert record["arms"]["token"]["objective.aggregation"] == "token"
    older = json.loads(json.dumps(record))
    for arm in older["arms"].values():
        del arm["batch.dynamic_sampling"]  # a setting that is newer
    (tmp_path / STUDY_FILE).write_text(json.dumps(older))
    assert keep_record(STUDY, tmp_path) == []
    (tmp_path / STUDY_FILE).write_text(json.dumps(older))
    used = {"eval.every": 1, "batch.dynamic_sampling": True}
    with pytest.raises(ValueError, match=r"dynamic_sampling = False, and is True"):
        keep_record(dataclasses.replace(STUDY, common=used), tmp_path)
    (tmp_path / STUDY_FILE).write_text(json.dumps(record | {"code": ["other"]}))
    (warning,) = keep_record(STUDY, tmp_path)
    assert "code has changed" in warning
    (tmp_path / STUDY_FILE).write_text(json.dumps(record | {"version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        keep_record(STUDY, tmp_path)
    for broken, why in (
        ({"arms": ["token"]}, "arms is no dict"),
        ({"arms": {"token": 1}}, "arm token is no dict"),
        ({"machines": "here"}, "machines is no dict"),
        ({"code": [1]}, "code holds more than text"),
    ):
        (tmp_path / STUDY_FILE).write_text(json.dumps(record | broken))
        with pytest.raises(ValueError, match=rf"study\.json is broken .*{why}.*repair"):
            keep_record(STUDY, tmp_path)
