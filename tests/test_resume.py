"""Runs that are killed, told to stop, or find a damaged checkpoint, and go on."""

import json
import random
import signal
import time

import pytest
import small_run

from scalerl_jax.data.prompts import PromptStream, build_prompts
from scalerl_jax.data.questions import Question

SYNCHRONOUS = {
    "queue.max_staleness": 0,
    # Three of a batch's four groups find room at once, and the data come twice.
    "sampler.slots": 12,
    "data.train_prompts": 30,
    "optimizer.learning_rate": 3e-5,  # or it soon knows all of so few prompts
    "train.max_skipped_steps": 100,
    "train.num_steps": 12,
    "eval.every": 3,
}


def finish(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output, errors


def kill_in_the_midst(process, directory, *, after):
    """SIGKILL at a random moment once so many rows are written."""
    small_run.wait_for_rows(process, directory, after)
    time.sleep(random.uniform(0.0, 0.2))
    process.kill()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, program_cache):
    """A synchronous run that was never disturbed, and one that often was."""
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    directory = tmp_path_factory.mktemp("disturbed")

    def start(place):
        return small_run.start_main(place, SYNCHRONOUS, program_cache)

    first = start(undisturbed)
    # Before there is any checkpoint: it must all come again.
    process = start(directory)
    small_run.wait_for_rows(process, directory, 1, "evals.jsonl")
    process.kill()
    process.communicate(timeout=60)
    finish(first)

    process = start(directory)
    small_run.wait_for_rows(process, directory, 3)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    stopped_at = int(small_run.checkpoints(directory)[-1].name.removeprefix("step_"))
    rows_then = small_run.rows(directory)

    process = start(directory)
    kill_in_the_midst(process, directory, after=random.randint(6, 9))
    newest = small_run.checkpoints(directory)[-1]
    host = newest / "host.json"
    host.write_bytes(host.read_bytes()[:-100])
    resumed = finish(start(directory))
    return {
        "undisturbed": undisturbed,
        "disturbed": directory,
        "stopped": (stopped, stopped_at, rows_then),
        "damaged": newest,
        "resumed": resumed,
    }


@pytest.mark.slow
def test_sigterm_saves_and_ends_well(interrupted):
    (output, _), step, rows = interrupted["stopped"]
    assert output.startswith(f"stopped by SIGTERM after step {step}:")
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert step < SYNCHRONOUS["train.num_steps"]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(interrupted):
    output, errors = interrupted["resumed"]
    newest = interrupted["damaged"]
    assert f"checkpoint {newest} is not used: host.json has" in errors
    assert "finished after step 12" in output
    damaged = int(newest.name.removeprefix("step_"))
    (resumed,) = [line for line in errors.splitlines() if line.startswith("resumed")]
    assert int(resumed.removeprefix("resumed after step ")) < damaged


@pytest.mark.slow
def test_a_synchronous_run_goes_on_bit_for_bit(interrupted):
    runs = [interrupted[name] for name in ("undisturbed", "disturbed")]
    expected, found = (small_run.rows(run) for run in runs)
    assert [row["step"] for row in found] == list(range(1, 13))
    names = ("loss", "grad_norm", "reward/mean", "entropy", "ratio/mean")
    counts = (
        "compute/generated_tokens",
        "compute/train_tokens",
        "data/retired_prompts",
    )
    for before, after in zip(expected, found, strict=True):
        for name in names:
            assert before[name] == after[name], (before["step"], name)
        assert before["staleness/max"] == after["staleness/max"] == 0
    assert [expected[-1][name] for name in counts[1:]] == [
        found[-1][name] for name in counts[1:]
    ]

    expected, found = (small_run.rows(run, "evals.jsonl") for run in runs)
    assert [row["step"] for row in found] == [0, 3, 6, 9, 12]
    for before, after in zip(expected, found, strict=True):
        for name in ("pass_rate", "mean_completion_tokens", "mismatch/mean_abs"):
            assert before[name] == after[name], (before["step"], name)
    expected, found = (small_run.rows(run, "rollouts.jsonl") for run in runs)
    assert expected == found

    expected, found = (
        small_run.saved_arrays(small_run.checkpoints(run)[-1]) for run in runs
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.tobytes() == found[name].tobytes(), name


PIPELINE = {
    "queue.max_staleness": 8,
    "data.train_prompts": 200,
    "data.no_positive_resampling": False,  # so that ticket i has the i-th prompt
    "optimizer.learning_rate": 3e-5,
    "train.max_skipped_steps": 100,
    "train.num_steps": 16,
    "eval.every": 16,
    "checkpoint.every": 3,
}
RECORD = """
import json, sys
import small_run
from pathlib import Path
from scalerl_jax.train import train
from scalerl_jax.utils import ledger_file

ledger_file.WRITE_EVERY_S = 0.02
directory = Path(sys.argv[1])
config = small_run.make_config(json.loads(sys.argv[2]))
with small_run.built(config, directory) as parts, open(sys.argv[3], "w") as file:
    assemble = parts.assemble

    def record(groups, *, learner_version):
        prompts = {
            group.ticket: [group.prompt.epoch, group.prompt.prompt_id]
            for group in groups
        }
        file.write(json.dumps([learner_version, list(prompts.items())]) + "\\n")
        file.flush()
        return assemble(groups, learner_version=learner_version)

    record.state, record.restore = assemble.state, assemble.restore
    parts.assemble = record
    train(config, parts, directory)
"""


def start_recording(directory, record, program_cache):
    """A run that writes down which groups each of its batches holds."""
    return small_run.start(
        *("-c", RECORD, directory, json.dumps(PIPELINE), record),
        environment={**program_cache, "PYTHONPATH": str(small_run.ROOT / "tests")},
    )


def recorded(path):
    lines = [line for line in path.read_text().splitlines(True) if line[-1] == "\n"]
    return [json.loads(line) for line in lines]


def check_what_was_lost(rows, saved, spent, *, after):
    """What a run had on file when it was killed is paid for; the axis has no gap."""
    undone = ("generate", "train", "publish", "verify", "idle")
    lost = sum(spent["chip_s"][name] - saved["chip_s"][name] for name in undone)
    for row in rows:
        expected = max(lost, 0.0) if row["step"] > after else 0.0
        assert row["compute/lost_chip_s"] == pytest.approx(expected, abs=1e-6)
    hours = [row["compute/charged_chip_hours"] for row in rows]
    assert hours == sorted(hours)
    free = ("startup", "eval")
    charged = sum(value for name, value in spent["chip_s"].items() if name not in free)
    assert hours[after] >= charged / 3600
    made = spent["counts"]["generated_tokens"] - saved["counts"]["generated_tokens"]
    assert rows[-1]["compute/lost_tokens"] == max(made, 0)


@pytest.mark.slow
def test_in_a_pipeline_no_ticket_is_lost_or_doubled(tmp_path, program_cache):
    directory, before, after = tmp_path / "run", tmp_path / "1", tmp_path / "2"
    directory.mkdir()
    process = start_recording(directory, before, program_cache)
    kill_in_the_midst(process, directory, after=random.randint(4, 12))
    spent = json.loads((directory / "ledger.json").read_text())

    newest = small_run.checkpoints(directory)[-1]
    step = int(newest.name.removeprefix("step_"))
    host = json.loads((newest / "host.json").read_text())
    consumed = [
        ticket
        for version, groups in recorded(before)
        if version < step
        for ticket, _ in groups
    ]
    buffered = [
        row["ticket"] for row in json.loads((newest / "groups.json").read_text())
    ]
    running = [entry["ticket"] for entry in host["in_flight"]]
    assert running == [ticket for ticket, _ in host["running"]]
    assert sorted([*consumed, *buffered, *running]) == list(range(host["next_ticket"]))

    finish(start_recording(directory, after, program_cache))
    check_what_was_lost(small_run.rows(directory), host["ledger"], spent, after=step)
    in_flight = sum(entry["tokens"] for entry in host["in_flight"])
    wasted = small_run.rows(directory)[step]["compute/wasted_tokens"]
    assert wasted >= host["ledger"]["counts"]["wasted_tokens"] + in_flight
    batches = [batch for batch in recorded(before) if batch[0] < step]
    batches += recorded(after)
    assert [row["step"] for row in small_run.rows(directory)] == list(range(1, 17))
    assert sorted({version for version, _ in batches}) == list(range(16))
    prompts = dict(pair for _, groups in batches for pair in groups)
    assert len(prompts) == sum(len(groups) for _, groups in batches)  # none twice
    assert sorted(prompts) == list(range(4 * len(batches)))
    assert host["next_ticket"] <= len(prompts)

    # Each ticket has the prompt whose turn it was.
    question = Question(task="any", text="any", reference={})
    prompts_in_turn = build_prompts(
        [question] * 200,
        encode=lambda text: [1],
        render=lambda question: question.text,
        max_prompt_tokens=1,
    )
    stream = PromptStream(prompts_in_turn, seed=0, max_pass_rate=None)
    drawn = [stream.next() for _ in prompts]
    assert [prompts[ticket] for ticket in sorted(prompts)] == [
        [prompt.epoch, prompt.prompt_id] for prompt in drawn
    ]
