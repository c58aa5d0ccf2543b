"""Fits come back with what went in, and intervals with what they promise."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares
from scipy.stats import f as f_distribution

from scalerl_jax.scaling import CurveError, fit, sensitivity, sigmoid

# C_mid, B, A, last GPU-hours: table 1 of https://arxiv.org/abs/2510.13786.
PUBLISHED = [
    (2542, 1.92, 0.610, 16_000),
    (11272, 1.89, 0.645, 50_000),
    (2542, 2.44, 0.585, 8_000),
    (3054, 2.22, 0.590, 8_000),
    (2936, 2.07, 0.595, 8_000),
    (4242, 1.65, 0.710, 45_000),
    (2818, 1.77, 0.605, 16_000),
    (10909, 1.70, 0.645, 100_000),
    (2896, 2.05, 0.595, 16_000),
    (1675, 1.09, 0.615, 16_000),
]


def plain_sigmoid(x, r0, a, b, c):
    return r0 + (a - r0) / (1 + (c / x) ** b)


@pytest.mark.parametrize("c, b, a, last", PUBLISHED)
def test_published_curves_come_back(c, b, a, last):
    x = np.arange(1500.0, last + 1, 150.0)
    result = fit(x, plain_sigmoid(x, 0.25, a, b, c), initial_reward=0.25)
    assert result.identified and result.reason is None
    assert result.asymptote == pytest.approx(a, abs=1e-6)
    assert result.exponent == pytest.approx(b, abs=1e-5)
    assert result.midpoint == pytest.approx(c, rel=1e-5)
    assert result.asymptote_interval.low < a < result.asymptote_interval.high
    assert result.r_squared == pytest.approx(1.0)


curves = st.fixed_dictionaries(
    {
        "initial_reward": st.floats(0.0, 0.4),
        "asymptote": st.floats(0.5, 0.98),
        "exponent": st.floats(0.7, 3.5),
        "midpoint": st.floats(0.1, 0.4),
    }
)


@settings(max_examples=12, deadline=None)
@given(truth=curves)
def test_noise_free_curves_return_their_parameters(truth):
    x = np.linspace(0.0, 1.0, 33)
    result = fit(x, sigmoid(x, **truth))
    assert result.initial_reward == pytest.approx(truth["initial_reward"], abs=1e-6)
    assert result.num_points == 32
    assert result.asymptote == pytest.approx(truth["asymptote"], abs=1e-5)
    assert result.exponent == pytest.approx(truth["exponent"], rel=1e-4)
    assert result.midpoint == pytest.approx(truth["midpoint"], rel=1e-4)
    assert result.r0_free is not None
    free = result.r0_free.initial_reward
    assert free == pytest.approx(truth["initial_reward"], abs=1e-4)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-6, 0.037, 12.0, 1e18]),
)
def test_another_unit_of_compute_scales_only_the_midpoint(seed, scale):
    noise = np.random.default_rng(seed).normal(0, 0.01, 30)
    x = np.linspace(200.0, 9000.0, 30)
    y = plain_sigmoid(x, 0.3, 0.65, 1.7, 2000.0) + noise
    one, other = fit(x, y, initial_reward=0.3), fit(scale * x, y, initial_reward=0.3)
    assert other.midpoint == pytest.approx(scale * one.midpoint, rel=1e-5)
    assert other.asymptote == pytest.approx(one.asymptote, abs=1e-6)
    assert other.exponent == pytest.approx(one.exponent, rel=1e-5)
    assert other.identified == one.identified


def noisy_curve():
    x = np.linspace(300.0, 8000.0, 26)
    noise = np.random.default_rng(3).normal(0, 0.008, x.size)
    return x, plain_sigmoid(x, 0.25, 0.61, 1.9, 2500.0) + noise


def test_the_fit_is_the_minimum_that_scipy_finds():
    x, y = noisy_curve()
    result = fit(x, y, initial_reward=0.25)
    independent = least_squares(
        lambda p: plain_sigmoid(x, 0.25, p[0], p[1], 1000 * p[2]) - y, [0.6, 1.5, 2.0]
    )
    ours = ((result.predict(x) - y) ** 2).sum()
    assert ours == pytest.approx(2 * independent.cost, rel=1e-9)
    assert result.asymptote == pytest.approx(independent.x[0], abs=1e-4)
    assert result.sigma == pytest.approx(np.sqrt(ours / (26 - 3)))


@pytest.mark.parametrize("name, end", [("A", "low"), ("B", "low"), ("B", "high")])
def test_at_the_ends_of_the_interval_the_f_test_is_just_passed(name, end):
    x, y = noisy_curve()
    result = fit(x, y, initial_reward=0.25)
    held = getattr(result.interval(name), end)

    def misfit(p):
        a, b = (held, p[0]) if name == "A" else (p[0], held)
        return plain_sigmoid(x, 0.25, a, b, 1000 * p[1]) - y

    independent = least_squares(misfit, [1.5 if name == "A" else 0.6, 2.0])
    best = ((result.predict(x) - y) ** 2).sum()
    statistic = (2 * independent.cost - best) / (best / (26 - 3))
    assert statistic == pytest.approx(f_distribution.ppf(0.9, 1, 26 - 3), rel=0.02)


def test_the_band_holds_the_curve_and_widens_beyond_the_data():
    x, y = noisy_curve()
    result = fit(x, y, initial_reward=0.25)
    far = np.array([4000.0, 8000.0, 64000.0])
    low, high = result.band(far)
    assert np.all(low <= result.predict(far)) and np.all(result.predict(far) <= high)
    assert high[2] - low[2] > high[1] - low[1]


def test_early_points_are_left_out_but_r0_is_kept():
    x = np.linspace(0.0, 10.0, 41)
    y = sigmoid(x, initial_reward=0.2, asymptote=0.8, exponent=2.0, midpoint=3.0)
    y[1:5] = 0.5  # a wrong first epoch
    result = fit(x, y, fit_from=1.25)
    assert result.num_points == 36
    assert result.initial_reward == pytest.approx(0.2)
    assert result.asymptote == pytest.approx(0.8, abs=1e-5)


def test_r0_is_free_and_said_to_be_without_a_measurement():
    x, y = noisy_curve()
    result = fit(x, y)
    assert result.initial_reward_source == "free"
    assert result.parameters["R0"].interval is not None
    assert "R0 was not measured" in result.warnings[0]
    assert fit(x, y, initial_reward=0.25).initial_reward_source == "given"


def test_a_wrong_r0_is_noticed():
    x = np.linspace(300.0, 20000.0, 60)
    y = plain_sigmoid(x, 0.30, 0.61, 1.9, 2500.0)
    warnings = fit(x, y, initial_reward=0.0).warnings
    assert any("R0 = 0 may be wrong: the points" in warning for warning in warnings)
    assert fit(x, y, initial_reward=0.30).warnings == ()


def test_half_of_a_noise_free_curve_forecasts_its_end():
    x = np.linspace(0.0, 8.0, 33)
    y = sigmoid(x, initial_reward=0.2, asymptote=0.8, exponent=2.0, midpoint=2.0)
    forecast = fit(x, y).half_forecast
    assert forecast is not None
    assert forecast.fit_until == 4.0
    assert forecast.actual == y[-1]
    assert forecast.error == pytest.approx(0.0, abs=1e-5)
    assert fit(x[-8:], y[-8:], initial_reward=0.2).half_forecast is None


def test_an_interval_from_known_errors_asks_the_normal_distribution():
    x, y = noisy_curve()
    errors = np.full(26, 0.008)
    known = fit(x, y, initial_reward=0.25, standard_errors=errors, errors_known=True)
    held = known.asymptote_interval.low
    independent = least_squares(
        lambda p: plain_sigmoid(x, 0.25, held, p[0], 1000 * p[1]) - y, [1.5, 2.0]
    )
    best = ((known.predict(x) - y) ** 2).sum()
    statistic = (2 * independent.cost - best) / 0.008**2
    assert statistic == pytest.approx(1.6449**2, rel=0.02)
    assert known.sigma == pytest.approx(0.008)


def test_errors_too_small_for_the_scatter_are_not_believed():
    x, y = noisy_curve()
    errors = np.full(26, 0.001)
    result = fit(x, y, initial_reward=0.25, standard_errors=errors, errors_known=True)
    assert "more than their standard errors" in result.warnings[0]
    assert result.asymptote_interval == pytest.approx(
        fit(x, y, initial_reward=0.25).asymptote_interval
    )


@pytest.mark.parametrize("error", [0.0, float(np.std([0.1] * 3))])  # 1e-17
def test_errors_of_zero_do_not_outweigh_the_rest(error):
    x, y = noisy_curve()
    errors = np.full(26, 0.008)
    errors[3] = error  # all samples right
    weighted = fit(x, y, initial_reward=0.25, standard_errors=errors)
    assert weighted.asymptote == pytest.approx(
        fit(x, y, initial_reward=0.25).asymptote, abs=1e-9
    )
    with pytest.raises(CurveError, match="point 4: the standard error nan"):
        errors[3] = np.nan
        fit(x, y, initial_reward=0.25, standard_errors=errors)


def test_the_table_of_cutoffs_shows_what_early_points_do():
    x = np.linspace(0.0, 10.0, 41)
    y = sigmoid(x, initial_reward=0.2, asymptote=0.8, exponent=2.0, midpoint=3.0)
    y[1:4] = 0.5  # a wrong first epoch
    rows = sensitivity(fit(x, y), cutoffs=[0.0, 1.0, 9.6])
    assert [row.num_points for row in rows] == [40, 37, 2]
    assert abs(rows[0].values["A"] - 0.8) > 0.01
    assert rows[1].values["A"] == pytest.approx(0.8, abs=1e-5)
    assert rows[2].values == {} and "at least 4 are needed" in rows[2].reason


def test_a_result_in_json_says_whether_to_trust_it():
    x, y = noisy_curve()
    record = json.loads(fit(x, y, initial_reward=0.25).to_json())
    assert record["converged"] and record["identified"] and record["reason"] is None
    assert record["parameters"]["C_mid"]["unit"] == "compute_chip_hours"
    assert record["A"] == record["parameters"]["A"]["value"]
    assert record["A_low"] < record["A"] < record["A_high"]
    early = json.loads(fit(x[:7], y[:7], initial_reward=0.25).to_json())
    assert not early["identified"] and early["A_high"] is None and early["reason"]


@pytest.mark.parametrize(
    "settings, message",
    [
        pytest.param({"law": "cubic"}, "--law = 'cubic'; choose from", id="law"),
        pytest.param({"level": 90.0}, "level = 90; give a share", id="level"),
        pytest.param(
            {"protocol": "ours"}, "choose from .'default', 'paper'", id="proto"
        ),
        pytest.param({"fit_from": 1e6}, "leaves out every point", id="from"),
        pytest.param({"protocol": "paper"}, "holds R0; give --r0", id="paper, no R0"),
    ],
)
def test_settings_outside_their_limits_are_refused(settings, message):
    with pytest.raises(CurveError, match=message):
        fit(*noisy_curve(), **settings)


def test_a_parameter_that_a_law_lacks_is_answered_with_its_own():
    with pytest.raises(ValueError, match="no parameter 'C_mid'; it has A, D, B"):
        fit(*noisy_curve(), law="power").value("C_mid")


@pytest.mark.parametrize(
    "window", [(1500, 50_000), (0, 50_000), (5000, 50_000), (0, 100_000)], ids=str
)
def test_the_sigmoid_finds_one_plateau_in_every_window_of_a_long_run(window):
    x = np.arange(750.0, 100_001, 1350.0)  # the paper: about 75 evaluations
    noise = np.random.default_rng(1).normal(0, 0.005, x.size)
    y = plain_sigmoid(x, 0.25, 0.645, 1.70, 10909) + noise
    seen = (x >= window[0]) & (x <= window[1])
    result = fit(x[seen], y[seen], initial_reward=0.25)
    assert result.identified
    assert result.asymptote == pytest.approx(0.645, abs=0.02)  # the paper's margin


def test_the_power_law_finds_another_plateau_in_each_window():
    x = np.arange(750.0, 100_001, 1350.0)
    y = plain_sigmoid(x, 0.25, 0.645, 1.70, 10909)
    plateaus = []
    for low, high in [(1500, 50_000), (5000, 50_000), (30_000, 60_000)]:
        seen = (x >= low) & (x <= high)
        plateaus.append(fit(x[seen], y[seen], law="power").asymptote)
    assert plateaus[0] > 0.9  # the paper: 1.0, 0.74, and right only in the last
    assert plateaus[0] > plateaus[1] + 0.1
    assert plateaus[2] == pytest.approx(0.645, abs=0.02)
