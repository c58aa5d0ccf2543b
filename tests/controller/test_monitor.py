"""The loop's books, of a learner that skips the steps that it is told to skip."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import small_run

from scalerl_jax.batching.assembly import Batch
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.batching.window import Pass
from scalerl_jax.controller.monitor import RunMonitor
from scalerl_jax.run.ledger import Ledger


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
        flops=SimpleNamespace(step=lambda tokens, context: 0.0),
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
    assert run.ledger.report()["compute/wasted_tokens"] == wasted
