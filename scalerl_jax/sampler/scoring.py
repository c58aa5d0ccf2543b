"""Log-probabilities of given tokens, as if the sampler had drawn them one by one.

One pass without a cache over several sequences laid end to end, by the layers and the
head that sample.  A sequence whose numbers are not finite leaves the others as they
are.
"""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from scalerl_jax.model.attention import BlockwiseAttention
from scalerl_jax.model.local_layers import chunked
from scalerl_jax.model.transformer import cached_hidden, head_logits, head_weights
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.stored import marked, read_back
from scalerl_jax.types import AnyArray, PyTree

_TILE = 64  # tokens whose logits exist together


@struct.dataclass(kw_only=True)
class ScoredTokens:
    """Log-probabilities of the tokens of one sequence behind its first, in nats.

    They are float32, of the distribution at a temperature, without filters.
    """

    logprobs: Float[AnyArray, " n"]
    top_tokens: Int[AnyArray, "n top"]  # the likeliest
    top_logprobs: Float[AnyArray, "n top"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToScore:
    """A sequence whose tokens are given."""

    tokens: Int[np.ndarray, " P"]
    temperature: float = 1.0  # above 0


@struct.dataclass(kw_only=True)
class _Row:
    """Sequences laid end to end, and padding."""

    tokens: Int[AnyArray, " T"]
    targets: Int[AnyArray, " T"]  # the token behind each
    positions: Int[AnyArray, " T"]
    segments: Int[AnyArray, " T"]  # number of the token's sequence; 0: padding
    temperatures: Float[AnyArray, " T"]


class PromptScorer:
    """The program for one model's params, in a few sizes that are compiled if needed.

    One thread calls it: that of the sampler which has its devices.
    """

    def __init__(self, settings: EngineSettings, params: PyTree, mesh: Mesh) -> None:
        """Take the sampler's settings, and params laid out by `layered_table`."""
        self._settings, self._params, self._mesh = settings, params, mesh
        self.most = -(-settings.max_tokens // _TILE) * _TILE  # tokens of a call
        self._jitted = jax.jit(
            functools.partial(_score, settings, mesh),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        self._lock = threading.Lock()  # of who compiles
        self._programs: dict[int, Any] = {}  # by tokens of a call; never changed

    @property
    def room(self) -> int:
        """Most tokens of a call that needs no compiler."""
        return max(self._programs, default=0)

    def has(self, tokens: int) -> bool:
        """Return whether the program for this number of tokens is compiled."""
        return self._size(tokens) in self._programs

    def compile(self, tokens: int) -> None:
        """Compile the program for calls with this number of tokens; in any thread."""
        size = self._size(tokens)
        with self._lock:
            if size not in self._programs:
                row = jax.eval_shape(lambda: _lay([], size))
                program = self._jitted.lower(self._params, row).compile()
                self._programs = self._programs | {size: program}

    def _size(self, tokens: int) -> int:
        size = _TILE
        while size < tokens:
            size *= 2
        return min(size, self.most)

    def __call__(self, sequences: Sequence[ToScore]) -> list[ScoredTokens]:
        """Return the log-probabilities of each sequence's tokens.

        All sequences together have at most `room` tokens.
        """
        starts = np.cumsum([0, *(len(each.tokens) for each in sequences)]).tolist()
        programs = self._programs
        size = min(size for size in programs if size >= starts[-1])
        found = jax.device_get(programs[size](self._params, _lay(sequences, size)))
        return [
            jax.tree.map(lambda x, start=start, end=end: x[start : end - 1], found)
            for start, end in itertools.pairwise(starts)
        ]


def _lay(sequences: Sequence[ToScore], size: int) -> _Row:
    """Lay sequences end to end in a row of `size` tokens."""
    row = _Row(
        tokens=np.zeros(size, np.int32),
        targets=np.zeros(size, np.int32),
        positions=np.zeros(size, np.int32),
        segments=np.zeros(size, np.int32),
        temperatures=np.ones(size, np.float32),
    )
    start = 0
    for number, each in enumerate(sequences, 1):
        end = start + len(each.tokens)
        row.tokens[start:end] = each.tokens
        row.targets[start : end - 1] = each.tokens[1:]
        row.positions[start:end] = np.arange(end - start)
        row.segments[start:end] = number
        row.temperatures[start:end] = each.temperature
        start = end
    return row


def _score(
    settings: EngineSettings, mesh: Mesh, params: PyTree, row: _Row
) -> ScoredTokens:
    """Score the targets of a row; what follows a sequence's last target is not read."""
    attention = BlockwiseAttention(mesh)
    segments = row.segments[None]

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        near, seen, more = settings.near_of(layer), segments, {}
        if near is not None and near.sliding:
            more["window"] = jnp.int32(near.tokens)
        elif near is not None:
            seen = chunked(segments, near.tokens)
        if settings.arch.sinks:
            more["sinks"] = params["layers"][layer]["sinks"]
        if settings.arch.attention_cap:
            more["cap"] = settings.arch.attention_cap
        k, v = read_back(*marked(k, v), settings.cache_dtype)
        return attention(q[None], k[None], v[None], seen, **more)[0]

    hidden, _ = cached_hidden(
        params,
        settings.arch,
        row.tokens,
        positions=row.positions,
        attend=attend,
        dtype=settings.dtype,
        mesh=mesh,
    )

    def of_tile(tile: tuple[Array, Array, Array]) -> ScoredTokens:
        hidden, targets, temperatures = tile
        logits = head_logits(
            hidden,
            head_weights(params),
            float32_head=settings.float32_head,
            cap=settings.arch.logit_cap,
        )
        logprobs = jax.nn.log_softmax(logits / temperatures[:, None], axis=-1)
        top, tokens = jax.lax.top_k(logprobs, settings.top_logprobs)
        own = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
        return ScoredTokens(logprobs=own, top_tokens=tokens, top_logprobs=top)

    tiles = jax.tree.map(
        lambda x: x.reshape(-1, _TILE, *x.shape[1:]),
        (hidden, row.targets, row.temperatures),
    )
    found = jax.lax.map(of_tile, tiles)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
