"""Rows of token-expert pairs: sorted, sent between devices, multiplied by group.

No row is dropped.  Rows are sent within a `shard_map`:

    ragged     `jax.lax.ragged_all_to_all`, on TPUs: only existing rows are sent
    gathered   elsewhere, where XLA has no such collective: all devices get all rows

Both have room for any number of rows on any device.  Rows that are sorted by group are
multiplied by the matrix of their own group:

    loop       blocks of a group's rows, one after the other: on CPUs and GPUs
    megablox   JAX's grouped kernel for TPUs

Both compute `product[r] = x[r] @ weights[group of r]` and its two gradients.
`jax.lax.ragged_dot` is not used: XLA expands it on CPUs and GPUs, and its weight
gradient on a TPU too, to a product of every row with every group.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.layers import GROUPED

_BLOCK = 64  # rows of a group in one step of the loop
_LARGE_BLOCK = 256  # the same on GPUs, where a step costs as much as some hundred rows
_TILE = 128  # of megablox, a vector's lanes: rows are padded to a multiple
_LARGEST_TILES = (512, 1024, 1024)  # rows, inner and outer columns


def _blocks(rows: int, sizes: Array, size: int) -> tuple[int, Array, Array, Array]:
    """Return the most blocks of `size` rows, and each one's group, start and rows."""
    most = -(-rows // size) + min(len(sizes), rows)
    ends, blocks = jnp.cumsum(sizes), -(-sizes // size)
    last = jnp.cumsum(blocks)
    number = jnp.arange(most)
    group = jnp.searchsorted(last, number, side="right").astype(jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    first = (ends - sizes)[group] + (number - (last - blocks)[group]) * size
    return most, group, first, jnp.clip(ends[group] - first, 0, size)


def _loop(x: Array, weights: Array, sizes: Array, *, size: int = _BLOCK) -> Array:
    rows = len(x)
    _, group, first, _ = _blocks(rows, sizes, size)
    count = (-(-sizes // size)).sum()
    x = jnp.pad(x, ((0, size), (0, 0)))

    def one(block: Array, found: Array) -> Array:
        # Rows after the group's last are overwritten by their own group later.
        these = jax.lax.dynamic_slice_in_dim(x, first[block], size)
        these = these @ weights[group[block]]
        return jax.lax.dynamic_update_slice_in_dim(found, these, first[block], 0)

    found = jnp.zeros((rows + size, weights.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, count, one, found)[:rows]


def _loop_of_weights(
    x: Array,
    cotangent: Array,
    sizes: Array,
    *,
    dtype: DTypeLike,
    size: int = _BLOCK,
) -> Array:
    _, group, first, length = _blocks(len(x), sizes, size)
    count = (-(-sizes // size)).sum()
    x, cotangent = (jnp.pad(each, ((0, size), (0, 0))) for each in (x, cotangent))

    def one(block: Array, sums: Array) -> Array:
        own = (jnp.arange(size) < length[block])[:, None]
        left, right = (
            jax.lax.dynamic_slice_in_dim(each, first[block], size)
            for each in (x, cotangent)
        )
        more = jnp.einsum(
            "rk,rn->kn",
            jnp.where(own, left, 0),
            jnp.where(own, right, 0),
            preferred_element_type=sums.dtype,
        )
        return sums.at[group[block]].add(more)

    shape = (len(sizes), x.shape[1], cotangent.shape[1])
    return jax.lax.fori_loop(0, count, one, jnp.zeros(shape, dtype))


def _tiles(
    rows: int, inner: int, outer: int, *, item_bytes: int = 2
) -> tuple[int, int, int]:
    """Return the largest of megablox's tiles that divide the rows and fit the columns.

    A gradient needs three tiles of inner by outer columns, two in its own dtype and one
    in float32: with float32 the largest exceed the 16 MiB of a v5p.
    """
    most_rows, most_inner, most_outer = _LARGEST_TILES
    most_inner = most_inner * 2 // item_bytes
    while rows % most_rows:
        most_rows //= 2
    return most_rows, min(most_inner, inner), min(most_outer, outer)


def _whole_tiles(x: Array) -> Array:
    """Pad the rows to whole tiles with zero rows, which belong to no group."""
    return jnp.pad(x, ((0, -len(x) % _TILE), (0, 0)))


def _megablox(
    x: Array, weights: Array, sizes: Array, *, interpret: bool = False
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows, x = len(x), _whole_tiles(x)
    tiling = _tiles(len(x), x.shape[1], weights.shape[2])
    found: Any = gmm(
        x,
        weights,
        sizes,
        preferred_element_type=x.dtype,
        tiling=tiling,
        interpret=interpret,
    )
    return found[:rows]


def _megablox_of_weights(
    x: Array,
    cotangent: Array,
    sizes: Array,
    *,
    dtype: DTypeLike,
    interpret: bool = False,
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, cotangent = _whole_tiles(x), _whole_tiles(cotangent)
    tiling = _tiles(
        *(len(x), x.shape[1], cotangent.shape[1]),
        item_bytes=max(2, jnp.dtype(dtype).itemsize),
    )
    return tgmm(
        x.T,
        cotangent,
        sizes,
        preferred_element_type=dtype,
        tiling=tiling,
        interpret=interpret,
    )


# x [rows, K], weights [groups, K, N], sizes [groups] -> [rows, N]
Product = Callable[[Array, Array, Array], Array]
# x [rows, K], cotangent [rows, N], sizes [groups], dtype -> gradient of the weights
OfWeights = Callable[..., Array]
KERNELS: dict[str, tuple[Product, OfWeights]] = {
    "loop": (_loop, _loop_of_weights),
    "loop of large blocks": (
        functools.partial(_loop, size=_LARGE_BLOCK),
        functools.partial(_loop_of_weights, size=_LARGE_BLOCK),
    ),
    "megablox": (_megablox, _megablox_of_weights),
    "megablox-interpreted": (  # on any device, slowly: for tests
        functools.partial(_megablox, interpret=True),
        functools.partial(_megablox_of_weights, interpret=True),
    ),
}
_OF_PLATFORM = {"tpu": "megablox", "cpu": "loop", "default": "loop of large blocks"}


def _run(part: int, kernel: str, *arrays: Array, **options: Any) -> Array:
    """Run a kernel's function number `part`; "auto": the compile platform's kernel."""
    if kernel != "auto":
        return KERNELS[kernel][part](*arrays, **options)
    platforms = {
        name: functools.partial(KERNELS[of][part], **options)
        for name, of in _OF_PLATFORM.items()
    }
    return jax.lax.platform_dependent(*arrays, **platforms)


class Cut(NamedTuple):
    """The sharding of weights within a `shard_map`."""

    axis: str  # mesh axis
    dimension: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x: Float[Array, "rows K"],
    weights: Float[Array, "groups _ _"],
    sizes: Int[Array, " groups"],
    kernel: str = "auto",
    cut: Cut | None = None,
) -> Float[Array, "rows _"]:
    """Return x[r] @ weights[group of r] in the dtype of x, with rows sorted by group.

    The first sizes[0] rows are of group 0, and so on; the sizes sum to the number of
    rows.  The gradient of the weights is summed in the weights' dtype.  `kernel` is a
    name in `KERNELS`.  Weights that are sharded (`cut`) are gathered in the dtype of x,
    and the parts of their gradient are summed in the weights' dtype.
    """
    product = _run(0, kernel, x, _whole(weights, x.dtype, cut), sizes)
    return checkpoint_name(product, GROUPED)


def _whole(weights: Array, dtype: DTypeLike, cut: Cut | None) -> Array:
    weights = weights.astype(dtype)
    if cut is None:
        return weights
    return jax.lax.all_gather(weights, cut.axis, axis=cut.dimension, tiled=True)


_Saved = tuple[Array, Array, Array]


def _forward(
    x: Array, weights: Array, sizes: Array, kernel: str, cut: Cut | None
) -> tuple[Array, _Saved]:
    return grouped_matmul(x, weights, sizes, kernel, cut), (x, weights, sizes)


def _backward(
    kernel: str, cut: Cut | None, saved: _Saved, cotangent: Array
) -> tuple[Array, Array, None]:
    x, weights, sizes = saved
    back = _whole(weights, x.dtype, cut).swapaxes(1, 2)
    of_x = _run(0, kernel, cotangent, back, sizes)
    of_weights = _run(1, kernel, x, cotangent, sizes, dtype=weights.dtype)
    if cut is not None:
        of_weights = jax.lax.psum_scatter(
            of_weights, cut.axis, scatter_dimension=cut.dimension, tiled=True
        )
    return of_x, of_weights, None


grouped_matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def send_rows(
    axis: str, room: int, rows: Float[Array, "n D"], sizes: Int[Array, "X X"]
) -> Float[Array, "room D"]:
    """Send rows between devices; return the received rows by sender, then zeros.

    With `sizes` transposed and room for n rows, a second call sends all rows back to
    their first positions.  The gradient is sent in this way.

    Args:
        axis: a mesh axis of X devices.
        room: rows that may arrive, at least the sum of a column of `sizes`.
        rows: the rows for device 0 first, then those for device 1, and so on.
        sizes: number of rows that device s has for device d, at [s, d]; equal on all.
    """
    return jax.lax.platform_dependent(
        rows,
        sizes,
        tpu=functools.partial(_send_ragged, axis, room),
        default=functools.partial(_send_gathered, axis, room),
    )


def _starts(sizes: Array, dimension: int) -> Array:
    return jnp.cumsum(sizes, axis=dimension) - sizes


def _send_ragged(axis: str, room: int, rows: Array, sizes: Array) -> Array:
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


def _send_gathered(axis: str, room: int, rows: Array, sizes: Array) -> Array:
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


def _send_forward(
    axis: str, room: int, rows: Array, sizes: Array
) -> tuple[Array, tuple[Array, int]]:
    return send_rows(axis, room, rows, sizes), (sizes, len(rows))


def _send_backward(
    axis: str, room: int, saved: tuple[Array, int], cotangent: Array
) -> tuple[Array, None]:
    sizes, count = saved
    return send_rows(axis, count, cotangent, sizes.T), None


send_rows.defvjp(_send_forward, _send_backward)


@jax.custom_vjp
def permuted(x: Array, order: Array, place: Array) -> Array:
    """Return x[order]; `place` is the inverse permutation.  Both passes only gather."""
    return x[order]


permuted.defvjp(
    lambda x, order, place: (x[order], place),
    lambda place, cotangent: (cotangent[place], None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(top_k: int, tokens: Array, order: Array, place: Array) -> Array:
    """Return a row for each of a token's experts, [T * k, D], in `order`."""
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
