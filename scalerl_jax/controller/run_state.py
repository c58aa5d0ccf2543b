"""The parts of a run, as the loop gets them from `wiring`."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.contract import Generators, Learner, State
from scalerl_jax.controller.evaluations import Evaluations
from scalerl_jax.controller.mismatch import MismatchCheck
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.queue import RolloutQueue
from scalerl_jax.controller.tracing import Tracer
from scalerl_jax.data.mixture import Stream
from scalerl_jax.learner.forward import LearnerFlops
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.progress import Progress


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The roles of a run and the controller's books, as the loop gets them."""

    learner: Learner
    generators: Generators
    orders: OrderBook
    queue: RolloutQueue
    stream: Stream
    assemble: Assembler
    mismatch: MismatchCheck
    evaluations: Evaluations
    trace: Tracer | None  # with debug.trace_prompt
    flops: LearnerFlops
    learning_rates: Callable[[int], Any]  # version -> rate of the step from there
    why_no_answers: Callable[[], str]  # what to say if no completion holds one
    length_limit: Callable[[int], int]  # version -> tokens of completions begun at it
    ledger: Ledger
    learner_pool: str
    verifier_restarts: Callable[[], int]  # processes that have been replaced
    progress: Progress
    # The newest state and its version.
    state: State
    version: int = 0
    close: Callable[[], None] = lambda: None

    def activity(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count the time inside the block as `name` on the learner's chips."""
        return self.ledger.activity(name, pool=self.learner_pool)
