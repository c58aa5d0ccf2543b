"""The learner from a Config: its mesh, state, compiled step and batches."""

import functools
import logging

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.build.tables import (
    AGGREGATIONS,
    DTYPES,
    LOSSES,
    NORMALIZATIONS,
    choose,
    naming,
)
from scalerl_jax.config import Config
from scalerl_jax.learner.optimizer import make_optimizer
from scalerl_jax.learner.step import (
    Forward,
    TrainState,
    TrainStep,
    compile_train_step,
    init_state,
    make_train_step,
    state_shardings,
)
from scalerl_jax.model.architecture import ARCHITECTURES, Architecture
from scalerl_jax.model.shardings import batch_sharding, param_shardings
from scalerl_jax.model.transformer import init_params
from scalerl_jax.model.weights import load_params, read_architecture
from scalerl_jax.parallel.mesh import make_learner_mesh, split_devices
from scalerl_jax.rollout.assembly import Assembler
from scalerl_jax.rollout.batching import pack
from scalerl_jax.types import PackedBatch
from scalerl_jax.utils.ledger import Ledger

_log = logging.getLogger(__name__)


def make_architecture(config: Config) -> Architecture:
    """The shape that is named, or that of the checkpoint."""
    if config.model.architecture == "checkpoint":
        with naming("model.checkpoint"):
            return read_architecture(config.model.checkpoint)
    return choose(
        ARCHITECTURES, config.model.architecture, setting="model.architecture"
    )


def make_meshes(config: Config, arch: Architecture) -> tuple[Mesh, Mesh]:
    """The learner's mesh and the sampler's; they share devices on a small machine."""
    mesh = config.mesh
    learner_devices, sampler_devices = split_devices(
        jax.devices(),
        learner_count=mesh.data * mesh.fsdp * mesh.tensor,
        sampler_count=mesh.sampler_devices,
    )
    if not mesh.sampler_devices:
        sampler_devices = learner_devices[: mesh.tensor]
    elif arch.num_kv_heads % mesh.sampler_devices:
        raise ValueError(
            f"mesh.sampler_devices = {mesh.sampler_devices} cannot share the "
            f"{arch.num_kv_heads} kv heads of the model evenly; use a divisor"
        )
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


def make_adamw(config: Config) -> optax.GradientTransformation:
    """The optimizer; the shape of a saved train state depends on it."""
    settings = config.optimizer
    return make_optimizer(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def make_learner(
    config: Config, forward: Forward, mesh: Mesh
) -> tuple[TrainState, TrainStep]:
    """The state at version 0 on its mesh, and the compiled step."""
    arch, dtype = forward.arch, DTYPES[config.model.param_dtype]
    shardings = param_shardings(arch, mesh)
    if config.model.checkpoint:
        with naming("model.checkpoint"):
            params = load_params(
                config.model.checkpoint, arch, dtype=dtype, shardings=shardings
            )
    else:
        params = jax.jit(
            functools.partial(init_params, arch, dtype=dtype), out_shardings=shardings
        )(jax.random.key(config.seed))
    _log.info("compiling")
    optimizer = make_adamw(config)
    state_sharding = state_shardings(
        params, optimizer, everywhere=NamedSharding(mesh, PartitionSpec())
    )
    state = jax.jit(
        functools.partial(init_state, optimizer=optimizer),
        out_shardings=state_sharding,
    )(params)
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
    """Shapes and dtypes of a batch."""
    empty = pack(
        [],
        row_tokens=config.batch.row_tokens,
        rows_per_microbatch=config.batch.rows_per_microbatch,
        num_microbatches=num_microbatches(config),
    )
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), empty
    )


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
