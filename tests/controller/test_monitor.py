"""The loop's books, of a learner that skips the steps that it is told to skip."""

import contextlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import small_run

from scalerl_jax.batching.assembly import Batch
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.batching.window import Pass
from scalerl_jax.controller.evaluations import EvaluationPoint, MadeEvaluation
from scalerl_jax.controller.monitor import RunMonitor
from scalerl_jax.generation.evaluation import Evaluation
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.metrics import MetricsWriter


def batch_of(tokens):
    """A batch with one completion of so many tokens."""
    sequence = TrainSequence(
        tokens=np.zeros(1 + tokens, np.int32),
        prompt_length=1,
        weights=np.ones(tokens, np.float32),
        mask=np.ones(tokens, bool),
        behavior_logprobs=np.zeros(tokens, np.float32),
        staleness=np.zeros(tokens, np.int32),
    )
    return Batch(
        groups=(),
        version=0,
        packed=pack([sequence], row_tokens=tokens, rows_per_microbatch=1).batch,
        rewards=None,
        sequences=[sequence],
        train_tokens=tokens,
        row_tokens=tokens,
        filtered_tokens=0,
        carried_tokens=tokens,
        mean_context=0.0,
    )


@pytest.mark.parametrize(
    "epochs, skipped, wasted",
    [
        pytest.param(1, (True, False), 1, id="one pass"),
        pytest.param(2, (True, False, False, True), 0, id="applied in one of two"),
        pytest.param(2, (True, False, True, False), 1, id="applied in neither"),
        pytest.param(2, (False, True, True, True), 10, id="the second batch never"),
    ],
)
def test_tokens_are_wasted_if_no_step_on_them_is_applied(epochs, skipped, wasted):
    """Two batches, of 1 and of 10 tokens, in order in each epoch."""
    changes = {"batch.epochs": epochs, "queue.max_staleness": 1}
    batches = [batch_of(1), batch_of(10)]
    config = small_run.make_config(changes | {"train.max_skipped_steps": 9})
    faults = iter(skipped)
    run = SimpleNamespace(
        activity=lambda name: contextlib.nullcontext(),
        evaluations=None,
        flops=SimpleNamespace(step=lambda tokens, context: float(tokens)),
        learner=SimpleNamespace(
            step=lambda state, packed, batch: (state, {}, next(faults) and "a NaN")
        ),
        ledger=Ledger(pools={"shared": 1}, chip="cpu"),
        progress=SimpleNamespace(note=lambda text: None),
    )
    monitor = RunMonitor(config, run, None, None, lambda: None)
    for epoch in range(epochs):
        for batch in batches:
            monitor.step("state", Pass(batch=batch, epoch=epoch, last=False), batch)
    report = run.ledger.report()
    assert report["compute/wasted_tokens"] == wasted
    # Tokens are trained by steps that are applied; the others have had their FLOPs.
    tokens = [batch.train_tokens for batch in batches] * epochs
    trained = sum(n for n, skip in zip(tokens, skipped, strict=True) if not skip)
    assert report["compute/train_tokens"] == trained
    assert report["compute/train_flops"] == sum(tokens)


@pytest.mark.parametrize(
    "rate, way", [(0.0, "expert_balance would balance"), (0.001, "a larger objective")]
)
def test_dead_experts_are_told_with_a_way_that_is_not_taken_yet(rate, way):
    notes = []
    run = SimpleNamespace(
        evaluations=None,
        ledger=Ledger(pools={"shared": 1}, chip="cpu"),
        progress=SimpleNamespace(note=notes.append),
    )
    config = small_run.make_config({"objective.expert_bias_rate": rate})
    monitor = RunMonitor(config, run, None, None, lambda: None)
    row = {"completion/cut_off_share": 0.0, "verifier/no_answer_share": 0.0}
    for _ in range(2):  # once for each number
        monitor._warn(row | {"experts/dead": 3})
    assert len(notes) == 1 and way in notes[0]


def evaluation_of(rates):
    """One sample of each prompt, with a pass rate or None: it is not judged."""
    known = [rate for rate in rates if rate is not None]
    error = np.std(known, ddof=1) / len(known) ** 0.5 if len(known) > 1 else math.nan
    return Evaluation(
        pass_rate=float(np.mean(known)),
        pass_rate_se=float(error),
        reward_mean=float(np.mean(known)),
        num_prompts=len(known),
        samples_per_prompt=1,
        prompt_pass_rates=[math.nan if rate is None else rate for rate in rates],
        cut_off_share=0.0,
        interrupted_share=0.0,
        no_answer_share=0.0,
        unjudged_share=1 - len(known) / len(rates),
        too_costly_share=0.0,
        unjudged_prompts=len(rates) - len(known),
        mean_completion_tokens=3.0,
        pass_rate_by_task={},
        rewards={},
        mean_turns=None,
        rollouts=(),
        details=(),
    )


@pytest.mark.parametrize(
    "rates, written, noted",
    [
        # The standard deviation of 0 and 1 is 1 / sqrt(2).
        ([0.0, 1.0], 0.5, "pass rate 0.500 +- 0.500 after 2.0000 chip-hours"),
        ([1.0, None], None, "pass rate 1.000 after 2.0000 chip-hours"),
    ],
)
def test_an_evaluation_of_one_prompt_has_no_standard_error(
    tmp_path, rates, written, noted
):
    notes = []
    run = SimpleNamespace(
        evaluations=None,
        ledger=Ledger(pools={"shared": 1}, chip="cpu"),
        progress=SimpleNamespace(note=notes.append),
    )
    config = small_run.make_config({"reward.max_unjudged_share": 0.9})
    report = {"compute/charged_chip_hours": 2.0}
    report |= {f"compute/{name}": 1.0 for name in ("train_tokens", "train_flops")}
    report["compute/generated_tokens"] = 1.0
    made = MadeEvaluation(
        point=EvaluationPoint(version=4, publication=None, report=report),
        result=evaluation_of(rates),
    )
    with contextlib.closing(MetricsWriter(tmp_path, after=-1)) as writer:
        monitor = RunMonitor(config, run, writer, None, lambda: None)
        monitor._write_evaluation(made)
    row = json.loads((tmp_path / "evals.jsonl").read_text())
    expected = None if written is None else pytest.approx(written)
    assert row["pass_rate_se"] == expected and row["step"] == 4
    assert notes[0] == f"evaluation at step 4: {noted}"
