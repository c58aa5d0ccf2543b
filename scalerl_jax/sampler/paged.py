"""Decoding directly on the pages in plain XLA, without extra memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.attention import MASKED
from scalerl_jax.sampler.attention import (
    CachedAttention,
    Near,
    Places,
    Rows,
    over_pages,
    places_of,
    with_sinks,
)
from scalerl_jax.sampler.stored import Stored, stored


class PagedAttention(CachedAttention):
    """Plain XLA on the pages, a block of each sequence at a time (online softmax)."""

    def open(
        self,
        pages: tuple[Any, ...],
        rows: Rows,
        steps: int,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return the pages, which a call uses directly."""
        del rows, steps, nears
        return pages

    def decode(
        self,
        view: Any,
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
    ) -> tuple[Array, Any]:
        """Return the attention, and the pages with the new keys and values."""
        del step
        # Ended rows are read too, so give them a length of one.
        positions = jnp.where(active, positions, 0)
        places = places_of(
            rows.table,
            positions,
            page_size=view.page_size,
            valid=active,
            apart=True,
            near=near,
        )
        view = view.put(stored(k, v, view.dtype), places)
        lengths = positions + 1
        return self.attend_rows(q, view, rows.table, lengths, near, sinks), view

    def close(
        self,
        pages: tuple[Any, ...],
        views: tuple[Any, ...],
        *,
        rows: Rows,
        positions: Array,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return the pages, which have the call's tokens already."""
        del pages, rows, positions, nears
        return views

    def attend_rows(
        self,
        q: Array,
        pages: Any,
        table: Array,
        lengths: Array,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> Float[Array, "rows heads dim"]:
        """Return each row's attention of its last token to its `lengths` tokens."""
        kv = jax.tree.leaves(pages)[0].shape[1]
        grouped = q.reshape(q.shape[0], 1, kv, -1, q.shape[-1])
        shape = grouped.shape[:-1]
        carry = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(grouped.shape, jnp.float32),
        )
        everyone = jnp.ones(grouped.shape[:2], bool)
        first = None if near is None else near.first(lengths - 1)[:, None]
        if near is not None and first is not None and near.ring:
            table, base = near.pages_from(table, first[:, 0], size=pages.page_size)
            first, lengths = first - base[:, None], lengths - base
        state = over_pages(
            grouped, pages, table, lengths, everyone, carry, first, cap=self._cap
        )
        _, total, mixed = with_sinks(state, sinks)
        return (mixed / total[..., None]).reshape(q.shape).astype(q.dtype)


@struct.dataclass(kw_only=True)
class RowPages:
    """A layer's cache for TPUs: a row of a page is a head's key and its value.

    A decoded token's page is written whole.  At the token's own place, with keys as
    columns, or with rows of less than 128 numbers, XLA copies the cache into a layout
    of its own and back, the first two at every step (libtpu 0.0.42).
    """

    rows: Array  # [pages, kv, size, 2 dim]
    key_scales: Float[Array, "pages kv size"] | None = None  # in int8
    value_scales: Float[Array, "pages kv size"] | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.rows.shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of keys and values."""
        return self.rows.dtype

    def put(self, new: Stored, places: Places) -> "RowPages":
        """Return the pages with T new keys and values written at `places`."""
        here = jnp.arange(self.page_size) == places.offset[:, None]

        def write(held: Array, token: Array) -> Array:
            if not places.apart:
                at = held.at[places.page, :, places.offset]
                return at.set(token, mode="drop")
            mine = here.reshape(len(here), 1, -1, *[1] * (held.ndim - 3))
            page = jnp.where(mine, token[:, :, None], held[places.page])
            return held.at[places.page].set(page, mode="drop", unique_indices=True)

        return jax.tree.map(
            write,
            self,
            RowPages(
                rows=jnp.concatenate((new.keys, new.values), axis=-1),
                key_scales=new.key_scales,
                value_scales=new.value_scales,
            ),
        )

    def read(self, numbers: Int[Array, "..."]) -> Stored:
        """Return what pages hold, with the axes of `Pages.read`."""
        found = jax.tree.map(lambda held: held[numbers], self)
        keys, values = jnp.split(found.rows, 2, axis=-1)
        return Stored(
            keys=jnp.swapaxes(keys, -2, -1),
            values=values,
            key_scales=found.key_scales,
            value_scales=found.value_scales,
        )


class RowPagedAttention(PagedAttention):
    """Plain XLA on pages of rows."""

    def init_pages(
        self, num_pages: int, page_size: int, *, heads: int, dim: int, dtype: DTypeLike
    ) -> RowPages:
        """Return a layer's empty pages; in int8 they have scales."""
        plain = super().init_pages(
            num_pages, page_size, heads=heads, dim=dim, dtype=dtype
        )
        return RowPages(
            rows=jnp.zeros((num_pages, heads, page_size, 2 * dim), dtype),
            key_scales=plain.key_scales,
            value_scales=plain.value_scales,
        )
