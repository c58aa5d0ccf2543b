"""The parts of a run: `build` makes them, `train` connects them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from scalerl_jax.data.streams import Stream
from scalerl_jax.evals.evaluate import Evaluator
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.critic import PairedStep
from scalerl_jax.learner.flops import LearnerFlops
from scalerl_jax.learner.publish import Publish
from scalerl_jax.learner.step import TrainState, TrainStep
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.rollout.agreement import AgreementCheck
from scalerl_jax.rollout.assembly import Assembler
from scalerl_jax.rollout.queue import RolloutQueue
from scalerl_jax.rollout.worker import RolloutWorker
from scalerl_jax.types import PackedBatch, PyTree
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress

# State at the start of a window, its batches -> the batches with what they lack.
Annotate = Callable[[TrainState, list[PackedBatch]], list[PackedBatch]]


@dataclasses.dataclass(kw_only=True)
class Parts:
    """Everything that the loop uses, made from one Config."""

    arch: Architecture
    state: TrainState
    step: TrainStep | PairedStep
    diagnose: Callable[[PyTree, PackedBatch], str]  # of a skipped step
    assemble: Assembler
    annotate: Annotate
    flops: LearnerFlops
    learning_rates: Callable[[int], Any]  # of the step that starts from a version
    length_limit: Callable[[int], int]  # tokens of completions begun at a version
    queue: RolloutQueue
    worker: RolloutWorker
    stream: Stream
    evaluate: Evaluator
    agreement: AgreementCheck
    to_sampler: Publish
    ledger: Ledger
    learner_pool: str
    checkpointer: Checkpointer
    verifier_restarts: Callable[[], int]  # processes that have been replaced
    progress: Progress
    close: Callable[[], None]
