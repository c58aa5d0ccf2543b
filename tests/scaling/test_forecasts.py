"""Forecasts, bands, and when A is called identified: against slow oracles."""

import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.stats import norm
from scipy.stats import t as student

from scalerl_jax.scaling import extrapolate_curve, fit, make_curve, plan
from scalerl_jax.scaling.checking import assess
from scalerl_jax.scaling.fit import require_both
from scalerl_jax.scaling.identifiability import durbin_watson
from scalerl_jax.scaling.uncertainty import SHARE_OF_MARGIN, selected_quantile

X = np.linspace(0.0, 10.0, 26)


def rate(x, r0=0.25, a=0.65, b=2.0, c=3.0):
    return r0 + (a - r0) * x**b / (x**b + c**b)


def noisy(seed, sigma=0.02, x=X, **truth):
    return rate(x, **truth) + np.random.default_rng(seed).normal(0, sigma, x.size)


def test_the_forecast_is_the_mean_over_a_brute_force_grid():
    x = X[:9]
    y = noisy(0, sigma=0.08, x=x)
    result = fit(x, y)
    r0, a = (levels.ravel() for levels in np.mgrid[0:1:61j, 0:1:61j])
    r0, a = r0[a >= r0], a[a >= r0]
    lower, upper = result.problem.limits
    total, weight = 0.0, 0.0
    for b in np.exp(np.linspace(lower[2], upper[2], 24)):
        for c in x[-1] * np.exp(np.linspace(lower[3], upper[3], 32)):
            gained = rate(x, 0.0, 1.0, b, c)
            misfit = y - r0[:, None] - (a - r0)[:, None] * gained
            chance = ((misfit**2).sum(axis=1)) ** (-x.size / 2)
            total += chance @ (r0 + (a - r0) * rate(2 * x[-1], 0.0, 1.0, b, c))
            weight += chance.sum()
    assert result.forecast(2 * x[-1]) == pytest.approx(total / weight, abs=0.01)


@pytest.mark.parametrize("law", ["sigmoid", "exponential"])
def test_without_noise_the_forecast_is_the_best_curve(law):
    y = rate(X) if law == "sigmoid" else 0.6 - 0.4 * np.exp(-X / 3.0)
    result = fit(X, y, law=law)
    np.testing.assert_allclose(
        result.forecast([5.0, 20.0]), result.predict([5.0, 20.0]), atol=1e-3
    )


def test_a_law_that_misses_a_phase_is_foretold_within_its_own_band():
    """A climb in two phases: the residuals of a sigmoid correlate by 0.9 and more."""
    x = np.linspace(0.1, 6.0, 30)
    later = np.array([7.5, 9.0, 12.0])
    first, second = (rate(x, 0.2, 0.45, 2.0, 0.3), rate(x, 0.0, 0.2, 4.0, 4.0))
    y = first + second + np.random.default_rng(0).normal(0, 0.003, x.size)
    result = fit(x, y)
    low, high = result.band(later)
    found = result.forecast(later)
    assert (low <= found).all() and (found <= high).all()
    np.testing.assert_allclose(result.forecast(x[5:]), y[5:], atol=0.06)


def test_short_noisy_curves_are_foretold_as_well_as_by_plain_baselines():
    """Four seeds of each of 6 recipes, 16 completions an evaluation, half foretold."""
    generator, errors = np.random.default_rng(0), {"sigmoid": [], "power": []}
    x = np.arange(0.0, 13.0)
    for _ in range(6):
        r0 = generator.uniform(0.05, 0.4)
        truth = rate(
            x,
            r0,
            r0 + generator.uniform(0.15, 0.5),
            generator.uniform(0.8, 2.5),
            12.0 * np.exp(generator.uniform(-3.0, 0.5)),
        )
        for _ in range(4):
            curve = make_curve(x, generator.binomial(16, truth) / 16)
            table = extrapolate_curve(curve, fractions=(0.5,), laws=("sigmoid",))
            found = table.get("sigmoid", 0.5)
            if found.mean_absolute_error is None:
                continue
            errors["sigmoid"].append(found.mean_absolute_error)
            errors["power"].append(_power_error(curve))
    assert len(errors["sigmoid"]) > 20
    assert np.mean(errors["sigmoid"]) <= np.mean(errors["power"]) + 0.02


def _power_error(curve):
    """Of A - D x^-B fitted by SciPy to the first half, on the rest."""
    seen = curve.x <= 0.5 * curve.x[-1]

    def power(p, x):
        return p[0] - p[1] * x ** -p[2]

    best = least_squares(
        lambda p: power(p, curve.x[seen]) - curve.y[seen],
        [0.6, 0.3, 0.5],
        bounds=([0, 0, 0.01], [1, 1, 8]),
    )
    return np.abs(power(best.x, curve.x[~seen]) - curve.y[~seen]).mean()


def test_a_forecast_lies_within_its_own_interval():
    """A step of few evaluations: slow curves, each unlikely, move the mean."""
    y = [0.25, 0.26, 0.25, 0.2, 0.45, 0.53, 0.5, 0.54]
    result = fit([0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 10.0], y)
    doubled = plan(result).doubled
    gains = np.diff(result.curves(result.accepted, [10.0, 20.0]), axis=1)
    assert doubled.value > gains.max() + 0.005
    assert doubled.interval.low < doubled.value == doubled.interval.high
    y = [0.24, 0.24, 0.25, 0.24, 0.27, 0.33, 0.35, 0.34]
    status = assess(make_curve([0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 10.0], y))
    assert status.fit is not None and status.horizon == 20.0
    assert status.forecast > status.fit.band(20.0)[1] + 0.02
    assert status.forecast_band.low < status.forecast == status.forecast_band.high


def test_bands_stay_inside_zero_and_one():
    y = np.clip(noisy(1, sigma=0.1, r0=0.02, a=0.97), 0.0, 1.0)
    result, far = fit(X[:9], y[:9]), np.geomspace(0.01, 500.0, 40)
    for low, high in (
        result.band(far),
        result.prediction_band(far),
        fit(X[:9], y[:9], law="power").prediction_band(far),
    ):
        assert low.min() >= 0.0 and high.max() <= 1.0 and np.all(low <= high)


def test_a_is_identified_only_if_it_is_with_r0_free_too():
    known, early = fit(X, noisy(3, sigma=0.004)), fit(X[:9], noisy(3)[:9])
    assert known.identified and known.r0_free.identified
    assert not early.r0_free.identified
    both = require_both(known, early.r0_free)
    assert not both.identified and both.asymptote_interval.high is None
    assert both.reason.startswith("with R0 free: A has no upper limit")
    few = require_both(known, None)
    assert not few.identified and "25 points are too few to fit R0" in few.reason
    assert fit(X[-4:], rate(X)[-4:], initial_reward=0.25).r0_free is None


def test_the_limit_of_an_identified_a_is_where_selected_curves_seldom_lie_lower():
    # Far from the edge it is the usual quantile; at the edge there is none.
    assert selected_quantile(0.9, 100.0, at_most=30.0) == pytest.approx(1.645, abs=1e-3)
    assert selected_quantile(0.9, 0.0, at_most=30.0) == np.inf
    q = selected_quantile(0.9, 6.0, at_most=30.0)
    assert norm.sf(q) == pytest.approx(0.05 * norm.cdf(SHARE_OF_MARGIN * 6.0 - q))
    assert selected_quantile(0.9, 6.0, at_most=q - 0.1) == np.inf


def test_the_upper_limit_of_a_by_refits_of_scipy():
    y = noisy(4, sigma=0.01)
    result = fit(X, y)
    assert result.identified

    def cost(column, value):
        free = [i for i in range(4) if i != column]

        def misfit(p):
            full = np.empty(4)
            full[free], full[column] = p, value
            return rate(X, *full) - y

        start = np.array([0.25, 0.65, 2.0, 3.0])[free]
        found = least_squares(misfit, start, xtol=1e-14, bounds=(0.01, 100.0))
        return 2.0 * found.cost

    variance = result.cost / (26 - 4)

    def errors(column, value):
        root = np.sqrt((cost(column, value) - result.cost) / variance)
        return norm.isf(student.sf(root, 26 - 4))

    def without_a_plateau(p):
        return 1.0 - (1.0 - p[0]) * (1.0 + X / p[1]) ** -p[2] - y

    least = least_squares(without_a_plateau, [0.25, 3.0, 0.5], bounds=(0.01, 100.0))
    root = np.sqrt((2.0 * least.cost - result.cost) / variance)
    rival = norm.isf(student.sf(root, 26 - 4))
    margin = min(errors(1, 1.0), errors(3, X[-1]), rival) - norm.ppf(0.95)
    expected = selected_quantile(0.9, margin, at_most=30.0)
    assert expected > 1.66  # wider than without selection
    found = errors(1, result.asymptote_interval.high)
    assert found == pytest.approx(expected, rel=0.02)


def test_intervals_of_identified_curves_cover_as_the_benchmark_says():
    """A small part of `benchmarks/scaling.py --only=selection`."""
    generator, covered = np.random.default_rng(5), []
    for _ in range(40):
        y = rate(X, c=1.6) + generator.normal(0, 0.02, X.size)
        result = fit(X, y)
        if result.identified:
            interval = result.asymptote_interval
            covered.append(interval.low <= 0.65 <= interval.high)
    # Of 20 or more, 90 %: 70 % would be 3 standard deviations less.
    assert len(covered) >= 20 and np.mean(covered) > 0.7


def test_durbin_watson_by_its_matrices():
    result = fit(X, noisy(6))
    problem, theta = result.problem, result.theta
    z = problem.scaled_residuals(theta[None])[0]
    slopes = problem.slopes(theta[None])[0]
    steps = np.diff(np.eye(26), axis=0)
    kept = np.eye(26) - slopes @ np.linalg.pinv(slopes)
    # d = e'Ae / e'e of noise e after the projection: drawn 4,000 times.
    drawn = np.random.default_rng(7).normal(size=(4000, 26)) @ kept
    d = ((drawn @ steps.T) ** 2).sum(axis=1) / (drawn**2).sum(axis=1)
    own = (np.diff(z) ** 2).sum() / (z**2).sum()
    assert durbin_watson(problem, theta) == pytest.approx(np.mean(d <= own), abs=0.03)


def test_a_climb_in_two_phases_is_warned_about_and_independent_noise_seldom():
    x = np.linspace(0.0, 1.0, 41)
    two = rate(x, 0.2, 0.45, 2.5, 0.1) + rate(x, 0.0, 0.2, 6.0, 0.6)
    said = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.006, x.size)
        one = fit(x, rate(x, 0.2, 0.65, 2.0, 0.25) + noise)
        said.append(any("more than one phase" in each for each in one.warnings))
        if seed < 3:
            warnings = fit(x, two + noise).warnings
            assert any("more than one phase" in warning for warning in warnings)
    assert sum(said) <= 5  # 5 % of 20; 6 would be 3 in 10,000


def test_the_band_of_an_evaluation_knows_outliers_and_the_noise_of_rates():
    generator = np.random.default_rng(0)
    y = rate(X) + generator.normal(0, 0.005, X.size)
    y[[4, 9, 15, 20]] += [0.1, -0.1, 0.1, -0.1]  # 4 of 26: a tenth is larger than 0.09
    low, high = fit(X, y, robust=True).prediction_band(X[-1])
    assert high - low > 0.18
    # From 0.02 on, R (1 - R) at the end is several times its mean at the points.
    x = np.geomspace(0.1, 3.0, 30)
    early = fit(x, rate(x, r0=0.02) + generator.normal(0, 0.002, 30))
    curve_low, curve_high = early.band(30.0)
    seen = early.predict(x)
    last = early.predict(30.0)
    ratio = np.sqrt(last * (1 - last) / np.mean(seen * (1 - seen)))
    assert ratio > 1.5
    noise = student.isf(0.05, 30 - 4) * early.sigma * ratio
    low, high = early.prediction_band(30.0)
    assert high - last == pytest.approx(np.hypot(curve_high - last, noise))
