"""From a Config to the parts of a run: the only place that maps names to functions."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.config import Config, to_json
from scalerl_jax.coordination.agreement import AgreementCheck
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.coordination.queue import RolloutQueue
from scalerl_jax.data.streams import Stream
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.forward import Forward, plain_scorer
from scalerl_jax.learner.local import LocalLearner
from scalerl_jax.learner.optimizer import frozen_params
from scalerl_jax.learner.publish import make_publish
from scalerl_jax.learner.step import Step, TrainState
from scalerl_jax.model.architecture import Architecture, parameter_table
from scalerl_jax.parallel.mesh import AXES, Device, make_mesh
from scalerl_jax.run_state import RunState
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.types import PyTree
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.run_directory import flatten, keep_data_report
from scalerl_jax.utils.xla import explained, keep_freed_memory
from scalerl_jax.wiring.devices import (
    fit_devices,
    learner_pool,
    make_meshes,
    why_not_one_process,
)
from scalerl_jax.wiring.generators import GeneratorParts, make_generators
from scalerl_jax.wiring.learning import (
    make_annotate,
    make_architecture,
    make_diagnosis,
    make_flops,
    make_forward,
    make_learner,
    make_learning_rates,
    make_ledger,
    make_pack,
)
from scalerl_jax.wiring.objective import make_assembler
from scalerl_jax.wiring.prompts import LoadedPrompts, check_verifiers, load_prompts
from scalerl_jax.wiring.sampling import (
    make_checked_tokenizer,
    make_engine,
    make_length_budget,
    make_stream,
)
from scalerl_jax.wiring.tables import DTYPES, replayed

if TYPE_CHECKING:  # loaded only where a prompt is followed
    from scalerl_jax.coordination.tracing import Tracer
    from scalerl_jax.utils.run_files import RunFiles

__all__ = [
    "make_run",
    "fit_devices",
    "make_architecture",
    "make_ledger",
    "learner_pool",
    "why_not_one_process",
]


def make_run(
    config: Config,
    directory: Path,
    ledger: Ledger,
    progress: Progress,
    bucket: "RunFiles | None" = None,
) -> RunState:
    """Every part of a run, the train step compiled; `directory` may copy a `bucket`.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    # What a user can get wrong comes first; compiling starts with the learner.
    books = make_books(config, directory, progress)
    arch, tokenizer = books.arch, books.parts.tokenizer
    meshes = learner_mesh, sampler_meshes = make_meshes(config, arch, jax.devices())
    engines = [make_engine(config, arch, tokenizer, mesh) for mesh in sampler_meshes]
    for engine in engines:
        engine.notice = progress.program
    forward = make_forward(config, arch, learner_mesh)
    settings = flatten(to_json(config))
    with explained("the train step", settings):
        state, step = make_learner(config, forward, learner_mesh, progress)
    desk = books.desk(ledger)
    with explained("the sampler", settings):
        generators, restarts, close = _opened(books.parts, engines, desk, ledger)
    checkpointer = make_checkpointer(config, directory, bucket)
    learner = make_local_learner(
        config, forward, state, step, meshes, books.assemble, checkpointer
    )
    return books.run(
        learner=learner,
        state=state,
        generators=generators,
        desk=desk,
        ledger=ledger,
        verifier_restarts=restarts,
        close=close,
    )


def _opened(
    parts: GeneratorParts, engines: list[Engine], desk: OrderDesk, ledger: Ledger
) -> tuple[Any, Callable[[], int], Callable[[], None]]:
    """Return generators, what counts verifiers' restarts, and what closes them."""
    with contextlib.ExitStack() as opened:
        generators, restarts = _maker(len(engines))(
            parts, engines, desk, ledger, opened
        )
        return generators, restarts, opened.pop_all().close


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBooks:
    """The controller's part of a run, without devices: prompts, batches, queue."""

    arch: Architecture
    parts: GeneratorParts
    stream: Stream
    assemble: Assembler
    queue: RolloutQueue

    def desk(self, ledger: Ledger) -> OrderDesk:
        """Return the desk at which generators get their orders."""
        return OrderDesk(self.queue, self.stream, ledger)

    def run(self, *, learner: Any, ledger: Ledger, **roles: Any) -> RunState:
        """Return the run with its roles."""
        config, tokenizer = self.parts.config, self.parts.tokenizer
        return RunState(
            learner=learner,
            queue=self.queue,
            stream=self.stream,
            assemble=self.assemble,
            agreement=make_agreement(config, learner),
            trace=make_trace(config, learner, self.assemble, tokenizer),
            flops=make_flops(config, self.arch),
            learning_rates=make_learning_rates(config),
            length_limit=make_length_budget(config).limit,
            ledger=ledger,
            learner_pool=learner_pool(config),
            progress=self.parts.progress,
            **roles,
        )


def make_books(config: Config, directory: Path, progress: Progress) -> RunBooks:
    """Return the controller's part of a run; nothing of it takes a device.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    arch = _checked_architecture(config)
    tokenizer = make_checked_tokenizer(config, arch)
    prompts = _load_prompts(config, tokenizer, directory, progress)
    parts = GeneratorParts(
        config=config, tokenizer=tokenizer, held_out=prompts.held_out, progress=progress
    )
    return RunBooks(
        arch=arch,
        parts=parts,
        stream=make_stream(config, prompts.train),
        assemble=make_assembler(
            config, make_pack(config)[0], replay=replayed(config, arch)
        ),
        queue=make_queue(config),
    )


def make_gang_learner(
    config: Config,
    arch: Architecture,
    devices: Sequence[Device],
    directory: str,
) -> tuple[LocalLearner, TrainState, Mesh]:
    """Return one process's part of the learner, its state, and the mesh of all."""
    axes = {name: getattr(config.mesh, name) for name in AXES}
    mesh = make_mesh(devices, **axes)
    forward = make_forward(config, arch, mesh)
    with explained("the train step", flatten(to_json(config))):
        state, step = make_learner(config, forward, mesh, Progress())
    assemble = make_assembler(
        config, make_pack(config)[0], replay=replayed(config, arch)
    )
    checkpointer = make_checkpointer(config, directory)
    learner = make_local_learner(
        config, forward, state, step, (mesh, ()), assemble, checkpointer
    )
    return learner, state, mesh


def _maker(replicas: int) -> Callable[..., tuple[Any, Callable[[], int]]]:
    """Return what makes the generators of so many replicas."""
    if replicas == 1:
        return make_generators
    from scalerl_jax.wiring.replicas import make_local_fleet  # few runs need it

    return make_local_fleet


def _checked_architecture(config: Config) -> Architecture:
    """Return the architecture, in which every pattern of frozen params is found."""
    arch = make_architecture(config)
    frozen_params(parameter_table(arch), config.model.frozen)
    if jax.default_backend() == "cpu":
        keep_freed_memory(arch.num_params)
    return arch


def make_local_learner(
    config: Config,
    forward: Forward,
    state: TrainState,
    step: Step,
    meshes: tuple[Mesh, Sequence[Mesh]],
    assemble: Assembler,
    checkpointer: Checkpointer,
) -> LocalLearner:
    """Return the learner around a compiled step; its state stays with the caller.

    `meshes` are the learner's and those of the replicas.
    """
    return LocalLearner(
        layout=jax.tree.map(_abstract, state),
        train_step=step,
        diagnose=make_diagnosis(config, forward, step),
        annotate_window=make_annotate(config, forward, meshes[0], assemble),
        to_sampler=make_publish_to_all(config, forward.arch, *meshes),
        score_batch=plain_scorer(forward),
        checkpointer=checkpointer,
    )


def make_publish_to_all(
    config: Config, arch: Architecture, learner: Mesh, replicas: Sequence[Mesh]
) -> Callable[[PyTree, Array], Any]:
    """Return what makes the publication of a version: for each replica its own.

    Those that share devices share a copy.  A single replica's stands by itself.
    """
    dtype = DTYPES[config.model.sampler_dtype]
    to_mesh = {
        mesh: make_publish(arch, dtype=dtype, learner_mesh=learner, sampler_mesh=mesh)
        for mesh in dict.fromkeys(replicas)
    }
    if len(replicas) == 1:
        return to_mesh[replicas[0]]

    def publish(params: PyTree, policy_version: Array) -> tuple[Any, ...]:
        sent = {mesh: to(params, policy_version) for mesh, to in to_mesh.items()}
        return tuple(sent[mesh] for mesh in replicas)

    return publish


def make_agreement(config: Config, learner: LocalLearner) -> AgreementCheck:
    """Return the check of what generators sample against what the learner says."""
    return AgreementCheck(
        score=learner.score,
        row_tokens=config.batch.row_tokens,
        rows_per_microbatch=config.batch.rows_per_microbatch,
        max_mismatch_nats=config.train.max_mismatch_nats,
    )


def make_trace(
    config: Config, learner: LocalLearner, assemble: Assembler, tokenizer: Tokenizer
) -> "Tracer | None":
    """Return what follows a rollout, if debug.trace_prompt names one of a prompt."""
    if config.debug.trace_prompt < 0:
        return None
    from scalerl_jax.coordination.tracing import Tracer

    return Tracer(
        prompt_id=config.debug.trace_prompt,
        learner=learner,
        assemble=assemble,
        decode=tokenizer.decode_all,
        row_tokens=config.batch.row_tokens,
        rows_per_microbatch=config.batch.rows_per_microbatch,
    )


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _load_prompts(
    config: Config, tokenizer: Tokenizer, directory: Path, progress: Progress
) -> LoadedPrompts:
    """The prompts, which their verifiers can judge; the report is in `directory`."""
    prompts = load_prompts(config, tokenizer, progress)
    check_verifiers(config, (*prompts.examples, *prompts.held_out))
    keep_data_report(directory, prompts.report)
    return prompts


def make_checkpointer(
    config: Config, directory: Path | str, bucket: "RunFiles | None" = None
) -> Checkpointer:
    """The checkpoints of the run in a directory, or in that of a bucket."""
    return Checkpointer(
        bucket.checkpoints if bucket else f"{directory}/checkpoints",
        before_seal=bucket.flush if bucket else None,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        background=config.checkpoint.background,
    )


def make_queue(config: Config) -> RolloutQueue:
    """The queue between worker and learner."""
    return RolloutQueue(
        num_prompts=config.batch.num_prompts,
        max_staleness=config.queue.max_staleness,
        mode=config.queue.mode,
        max_waiting=config.queue.max_waiting,
        epochs=config.batch.epochs,
        max_refills=config.batch.max_refills if config.batch.dynamic_sampling else 0,
        num_steps=config.train.num_steps,
    )
