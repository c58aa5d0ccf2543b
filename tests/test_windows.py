"""Whole runs of windows with several steps, with refills, stages and a curriculum."""

import dataclasses
import os
import signal

import jax
import pytest
import small_run

from scalerl_jax import main
from scalerl_jax.config.resumption import free_settings
from scalerl_jax.data.prompts import read_numbers
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.train import train
from scalerl_jax.wiring import make_architecture
from scalerl_jax.wiring.sampling import make_engine, make_tokenizer

# whole runs
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_parts")]

SYNCHRONOUS = {
    "batch.epochs": 2,
    "queue.max_staleness": 1,
    "train.max_skipped_steps": 100,
    "data.order": "progressive",
    "data.difficulty": "measured",
    "data.open_share": 0.5,
    "data.open_steps": 6,
    "data.train_prompts": 16,  # so that the second epoch, by difficulty, comes soon
    "sampler.length_stages": ((0, 40), (4, 64)),
    "optimizer.schedule": "cosine",
    "optimizer.decay_steps": 12,
    "optimizer.final_share": 0.5,
    "optimizer.learning_rate": 1e-4,
    "train.num_steps": 6,
    "eval.every": 3,
    "checkpoint.every": 99,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was never disturbed."""
    directory = tmp_path_factory.mktemp("finished")
    config = small_run.make_config(SYNCHRONOUS)
    assert main.run(config, str(directory)).policy_version == 6
    return directory


def test_every_window_is_passed_twice_and_never_staler_than_its_epochs(finished):
    rows = small_run.rows(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/epoch"] for row in rows] == [0, 1] * 3
    assert [row["staleness/max"] for row in rows] == [0, 1] * 3
    # On policy in the first epoch, and not any more in the second.
    for row in rows:
        on_policy = abs(row["ratio/mean"] - 1.0) < 1e-5
        assert on_policy == (row["train/epoch"] == 0)
    # In the second epoch the same completions are trained on.
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        for name in ("train/tokens", "reward/mean", "completion/mean_tokens"):
            assert first[name] == second[name]


def test_evaluations_come_when_due_inside_a_window_too(finished):
    rows = small_run.rows(finished, "evals.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 6]


def test_the_length_limit_grows_at_its_step(finished):
    rows = small_run.rows(finished)
    assert [row["completion/limit_tokens"] for row in rows] == [40] * 4 + [64] * 2
    for row in rows:
        assert row["completion/max_tokens"] <= row["completion/limit_tokens"]


def test_the_learning_rate_is_in_the_metrics(finished):
    rates = [row["train/learning_rate"] for row in small_run.rows(finished)]
    # Two steps of warm-up, and half of a cosine to 0.75 at step 6 of 12.
    assert rates[0] == pytest.approx(0.5e-4)
    assert rates[3] == pytest.approx(1e-4 * (0.75 + 0.25 * 0.5**0.5))


def test_a_window_is_finished_before_a_sigterm_and_goes_on_bit_for_bit(
    finished, tmp_path
):
    config = small_run.make_config(SYNCHRONOUS)
    calls = []
    with small_run.built(config, tmp_path) as run:
        step = run.learner.train_step

        def told_to_stop(state, batch):
            calls.append(1)
            if len(calls) == 3:  # the first of the second window
                os.kill(os.getpid(), signal.SIGTERM)
            return step(state, batch)

        run.learner.train_step = told_to_stop
        outcome = train(config, run, tmp_path)
    assert (outcome.policy_version, outcome.preempted) == (4, True)
    with small_run.built(config, tmp_path) as run:
        assert train(config, run, tmp_path).policy_version == 6

    # A mismatch is as last measured, which the resumption has done.
    others = "time/ idle/ throughput/ compute/ sampler/ queue/ mismatch/".split()
    for before, after in zip(
        small_run.rows(finished), small_run.rows(tmp_path), strict=True
    ):
        for name, value in before.items():
            if not name.startswith(tuple(others)):
                assert after[name] == value, (before["step"], name)
    expected, found = (
        small_run.saved_arrays(small_run.checkpoints(run)[-1])
        for run in (finished, tmp_path)
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.tobytes() == found[name].tobytes(), name


def test_batches_of_a_window_are_all_passed_before_the_next_epoch(tmp_path):
    """Four steps on two batches of one version, then four more."""
    config = small_run.make_config(
        {
            "queue.mode": "batched",
            "queue.max_staleness": 4,
            "batch.epochs": 2,
            "batch.dynamic_sampling": True,
            "train.num_steps": 8,
            "eval.every": 8,
            "checkpoint.every": 3,
        }
    )
    annotated = []
    with small_run.built(config, tmp_path) as run:
        annotate = run.learner.annotate_window

        def watched(state, batches):
            annotated.append((int(state.policy_version), len(batches)))
            return annotate(state, batches)

        run.learner.annotate_window = watched
        train(config, run, tmp_path)
    assert annotated == [(0, 2), (4, 2)]
    rows = small_run.rows(tmp_path)
    assert [row["train/epoch"] for row in rows] == [0, 0, 1, 1] * 2
    assert [row["staleness/max"] for row in rows] == [0, 1, 2, 3] * 2
    for name in ("time/wait_s", "time/annotate_s"):  # only before a window's first step
        assert [row[name] > 0 for row in rows] == [True, False, False, False] * 2
    for start in (0, 4):
        tokens = [row["train/tokens"] for row in rows[start : start + 4]]
        assert sorted(tokens[:2]) == sorted(tokens[2:])
    # Step 3 is inside the first window, step 6 inside the second.
    names = [path.name for path in small_run.checkpoints(tmp_path)]
    assert names == ["step_00000004", "step_00000008"]


@pytest.mark.slow
def test_rollouts_that_only_a_later_pass_trains_on_are_kept_too(tmp_path):
    config = small_run.make_config(
        {
            "queue.max_staleness": 1,
            "batch.epochs": 2,
            "train.num_steps": 3,
            "eval.every": 1000,
            "tracking.train_rollouts": True,
        }
    )
    faults = iter(["a NaN"])
    with small_run.built(config, tmp_path) as run:
        step = run.learner.step

        def failing_once(state, *rest):
            fault = next(faults, "")
            return (state, {}, fault) if fault else step(state, *rest)

        run.learner.step = failing_once
        train(config, run, tmp_path)
    assert [row["train/epoch"] for row in small_run.rows(tmp_path)] == [1, 0, 1]
    kept = [row["step"] for row in small_run.rows(tmp_path, "train_rollouts.jsonl")]
    assert kept == [1] * 16 + [2] * 16


def test_refills_fill_a_batch_and_are_charged_as_wasted(tmp_path):
    config = small_run.make_config(
        {
            "queue.max_staleness": 0,
            "batch.dynamic_sampling": True,
            "train.num_steps": 3,
        }
    )
    useful_tokens = []
    with small_run.built(config, tmp_path) as run:
        assemble = run.assemble

        class Watched:
            def __getattr__(self, name):
                return getattr(assemble, name)

            def __call__(self, groups, *, learner_version):
                useful_tokens.append(
                    sum(
                        len(rollout.completion_tokens)
                        for group in groups
                        if len({each.reward for each in group.rollouts}) == 2
                        for rollout in group.rollouts
                    )
                )
                return assemble(groups, learner_version=learner_version)

        run.assemble = Watched()
        train(config, run, tmp_path)
    rows = small_run.rows(tmp_path)
    assert [row["group/with_variance"] for row in rows] == [4] * 3
    assert sum(row["group/generated"] for row in rows) > 3 * 4
    last = rows[-1]
    wasted = last["compute/generated_tokens"] - sum(useful_tokens)
    assert last["compute/wasted_tokens"] == wasted > 0


def test_at_the_limit_of_refills_the_step_goes_with_what_there_is(tmp_path):
    config = small_run.make_config(
        {
            "queue.max_staleness": 0,
            "batch.dynamic_sampling": True,
            "batch.max_refills": 2,
            "train.max_skipped_steps": 1,
            "eval.every": 1000,
        }
    )
    with small_run.built(config, tmp_path) as run:
        # The attribute is private: no setting makes every answer worth the same.
        judging = run.generators._judging
        run.generators._judging = dataclasses.replace(judging, wrong=judging.correct)
        with pytest.raises(RuntimeError, match="4 of 4 groups have zero variance"):
            train(config, run, tmp_path)
        report, history = run.ledger.report(), run.stream.state()
    # Of every group that ran.
    assert sum(read_numbers(history["rollouts"])) == (1 + 2) * 4 * 4
    assert report["compute/wasted_tokens"] == report["compute/generated_tokens"] > 0


def test_a_cosine_over_the_run_keeps_its_number_of_steps():
    free = free_settings(small_run.make_config())
    assert "train.num_steps" in free
    falling = {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 1}
    assert set(free) - set(free_settings(small_run.make_config(falling))) == {
        "train.num_steps"
    }
    stated = falling | {"optimizer.decay_steps": 20}
    assert free_settings(small_run.make_config(stated)) == free


def test_a_first_stage_without_room_for_an_answer_is_refused():
    config = small_run.make_config({"sampler.length_stages": ((0, 2), (4, 64))})
    arch = make_architecture(config)
    words = r"sampler\.length_stages, 2 tokens, "
    with pytest.raises(ValueError, match=words):
        make_engine(
            config, arch, make_tokenizer(config, arch), make_mesh(jax.devices()[:1])
        )
