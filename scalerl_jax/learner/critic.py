"""PPO's critic: the value of every token, advantages from it, and its own updates.

A critic is the policy's trunk with a value head [D], float32, instead of the output
head.  A token's value is the value of the state before it: the prompt and the
completion up to it.  Only sampled tokens are actions: tokens forced by an interruption
are read, like the prompt, but have no value, reward or advantage; the sampled token
before them is followed by the one after them.  A completion that was cut off ends
there: the length limit is part of the task.

PPO, https://arxiv.org/abs/1707.06347; GAE, https://arxiv.org/abs/1506.02438.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from scalerl_jax.algo.values import clipped_value_loss
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.step import (
    Accumulate,
    Accumulated,
    Counted,
    TrainState,
    TrainStep,
    Update,
    accumulating,
    make_update,
    trained_names,
)
from scalerl_jax.objective.loss import Scalars
from scalerl_jax.types import PackedBatch, PyTree

_HEAD = "value_head"


def critic_params(params: PyTree) -> PyTree:
    """Return copies of the policy's trunk, and a head of zeros: every value is 0."""
    trunk = {name: leaf for name, leaf in params.items() if name != "head"}
    head = jnp.zeros(trunk["final_norm"].shape, jnp.float32)
    # Copies: the step donates both the policy and the critic.
    return jax.tree.map(jnp.copy, trunk) | {_HEAD: head}


def token_values(
    params: PyTree, batch: PackedBatch, *, forward: Forward
) -> Float[Array, "R S"]:
    """value = hidden . head, in float32, where a sampled token is predicted; else 0.

    A critic that is a mixture uses its own routing, and replays no experts.
    """
    batch = dataclasses.replace(batch, experts=None)
    values = jnp.einsum(
        "rsd,d->rs",
        forward.hidden(params, batch).astype(jnp.float32),
        params[_HEAD],
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.where(batch.mask, values, 0.0)


def make_critic_accumulate(forward: Forward, *, value_clip: float) -> Accumulate:
    """Make a function that adds a microbatch [R, S] to the sums of a critic's step.

    `value_clip` is in the unit of the reward; 0 clips nothing.
    """

    def summed_loss(params: PyTree, batch: PackedBatch) -> tuple[Array, Counted]:
        values = token_values(params, batch, forward=forward)
        known = (batch.scores["values"], batch.scores["returns"])
        old, returns = (jnp.where(batch.mask, x, 0.0) for x in known)
        loss = functools.partial(clipped_value_loss, values, old, returns)
        losses = jnp.where(batch.mask, loss(value_clip=value_clip), 0.0)
        clipped = batch.mask & (losses > loss(value_clip=0.0))
        errors = returns - old
        sums = {
            "tokens": batch.mask.sum(dtype=jnp.float32),
            "values": values.sum(),
            "clipped": clipped.sum(dtype=jnp.float32),
            "returns": returns.sum(),
            "returns_squared": (returns * returns).sum(),
            "errors": errors.sum(),
            "errors_squared": (errors * errors).sum(),
        }
        return losses.sum(), (jax.lax.stop_gradient(sums), {}, None)

    return accumulating(summed_loss)


def make_critic_update(
    optimizer: optax.GradientTransformation, *, stochastic_rounding: bool = False
) -> Update:
    """Make the critic's optimizer step; all sampled tokens have equal weight."""
    update = make_update(
        optimizer, stochastic_rounding=stochastic_rounding, summarize=_summary
    )

    def of_mean(
        state: TrainState, accumulated: Accumulated
    ) -> tuple[TrainState, dict[str, Array]]:
        tokens = jnp.maximum(accumulated.sums["tokens"], 1.0)
        mean = dataclasses.replace(
            accumulated,
            loss=accumulated.loss / tokens,
            grads=jax.tree.map(lambda leaf: leaf / tokens, accumulated.grads),
        )
        state, metrics = update(state, mean)
        # Both are of the pair, which gives them out as its own.
        of_pair = {name: metrics.pop(name) for name in ("skipped", "unfit")}
        return state, of_pair | {f"value/{name}": x for name, x in metrics.items()}

    return of_mean


def _summary(sums: Scalars, _: Scalars) -> Scalars:
    """Return means, and the explained variance of returns by old values.

        1 - Var(return - old value) / Var(return)

    A constant guess explains 0.  With gae_lambda below 1 returns depend on the values
    that they are compared to.
    """
    tokens = jnp.maximum(sums["tokens"], 1.0)

    def variance(name: str) -> Array:
        return sums[f"{name}_squared"] / tokens - (sums[name] / tokens) ** 2

    spread = variance("returns")
    unexplained = variance("errors") / jnp.maximum(spread, 1e-12)
    return {
        "mean": sums["values"] / tokens,
        "clipped_share": sums["clipped"] / tokens,
        "explained_variance": jnp.where(spread > 1e-12, 1.0 - unexplained, 0.0),
    }


def minibatches(batch: PackedBatch, count: int) -> Iterator[PackedBatch]:
    """Cut a batch [M, R, S] into `count` parts of equally many rollouts, or nearly so.

    A part has the microbatches that hold its rollouts; other parts' rollouts in them
    are masked.  Microbatches are taken in steps of `count`: `pack` puts the longest
    rollouts first, and so they are spread over the parts.  With fewer rollouts than
    `count` there are fewer parts.
    """
    mask, ids = np.asarray(batch.mask), np.asarray(batch.sequence_ids)
    order = np.argsort(np.arange(len(ids)) % count, kind="stable")
    in_row = ids[order].max(axis=-1)  # rollouts, by microbatch and row
    before = np.zeros_like(in_row)
    before[order] = (np.cumsum(in_row) - in_row.ravel()).reshape(in_row.shape)
    part = (before[..., None] + ids - 1) * count // in_row.sum()
    for number in range(count):
        here = mask & (part == number)
        filled = np.flatnonzero(here.any(axis=(1, 2)))
        if len(filled):
            found = jax.tree.map(lambda leaf, at=filled: leaf[at], batch)
            yield dataclasses.replace(found, mask=here[filled])


class PairedStep(TrainStep):
    """A step of the policy, and steps of its critic on parts of the same batch.

    Nothing is applied if the policy's gradient is not finite.  A critic's gradient or
    update that is not finite ends the critic's steps and leaves the policy unchanged.
    If only the policy's own update is not finite, which is known last, the critic keeps
    its steps.  Methods other than `__call__` concern the policy alone.
    """

    def __init__(
        self,
        accumulate: Accumulate,
        update: Update,
        *,
        critic: TrainStep,
        num_minibatches: int = 1,
        **like: Any,
    ) -> None:
        """Make the policy's programs; `like` are a `TrainStep`'s keyword arguments.

        The `critic` makes a step on each of `num_minibatches` parts of a batch.
        """
        super().__init__(accumulate, update, **like)
        self.critic = critic
        self._num_minibatches = num_minibatches

    def lower(self) -> dict[str, Any]:
        """Return the lowered programs by name, not compiled."""
        of_critic = {f"critic_{x}": low for x, low in self.critic.lower().items()}
        return super().lower() | of_critic

    def compile(self, notice: Callable[[int, int], None] = lambda *_: None) -> None:
        """Compile everything that a step runs; `notice` hears which of how many."""
        super().compile(notice)
        self.critic.compile(notice)

    def __call__(
        self, state: TrainState, batch: PackedBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        """Return the state after a batch [M, R, S], and metrics; `state` is donated.

        The critic's metrics are means over its steps.
        """
        critic: Any = state.critic
        policy = dataclasses.replace(state, critic=None)
        # Computed before the critic's steps, which need to know that it is finite.
        of_policy = self.total(policy.params, batch, policy.frozen)
        finite = _all_finite(of_policy, True)
        metrics_of_critic, unfit_critic = [], jnp.int32(-1)
        for part in minibatches(batch, self._num_minibatches):
            of_critic = self.critic.total(critic.params, part)
            finite = _all_finite(of_critic, finite)
            critic, metrics = self.critic.apply(critic, _unless(finite, of_critic))
            finite &= ~metrics.pop("skipped")
            unfit_critic = jnp.maximum(unfit_critic, metrics.pop("unfit"))
            metrics_of_critic.append(metrics)
        policy, metrics = self.apply(policy, _unless(finite, of_policy))
        means = jax.tree.map(lambda *each: jnp.stack(each).mean(), *metrics_of_critic)
        before = len(trained_names(policy))
        metrics["unfit"] = jnp.where(
            unfit_critic < 0, metrics["unfit"], before + unfit_critic
        )
        return dataclasses.replace(policy, critic=critic), means | metrics


@jax.jit
def _all_finite(sums: Accumulated, finite: Array | bool) -> Array:
    """Return whether `finite` holds and the loss and gradient are finite too."""
    return jnp.isfinite(sums.loss + optax.tree.norm(sums.grads)) & finite


def _unless(finite: Array, sums: Accumulated) -> Accumulated:
    """Return the sums; unless `finite` with a NaN loss, for which an update skips."""
    return dataclasses.replace(sums, loss=jnp.where(finite, sums.loss, jnp.nan))
