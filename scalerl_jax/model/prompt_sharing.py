"""Prompts computed once for all of their completions: streams and attention's rows.

All parts of a layer except attention act on single tokens, so the prompt tokens of a
group are computed once, in a stream.  Attention reads rows in which every sequence is
whole: the stream's queries, keys and values are spread over rows, and attention's
outputs are collected from them.  Both passes only gather: scattered sums are slow on
all devices.  The idea is from https://arxiv.org/abs/2506.05433.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.types import Sharing


@jax.custom_vjp
def spread(x: Float[Array, "D U ..."], sharing: Sharing) -> Float[Array, "R S ..."]:
    """Copy the tokens of D streams to attention's rows, with prompts repeated."""
    rows = _take(x, sharing.source.reshape(x.shape[0], -1))
    return rows.reshape(*sharing.source.shape, *x.shape[2:])


def _spread_forward(x: Array, sharing: Sharing) -> tuple[Array, Sharing]:
    return spread(x, sharing), sharing


def _spread_backward(sharing: Sharing, cotangent: Array) -> tuple[Array, None]:
    """Return each token's cotangents, summed over the positions of its copies."""
    flat = _flat(cotangent, sharing)
    first = _take_or_zero(flat, sharing.place)
    count, others = sharing.copies.shape[1:]
    more = _take_or_zero(flat, sharing.copies.reshape(len(flat), -1))
    more = more.reshape(len(flat), count, others, *flat.shape[2:]).sum(axis=2)
    return first.at[:, :count].add(more), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(rows: Float[Array, "R S ..."], sharing: Sharing) -> Float[Array, "D U ..."]:
    """Return each stream token's entry, from its first position in the rows."""
    return _take_or_zero(_flat(rows, sharing), sharing.place)


def _collect_forward(rows: Array, sharing: Sharing) -> tuple[Array, Sharing]:
    return collect(rows, sharing), sharing


def _collect_backward(sharing: Sharing, cotangent: Array) -> tuple[Array, None]:
    streams = len(cotangent)
    source = sharing.source.reshape(streams, -1)
    first = _take(sharing.place, source) == jnp.arange(source.shape[1])
    rows = _take(cotangent, source)
    rows = jnp.where(first.reshape(*first.shape, *(1,) * (rows.ndim - 2)), rows, 0)
    return rows.reshape(*sharing.source.shape, *cotangent.shape[2:]), None


collect.defvjp(_collect_forward, _collect_backward)


def _flat(rows: Array, sharing: Sharing) -> Array:
    """Return the rows of each stream laid end to end: [D, R / D * S, ...]."""
    return rows.reshape(sharing.place.shape[0], -1, *rows.shape[2:])


def _take(x: Array, places: Array) -> Array:
    return jax.vmap(lambda x, places: x[places])(x, places)


def _take_or_zero(x: Array, places: Array) -> Array:
    """Return the entries at `places`; 0 where a place is -1."""
    found = _take(x, jnp.maximum(places, 0))
    there = (places >= 0).reshape(*places.shape, *(1,) * (found.ndim - 2))
    return jnp.where(there, found, 0)
