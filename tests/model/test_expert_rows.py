"""Rows of experts: products against a loop in NumPy, and rows that devices send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.model.expert_rows import grouped_matmul, send_rows

DEVICES, ROWS, ROOM = 4, 6, 24
MESH = jax.sharding.Mesh(np.asarray(jax.devices()[:DEVICES]), ("expert",))
CUT = jax.P("expert")


def oracle(x, weights, sizes):
    """Every row times the matrix of its group, one after the other."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    rows = [row @ weights[number] for row, number in zip(x, group, strict=True)]
    return np.array(rows).reshape(len(x), weights.shape[2])


def oracle_gradients(x, weights, sizes, cotangent):
    """Gradients of (product * cotangent).sum() by x and by the weights."""
    of_x, of_weights = np.zeros_like(x), np.zeros_like(weights)
    group = np.repeat(np.arange(len(sizes)), sizes)
    for row, number in enumerate(group):
        of_x[row] = weights[number] @ cotangent[row]
        of_weights[number] += np.outer(x[row], cotangent[row])
    return of_x, of_weights


def numbers(sizes, inner, outer):
    rng, rows = np.random.default_rng(0), sum(sizes)
    return (
        rng.normal(size=(rows, inner)),
        rng.normal(size=(len(sizes), inner, outer)),
        rng.normal(size=(rows, outer)),
    )


def check(sizes, inner, outer, kernel):
    x, weights, cotangent = numbers(sizes, inner, outer)
    args = [jnp.asarray(each, jnp.float32) for each in (x, weights)]
    groups = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def run(x, weights):
        product, back = jax.vjp(
            lambda x, weights: grouped_matmul(x, weights, groups, kernel), x, weights
        )
        return product, *back(jnp.asarray(cotangent, jnp.float32))

    product, *gradients = run(*args)
    np.testing.assert_allclose(product, oracle(x, weights, sizes), atol=1e-4)
    expected = oracle_gradients(x, weights, sizes, cotangent)
    for found, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4)


CASES = [
    pytest.param([3, 0, 5, 1], id="an empty group"),
    pytest.param([0, 0, 130, 0], id="all rows in one group, more than a block"),
    pytest.param([64, 64, 128], id="whole blocks"),
    pytest.param([1], id="one row"),
    pytest.param([70, 1, 0, 63, 66], id="blocks that end anywhere"),
]


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize(
    "kernel", ["auto", "loop of large blocks", "megablox-interpreted"]
)
def test_every_kernel_is_the_plain_loop(sizes, kernel):
    check(sizes, 128 if kernel.startswith("mega") else 6, 128, kernel)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    inner=st.integers(1, 9),
    outer=st.integers(1, 9),
)
@settings(max_examples=15, deadline=None)
def test_any_sizes_are_the_plain_loop(sizes, inner, outer):
    check(sizes, inner, outer, "loop")


def test_a_weight_gradient_is_summed_in_the_weights_dtype():
    # 257 products of 1: bfloat16 knows no 257.
    x = jnp.ones((257, 1), jnp.bfloat16)

    def total(weights, kernel):
        sizes = jnp.array([257], jnp.int32)
        return grouped_matmul(x, weights, sizes, kernel).astype(jnp.float32).sum()

    for kernel in ("loop", "loop of large blocks"):
        gradient = jax.grad(total)(jnp.ones((1, 1, 1), jnp.float32), kernel)
        assert gradient.dtype == jnp.float32 and gradient.item() == 257.0


@functools.cache
def exchange(back):
    room = ROWS if back else ROOM

    def send(rows, sizes):
        return send_rows("expert", room, rows, sizes.T if back else sizes)

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


def row_numbers(rows):
    return np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 1


@settings(max_examples=40, deadline=None)
@given(sizes=tables())
def test_every_device_has_the_rows_that_are_for_it(sizes):
    rows = row_numbers(DEVICES * ROWS)
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
    rows = row_numbers(DEVICES * ROWS)
    back = exchange(True)(exchange(False)(rows, sizes), sizes)
    sent = np.arange(ROWS)[None] < sizes.sum(axis=1)[:, None]
    wanted = np.where(sent.reshape(-1)[:, None], rows, 0)
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.parametrize("crowded", [0, 3])
def test_there_is_room_for_all_rows_on_one_device(crowded):
    sizes = np.zeros((DEVICES, DEVICES), np.int32)
    sizes[:, crowded] = ROWS
    rows = row_numbers(DEVICES * ROWS)
    found = exchange(False)(rows, sizes).reshape(DEVICES, ROOM, 2)
    np.testing.assert_array_equal(found[crowded], rows)


def test_the_gradient_goes_back_the_same_way():
    sizes = np.asarray([[1, 2, 0, 3], [6, 0, 0, 0], [0, 1, 1, 1], [2, 2, 2, 0]], "i4")
    rows = row_numbers(DEVICES * ROWS)
    factors = row_numbers(DEVICES * ROOM) / 7

    def total(rows):
        return (exchange(False)(rows, sizes) * factors).sum()

    found = jax.grad(total)(jnp.asarray(rows))
    # Of a linear function: what each row alone would give.
    each = exchange(True)(factors, sizes)
    np.testing.assert_allclose(found, each, rtol=1e-6)
    np.testing.assert_allclose((found * rows).sum(), total(rows), rtol=1e-6)
