"""Build the parts of a run from a Config; `objective` builds those of the loss."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.config import Config
from scalerl_jax.contract import Generators, Publication
from scalerl_jax.controller.evaluations import BesideRun, InLoop
from scalerl_jax.controller.group_check import GroupCheck
from scalerl_jax.controller.mismatch import MismatchCheck
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.queue import Pacing, RolloutQueue
from scalerl_jax.controller.run_state import RunState
from scalerl_jax.controller.tracing import Tracer
from scalerl_jax.data.mixture import Stream
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.forward import plain_scorer
from scalerl_jax.learner.publish import make_publish
from scalerl_jax.learner.step import LocalLearner, TrainState
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.objective.assembly import make_assembler
from scalerl_jax.parallel.xla import explained, keep_freed_memory
from scalerl_jax.run.directory import keep_data_report, keep_environment
from scalerl_jax.run.files import RunFiles
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.progress import Progress
from scalerl_jax.types import PyTree
from scalerl_jax.weights.publication import digest_of
from scalerl_jax.wiring.devices import fit_devices as fit_devices
from scalerl_jax.wiring.devices import learner_pool, make_meshes
from scalerl_jax.wiring.devices import make_ledger as make_ledger
from scalerl_jax.wiring.devices import why_not_one_process as why_not_one_process
from scalerl_jax.wiring.learning import (
    abstract_state,
    check_trained,
    make_annotate,
    make_architecture,
    make_diagnosis,
    make_flops,
    make_forward,
    make_learner,
    make_learning_rates,
)
from scalerl_jax.wiring.prompts import (
    check_environment,
    check_verifiers,
    load_prompts,
    make_stream,
    make_writer,
)
from scalerl_jax.wiring.replicas import make_local_fleet, make_publish_to_all
from scalerl_jax.wiring.sampling import (
    GeneratorParts,
    make_checked_tokenizer,
    make_engine,
    make_generators,
    make_length_budget,
    weights_format,
)
from scalerl_jax.wiring.teacher import check_teacher
from scalerl_jax.wiring.thinking import why_no_answers


def make_run(
    config: Config,
    directory: Path,
    ledger: Ledger,
    progress: Progress,
    bucket: RunFiles | None = None,
) -> RunState:
    """Return every part of a run, with the train step compiled.

    `directory` is a local copy of `bucket`, if that is given.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    # Parts that can refuse a user's settings come first: the learner compiles.
    books = make_books(config, directory, progress)
    arch, parts = books.arch, books.parts
    learner_mesh, sampler_meshes = make_meshes(config, arch, jax.devices())
    engines = [
        make_engine(config, arch, parts.tokenizer, mesh) for mesh in sampler_meshes
    ]
    for engine in engines:
        engine.notice = progress.program
    if len(engines) == 1:
        make = make_generators
        to_sampler = make_publish(
            arch,
            **weights_format(config),
            learner_mesh=learner_mesh,
            sampler_mesh=sampler_meshes[0],
        )
    else:
        make = make_local_fleet
        to_sampler = make_publish_to_all(config, arch, learner_mesh, sampler_meshes)
    learner, state = make_local_learner(
        config,
        arch,
        learner_mesh,
        to_sampler=to_sampler,
        checkpointer=make_checkpointer(config, directory, bucket),
        progress=progress,
    )
    with contextlib.ExitStack() as opened:
        with explained("the sampler", config):
            generators, restarts = make(parts, engines, books.orders, ledger, opened)
        return books.run(
            learner=learner,
            state=state,
            generators=generators,
            ledger=ledger,
            verifier_restarts=restarts,
            close=opened.pop_all().close,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBooks:
    """The controller's part of a run, without devices: prompts, batches, queue."""

    arch: Architecture
    parts: GeneratorParts
    stream: Stream
    assemble: Assembler
    queue: RolloutQueue
    orders: OrderBook

    def run(
        self, *, learner: Any, generators: Generators, ledger: Ledger, **roles: Any
    ) -> RunState:
        """Return the run's state with its learner, generators and ledger."""
        config, tokenizer = self.parts.config, self.parts.tokenizer
        pool = learner_pool(config)
        mismatch = MismatchCheck(
            score=learner.score,
            pack=self.assemble.pack,
            max_mismatch_nats=config.train.max_mismatch_nats,
        )
        in_loop = InLoop(
            generators=generators,
            mismatch=mismatch,
            activity=functools.partial(ledger.activity, "eval", pool=pool),
        )
        return RunState(
            learner=learner,
            generators=generators,
            ledger=ledger,
            queue=self.queue,
            orders=self.orders,
            stream=self.stream,
            assemble=self.assemble,
            mismatch=mismatch,
            evaluations=BesideRun(generators) if config.eval.beside else in_loop,
            trace=make_trace(config, learner, tokenizer),
            flops=make_flops(config, self.arch),
            learning_rates=make_learning_rates(config),
            why_no_answers=functools.partial(why_no_answers, config),
            length_limit=make_length_budget(config).limit,
            learner_pool=pool,
            progress=self.parts.progress,
            **roles,
        )


def make_books(config: Config, directory: Path, progress: Progress) -> RunBooks:
    """Return the controller's part of a run, which uses no device.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    own = check_environment(config)
    kept = own.text if own else None
    if own and kept is not None and (before := keep_environment(directory, kept)):
        progress.note(
            f"warning: {own.file} has changed since this run began; from here on "
            f"rewards are those of the new file; the old one is kept as {before.name}"
        )
    arch = make_architecture(config)
    check_trained(config, arch)
    if jax.default_backend() == "cpu":
        keep_freed_memory(arch.num_params)
    tokenizer = make_checked_tokenizer(config, arch)
    if config.teacher.on:
        check_teacher(config, arch, tokenizer)
    if own and own.by_turns:
        make_writer(config, tokenizer)  # it may raise
    prompts = load_prompts(config, tokenizer, progress)
    check_verifiers(config, (*prompts.examples, *prompts.held_out))
    keep_data_report(directory, prompts.report)
    parts = GeneratorParts(
        config=config,
        tokenizer=tokenizer,
        held_out=prompts.held_out,
        own=own,
        progress=progress,
    )
    stream, queue = make_stream(config, prompts.train), make_queue(config)
    return RunBooks(
        arch=arch,
        parts=parts,
        stream=stream,
        assemble=make_assembler(config, arch),
        queue=queue,
        orders=OrderBook(
            queue, stream, check=make_group_check(config, arch), note=progress.note
        ),
    )


def make_local_learner(
    config: Config,
    arch: Architecture,
    mesh: Mesh,
    *,
    to_sampler: Callable[[PyTree, Array], Publication] | None,
    checkpointer: Checkpointer,
    progress: Progress,
) -> tuple[LocalLearner, TrainState]:
    """Return the learner on its mesh, with its step compiled, and its first state.

    `to_sampler` makes a publication of params and their version; None: the caller does.
    """
    forward = make_forward(config, arch, mesh)
    with explained("the train step", config):
        state, step = make_learner(config, forward, mesh, progress)
    annotate = make_annotate(config, forward, mesh)
    learner = LocalLearner(
        layout=abstract_state(config, arch, mesh),
        train_step=step,
        diagnose=make_diagnosis(config, forward, step),
        annotate_window=annotate,
        to_sampler=to_sampler,
        score_batch=plain_scorer(forward),
        checkpointer=checkpointer,
        frozen=state.frozen,
        base=digest_of(state.frozen),
        teacher=annotate.teacher,
    )
    return learner, state


def make_trace(
    config: Config, learner: LocalLearner, tokenizer: Tokenizer
) -> Tracer | None:
    """Return the tracer of the prompt debug.trace_prompt, or None if it is not set."""
    if config.debug.trace_prompt < 0:
        return None

    return Tracer(
        prompt_id=config.debug.trace_prompt,
        learner=learner,
        decode=tokenizer.decode_all,
        row_tokens=config.batch.row_tokens,
        rows_per_microbatch=config.batch.rows_per_microbatch,
    )


def make_checkpointer(
    config: Config, directory: Path | str, bucket: RunFiles | None = None
) -> Checkpointer:
    """Return the checkpointer of a run, in its directory or its bucket."""
    return Checkpointer(
        bucket.checkpoints if bucket else f"{directory}/checkpoints",
        before_seal=bucket.flush if bucket else None,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        background=config.checkpoint.background,
    )


def make_group_check(config: Config, arch: Architecture) -> GroupCheck:
    """Return the check of the groups that generators return."""
    return GroupCheck(
        arch=arch,
        group_size=config.batch.group_size,
        length_limit=make_length_budget(config).limit,
        with_experts=config.objective.routing_replay == "on",
    )


def make_pacing(config: Config) -> Pacing:
    """Return the bounds of a run's queue."""
    return Pacing(
        num_prompts=config.batch.num_prompts,
        max_staleness=config.queue.max_staleness,
        mode=config.queue.mode,
        max_waiting=config.queue.max_waiting,
        epochs=config.batch.epochs,
        num_steps=config.train.num_steps,
    )


def make_queue(config: Config) -> RolloutQueue:
    """Return the queue of finished groups between generators and learner."""
    max_refills = config.batch.max_refills if config.batch.dynamic_sampling else 0
    return RolloutQueue(make_pacing(config), max_refills=max_refills)
