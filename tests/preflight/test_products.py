"""Products of compiled programs: FLOPs beyond those asked for, sums rounded halfway."""

import jax
import jax.numpy as jnp
import pytest

from scalerl_jax.preflight.hlo import Instruction, parse
from scalerl_jax.preflight.products import excesses, narrow_loops, product_flops

EXPERTS, ROWS, WIDTH, HIDDEN = 4, 32, 16, 24


def lower(function, *shapes, dtype=jnp.float32):
    return jax.jit(function).lower(
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    )


def asked(lowered):
    return parse(lowered.as_text(dialect="hlo", debug_info=True))


def test_a_grouped_product_that_is_computed_densely_is_named():
    """On CPUs every row meets the matrix of every expert."""

    def layer(rows, experts):
        sizes = jnp.full(EXPERTS, ROWS // EXPERTS)
        return jax.lax.ragged_dot(rows, experts, sizes)

    shapes = (ROWS, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grouped = jax.jit(layer).trace(*arrays).lower(lowering_platforms=("tpu",))
    dense = parse(lower(layer, *shapes).compile().as_text())
    (found,) = excesses(dense, asked(grouped), num_devices=1)
    assert "test_products.py:" in found.place
    assert found.asked == 2 * ROWS * WIDTH * HIDDEN
    assert found.ratio == EXPERTS


def test_products_that_cost_what_they_should_are_not_named():
    def layers(x, weights):
        def layer(x, weight):
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(layer, x, weights)[0]

    lowered = lower(layers, (ROWS, WIDTH), (3, WIDTH, WIDTH))
    program = asked(lowered)
    assert not excesses(parse(lowered.compile().as_text()), program, num_devices=1)
    # Twice the work of half of it: as if one of two devices did all.
    (found,) = excesses(parse(lowered.compile().as_text()), program, num_devices=2)
    assert found.asked == 3 * 2 * ROWS * WIDTH * WIDTH / 2
    assert found.ratio == 2


def product(op, shapes, attributes):
    out, *operands = shapes
    inside = {
        name: Instruction(name, f"f32[{shape}]", "parameter", "")
        for name, shape in zip("ab", operands, strict=True)
    }
    return product_flops(
        Instruction("p", f"f32[{out}]", op, f"%a, %b), {attributes}"), inside
    )


@pytest.mark.parametrize(
    "op, shapes, attributes, flops",
    [
        pytest.param(
            "dot",
            ("5,7", "5,3", "3,7"),
            "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 5 * 3 * 7,
            id="matmul",
        ),
        pytest.param(
            "dot",
            ("2,5,7", "2,5,3", "2,3,7"),
            "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
            "rhs_contracting_dims={1}",
            2 * 2 * 5 * 3 * 7,
            id="batch",
        ),
        pytest.param(
            "ragged-dot",
            ("5,7", "5,3", "4,3,7"),
            "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
            2 * 5 * 3 * 7,
            id="a row meets the matrix of its group",
        ),
        pytest.param(
            "convolution",
            ("5,7", "5,3", "3,7"),
            "dim_labels=bf_io->bf",
            2 * 5 * 3 * 7,
            id="matmul as a convolution",
        ),
        # Five places, three taps; the first and the last place lack one each.
        pytest.param(
            "convolution",
            ("1,5,1", "1,5,1", "3,1,1"),
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * (3 * 5 - 2),
            id="padding costs nothing",
        ),
        # Inputs at 0, 2 and 4 of five places, a window of one: two places are holes.
        pytest.param(
            "convolution",
            ("1,5,1", "1,3,1", "1,1,1"),
            "window={size=1 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
            2 * 3,
            id="holes cost nothing",
        ),
    ],
)
def test_flops_by_hand(op, shapes, attributes, flops):
    assert product(op, shapes, attributes) == flops


def summed(dtype):
    """A contraction in four pieces, whose sum is kept in a type."""

    def pieces(x, weights):
        def add(number, total):
            piece = jax.lax.dynamic_index_in_dim(weights, number, keepdims=False)
            product = jnp.dot(x, piece, preferred_element_type=jnp.float32)
            return total + product.astype(dtype)

        return jax.lax.fori_loop(0, 4, add, jnp.zeros((ROWS, HIDDEN), dtype))

    shapes = (ROWS, WIDTH), (4, WIDTH, HIDDEN)
    return asked(lower(pieces, *shapes, dtype=jnp.bfloat16))


def test_a_sum_of_products_that_is_kept_narrow_is_named():
    (place,) = narrow_loops(summed(jnp.bfloat16))
    assert "test_products.py:" in place
    assert not narrow_loops(summed(jnp.float32))


def test_a_residual_stream_is_no_such_sum():
    def layers(x, weights):
        def layer(x, weight):
            return x + jnp.tanh(x @ weight), None

        return jax.lax.scan(layer, x, weights)[0]

    shapes = (ROWS, WIDTH), (3, WIDTH, WIDTH)
    assert not narrow_loops(asked(lower(layers, *shapes, dtype=jnp.bfloat16)))
