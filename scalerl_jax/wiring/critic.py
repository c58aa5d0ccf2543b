"""A critic from a Config: its state, its part of a step, its part of an annotation."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.config import Config
from scalerl_jax.learner.critic import (
    CriticAdvantages,
    PairedStep,
    critic_params,
    make_critic_accumulate,
    make_critic_update,
    token_values,
)
from scalerl_jax.learner.forward import Forward, Scorer
from scalerl_jax.learner.step import TrainState, TrainStep, init_state, state_layout
from scalerl_jax.types import PackedBatch, PyTree


def abstract_critic(
    params: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and shardings of the critic of a policy with these `params`.

    Its trunk is cut as theirs, its head not at all.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    own = {
        name: jax.tree.map(
            lambda leaf, like: leaf.update(sharding=like.sharding), shapes, params[name]
        )
        if name in params
        else shapes.update(sharding=everywhere)
        for name, shapes in jax.eval_shape(critic_params, params).items()
    }
    return state_layout(own, optimizer, everywhere=everywhere)


def make_critic(
    params: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The critic of a policy that starts with these `params`, on its mesh.

    Its `policy_version` counts its own steps.
    """
    layout = abstract_critic(params, optimizer, mesh)
    return jax.jit(
        lambda params: init_state(critic_params(params), optimizer),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, layout),
    )(params)


def make_paired_step(
    config: Config,
    forward: Forward,
    policy: TrainStep,
    optimizer: optax.GradientTransformation,
    *,
    critic: TrainState,
    batch: PackedBatch,
    mesh: Mesh,
) -> PairedStep:
    """The policy's step and the critic's, for a `critic` and microbatches like these.

    `optimizer` is the critic's.
    """
    step = TrainStep(
        make_critic_accumulate(forward, value_clip=config.critic.value_clip),
        make_critic_update(
            optimizer, stochastic_rounding=config.optimizer.stochastic_rounding
        ),
        state=critic,
        batch=batch,
        mesh=mesh,
    )
    return PairedStep(policy, step, num_minibatches=config.critic.minibatches)


def make_critic_advantages(
    config: Config,
    forward: Forward,
    *,
    critic: TrainState,
    batch: PackedBatch,
    mesh: Mesh,
    penalties: Callable[[PackedBatch], np.ndarray] | None = None,
) -> CriticAdvantages:
    """Make what turns the rewards of a window into advantages, its program compiled."""
    objective = config.objective
    values = Scorer(
        functools.partial(token_values, forward=forward),
        params=critic.params,
        batch=batch,
        mesh=mesh,
    )
    values.compile()
    return CriticAdvantages(
        values=values,
        gamma=config.critic.gamma,
        gae_lambda=config.critic.gae_lambda,
        eps=objective.advantage_eps
        if objective.advantage_normalization == "batch"
        else None,
        penalties=penalties,
    )
