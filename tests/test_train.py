"""Whole runs, small ones: what they leave behind, and how they stop."""

import contextlib
import json
import os
import signal
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_chat
import small_run
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scalerl_jax import demonstrations, main
from scalerl_jax.data.prompts import read_numbers
from scalerl_jax.environments import pool as verifier
from scalerl_jax.learner.checkpoint import UnsavedError
from scalerl_jax.learner.step import TrainState
from scalerl_jax.model.transformer import init_params, unstack_layers
from scalerl_jax.process.ending import is_explained
from scalerl_jax.run import metric_table
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.train import rescued, train
from scalerl_jax.wiring.learning import make_architecture

# whole runs
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_parts")]

STEP_NAMES = """
    step loss grad_norm entropy reward/mean pass_rate/mean group/zero_variance_share
    completion/mean_tokens completion/max_tokens completion/cut_off_share
    completion/interrupted_share ratio/mean ratio/max ratio/capped_share
    ratio/effective_sample_size mismatch/mean_abs mismatch/max_abs mismatch/kl
    staleness/mean staleness/max staleness/in_flight_mean staleness/in_flight_max
    staleness/queued_mean staleness/queued_max
    verifier/no_answer_share verifier/unparsable_share verifier/timeout_share
    verifier/error_share verifier/too_costly_share verifier/unjudged_share
    verifier/restarts
    train/tokens train/skipped_steps queue/buffered queue/running queue/dropped
    queue/bad_groups data/retired_prompts
    train/epoch train/learning_rate group/generated group/with_variance
    completion/limit_tokens
    time/step_s time/wait_s time/annotate_s time/train_s idle/all_share
    throughput/generated_tokens_per_s throughput/trained_tokens_per_s
    compute/startup_chip_s compute/generate_chip_s compute/train_chip_s
    compute/publish_chip_s compute/verify_chip_s compute/eval_chip_s
    compute/checkpoint_chip_s compute/idle_chip_s compute/wasted_chip_s
    compute/lost_chip_s compute/lost_tokens compute/lost_flops
    compute/charged_chip_hours compute/generated_tokens compute/wasted_tokens
    compute/train_tokens compute/train_flops compute/generate_flops
""".split()
EVAL_NAMES = """
    step policy_version compute_chip_hours train_tokens generated_tokens train_flops
    pass_rate pass_rate_se num_prompts samples_per_prompt cut_off_share
    interrupted_share no_answer_share unjudged_share too_costly_share
    unjudged_prompts mean_completion_tokens
""".split()
TASKS = {"chain_sum", "letter_counting", "spell_backward"}


def rollout_threads():
    return [each for each in threading.enumerate() if each.name == "rollout"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 steps with k = 2, and its settings."""
    directory = tmp_path_factory.mktemp("finished")
    config = small_run.make_config(
        {
            "train.num_steps": 6,
            "queue.max_staleness": 2,
            "seed": 3,
            "scaling.live": True,
            "tracking.profile_steps": (2, 3),
        }
    )
    outcome = main.run(config, str(directory))
    assert (outcome.policy_version, outcome.preempted) == (6, False)
    assert not rollout_threads()
    return directory, config


def test_a_run_says_what_it_was(finished):
    directory, config = finished
    record = json.loads((directory / "config.json").read_text())
    assert record["config"]["batch"]["group_size"] == config.batch.group_size
    assert record["seed"] == 3
    assert record["versions"].keys() >= {"python", "jax", "numpy", "reasoning_gym"}
    assert "git_revision" in record


def test_the_fit_beside_the_training_follows_the_evaluations(finished):
    directory, _ = finished
    events = EventAccumulator(str(directory / "tensorboard" / "scaling"))
    events.Reload()
    rows = (directory / "evals.jsonl").read_text().splitlines()
    rates = {row["step"]: row["pass_rate"] for row in map(json.loads, rows)}
    shown = events.Scalars("scaling/actual")
    assert shown
    assert all(each.value == pytest.approx(rates[each.step]) for each in shown)


def test_tensorboard_has_more_than_numbers(finished):
    directory, _ = finished
    board = directory / "tensorboard"
    assert len(list(board.glob("plugins/profile/*/*.xplane.pb"))) == 1
    events = plugin_event_accumulator.EventAccumulator(str(board))
    events.Reload()
    assert len(events.Tensors("completion/tokens")) == 6
    assert [each.step for each in events.Tensors("rollouts/0")] == [0, 2, 4, 6]
    assert events.PluginTagToContent("hparams")


def test_every_step_has_one_row_with_the_promised_names(finished):
    directory, _ = finished
    rows = small_run.rows(directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row.keys() >= set(STEP_NAMES)
        assert all(isinstance(value, int | float) for value in row.values()), row
    tasks = {name.partition("/")[2] for row in rows for name in row if "pass_" in name}
    assert tasks == {"mean"} | TASKS
    assert rows[-1]["compute/train_tokens"] == sum(row["train/tokens"] for row in rows)
    assert rows[0]["mismatch/mean_abs"] < 1e-4  # one version, two programs


def test_no_group_is_staler_than_the_bound(finished):
    directory, _ = finished
    assert all(row["staleness/max"] <= 2 for row in small_run.rows(directory))


def test_evaluations_come_when_due_with_the_promised_names(finished):
    directory, config = finished
    rows = small_run.rows(directory, "evals.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        assert row.keys() >= {*EVAL_NAMES, *(f"pass_rate/{task}" for task in TASKS)}
        assert row["policy_version"] == row["step"]
        assert (row["num_prompts"], row["samples_per_prompt"]) == (9, 1)
        # Three prompts of each task, one sample each: by hand from the tasks.
        by_task = [row[f"pass_rate/{task}"] for task in TASKS]
        assert row["pass_rate"] == pytest.approx(sum(by_task) / 3)
        p = row["pass_rate"]
        assert row["pass_rate_se"] == pytest.approx((p * (1 - p) / 8) ** 0.5)
    for name in ("compute_chip_hours", "train_tokens", "generated_tokens"):
        amounts = [row[name] for row in rows]
        assert amounts == sorted(amounts)
    # Before the first step: nothing is charged but a moment between two lines.
    assert rows[0]["generated_tokens"] == rows[0]["train_tokens"] == 0
    steps = {row["step"]: row for row in small_run.rows(directory)}
    for row in rows[1:]:
        step = steps[row["step"]]
        assert row["train_tokens"] == step["compute/train_tokens"]
        assert row["train_flops"] == step["compute/train_flops"]
        assert row["compute_chip_hours"] >= step["compute/charged_chip_hours"]


def test_rollouts_can_be_read(finished):
    directory, config = finished
    rows = small_run.rows(directory, "rollouts.jsonl")
    assert [row["step"] for row in rows] == [
        step for step in (0, 2, 4, 6) for _ in range(config.eval.logged_rollouts)
    ]
    assert {row["task"] for row in rows} == TASKS
    for row in rows:
        assert row["prompt"].endswith("<think>") and len(row["prompt"]) > 30
        assert row["cut_off"] or row["completion"].endswith("<eos>")
        if row["status"] == "correct":
            _, _, answer = row["completion"].rpartition("</think>")
            assert answer == f"{row['reference']}<eos>"


def test_tensorboard_shows_the_same_numbers(finished):
    directory, _ = finished
    events = plugin_event_accumulator.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    shown = [
        (event.step, event.tensor_proto.float_val[0])
        for event in events.Tensors("loss")
    ]
    expected = [(row["step"], row["loss"]) for row in small_run.rows(directory)]
    assert shown == expected
    assert [event.step for event in events.Tensors("eval/pass_rate")] == [0, 2, 4, 6]


def test_the_pages_have_all_files_and_numbers_of_a_run(finished):
    directory, _ = finished
    page = (small_run.ROOT / "docs" / "files.md").read_text()
    checkpoint = small_run.checkpoints(directory)[-1]
    for path in (*directory.iterdir(), *checkpoint.iterdir()):
        assert f"`{path.name}{'/' * path.is_dir()}`" in page, path
    events = EventAccumulator(str(directory / "tensorboard" / "scaling"))
    events.Reload()
    shown = set(events.Tags()["scalars"])
    assert shown and shown <= {metric.name for metric in metric_table.LIVE}


def test_a_finished_run_started_again_changes_nothing(finished):
    directory, config = finished
    names = ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl")
    before = [(directory / name).read_bytes() for name in names]
    assert [path.name for path in small_run.checkpoints(directory)] == [
        f"step_0000000{step}" for step in (2, 4, 6)
    ]
    assert main.run(config, str(directory)).policy_version == 6
    assert [(directory / name).read_bytes() for name in names] == before


def test_batched_mode_uses_a_phase_up_before_the_next(tmp_path):
    config = small_run.make_config(
        {
            "queue.mode": "batched",
            "queue.max_staleness": 2,
            "eval.every": 4,
            "sampler.top_p": 0.7,
            "objective.allow_sampling_filters": True,
        }
    )
    main.run(config, str(tmp_path))
    rows = small_run.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # k * N groups of one version, for k steps; less stale only after a skipped step.
    for row in rows:
        expected = (row["step"] - 1) % 2
        assert row["staleness/max"] <= expected
        assert row["staleness/max"] == expected or row["train/skipped_steps"]
        # A filter is in the ratios and is no mismatch.
        assert row["ratio/mean"] < 0.99 and row["mismatch/mean_abs"] < 1e-4


class TickingClock:
    """Time that passes by one second whenever somebody looks, and when told to."""

    def __init__(self):
        self.now, self._lock = 0, threading.Lock()

    def __call__(self):
        self.advance(1)
        return self.now

    def advance(self, seconds):
        with self._lock:
            self.now += seconds


class SlowSampler:
    """A sampler that takes its time between getting the params and using them."""

    def __init__(self, sampler):
        self._sampler = sampler

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def step(self):
        time.sleep(0.02)
        return self._sampler.step()


def test_compute_is_accounted_for_and_published_params_live_on(tmp_path):
    config = small_run.make_config({"queue.max_staleness": 8})
    clock = TickingClock()
    ledger = Ledger(pools={"all": 1}, chip="a chip", clock=clock)
    published = []
    with small_run.built(config, tmp_path, ledger=ledger) as run:
        started = 1  # what the clock said first
        first = unstack_layers(
            jax.device_get(run.state.params),
            make_architecture(config),
        )
        # The attribute is private: no setting makes a sampler slow.
        run.generators._driver.sampler = SlowSampler(run.generators._driver.sampler)
        evaluate, to_sampler = (
            run.generators.evaluator,
            run.learner.to_sampler,
        )

        def long_evaluation(params, **settings):
            clock.advance(1_000_000)
            return evaluate(params, **settings)

        def keep(params, version):
            sent = to_sampler(params, version)
            published.append(sent.params)
            return sent

        run.generators.evaluator, run.learner.to_sampler = (
            long_evaluation,
            keep,
        )
        train(config, run, tmp_path)
        report = ledger.report()
        ended = clock.now

    chip_s = {name: report[name] for name in report if name.endswith("_chip_s")}
    assert sum(chip_s.values()) == pytest.approx(ended - started, abs=1e-3)
    assert 3_000_000 <= chip_s["compute/eval_chip_s"] < 3_100_000
    charged_s = report["compute/charged_chip_hours"] * 3600
    assert charged_s < 100_000
    free = ("compute/startup_chip_s", "compute/eval_chip_s")
    assert charged_s == pytest.approx(
        sum(value for name, value in chip_s.items() if name not in free)
    )
    for row in small_run.rows(tmp_path, "evals.jsonl"):
        assert row["compute_chip_hours"] * 3600 < 100_000

    # The step donated the state of every version; its published copy is untouched.
    assert len(published) == 5
    same = jax.tree.map(np.array_equal, published[0], first)
    assert jax.tree.all(same)
    embeddings = [np.asarray(params["embedding"]).tobytes() for params in published]
    assert len(set(embeddings)) == 5


class SetRewards:
    """Rewards by a batch's place in the run, whatever the verifier said."""

    def __init__(self, assemble, *, equal):
        self._assemble, self._equal = assemble, equal
        self.batches = 0
        self.tokens = []
        self.state, self.complete = assemble.state, assemble.complete

    def __call__(self, groups, *, learner_version):
        self.batches += 1
        equal = self.batches in self._equal
        groups = [
            group.replace(
                rollouts=tuple(
                    rollout.replace(reward=1.0 if equal or place % 2 else -1.0)
                    for place, rollout in enumerate(group.rollouts)
                )
            )
            for group in groups
        ]
        self.tokens.append(
            sum(
                len(rollout.completion_tokens)
                for group in groups
                for rollout in group.rollouts
            )
        )
        return self._assemble(groups, learner_version=learner_version)


AWAY = """
    def score(prompt, completion, reference):
        if "many times does the letter" in prompt:
            raise OSError("the judge is away\\nfor long")
        return len(completion) % 7 / 6
"""


def test_a_run_whose_verifiers_fail_is_saved_and_stopped(tmp_path):
    file = tmp_path / "away.py"
    file.write_text(textwrap.dedent(AWAY))
    config = small_run.make_config(
        {
            "environment": f"{file}:score",
            "queue.max_staleness": 0,
            "train.num_steps": 1000,
            "train.max_skipped_steps": 100,
            "reward.max_unjudged_share": 0.05,
            "eval.sets": ("chain_sum",),
            "checkpoint.every": 1000,
            "eval.every": 1000,
            "eval.num_prompts": 3,
        }
    )
    with small_run.built(config, tmp_path) as run:
        with pytest.raises(RuntimeError) as failure:
            train(config, run, tmp_path)
    message = str(failure.value)
    assert message.startswith("verifiers failed on ")
    assert "of the last 10 batches, more than reward.max_unjudged_share = 0.05" in (
        message
    )
    assert f"{file}, line 4: OSError: the judge is away" in message
    assert "for long" not in message
    rows = small_run.rows(tmp_path)
    assert any(row["verifier/unjudged_share"] for row in rows)
    (checkpoint,) = small_run.checkpoints(tmp_path)
    assert checkpoint.name == f"step_{rows[-1]['step']:08d}"
    host = json.loads((checkpoint / "host.json").read_text())
    # More than 8 of the rollouts that were taken are in no prompt's history.
    recorded = sum(read_numbers(host["stream"]["rollouts"]))
    assert 0 < recorded < host["next_ticket"] * 4 - 8


def poison(step, calls):
    """A step whose gradient is not finite, at these calls (None: always)."""
    count = 0

    def poisoned(state, batch):
        nonlocal count
        count += 1
        if calls is None or count in calls:
            batch = batch.replace(advantages=batch.advantages * np.float32("nan"))
        return step(state, batch)

    return poisoned


def test_a_step_without_a_gradient_is_skipped_and_counted(tmp_path):
    config = small_run.make_config(
        {"train.num_steps": 2, "train.max_skipped_steps": 3, "eval.every": 2}
    )
    states = []
    with small_run.built(config, tmp_path) as run:
        # Batches 1 and 2 have no variance, the gradient of 4 and 5 is not finite.
        run.assemble = SetRewards(run.assemble, equal=(1, 2))
        step = poison(run.learner.train_step, calls=(2, 3))

        def watched(state, batch):
            before = jax.device_get(state)
            state, metrics = step(state, batch)
            states.append((before, jax.device_get(state), bool(metrics["skipped"])))
            return state, metrics

        run.learner.train_step = watched
        outcome = train(config, run, tmp_path)
        tokens = run.assemble.tokens

    assert outcome.policy_version == 2
    assert [skipped for *_, skipped in states] == [False, True, True, False]
    for before, after, skipped in states:
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), before, after)
        assert jax.tree.all(same) == skipped
    rows = small_run.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["train/skipped_steps"] for row in rows] == [2, 4]
    wasted = [sum(tokens[:2]), sum(tokens[:2]) + sum(tokens[3:5])]
    assert [row["compute/wasted_tokens"] for row in rows] == wasted
    # Six batches of four groups were used up, and no place was lost.
    host = json.loads((small_run.checkpoints(tmp_path)[-1] / "host.json").read_text())
    assert host["next_ticket"] == 6 * 4
    # Every group that was taken is in the prompts' history, the skipped ones too.
    assert sum(read_numbers(host["stream"]["rollouts"])) == 6 * 4 * 4
    assert host["running"] == host["in_flight"] == []


def test_steps_that_stay_not_finite_end_the_run_and_save_nothing(tmp_path, capsys):
    config = small_run.make_config({"train.max_skipped_steps": 2})
    with small_run.built(config, tmp_path) as run:
        run.assemble = SetRewards(run.assemble, equal=())
        run.learner.train_step = poison(run.learner.train_step, calls=(1,))
        # The second step has a good gradient, and moments that a device has spoiled.
        run.state = run.state.replace(
            opt_state=jax.tree.map(
                lambda leaf: leaf if leaf.ndim == 0 else leaf * np.float32("nan"),
                run.state.opt_state,
            )
        )
        with pytest.raises(RuntimeError) as failure:
            train(config, run, tmp_path)
        # A sampler whose logits are not finite ends a run whose state is not good.
        bad = FloatingPointError("sample 0 of prompt 3 failed: the logits")
        told = rescued(run, bad, lambda: pytest.fail("it is saved"))
    assert str(told).startswith("sample 0 of prompt 3 failed: the logits; the state of")
    assert "step 0 is therefore not saved" in str(told)
    message = str(failure.value)
    assert message.startswith("2 optimizer steps in a row were skipped")
    assert "train.max_skipped_steps = 2" in message
    assert "optimizer.learning_rate" in message
    assert "opt_state.1.0.mu.embedding of the train state was not finite" in message
    # The second look is at the batch as it was before it was spoiled.
    said = capsys.readouterr().err
    assert "gradient norm nan is not finite; computed again, all of it is fin" in said
    assert small_run.checkpoints(tmp_path) == small_run.rows(tmp_path) == []
    assert not rollout_threads()


def test_a_policy_that_never_gets_anything_right_ends_the_run(tmp_path, capsys):
    """And one that gives no answer, made for chats and asked otherwise, is told so."""
    settings = demonstrations.DemonstrationsConfig()
    backend = demonstrations.make_tokenizer()
    arch = demonstrations.make_architecture(settings, vocab_size=72)
    params = init_params(arch, jax.random.key(0), dtype=np.float32)
    state = TrainState(params=params, opt_state=None, policy_version=0)
    demonstrations.save(
        tmp_path / "random", state, config=settings, arch=arch, backend=backend, log=[]
    )
    (tmp_path / "random" / "chat_template.jinja").write_text(small_chat.SMOLLM2)
    config = small_run.make_config(
        {
            "data.answer_after": "[/THINK]",
            "model.checkpoint": str(tmp_path / "random"),
            "train.max_skipped_steps": 3,
            "eval.num_prompts": 3,
        }
    )
    with pytest.raises(RuntimeError) as failure:
        main.run(config, str(tmp_path / "run"))
    message = str(failure.value)
    assert message.startswith("3 optimizer steps in a row were skipped")
    assert "zero variance" in message and "data.tasks" in message
    assert "of 16 rollouts are cut off, 16 without an answer" in message
    told = "warning: no completion of the evaluation holds an answer: "
    said = capsys.readouterr().err
    assert f"{told}{tmp_path / 'random'} has a chat template" in said
    assert said.count("holds an answer") == 1
    assert not rollout_threads()


class ActingSampler(SlowSampler):
    """A sampler that does something at its first call; what, a test says."""

    def __init__(self, sampler, act):
        super().__init__(sampler)
        self._acts = [act]

    def step(self):
        if self._acts:
            self._acts.pop()()
        return self._sampler.step()


def end():
    """Tell this process that its machine is taken away."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_honoured_wherever_it_comes(tmp_path):
    """While the learner waits and in the checkpoint of that, and in two evaluations."""
    config = small_run.make_config(
        {
            "queue.max_staleness": 0,
            "train.num_steps": 2,
            "eval.every": 1,
            "checkpoint.every": 1000,
        }
    )

    def train_once(change=lambda run: None):
        with small_run.built(config, tmp_path) as run:
            change(run)
            outcome = train(config, run, tmp_path)
        steps = [row["step"] for row in small_run.rows(tmp_path)]
        evaluations = [row["step"] for row in small_run.rows(tmp_path, "evals.jsonl")]
        assert steps == list(range(1, outcome.policy_version + 1))
        newest = small_run.checkpoints(tmp_path)[-1].name
        assert newest == f"step_{outcome.policy_version:08d}"
        return outcome.policy_version, outcome.preempted, evaluations

    def in_sampling(run):
        def act():
            end()
            time.sleep(2.0)  # the learner looks every second

        run.generators._driver.sampler = ActingSampler(
            run.generators._driver.sampler, act
        )
        save = run.learner.checkpointer.save

        def ended(*args, **kwargs):
            end()
            save(*args, **kwargs)

        run.learner.checkpointer.save = ended

    def in_evaluation(at):
        def change(run):
            evaluate = run.generators.evaluator

            def ended(params, *, policy_version, stopped):
                if policy_version == at:
                    end()
                return evaluate(params, policy_version=policy_version, stopped=stopped)

            run.generators.evaluator = ended

        return change

    assert train_once(in_sampling) == (0, True, [0])
    assert train_once(in_evaluation(1)) == (1, True, [0])
    assert train_once(in_evaluation(2)) == (2, True, [0, 1])
    assert train_once() == (2, False, [0, 1, 2])


def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first save is not whole before the second step is on file.

    A failure of the machine loses no row before a checkpoint.
    """
    settings = {
        "queue.max_staleness": 0,
        "train.num_steps": 2,
        "checkpoint.every": 1,
        "eval.every": 1000,
        "eval.num_prompts": 3,
    }
    seen, synced, sync = [], [], MetricsWriter.sync

    def synced_by_the_loop(writer):
        if threading.current_thread() is threading.main_thread():
            synced.append(len(small_run.rows(tmp_path)))
        sync(writer)

    monkeypatch.setattr(MetricsWriter, "sync", synced_by_the_loop)

    def held(finalize):
        def last(folder):
            deadline = time.monotonic() + 120.0
            while len(small_run.rows(tmp_path)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            whole = small_run.checkpoints(tmp_path)
            seen.append((len(small_run.rows(tmp_path)), [each.name for each in whole]))
            finalize(folder)

        return last

    with small_run.built(small_run.make_config(settings), tmp_path) as run:
        files = run.learner.checkpointer._arrays
        files.finalize = held(files.finalize)
        assert train(small_run.make_config(settings), run, tmp_path).policy_version == 2
    assert seen == [(2, []), (2, ["step_00000001"])]
    assert synced == [1, 2, 2]
    assert [path.name for path in small_run.checkpoints(tmp_path)] == [
        "step_00000001",
        "step_00000002",
    ]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_own_error(tmp_path):
    settings = {
        "train.num_steps": 50,
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "eval.every": 1000,
        "eval.num_prompts": 3,
    }

    def full(folder):
        raise OSError(28, "No space left on device")

    with small_run.built(small_run.make_config(settings), tmp_path) as run:
        run.learner.checkpointer._arrays.finalize = full
        with pytest.raises(UnsavedError, match="step 1 to .*No space"):
            train(small_run.make_config(settings), run, tmp_path)
    assert not small_run.checkpoints(tmp_path)
    assert not rollout_threads()


SUICIDAL = """
    import os, pathlib

    if pathlib.Path({file!r}).exists():
        os._exit(5)

    from scalerl_jax.data.tasks import score
"""


LET_GO = threading.Event()  # a step that hangs


def fail(run, directory):
    raise ArithmeticError("the sampler has a bad number")


def starve(run, directory):
    run.generators._driver.sampler.step = lambda: time.sleep(0.01) or []


def hang(run, directory):
    run.generators._driver.sampler.step = lambda: LET_GO.wait(600.0) and []


def lose_the_verifiers(run, directory):
    (directory / "gone").touch()
    for worker in run.generators._episodes._verifier._workers:
        worker.process.kill()


@pytest.mark.parametrize(
    "act, words",
    [
        pytest.param(
            fail,
            "the sampling thread failed with ArithmeticError: the sampler has a bad",
            id="an error in the thread",
        ),
        pytest.param(
            starve,
            "no batch within queue.batch_timeout_s = 5.0: 0 of 4 groups at policy",
            id="a starved queue",
        ),
        pytest.param(
            hang,
            "no batch within queue.batch_timeout_s = 5.0: the sampling thread 'rollout'"
            " has been in one step since ",
            id="a step that hangs",
        ),
        pytest.param(
            lose_the_verifiers,
            "no verifier process can start: it ended with exit code 5 while",
            id="no verifiers",
        ),
    ],
)
def test_a_run_that_others_end_is_saved_and_goes_on(tmp_path, monkeypatch, act, words):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(verifier, "_BACKOFF_S", 0.001)
    source = textwrap.dedent(SUICIDAL).format(file=str(tmp_path / "gone"))
    (tmp_path / "suicidal.py").write_text(source)
    settings = {
        "queue.max_staleness": 0,
        "queue.batch_timeout_s": 5.0 if act in (starve, hang) else 3600.0,
        "train.num_steps": 1,
        "checkpoint.every": 1000,
        "eval.num_prompts": 3,
    }
    config = small_run.make_config(settings)
    with (
        small_run.built(config, tmp_path) as run,
        contextlib.closing(
            verifier.VerifierPool(score="suicidal:score", timeout_s=60.0)
        ) as pool,
    ):
        run.generators._episodes._verifier = (
            pool  # no setting names a verifier that fails
        )
        run.generators._driver.sampler = ActingSampler(
            run.generators._driver.sampler, lambda: act(run, tmp_path)
        )
        LET_GO.clear()
        with pytest.raises(RuntimeError) as failure:
            train(config, run, tmp_path)
        assert bool(rollout_threads()) == (act is hang)  # which nobody waits for
        LET_GO.set()
        for thread in rollout_threads():
            thread.join(60.0)
    message = str(failure.value)
    assert is_explained(failure.value) and message.startswith(words)
    assert message.endswith(
        "; the state of step 0 is saved; the same --workdir resumes from it"
    )
    assert not rollout_threads()
    (checkpoint,) = small_run.checkpoints(tmp_path)
    host = json.loads((checkpoint / "host.json").read_text())
    assert [each["ticket"] for each in host["in_flight"]] == [0, 1, 2, 3]
    config = small_run.make_config(settings | {"queue.batch_timeout_s": 3600.0})
    with small_run.built(config, tmp_path) as run:
        assert train(config, run, tmp_path).policy_version == 1
    assert [row["step"] for row in small_run.rows(tmp_path)] == [1]


def full_memory(*_, **__):
    """A program that asks for 256 TB."""
    too_much = jax.jit(lambda x: jnp.cumsum(jnp.full(1 << 46, 1.0) * x))
    return jax.block_until_ready(too_much(2.0))


def fill_step(run):
    run.learner.train_step = full_memory


def fill_publish(run):
    run.learner.to_sampler = full_memory


def fill_sampler(run):
    run.generators._driver.sampler = SlowSampler(run.generators._driver.sampler)
    run.generators._driver.sampler.step = full_memory


@pytest.mark.parametrize(
    "fill, words",
    [
        (fill_step, ("for the train step", "batch.rows_per_microbatch = 8")),
        (fill_publish, ("for publishing params", "generators.devices = 0")),
        (fill_sampler, ("for the sampler", "sampler.slots = 16")),
    ],
)
def test_a_full_memory_ends_the_run_with_what_to_change(tmp_path, fill, words):
    config = small_run.make_config({"eval.every": 1000})
    with small_run.built(config, tmp_path) as run:
        fill(run)
        with pytest.raises(RuntimeError) as failure:
            train(config, run, tmp_path)
    for word in ("not enough memory", "scalerl preflight", *words):
        assert word in str(failure.value)
    assert not rollout_threads()


def test_params_that_arrive_damaged_end_the_run(tmp_path):
    config = small_run.make_config({"eval.every": 1000, "checkpoint.every": 1000})
    with small_run.built(config, tmp_path) as run:
        to_sampler = run.learner.to_sampler

        def send(params, version):
            sent = to_sampler(params, version)
            damaged = sent.params | {"embedding": -sent.params["embedding"]}
            return sent.replace(params=damaged) if version == 2 else sent

        run.learner.to_sampler = send
        with pytest.raises(RuntimeError) as failure:
            train(config, run, tmp_path)
    message = str(failure.value)
    assert "version 2 did not reach the sampler whole" in message
    assert "embedding has checksum 0x" in message
    assert [row["step"] for row in small_run.rows(tmp_path)] == [1]
    assert not rollout_threads()


def test_a_learner_error_stops_the_worker(tmp_path):
    config = small_run.make_config({"train.num_steps": 1000, "eval.every": 1000})
    with small_run.built(config, tmp_path) as run:
        step, calls = run.learner.train_step, []

        def failing(state, batch):
            calls.append(1)
            if len(calls) == 2:
                assert rollout_threads()
                raise ArithmeticError("the learner is out of memory")
            return step(state, batch)

        run.learner.train_step = failing
        with pytest.raises(ArithmeticError, match="out of memory"):
            train(config, run, tmp_path)
    assert not rollout_threads()


def test_the_loop_learns(tmp_path):
    config = small_run.make_config(
        {
            "data.tasks": ("spell_backward",),
            "data.train_prompts": 400,
            "queue.max_staleness": 1,
            "train.num_steps": 8,
            "train.max_skipped_steps": 100,
            "eval.num_prompts": 60,
            "eval.every": 8,
            "checkpoint.every": 8,
        }
    )
    main.run(config, str(tmp_path))
    first, last = small_run.rows(tmp_path, "evals.jsonl")
    # Measured for three seeds: from 0.11 to 0.9 and more.
    assert last["pass_rate"] > first["pass_rate"] + 0.3
    rewards = [row["reward/mean"] for row in small_run.rows(tmp_path)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.5
