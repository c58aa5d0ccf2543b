"""How a run makes its evaluations: in the loop, or with `eval.concurrent` beside it.

The monitor is given one of the two, says when an evaluation is due, and writes it.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

from scalerl_jax.contract import Generators, Publication, State
from scalerl_jax.controller.mismatch import MismatchCheck
from scalerl_jax.generation.evaluation import Evaluation
from scalerl_jax.process.background import Background

_START_S = 1.0  # for the thread of the evaluation before, whose result is collected


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPoint:
    """Where a run stands when an evaluation of its params begins."""

    version: int
    publication: Publication
    report: dict[str, float]  # the ledger's


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeEvaluation:
    """An evaluation that has ended, and the mismatch if it was measured."""

    point: EvaluationPoint
    result: Evaluation
    mismatch: dict[str, float] | None = None


class Evaluations(Protocol):
    """Makes the evaluations of a run, one at a time."""

    @property
    def beside(self) -> bool:
        """Return whether training goes on meanwhile, with the params pinned."""
        ...

    @property
    def under_way(self) -> int | None:
        """Return the version whose evaluation has begun and is not collected yet."""
        ...

    def begin(
        self, point: EvaluationPoint, state: State, *, stopped: Callable[[], bool]
    ) -> MadeEvaluation | None:
        """Make an evaluation, or begin it and return None; none is under way.

        Raises:
            Abandoned: `stopped` has become true.
            NoVerifierError: no verifier is left.
        """
        ...

    def collect(self) -> MadeEvaluation | None:
        """Return the evaluation under way once it has ended; else None.

        Raises:
            Abandoned: see `begin`; so with all that ended it.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class InLoop:
    """Evaluations that the loop waits for; each measures the mismatch too."""

    generators: Generators
    mismatch: MismatchCheck
    activity: Callable[[], contextlib.AbstractContextManager[None]]  # counts the time
    beside = False
    under_way = None

    def begin(
        self, point: EvaluationPoint, state: State, *, stopped: Callable[[], bool]
    ) -> MadeEvaluation:
        """Make an evaluation."""
        with self.activity():
            result, sampled = self.generators.evaluate(
                point.publication, policy_version=point.version, stopped=stopped
            )
            mismatch = self.mismatch(state, sampled).metrics()
        return MadeEvaluation(point=point, result=result, mismatch=mismatch)

    def collect(self) -> None:
        """Return None: `begin` has returned every evaluation."""


class BesideRun:
    """Evaluations that do not stop the run, and measure no mismatch.

    The params of one stay pinned until the next one.
    """

    beside = True

    def __init__(self, generators: Generators) -> None:
        """Begin with none under way."""
        self._generators = generators
        self._thread = Background("evaluation")
        self._made: MadeEvaluation | None = None
        self.under_way: int | None = None

    def begin(
        self, point: EvaluationPoint, state: State, *, stopped: Callable[[], bool]
    ) -> None:
        """Begin an evaluation; it is lost if the run stops meanwhile."""
        assert self.under_way is None, "the evaluation before is not collected"

        def work() -> None:
            result, _ = self._generators.evaluate(
                point.publication,
                policy_version=point.version,
                stopped=stopped,
                beside=True,
            )
            self._made = MadeEvaluation(point=point, result=result)

        self._thread.start(work, timeout_s=_START_S)
        self.under_way = point.version

    def collect(self) -> MadeEvaluation | None:
        """Return the evaluation under way once it has ended; else None."""
        try:
            self._thread.check()
        except BaseException:
            self.under_way = None
            raise
        made, self._made = self._made, None
        if made is not None:
            self.under_way = None
        return made
