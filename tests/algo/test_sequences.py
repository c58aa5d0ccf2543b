"""Sums and means over packed sequences, by hand and against a slow loop."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small_tokens import floats

from scalerl_jax.algo.losses import sequence_mean, sequence_sum
from scalerl_jax.algo.values import ends

IDS = jnp.array([[1, 1, 1, 0, 2, 2], [1, 2, 2, 3, 0, 0]])
MASK = jnp.array([[1, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]], bool)
VALUES = jnp.array([[1.0, 50.0, 3.0, 70.0, 5.0, 8.0], [9.0, 2.0, 4.0, 1.0, 6.0, 7.0]])


@pytest.mark.parametrize(
    "function, expected",
    [
        pytest.param(
            sequence_sum,
            [[4.0, 4.0, 4.0, 0.0, 13.0, 13.0], [0.0, 6.0, 6.0, 0.0, 0.0, 0.0]],
            id="sum",
        ),
        pytest.param(
            sequence_mean,
            [[2.0, 2.0, 2.0, 0.0, 6.5, 6.5], [0.0, 3.0, 3.0, 0.0, 0.0, 0.0]],
            id="mean",
        ),
    ],
)
def test_every_token_gets_what_its_sequence_has_in_all(function, expected):
    assert function(VALUES, IDS, MASK).tolist() == expected


def test_the_end_of_a_sequence_is_its_last_token_under_the_mask():
    expected = [[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert ends(IDS, MASK).astype(int).tolist() == expected


@settings(deadline=None, max_examples=40)
@given(
    floats((2, 7), -9, 9),
    hnp.arrays(np.int32, (2, 7), elements=st.integers(0, 7)),
    hnp.arrays(np.bool_, (2, 7)),
)
def test_sums_and_ends_are_those_of_a_loop(values, ids, mask):
    total, last = np.zeros((2, 7)), np.zeros((2, 7), bool)
    for row in range(2):
        for place in range(7):
            same = [
                other
                for other in range(7)
                if ids[row, other] == ids[row, place] > 0 and mask[row, other]
            ]
            total[row, place] = sum(values[row, other] for other in same)
            last[row, place] = bool(same) and place == same[-1]
    found = sequence_sum(jnp.asarray(values), jnp.asarray(ids), jnp.asarray(mask))
    np.testing.assert_allclose(found, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ends(jnp.asarray(ids), jnp.asarray(mask)), last)
