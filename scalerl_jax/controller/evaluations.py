"""The two ways to make a run's evaluations: in the loop, or beside it.

`eval.concurrent` chooses.  The monitor decides when an evaluation is due and writes it.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

from scalerl_jax.contract import Generators, Publication, State
from scalerl_jax.controller.mismatch import MismatchCheck
from scalerl_jax.generation.evaluation import Evaluation
from scalerl_jax.process.background import Background

_START_S = 1.0  # wait for the thread of the last evaluation, whose result is collected


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPoint:
    """The state of a run when an evaluation of its params starts."""

    version: int
    publication: Publication
    report: dict[str, float]  # the ledger's report
    compared: bool = False  # the mismatch of this version has been measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeEvaluation:
    """A finished evaluation, and the mismatch if it was measured."""

    point: EvaluationPoint
    result: Evaluation
    mismatch: dict[str, float] | None = None


class Evaluations(Protocol):
    """Makes the evaluations of a run, one at a time."""

    @property
    def beside(self) -> bool:
        """Return whether training continues meanwhile, with the params pinned."""
        ...

    @property
    def under_way(self) -> int | None:
        """Return the version whose evaluation has started and is not collected yet."""
        ...

    def begin(
        self, point: EvaluationPoint, state: State, *, stopped: Callable[[], bool]
    ) -> MadeEvaluation | None:
        """Make an evaluation, or start it and return None.

        No other evaluation may be under way.

        Raises:
            Abandoned: `stopped` has become true.
            NoVerifierError: no verifier is left.
        """
        ...

    def collect(self) -> MadeEvaluation | None:
        """Return the evaluation under way once it has ended; else None.

        Raises:
            Abandoned: as in `begin`; any other error that ended it is raised, too.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class InLoop:
    """Evaluations for which the loop waits; each also measures the mismatch.

    The mismatch of a version is measured once: not after the check at the start.
    """

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
                point.publication,
                policy_version=point.version,
                stopped=stopped,
                probe=not point.compared,
            )
            mismatch = None
            if not point.compared:
                mismatch = self.mismatch(state, sampled).metrics()
        return MadeEvaluation(point=point, result=result, mismatch=mismatch)

    def collect(self) -> None:
        """Return None: `begin` has returned every evaluation."""


class BesideRun:
    """Evaluations that do not stop the run, and measure no mismatch.

    Their params stay pinned until the next evaluation.
    """

    beside = True

    def __init__(self, generators: Generators) -> None:
        """Start with no evaluation under way."""
        self._generators = generators
        self._thread = Background("evaluation")
        self._made: MadeEvaluation | None = None
        self.under_way: int | None = None

    def begin(
        self, point: EvaluationPoint, state: State, *, stopped: Callable[[], bool]
    ) -> None:
        """Start an evaluation; it is lost if the run stops meanwhile."""
        assert self.under_way is None, "the last evaluation is not collected"

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
