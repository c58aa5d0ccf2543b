"""Build the learner from a Config: its mesh, state, compiled step and batches."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.config import Config, OptimizerConfig, naming
from scalerl_jax.learner.forward import Forward, LearnerFlops
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.nonfinite import Diagnosis
from scalerl_jax.learner.optimizer import make_optimizer, make_schedule
from scalerl_jax.learner.step import (
    TrainState,
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
    state_layout,
)
from scalerl_jax.learner.window_scores import Annotator
from scalerl_jax.model.architecture import (
    Architecture,
    param_shardings,
    parameter_table,
)
from scalerl_jax.model.attention import BlockwiseAttention, SegmentAttention
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.lora import abstract_factors, factor_table, init_factors, sizes
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.trainable import frozen_params, split
from scalerl_jax.model.transformer import abstract_params, init_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.objective.assembly import make_pack
from scalerl_jax.objective.balance import make_balance
from scalerl_jax.objective.terms import (
    make_objective,
    needs_of,
    with_scores,
)
from scalerl_jax.run.progress import Progress
from scalerl_jax.types import PackedBatch, PyTree
from scalerl_jax.wiring.adapters import check_adapter, load_factors
from scalerl_jax.wiring.annotation import (
    abstract_critic,
    make_critic,
    make_paired_step,
    make_scores,
)
from scalerl_jax.wiring.mixtures import load_with_biases, with_router
from scalerl_jax.wiring.teacher import (
    make_asked_teacher,
    make_teacher,
    read_teacher,
)


def make_architecture(config: Config) -> Architecture:
    """Return the architecture model.architecture, or the checkpoint's.

    If objective.expert_bias_rate is set, its router has a bias.

    Raises:
        ValueError: the name is unknown, the checkpoint cannot be read, or settings of
            experts do not fit.
    """
    name = config.model.architecture
    if name == "checkpoint":
        with naming("model.checkpoint"):
            arch = read_architecture(config.model.checkpoint)
    else:
        if name not in ARCHITECTURES:
            raise ValueError(
                f"model.architecture = {name!r}; choose from {sorted(ARCHITECTURES)}"
            )
        arch = ARCHITECTURES[name]
    return with_router(config, arch) if needs_of(config).router else arch


def make_forward(config: Config, arch: Architecture, mesh: Mesh) -> Forward:
    """Return the learner's forward pass, at the sampler's temperature."""
    model = config.model
    return Forward(
        arch=arch,
        dtype=jnp.dtype(model.compute_dtype),
        remat=model.remat,
        mesh=mesh,
        scan_layers=model.scan_layers,
        attention=make_attention(config, arch, mesh),
        head=Head(
            mesh=mesh,
            temperature=config.sampler.temperature,
            float32_head=model.float32_head,
            weights_dtype=jnp.dtype(model.head_weights_dtype),
            chunk_tokens=model.head_chunk_tokens,
            chunk_vocab=model.head_chunk_vocab,
        ),
    )


def make_attention(config: Config, arch: Architecture, mesh: Mesh) -> SegmentAttention:
    """Return the learner's attention; on a CPU Pallas is not imported for it."""
    model, platform = config.model, mesh.devices.flat[0].platform
    if model.attention == "auto" and platform == "cpu":
        return BlockwiseAttention(mesh, block=model.attention_block)
    from scalerl_jax.model.attention_kernels import choose_attention  # Pallas

    return choose_attention(
        model.attention,
        arch=arch,
        mesh=mesh,
        dtype=jnp.dtype(model.compute_dtype),
        row_tokens=config.batch.row_tokens,
        row_segments=config.batch.packed_segments,
        block=model.attention_block,
    )


def make_learning_rates(config: Config) -> optax.Schedule:
    """Return the policy's schedule: version -> learning rate of the next step.

    It is 0 while only the critic learns, which the optimizer's count leaves out.
    """
    rates, held = _learning_rates(config, config.optimizer), config.held_steps

    def rate(version: Any) -> Any:
        return rates(version - held) if version >= held else 0.0

    return rate


def _learning_rates(config: Config, settings: OptimizerConfig) -> optax.Schedule:
    batch, peak, decay_steps = config.batch, settings.learning_rate, 0
    if settings.base_rollouts:
        # IsoCompute Playbook, https://arxiv.org/abs/2603.12151: 1e-6 at 1024 rollouts;
        # at 8192 a constant rate was too slow and a linear one unstable.
        rollouts = batch.num_prompts * batch.group_size
        peak *= math.sqrt(rollouts / settings.base_rollouts)
    if settings.schedule == "cosine":
        decay_steps = settings.decay_steps or config.train.num_steps - config.held_steps
    return make_schedule(
        learning_rate=peak,
        warmup_steps=settings.warmup_steps,
        decay_steps=decay_steps,
        final_share=settings.final_share,
    )


def make_adamw(config: Config) -> optax.GradientTransformation:
    """Return the optimizer; the shape of a saved train state depends on it."""
    return _adamw(config, config.optimizer)


def make_critic_adamw(config: Config) -> optax.GradientTransformation:
    """Return the critic's optimizer: the policy's with another rate and warm-up.

    No weight of the critic is frozen.  With a cosine schedule both rates end together:
    the critic's lasts `minibatches` times as many of its own steps, and it also makes
    those that the policy does not.
    """
    critic, policy = config.critic, config.optimizer
    decay_steps = config.train.num_steps
    if policy.decay_steps:
        decay_steps = config.held_steps + policy.decay_steps
    settings = dataclasses.replace(
        policy,
        learning_rate=critic.learning_rate,
        warmup_steps=critic.warmup_steps,
        decay_steps=decay_steps * critic.minibatches,
        base_rollouts=0,  # it is of the policy's rate
    )
    return _adamw(config, settings)


def _adamw(config: Config, settings: OptimizerConfig) -> optax.GradientTransformation:
    return make_optimizer(
        _learning_rates(config, settings),
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def make_learner(
    config: Config, forward: Forward, mesh: Mesh, progress: Progress
) -> tuple[TrainState, TrainStep]:
    """Return the state at version 0 on its mesh, and the compiled step."""
    arch = forward.arch
    params = start_params(config, arch, param_shardings(arch, mesh))
    trained, frozen = split_params(config, arch, params, mesh)
    needs = needs_of(config)
    layout = abstract_state(config, arch, mesh)
    layout = dataclasses.replace(layout, critic=None, frozen=None)
    state = jax.jit(
        functools.partial(
            init_state,
            optimizer=make_adamw(config),
            with_reference=needs.reference,
        ),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, layout),
    )(trained)
    state = dataclasses.replace(state, frozen=frozen)
    if needs.critic:
        critic = make_critic(params, make_critic_adamw(config), mesh)
        state = dataclasses.replace(state, critic=critic)
    step = make_train_step(config, forward, mesh)
    with progress.bar("compiling the train step"):
        step.compile(progress.program)
    return state, step


def start_params(config: Config, arch: Architecture, shardings: PyTree) -> PyTree:
    """Return the policy's weights at version 0: the checkpoint's, or random ones.

    Raises:
        ValueError: the checkpoint cannot be read.
    """
    dtype = jnp.dtype(config.model.param_dtype)
    if source := config.model.checkpoint:
        load = load_params
        if arch.experts is not None and arch.experts.bias:
            load = load_with_biases
        with naming("model.checkpoint"):
            return load(source, arch, dtype=dtype, shardings=shardings)
    return jax.jit(
        functools.partial(init_params, arch, dtype=dtype), out_shardings=shardings
    )(jax.random.key(config.seed))


def split_params(
    config: Config, arch: Architecture, params: PyTree, mesh: Mesh
) -> tuple[PyTree, PyTree | None]:
    """Return the trained params at version 0, and the frozen ones (None: all train).

    `params` are the policy's own weights; abstract ones give abstract trees.
    """
    lora = config.model.lora
    if not lora.rank:
        if not config.model.frozen:
            return params, None
        return split(params, frozen_params(params, config.model.frozen))
    factors = abstract_factors(arch, lora, mesh)
    if not isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, factors)
        if lora.adapter:
            return load_factors(config, arch, params, shardings), params
        factors = jax.jit(
            functools.partial(init_factors, arch, lora), out_shardings=shardings
        )(jax.random.key(config.seed))
    return factors, params


def start_frozen(config: Config, arch: Architecture, mesh: Mesh) -> PyTree | None:
    """Return the params that a run does not train; None: it trains all.

    Raises:
        ValueError: their checkpoint cannot be read.
    """
    abstract = abstract_state(config, arch, mesh)
    if abstract.frozen is None:
        return None
    params = start_params(config, arch, param_shardings(arch, mesh))
    return (
        params
        if config.model.lora.rank
        else split_params(config, arch, params, mesh)[1]
    )


def check_trained(config: Config, arch: Architecture) -> None:
    """Refuse model.frozen and model.lora settings that do not fit the model.

    Raises:
        ValueError: names the setting, and the names that the model has.
    """
    if config.model.frozen:
        held = frozen_params(parameter_table(arch), config.model.frozen)
        if config.objective.expert_bias_rate and held["layers"].get("router_bias"):
            raise ValueError(
                f"model.frozen = {config.model.frozen!r} holds layers/router_bias, "
                f"which objective.expert_bias_rate = "
                f"{config.objective.expert_bias_rate} moves; set that to 0"
            )
    if config.model.lora.rank:
        factor_table(arch, config.model.lora)
    if config.model.lora.adapter:
        check_adapter(config, arch)


def abstract_state(config: Config, arch: Architecture, mesh: Mesh) -> TrainState:
    """Return shapes, dtypes and shardings of the train state, without allocation."""
    params = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        abstract_params(arch, dtype=jnp.dtype(config.model.param_dtype)),
        param_shardings(arch, mesh),
    )
    needs = needs_of(config)
    trained, frozen = split_params(config, arch, params, mesh)
    state = state_layout(
        trained,
        make_adamw(config),
        everywhere=NamedSharding(mesh, PartitionSpec()),
        with_reference=needs.reference,
    )
    state = dataclasses.replace(state, frozen=frozen)
    if not needs.critic:
        return state

    critic = abstract_critic(params, make_critic_adamw(config), mesh)
    return dataclasses.replace(state, critic=critic)


def make_train_step(config: Config, forward: Forward, mesh: Mesh) -> TrainStep:
    """Return the objective's train step, not compiled; `mesh` may be abstract."""
    state = abstract_state(config, forward.arch, mesh)
    batch = with_scores(make_pack(config, forward.arch)[1], needs_of(config))
    balance = make_balance(config)
    update = make_update(
        make_adamw(config),
        stochastic_rounding=config.optimizer.stochastic_rounding,
        reference_every=config.objective.reference_every,
        hold_steps=config.held_steps,
        balance=balance,
    )
    accumulate = make_accumulate(forward, make_objective(config), balance=balance)
    like: Any = dict(batch=batch, mesh=mesh, short_rows=config.short_rows)
    if state.critic is None:
        return TrainStep(accumulate, update, state=state, **like)

    return make_paired_step(
        config,
        forward,
        (accumulate, update),
        make_critic_adamw(config),
        state=state,
        **like,
    )


def make_flops(config: Config, arch: Architecture) -> LearnerFlops:
    """Return the FLOPs of the objective's passes."""
    needs = needs_of(config)
    products = sizes(config.model, arch, products=True)
    return LearnerFlops(
        arch=arch,
        scores=needs.passes,
        critic_passes=int(needs.critic),
        frozen=products.frozen,
        factors=products.trained if config.model.lora.rank else 0.0,
        teacher=read_teacher(config) if config.teacher.checkpoint else None,
    )


def make_diagnosis(
    config: Config, forward: Forward, step: TrainStep
) -> Callable[..., str]:
    """Return a function (params, batch, frozen params) -> reason for a skipped step."""

    def diagnose(
        params: PyTree, batch: PackedBatch, frozen: PyTree | None = None
    ) -> str:
        objective = make_objective(config)
        diagnosis = Diagnosis(step=step, forward=forward, objective=objective)
        return diagnosis(params, batch, frozen)

    return diagnose


def make_annotate(config: Config, forward: Forward, mesh: Mesh) -> Annotator:
    """Return what scores a window's batches before its first step."""
    if not needs_of(config).of_params:
        return Annotator(scores={})

    state = abstract_state(config, forward.arch, mesh)
    scores, digest = make_scores(config, forward, mesh, state=state), ""
    if config.teacher.endpoint:
        scores["teacher"] = make_asked_teacher(config)
    elif config.teacher.checkpoint:
        own = make_forward(config, read_teacher(config), mesh)
        batch = make_pack(config, forward.arch)[1]
        scores["teacher"], digest = make_teacher(config, own, mesh, batch=batch)
    return Annotator(scores=scores, teacher=digest)
