"""Scores that a window's batches get before its first step; few objectives read any.

They are log-probabilities under the reference, under a teacher and under the params at
the start of the window, and a critic's values.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from scalerl_jax.learner.forward import abstract, microbatches, read_forward
from scalerl_jax.learner.step import TrainState
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.parallel.mesh import compiler_options
from scalerl_jax.types import PackedBatch, PyTree, Scores


def _of_critic(state: TrainState) -> PyTree:
    assert state.critic is not None, "its values were asked for"
    return state.critic.params


# Scores of a window by name -> the params that give them.
PARAMS: dict[str, Callable[[TrainState], PyTree]] = {
    "proximal": lambda state: state.policy,
    "reference": lambda state: state.reference_policy,
    "values": _of_critic,
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


# State at the start of a window, a batch -> the score of each of its tokens.
Score = Callable[[TrainState, PackedBatch], Float[np.ndarray, "M R S"]]


def of_state(name: str, scorer: Scorer) -> Score:
    """Return the score `name` of `PARAMS`, whose params are those of the state."""
    return lambda state, batch: scorer(PARAMS[name](state), batch)


def of_params(params: PyTree, scorer: Scorer) -> Score:
    """Return a score by params that never change, a teacher's."""
    return lambda _, batch: scorer(params, batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotator:
    """Gives batches [M, R, S] the scores that the objective reads of other params."""

    scores: Mapping[str, Score]
    teacher: str = ""  # digest of the params that teach; "": there are none here

    def __call__(self, state: TrainState, batches: list[PackedBatch]) -> list[Scores]:
        """Return the scores of a window's batches by name, before its first step."""
        return [
            {name: score(state, batch) for name, score in self.scores.items()}
            for batch in batches
        ]
