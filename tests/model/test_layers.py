"""Parts of a decoder, against the plain formulas and their own gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mesh import mesh_of

from scalerl_jax.model.layers import add_bias, embed, gated, linear, rms_norm
from scalerl_jax.model.rope import rotate, rotations

FREQUENCIES = jnp.array([1.0, 0.3, 0.1, 0.03])
POSITIONS = jnp.array([[0, 1, 2, 0, 1], [7, 8, 500, 501, 0]])


def plain_rms_norm(x, scale):
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale


def plain_gated(gate, up):
    return gate / (1.0 + jnp.exp(-gate)) * up


def plain_rotate(x):
    """As complex numbers, dimension i being the real part of i + dim / 2."""
    angles = POSITIONS[..., None, None] * FREQUENCIES
    number = (x[..., :4] + 1j * x[..., 4:]) * jnp.exp(1j * angles)
    return jnp.concatenate([number.real, number.imag], axis=-1)


def shaped(rng, *shapes):
    return [jnp.float32(rng.normal(size=shape)) for shape in shapes]


# Ours, the plain formula, and the shapes of their arguments.
CASES = {
    "linear": (linear, lambda x, w: x @ w, ((2, 5, 8), (8, 6))),
    "rms_norm": (
        lambda x, scale: rms_norm(x, scale, 1e-6),
        plain_rms_norm,
        ((2, 5, 8), (8,)),
    ),
    "add_bias": (add_bias, lambda x, bias: x + bias, ((2, 5, 8), (8,))),
    "gated": (gated, plain_gated, ((2, 5, 8), (2, 5, 8))),
    "rotate": (
        lambda x: rotate(x, rotations(POSITIONS, FREQUENCIES)),
        plain_rotate,
        ((2, 5, 3, 8),),
    ),
}


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_and_gradients_are_those_of_the_plain_formula(name, seed):
    ours, plain, shapes = CASES[name]
    arguments = shaped(np.random.default_rng(seed), *shapes)
    found, back = jax.vjp(ours, *arguments)
    expected, plain_back = jax.vjp(plain, *arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    (cotangent,) = shaped(np.random.default_rng(seed + 1), found.shape)
    for mine, theirs in zip(back(cotangent), plain_back(cotangent), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "gated"])
@pytest.mark.parametrize("size", [0.0, 1e-18, 300.0])
def test_extreme_inputs_make_no_nan(name, size):
    ours, _, shapes = CASES[name]
    arguments = [size * x for x in shaped(np.random.default_rng(0), *shapes)]
    found, back = jax.vjp(ours, *arguments)
    for leaf in (found, *back(jnp.ones_like(found))):
        assert np.isfinite(leaf).all()


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    (x, scale) = shaped(np.random.default_rng(0), (4, 4096), (4096,))
    x = jnp.asarray(x, jnp.bfloat16)
    found = rms_norm(x, scale, 1e-6)
    assert found.dtype == jnp.bfloat16
    exact = plain_rms_norm(*(np.asarray(each, np.float64) for each in (x, scale)))
    # Three values of a product are rounded by 2^-8; the 4,096 squares were not.
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert np.all(error <= 3.1 * 2.0**-8 * np.abs(exact))


def test_rotations_of_positions_far_out_are_those_of_float64():
    positions, frequencies = np.array([0, 32_767, 131_071]), np.float32([1.0, 0.01])
    cos, sin = rotations(*map(jnp.asarray, (positions, frequencies)))
    angles = positions[:, None, None] * frequencies.astype(np.float64)
    # An angle of 10^5 has 24 bits: rounded by 2^-8.
    np.testing.assert_allclose(cos, np.cos(angles), atol=5e-3)
    np.testing.assert_allclose(sin, np.sin(angles), atol=5e-3)


def bits_used(x):
    """Share of the values that bfloat16 cannot say."""
    return float(np.mean(np.asarray(x) != x.astype(jnp.bfloat16).astype(jnp.float32)))


def test_the_gradient_of_float32_weights_is_never_rounded_to_bfloat16():
    rng = np.random.default_rng(0)
    x, weights, cotangent = shaped(rng, (3, 50, 16), (16, 12), (3, 50, 12))
    x, cotangent = (jnp.asarray(each, jnp.bfloat16) for each in (x, cotangent))
    found, back = jax.vjp(linear, x, weights)
    of_x, of_weights = jax.jit(back)(cotangent)
    assert (found.dtype, of_x.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert of_weights.dtype == jnp.float32
    exact = np.einsum(
        "rsk,rsn->kn", np.asarray(x, np.float64), np.asarray(cotangent, np.float64)
    )
    # 150 exact products, summed in float32; bfloat16 would be off by 2^-9 of each.
    np.testing.assert_allclose(of_weights, exact, rtol=1e-5, atol=1e-4)
    assert bits_used(of_weights) > 0.9


def test_the_gradient_of_a_float32_vector_is_never_rounded_to_bfloat16():
    rng = np.random.default_rng(0)
    x, scale, cotangent = shaped(rng, (3, 50, 16), (16,), (3, 50, 16))
    x, cotangent = (jnp.asarray(each, jnp.bfloat16) for each in (x, cotangent))
    normed = np.asarray(rms_norm(x, jnp.ones_like(scale), 1e-6), np.float64)
    wanted = np.asarray(cotangent, np.float64)
    for function, exact in (
        (lambda scale: rms_norm(x, scale, 1e-6), (normed * wanted).sum(axis=(0, 1))),
        (lambda bias: add_bias(x, bias), wanted.sum(axis=(0, 1))),
    ):
        found, back = jax.vjp(function, scale)
        (of_vector,) = jax.jit(back)(cotangent)
        assert (found.dtype, of_vector.dtype) == (jnp.bfloat16, jnp.float32)
        # 150 exact terms; bfloat16 would be off by 2^-9 of each.
        np.testing.assert_allclose(of_vector, exact, rtol=1e-5, atol=1e-5)


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
    (1, 4, 1, 2, 2),
]
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=str)


def run(shape, table, *, dtype, cotangent=COTANGENT):
    """Rows found, and the gradient of the table."""
    mesh = None
    if shape:
        mesh = mesh_of(shape)

    @jax.jit
    def forward_and_back(table, cotangent):
        found, back = jax.vjp(
            lambda table: embed(table, jnp.asarray(TOKENS), mesh=mesh, dtype=dtype),
            table,
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
    mesh = mesh_of((2, 2, 1, 2))
    sharding = jax.NamedSharding(mesh, jax.P("tensor", "fsdp"))
    table = jax.ShapeDtypeStruct((50_000, 64), jnp.float32, sharding=sharding)
    lookup = jax.jit(
        lambda table: embed(table, jnp.asarray(TOKENS), mesh=mesh, dtype=jnp.float32)
    )
    program = lookup.lower(table).compile().as_text()
    exchanged = re.findall(r"= (.+) (?:all-gather|all-reduce|all-to-all)\(", program)
    assert len(exchanged) >= 3
    assert not [shapes for shapes in exchanged if "000," in shapes]
