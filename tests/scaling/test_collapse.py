"""The test for a collapse: its rate of false alarms, and what it must see."""

import numpy as np
import pytest

from scalerl_jax.scaling import make_curve
from scalerl_jax.scaling.identifiability import (
    find_collapse,
    largest_fall,
    point_noise,
)

# Evaluations of two real GRPO runs (1,319 problems each): one lost its answer format.
COLLAPSE = [0.640, 0.672, 0.680, 0.701, 0.375, 0.096, 0.137, 0.232, 0.331, 0.438]
CLIMB = [0.041, 0.243, 0.465, 0.507, 0.594, 0.601, 0.608, 0.626, 0.638]


def fall(y, errors=None):
    y = np.asarray(y, float)
    return find_collapse(make_curve(np.arange(1.0, y.size + 1), y, y_se=errors))


@pytest.mark.parametrize("errors_known", [False, True])
def test_a_real_collapse_is_called_and_a_real_climb_is_not(errors_known):
    for rates, called in ((COLLAPSE, True), (CLIMB, False)):
        y = np.array(rates)
        errors = np.sqrt(y * (1 - y) / 1319) if errors_known else None
        reason = fall(y, errors)
        assert (reason is not None) == called
        if reason:
            assert "falls from 0.701 near x = 4 to 0.096 near x = 6" in reason


def sigmoids(num_points, sigma, count):
    """Curves that never fall but for the noise."""
    generator = np.random.default_rng(num_points)
    x = np.arange(1.0, num_points + 1)
    for _ in range(count):
        a, b = generator.uniform(0.35, 0.95), generator.uniform(1.0, 2.5)
        c = num_points * np.exp(generator.uniform(-4.0, 0.7))
        y = 0.25 + (a - 0.25) / (1 + (c / x) ** b)
        yield np.clip(y + generator.normal(0, sigma, num_points), 0, 1)


@pytest.mark.parametrize("errors_known", [False, True])
def test_noise_is_called_a_collapse_in_one_of_a_hundred_curves_at_most(errors_known):
    called = [
        fall(y, np.full(n, sigma) if errors_known else None) is not None
        for n in (5, 8, 12, 20, 50)
        for sigma in (0.006, 0.02, 0.05)
        for y in sigmoids(n, sigma, 100)
    ]
    assert sum(called) <= 23  # of 1,500; at a rate of 1 %, 24 would be 1 in 50


def test_a_dip_within_the_noise_is_none():
    assert fall([0.40, 0.46, 0.50, 0.52, 0.49]) is None
    assert fall([0.40, 0.46, 0.50, 0.50, 0.49, 0.48], np.full(6, 0.02)) is None


def test_one_bad_evaluation_is_none_and_two_are():
    climb = [0.30, 0.42, 0.50, 0.55, 0.58, 0.60, 0.61, 0.62]
    assert fall([*climb[:6], 0.1, *climb[6:]]) is None
    assert fall([*climb, 0.1]) is None
    assert fall([*climb, 0.1, 0.12]) is not None


def test_few_points_suffice_for_a_fall_that_no_noise_explains():
    assert fall([0.5, 0.6, 0.7, 0.1, 0.1]) is not None
    assert fall([0.5, 0.6, 0.7]) is None


def test_a_slow_decline_adds_up():
    y = np.r_[np.linspace(0.3, 0.6, 20), np.linspace(0.6, 0.45, 30)]
    noise = np.random.default_rng(0).normal(0, 0.02, 50)
    assert fall(y + noise) is not None


def test_rates_of_few_completions_are_not_taken_for_exact():
    """Four of five rates are equal: their median second difference is 0."""
    y = np.ones(25)
    y[[3, 9, 16, 17]] = 0.875
    assert point_noise(y) == 0.125
    assert fall(y) is None


def test_the_score_by_hand():
    # w = 2: lower of (3, 4) less upper of (1, 0) is 2, times sqrt(2 / 2); w = 4 does
    # not fit twice into 5 points.
    assert largest_fall(np.array([2.0, 3.0, 4.0, 1.0, 0.0]))[0] == pytest.approx(2.0)
    # Of 8 points w = 4 fits: (5, 5, 5, 5) against (1, 1, 1, 1), times sqrt(4 / 2).
    assert largest_fall(np.r_[np.full(4, 5.0), np.ones(4)])[0] == pytest.approx(
        4 * 2**0.5
    )
    second = np.diff([0.0, 1.0, 0.0, 1.5, 0.0], 2)  # -2, 2.5, -3
    assert point_noise(np.array([0.0, 1.0, 0.0, 1.5, 0.0])) == pytest.approx(
        1.4826 * np.median(np.abs(second)) / 6**0.5
    )


def test_a_fall_within_the_noise_of_what_was_counted_is_none():
    """0.361 to 0.321 of 1,024 completions: 1.9 standard errors of the difference."""
    counts = np.array([300, 330, 352, 361, 370, 372, 330, 329, 331, 329])
    assert fall(counts / 1024) is None
    assert fall(np.where(np.arange(10) > 5, 200, counts) / 1024) is not None
    clear = np.where(np.arange(10) > 5, 0.25, counts / 1000)
    assert fall(clear) is not None  # written with decimals, which count nothing
