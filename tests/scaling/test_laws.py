"""The laws, by hand, and their slopes, by differences."""

import numpy as np
import pytest

from scalerl_jax.scaling import LAWS, sigmoid
from scalerl_jax.scaling.laws import PLATEAULESS


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


def test_negative_compute_is_refused():
    with pytest.raises(ValueError, match="below its limit 0"):
        sigmoid([-1.0], initial_reward=0.1, asymptote=0.6, exponent=1.0, midpoint=9.0)


X_LAST = 800.0
X = np.array([3.0, 40.0, 250.0, 800.0, 3000.0])
WRITTEN_OUT = {
    "sigmoid": lambda p: (
        p["R0"] + (p["A"] - p["R0"]) / (1 + (p["C_mid"] / X) ** p["B"])
    ),
    "power": lambda p: p["A"] - p["D"] / X ** p["B"],
    "logistic": lambda p: (
        p["R0"] + (p["A"] - p["R0"]) / (1 + np.exp(-p["k"] * (X - p["x_mid"])))
    ),
    "exponential": lambda p: p["R0"] + (p["A"] - p["R0"]) * (1 - np.exp(-X / p["tau"])),
    "error_power": lambda p: 1 - 10 ** (p["E"] - p["k"] * np.log10(X)),
}


@pytest.mark.parametrize("name", LAWS)
def test_public_parameters_give_the_curve_that_the_formula_says(name):
    law = LAWS[name]
    theta = np.array([[0.3, law.held_asymptote or 0.7, -0.4, 0.2]])
    values = law.values(theta, np.log(X_LAST))[0]
    named = dict(zip([kind.name for kind in law.kinds], values, strict=True))
    share = law.share(np.log(X / X_LAST), -0.4, 0.2)
    searched = 0.3 + (theta[0, 1] - 0.3) * share
    np.testing.assert_allclose(searched, WRITTEN_OUT[name](named), rtol=1e-12)


@pytest.mark.parametrize("law", [*LAWS.values(), PLATEAULESS], ids=lambda law: law.name)
def test_slopes_are_the_differences_of_the_share(law):
    t, h = np.log(X / X_LAST), 1e-6
    by_u, by_v = law.slopes(t, -0.4, 0.2)
    numeric_u = (law.share(t, -0.4 + h, 0.2) - law.share(t, -0.4 - h, 0.2)) / (2 * h)
    numeric_v = (law.share(t, -0.4, 0.2 + h) - law.share(t, -0.4, 0.2 - h)) / (2 * h)
    np.testing.assert_allclose(by_u, numeric_u, atol=1e-8)
    np.testing.assert_allclose(by_v, numeric_v, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in LAWS if LAWS[name].half_gain])
def test_half_of_the_gain_is_where_the_share_is_one_half(name):
    law = LAWS[name]
    half = law.half_gain(0.3, 0.4)
    assert law.share(np.log(half), 0.3, 0.4) == pytest.approx(0.5)


def test_the_law_without_a_plateau_by_hand():
    # k = 2, c = x_last: a quarter of the error is left at x_last, a ninth at 2 x_last.
    share = PLATEAULESS.share(np.log([1.0, 2.0]), np.log(2.0), 0.0)
    np.testing.assert_allclose(share, [3 / 4, 8 / 9], rtol=1e-14)
