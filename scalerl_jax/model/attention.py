"""Causal attention within the segments of packed rows, in plain XLA, block by block.

Rows hold segments laid end to end; a token sees the earlier tokens of its own segment.
No [S, S] array exists, forward or backward: blocks of queries are multiplied with
blocks of keys (FlashAttention-2, https://arxiv.org/abs/2307.08691), only between the
start of the queries' oldest segment and the diagonal, so that a row of many short
segments costs only these segments.  `attention_kernels` has kernels for TPUs and GPUs.
The file is above 400 lines: forward and backward pass share the blocks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from scalerl_jax.parallel.mesh import ROWS, largest_divisor, over_mesh

MASKED = -1e30  # finite: a row without keys must not give NaN
# Name, for remat policies, of the arrays that the backward pass reads.
SAVED = "attention"
_UNROLLED = 4  # blocks of a row, at most
_TINY = 128  # tokens
SPLASH_BLOCK = 512  # tokens in a block of the TPU's kernel
_Carry = Any
# (first key, number of keys, carry) -> carry after a block of queries has seen them
_Meet = Callable[[Array | int, int, _Carry], _Carry]
# Over a mesh: queries stay in their part of the row, keys and values are gathered.
QUERIES = PartitionSpec(ROWS, "context", "tensor", None)
KEYS = PartitionSpec(ROWS, None, "tensor", None)


def is_cudnns(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return, as a remat policy, whether arrays are cuDNN's: JAX does not name them."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


def capped(scores: Array, cap: float) -> Array:
    """Return cap * tanh(scores / cap), which stays below the cap; 0: unchanged.

    Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """
    return cap * jnp.tanh(scores / cap) if cap else scores


def capped_slope(found: Array, cap: float) -> Array:
    """Return the derivative of `capped`, with a cap, where its result is `found`."""
    return 1 - (found / cap) ** 2


# Queries [R, S, heads, dim], keys and values [R, S, kv heads, dim] of whole rows and
# their segment ids [R, S] -> outputs [R, S, heads, dim]; id 0 is a segment, too.
# Windows, sinks and caps are keyword arguments, see `BlockwiseAttention`.
SegmentAttention = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class BlockwiseAttention:
    """Attention in plain XLA, on any device and mesh; `mesh` None: one device."""

    mesh: Mesh | None = None
    block: int = 512  # queries, and keys, in one block

    def __call__(
        self,
        q: Float[Array, "R S heads dim"],
        k: Float[Array, "R S kv dim"],
        v: Float[Array, "R S kv dim"],
        segment_ids: Int[Array, "R S"],
        *,
        window: Int[Array, ""] | None = None,
        sinks: Float[Array, " heads"] | None = None,
        cap: float = 0.0,
    ) -> Float[Array, "R S heads dim"]:
        """Return causal attention within each segment.

        A token sees the last `window` tokens, including itself; None: all.  A head's
        sink is one more score in the softmax, with a value of 0.  Scores are `capped`.
        """
        return _attend(self, cap, q, k, v, segment_ids, window, sinks)

    def placed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with the context axis' index as its first argument."""
        if self.mesh is None:
            return functools.partial(function, 0)
        return lambda *arrays: function(jax.lax.axis_index("context"), *arrays)


_ROW = PartitionSpec(ROWS, None)
_LSE = PartitionSpec(ROWS, "tensor", None, "context")
_NUMBER, _HEADS = PartitionSpec(), PartitionSpec("tensor")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    attention: BlockwiseAttention,
    cap: float,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None,
    sinks: Array | None,
) -> Array:
    return _forward(attention, cap, q, k, v, segment_ids, window, sinks)[0]


def _forward(
    attention: BlockwiseAttention,
    cap: float,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None,
    sinks: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    local = over_mesh(
        attention.mesh,
        attention.placed(functools.partial(_forward_blocks, attention.block, cap)),
        in_specs=(QUERIES, KEYS, KEYS, _ROW, _NUMBER, _HEADS),
        out_specs=(QUERIES, _LSE),
    )
    given = (q, k, v, segment_ids, window, sinks)
    mixed, log_sum = local(*given)
    mixed = checkpoint_name(mixed, SAVED)
    return mixed, (*given, mixed, checkpoint_name(log_sum, SAVED))


def _backward(
    attention: BlockwiseAttention, cap: float, saved: tuple[Any, ...], cotangent: Array
) -> tuple[Array | None, ...]:
    *given, sinks, mixed, log_sum = saved
    shards = 1 if attention.mesh is None else attention.mesh.shape["context"]
    local = over_mesh(
        attention.mesh,
        attention.placed(
            functools.partial(_backward_blocks, attention.block, cap, shards)
        ),
        in_specs=(QUERIES, KEYS, KEYS, _ROW, _NUMBER, QUERIES, _LSE, QUERIES),
        out_specs=(QUERIES, QUERIES, QUERIES),
    )
    found = local(*given, mixed, log_sum, cotangent)
    of_sinks = None
    if sinks is not None:
        of_sinks = _sinks_slope(sinks, mixed, log_sum, cotangent)
    return *found, None, None, of_sinks  # type: ignore[call-arg]


def _sinks_slope(
    sinks: Array, mixed: Array, log_sum: Array, cotangent: Array
) -> Float[Array, " heads"]:
    """Return the cotangents of sinks: -share * (cotangent . output), summed."""
    found = (cotangent.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(axis=-1)
    found = _by_heads(found[..., None], log_sum.shape[1])[..., 0]
    scores = sinks.astype(jnp.float32).reshape(log_sum.shape[1:3])
    shares = jnp.exp(scores[None, :, :, None] - log_sum)
    return -(shares * found).sum(axis=(0, 3)).reshape(-1).astype(sinks.dtype)


_attend.defvjp(_forward, _backward)


def _by_heads(x: Array, kv_heads: int) -> Float[Array, "R kv group S dim"]:
    rows, length, heads, dim = x.shape
    x = x.reshape(rows, length, kv_heads, heads // kv_heads, dim)
    return x.transpose(0, 2, 3, 1, 4)


def _by_tokens(x: Float[Array, "R kv group S dim"]) -> Float[Array, "R S heads dim"]:
    rows, kv, group, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(rows, length, kv * group, dim)


def segment_starts(segment_ids: Int[Array, "R S"]) -> Int[Array, "R S"]:
    """Return the first position of every token's segment."""
    new = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    order = jnp.arange(segment_ids.shape[1])
    return jax.lax.cummax(jnp.where(new, order, 0), axis=1)


class _Blocks:
    """Iteration over blocks of queries, and the keys that each needs.

    A row of few blocks is unrolled: a block of queries is multiplied with all keys up
    to its own end in one product.  In longer rows it is multiplied with one block of
    keys after the other, from the oldest that any row needs.
    """

    def __init__(
        self,
        place: Array | int,
        block: int,
        queries: int,
        segment_ids: Array,
        window: Array | None,
    ) -> None:
        length = segment_ids.shape[1]
        # At least two blocks, unless the row is tiny: later keys are not computed.
        self.size = largest_divisor(queries, min(block, max(length // 2, _TINY)))
        self.count = queries // self.size  # blocks of queries
        self.unrolled = queries == length and self.count <= _UNROLLED
        self._first = place * self.count
        self._segments, self._window = segment_ids, window
        starts = segment_starts(segment_ids)
        self._oldest = starts[:, :: self.size].min(axis=0) // self.size

    def each(self, meet: _Meet, index: Array | int, carry: _Carry) -> _Carry:
        """Call `meet(first, length, carry)` on the keys that a block needs."""
        if self.unrolled:
            return meet(0, (int(index) + 1) * self.size, carry)
        oldest = self._oldest[self._first + index]
        if self._window is not None:
            first = (self._first + index) * self.size - self._window + 1
            oldest = jnp.maximum(oldest, first // self.size)
        return jax.lax.fori_loop(
            oldest,
            self._first + index + 1,
            lambda block, carry: meet(block * self.size, self.size, carry),
            carry,
        )

    def over(self, one: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        """Scan `one` over the blocks of queries; return the stacked results."""
        if not self.unrolled:
            return jax.lax.scan(one, carry, jnp.arange(self.count))
        found = []
        for index in range(self.count):
            carry, each = one(carry, index)
            found.append(each)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *found)

    def allowed(self, index: Array | int, first: Array | int, length: int) -> Array:
        """Return the mask [R, queries, keys]: same segment, not later, in window."""
        start = (self._first + index) * self.size
        queries = _cut(self._segments, start, self.size, axis=1)
        seen = _cut(self._segments, first, length, axis=1)
        places = (start + jnp.arange(self.size))[:, None]
        earlier = places >= first + jnp.arange(length)
        if self._window is not None:
            earlier &= places - self._window < first + jnp.arange(length)
        return (queries[:, :, None] == seen[:, None, :]) & earlier


def _cut(x: Array, first: Array | int, length: int, *, axis: int = -2) -> Array:
    """Return `length` consecutive tokens of an array."""
    return jax.lax.dynamic_slice_in_dim(x, first, length, axis=axis % x.ndim)


def _add_at(x: Array, first: Array | int, more: Array) -> Array:
    """Return the array with `more` added to the tokens from `first` on."""
    sums = _cut(x, first, more.shape[-2]) + more
    return jax.lax.dynamic_update_slice_in_dim(x, sums, first, axis=x.ndim - 2)


def _forward_blocks(
    block: int,
    cap: float,
    place: Array | int,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None,
    sinks: Array | None,
) -> tuple[Array, Float[Array, "R kv group S"]]:
    """Return the queries' outputs, and the logarithms of their sums of exponentials."""
    blocks = _Blocks(place, block, q.shape[1], segment_ids, window)
    kv_heads, size = k.shape[2], blocks.size
    queries = _by_heads(q, kv_heads)
    k, v = (_by_heads(x, kv_heads)[:, :, 0] for x in (k, v))

    def one(none: None, index: Array | int) -> tuple[None, tuple[Array, Array]]:
        these = _cut(queries, index * size, size)

        def meet(first: Array | int, length: int, carry: _Carry) -> _Carry:
            best, total, mixed = carry
            scores = jnp.einsum(
                "rkgqd,rksd->rkgqs",
                these,
                _cut(k, first, length),
                preferred_element_type=jnp.float32,
            )
            allowed = blocks.allowed(index, first, length)[:, None, None]
            scores = capped(scores * q.shape[-1] ** -0.5, cap)
            scores = jnp.where(allowed, scores, MASKED)
            higher = jnp.maximum(best, scores.max(axis=-1))
            shares = jnp.exp(scores - higher[..., None])
            shrink = jnp.exp(best - higher)
            found = jnp.einsum(
                "rkgqs,rksd->rkgqd",
                shares.astype(v.dtype),
                _cut(v, first, length),
                preferred_element_type=jnp.float32,
            )
            total = total * shrink + shares.sum(axis=-1)
            return higher, total, mixed * shrink[..., None] + found

        shape = these.shape[:-1]
        start = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(these.shape, jnp.float32),
        )
        if sinks is not None:
            scores = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
            start = (jnp.broadcast_to(scores, shape), jnp.ones_like(start[1]), start[2])
        best, total, mixed = blocks.each(meet, index, start)
        mixed = (mixed / total[..., None]).astype(q.dtype)
        return none, (mixed, best + jnp.log(total))

    _, found = blocks.over(one, None)
    mixed, log_sum = (_joined(x, axis=3) for x in found)
    return _by_tokens(mixed), log_sum


def _joined(x: Array, *, axis: int) -> Array:
    """Return blocks [n, ...] laid end to end along an axis of the parts."""
    x = jnp.moveaxis(x, 0, axis)
    shape = (*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return x.reshape(shape)


def _shares_and_slope(
    k: Array,
    v: Array,
    q: Array,
    cotangent: Array,
    log_sum: Array,
    delta: Array,
    allowed: Array,
    cap: float,
) -> tuple[Float[Array, "R kv s group q"], Float[Array, "R kv s group q"]]:
    """Return attention weights of some keys and queries, and cotangents of q k.

    Keys come first, since XLA's CPU backend transposes left operands that are
    contracted over their rows, and these are left operands in the next products.
    """
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scale = q.shape[-1] ** -0.5
    scores = capped(wide("rksd,rkgqd->rksgq", k, q) * scale, cap)
    allowed = allowed.swapaxes(1, 2)[:, None, :, None]
    shares = jnp.where(allowed, jnp.exp(scores - log_sum), 0.0)
    slope = shares * (wide("rksd,rkgqd->rksgq", v, cotangent) - delta) * scale
    if cap:
        slope *= capped_slope(scores, cap)
    return shares.astype(q.dtype), slope.astype(q.dtype)


def _backward_blocks(
    block: int,
    cap: float,
    shards: int,
    place: Array | int,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None,
    mixed: Array,
    log_sum: Array,
    cotangent: Array,
) -> tuple[Array, Array, Array]:
    """Return the cotangents of q, k and v; k's and v's are summed over context."""
    blocks = _Blocks(place, block, q.shape[1], segment_ids, window)
    kv_heads, size = k.shape[2], blocks.size
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # sum_s shares * (cotangent . v) of a query = cotangent . its output
    delta = (cotangent.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(axis=-1)
    delta = _by_heads(delta[..., None], kv_heads)[..., 0]
    queries, wanted = (_by_heads(x, kv_heads) for x in (q, cotangent))
    k, v = (_by_heads(x, kv_heads)[:, :, 0] for x in (k, v))
    # Transposed behind a barrier: XLA's CPU backend has no bfloat16 product over
    # several rows and heads that contracts the tokens of its left operand.
    columns = jax.lax.optimization_barrier(k.swapaxes(2, 3))

    def one(
        sums: tuple[Array, Array], index: Array | int
    ) -> tuple[tuple[Array, Array], Array]:
        these, want = (_cut(x, index * size, size) for x in (queries, wanted))
        log_sums, deltas = (
            _cut(x, index * size, size, axis=-1)[:, :, None] for x in (log_sum, delta)
        )

        def meet(first: Array | int, length: int, carry: _Carry) -> _Carry:
            dk, dv, dq = carry
            seen, values = (_cut(x, first, length) for x in (k, v))
            allowed = blocks.allowed(index, first, length)
            shares, slope = _shares_and_slope(
                seen, values, these, want, log_sums, deltas, allowed, cap
            )
            across = _cut(columns, first, length, axis=-1)
            dq = dq + wide("rkds,rksgq->rkdgq", across, slope)
            new = (
                wide("rksgq,rkgqd->rksd", slope, these),
                wide("rksgq,rkgqd->rksd", shares, want),
            )
            return *(
                _add_at(x, first, more) for x, more in zip((dk, dv), new, strict=True)
            ), dq

        rows, kv, group, _, dim = these.shape
        start = (*sums, jnp.zeros((rows, kv, dim, group, size), jnp.float32))
        dk, dv, dq = blocks.each(meet, index, start)
        return (dk, dv), jnp.moveaxis(dq, 2, -1).astype(q.dtype)

    sums, dq = blocks.over(one, (jnp.zeros(k.shape, jnp.float32),) * 2)
    dk, dv = (_over_context(x, shards).astype(q.dtype) for x in sums)
    return _by_tokens(_joined(dq, axis=3)), dk, dv


def _over_context(x: Float[Array, "R kv S dim"], shards: int) -> Array:
    """Return a device's part [R, S / shards, kv, dim] of the sum over context."""
    x = _by_tokens(x[:, :, None])
    if shards == 1:
        return x
    return jax.lax.psum_scatter(x, "context", scatter_dimension=1, tiled=True)
