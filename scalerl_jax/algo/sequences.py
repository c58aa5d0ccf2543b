"""Sums over the sequences of packed rows, given back to each of their tokens.

Everything is along the last axis: a sequence lies in one row.  Ids are from 1 to the
length of the row; what has id 0 belongs to no sequence.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sequence_sum(
    values: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """Give every token the sum of its sequence's values where the mask is True.

    sum[s] = sum over u with sequence_ids[u] = sequence_ids[s] of mask[u] * values[u]
    """

    def of_row(values: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(values, ids, num_segments=ids.size + 1)[ids]

    masked = jnp.where(mask & (sequence_ids > 0), values, 0.0)
    return jnp.vectorize(of_row, signature="(s),(s)->(s)")(masked, sequence_ids)


def sequence_mean(
    values: Float[Array, "*rows S"],
    sequence_ids: Int[Array, "*rows S"],
    mask: Bool[Array, "*rows S"],
) -> Float[Array, "*rows S"]:
    """Give every token the mean of its sequence's values where the mask is True.

    0 where the mask is nowhere True.
    """
    ones = jnp.ones_like(values)
    count = jnp.maximum(sequence_sum(ones, sequence_ids, mask), 1.0)
    return sequence_sum(values, sequence_ids, mask) / count


def ends(
    sequence_ids: Int[Array, "*rows S"], mask: Bool[Array, "*rows S"]
) -> Bool[Array, "*rows S"]:
    """True on the last token of every sequence that the mask shows."""
    places = jnp.arange(1.0, mask.shape[-1] + 1.0)

    def of_row(ids: Array, seen: Array) -> Array:
        reached = jax.ops.segment_max(
            jnp.where(seen, places, 0.0), ids, num_segments=ids.size + 1
        )
        return seen & (reached[ids] == places)

    return jnp.vectorize(of_row, signature="(s),(s)->(s)")(
        sequence_ids, mask & (sequence_ids > 0)
    )
