"""Runs that are killed, told to stop, or find a damaged checkpoint, and go on."""

import json
import os
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
    **small_run.OF_STATE,
}


def finish(process, *, status=0):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == status, errors
    return output, errors


def kill_in_the_midst(process, directory, *, after):
    """SIGKILL at a random moment once so many rows are written."""
    small_run.wait_for_rows(process, directory, after)
    time.sleep(random.uniform(0.0, 0.2))
    process.kill()
    process.communicate(timeout=60)


def end_after(process, line, number):
    """Send a signal to the whole group once this line is on stderr, as a terminal."""
    for each in process.stderr:
        if each == f"{line}\n":
            os.killpg(process.pid, number)
            return process.communicate(timeout=60)[0]
    raise AssertionError(f"it ended without {line!r}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase, number, status, said",
    [
        ("loading", signal.SIGINT, 130, "interrupted with nothing to save\n"),
        (
            *("compiling the train step", signal.SIGTERM, 75),
            "stopped by SIGTERM with nothing to save\n",
        ),
    ],
)
def test_signals_before_there_is_anything_to_save_end_a_run_at_once(
    tmp_path, phase, number, status, said
):
    process = small_run.start_main(tmp_path, SYNCHRONOUS, start_new_session=True)
    assert end_after(process, phase, number) == said
    assert process.returncode == status
    assert not small_run.checkpoints(tmp_path)


@pytest.mark.slow
def test_ctrl_c_while_a_run_is_imported_is_one_line(tmp_path):
    process = small_run.start(
        *("-X", "importtime", "-m", "scalerl_jax", "train"),
        *small_run.arguments(tmp_path),
        start_new_session=True,
    )
    for each in process.stderr:
        if each.endswith(" ml_collections\n"):
            os.killpg(process.pid, signal.SIGINT)
            break
    output, errors = process.communicate(timeout=60)
    assert output == "interrupted with nothing to save\n"
    assert "Traceback" not in errors
    assert process.returncode == 130


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A synchronous run that was never disturbed, and one that often was."""
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    directory = tmp_path_factory.mktemp("disturbed")

    def start(place, **options):
        return small_run.start_main(place, SYNCHRONOUS, **options)

    first = start(undisturbed)
    # Before there is any checkpoint: it must all come again.
    process = start(directory)
    small_run.wait_for_rows(process, directory, 1, "evals.jsonl")
    process.kill()
    process.communicate(timeout=60)
    finish(first)

    process = start(directory, start_new_session=True)
    small_run.wait_for_rows(process, directory, 3)
    os.killpg(process.pid, signal.SIGINT)  # verifiers are in groups of their own
    stopped = finish(process, status=130)
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
def test_ctrl_c_saves_and_says_in_one_line_how_to_go_on(interrupted):
    (output, errors), step, rows = interrupted["stopped"]
    assert output.startswith(f"interrupted after step {step}, which is saved")
    assert output.count("\n") == 1 and "Traceback" not in errors
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
    expected, found = (small_run.books(run)["assembler"] for run in runs)
    assert found == expected and expected["count"] > 0


KILLS = int(os.environ.get("SCALERL_JAX_KILLS", "2"))
PHASES = ("training", "evaluation", "save")
PIPELINE = {
    "queue.max_staleness": 8,
    "data.train_prompts": 200,
    "data.no_positive_resampling": False,  # so that ticket i has the i-th prompt
    "optimizer.learning_rate": 3e-5,
    "train.max_skipped_steps": 100,
    "train.num_steps": 12 + 5 * KILLS,
    "eval.every": 4,
    "checkpoint.every": 3,
}
RECORD = """
import json, sys
import small_run
from pathlib import Path
from scalerl_jax.train import train
from scalerl_jax.run import ledger

ledger.WRITE_EVERY_S = 0.02
directory = Path(sys.argv[1])
config = small_run.make_config(json.loads(sys.argv[2]))
with small_run.built(config, directory) as run, open(sys.argv[3], "w") as file:
    assemble = run.assemble

    def record(groups, *, learner_version):
        prompts = {
            group.ticket: [group.prompt.epoch, group.prompt.prompt_id]
            for group in groups
        }
        file.write(json.dumps([learner_version, list(prompts.items())]) + "\\n")
        file.flush()
        return assemble(groups, learner_version=learner_version)

    def marked(phase, call):
        def begin(*args, **kwargs):
            file.write(json.dumps(phase) + "\\n")
            file.flush()
            return call(*args, **kwargs)

        return begin

    for name in ("complete", "state", "restore"):
        setattr(record, name, getattr(assemble, name))
    run.assemble = record
    run.generators.evaluator = marked("evaluation", run.generators.evaluator)
    run.learner.checkpointer.save = marked("save", run.learner.checkpointer.save)
    train(config, run, directory)
"""


def start_recording(directory, record):
    """A run that writes down which groups each of its batches holds."""
    return small_run.start(
        *("-c", RECORD, directory, json.dumps(PIPELINE), record),
        environment={"PYTHONPATH": str(small_run.ROOT / "tests")},
    )


def recorded(path):
    lines = [line for line in path.read_text().splitlines(True) if line[-1] == "\n"]
    return [json.loads(line) for line in lines if line[0] == "["]


def kill_in_a(phase, process, directory, record):
    """SIGKILL at a random moment of a phase, after a few more steps."""
    begun = len(small_run.rows(directory))
    small_run.wait_for_rows(process, directory, begun + random.randint(1, 3))
    mark = json.dumps(phase)
    marks = record.read_text().count(mark)
    while phase != "training" and record.read_text().count(mark) == marks:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(random.uniform(0.0, 0.5))
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate(timeout=60)


def lost(saved, spent):
    """Chip-seconds and generated tokens that a kill undid, those of others added."""
    undone = ("generate", "train", "publish", "verify", "idle", "lost")
    more_s = sum(spent["chip_s"][name] - saved["chip_s"][name] for name in undone)
    counts = ("generated_tokens", "lost_tokens")
    more = sum(spent["counts"][name] - saved["counts"][name] for name in counts)
    return pytest.approx(
        {
            "chip_s": saved["chip_s"]["lost"] + max(more_s, 0.0),
            "tokens": saved["counts"]["lost_tokens"] + max(more, 0),
        },
        abs=1e-6,
    )


def after_a_kill(directory, batches, expected, *, before):
    """Step, batches used and what is lost, of the checkpoint that is gone on from.

    It can be the one of `before`, if the kill came before the next one was whole.
    """
    checkpoints = small_run.checkpoints(directory)
    spent = json.loads((directory / "ledger.json").read_text())
    if not checkpoints:
        nothing = {kind: dict.fromkeys(spent[kind], 0) for kind in ("chip_s", "counts")}
        return 0, [], lost(nothing, spent), spent
    host = json.loads((checkpoints[-1] / "host.json").read_text())
    groups = json.loads((checkpoints[-1] / "groups.json").read_text())
    step = int(checkpoints[-1].name.removeprefix("step_"))
    batches = [batch for batch in batches if batch[0] < step]
    running = [entry["ticket"] for entry in host["in_flight"]]
    assert running == [ticket for ticket, _ in host["running"]]
    tickets = [ticket for _, taken in batches for ticket, _ in taken]
    tickets += [row["ticket"] for row in groups] + running
    assert sorted(tickets) == list(range(host["next_ticket"]))
    saved = host["ledger"]
    if step > before:
        assert expected == {
            "chip_s": saved["chip_s"]["lost"],
            "tokens": saved["counts"]["lost_tokens"],
        }
    return step, batches, lost(saved, spent), spent


@pytest.mark.slow
@pytest.mark.timeout(600 + 120 * KILLS)
def test_in_a_pipeline_no_ticket_is_lost_or_doubled(tmp_path):
    """Killed KILLS times: the tickets and the ledger of every checkpoint add up."""
    directory, record = tmp_path / "run", tmp_path / "record"
    directory.mkdir()
    phases = random.sample(PHASES, 3) * KILLS
    step, batches, expected = 0, [], {"chip_s": 0.0, "tokens": 0}
    spent = None
    for phase in phases[:KILLS]:
        process = start_recording(directory, record)
        kill_in_a(phase, process, directory, record)
        batches += recorded(record)
        before = step
        step, batches, expected, spent = after_a_kill(
            directory, batches, expected, before=before
        )
        assert step >= before

    finish(start_recording(directory, record))
    rows, num_steps = small_run.rows(directory), PIPELINE["train.num_steps"]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    for row in rows[step:]:
        assert expected == {
            "chip_s": row["compute/lost_chip_s"],
            "tokens": row["compute/lost_tokens"],
        }
    hours = [row["compute/charged_chip_hours"] for row in rows]
    assert hours == sorted(hours)
    free = ("startup", "eval")
    charged = sum(value for name, value in spent["chip_s"].items() if name not in free)
    assert hours[step] >= charged / 3600
    evaluations = [row["step"] for row in small_run.rows(directory, "evals.jsonl")]
    assert evaluations == [*range(0, num_steps, 4), num_steps]

    batches += recorded(record)
    assert sorted({version for version, _ in batches}) == list(range(num_steps))
    prompts = dict(pair for _, groups in batches for pair in groups)
    assert len(prompts) == sum(len(groups) for _, groups in batches)  # none twice
    assert sorted(prompts) == list(range(4 * len(batches)))

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
