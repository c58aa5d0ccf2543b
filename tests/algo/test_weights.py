"""Weights of tokens by hand, and as properties of all weightings."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo.advantages import (
    constant_weights,
    prompt_weights,
    sample_weights,
    token_weights,
)

GROUPS, GROUP_SIZE, TOKENS = 3, 2, 5
MASKS = hnp.arrays(np.bool_, (GROUPS * GROUP_SIZE, TOKENS))
WEIGHTINGS = {
    "prompt": functools.partial(prompt_weights, group_size=GROUP_SIZE),
    "sample": sample_weights,
    "token": token_weights,
    "constant": functools.partial(constant_weights, max_tokens=TOKENS),
}
every_weighting = pytest.mark.parametrize("name", WEIGHTINGS)


def weigh(name, mask):
    return WEIGHTINGS[name](jnp.asarray(mask))


@pytest.mark.parametrize(
    "name, expected",
    [
        pytest.param(
            # Group 1 has 4 tokens, group 2 has 1, group 3 none: 1/2 each.
            "prompt",
            [[1, 1, 1], [0, 1, 0], [0, 0, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]],
            id="prompt: eighths",
        ),
        pytest.param(
            # Three rollouts have tokens: 3, 1 and 1.
            "sample",
            [
                [8 / 9, 8 / 9, 8 / 9],
                [0, 8 / 3, 0],
                [0, 0, 0],
                [8 / 3, 0, 0],
                [0, 0, 0],
                [0, 0, 0],
            ],
            id="sample: a third for each rollout",
        ),
        pytest.param(
            "token",
            [
                [8 / 5, 8 / 5, 8 / 5],
                [0, 8 / 5, 0],
                [0, 0, 0],
                [8 / 5, 0, 0],
                [0, 0, 0],
                [0, 0, 0],
            ],
            id="token: a fifth for each of 5",
        ),
        pytest.param(
            # 6 rollouts of at most 5 tokens.
            "constant",
            [
                [8 / 30, 8 / 30, 8 / 30],
                [0, 8 / 30, 0],
                [0, 0, 0],
                [8 / 30, 0, 0],
                [0, 0, 0],
                [0, 0, 0],
            ],
            id="constant: a thirtieth for each there could be",
        ),
    ],
)
def test_weights_by_hand(name, expected):
    mask = jnp.array(
        [[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]], bool
    )
    found = weigh(name, mask)
    np.testing.assert_allclose(8.0 * found, expected, rtol=1e-6)


@every_weighting
@settings(deadline=None, max_examples=40)
@given(mask=MASKS)
def test_weights_sum_to_what_they_say_and_stay_on_the_mask(name, mask):
    assume(mask.any())
    found = np.asarray(weigh(name, mask))
    expected = mask.mean() if name == "constant" else 1.0
    np.testing.assert_allclose(found.sum(dtype=np.float64), expected, rtol=1e-6)
    assert (found[mask] > 0).all()
    np.testing.assert_array_equal(found[~mask], 0.0)


@every_weighting
def test_without_a_token_there_is_no_weight_and_no_nan(name):
    mask = jnp.zeros((GROUPS * GROUP_SIZE, TOKENS), bool)
    np.testing.assert_array_equal(weigh(name, mask), 0.0)


@every_weighting
@settings(deadline=None, max_examples=40)
@given(mask=MASKS)
def test_padding_changes_no_weight(name, mask):
    padded = np.pad(mask, ((0, 0), (0, 4)))
    found = weigh(name, padded)
    np.testing.assert_array_equal(found[:, :TOKENS], weigh(name, mask))
    np.testing.assert_array_equal(found[:, TOKENS:], 0.0)


@every_weighting
@settings(deadline=None, max_examples=40)
@given(mask=MASKS, group=st.integers(0, GROUPS - 1))
def test_the_order_within_a_group_does_not_matter(name, mask, group):
    order = np.arange(GROUPS * GROUP_SIZE)
    first = group * GROUP_SIZE
    order[first : first + GROUP_SIZE] = order[first : first + GROUP_SIZE][::-1]
    found = weigh(name, mask[order])
    np.testing.assert_allclose(found, weigh(name, mask)[order], rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(MASKS)
def test_every_prompt_with_a_token_has_an_equal_part(mask):
    assume(mask.any())
    found = np.asarray(weigh("prompt", mask))
    parts = found.reshape(GROUPS, -1).sum(axis=1)
    trained = mask.reshape(GROUPS, -1).any(axis=1)
    np.testing.assert_allclose(parts, trained / trained.sum(), rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(MASKS)
def test_a_prompt_whose_completions_double_together_counts_the_same(mask):
    losses = np.linspace(-1.0, 2.0, mask.size, dtype=np.float32).reshape(mask.shape)
    doubled = np.pad(mask, ((0, 0), (0, TOKENS)))
    doubled[:GROUP_SIZE, TOKENS:] = mask[:GROUP_SIZE]
    before = weigh("prompt", mask) * losses
    after = weigh("prompt", doubled) * np.concatenate([losses, losses], axis=1)
    np.testing.assert_allclose(after.sum(), before.sum(), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(MASKS)
def test_constant_weights_do_not_depend_on_the_rest_of_the_batch(mask):
    changed = np.concatenate([mask[:1], ~mask[1:]])
    found = weigh("constant", mask)[0]
    np.testing.assert_array_equal(found, weigh("constant", changed)[0])
