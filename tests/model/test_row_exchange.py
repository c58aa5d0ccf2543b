"""Rows that devices send to each other: against lists of them, and back again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.model import row_exchange

DEVICES, ROWS, ROOM = 4, 6, 24
MESH = jax.sharding.Mesh(np.asarray(jax.devices()[:DEVICES]), ("expert",))
CUT = jax.P("expert")


@functools.cache
def exchange(back):
    room = ROWS if back else ROOM

    def send(rows, sizes):
        return row_exchange.send_rows("expert", room, rows, sizes.T if back else sizes)

    return jax.jit(
        jax.shard_map(
            send,
            mesh=MESH,
            in_specs=(CUT, jax.P()),
            out_specs=CUT,
            check_vma=False,
        )
    )


@st.composite
def tables(draw):
    """How many of its six rows each device sends to each; it may have more."""
    rows = []
    for _ in range(DEVICES):
        cuts = sorted(draw(st.lists(st.integers(0, ROWS), min_size=4, max_size=4)))
        rows.append(np.diff([0, *cuts]))
    return np.asarray(rows, np.int32)


def numbers(rows):
    return np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 1


@settings(max_examples=40, deadline=None)
@given(sizes=tables())
def test_every_device_has_the_rows_that_are_for_it(sizes):
    rows = numbers(DEVICES * ROWS)
    found = exchange(False)(rows, sizes).reshape(DEVICES, ROOM, 2)
    own = rows.reshape(DEVICES, ROWS, 2)
    starts = np.cumsum(sizes, axis=1) - sizes
    for device in range(DEVICES):
        wanted = [
            own[source, starts[source, device] :][: sizes[source, device]]
            for source in range(DEVICES)
        ]
        wanted = np.concatenate(wanted)
        np.testing.assert_array_equal(found[device, : len(wanted)], wanted)
        assert not found[device, len(wanted) :].any()


@settings(max_examples=20, deadline=None)
@given(sizes=tables())
def test_rows_come_back_to_where_they_were(sizes):
    rows = numbers(DEVICES * ROWS)
    back = exchange(True)(exchange(False)(rows, sizes), sizes)
    sent = np.arange(ROWS)[None] < sizes.sum(axis=1)[:, None]
    wanted = np.where(sent.reshape(-1)[:, None], rows, 0)
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.parametrize("crowded", [0, 3])
def test_there_is_room_for_all_rows_on_one_device(crowded):
    sizes = np.zeros((DEVICES, DEVICES), np.int32)
    sizes[:, crowded] = ROWS
    rows = numbers(DEVICES * ROWS)
    found = exchange(False)(rows, sizes).reshape(DEVICES, ROOM, 2)
    np.testing.assert_array_equal(found[crowded], rows)


def test_the_gradient_goes_back_the_same_way():
    sizes = np.asarray([[1, 2, 0, 3], [6, 0, 0, 0], [0, 1, 1, 1], [2, 2, 2, 0]], "i4")
    rows = numbers(DEVICES * ROWS)
    factors = numbers(DEVICES * ROOM) / 7

    def total(rows):
        return (exchange(False)(rows, sizes) * factors).sum()

    found = jax.grad(total)(jnp.asarray(rows))
    # Of a linear function: what each row alone would give.
    each = exchange(True)(factors, sizes)
    np.testing.assert_allclose(found, each, rtol=1e-6)
    np.testing.assert_allclose((found * rows).sum(), total(rows), rtol=1e-6)
