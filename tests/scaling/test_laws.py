"""The sigmoid, by hand."""

import numpy as np
import pytest

from scalerl_jax.scaling import sigmoid


@pytest.mark.parametrize(
    "x, exponent, share",
    [
        pytest.param(0.0, 2.0, 0.0, id="nothing at zero compute"),
        pytest.param(100.0, 2.0, 1 / 2, id="half of the gain at the midpoint"),
        pytest.param(300.0, 2.0, 9 / 10, id="3 C_mid, B = 2: 1 / (1 + 1/9)"),
        pytest.param(50.0, 1.0, 1 / 3, id="C_mid / 2, B = 1: 1 / (1 + 2)"),
        pytest.param(1e12, 16.0, 1.0, id="all of it in the end, without overflow"),
    ],
)
def test_the_share_of_the_gain_by_hand(x, exponent, share):
    rate = sigmoid(
        x, initial_reward=0.2, asymptote=0.7, exponent=exponent, midpoint=100.0
    )
    assert rate == pytest.approx(0.2 + 0.5 * share, abs=1e-14)


def test_the_linearised_form_is_a_straight_line():
    # F(R) = C_mid^B / ((A - R0) / (R - R0) - 1) = C^B, the paper's figure.
    x = np.array([10.0, 70.0, 400.0])
    rate = sigmoid(x, initial_reward=0.1, asymptote=0.6, exponent=1.7, midpoint=90.0)
    linearised = 90.0**1.7 / (0.5 / (rate - 0.1) - 1)
    np.testing.assert_allclose(linearised, x**1.7)


def test_negative_compute_is_refused():
    with pytest.raises(ValueError, match="below its limit 0"):
        sigmoid([-1.0], initial_reward=0.1, asymptote=0.6, exponent=1.0, midpoint=9.0)
