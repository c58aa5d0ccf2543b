"""Attention over a paged cache: one interface, and a backend for each kind of machine.

    gathered   a call's pages copied once into rows: fastest if XLA is the kernel
    paged      XLA operations directly on the pages (`paged`)
    cudnn      gathered rows, cuDNN's kernel (`kernels_gpu`)
    pallas     JAX's paged attention kernel for TPUs (`kernels`) or GPUs (`kernels_gpu`)

A page holds `page_size` tokens of one sequence, in every layer.  The backend chooses
its layout; the first axis of every array counts the pages.  Layers that see a part of
a sequence may use its first pages as a ring, `Near.ring`.  The file is above 400 lines:
it has the interface and the CPU's backend.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.model.attention import MASKED, capped
from scalerl_jax.sampler.stored import Stored, is_quantized, stored
from scalerl_jax.types import AnyArray

_BLOCK_TOKENS = 128  # tokens of each sequence in one step of `over_pages`


@struct.dataclass(kw_only=True)
class Chunk:
    """Prompt tokens of one or several sequences, one after the other.

    The first sequence may have tokens in the cache already, and others the same ones,
    in the same pages.  Only the last may continue in a later chunk.
    """

    tokens: Int[AnyArray, " C"]
    positions: Int[AnyArray, " C"]
    segments: Int[AnyArray, " C"]  # number of the token's sequence, from 1; 0: padding
    table: Int[AnyArray, "S pages"]  # each sequence's pages
    query_starts: Int[AnyArray, " S+1"]  # first token of each sequence in the chunk
    lengths: Int[AnyArray, " S"]  # tokens in the cache after the chunk is written
    num_sequences: Int[AnyArray, " 1"]


@struct.dataclass(kw_only=True)
class Rows:
    """Pages and lengths of the sequences before a `generate` call."""

    table: Int[Array, "rows pages"]
    starts: Int[Array, " rows"]  # tokens in the cache


@struct.dataclass(kw_only=True)
class Pages:
    """A layer's cache laid out for XLA's matmuls: a key is a column, a value a row."""

    keys: Array  # [pages, kv, dim, size]
    values: Array  # [pages, kv, size, dim]
    key_scales: Float[Array, "pages kv size"] | None = None  # in int8
    value_scales: Float[Array, "pages kv size"] | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.keys.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of keys and values."""
        return self.keys.dtype

    def put(self, new: Stored, places: "Places") -> "Pages":
        """Return the pages with T new keys and values written at `places`."""
        page, offset = places.page, places.offset
        pages = Pages(
            keys=self.keys.at[page, :, :, offset].set(new.keys, mode="drop"),
            values=self.values.at[page, :, offset].set(new.values, mode="drop"),
        )
        if self.key_scales is None or self.value_scales is None:
            return pages
        at, into = self.key_scales.at, self.value_scales.at
        return dataclasses.replace(
            pages,
            key_scales=at[page, :, offset].set(new.key_scales, mode="drop"),
            value_scales=into[page, :, offset].set(new.value_scales, mode="drop"),
        )

    def read(self, numbers: Int[Array, "..."]) -> Stored:
        """Return what pages hold.

        Keys are [..., kv, dim, size], values [..., kv, size, dim], scales [..., kv,
        size].
        """
        return jax.tree.map(lambda held: held[numbers], Stored(**vars(self)))


@struct.dataclass(kw_only=True)
class Places:
    """Positions of tokens in the cache; a page number above the last means none."""

    page: Int[Array, " T"]
    offset: Int[Array, " T"]
    apart: bool = struct.field(pytree_node=False, default=False)  # each its own page


def places_of(
    table: Int[Array, "T pages"],
    positions: Int[Array, " T"],
    *,
    page_size: int,
    valid: Bool[Array, " T"],
    apart: bool = False,
    near: "Near | None" = None,
) -> Places:
    """Return page and offset of `positions`, each in its own row of `table`.

    A position that is not `valid` gets no page.  `apart`: no two have the same page.
    """
    index = jnp.where(valid, positions // page_size, 0)
    if near is not None and near.ring:
        index %= near.ring
    page = jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    return Places(
        page=jnp.where(valid, page, np.iinfo(np.int32).max),
        offset=positions % page_size,
        apart=apart,
    )


@dataclasses.dataclass(frozen=True)
class Near:
    """The part of a sequence that a token of a local layer sees."""

    tokens: int
    sliding: bool = False  # True: the last `tokens` including itself; False: its chunk
    # Its layers keep this many pages of a sequence, the first of its table, one after
    # the other and then the first again; 0: they keep all.
    ring: int = 0

    def first(self, positions: Array) -> Array:
        """Return the first position that tokens at `positions` see."""
        if self.sliding:
            return jnp.maximum(positions - self.tokens + 1, 0)
        return positions // self.tokens * self.tokens

    def sees(self, positions: Array) -> Array:
        """Return the mask [T, T] of the tokens that are in each token's part.

        Later tokens may be True: the causal mask must be applied in addition.  All
        `positions` are of one sequence.
        """
        if self.sliding:
            return positions >= self.first(positions)[:, None]
        part = positions // self.tokens
        return part[:, None] == part

    def pages_from(
        self, table: Int[Array, "rows pages"], first: Int[Array, " rows"], *, size: int
    ) -> tuple[Int[Array, "rows ring"], Int[Array, " rows"]]:
        """Return a ring's pages in order, from that of token `first` on.

        The second result is the position of the first page's first token.
        """
        places = first[:, None] // size + jnp.arange(min(self.ring, table.shape[1]))
        found = jnp.take_along_axis(table, places % self.ring, axis=1, mode="clip")
        return found, first // size * size


def with_sinks(
    state: tuple[Array, Array, Array], sinks: Float[Array, " heads"] | None
) -> tuple[Array, Array, Array]:
    """Return an online softmax's state with one more score per head, of no token.

    The state is that of `over_pages`, [..., kv, group] and [..., kv, group, dim].
    """
    if sinks is None:
        return state
    highest, total, mixed = state
    scores = sinks.astype(jnp.float32).reshape(highest.shape[-2:])
    higher = jnp.maximum(highest, scores)
    shrink = jnp.exp(highest - higher)
    total = total * shrink + jnp.exp(scores - higher)
    return higher, total, mixed * shrink[..., None]


class CachedAttention(abc.ABC):
    """A backend: pages and prompt chunks in plain XLA, decoding by the subclass."""

    # A call's page table is as wide as its longest sequence, rounded up to a power of
    # two of pages times one of these; empty: always as wide as the longest possible.
    width_steps: tuple[float, ...] = ()

    def page_specs(self, pages: Any) -> Any:
        """Return the partition specs of a layer's pages: all are sharded by heads."""
        return jax.tree.map(lambda _: PartitionSpec(None, "tensor"), pages)

    def __init__(self, *, cap: float = 0.0) -> None:
        """Use scores with a soft cap; 0: without."""
        self._cap = cap

    def init_pages(
        self, num_pages: int, page_size: int, *, heads: int, dim: int, dtype: DTypeLike
    ) -> Any:
        """Return a layer's empty pages; in int8 they have scales."""
        scales: dict[str, Array] = {}
        if is_quantized(dtype):
            empty = jnp.zeros((num_pages, heads, page_size), jnp.float32)
            scales = dict(key_scales=empty, value_scales=empty)
        return Pages(
            keys=jnp.zeros((num_pages, heads, dim, page_size), dtype),
            values=jnp.zeros((num_pages, heads, page_size, dim), dtype),
            **scales,
        )

    @abc.abstractmethod
    def open(
        self,
        pages: tuple[Any, ...],
        rows: Rows,
        steps: int,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return the arrays (views) that a `generate` call uses, per layer.

        `nears` has the part that each layer sees.
        """

    @abc.abstractmethod
    def decode(
        self,
        view: Any,
        q: Float[Array, "rows heads dim"],
        k: Float[Array, "rows kv dim"],
        v: Float[Array, "rows kv dim"],
        *,
        rows: Rows,
        step: Int[Array, ""],
        positions: Int[Array, " rows"],
        active: Bool[Array, " rows"],
        near: Near | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "rows heads dim"], Any]:
        """Return the attention of one new token per row, and the updated view.

        With `near` a token sees a part of its sequence; `sinks`: see `with_sinks`.
        """

    @abc.abstractmethod
    def close(
        self,
        pages: tuple[Any, ...],
        views: tuple[Any, ...],
        *,
        rows: Rows,
        positions: Int[Array, " rows"],
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return the pages after a call that advanced the rows to `positions`."""

    def chunk(
        self,
        pages: Any,
        q: Float[Array, "C heads dim"],
        k: Float[Array, "C kv dim"],
        v: Float[Array, "C kv dim"],
        chunk: Chunk,
        *,
        near: Near | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "C heads dim"], Any]:
        """Return a chunk's causal attention, and the pages with its keys and values."""
        places = places_of(
            chunk.table[jnp.maximum(chunk.segments - 1, 0)],
            chunk.positions,
            page_size=pages.page_size,
            valid=chunk.segments > 0,
            near=near,
        )
        new = stored(k, v, pages.dtype)
        pages = pages.put(new, places)
        return self.attend_chunk(q, new, pages, chunk, near, sinks), pages

    def attend_chunk(
        self,
        q: Array,
        new: Stored,
        pages: Any,
        chunk: Chunk,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> Float[Array, "C heads dim"]:
        """Return a chunk's attention to itself and to its first sequence's past.

        Sequences that begin where the first one does share its past.
        """
        length, heads, dim = q.shape
        grouped = q.reshape(length, new.keys.shape[1], -1, dim)
        order = jnp.arange(length)
        allowed = (chunk.segments[:, None] == chunk.segments) & (
            order[:, None] >= order
        )
        first, table, past = None, chunk.table[:1], chunk.positions[:1]
        begins = chunk.positions[chunk.query_starts[jnp.maximum(chunk.segments - 1, 0)]]
        share = (begins == past) & (chunk.segments > 0)
        if near is not None:
            allowed &= near.sees(chunk.positions)
            first = near.first(chunk.positions)[None]
            if near.ring:
                oldest = near.first(past)
                table, base = near.pages_from(table, oldest, size=pages.page_size)
                # Tokens of other sequences see none of these pages.
                first, past = jnp.maximum(first - base, 0), past - base
        scores = jnp.einsum(
            "qkgd,skd->qkgs",
            grouped,
            new.keys.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )
        scores = scaled(scores * dim**-0.5, new.key_scales, _OF_CHUNK)
        scores = capped(scores, self._cap)
        scores = jnp.where(allowed[:, None, None], scores, MASKED)
        highest = scores.max(axis=-1)
        shares = jnp.exp(scores - highest[..., None])
        mixed = jnp.einsum(
            "qkgs,skd->qkgd",
            scaled(shares, new.value_scales, _OF_CHUNK),
            new.values.astype(jnp.float32),
        )
        state = over_pages(
            grouped[None],
            pages,
            table,
            past,
            share[None],
            (highest[None], shares.sum(axis=-1)[None], mixed[None]),
            first,
            cap=self._cap,
        )
        _, total, mixed = with_sinks(state, sinks)
        return (mixed / total[..., None]).reshape(length, heads, dim).astype(q.dtype)


# Axes of scores, and those of the scales of the same tokens.
_OF_CHUNK = "qkgs sk"
_OF_BLOCK = "rqkgns rnks"
_OF_ROWS = "rkgs rks"
_OF_STEPS = "srkg srk"


def scaled(scores: Array, scales: Array | None, axes: str) -> Array:
    """Return scores or weights times the scales of their tokens; None: unchanged."""
    if scales is None:
        return scores
    all_axes, of_scales = axes.split()
    order = [of_scales.index(axis) for axis in all_axes if axis in of_scales]
    missing = [at for at, axis in enumerate(all_axes) if axis not in of_scales]
    return scores * jnp.expand_dims(scales.transpose(order), missing)


def over_pages(
    q: Float[Array, "rows queries kv group dim"],
    pages: Any,
    table: Int[Array, "rows pages"],
    lengths: Int[Array, " rows"],
    allowed: Bool[Array, "rows queries"],
    carry: tuple[Array, Array, Array],
    first: Int[Array, "rows queries"] | None = None,
    *,
    cap: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Return the online softmax's state with the rows' pages folded in.

    The state is (highest score, sum of exponentials, mixed values).  A query sees the
    tokens from its `first` on; None: all tokens.
    """
    page_size, dim = pages.page_size, q.shape[-1]
    per_block = min(max(1, _BLOCK_TOKENS // page_size), table.shape[1])
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_block)))

    def add(block: Array, carry: tuple[Array, Array, Array]) -> Any:
        highest, total, mixed = carry
        numbers = jax.lax.dynamic_slice_in_dim(table, block * per_block, per_block, 1)
        held = pages.read(numbers)
        scores = jnp.einsum(
            "rqkgd,rnkds->rqkgns",
            q,
            held.keys.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )
        scores = scaled(scores * dim**-0.5, held.key_scales, _OF_BLOCK)
        order = block * per_block * page_size + jnp.arange(per_block * page_size)
        seen = (order < lengths[:, None])[:, None] & allowed[..., None]
        if first is not None:
            seen &= order >= first[..., None]
        seen = seen.reshape(*allowed.shape, 1, 1, per_block, page_size)
        scores = jnp.where(seen, capped(scores, cap), MASKED)
        higher = jnp.maximum(highest, scores.max(axis=(-2, -1)))
        shares = jnp.where(seen, jnp.exp(scores - higher[..., None, None]), 0.0)
        shrunk = jnp.exp(highest - higher)
        found = jnp.einsum(
            "rqkgns,rnksd->rqkgd",
            scaled(shares, held.value_scales, _OF_BLOCK),
            held.values.astype(jnp.float32),
        )
        return (
            higher,
            total * shrunk + shares.sum(axis=(-2, -1)),
            mixed * shrunk[..., None] + found,
        )

    block_tokens = per_block * page_size
    blocks = (lengths.max() + block_tokens - 1) // block_tokens
    start = 0 if first is None else first.min() // block_tokens
    return jax.lax.fori_loop(start, blocks, add, carry)


@struct.dataclass(kw_only=True)
class _Gathered:
    """A layer's rows: tokens cached before the call, and tokens of the call."""

    # Keys [rows, pages, kv, dim, size], values [rows, kv, past, dim], and scales
    # [rows, kv, past].
    past: Stored
    new: Stored  # of [steps, rows] tokens


class GatheredAttention(CachedAttention):
    """Attention over a copy of the past, made once per call, and the call's tokens.

    On a CPU a scatter into a cache takes XLA longer than the attention: here a step
    writes one slice for all rows, and a call scatters once.
    """

    width_steps = (1.0, 1.5)

    def open(
        self,
        pages: tuple[Any, ...],
        rows: Rows,
        steps: int,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return a copy of the rows' past, with room for `steps` tokens."""

        def gather(layer: Pages, near: Near | None) -> _Gathered:
            _, heads, dim, size = layer.keys.shape
            table = rows.table
            if near is not None and near.ring:
                table, _ = near.pages_from(table, near.first(rows.starts), size=size)
            count, width = table.shape
            new = jnp.zeros((steps, count, heads, dim), jnp.float32)
            # Gathered by page and head, the rows are in order and need no transpose.
            by_head = table[:, None] * heads + jnp.arange(heads)[:, None]

            def of_tokens(held: Array) -> Array:
                found = held.reshape(-1, *held.shape[2:])[by_head]
                return found.reshape(count, heads, width * size, *held.shape[3:])

            scales: dict[str, Array] = {}
            if layer.key_scales is not None and layer.value_scales is not None:
                both = (layer.key_scales, layer.value_scales)
                names = ("key_scales", "value_scales")
                scales = dict(zip(names, map(of_tokens, both), strict=True))
            return _Gathered(
                past=Stored(
                    keys=layer.keys[table],
                    values=of_tokens(layer.values),
                    **scales,
                ),
                new=stored(new, new, layer.dtype),
            )

        return tuple(map(gather, pages, nears))

    def decode(
        self,
        view: _Gathered,
        q: Array,
        k: Array,
        v: Array,
        *,
        rows: Rows,
        step: Array,
        positions: Array,
        active: Array,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, _Gathered]:
        """Return attention over the past and the call's tokens up to `step`."""
        del active
        first = positions if near is None else near.first(positions)
        held, own = view.past, stored(k, v, view.new.keys.dtype)
        tokens = jax.tree.map(lambda all_, one: all_.at[step].set(one), view.new, own)
        view = _Gathered(past=held, new=tokens)
        dim = q.shape[-1]
        grouped = q.reshape(q.shape[0], k.shape[1], -1, dim).astype(jnp.float32)
        grouped = grouped * dim**-0.5
        # Products and sums: a matmul of a group's few queries is three times slower.
        past = (grouped[:, None, :, :, :, None] * held.keys[:, :, :, None]).sum(axis=4)
        past = past.transpose(0, 2, 3, 1, 4).reshape(*grouped.shape[:3], -1)
        past = scaled(past, held.key_scales, _OF_ROWS)
        new = (grouped * tokens.keys[:, :, :, None]).sum(axis=-1)
        new = scaled(new, tokens.key_scales, _OF_STEPS)
        past, new = capped(past, self._cap), capped(new, self._cap)
        order = jnp.arange(past.shape[-1])
        if near is not None and near.ring:
            size = held.keys.shape[-1]
            order += near.first(rows.starts)[:, None] // size * size
        seen = order < rows.starts[:, None]
        if near is not None:
            seen &= order >= first[:, None]
        past = jnp.where(seen[:, None, None], past, MASKED)
        order = jnp.arange(new.shape[0])[:, None, None, None]
        seen = order <= step
        if near is not None:
            seen &= rows.starts[:, None, None] + order >= first[:, None, None]
        new = jnp.where(seen, new, MASKED)
        highest = jnp.maximum(past.max(axis=-1), new.max(axis=0))
        past, new = jnp.exp(past - highest[..., None]), jnp.exp(new - highest)
        total = past.sum(axis=-1) + new.sum(axis=0)
        past = scaled(past, held.value_scales, _OF_ROWS)
        new = scaled(new, tokens.value_scales, _OF_STEPS)
        mixed = jnp.einsum("rkgs,rksd->rkgd", past, held.values)
        mixed += (new[..., None] * tokens.values[:, :, :, None]).sum(axis=0)
        _, total, mixed = with_sinks((highest, total, mixed), sinks)
        return (mixed / total[..., None]).reshape(q.shape).astype(q.dtype), view

    def close(
        self,
        pages: tuple[Any, ...],
        views: tuple[_Gathered, ...],
        *,
        rows: Rows,
        positions: Array,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Write the call's tokens into the pages, and return the pages."""
        steps, count = views[0].new.keys.shape[:2]
        at = jnp.tile(rows.starts, steps) + jnp.repeat(jnp.arange(steps), count)
        places = {
            near: places_of(
                jnp.tile(rows.table, (steps, 1)),
                at,
                page_size=pages[0].page_size,
                valid=at < jnp.tile(positions, steps),
                near=near,
            )
            for near in dict.fromkeys(nears)
        }

        def in_line(new: Array) -> Array:
            return new.reshape(-1, *new.shape[2:])

        return tuple(
            layer.put(jax.tree.map(in_line, view.new), places[near])
            for layer, view, near in zip(pages, views, nears, strict=True)
        )
