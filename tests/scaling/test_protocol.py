"""The paper's own procedure, against the procedure written out."""

import dataclasses

import numpy as np
import pytest
from scipy.optimize import curve_fit

from scalerl_jax.scaling import (
    CurveError,
    Settings,
    extrapolate_curve,
    fit,
    make_curve,
)
from scalerl_jax.scaling.protocol import ASYMPTOTES, MIDPOINTS


def rate(x, a, b, c, r0=0.25):
    return r0 + (a - r0) / (1 + (c / x) ** b)


# C_mid, B, A, last GPU-hours: table 1 of https://arxiv.org/abs/2510.13786.
PUBLISHED = [
    (2542, 1.92, 0.610, 16_000),
    (11272, 1.89, 0.645, 50_000),
    (3054, 2.22, 0.590, 8_000),
    (4242, 1.65, 0.710, 45_000),
    (1675, 1.09, 0.615, 16_000),
]


@pytest.mark.parametrize("c, b, a, last", PUBLISHED)
def test_published_rows_are_values_of_the_grids_and_come_back(c, b, a, last):
    x = np.arange(1500.0, last + 1, 300.0)
    result = fit(x, rate(x, a, b, c), initial_reward=0.25, protocol="paper")
    assert result.protocol == "paper"
    assert result.asymptote == a and result.midpoint == c
    assert result.exponent == pytest.approx(b, abs=1e-6)
    assert result.identified


def test_the_grids_are_those_of_the_paper():
    assert len(ASYMPTOTES) == 71 and (ASYMPTOTES[0], ASYMPTOTES[-1]) == (0.45, 0.8)
    grid = MIDPOINTS
    assert (grid[0], grid[-1]) == (100, 40_000)
    assert {2542, 2818, 2896, 2936, 3054, 1675, 10909, 11272} <= set(grid)


def test_no_pair_near_the_winner_is_better_by_curve_fit():
    x = np.arange(1500.0, 12_001, 350.0)
    y = rate(x, 0.6, 1.8, 2600) + np.random.default_rng(3).normal(0, 0.006, x.size)
    result = fit(x, y, initial_reward=0.25, protocol="paper")
    grid = MIDPOINTS
    row = int(np.argmin(np.abs(ASYMPTOTES - result.asymptote)))
    column = int(np.argmin(np.abs(grid - result.midpoint)))

    def least(a, c):
        (b,), _ = curve_fit(lambda x, b: rate(x, a, b, c), x, y)
        return ((rate(x, a, b, c) - y) ** 2).sum()

    best = (
        (rate(x, result.asymptote, result.exponent, result.midpoint) - y) ** 2
    ).sum()
    around = [
        least(a, c)
        for a in ASYMPTOTES[row - 4 : row + 5]
        for c in grid[column - 4 : column + 5]
    ]
    assert best == pytest.approx(min(around), rel=1e-9)


def test_the_first_epoch_is_left_out_unless_told_otherwise():
    x = np.arange(300.0, 9001, 300.0)
    y = rate(x, 0.6, 1.8, 2600)
    assert fit(x, y, initial_reward=0.25, protocol="paper").curve.x[0] == 1500
    given = fit(x, y, initial_reward=0.25, protocol="paper", fit_from=0.0)
    assert given.curve.x[0] == 300
    assert dataclasses.astuple(given.asymptote_interval) > (0.5, 0.6)


@pytest.mark.parametrize("fit_from, first", [(None, 1500), (300, 300), (3000, 3000)])
def test_forecasts_leave_out_what_the_fit_leaves_out(fit_from, first):
    x = np.arange(300.0, 16_001, 300.0)
    curve = make_curve([0, *x], [0.25, *rate(x, 0.6, 1.8, 2600)])
    settings = Settings(protocol="paper", fit_from=fit_from)
    test = extrapolate_curve(curve, fractions=(0.5,), settings=settings)
    half = test.get("sigmoid", 0.5)
    assert half.fit is not None and half.fit.curve.x[0] == first
    assert half.num_fitted == half.fit.num_points == ((8000 - first) // 300) + 1


@pytest.mark.parametrize("seed", range(6))
def test_every_number_lies_in_its_interval_and_these_are_of_the_same_squares(seed):
    """Also where the default fit's numbers, between the nodes, lie elsewhere."""
    x = np.arange(1500.0, 12_001, 350.0)
    y = rate(x, 0.6, 1.8, 2600)
    y = y + np.random.default_rng(seed).normal(0, 0.004 * (1 + seed % 3), x.size)
    paper = fit(x, y, initial_reward=0.25, protocol="paper")
    usual = fit(x, y, initial_reward=0.25)
    for name, step in (("A", 0.005), ("B", 0.2), ("C_mid", 100.0)):
        interval = paper.interval(name)
        assert interval.low <= paper.value(name) <= interval.high
        if usual.identified:  # the same profile, but for the resolution
            assert interval.low == pytest.approx(usual.interval(name).low, abs=step)
            assert interval.high == pytest.approx(usual.interval(name).high, abs=step)
    low, high = paper.band(x)
    assert np.all(low <= paper.predict(x) + 1e-9)
    assert np.all(paper.predict(x) <= high + 1e-9)


def test_a_plateau_beyond_the_grid_is_warned_about():
    x = np.arange(1500.0, 16_001, 300.0)
    result = fit(x, rate(x, 0.9, 1.8, 2600), initial_reward=0.25, protocol="paper")
    assert result.asymptote == 0.8
    assert any("end of the paper's grid" in warning for warning in result.warnings)
    assert not result.identified and "A = 0.8, the end of" in result.reason
    assert result.asymptote_interval.high is None


@pytest.mark.parametrize(
    "scale, settings, message",
    [
        pytest.param(1e-4, {}, "between 100 and 40000 GPU-hours", id="other units"),
        pytest.param(1.0, {"law": "power"}, "drop --law", id="law"),
        pytest.param(1.0, {"robust": True}, "drop --law, --robust", id="robust"),
        pytest.param(1.0, {"initial_reward": "free"}, "holds R0", id="free R0"),
    ],
)
def test_what_the_procedure_does_not_do_is_refused(scale, settings, message):
    x = np.arange(1500.0, 9001, 300.0)
    settings = {"initial_reward": 0.25} | settings
    with pytest.raises(CurveError, match=message):
        fit(scale * x, rate(x, 0.6, 1.8, 2600), protocol="paper", **settings)
