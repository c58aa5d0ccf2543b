"""Blockwise attention against a dense float64 softmax, and that against torch."""

import functools
import re

import dense_attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mesh import mesh_of

from scalerl_jax.model.attention import BlockwiseAttention

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 4, 24, 4, 2, 8
SHAPES = dict(rows=ROWS, length=LENGTH, heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
# Scores and gradients are of size 1 to 10, and sums of at most 24 * 8 products.
CLOSE = dict(rtol=1e-5, atol=1e-5)


@functools.cache
def compiled(attention, cap=0.0):
    """What is found, and gradients by q, k and v of its product with a cotangent."""

    def run(q, k, v, segment_ids, cotangent, window=None, sinks=None):
        def attend(q, k, v, *sinks):
            more = dict(zip(["sinks"], sinks, strict=False))
            return attention(q, k, v, segment_ids, window=window, cap=cap, **more)

        sinks = () if sinks is None else (sinks,)
        found, back = jax.vjp(attend, q, k, v, *sinks)
        return found, back(cotangent)

    return jax.jit(run)


def assert_as_dense(attention, segment_ids, *, seed=0, shapes=SHAPES, cap=0.0, **more):
    q, k, v, cotangent = dense_attention.random_inputs(
        np.random.default_rng(seed), **shapes
    )
    arguments = (q, k, v, segment_ids, cotangent)
    found, gradients = compiled(attention, cap)(*arguments, **more)
    expected, expected_gradients = dense_attention.attend(*arguments, cap=cap, **more)
    np.testing.assert_allclose(found, expected, **CLOSE)
    names = "qkvs"[: len(gradients)]
    for ours, theirs, name in zip(gradients, expected_gradients, names, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE, err_msg=name)


def segments(seed, rows=ROWS, length=LENGTH):
    return dense_attention.rows_of_segments(np.random.default_rng(seed), rows, length)


# Of 24 tokens: 1, 2, 3, 4 (for 5), 8 and all at a time; more than four are a loop.
@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 3, 5, 8, 12, 512]), st.integers(0, 2**32 - 1))
def test_any_block_and_any_segments_give_values_and_gradients_of_the_dense(block, seed):
    assert_as_dense(BlockwiseAttention(block=block), segments(seed), seed=seed)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (6, 1)])
@pytest.mark.parametrize("length", [7, 24])  # 7 divides into blocks of 1 alone
def test_any_grouping_of_heads_gives_those_of_the_dense(heads, kv_heads, length):
    shapes = SHAPES | dict(heads=heads, kv_heads=kv_heads, length=length)
    attention = BlockwiseAttention(block=6)
    assert_as_dense(attention, segments(1, length=length), shapes=shapes)


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 1), (1, 1, 4, 2), (1, 2, 2, 2), (2, 2, 2, 1), (4, 1, 1, 2)],
    ids=str,
)
def test_any_mesh_gives_values_and_gradients_of_the_dense(shape, block):
    attention = BlockwiseAttention(mesh_of(shape), block=block)
    for seed in range(3):
        assert_as_dense(attention, segments(seed), seed=seed)


@pytest.mark.parametrize("shape", [None, (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("block", [2, 512])
def test_windows_sinks_and_caps_give_values_and_gradients_of_the_dense(shape, block):
    attention = BlockwiseAttention(shape and mesh_of(shape), block=block)
    sinks = np.array([-1.0, 2.0, 0.0, 0.5], np.float32)
    for seed, window in enumerate((1, 5, 7)):
        more = dict(seed=seed, window=window, sinks=sinks, cap=seed * 0.7)
        assert_as_dense(attention, segments(seed), **more)


def test_the_dense_one_is_that_of_torch():
    torch = pytest.importorskip("torch")
    segment_ids = segments(2)
    arguments = dense_attention.random_inputs(np.random.default_rng(2), **SHAPES)
    q, k, v, cotangent = (
        torch.tensor(x, dtype=torch.float64).transpose(1, 2) for x in arguments
    )
    variables = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = torch.tensor(dense_attention.seen(segment_ids))[:, None]
    found = torch.nn.functional.scaled_dot_product_attention(
        *variables, attn_mask=mask, enable_gqa=True
    )
    (found * cotangent).sum().backward()
    ours, gradients = dense_attention.attend(*arguments[:3], segment_ids, arguments[3])
    expected = [found.detach(), *(each.grad for each in variables)]
    for mine, theirs in zip((ours, *gradients), expected, strict=True):
        np.testing.assert_allclose(mine, theirs.transpose(1, 2), rtol=1e-9, atol=1e-9)


def test_two_tokens_by_hand():
    # Scores of the second token: 0 and log(3) * sqrt(dim) / sqrt(dim).
    q = jnp.array([[[[0.0]], [[1.0]]]])
    k = jnp.array([[[[0.0]], [[np.log(3.0)]]]])
    v = jnp.array([[[[4.0]], [[8.0]]]])
    attention = BlockwiseAttention()
    together = attention(q, k, v, jnp.array([[1, 1]]))
    np.testing.assert_allclose(np.ravel(together), [4.0, 7.0], rtol=1e-6)
    apart = attention(q, k, v, jnp.array([[1, 2]]))
    np.testing.assert_allclose(np.ravel(apart), [4.0, 8.0], rtol=1e-6)


@pytest.mark.parametrize("shape", [None, (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("block", [4, 512])
def test_bfloat16_is_the_dense_one_to_bfloat16_rounding(shape, block):
    attention = BlockwiseAttention(shape and mesh_of(shape), block=block)
    segment_ids = segments(5)
    q, k, v, cotangent = (
        jnp.asarray(x, jnp.bfloat16)
        for x in dense_attention.random_inputs(np.random.default_rng(5), **SHAPES)
    )
    arguments = (q, k, v, segment_ids, cotangent)
    found, gradients = compiled(attention)(*arguments)
    expected, expected_gradients = dense_attention.attend(*arguments)
    for ours, theirs in zip(
        (found, *gradients), (expected, *expected_gradients), strict=True
    ):
        assert ours.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        # Results, and the shares within, are rounded by 2^-8 each.
        assert error < 0.01 * np.linalg.norm(theirs)


def test_blocks_before_the_oldest_segment_of_every_row_are_not_read():
    # Blocks of 4.  From token 12 on every row is in a segment that begins at 8 or
    # later; what a product with a NaN of an earlier block would touch is NaN.
    segment_ids = np.stack([np.repeat([1, 2, 0], [8, 12, 4]), np.repeat([1, 2], 12)])
    rng = np.random.default_rng(0)
    q, k, v, cotangent = dense_attention.random_inputs(rng, **SHAPES | dict(rows=2))
    v[:, :8] = np.nan
    cotangent[:, :12] = 0.0
    arguments = (q, k, v, segment_ids, cotangent)
    found, (of_q, _, _) = compiled(BlockwiseAttention(block=4))(*arguments)
    assert np.isfinite(found[:, 12:]).all() and np.isfinite(of_q[:, 12:]).all()
    assert np.isnan(found[:, :8]).all()


@functools.cache
def compiled_for(length):
    """Value and gradient of a row of this length, compiled and never run."""

    def loss(q, k, v, segment_ids):
        return BlockwiseAttention()(q, k, v, segment_ids).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(x, x, x, ids)


def test_memory_grows_with_the_length_and_not_with_its_square():
    short, long = (compiled_for(n * 1024).compile() for n in (8, 32))
    bytes_of = [each.memory_analysis().temp_size_in_bytes for each in (short, long)]
    assert bytes_of[1] < 4.2 * bytes_of[0]
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", long.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    # A block of 512 queries and keys is 2^18, the row of a head 2^22, all pairs 2^30.
    assert largest == 32 * 1024 * 128
