"""A forward pass over whole batches: a value per token of some params, on the host.

Log-probabilities of the reference policy, and of the trained one at the start of a
window, are made so; a program is compiled once, for the shape of a microbatch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from scalerl_jax.learner.step import Forward
from scalerl_jax.model.shardings import batch_sharding
from scalerl_jax.parallel.multihost import put_global
from scalerl_jax.types import PackedBatch, PyTree

_READ = {"tokens", "segment_ids", "positions", "targets", "mask", "sharing"}
_UNREAD = {field.name for field in dataclasses.fields(PackedBatch)} - _READ


class Scorer:
    """Runs a function of params and a microbatch over a batch [M, R, S]."""

    def __init__(
        self,
        function: Callable[[PyTree, PackedBatch], Float[Array, "R S"]],
        *,
        params: PyTree,
        batch: PackedBatch,
        mesh: Mesh,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """For `params`, their shardings given, and microbatches like `batch`.

        Both may be abstract.  What the function has no use for (the weights, the
        advantages, ...) is not sent to the devices.
        """
        self._put_to = batch_sharding(mesh)
        self._options = compiler_options
        self._shapes = (
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=leaf.sharding
                ),
                params,
            ),
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=self._put_to
                ),
                read_forward(batch),
            ),
        )
        # On every device, so that every process can read the whole of it.
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._jitted = jax.jit(function, out_shardings=everywhere)

    def lower(self) -> Any:
        """The program, not compiled."""
        return self._jitted.lower(*self._shapes)

    def compile(self) -> None:
        """Compile what a call runs."""
        _ = self._program

    @functools.cached_property
    def _program(self) -> Any:
        return self.lower().compile(self._options)

    def __call__(
        self, params: PyTree, batch: PackedBatch
    ) -> Float[np.ndarray, "M R S"]:
        """The function's values at every token of a batch."""
        read = read_forward(batch)
        found = [
            self._program(
                params,
                put_global(
                    jax.tree.map(lambda leaf, at=index: leaf[at], read), self._put_to
                ),
            )
            for index in range(len(batch.tokens))
        ]
        return np.stack(jax.device_get(found))


def read_forward(batch: PackedBatch) -> PackedBatch:
    """The batch with what a forward pass reads, and the mask; None for all else."""
    return dataclasses.replace(batch, **dict.fromkeys(_UNREAD))


def make_logprobs(
    forward: Forward,
) -> Callable[[PyTree, PackedBatch], Float[Array, "R S"]]:
    """What a `Scorer` computes: the log-probability of every target, in nats."""
    return lambda params, batch: forward.of_batch(params, batch)[0]


def plain_scorer(
    forward: Forward,
) -> Callable[[PyTree, PackedBatch], Float[np.ndarray, "M R S"]]:
    """Return log-probabilities of plainly packed batches, to compare samplers with.

    It is compiled at the first call, for wherever the params are.
    """
    logprobs = jax.jit(forward.logprobs)

    def score(params: PyTree, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        found = [
            logprobs(
                params,
                batch.tokens[index],
                positions=batch.positions[index],
                segment_ids=batch.segment_ids[index],
                targets=batch.targets[index],
            )[0]
            for index in range(len(batch.tokens))
        ]
        return np.stack(jax.device_get(found))

    return score
