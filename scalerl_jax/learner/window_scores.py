"""Scores that a window's batches get before its first step; few objectives read any.

They are log-probabilities under the reference and under the params at the start of the
window.  If the KL to the reference is part of the reward, they include the advantages,
which depend on it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from scalerl_jax.batching.assembly import Advantages
from scalerl_jax.learner.forward import abstract, microbatches, read_forward
from scalerl_jax.learner.step import TrainState
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.objective.scores import KlPenalty
from scalerl_jax.parallel.mesh import compiler_options
from scalerl_jax.types import PackedBatch, PyTree

# Scores of a window by name -> the params whose log-probabilities they are.
PARAMS: dict[str, Callable[[TrainState], PyTree]] = {
    "proximal": lambda state: state.params,
    "reference": lambda state: state.reference,
}


class Scorer:
    """Runs a function of params and a microbatch over a batch [M, R, S].

    The result is a value per token on the host: log-probabilities under the reference
    policy or under the policy at the start of a window, or a critic's values.
    """

    def __init__(
        self,
        function: Callable[[PyTree, PackedBatch], Float[Array, "R S"]],
        *,
        params: PyTree,
        batch: PackedBatch,
        mesh: Mesh,
    ) -> None:
        """Take `params`, their shardings given, and microbatches like `batch`.

        Both may be abstract.  Fields that the function does not read (the weights, the
        advantages, ...) are not sent to the devices.
        """
        self._put_to = batch_sharding(mesh)
        self._shapes = (
            jax.tree.map(abstract, params),
            jax.tree.map(
                lambda leaf: abstract(leaf, self._put_to), read_forward(batch)
            ),
        )
        # On every device, so that every process can read the whole of it.
        everywhere = NamedSharding(mesh, PartitionSpec())
        options = compiler_options("learner", mesh)
        self._jitted = jax.jit(
            function, out_shardings=everywhere, compiler_options=options
        )

    def compile(self) -> None:
        """Compile the program of a call."""
        _ = self._program

    @functools.cached_property
    def _program(self) -> Any:
        return self._jitted.lower(*self._shapes).compile()

    def __call__(
        self, params: PyTree, batch: PackedBatch
    ) -> Float[np.ndarray, "M R S"]:
        """Return the function's value at every token of a batch."""
        found = [
            self._program(params, microbatch)
            for microbatch in microbatches(read_forward(batch), self._put_to)
        ]
        return np.stack(jax.device_get(found))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotator:
    """Fills batches [M, R, S] with the scores that the objective reads.

    `rollout` is removed once rewards have become advantages.  `advantages` None: the
    advantages are those that the batch came with, minus the KL penalty.
    """

    score: Scorer
    # By name of a score, the params that give a token its log-probability.
    params: Mapping[str, Callable[[TrainState], PyTree]]
    penalty: KlPenalty | None = None
    advantages: Advantages | None = None
    group_size: int = 1
    # With a critic: turns rewards into advantages, after the other scores.
    critic: Callable[[PyTree, PackedBatch], PackedBatch] | None = None

    def __call__(
        self, state: TrainState, batches: list[PackedBatch]
    ) -> list[PackedBatch]:
        """Return a window's batches with their scores, before its first step."""
        return [self._annotated(state, batch) for batch in batches]

    def _annotated(self, state: TrainState, batch: PackedBatch) -> PackedBatch:
        scored = {
            name: self.score(params(state), batch)
            for name, params in self.params.items()
        }
        batch = dataclasses.replace(batch, scores={**batch.scores, **scored})
        if batch.rollout is not None:
            batch = dataclasses.replace(
                batch, advantages=self._advantages(batch), rollout=None
            )
        if self.critic is None:
            return batch
        assert state.critic is not None, "its advantages were asked for"
        return self.critic(state.critic.params, batch)

    def _advantages(self, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        """Turn the rewards that the batch came with into its advantages."""
        places = np.asarray(batch.rollout)
        there = places >= 0
        num_groups = places.max() // self.group_size + 1
        rewards = np.zeros(num_groups * self.group_size, np.float32)
        kept = np.zeros(len(rewards), bool)
        kept[places[there]] = True
        rewards[places[there]] = batch.advantages[there]
        if self.penalty is not None:
            rewards -= self.penalty.of_rollouts(batch, len(rewards))
        if self.advantages is not None:
            # Rollouts that are not in the batch have no KL: a group's mean skips them.
            of_kept = jnp.asarray(kept)
            found = self.advantages(jnp.asarray(rewards), of_kept, of_kept)
            rewards = np.asarray(found)
        return np.where(there, rewards[places], 0.0).astype(np.float32)
