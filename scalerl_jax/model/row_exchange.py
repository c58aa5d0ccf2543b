"""Rows in another order, or sent to the devices that they are for; no row is dropped.

Sending is within a `shard_map`, of as many rows as there are:

    ragged     `jax.lax.ragged_all_to_all`, on TPUs: what is sent is what there is
    gathered   elsewhere, where XLA has no such collective: everybody gets everything

Both have room for any number of rows on any device.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def send_rows(
    axis: str, room: int, rows: Float[Array, "n D"], sizes: Int[Array, "X X"]
) -> Float[Array, "room D"]:
    """Rows that this device is sent: those of device 0, of device 1, ..., then zeros.

    With `sizes` transposed and room for n rows, what came back is sent back, and lies
    as it lay.  So is the gradient.

    Args:
        axis: of the mesh, X devices.
        room: rows that may arrive, at least the sum of a column of `sizes`.
        rows: those for device 0 first, then those for device 1, and so on.
        sizes: how many rows device s has for device d, at [s, d]; alike on all.
    """
    return jax.lax.platform_dependent(
        rows,
        sizes,
        tpu=functools.partial(_ragged, axis, room),
        default=functools.partial(_gathered, axis, room),
    )


def _starts(sizes: Array, dimension: int) -> Array:
    return jnp.cumsum(sizes, axis=dimension) - sizes


def _ragged(axis: str, room: int, rows: Array, sizes: Array) -> Array:
    me = jax.lax.axis_index(axis)
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, rows.shape[1]), rows.dtype),
        _starts(sizes, 1)[me],
        sizes[me],
        _starts(sizes, 0)[me],
        sizes[:, me],
        axis_name=axis,
    )


def _gathered(axis: str, room: int, rows: Array, sizes: Array) -> Array:
    me = jax.lax.axis_index(axis)
    everything = jax.lax.all_gather(rows, axis)
    number = jnp.arange(room)
    ends = jnp.cumsum(sizes[:, me])
    source = jnp.searchsorted(ends, number, side="right")
    source = jnp.minimum(source, len(sizes) - 1)
    place = _starts(sizes, 1)[source, me] + number - _starts(sizes, 0)[source, me]
    there = number < ends[-1]
    found = everything[source, jnp.where(there, place, 0)]
    return jnp.where(there[:, None], found, 0)


def _forward(
    axis: str, room: int, rows: Array, sizes: Array
) -> tuple[Array, tuple[Array, int]]:
    return send_rows(axis, room, rows, sizes), (sizes, len(rows))


def _backward(
    axis: str, room: int, saved: tuple[Array, int], cotangent: Array
) -> tuple[Array, None]:
    sizes, count = saved
    return send_rows(axis, count, cotangent, sizes.T), None


send_rows.defvjp(_forward, _backward)


@jax.custom_vjp
def permuted(x: Array, order: Array, place: Array) -> Array:
    """x[order]; `place` is the permutation that undoes it.  Both passes only gather."""
    return x[order]


permuted.defvjp(
    lambda x, order, place: (x[order], place),
    lambda place, cotangent: (cotangent[place], None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(top_k: int, tokens: Array, order: Array, place: Array) -> Array:
    """A row for each of a token's experts [T * k, D], in `order`."""
    return tokens[order // top_k]


def _spread_forward(
    top_k: int, tokens: Array, order: Array, place: Array
) -> tuple[Array, Array]:
    return spread(top_k, tokens, order, place), place


def _spread_backward(
    top_k: int, place: Array, cotangent: Array
) -> tuple[Array, None, None]:
    back = cotangent[place].reshape(-1, top_k, cotangent.shape[1])
    return back.sum(axis=1, dtype=jnp.float32).astype(cotangent.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)
