"""What a run is made of, as the loop gets it from `wiring`."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.contract import State
from scalerl_jax.coordination.agreement import AgreementCheck
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.coordination.queue import RolloutQueue
from scalerl_jax.data.streams import Stream
from scalerl_jax.generation.local import LocalGenerators
from scalerl_jax.learner.forward import LearnerFlops
from scalerl_jax.learner.local import LocalLearner
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress

if TYPE_CHECKING:  # loaded only where they are used
    from scalerl_jax.coordination.fleet import Fleet
    from scalerl_jax.coordination.tracing import Tracer


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The roles of a run, and the controller's books."""

    learner: "LocalLearner | Any"  # or a gang of processes
    generators: "LocalGenerators | Fleet"
    desk: OrderDesk
    queue: RolloutQueue
    stream: Stream
    assemble: Assembler
    agreement: AgreementCheck
    trace: "Tracer | None"  # of debug.trace_prompt
    flops: LearnerFlops
    learning_rates: Callable[[int], Any]  # of the step that starts from a version
    length_limit: Callable[[int], int]  # tokens of completions begun at a version
    ledger: Ledger
    learner_pool: str
    verifier_restarts: Callable[[], int]  # processes that have been replaced
    progress: Progress
    # What the loop has come to.
    state: State
    version: int = 0
    close: Callable[[], None] = lambda: None
