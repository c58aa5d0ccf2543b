"""From a Config to the parts of a run: the only place that maps names to functions."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.algo import advantages, losses, weights
from scalerl_jax.config import Config
from scalerl_jax.data import tasks
from scalerl_jax.data.prompts import PromptStream, build_prompts
from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer
from scalerl_jax.evals.evaluate import Evaluator
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.optimizer import make_optimizer
from scalerl_jax.learner.publish import make_publish
from scalerl_jax.learner.step import (
    Forward,
    TokenLoss,
    TrainState,
    TrainStep,
    compile_train_step,
    init_state,
    make_train_step,
)
from scalerl_jax.model.architecture import ARCHITECTURES, Architecture
from scalerl_jax.model.shardings import batch_sharding, param_shardings
from scalerl_jax.model.transformer import init_params
from scalerl_jax.model.weights import load_params, read_architecture
from scalerl_jax.parallel.mesh import make_learner_mesh, split_devices
from scalerl_jax.rewards.verifier import VerifierPool
from scalerl_jax.rollout.agreement import measure_agreement
from scalerl_jax.rollout.assembly import Assembler, Normalize, Weigh
from scalerl_jax.rollout.queue import RolloutQueue
from scalerl_jax.rollout.worker import Judging, RolloutWorker
from scalerl_jax.sampler.engine import (
    NEVER,
    Engine,
    EngineSettings,
    Samples,
    padded_length,
)
from scalerl_jax.sampler.sampling import Purpose, interruption_lengths, sample_keys
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.train import Parts
from scalerl_jax.types import PackedBatch, Prompt, PyTree
from scalerl_jax.utils.ledger import Ledger

_log = logging.getLogger(__name__)
T = TypeVar("T")

LOSSES: dict[str, Callable[[Config], TokenLoss]] = {
    "cispo": lambda config: functools.partial(
        losses.cispo_loss,
        max_importance_ratio=config.objective.max_importance_ratio,
    ),
}
AGGREGATIONS: dict[str, Callable[[Config], Weigh]] = {
    "prompt": lambda config: functools.partial(
        weights.prompt_weights, group_size=config.batch.group_size
    ),
    "sample": lambda config: weights.sample_weights,
    "token": lambda config: weights.token_weights,
}
NORMALIZATIONS: dict[str, Callable[[Config], Normalize]] = {
    "batch": lambda config: functools.partial(
        advantages.normalize_by_batch, eps=config.objective.advantage_eps
    ),
    "prompt": lambda config: functools.partial(
        advantages.normalize_by_prompt,
        group_size=config.batch.group_size,
        eps=config.objective.advantage_eps,
    ),
    "none": lambda config: advantages.unnormalized,
}
DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def choose(table: dict[str, T], name: str, *, setting: str) -> T:
    """The entry called `name`; a wrong name is answered with the right ones."""
    if name not in table:
        raise ValueError(f"{setting} = {name!r}; choose from {sorted(table)}")
    return table[name]


def build(config: Config, directory: Path, ledger: Ledger) -> Parts:
    """Every part of a run, compiled, and the sampler checked against the learner.

    Raises:
        ValueError: a setting or a file that it names cannot be used.
    """
    arch = make_architecture(config)
    tokenizer = make_tokenizer(config, arch)
    train_prompts, eval_prompts = make_prompts(config, tokenizer)
    learner_mesh, sampler_mesh = make_meshes(config)
    forward = make_forward(config, arch)
    state, step = make_learner(config, forward, learner_mesh)
    to_sampler = make_publish(
        arch,
        dtype=DTYPES[config.model.sampler_dtype],
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
    )
    settings = make_engine_settings(config, arch, tokenizer)
    engine = Engine(settings, mesh=sampler_mesh)
    published = to_sampler(state.params)
    check_agreement(config, engine, forward, state, published, eval_prompts)

    queue = RolloutQueue(
        num_prompts=config.batch.num_prompts,
        max_staleness=config.queue.max_staleness,
        mode=config.queue.mode,
        num_steps=config.train.num_steps,
    )
    retire_at = (
        config.data.max_history_pass_rate
        if config.data.no_positive_resampling
        else None
    )
    stream = PromptStream(train_prompts, seed=config.seed, max_pass_rate=retire_at)
    verifiers = [
        VerifierPool(score=tasks.score, timeout_s=config.reward.timeout_s)
        for _ in ("training", "evaluation")
    ]
    learner_pool, sampler_pool = pool_names(config)
    worker = RolloutWorker(
        scheduler=Scheduler(engine),
        stream=stream,
        queue=queue,
        verifier=verifiers[0],
        judging=Judging(
            tokenizer=tokenizer,
            answer_after=config.data.answer_after,
            correct=config.reward.correct,
            wrong=config.reward.wrong,
        ),
        make_samples=make_sampling(config, "train", config.batch.group_size),
        ledger=ledger,
        flops_per_token=arch.flops_per_token,
        pool=sampler_pool,
        group_size=config.batch.group_size,
        group_timeout_s=config.queue.group_timeout_s,
    )
    evaluator = make_evaluator(
        config, engine, sampler_mesh, eval_prompts, tokenizer, verifiers[1]
    )
    batch_shardings = batch_sharding(learner_mesh)

    def close() -> None:
        for verifier in verifiers:
            verifier.close()

    return Parts(
        arch=arch,
        state=state,
        step=step,
        assemble=make_assembler(config),
        queue=queue,
        worker=worker,
        stream=stream,
        evaluate=evaluator,
        to_sampler=to_sampler,
        put_batch=lambda batch: jax.device_put(batch, batch_shardings),
        ledger=ledger,
        learner_pool=learner_pool,
        checkpointer=Checkpointer(
            directory / "checkpoints",
            every=config.checkpoint.every,
            keep=config.checkpoint.keep,
        ),
        close=close,
    )


def make_architecture(config: Config) -> Architecture:
    """The shape that is named, or that of the checkpoint."""
    if config.model.architecture == "checkpoint":
        return read_architecture(config.model.checkpoint)
    return choose(
        ARCHITECTURES, config.model.architecture, setting="model.architecture"
    )


def make_tokenizer(config: Config, arch: Architecture) -> Tokenizer:
    """The tokenizer, if the model has an embedding for each of its ids."""
    tokenizer = load_tokenizer(config.data.tokenizer or config.model.checkpoint)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"data.tokenizer has {tokenizer.vocab_size} ids and the model "
            f"{arch.vocab_size} embeddings; use the tokenizer of the checkpoint"
        )
    return tokenizer


def make_prompts(
    config: Config, tokenizer: Tokenizer
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Training and held-out prompts."""
    splits = tasks.make_splits(
        config.data.tasks,
        train_prompts=config.data.train_prompts,
        eval_prompts=config.eval.num_prompts,
        seed=config.seed,
    )
    train, held_out = (
        build_prompts(
            questions,
            encode=tokenizer.encode,
            template=config.data.template,
            max_prompt_tokens=config.sampler.max_prompt_tokens,
        )
        for questions in splits
    )
    return train, held_out


def make_meshes(config: Config) -> tuple[Mesh, Mesh]:
    """The learner's mesh and the sampler's; they share devices on a small machine."""
    mesh = config.mesh
    learner_devices, sampler_devices = split_devices(
        jax.devices(),
        learner_count=mesh.data * mesh.fsdp * mesh.tensor,
        sampler_count=mesh.sampler_devices,
    )
    if not mesh.sampler_devices:
        sampler_devices = learner_devices[: mesh.tensor]
    return (
        make_learner_mesh(learner_devices, mesh.data, mesh.fsdp, mesh.tensor),
        make_learner_mesh(sampler_devices, 1, 1, len(sampler_devices)),
    )


def pool_names(config: Config) -> tuple[str, str]:
    """Pools of the ledger for the learner and for the sampler."""
    return ("learner", "sampler") if config.mesh.sampler_devices else ("all", "all")


def make_ledger(config: Config) -> Ledger:
    """A ledger of the chips that the run holds."""
    mesh = config.mesh
    learner_pool, sampler_pool = pool_names(config)
    pools = {sampler_pool: mesh.sampler_devices}
    pools[learner_pool] = mesh.data * mesh.fsdp * mesh.tensor
    return Ledger(pools=pools, chip=mesh.chip or jax.devices()[0].device_kind)


def make_forward(config: Config, arch: Architecture) -> Forward:
    """The learner's forward pass, at the temperature of the sampler."""
    return Forward(
        arch=arch,
        dtype=DTYPES[config.model.compute_dtype],
        remat=config.model.remat,
        float32_head=config.model.float32_head,
        chunk_tokens=config.model.head_chunk_tokens,
        temperature=config.sampler.temperature,
    )


def make_learner(
    config: Config, forward: Forward, mesh: Mesh
) -> tuple[TrainState, TrainStep]:
    """The state at version 0 on its mesh, and the compiled step."""
    arch, dtype = forward.arch, DTYPES[config.model.param_dtype]
    shardings = param_shardings(arch, mesh)
    if config.model.checkpoint:
        params = load_params(
            config.model.checkpoint, arch, dtype=dtype, shardings=shardings
        )
    else:
        params = jax.jit(
            functools.partial(init_params, arch, dtype=dtype), out_shardings=shardings
        )(jax.random.key(config.seed))
    settings = config.optimizer
    optimizer = make_optimizer(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )
    # Adam's moments are laid out as the params are; counters are everywhere.
    state = jax.jit(functools.partial(init_state, optimizer=optimizer))(params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, everywhere), state
    )
    state_sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_train_step(
        forward,
        optimizer,
        choose(LOSSES, config.objective.loss, setting="objective.loss")(config),
        max_importance_ratio=config.objective.max_importance_ratio,
    )
    compiled = compile_train_step(
        step, state_sharding=state_sharding, batch_sharding=batch_sharding(mesh)
    )
    return state, compiled.lower(state, abstract_batch(config)).compile()


def num_microbatches(config: Config) -> int:
    """M: enough for a batch in which no two rollouts share a row."""
    rollouts = config.batch.num_prompts * config.batch.group_size
    return -(-rollouts // config.batch.rows_per_microbatch)


def abstract_batch(config: Config) -> PackedBatch:
    """Shapes and dtypes of a batch, without any memory."""
    batch = config.batch
    shape = (num_microbatches(config), batch.rows_per_microbatch, batch.row_tokens)
    integers = ("tokens", "segment_ids", "positions", "targets", "staleness")
    floats = ("weights", "advantages", "behavior_logprobs")
    leaves: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in integers
    }
    leaves |= {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in floats}
    leaves["mask"] = jax.ShapeDtypeStruct(shape, jnp.bool_)
    leaves["num_microbatches"] = jax.ShapeDtypeStruct((), jnp.int32)
    return PackedBatch(**leaves)


def make_assembler(config: Config) -> Assembler:
    """The objective's part that runs on whole batches."""
    objective, batch = config.objective, config.batch
    return Assembler(
        normalize=choose(
            NORMALIZATIONS,
            objective.advantage_normalization,
            setting="objective.advantage_normalization",
        )(config),
        weigh=choose(
            AGGREGATIONS, objective.aggregation, setting="objective.aggregation"
        )(config),
        zero_variance_filter=objective.zero_variance_filter,
        mask_cut_off=objective.cut_off_completions == "mask",
        group_size=batch.group_size,
        max_completion_tokens=config.sampler.max_completion_tokens,
        row_tokens=batch.row_tokens,
        rows_per_microbatch=batch.rows_per_microbatch,
        num_microbatches=num_microbatches(config),
        packing=batch.packing,
    )


def make_engine_settings(
    config: Config, arch: Architecture, tokenizer: Tokenizer
) -> EngineSettings:
    """What the sampler's programs depend on."""
    sampler, interruption = config.sampler, config.interruption
    phrase: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    if interruption.enabled:
        phrase = tuple(tokenizer.encode(interruption.phrase))
        end = tuple(tokenizer.encode(interruption.end_of_thinking))
        room = sampler.max_completion_tokens - interruption.max_tokens
        if len(phrase) >= room:
            raise ValueError(
                f"interruption.phrase has {len(phrase)} tokens and "
                f"sampler.max_completion_tokens - interruption.max_tokens = {room} "
                f"leaves no room for an answer after it"
            )
    return EngineSettings(
        arch=arch,
        slots=sampler.slots,
        max_prompt_tokens=sampler.max_prompt_tokens,
        max_completion_tokens=sampler.max_completion_tokens,
        tokens_per_call=sampler.tokens_per_call,
        dtype=DTYPES[config.model.sampler_dtype],
        eos_ids=tokenizer.eos_ids,
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        float32_head=config.model.float32_head,
        phrase=phrase,
        end_of_thinking=end,
    )


def make_sampling(
    config: Config, purpose: Purpose, num_samples: int
) -> Callable[[Prompt], Samples]:
    """Keys and interruption lengths of a prompt's samples."""
    interruption = config.interruption

    def make_samples(prompt: Prompt) -> Samples:
        keys = sample_keys(
            config.seed,
            purpose,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            num_samples=num_samples,
        )
        if not interruption.enabled:
            limits: Any = np.full(num_samples, NEVER, np.int32)
        else:
            limits = interruption_lengths(
                keys,
                min_tokens=interruption.min_tokens,
                max_tokens=interruption.max_tokens,
            )
        return Samples(keys=keys, thinking_limits=limits)

    return make_samples


def make_evaluator(
    config: Config,
    engine: Engine,
    mesh: Mesh,
    prompts: tuple[Prompt, ...],
    tokenizer: Tokenizer,
    verifier: VerifierPool,
) -> Evaluator:
    """Evaluation on the training engine, or on one of its own temperature."""
    if config.eval.temperature != config.sampler.temperature:
        settings = engine.settings
        engine = Engine(
            dataclasses.replace(settings, temperature=config.eval.temperature),
            mesh=mesh,
        )
    return Evaluator(
        engine=engine,
        prompts=prompts,
        samples_per_prompt=config.eval.samples_per_prompt,
        make_samples=make_sampling(config, "eval", config.eval.samples_per_prompt),
        verifier=verifier,
        tokenizer=tokenizer,
        answer_after=config.data.answer_after,
        logged_rollouts=config.eval.logged_rollouts,
        timeout_s=config.reward.timeout_s,
    )


def check_agreement(
    config: Config,
    engine: Engine,
    forward: Forward,
    state: TrainState,
    published: PyTree,
    prompts: tuple[Prompt, ...],
) -> None:
    """Refuse to train on a sampler that is not the policy; compiles the engine.

    Raises:
        RuntimeError: the mean difference passes `train.max_mismatch_nats`.
    """
    by_bucket = {
        padded_length(len(prompt.tokens), longest=engine.max_prefill_length): prompt
        for prompt in prompts
    }
    agreement = measure_agreement(
        engine,
        published,
        forward,
        state.params,
        prompts=list(by_bucket.values()),
        make_samples=make_sampling(config, "eval", config.batch.group_size),
        row_tokens=config.batch.row_tokens,
        rows_per_microbatch=config.batch.rows_per_microbatch,
    )
    _log.info(
        "sampler and learner differ by %.2e nats on average, %.2e at most (%d tokens)",
        *dataclasses.astuple(agreement),
    )
    if config.sampler.top_k or config.sampler.top_p < 1.0:
        return  # the learner's distribution is the unfiltered one: they must differ
    limit = config.train.max_mismatch_nats
    if not agreement.mean_abs <= limit:
        raise RuntimeError(
            f"the sampler's and the learner's log-probabilities differ by "
            f"{agreement.mean_abs:.3g} nats on average over {agreement.tokens} tokens "
            f"of one version; train.max_mismatch_nats = {limit}. Check model.* dtypes "
            f"and the checkpoint before raising the limit"
        )
