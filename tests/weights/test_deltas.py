"""Differences of arrays: what is applied is what was compared, to the last bit."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalerl_jax.weights import deltas
from scalerl_jax.weights.deltas import DamagedDeltaError, apply, delta
from scalerl_jax.weights.shards import checksum

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def bits(array):
    return array.reshape(-1).view(UNSIGNED[array.itemsize])


def arrays(seed, dtype, size, share, kind):
    """A base, and one that differs from it in a share of the values."""
    rng = np.random.default_rng(seed)
    unsigned = UNSIGNED[np.dtype(dtype).itemsize]
    most = int(np.iinfo(unsigned).max)
    base = rng.integers(0, most, size, unsigned, endpoint=True)  # NaNs among them
    changed = rng.random(size) < share
    new = base.copy()
    if kind == "units in the last place":
        new[changed] += rng.choice(np.array([1, most], unsigned), changed.sum())
    else:
        new[changed] = rng.integers(0, most, changed.sum(), unsigned, endpoint=True)
    return base.view(dtype), new.view(dtype)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(sorted(DTYPES)),
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["units in the last place", "anything"]),
    block=st.sampled_from([7, 256, 1 << 20]),
)
@example(0, "bfloat16", 0, 1.0, "anything", 7)
@example(0, "float32", 1, 1.0, "anything", 7)
def test_a_delta_gives_back_what_it_was_made_of(seed, dtype, size, share, kind, block):
    base, new = arrays(seed, DTYPES[dtype], size, share, kind)
    before = base.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "_BLOCK", block)
        found = delta(base, new)
        assert found.changed == np.count_nonzero(bits(base) != bits(new))
        if found.coded is not None:
            assert found.coded.nbytes < new.nbytes
            result = apply(base, found.coded)
            assert result.dtype == new.dtype
            np.testing.assert_array_equal(bits(result), bits(new))
    np.testing.assert_array_equal(bits(base), bits(before))


def test_nan_payloads_and_the_sign_of_zero_are_bits_like_any_other():
    base = np.zeros(4000, np.uint32)
    base[:6] = [0x7FC00001, 0x7FC00002, 0xFFC00000, 0x80000000, 0, 0x7F800000]
    new = base.copy()
    new[:6] = [0x7FC00003, 0x7FC00002, 0x7FC00000, 0, 0x80000000, 0xFF800000]
    found = delta(base.view(np.float32), new.view(np.float32))
    assert found.changed == 5
    result = apply(base.view(np.float32), found.coded)
    np.testing.assert_array_equal(result.view(np.uint32), new)


@pytest.mark.parametrize(
    "share, most",
    # Two planes of an empty header; and of each change its gap and one byte, and a
    # header, the gap of 255 and more being rare.
    [(0.0, 18), (0.02, 2.1 * 0.02 * 100_000), (1.0, 18 + 100_000 * 1.02)],
)
def test_a_bfloat16_value_that_moved_by_a_unit_costs_two_bytes_at_most(share, most):
    rng = np.random.default_rng(0)
    base = (0.02 * rng.normal(size=100_000)).astype(ml_dtypes.bfloat16)
    new = base.copy()
    moved = rng.random(base.size) < share
    bits(new)[moved] += rng.choice(np.array([1, 2**16 - 1], np.uint16), moved.sum())
    found = delta(base, new)
    assert found.coded.nbytes <= most
    np.testing.assert_array_equal(bits(apply(base, found.coded)), bits(new))


def test_arrays_that_have_nothing_in_common_have_no_delta():
    base, new = arrays(0, np.float32, 1000, 1.0, "anything")
    assert delta(base, new).coded is None
    empty = np.zeros((0, 3), np.float32)
    assert delta(empty, empty) == deltas.Delta(changed=0, coded=None)


def test_arrays_of_any_shape_and_layout_are_compared_in_their_own_order():
    base = np.arange(2 * 300, dtype=np.float32).reshape(300, 2).T
    new = base.copy(order="C")
    new[1, 7] = -1
    found = delta(base, new)
    np.testing.assert_array_equal(apply(base, found.coded), new)
    scalar = np.array(1.5, np.float32)
    assert delta(scalar, scalar).coded is None  # its header is longer


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.003, 0.2, 0.7]))
def test_a_flipped_byte_is_refused_or_seen_in_the_checksum(seed, share):
    base, new = arrays(seed, ml_dtypes.bfloat16, 2000, share, "units in the last place")
    coded = delta(base, new).coded
    rng = np.random.default_rng(seed)
    damaged = coded.copy()
    damaged[rng.integers(coded.size)] ^= rng.integers(1, 256, dtype=np.uint8)
    try:
        result = apply(base, damaged)
    except DamagedDeltaError:
        return
    assert checksum(result) != checksum(new)


def test_a_delta_that_is_cut_or_continued_is_refused():
    base, new = arrays(1, np.float16, 500, 0.05, "units in the last place")
    coded = delta(base, new).coded
    for size in range(coded.size):
        with pytest.raises(DamagedDeltaError, match="too early"):
            apply(base, coded[:size])
    with pytest.raises(DamagedDeltaError, match="1 bytes follow"):
        apply(base, np.append(coded, np.uint8(0)))


@pytest.mark.parametrize(
    "way, where, found, words",
    [
        (9, b"", b"", "way 9"),
        (0, b"", b"\1", "way 0 with 1 changes"),
        (1, b"", b"\1", "way 1"),
        (2, b"\xff", b"\1", "way 2"),
        (2, b"\xc0\0", b"\1", "2 places of 1"),
        (3, b"\x0a", b"\1", "are in 10 bytes"),
        (3, b"\xff", b"\1", "0 places of 1"),
        (4, b"\xff", b"\1", "way 4"),
        (4, b"\xfe\xff", b"\1", "are in 10 bytes"),
    ],
)
def test_places_outside_of_the_array_are_refused(way, where, found, words):
    coded = deltas._HEADER.pack(way, len(found), len(where)) + where + found
    with pytest.raises(DamagedDeltaError, match=words):
        apply(np.zeros(10, np.uint8), np.frombuffer(coded, np.uint8))
