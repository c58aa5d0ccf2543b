"""From a Config to the parts of a run: the only place that maps names to functions."""

import contextlib
from pathlib import Path

import jax

from scalerl_jax.build.describe import describe
from scalerl_jax.build.learning import (
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
from scalerl_jax.build.objective import make_assembler
from scalerl_jax.build.prompts import LoadedPrompts, load_prompts
from scalerl_jax.build.sampling import (
    make_agreement,
    make_checked_tokenizer,
    make_distribution,
    make_engine,
    make_evaluator,
    make_length_budget,
    make_stream,
    make_training_samples,
)
from scalerl_jax.build.tables import DTYPES
from scalerl_jax.build.thinking import answer_after
from scalerl_jax.build.verifying import check_verifiers, make_verifier
from scalerl_jax.config import Config, to_json
from scalerl_jax.data.streams import Stream
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.freezing import frozen_params
from scalerl_jax.learner.publish import make_publish
from scalerl_jax.model.architecture import parameter_table
from scalerl_jax.parts import Parts
from scalerl_jax.rewards.named import num_processes
from scalerl_jax.rewards.verifier import VerifierPool
from scalerl_jax.rollout.queue import RolloutQueue
from scalerl_jax.rollout.worker import Judging, RolloutWorker
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.utils.allocator import keep_freed_memory
from scalerl_jax.utils.device_memory import explained
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.run_directory import flatten, keep_data_report

__all__ = [
    "build",
    "describe",
    "fit_devices",
    "make_architecture",
    "make_ledger",
    "pool_names",
]


def build(config: Config, directory: Path, ledger: Ledger, progress: Progress) -> Parts:
    """Every part of a run, the train step compiled.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    # What a user can get wrong comes first; compiling starts with the learner.
    arch = make_architecture(config)
    frozen_params(parameter_table(arch), config.model.frozen)
    if jax.default_backend() == "cpu":
        keep_freed_memory(arch.num_params)
    tokenizer = make_checked_tokenizer(config, arch)
    prompts = _load_prompts(config, tokenizer, directory, progress)
    stream = make_stream(config, prompts.train)
    learner_mesh, sampler_mesh = make_meshes(config, arch, jax.devices())
    engine = make_engine(config, arch, tokenizer, sampler_mesh)
    engine.notice = progress.program
    forward = make_forward(config, arch, learner_mesh)
    settings = flatten(to_json(config))
    with explained("the train step", settings):
        state, step = make_learner(config, forward, learner_mesh, progress)
    assemble = make_assembler(config, make_pack(config)[0])
    to_sampler = make_publish(
        arch,
        dtype=DTYPES[config.model.sampler_dtype],
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
    )
    queue = make_queue(config)
    count = num_processes(config.reward.num_workers)
    progress.note(f"verifier processes: {count} for training, {count} for evaluations")
    with contextlib.ExitStack() as opened, explained("the sampler", settings):
        training, evaluation = (make_verifier(config, opened) for _ in range(2))
        worker = make_worker(config, engine, tokenizer, stream, queue, training, ledger)
        close = opened.pop_all().close
    return Parts(
        arch=arch,
        state=state,
        step=step,
        diagnose=make_diagnosis(config, forward, step),
        assemble=assemble,
        annotate=make_annotate(config, forward, learner_mesh, assemble),
        flops=make_flops(config, arch),
        learning_rates=make_learning_rates(config),
        length_limit=make_length_budget(config).limit,
        queue=queue,
        worker=worker,
        stream=stream,
        evaluate=make_evaluator(
            config, engine, prompts.held_out, tokenizer, evaluation, progress
        ),
        agreement=make_agreement(config, engine, forward, prompts.held_out),
        to_sampler=to_sampler,
        ledger=ledger,
        learner_pool=pool_names(config)[0],
        verifier_restarts=lambda: training.restarts + evaluation.restarts,
        checkpointer=make_checkpointer(config, directory),
        progress=progress,
        close=close,
    )


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


def make_worker(
    config: Config,
    engine: Engine,
    tokenizer: Tokenizer,
    stream: Stream,
    queue: RolloutQueue,
    verifier: VerifierPool,
    ledger: Ledger,
) -> RolloutWorker:
    """The sampling thread, not started."""
    return RolloutWorker(
        scheduler=Scheduler(engine, kv_on_update=config.sampler.kv_on_update),
        stream=stream,
        queue=queue,
        verifier=verifier,
        judging=Judging(
            tokenizer=tokenizer,
            answer_after=answer_after(config),
            correct=config.reward.correct,
            wrong=config.reward.wrong,
            cut_off_is_wrong=config.objective.cut_off_completions == "wrong",
            unjudged_is_wrong=config.reward.unjudged == "wrong",
        ),
        sampling=make_distribution(config),
        make_samples=make_training_samples(config),
        ledger=ledger,
        flops=lambda stats: stats.flops(engine.settings.arch),
        pool=pool_names(config)[1],
        group_size=config.batch.group_size,
        group_timeout_s=config.queue.group_timeout_s,
    )
