"""Exit statuses and what becomes of them, with commands that end as they are told."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import small_bucket
import small_run

from scalerl_jax.launch.outcome import (
    FILE,
    Outcome,
    parse_outcome,
    read_outcome,
    write_outcome,
)
from scalerl_jax.launch.supervisor import Rules, Supervisor, save_seconds

RULES = Rules(failures=3, pause_s=0.01)
# Ends with the statuses that it is given, one at each start.
ENDING = """
import pathlib, sys
file = pathlib.Path(sys.argv[1])
statuses = file.read_text().split()
file.write_text(" ".join(statuses[1:]))
sys.stderr.write("error: out of luck\\n" if statuses[0] != "0" else "all is well\\n")
sys.exit(int(statuses[0]))
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Run a command with these statuses; return status, outcome and how often."""
    monkeypatch.setattr("scalerl_jax.launch.supervisor._AGAIN_S", 0.01)

    def run(statuses, *, rules=RULES, **options):
        file = tmp_path / "statuses"
        file.write_text(" ".join(map(str, statuses)))
        command = [sys.executable, "-c", ENDING, str(file)]
        supervisor = Supervisor(command, str(tmp_path / "run"), rules=rules, **options)
        status = supervisor.run()
        left = len(file.read_text().split())
        return status, read_outcome(str(tmp_path / "run")), len(statuses) - left

    return run


@pytest.mark.parametrize(
    "statuses, status, state, starts",
    [
        pytest.param([0, 9], 0, "done", 1, id="done"),
        pytest.param([2, 0], 2, "mistake", 1, id="a mistake is never tried again"),
        pytest.param([75, 75, 75, 75, 75, 0], 0, "done", 6, id="preemptions: no limit"),
        pytest.param([1, 1, 1, 0], 0, "done", 4, id="as many failures as allowed"),
        pytest.param([1, 1, 139, 1, 0], 1, "failed", 4, id="one too many"),
        pytest.param([1, 1, 75, 1, 1, 0], 1, "failed", 5, id="75 is no success"),
    ],
)
def test_a_command_is_started_again_by_its_status(
    supervise, statuses, status, state, starts
):
    found, outcome, started = supervise(statuses)
    assert (found, outcome.state, started) == (status, state, starts)
    assert outcome.attempts == starts
    assert outcome.preemptions == statuses[:starts].count(75)
    assert outcome.said == ("error: out of luck" if status else "")


def test_failures_count_in_a_row_of_short_attempts_only(supervise):
    rules = Rules(failures=1, pause_s=0.01, healthy_s=0.0)
    assert supervise([1, 1, 1, 1, 0], rules=rules)[:2][0] == 0


def test_a_finished_run_is_not_started_again_but_another_command_is(
    supervise, tmp_path, capfd
):
    assert supervise([0, 0])[0] == 0
    status, outcome, starts = supervise([0])
    assert (status, starts, outcome.attempts) == (0, 0, 1)
    assert "was finished at" in capfd.readouterr().err
    done = read_outcome(str(tmp_path / "run"))
    write_outcome(str(tmp_path / "run"), Outcome(**{**vars(done), "command": ("x",)}))
    assert supervise([0])[2] == 1


@pytest.mark.parametrize("follower", [False, True])
def test_an_outcome_that_cannot_be_read_does_not_end_a_run(
    supervise, tmp_path, monkeypatch, capfd, follower
):
    write_outcome(str(tmp_path / "run"), Outcome(state="done", command=("x",)))
    failures = [TimeoutError("no answer"), ValueError("cannot be used")]

    def read(directory):
        if failures:
            raise failures.pop()
        return read_outcome(directory)

    monkeypatch.setattr("scalerl_jax.launch.supervisor.read_outcome", read)
    assert supervise([0, 0, 0, 0], follower=follower)[::2] == (0, 3 if follower else 1)
    assert "the run's outcome cannot be read: " in capfd.readouterr().err


def test_a_follower_joins_again_until_the_head_says_that_the_run_is_over(
    supervise, tmp_path, monkeypatch
):
    directory = str(tmp_path / "run")
    running = Outcome(state="running", command=("x",))
    answers = [running, running, Outcome(state="done", command=("x",))]
    write_outcome(directory, running)
    monkeypatch.setattr(
        "scalerl_jax.launch.supervisor.read_outcome", lambda _: answers.pop(0)
    )
    status, _, starts = supervise([0, 0, 0, 0], follower=True)
    assert (status, starts, answers) == (0, 3, [])
    assert read_outcome(directory) == running  # it is the head's to write


def test_what_cannot_be_started_is_tried_again_and_told(tmp_path, capfd):
    supervisor = Supervisor(["/no/such/command"], str(tmp_path), rules=RULES)
    assert supervisor.run() == 1
    assert "/no/such/command cannot be started" in capfd.readouterr().err
    assert read_outcome(str(tmp_path)).state == "failed"


SAVING = """
import signal, sys, time
def save(*_):
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "code, status, within_s",
    [
        pytest.param(SAVING, 75, 20, id="it saves"),
        pytest.param(
            SAVING.replace("time.sleep(0.2)", "time.sleep(60)"), 75, 40, id="too late"
        ),
    ],
)
def test_sigterm_is_handed_on_and_nothing_is_started_again(
    tmp_path, code, status, within_s
):
    code = f"""
from scalerl_jax.launch import supervisor
import sys
rules = supervisor.Rules(grace_s=1.0)
command = [sys.executable, "-c", {code!r}]
sys.exit(supervisor.supervise(command, {str(tmp_path)!r}, rules=rules))
"""
    process = small_run.start("-c", code)
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=within_s)
    assert process.returncode == status, errors
    assert time.monotonic() - began < within_s
    outcome = read_outcome(str(tmp_path))
    assert (outcome.state, outcome.attempts) == ("preempted", 1)
    assert "this machine is being stopped" in errors


def test_the_command_line_has_the_time_to_save(tmp_path):
    process = small_run.start(
        *("-m", "scalerl_jax.launch", "supervise", f"--workdir={tmp_path}"),
        *("--grace-s=0.5", "--", sys.executable, "-c"),
        SAVING.replace("time.sleep(0.2)", "time.sleep(60)"),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=25)
    assert process.returncode == 75 and "ended by SIGKILL" in errors, errors


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_a_run_does_not_outlive_a_supervisor_that_is_killed(tmp_path):
    process = small_run.start(
        *("-m", "scalerl_jax.launch", "supervise", f"--workdir={tmp_path}"),
        *("--", sys.executable, "-c"),
        SAVING.replace("time.sleep(0.2)", "print('saved', flush=True)"),
    )
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert process.communicate(timeout=25)[0] == "saved\n"


def test_the_command_line_has_the_statuses(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scalerl_jax.launch", "supervise"),
            *(f"--workdir={tmp_path}", "--", sys.executable, "-c", "exit(2)"),
        ],
        env=os.environ | {"PYTHONPATH": str(small_run.ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "a mistake that a restart cannot fix" in done.stderr
    assert json.loads((tmp_path / FILE).read_text())["state"] == "mistake"


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    code = "import sys; [print('x' * 4096, file=sys.stderr) for _ in range(100)]"
    with open("/dev/full", "w") as full:
        subprocess.run(
            [
                *(sys.executable, "-m", "scalerl_jax.launch", "supervise"),
                *("--failures=0", f"--workdir={tmp_path}"),
                *("--", sys.executable, "-c", code),
            ],
            env=os.environ | {"PYTHONPATH": str(small_run.ROOT)},
            stderr=full,
        )
    assert read_outcome(str(tmp_path)).state == "done"


def test_pauses_end_growing_however_many_failures_are_allowed():
    supervisor = Supervisor(["x"], "x", rules=Rules(failures=5000))
    supervisor._failures = 4000
    assert supervisor._after(1, "attempt", lasted_s=1.0) == 600.0


@pytest.mark.parametrize("text", [None, "", "no json", "[]", '{"state": "done"}'])
def test_a_file_that_says_nothing_is_no_outcome(text):
    assert parse_outcome(text) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "finished"},
        {"state": ["done"]},
        {"command": "train"},
        {"command": ["train", 1]},
        {"attempts": "3"},
        {"preemptions": None},
        {"status": 1.0},
        {"said": None},
        {"at": 1764326262},
    ],
    ids=str,
)
def test_a_file_with_a_value_of_another_kind_is_no_outcome(wrong):
    good = Outcome(state="failed", command=("train",), status=1, attempts=3)
    assert parse_outcome(good.to_json()) == good
    values = json.loads(good.to_json()) | wrong
    assert parse_outcome(json.dumps(values)) is None


def test_a_save_that_takes_longer_than_sigterm_leaves_is_told(
    supervise, tmp_path, capfd
):
    newest = tmp_path / "run" / "checkpoints" / "step_00000020"
    newest.mkdir(parents=True)
    for name, at in (("arrays", 1000.0), ("manifest.json", 1045.0)):
        (newest / name).touch()
        os.utime(newest / name, (at, at))
    unfinished = newest.with_name("step_00000030")
    unfinished.mkdir()
    (unfinished / "arrays").touch()
    assert supervise([0])[0] == 0
    said = capfd.readouterr().err
    assert "the last checkpoint took 45 s to write, and SIGTERM leaves 30 s" in said
    supervise([0], rules=Rules(grace_s=60.0))
    assert "to write" not in capfd.readouterr().err


@small_bucket.NEEDS_EXTRA
def test_so_is_one_into_a_bucket_by_the_times_of_its_objects():
    bucket = small_bucket.empty()
    assert save_seconds("gs://bucket/runs/x") is None
    for step, name, day in (
        *((10, "arrays", 1), (10, "manifest.json", 9)),
        *((20, "state/a", 10), (20, "state/b", 11), (20, "manifest.json", 12)),
        (30, "arrays", 20),  # it is being written, or was broken off
    ):
        object = f"runs/x/checkpoints/step_{step:08d}/{name}"
        bucket.write(object, b"")
        bucket.days[object] = day
    assert save_seconds("gs://bucket/runs/x") == 2 * 24 * 3600.0
