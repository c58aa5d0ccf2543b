"""Build the critic and the annotation of windows from a Config.

A critic has a train state and a part of the step.  Windows are annotated with scores of
other params: the reference's, those at the start of the window, the critic's.
"""

import dataclasses
import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.config import Config
from scalerl_jax.learner.critic import (
    PairedStep,
    critic_params,
    make_critic_accumulate,
    make_critic_update,
    token_values,
)
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.step import (
    Accumulate,
    TrainState,
    TrainStep,
    Update,
    init_state,
    state_layout,
)
from scalerl_jax.learner.window_scores import Score, Scorer, of_state
from scalerl_jax.objective.assembly import make_pack
from scalerl_jax.objective.scores import OF_POLICY
from scalerl_jax.objective.terms import needs_of
from scalerl_jax.types import PyTree


def abstract_critic(
    params: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Return shapes, dtypes and shardings of the critic of a policy with `params`.

    Its trunk is sharded like the policy's; its head is replicated.
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
    """Return the critic, on its mesh, of a policy that starts with `params`.

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
    policy: tuple[Accumulate, Update],
    optimizer: optax.GradientTransformation,
    *,
    state: TrainState,
    **like: Any,
) -> PairedStep:
    """Return the policy's step and the critic's.

    `optimizer` is the critic's; `like` are further keyword arguments of a `TrainStep`.
    """
    assert state.critic is not None, "the objective has a critic"
    accumulate, update = policy
    critic = TrainStep(
        make_critic_accumulate(forward, value_clip=config.critic.value_clip),
        make_critic_update(
            optimizer, stochastic_rounding=config.optimizer.stochastic_rounding
        ),
        state=state.critic,
        **like,
    )
    return PairedStep(
        accumulate,
        update,
        critic=critic,
        num_minibatches=config.critic.minibatches,
        state=dataclasses.replace(state, critic=None),
        **like,
    )


def make_scores(
    config: Config, forward: Forward, mesh: Mesh, *, state: TrainState
) -> dict[str, Score]:
    """Return the scores of a window's batches under params of the train state.

    Their programs are compiled; `state` may be abstract.
    """
    names = needs_of(config).of_params
    shapes = {"batch": make_pack(config, forward.arch)[1], "mesh": mesh}
    scores: dict[str, Score] = {}
    of_policy = [name for name in names if name in OF_POLICY]
    if of_policy:
        # The reference has the policy's shapes and shardings: one program for both.
        scorer = Scorer(
            lambda params, batch: forward.logprobs(params, batch)[0],
            params=state.policy,
            **shapes,
        )
        scorer.compile()
        scores |= {name: of_state(name, scorer) for name in of_policy}
    if state.critic is not None:
        compute = functools.partial(token_values, forward=forward)
        scorer = Scorer(compute, params=state.critic.params, **shapes)
        scorer.compile()
        scores["values"] = of_state("values", scorer)
    return scores
