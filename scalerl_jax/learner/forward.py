"""The learner's forward pass over microbatches and whole batches, and its FLOPs.

All hidden states, log-probabilities and values of the learner are computed here: in the
train step, before a window's first step, and in the diagnosis of a skipped step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from scalerl_jax.learner.head import Head
from scalerl_jax.learner.logprobs import Pointwise, pointwise_loss, token_logprobs
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import SegmentAttention
from scalerl_jax.model.ffn_moe import from_ids
from scalerl_jax.model.transformer import Said, head_weights, hidden_states
from scalerl_jax.parallel.mesh import compiler_options
from scalerl_jax.parallel.multihost import first_tokens, put_global
from scalerl_jax.types import PackedBatch, PyTree

_OF_TOKENS = ("tokens", "segment_ids", "positions", "sharing", "experts")
_READ = {*_OF_TOKENS, "targets", "mask", "row_ends"}
_UNREAD = {each.name for each in dataclasses.fields(PackedBatch)} - _READ - {"scores"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """Settings of hidden states and log-probabilities; static.

    `mesh` None: on one device; `attention` None: in plain XLA.  A batch here is one
    microbatch [R, S]; only the fields that `read_forward` keeps are read.
    """

    arch: Architecture
    dtype: Any  # of activations and matmuls, except the head
    head: Head = Head()
    attention: SegmentAttention | None = None
    remat: str = "none"
    mesh: Mesh | None = None
    scan_layers: bool = True

    def hidden(self, params: PyTree, batch: PackedBatch) -> Float[Array, "R S D"]:
        """Return the final hidden states at the positions that predict targets."""
        return _of_targets(self.states(params, batch)[0], batch)

    def states(
        self, params: PyTree, batch: PackedBatch, *, with_scores: bool = False
    ) -> tuple[Array, Said]:
        """Return final hidden states of all tokens, and the layers' other outputs."""
        experts = None
        if batch.experts is not None:
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
        """Return every target's log-probability and every entropy, in nats."""
        return self.logprobs_of(self.states(params, batch)[0], params, batch)

    def logprobs_of(
        self, states: Array, params: PyTree, batch: PackedBatch
    ) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
        """Return the same as `logprobs`, from the hidden states of all tokens."""
        hidden = _of_targets(states, batch)
        return token_logprobs(hidden, head_weights(params), batch.targets, self._head)

    def loss_of(
        self, states: Array, params: PyTree, batch: PackedBatch, pointwise: Pointwise
    ) -> tuple[Float[Array, ""], Float[Array, "R S"], Float[Array, "R S"]]:
        """Return the summed per-token loss, log-probabilities and entropies."""
        return pointwise_loss(
            _of_targets(states, batch),
            head_weights(params),
            batch.targets,
            # The fields with one value per target.
            dataclasses.replace(batch, **dict.fromkeys(_OF_TOKENS)),
            pointwise,
            self._head,
        )

    @property
    def _head(self) -> Head:
        """The head with the decoder's own cap, which may be a teacher's."""
        return dataclasses.replace(self.head, cap=self.arch.logit_cap)


def _of_targets(states: Array, batch: PackedBatch) -> Float[Array, "R S D"]:
    return states[:, states.shape[1] - batch.targets.shape[1] :]


def read_forward(batch: PackedBatch) -> PackedBatch:
    """Return the batch with only the mask and the fields that a forward pass reads."""
    return dataclasses.replace(batch, **dict.fromkeys(_UNREAD), scores={})


def plain_scorer(
    forward: Forward,
) -> Callable[[PyTree, PackedBatch], Float[np.ndarray, "M R S"]]:
    """Return a function (params, batch) -> log-probabilities in nats, [M, R, S].

    It compares samplers with the learner, takes the batches of a train step, and is
    compiled at the first call, for the devices of the params.
    """
    # On every device, so that every process can read the whole of it.
    everywhere = forward.mesh and NamedSharding(forward.mesh, PartitionSpec())
    logprobs = jax.jit(
        lambda params, batch: forward.logprobs(params, batch)[0],
        out_shardings=everywhere,
        compiler_options=forward.mesh and compiler_options("learner", forward.mesh),
    )

    def score(params: PyTree, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        read = dataclasses.replace(read_forward(batch), row_ends=None)
        found = [
            logprobs(params, jax.tree.map(lambda leaf, at=index: leaf[at], read))
            for index in range(len(batch.tokens))
        ]
        return np.stack(jax.device_get(found))

    return score


def microbatches(
    batch: PackedBatch, sharding: Any, *, short: bool = False
) -> Iterator[PackedBatch]:
    """Yield the microbatches [R, S] of a batch [M, R, S], each put on the devices.

    With `short` the rows of each end at its `row_ends`, if the batch has them.
    """
    ends, batch = batch.row_ends, dataclasses.replace(batch, row_ends=None)
    for index in range(len(batch.tokens)):
        microbatch = jax.tree.map(lambda leaf, at=index: leaf[at], batch)
        if short and ends is not None:
            cut = functools.partial(first_tokens, most=int(ends[index]))
            microbatch = jax.tree.map(cut, microbatch)
        yield put_global(microbatch, sharding)


def abstract(leaf: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array, with its own sharding or the given one."""
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerFlops:
    """Model FLOPs of a batch, by its tokens and by how many each attends to on average.

    A backward pass costs two forward passes, but for the gradients of weights that are
    frozen, and it reaches the first layer.  Recomputation to save memory is not
    counted, nor are the optimizer, the loss and the diagnosis of a skipped step.
    """

    arch: Architecture
    scores: int = 0  # log-probabilities before a window's steps: anchor, reference
    critic_passes: int = 0  # over a batch, in however many steps
    frozen: float = 0.0  # weights that a token meets and that are not trained
    factors: float = 0.0  # params of low-rank factors that a token meets
    teacher: Architecture | None = None  # scores each batch once

    def annotation(self, tokens: int, context: float) -> float:
        """Return FLOPs before the first step: a pass per score, one for the values."""
        values = self._critic(context) if self.critic_passes else 0.0
        return tokens * (self.scores * self._policy(context) + values)

    def teaching(self, tokens: int, context: float) -> float:
        """Return FLOPs of the teacher before the first step; 0 without one."""
        if self.teacher is None:
            return 0.0
        return tokens * self.teacher.flops_per_token(context)

    def step(self, tokens: int, context: float) -> float:
        """Return FLOPs of the policy's step and the critic's on the same batch."""
        critic = self.critic_passes * self._critic(context)
        policy = 3 * self._policy(context) - 2 * self.frozen
        return tokens * (policy + 3 * critic)

    def _policy(self, context: float) -> float:
        """Return FLOPs of a token's forward pass, factors beside their weights."""
        return self.arch.flops_per_token(context) + 2 * self.factors

    def _critic(self, context: float) -> float:
        """Return FLOPs of a token's value: the trunk, and a head of one output."""
        head = 2 * self.arch.hidden_size
        return self.arch.flops_per_token(context, head=False) + head
