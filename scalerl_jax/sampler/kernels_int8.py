"""Decoding on pages in int8 by a Pallas kernel for TPUs.

The kernel of JAX, in `kernels`, has one constant scale for all tokens; this one reads a
scale per token and head.  A row is decoded after the other, in blocks of pages: while
a block is computed, the next one, of this row or the next, is copied from HBM.
Integers become exact numbers of the queries' dtype as they are read; scores, softmax
and sums are float32.  Prompt chunks use plain XLA, `CachedAttention.attend_chunk`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8

from scalerl_jax.model.attention import MASKED
from scalerl_jax.sampler.attention import Near, Places
from scalerl_jax.sampler.paged import PagedAttention
from scalerl_jax.sampler.stored import Stored

_ROWS = 32  # tokens of a tile: int8 arrays are stored in tiles of 32 x 128 numbers
LANES = 128  # a page's scales fill whole rows of this many numbers
_BLOCK_BYTES = 2**20  # of keys and values that are copied together
_BLOCK_TOKENS = 2048  # at most


@struct.dataclass(kw_only=True)
class QuantizedPages:
    """A layer's cache in whole tiles: for 32 tokens, each head's keys and values.

    A head's values follow its keys.  XLA writes into it in place only by whole tiles:
    at a token's own place it would copy the cache, twice (libtpu 0.0.42).
    """

    heads: Int8[Array, "pages tiles keys_and_values 32 dim"]
    scales: Float[Array, "pages keys_and_values size"]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.scales.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of keys and values."""
        return self.heads.dtype

    def put(self, new: Stored, places: Places) -> "QuantizedPages":
        """Return the pages with T new keys and values written at `places`."""
        assert new.key_scales is not None and new.value_scales is not None, new
        heads = jnp.stack((new.keys, new.values), axis=2)
        heads = heads.reshape(-1, self.heads.shape[2], heads.shape[-1])
        both = jnp.stack((new.key_scales, new.value_scales), axis=2)
        both = both.reshape(-1, heads.shape[1])
        tile, row = places.offset // _ROWS, places.offset % _ROWS
        return QuantizedPages(
            heads=_in_tiles(self.heads, heads, (places.page, tile), row, places.apart),
            scales=_in_tiles(
                self.scales, both, (places.page,), places.offset, places.apart
            ),
        )

    def read(self, numbers: Int[Array, "..."]) -> Stored:
        """Return what pages hold, with the axes of `Pages.read`."""
        found = jnp.swapaxes(self.heads[numbers], -4, -3)
        found = found.reshape(*found.shape[:-4], -1, 2, self.page_size, found.shape[-1])
        both = self.scales[numbers]
        both = both.reshape(*both.shape[:-2], -1, 2, both.shape[-1])
        return Stored(
            keys=jnp.swapaxes(found[..., 0, :, :], -2, -1),
            values=found[..., 1, :, :],
            key_scales=both[..., 0, :],
            value_scales=both[..., 1, :],
        )


def _in_tiles(
    held: Array,
    new: Array,
    tile: tuple[Array, ...],
    row: Int[Array, " T"],
    apart: bool,
) -> Array:
    """Return tiles held[*tile] [heads, size, ...] with tokens [T, heads, ...] at `row`.

    Tokens of one tile follow each other.  `apart`: no two tokens have the same tile.
    """
    count, size = len(row), held.shape[len(tile) + 1]
    if apart:
        mine = (jnp.arange(size) == row[:, None])[:, None]
        placed = new[:, :, None]
    else:
        # Number the tiles, and note which token comes to which of their rows.
        begins = functools.reduce(
            jnp.logical_or, (jnp.diff(at, prepend=-1) != 0 for at in tile)
        )
        number = jnp.cumsum(begins) - 1
        source = jnp.full((count, size), -1).at[number, row].set(jnp.arange(count))
        nowhere = jnp.full(count, jnp.iinfo(jnp.int32).max)
        tile = (nowhere.at[number].set(tile[0]), *(
            jnp.zeros(count, jnp.int32).at[number].set(at) for at in tile[1:]
        ))  # fmt: skip
        mine = (source >= 0)[:, None]
        placed = jnp.moveaxis(new[jnp.maximum(source, 0)], 1, 2)
    mine = mine.reshape(*mine.shape, *[1] * (new.ndim - 2))
    tiles = jnp.where(mine, placed, held[tile])
    return held.at[tile].set(tiles, mode="drop", unique_indices=apart)


class QuantizedPallasAttention(PagedAttention):
    """The kernel on every device of a mesh, with its own heads."""

    def __init__(self, mesh: Mesh) -> None:
        """Shard the heads over the "tensor" axis of `mesh`."""
        super().__init__()
        self._mesh = mesh

    def page_specs(self, pages: QuantizedPages) -> QuantizedPages:
        """Return the partition specs of a layer's pages."""
        heads, scales = (
            PartitionSpec(None, None, "tensor"),
            PartitionSpec(None, "tensor"),
        )
        return jax.tree.unflatten(jax.tree.structure(pages), (heads, scales))

    def init_pages(
        self, num_pages: int, page_size: int, *, heads: int, dim: int, dtype: DTypeLike
    ) -> QuantizedPages:
        """Return a layer's empty pages."""
        tiles = (num_pages, page_size // _ROWS, 2 * heads, _ROWS, dim)
        return QuantizedPages(
            heads=jnp.zeros(tiles, dtype),
            scales=jnp.zeros((num_pages, 2 * heads, page_size), jnp.float32),
        )

    def attend_rows(
        self,
        q: Array,
        pages: QuantizedPages,
        table: Array,
        lengths: Array,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> Float[Array, "rows heads dim"]:
        """Return each row's attention of its last token to its `lengths` tokens."""
        assert sinks is None, "choose_attention chooses no kernel for sinks"
        firsts = jnp.zeros_like(lengths) if near is None else near.first(lengths - 1)
        if near is not None and near.ring:
            table, base = near.pages_from(table, firsts, size=pages.page_size)
            firsts, lengths = firsts - base, lengths - base
        # Each copy of the cache (over a mixture's "expert" axis) takes some rows.
        rows = None if len(q) % self._mesh.shape["expert"] else "expert"
        specs, own = self.page_specs(pages), PartitionSpec(rows)
        cut = jax.shard_map(
            attend_int8,
            mesh=self._mesh,
            in_specs=(PartitionSpec(rows, "tensor"), specs, own, own, own),
            out_specs=PartitionSpec(rows, "tensor"),
            check_vma=False,
        )
        return cut(q, pages, table, lengths, firsts)


def attend_int8(
    q: Float[Array, "rows heads dim"],
    pages: QuantizedPages,
    table: Int[Array, "rows pages"],
    lengths: Int[Array, " rows"],
    firsts: Int[Array, " rows"],
) -> Float[Array, "rows heads dim"]:
    """Return each row's attention to its tokens from `firsts` up to `lengths`.

    Every row has a token.
    """
    (rows, heads, dim), size = q.shape, pages.page_size
    both = pages.heads.shape[2]
    kv = both // 2
    tokens = min(_BLOCK_TOKENS, _BLOCK_BYTES // (both * dim))
    per_block = min(max(1, tokens // size), table.shape[1])
    counts = -(-lengths // size) - firsts // size  # pages
    blocks = -(-counts // per_block)
    # A chip of two cores gives each one half of the rows.
    halves = 2 - rows % 2
    grouped = pl.BlockSpec(
        (1, kv, heads // kv, dim),
        lambda half, row, *_: (half * (rows // halves) + row, 0, 0, 0),
    )
    found = pl.pallas_call(
        functools.partial(_kernel, rows=rows // halves, per_block=per_block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(halves, rows // halves),
            in_specs=[grouped, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=grouped,
            scratch_shapes=[
                pltpu.VMEM((2, per_block, *pages.heads.shape[1:]), jnp.int8),
                pltpu.VMEM((2, per_block, both, size), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, kv, heads // kv, dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        name="int8_paged_attention",
    )(
        lengths,
        firsts,
        jnp.cumsum(blocks) - blocks,
        table,
        q.reshape(rows, kv, heads // kv, dim),
        pages.heads,
        pages.scales,
    )
    return found.reshape(q.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks:
    """A kernel's blocks of pages, and their way into two buffers."""

    lengths: Any  # of all rows, in scalar memory, as are the next three
    firsts: Any
    begins: Any  # number of blocks before each row
    table: Any
    pages: tuple[Any, ...]  # heads and scales, in HBM
    buffers: tuple[Any, Any]  # two of each
    arrived: Any
    per_block: int

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.per_block * self.pages[1].shape[-1]

    def begin(self, row: Array) -> Array:
        """Return the position of the first token of a row's first block."""
        size = self.pages[1].shape[-1]
        return self.firsts[row] // size * size

    def buffer(self, row: Array, block: Array) -> Array:
        """Return which of the buffers a block comes to."""
        return (self.begins[row] + block) % 2

    def each(
        self, do: Callable[[Any], None], row: Array, block: Array, buffer: Array
    ) -> None:
        """Call `do` on the copies of those pages of a block that exist."""
        size = self.pages[1].shape[-1]
        first = self.begin(row) // size + block * self.per_block
        for index in range(self.per_block):
            last = self.table.shape[1] - 1
            page = self.table[row, jnp.minimum(first + index, last)]

            @pl.when((first + index) * size < self.lengths[row])
            def _(page: Array = page, index: int = index) -> None:
                for held, into in zip(self.pages, self.buffers, strict=True):
                    into = into.at[buffer, index]
                    do(
                        pltpu.make_async_copy(
                            held.at[page], into, self.arrived.at[buffer]
                        )
                    )


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _kernel(*refs: Any, rows: int, per_block: int) -> None:
    """Compute a row's attention; q and output are [1, kv, group, dim].

    The copies of its first block were started before, unless it is the core's first.
    """
    lengths, firsts, begins, table, q, *pages, out, held, scales, arrived = refs
    blocks = _Blocks(
        lengths=lengths,
        firsts=firsts,
        begins=begins,
        table=table,
        pages=tuple(pages),
        buffers=(held, scales),
        arrived=arrived,
        per_block=per_block,
    )
    place = pl.program_id(1)
    row = pl.program_id(0) * rows + place

    @pl.when(place == 0)
    def _() -> None:
        zero = jnp.int32(0)
        blocks.each(_start, row, zero, blocks.buffer(row, zero))

    begin = blocks.begin(row)
    count = pl.cdiv(lengths[row] - begin, blocks.tokens)

    def add(block: Array, states: Any) -> Any:
        buffer, last = blocks.buffer(row, block), block + 1 == count

        @pl.when(~last | (place + 1 < rows))
        def _() -> None:
            after = jnp.where(last, jnp.minimum(row + 1, lengths.shape[0] - 1), row)
            blocks.each(_start, after, jnp.where(last, 0, block + 1), 1 - buffer)

        blocks.each(_wait, row, block, buffer)
        order = jax.lax.broadcasted_iota(jnp.int32, (1, blocks.tokens), 1)
        order += begin + block * blocks.tokens
        seen = (order >= firsts[row]) & (order < lengths[row])
        block_of = held.at[buffer], scales.at[buffer]
        return tuple(
            _add_block(q[0, head], *block_of, head, seen, state)
            for head, state in enumerate(states)
        )

    shape = (q.shape[2], 1)
    empty = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape[2:], jnp.float32),
    )
    states = jax.lax.fori_loop(0, count, add, (empty,) * q.shape[1])
    for head, (_, total, mixed) in enumerate(states):
        out[0, head] = (mixed / total).astype(out.dtype)


def _add_block(
    q: Float[Array, "group dim"],
    heads: Any,
    scales: Any,
    head: int,
    seen: Bool[Array, "1 tokens"],
    state: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """Return a head's online softmax with a block of tokens folded in."""
    highest, total, mixed = state
    dim = q.shape[-1]

    def integers(which: int) -> Array:
        found = heads[:, :, 2 * head + which].reshape(-1, dim)
        return found.astype(jnp.float32).astype(q.dtype)

    def factors(which: int) -> Array:
        of_pages = [
            scales[page, pl.ds(2 * head + which, 1)] for page in range(scales.shape[0])
        ]
        return jnp.concatenate(of_pages, axis=1)

    scores = _product(q, integers(0), 1) * (factors(0) * dim**-0.5)
    scores = jnp.where(seen, scores, MASKED)
    higher = jnp.maximum(highest, scores.max(axis=1, keepdims=True))
    shares = jnp.where(seen, jnp.exp(scores - higher), 0.0)
    shrink = jnp.exp(highest - higher)
    # Where no page was copied the factors are any numbers, also NaN.
    weights = jnp.where(seen, shares * factors(1), 0.0)
    return (
        higher,
        total * shrink + shares.sum(axis=1, keepdims=True),
        mixed * shrink + _mix(weights, integers(1)),
    )


def _product(left: Array, right: Array, axis: int) -> Array:
    """Return the float32 product over the last axis of `left` and `axis` of `right`."""
    exact = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def _mix(weights: Float[Array, "group tokens"], values: Array) -> Array:
    """Return weights times integers, with the weights to 16 bits beside bfloat16."""
    if values.dtype == jnp.float32:
        return _product(weights, values, 0)
    high = weights.astype(values.dtype)
    low = (weights - high.astype(jnp.float32)).astype(values.dtype)
    return _product(high, values, 0) + _product(low, values, 0)
