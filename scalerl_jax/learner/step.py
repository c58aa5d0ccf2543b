"""The train step: state and batch in, state and metrics out; and its compilation.

`make_train_step` gives a pure function without a mesh; `compile_train_step` lays it
over one and donates the state.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int

from scalerl_jax.algo import diagnostics
from scalerl_jax.learner.logprobs import token_logprobs
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.transformer import head_weights, hidden_states
from scalerl_jax.types import PackedBatch, PyTree

# logprobs, behavior logprobs, advantages -> loss of each token
TokenLoss = Callable[[Array, Array, Array], Array]


@struct.dataclass(kw_only=True)
class TrainState:
    """What an optimizer step changes."""

    params: PyTree
    opt_state: PyTree
    policy_version: Int[Array, ""]  # optimizer steps applied


@struct.dataclass(kw_only=True)
class Forward:
    """How hidden states and log-probabilities are computed; static."""

    arch: Architecture = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    remat: str = struct.field(pytree_node=False, default="none")
    float32_head: bool = struct.field(pytree_node=False, default=True)
    chunk_tokens: int = struct.field(pytree_node=False, default=1024)
    temperature: float = struct.field(pytree_node=False, default=1.0)

    def logprobs(
        self,
        params: PyTree,
        tokens: Int[Array, "R S"],
        *,
        positions: Int[Array, "R S"],
        segment_ids: Int[Array, "R S"],
        targets: Int[Array, "R S"],
    ) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
        """Log-probability of every target and the entropies, in nats."""
        hidden = hidden_states(
            params,
            self.arch,
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            dtype=self.dtype,
            remat=self.remat,
        )
        return token_logprobs(
            hidden,
            head_weights(params),
            targets,
            temperature=self.temperature,
            float32_head=self.float32_head,
            chunk_tokens=self.chunk_tokens,
        )


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state at version 0."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        policy_version=jnp.zeros((), jnp.int32),
    )


def state_shardings(
    params: PyTree, optimizer: optax.GradientTransformation, *, everywhere: Sharding
) -> TrainState:
    """A sharding per leaf of the state: moments as their params, counters everywhere.

    It has to be said.  Moments start as zeros, which depend on no param: left to
    itself, the compiler puts the whole of them on every device.
    """
    state = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), params)
    moments = optax.tree.map_params(
        optimizer,
        lambda _, param: param.sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return jax.tree.map(lambda _: everywhere, state).replace(
        params=jax.tree.map(lambda param: param.sharding, params), opt_state=moments
    )


TrainStep = Callable[[TrainState, PackedBatch], tuple[TrainState, dict[str, Array]]]


def make_train_step(
    forward: Forward,
    optimizer: optax.GradientTransformation,
    token_loss: TokenLoss,
    *,
    max_importance_ratio: float,
) -> TrainStep:
    """One optimizer step on a packed batch.

        loss = sum over all tokens of weights * token_loss

    The weights are those of the global batch, so the sum over microbatches is the
    loss itself, however the batch was cut.  A step whose loss or gradient is not
    finite leaves the state as it was; the metric "skipped" is then 1.
    """
    gradient = jax.value_and_grad(
        functools.partial(
            _microbatch_loss,
            forward=forward,
            token_loss=token_loss,
            max_importance_ratio=max_importance_ratio,
        ),
        has_aux=True,
    )

    def train_step(
        state: TrainState, batch: PackedBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        loss, grads, sums, maxima = _sum_microbatches(gradient, state.params, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updated = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            policy_version=state.policy_version + 1,
        )
        state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), updated, state
        )
        metrics = diagnostics.token_summary(sums, maxima)
        metrics |= {"loss": loss, "grad_norm": grad_norm, "skipped": ~finite}
        return state, metrics

    return train_step


def _microbatch_loss(
    params: PyTree,
    batch: PackedBatch,
    *,
    forward: Forward,
    token_loss: TokenLoss,
    max_importance_ratio: float,
) -> tuple[Array, tuple[dict[str, Array], dict[str, Array]]]:
    """Loss of a microbatch [R, S]; sums and maxima of its tokens."""
    logprobs, entropy = forward.logprobs(
        params,
        batch.tokens,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        targets=batch.targets,
    )
    # Before exp: a masked token has ratio 1, and can never make a NaN.
    behavior = jnp.where(batch.mask, batch.behavior_logprobs, logprobs)
    losses = token_loss(logprobs, behavior, batch.advantages)
    loss = (batch.weights * jnp.where(batch.mask, losses, 0.0)).sum()
    seen = (logprobs, behavior)
    sums = diagnostics.token_sums(
        *seen,
        entropy,
        batch.staleness,
        batch.mask,
        max_importance_ratio=max_importance_ratio,
    )
    maxima = diagnostics.token_maxima(*seen, batch.staleness, batch.mask)
    return loss, (sums, maxima)


def _sum_microbatches(
    gradient: Callable[..., Any], params: PyTree, batch: PackedBatch
) -> tuple[Array, PyTree, dict[str, Array], dict[str, Array]]:
    """Loss, gradient and sums over the filled microbatches; maxima among them."""

    def microbatch(index: Array | int) -> PackedBatch:
        return jax.tree.map(lambda leaf: leaf[index] if leaf.ndim else leaf, batch)

    def accumulate(index: Array, carry: PyTree) -> PyTree:
        loss, grads, sums, maxima = carry
        (more, (new_sums, new_maxima)), new_grads = gradient(params, microbatch(index))
        return (
            loss + more,
            jax.tree.map(jnp.add, grads, new_grads),
            jax.tree.map(jnp.add, sums, new_sums),
            jax.tree.map(jnp.maximum, maxima, new_maxima),
        )

    shapes = jax.eval_shape(gradient, params, microbatch(0))
    (_, (sums, maxima)), _ = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes
    )
    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params), sums, maxima)
    return jax.lax.fori_loop(0, batch.num_microbatches, accumulate, start)


def compile_train_step(
    step: TrainStep, *, state_sharding: PyTree, batch_sharding: PyTree
) -> jax.stages.Wrapped:
    """The step under jit on a mesh; it donates the state: copy what is to be kept."""
    return jax.jit(
        step,
        in_shardings=(state_sharding, batch_sharding),
        out_shardings=(state_sharding, None),
        donate_argnums=0,
    )
