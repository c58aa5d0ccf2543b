"""Losses of whole sequences: by hand, and that packing changes none of them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from small_tokens import LOSSES, floats, make_tokens, values_and_slopes

NAMES = ("gspo", "gspo_token", "sequence_truncated_is")
LOG2 = math.log(2.0)


def slope(name, tokens, weights=1.0):
    return values_and_slopes(LOSSES[name], tokens, weights)[1]


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize(
    "log_ratios, advantage, ratio, kept",
    [
        pytest.param([LOG2, -LOG2, 0.0], 1.0, 1.0, True, id="they cancel"),
        pytest.param([0.3, 0.0, 0.0], 1.0, math.exp(0.1), True, id="a third of one"),
        pytest.param([LOG2, LOG2, 0.0], 1.0, 1.3, False, id="rewarded, past 1.3"),
        pytest.param([LOG2, LOG2, 0.0], -1.0, 4 ** (1 / 3), True, id="punished, risen"),
        pytest.param([-LOG2, -LOG2, 0.0], -1.0, 0.8, False, id="punished, past 0.8"),
        pytest.param([-LOG2] * 3, 1.0, 0.5, True, id="rewarded, fallen"),
    ],
)
def test_gspo_by_hand(name, log_ratios, advantage, ratio, kept):
    # The fourth token is masked: its ratio of 1000 counts for nothing.
    logprobs = np.array([-1.0, -2.0, -3.0, -1.0])
    log_ratios = np.array([*log_ratios, math.log(1000.0)])
    mask = np.array([True, True, True, False])
    tokens = make_tokens(logprobs, logprobs - log_ratios, advantage, mask=mask)
    found = np.asarray(LOSSES[name](tokens))[:3]
    np.testing.assert_allclose(found, -ratio * advantage, rtol=1e-5)
    gradient = slope(name, tokens, np.where(mask, 1 / 3, 0.0))
    expected = np.where(mask, -ratio * advantage / 3, 0.0) if kept else np.zeros(4)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "log_ratios, weight",
    [
        pytest.param([LOG2, LOG2, 0.0], 4.0, id="2 * 2 * 1"),
        pytest.param([LOG2, LOG2, LOG2], 5.0, id="8 capped to 5"),
        pytest.param([-LOG2, -LOG2, -LOG2], 0.125, id="an eighth"),
    ],
)
def test_truncated_importance_sampling_of_a_sequence_by_hand(log_ratios, weight):
    logprobs = np.array([-1.0, -2.0, -3.0])
    tokens = make_tokens(logprobs, logprobs - np.array(log_ratios), -2.0)
    found = LOSSES["sequence_truncated_is"](tokens)
    np.testing.assert_allclose(found, 2.0 * weight * logprobs, rtol=1e-5)
    gradient = slope("sequence_truncated_is", tokens)
    np.testing.assert_allclose(gradient, [2.0 * weight] * 3, rtol=1e-5)


def test_with_token_advantages_gspo_token_gives_each_token_its_own_gradient():
    tokens = make_tokens([-1.0, -2.0], advantages=np.array([1.0, -3.0]))
    np.testing.assert_allclose(slope("gspo_token", tokens), [-1.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(slope("gspo", tokens), [1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(
    logprobs=floats(6, -4, 0),
    behavior=floats(6, -4, 0),
    advantages=floats(2, -2, 2),
)
def test_two_sequences_in_one_row_are_as_in_two(name, logprobs, behavior, advantages):
    ids = np.array([1, 1, 1, 1, 2, 2])
    of_tokens = advantages[ids - 1]
    packed = make_tokens(logprobs, behavior, of_tokens, sequence_ids=ids)

    def padded(values):
        rows = np.zeros((2, 5), np.float32)
        rows[0, 1:], rows[1, :2] = values[:4], values[4:]
        return rows

    apart_ids = padded(ids).astype(int)
    apart = make_tokens(
        padded(logprobs),
        padded(behavior),
        padded(of_tokens),
        sequence_ids=apart_ids,
        mask=apart_ids > 0,
    )
    for found, rows in zip(
        values_and_slopes(LOSSES[name], packed),
        values_and_slopes(LOSSES[name], apart),
        strict=True,
    ):
        expected = jnp.concatenate([rows[0, 1:], rows[1, :2]])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
