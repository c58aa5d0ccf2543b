"""Curves that do not climb are said to be flat, at the stated rate."""

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from scalerl_jax.scaling import CurveError, compare, fit, plan
from scalerl_jax.scaling.identifiability import (
    FALSE_CLIMBS,
    climb_p_value,
    level_chances,
)

X = np.linspace(0.0, 9.0, 19)


def test_the_chances_of_levels_by_hand():
    # Of the 24 orders of 4 values 6 have one level, 11 two, 6 three, 1 four: the
    # cycles of a permutation.  Two values above a known start: 3, 4, 1 of 8 signs.
    np.testing.assert_allclose(level_chances(3, 1.0), np.array([6, 11, 6, 1]) / 24)
    np.testing.assert_allclose(level_chances(2, 2.0), np.array([3, 4, 1]) / 8)


@pytest.mark.parametrize("start", [None, 0.3])
@pytest.mark.parametrize("count", [5, 12, 30])
def test_constant_curves_climb_by_chance_at_the_stated_rate(count, start):
    generator = np.random.default_rng(count)
    curves = 0.3 + generator.normal(0, 0.1, (1500, count))
    chances = [climb_p_value(y, np.ones(count), start) for y in curves]
    for level in (FALSE_CLIMBS, 0.2, 0.5):
        error = np.sqrt(level * (1 - level) / 1500)
        assert abs(np.mean(np.array(chances) <= level) - level) < 4 * error


def test_the_p_value_is_the_share_of_constant_curves_that_climb_as_much():
    generator = np.random.default_rng(1)
    y = np.array([0.2, 0.35, 0.25, 0.3, 0.4, 0.33])

    def explained(y):
        climb = isotonic_regression(y).x - y.mean()
        return (climb**2).sum() / ((y - y.mean()) ** 2).sum()

    drawn = [explained(z) for z in generator.normal(size=(4000, 6))]
    expected = np.mean(np.array(drawn) >= explained(y))
    assert climb_p_value(y, np.ones(6)) == pytest.approx(expected, abs=0.02)


def noisy(seed, gain, sigma=0.05):
    noise = np.random.default_rng(seed).normal(0, sigma, X.size)
    return 0.3 + gain * X**2 / (X**2 + 4.0) + noise


def test_no_pair_with_a_flat_curve_is_decided():
    flat, climbing = fit(X, noisy(0, 0.0)), fit(X, noisy(1, 0.4))
    assert flat.flat and not flat.climbs and not flat.identified
    assert flat.reason.startswith("flat: the curve does not climb by more than")
    assert not climbing.flat and climbing.climb_p_value < 1e-4
    for pair in ((flat, climbing), (climbing, flat), (flat, fit(X, noisy(2, 0.0)))):
        found = compare(pair[:1] * 2, pair[1:] * 2)
        assert found.paper_rule.winner is None and found.winner is None
        assert "does not climb" in found.reason and "not decided" in found.reason
    with pytest.raises(CurveError, match="nothing to plan from: flat"):
        plan(flat)


def test_a_first_evaluation_below_all_others_is_a_climb():
    y = noisy(3, 0.0, sigma=0.02)
    y[0] = 0.1
    assert not fit(X, y).flat
    assert fit(X[1:], y[1:]).flat
    assert fit(X[1:], y[1:], initial_reward=0.1).climbs


def test_a_start_above_all_rates_is_named():
    found = fit(X, noisy(1, 0.4), initial_reward=0.95)
    assert found.flat and not found.climbs
    assert found.reason.startswith("flat: it does not climb from R0 = 0.95, which is ")


def test_a_curve_that_declines_is_flat_whatever_the_law():
    y = 0.5 - 0.01 * X + np.random.default_rng(4).normal(0, 0.02, X.size)
    for law in ("sigmoid", "power", "exponential", "logistic"):
        result = fit(X, y, law=law)
        assert result.flat and result.asymptote >= result.predict(X[-1]) - 1e-6


def test_a_flat_curve_is_foretold_to_stay_at_its_last_value():
    y = 0.3 + 0.03 * np.tile([1.0, -1.0], 10)[:19]
    result = fit(X, y)
    assert result.flat
    # The last three are 0.33, 0.27, 0.33.
    np.testing.assert_allclose(result.forecast([10.0, 99.0]), 0.31)
    # Up to half of the compute, x <= 4.5, the last three are 0.27, 0.33, 0.27.
    assert result.half_forecast.predicted == pytest.approx(0.29)
