"""The learner's forward pass, over microbatches and whole batches, and what it costs.

Hidden states, log-probabilities and values come from here alone, in the train step, in
what is computed before a window's first step, and in what explains a skipped one.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from scalerl_jax.learner.logprobs import (
    Head,
    Pointwise,
    pointwise_loss,
    token_logprobs,
)
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import SegmentAttention
from scalerl_jax.model.transformer import Said, head_weights, hidden_states
from scalerl_jax.parallel.mesh import compiler_options
from scalerl_jax.parallel.multihost import put_global
from scalerl_jax.types import PackedBatch, PyTree

_OF_TOKENS = ("tokens", "segment_ids", "positions", "sharing", "experts")
_READ = {*_OF_TOKENS, "targets", "mask"}
_UNREAD = {field.name for field in dataclasses.fields(PackedBatch)} - _READ


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """Settings of hidden states and log-probabilities; static.

    `mesh` None: on one device; `attention` None: in plain XLA.  A batch is a microbatch
    [R, S], of which the fields that `read_forward` keeps are read.
    """

    arch: Architecture
    dtype: Any  # of activations and matmuls, the head apart
    head: Head = Head()
    attention: SegmentAttention | None = None
    remat: str = "none"
    mesh: Mesh | None = None
    scan_layers: bool = True

    def hidden(self, params: PyTree, batch: PackedBatch) -> Float[Array, "R S D"]:
        """Final hidden states, where the targets are predicted."""
        return _of_targets(self.states(params, batch)[0], batch)

    def states(
        self, params: PyTree, batch: PackedBatch, *, with_scores: bool = False
    ) -> tuple[Array, Said]:
        """Final hidden states of all tokens, and what the layers say."""
        experts = None
        if batch.experts is not None:
            from scalerl_jax.model.ffn_moe import from_ids  # few runs replay them

            experts = from_ids(batch.experts)
        return hidden_states(
            params,
            self.arch,
            batch.tokens,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            dtype=self.dtype,
            attention=self.attention,
            remat=self.remat,
            mesh=self.mesh,
            sharing=batch.sharing,
            scan_layers=self.scan_layers,
            experts=experts,
            with_scores=with_scores,
        )

    def logprobs(
        self, params: PyTree, batch: PackedBatch
    ) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
        """Log-probability of every target and the entropies, in nats."""
        return self.logprobs_of(self.states(params, batch)[0], params, batch)

    def logprobs_of(
        self, states: Array, params: PyTree, batch: PackedBatch
    ) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
        """Return what `logprobs` does, from the hidden states of all tokens."""
        hidden = _of_targets(states, batch)
        return token_logprobs(hidden, head_weights(params), batch.targets, self.head)

    def loss_of(
        self, states: Array, params: PyTree, batch: PackedBatch, pointwise: Pointwise
    ) -> tuple[Float[Array, ""], Float[Array, "R S"], Float[Array, "R S"]]:
        """Sum of a loss that each token has for itself, and as `logprobs_of`."""
        return pointwise_loss(
            _of_targets(states, batch),
            head_weights(params),
            batch.targets,
            # All that there is one of for each target.
            dataclasses.replace(batch, **dict.fromkeys(_OF_TOKENS)),
            pointwise,
            self.head,
        )


def _of_targets(states: Array, batch: PackedBatch) -> Float[Array, "R S D"]:
    return states[:, states.shape[1] - batch.targets.shape[1] :]


def read_forward(batch: PackedBatch) -> PackedBatch:
    """The batch with what a forward pass reads, and the mask; None for all else."""
    return dataclasses.replace(batch, **dict.fromkeys(_UNREAD))


def plain_scorer(
    forward: Forward,
) -> Callable[[PyTree, PackedBatch], Float[np.ndarray, "M R S"]]:
    """Return log-probabilities of plainly packed batches, to compare samplers with.

    It is compiled at the first call, for wherever the params are.
    """
    # On every device, so that every process can read the whole of it.
    everywhere = forward.mesh and NamedSharding(forward.mesh, PartitionSpec())
    logprobs = jax.jit(
        lambda params, batch: forward.logprobs(params, batch)[0],
        out_shardings=everywhere,
        compiler_options=forward.mesh and compiler_options("learner", forward.mesh),
    )

    def score(params: PyTree, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        read = read_forward(batch)
        found = [
            logprobs(params, jax.tree.map(lambda leaf, at=index: leaf[at], read))
            for index in range(len(batch.tokens))
        ]
        return np.stack(jax.device_get(found))

    return score


def microbatches(batch: PackedBatch, sharding: Any) -> Iterator[PackedBatch]:
    """The parts [R, S] of a batch [M, R, S], one after the other on the devices."""
    for index in range(len(batch.tokens)):
        microbatch = jax.tree.map(lambda leaf, at=index: leaf[at], batch)
        yield put_global(microbatch, sharding)


def abstract(leaf: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, with its own sharding or another."""
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerFlops:
    """Model FLOPs of a batch, by its tokens and what each attends to on average.

    A backward pass costs two forward passes.  What is computed twice to save memory is
    counted once; the optimizer, the loss and what explains a skipped step are left out.
    """

    arch: Architecture
    scores: int = 0  # log-probabilities before a window's steps: anchor, reference
    critic_passes: int = 0  # over a batch, in however many steps

    def annotation(self, tokens: int, context: float) -> float:
        """FLOPs before the first step: a pass per score, and one for the values."""
        values = self._critic(context) if self.critic_passes else 0.0
        return tokens * (self.scores * self.arch.flops_per_token(context) + values)

    def step(self, tokens: int, context: float) -> float:
        """FLOPs of a step of the policy, and of the critic's on the same batch."""
        critic = self.critic_passes * self._critic(context)
        return 3 * tokens * (self.arch.flops_per_token(context) + critic)

    def _critic(self, context: float) -> float:
        """FLOPs of a token's value: the trunk, and a head of one output."""
        head = 2 * self.arch.hidden_size
        return self.arch.flops_per_token(context, head=False) + head
