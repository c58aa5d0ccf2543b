"""From a Config to the parts of a run: the only place that maps names to functions."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.config import Config, to_json
from scalerl_jax.coordination.agreement import AgreementCheck
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.coordination.queue import RolloutQueue
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.generation.episodes import Episodes
from scalerl_jax.generation.local import LocalGenerators
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.critic import PairedStep
from scalerl_jax.learner.forward import Forward, plain_scorer
from scalerl_jax.learner.local import LocalLearner
from scalerl_jax.learner.optimizer import frozen_params
from scalerl_jax.learner.publish import make_publish
from scalerl_jax.learner.step import TrainState, TrainStep
from scalerl_jax.model.architecture import Architecture, parameter_table
from scalerl_jax.rewards.named import num_processes
from scalerl_jax.rewards.verifier import VerifierPool
from scalerl_jax.run_state import RunState
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Prompt
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.run_directory import flatten, keep_data_report
from scalerl_jax.utils.xla import explained, keep_freed_memory
from scalerl_jax.wiring.learning import (
    fit_devices,
    make_annotate,
    make_architecture,
    make_diagnosis,
    make_flops,
    make_forward,
    make_learner,
    make_learning_rates,
    make_ledger,
    make_meshes,
    make_pack,
    pool_names,
)
from scalerl_jax.wiring.objective import make_assembler
from scalerl_jax.wiring.prompts import LoadedPrompts, load_prompts
from scalerl_jax.wiring.sampling import (
    make_checked_tokenizer,
    make_distribution,
    make_engine,
    make_evaluator,
    make_judging,
    make_length_budget,
    make_probe,
    make_stream,
    make_training_samples,
)
from scalerl_jax.wiring.tables import DTYPES
from scalerl_jax.wiring.verifying import check_verifiers, make_verifier

if TYPE_CHECKING:  # loaded only where a prompt is followed
    from scalerl_jax.coordination.tracing import Tracer

__all__ = [
    "make_run",
    "fit_devices",
    "make_architecture",
    "make_ledger",
    "pool_names",
]


def make_run(
    config: Config, directory: Path, ledger: Ledger, progress: Progress
) -> RunState:
    """Every part of a run, the train step compiled.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    # What a user can get wrong comes first; compiling starts with the learner.
    arch = _checked_architecture(config)
    tokenizer = make_checked_tokenizer(config, arch)
    prompts = _load_prompts(config, tokenizer, directory, progress)
    stream = make_stream(config, prompts.train)
    meshes = learner_mesh, sampler_mesh = make_meshes(config, arch, jax.devices())
    engine = make_engine(config, arch, tokenizer, sampler_mesh)
    engine.notice = progress.program
    forward = make_forward(config, arch, learner_mesh)
    settings = flatten(to_json(config))
    with explained("the train step", settings):
        state, step = make_learner(config, forward, learner_mesh, progress)
    assemble = make_assembler(config, make_pack(config)[0])
    queue = make_queue(config)
    desk = OrderDesk(queue, stream, ledger)
    with contextlib.ExitStack() as opened, explained("the sampler", settings):
        pools = make_verifiers(config, opened, progress)
        generators = make_generators(
            config,
            engine,
            tokenizer,
            desk,
            pools=pools,
            held_out=prompts.held_out,
            ledger=ledger,
            progress=progress,
        )
        close = opened.pop_all().close
    learner = make_local_learner(
        config, forward, state, step, meshes, assemble, directory
    )
    return RunState(
        learner=learner,
        generators=generators,
        desk=desk,
        queue=queue,
        stream=stream,
        assemble=assemble,
        agreement=make_agreement(config, learner),
        trace=make_trace(config, learner, assemble, tokenizer),
        flops=make_flops(config, arch),
        learning_rates=make_learning_rates(config),
        length_limit=make_length_budget(config).limit,
        ledger=ledger,
        learner_pool=pool_names(config)[0],
        verifier_restarts=lambda: sum(pool.restarts for pool in pools),
        progress=progress,
        close=close,
        state=state,
    )


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
    step: TrainStep | PairedStep,
    meshes: tuple[Mesh, Mesh],
    assemble: Assembler,
    directory: Path,
) -> LocalLearner:
    """Return the learner around a compiled step; its state stays with the caller.

    `meshes` are the learner's and the sampler's, `directory` is the run's.
    """
    return LocalLearner(
        layout=jax.tree.map(_abstract, state),
        train_step=step,
        diagnose=make_diagnosis(config, forward, step),
        annotate_window=make_annotate(config, forward, meshes[0], assemble),
        to_sampler=make_publish(
            forward.arch,
            dtype=DTYPES[config.model.sampler_dtype],
            learner_mesh=meshes[0],
            sampler_mesh=meshes[1],
        ),
        score_batch=plain_scorer(forward),
        checkpointer=make_checkpointer(config, directory),
    )


def make_verifiers(
    config: Config, opened: contextlib.ExitStack, progress: Progress
) -> tuple[VerifierPool, VerifierPool]:
    """Return the pools of training and of evaluations, closed with `opened`."""
    count = num_processes(config.reward.num_workers)
    progress.note(f"verifier processes: {count} for training, {count} for evaluations")
    return make_verifier(config, opened), make_verifier(config, opened)


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


def make_checkpointer(config: Config, directory: Path) -> Checkpointer:
    """The checkpoints of the run in a directory."""
    return Checkpointer(
        directory / "checkpoints",
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


def make_generators(
    config: Config,
    engine: Engine,
    tokenizer: Tokenizer,
    desk: OrderDesk,
    *,
    pools: tuple[VerifierPool, VerifierPool],
    held_out: Sequence[Prompt],
    ledger: Ledger,
    progress: Progress,
) -> LocalGenerators:
    """Return the sampling thread, not started; `pools` judge training and evaluations.

    `held_out` prompts are evaluated, and some of them compared with the learner.
    """
    judging = make_judging(config, tokenizer)
    return LocalGenerators(
        scheduler=Scheduler(engine, kv_on_update=config.sampler.kv_on_update),
        desk=desk,
        episodes=Episodes(pools[0], judging.answer),
        judging=judging,
        sampling=make_distribution(config),
        make_samples=make_training_samples(config),
        evaluator=make_evaluator(
            config, engine, held_out, tokenizer, pools[1], progress
        ),
        probe=make_probe(config, engine, held_out),
        ledger=ledger,
        flops=lambda stats: stats.flops(engine.settings.arch),
        pool=pool_names(config)[1],
        group_timeout_s=config.queue.group_timeout_s,
    )
