"""Evaluations beside the run, with `eval.concurrent`: training goes on meanwhile.

An evaluation is made with params that stay pinned until the next one, and is written at
the end of a later step.  It measures no mismatch of sampler and learner.
"""

import dataclasses
import time
from typing import Any

from scalerl_jax.batching.assembly import Batch, Pass
from scalerl_jax.contract import Publication, State
from scalerl_jax.controller.monitor import RunMonitor
from scalerl_jax.generation.evaluation import Evaluation
from scalerl_jax.process.background import Background

_START_S = 1.0  # for the thread of the evaluation before, whose result is collected
_COLLECT_S = 0.05  # between two looks for the end of an evaluation


@dataclasses.dataclass(kw_only=True)
class _Pending:
    """An evaluation under way."""

    version: int
    report: dict[str, float]  # the ledger's, when the evaluation began
    result: Evaluation | None = None


class ConcurrentMonitor(RunMonitor):
    """The bookkeeping of a run whose evaluations do not stop it."""

    def __init__(self, *parts: Any) -> None:
        """Begin with the arguments of `RunMonitor`."""
        super().__init__(*parts)
        self._beside = Background("evaluation")
        self._pending: _Pending | None = None

    def publish(self, state: State, version: int, **how: Any) -> Publication:
        """Send a copy of the params, pinned if they are to be evaluated."""
        pinned = self.lacks_evaluation(version)
        if pinned:  # they replace the params pinned for the last evaluation
            self.await_evaluation()
        return super().publish(state, version, pinned=pinned, **how)

    def log(
        self, step: int, each: Pass, assembled: Batch, metrics: dict[str, float]
    ) -> None:
        """Write an evaluation that has ended, then the step's row."""
        self._collect()
        super().log(step, each, assembled, metrics)
        if metrics["mismatch/tokens"] and not self._config.sampler.filters:
            self._mismatch = {name: metrics[name] for name in self._mismatch}

    def lacks_evaluation(self, version: int) -> bool:
        """Return whether one is due at this version, not begun and not yet on file."""
        begun = self._pending is not None and self._pending.version == version
        return not begun and super().lacks_evaluation(version)

    def evaluate(self, state: State, publication: Publication, version: int) -> None:
        """Begin the evaluation at this version, after the one before it has ended.

        It is never written if the run stops meanwhile or loses its verifiers.
        """
        run = self._run
        report = run.ledger.report()
        self.await_evaluation()
        pending = self._pending = _Pending(version=version, report=report)

        def work() -> None:
            pending.result, _ = run.generators.evaluate(
                publication,
                policy_version=version,
                stopped=self._stopped,
                beside=True,
            )

        self._beside.start(work, timeout_s=_START_S)

    def await_evaluation(self, *, before: int | None = None) -> None:
        """Wait for the evaluation under way; only if its version is < `before`.

        The wait is not counted as training time.
        """
        self._collect()
        if self._pending and (before is None or self._pending.version < before):
            with self._run.activity("eval"):
                while self._pending:  # ends: generators have a time limit
                    time.sleep(_COLLECT_S)
                    self._collect()

    def _collect(self) -> None:
        """Write the evaluation under way to the files, if it has ended."""
        pending = self._pending
        if pending is None:
            return
        with self._given_up(pending.version):
            self._beside.check()
            if pending.result is None:
                return
            self._write_evaluation(pending.version, pending.report, pending.result)
        self._pending = None
