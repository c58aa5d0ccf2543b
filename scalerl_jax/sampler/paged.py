"""Decoding directly on the pages in plain XLA, without extra memory."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.model.attention import MASKED
from scalerl_jax.sampler.attention import (
    CachedAttention,
    Near,
    Rows,
    over_pages,
    places_of,
    with_sinks,
)
from scalerl_jax.sampler.stored import stored


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
        grouped = q.reshape(q.shape[0], 1, pages.keys.shape[1], -1, q.shape[-1])
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
