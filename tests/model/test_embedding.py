"""Embedding over meshes: table[tokens], and its gradient as a scatter in NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.embedding import embed
from scalerl_jax.parallel.mesh import AXES, make_mesh

VOCABULARY, WIDTH, ROWS, LENGTH = 24, 16, 8, 6
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
TOKENS = RNG.integers(0, VOCABULARY // 2, (ROWS, LENGTH))  # half are never seen
COTANGENT = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
MESHES = [
    None,
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (1, 1, 1, 8),
    (1, 1, 2, 4),
    (2, 2, 1, 2),
    (1, 2, 2, 2),
]
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=str)


def run(shape, table, *, dtype, cotangent=COTANGENT):
    """Rows found, and the gradient of the table."""
    mesh = None
    if shape:
        devices = jax.devices()[: int(np.prod(shape))]
        mesh = make_mesh(devices, **dict(zip(AXES, shape, strict=True)))

    @jax.jit
    def forward_and_back(table, cotangent):
        found, back = jax.vjp(
            lambda table: embed(table, TOKENS, mesh=mesh, dtype=dtype), table
        )
        return found, back(cotangent)[0]

    return forward_and_back(table, jnp.asarray(cotangent, dtype))


def scattered(cotangent):
    gradient = np.zeros((VOCABULARY, WIDTH))
    np.add.at(gradient, TOKENS, np.asarray(cotangent, np.float64))
    return gradient


@every_mesh
def test_rows_are_those_of_the_table_and_gradients_are_summed(shape):
    found, gradient = run(shape, TABLE, dtype=jnp.float32)
    np.testing.assert_array_equal(found, TABLE[TOKENS])
    np.testing.assert_allclose(gradient, scattered(COTANGENT), rtol=1e-5, atol=1e-6)
    assert not np.any(gradient[VOCABULARY // 2 :])


@every_mesh
def test_bfloat16_rows_of_a_float32_table_are_summed_in_float32(shape):
    found, gradient = run(shape, TABLE, dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.asarray(TABLE, jnp.bfloat16)[TOKENS])
    assert gradient.dtype == jnp.float32
    summed = scattered(jnp.asarray(COTANGENT, jnp.bfloat16))
    np.testing.assert_allclose(gradient, summed, rtol=1e-5, atol=1e-6)


def test_the_table_never_travels():
    """What devices exchange has no axis of the vocabulary."""
    mesh = make_mesh(jax.devices(), data=2, fsdp=2, tensor=2)
    sharding = jax.NamedSharding(mesh, jax.P("tensor", "fsdp"))
    table = jax.ShapeDtypeStruct((50_000, 64), jnp.float32, sharding=sharding)
    lookup = jax.jit(lambda table: embed(table, TOKENS, mesh=mesh, dtype=jnp.float32))
    program = lookup.lower(table).compile().as_text()
    exchanged = re.findall(r"= (.+) (?:all-gather|all-reduce|all-to-all)\(", program)
    assert len(exchanged) >= 3
    assert not [shapes for shapes in exchanged if "000," in shapes]
