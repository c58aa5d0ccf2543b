"""The gradient of splash attention in one kernel for TPUs.

JAX's own backward pass is two kernels, each of which computes the scores and their
cotangents: seven products of queries and keys where five are needed, and the kernel of
keys and values uses one of the two cores of a v4 or v5p chip.  Here the cotangents of
all keys and values of a head stay in vector memory until its queries are done.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
)
from jaxtyping import Array, Bool, Float, Int

LANES = 128  # of a TPU's vector; blocks are multiples of it
_SUBLANES = 8
_MOST_INT8 = 127
_MIB = 2**20
# Of a core's vector memory: bytes of the held cotangents, and of all blocks.  A core of
# a v4 has 16 MiB, those of later chips 64 or more.
_HELD = 32 * _MIB
_HELD_ON_V4 = 8 * _MIB
_BLOCKS = 8 * _MIB


def held_bytes(device_kind: str) -> int:
    """Return the `held` of `splash_gradient` for a TPU by its `device_kind`."""
    return _HELD_ON_V4 if device_kind == "TPU v4" else _HELD


def following_blocks(needed: Bool[Array, "outer inner"]) -> Int[Array, "outer inner"]:
    """Return the inner number of each block, or of the needed one that comes next.

    Needed blocks of an outer number have no gaps.  After the last of all comes the
    first again, for the next head.  Numbers are in scalar memory, which is small.
    """
    inner = jnp.arange(needed.shape[1])
    first = needed.argmax(axis=1)[:, None]
    then = jnp.roll(first, -1, axis=0)
    found = jnp.where(needed, inner, jnp.where(inner < first, first, then))
    number = jnp.int8 if max(needed.shape) <= _MOST_INT8 else jnp.int16
    return found.astype(number)


def splash_gradient(
    inputs: tuple[
        Float[Array, "heads Q dim"], Float[Array, "kv K dim"], Float[Array, "kv K dim"]
    ],
    found: Float[Array, "heads Q dim"],
    log_sums: Float[Array, "heads Q"],
    cotangent: Float[Array, "heads Q dim"],
    segments: tuple[Int[Array, " Q"], Int[Array, " K"]],
    places: Int[Array, " Q"],
    needed: Bool[Array, "q k"],
    *,
    held: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the cotangents of queries, keys and values of one row.

    Args:
        inputs: scaled queries, keys, values.
        found: the result of attention.
        log_sums: log of the sum of each query's exponentiated scores.
        cotangent: that of the result.
        segments: segment ids of queries and of keys.
        places: positions of the queries; those of the keys are 0, 1, ...
        needed: blocks of queries and keys, `needed_blocks`; others are left out.
        held: bytes of the cotangents of keys and values that are in vector memory at
            once; of more keys, parts are computed one after another.
        interpret: on any device, slowly: for tests.
    """
    q, k, v = inputs
    size, blocks = len(places) // len(needed), needed.shape[1]
    span = max(held // (2 * 4 * q.shape[-1] * size), 1)
    inner = (found.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)
    rows = [_in_sublanes(x) for x in (places, segments[0], log_sums, inner)]
    parts: list[Any] = []
    for first in range(0, blocks, span):
        keys = slice(first * size, (first + span) * size)
        part, key_ids = needed[:, first : first + span], segments[1][keys]
        run = _kernel_of(
            (q.shape, k[:, keys].shape),
            (len(needed), part.shape[1]),
            first=first,
            dtype=q.dtype if span >= blocks else jnp.float32,
            limit=held + _BLOCKS,
            interpret=interpret,
        )
        parts.append(
            run(
                following_blocks(part),
                part.astype(jnp.int8),
                *(q, k[:, keys], v[:, keys], cotangent),
                *rows,
                jnp.broadcast_to(key_ids[:, None], (len(key_ids), LANES)),
            )
        )
    of_queries, of_keys, of_values = zip(*parts, strict=True)
    return (
        functools.reduce(jnp.add, of_queries).astype(q.dtype),
        jnp.concatenate(of_keys, axis=1).astype(k.dtype),
        jnp.concatenate(of_values, axis=1).astype(v.dtype),
    )


def _in_sublanes(x: Array) -> Array:
    """Return [..., Q] as [..., sublanes, Q], the smallest block of a row of numbers."""
    return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], _SUBLANES, x.shape[-1]))


def _per_query(_: Any, __: Any, query: Any, *___: Any) -> Any:
    return 0, query


def _kernel_of(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    blocks: tuple[int, int],
    *,
    first: int,
    dtype: Any,
    limit: int,
    interpret: bool,
) -> Any:
    """Return the kernel of all queries and the keys from block `first` on.

    Its grid goes over key heads, the heads of queries of each, blocks of queries, and
    blocks of keys; at a block that is not needed it fetches the next one that is.
    """
    (heads, queries, dim), (kv_heads, keys, _) = shapes
    size, group = queries // blocks[0], heads // kv_heads

    def at_query(kv: Any, member: Any, query: Any, *_: Any) -> Any:
        return kv * group + member, query, 0

    def at_key(kv: Any, _: Any, query: Any, key: Any, following: Any, *__: Any) -> Any:
        return kv, following[query, key].astype(jnp.int32), 0

    def per_head(kv: Any, member: Any, query: Any, *_: Any) -> Any:
        return kv * group + member, 0, query

    block = functools.partial(pl.BlockSpec, (None, size, dim))
    a_row = pl.BlockSpec((_SUBLANES, size), _per_query)
    a_heads_row = pl.BlockSpec((None, _SUBLANES, size), per_head)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    exact = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, size=size, group=group, first=first),
        name="splash_gradient",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(kv_heads, group, *blocks),
            in_specs=[
                *(block(at_query), block(at_key), block(at_key), block(at_query)),
                *(a_row, a_row, a_heads_row, a_heads_row),
                pl.BlockSpec((size, LANES), lambda *place: at_key(*place)[1:]),
            ],
            out_specs=[block(at_query), anywhere, anywhere],
            scratch_shapes=[
                pltpu.VMEM((size, dim), jnp.float32),
                *[pltpu.VMEM((keys, dim), jnp.float32)] * 2,
                *[pltpu.SemaphoreType.DMA] * 2,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((heads, queries, dim), dtype),
            *[exact((kv_heads, keys, dim))] * 2,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=limit,
        ),
        interpret=interpret,
    )


def _kernel(
    following: Any, needed: Any, *arrays: Any, size: int, group: int, first: int
) -> None:
    """Add what a block of queries and one of keys give to the three cotangents.

    `arrays` are the inputs, the results, what is held, and the copies' semaphores.
    """
    del following
    *others, held_keys, held_values, copied_keys, copied_values = arrays
    *inputs, of_queries, of_keys, of_values, summed = others
    kv, member, query, key = (pl.program_id(axis) for axis in range(4))
    ends = key == pl.num_programs(3) - 1

    @pl.when((member == 0) & (query == 0) & (key == 0))
    def _() -> None:
        held_keys[...] = jnp.zeros_like(held_keys)
        held_values[...] = jnp.zeros_like(held_values)

    @pl.when(key == 0)
    def _() -> None:
        summed[...] = jnp.zeros_like(summed)

    @pl.when(needed[query, key].astype(jnp.int32) > 0)
    def _() -> None:
        rows, first_key = pl.ds(key * size, size), (first + key) * size
        _add_block(inputs, (summed, held_keys, held_values), rows, first_key)

    @pl.when(ends)
    def _() -> None:
        of_queries[...] = summed[...].astype(of_queries.dtype)

    @pl.when((member == group - 1) & (query == pl.num_programs(2) - 1) & ends)
    def _() -> None:
        copies = [
            pltpu.make_async_copy(held, whole.at[kv], copied)
            for held, whole, copied in (
                (held_keys, of_keys, copied_keys),
                (held_values, of_values, copied_values),
            )
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()


def _add_block(inputs: Any, sums: Any, rows: Any, first_key: Any) -> None:
    """Add the products [k, q] of a block; the keys' `rows` begin at `first_key`.

    p = exp(scores - log_sum),  d scores = p (v . cotangent - found . cotangent)
    """
    q, k, v, cotangent, places, ids, log_sums, inner, key_ids = inputs
    summed, held_keys, held_values = sums
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    over_dims = (((1,), (1,)), ((), ()))
    over_queries = (((1,), (0,)), ((), ()))
    over_keys = (((0,), (0,)), ((), ()))
    scores = product(k[...], q[...], over_dims)
    key_places = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    seen = key_places + first_key <= places[:1]
    seen &= jnp.tile(key_ids[...], (1, scores.shape[1] // LANES)) == ids[:1]
    shares = jnp.exp(jnp.where(seen, scores, DEFAULT_MASK_VALUE) - log_sums[:1])
    outside = cotangent[...]
    of_shares = product(v[...], outside, over_dims)
    of_scores = ((of_shares - inner[:1]) * shares).astype(outside.dtype)
    held_values[rows, :] += product(shares.astype(outside.dtype), outside, over_queries)
    held_keys[rows, :] += product(of_scores, q[...], over_queries)
    summed[...] += product(of_scores, k[...], over_keys)
