"""The parts of a run that `wiring` makes for the loop."""

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
    """The roles of a run and the controller's records, for the loop."""

    learner: Learner
    generators: Generators
    orders: OrderBook
    queue: RolloutQueue
    stream: Stream
    assemble: Assembler
    mismatch: MismatchCheck
    evaluations: Evaluations
    trace: Tracer | None  # None without debug.trace_prompt
    flops: LearnerFlops
    learning_rates: Callable[[int], Any]  # version -> learning rate of the next step
    why_no_answers: Callable[[], str]  # message if no completion holds an answer
    length_limit: Callable[[int], int]  # version at a completion's start -> tokens
    ledger: Ledger
    learner_pool: str
    verifier_restarts: Callable[[], int]  # processes that have been replaced
    progress: Progress
    # The newest train state and its version.
    state: State
    version: int = 0
    close: Callable[[], None] = lambda: None

    def activity(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count the time inside the block as `name` on the learner's chips."""
        return self.ledger.activity(name, pool=self.learner_pool)
