"""Thousands of evaluations: the fit of means of neighbours is the fit of them all."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from scalerl_jax.scaling import bootstrap, fit, make_curve, sigmoid
from scalerl_jax.scaling.bins import MOST_POINTS, NUM_CELLS, bin_points, bin_starts
from scalerl_jax.scaling.checking import Status, to_text
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.laws import SIGMOID
from scalerl_jax.scaling.plots import draw_fits, to_svg
from scalerl_jax.scaling.search import LOG_ZERO, Problem
from scalerl_jax.scaling.text import fit_text

TRUTH = {"initial_reward": 0.25, "asymptote": 0.61, "exponent": 1.92, "midpoint": 1.0}
COUNT = 4000


def law(x, r0, a, b, c):
    return r0 + (a - r0) / (1.0 + (c / x) ** b)


@pytest.fixture(scope="module")
def wandering():
    """A long curve whose noise is AR(1) with correlation 0.5, from step 0 on."""
    x = np.linspace(0.0, 6.3, COUNT + 1)
    shocks = np.random.default_rng(0).normal(0, 0.02, x.size)
    noise = np.empty(x.size)
    noise[0] = shocks[0]
    for i in range(1, x.size):
        noise[i] = 0.5 * noise[i - 1] + shocks[i]
    return x, sigmoid(x, **TRUTH) + noise


@pytest.fixture(scope="module")
def fitted(wandering):
    return fit(*wandering)


@pytest.mark.parametrize("scale", [np.linspace, np.geomspace])
def test_bins_are_narrow_and_hold_few(scale):
    log_x = np.log(scale(1e-3, 7.0, 10_000))
    starts = bin_starts(log_x)
    ends = np.append(starts[1:], log_x.size)
    assert starts[0] == 0 and np.all(ends > starts)
    assert NUM_CELLS <= starts.size <= MOST_POINTS
    assert (ends - starts).max() <= 10_000 / NUM_CELLS
    assert (log_x[ends - 1] - log_x[starts]).max() <= np.ptp(log_x) / NUM_CELLS


def test_a_binned_problem_has_the_weighted_means_of_its_points():
    """Two kinds of points: fours of one x, whose means lose nothing, and step 0."""
    generator = np.random.default_rng(1)
    t = np.repeat(np.linspace(-3.0, 0.0, 500), 4) + np.tile([0, 1e-9, 2e-9, 3e-9], 500)
    t = np.append(LOG_ZERO, t)
    y, weights = generator.uniform(size=(1, t.size)), generator.uniform(1, 3, t.size)
    whole = Problem(law=SIGMOID, t=t, y=y, weights=weights)
    binned = bin_points(whole)
    assert binned.observes_zero and binned.t.size == 501
    assert (binned.y[0, 0], binned.weights[0]) == (y[0, 0], weights[0])
    fours = weights[1:].reshape(-1, 4)
    np.testing.assert_allclose(binned.weights[1:], fours.sum(axis=1))
    means = (fours * y[0, 1:].reshape(-1, 4)).sum(axis=1) / fours.sum(axis=1)
    np.testing.assert_allclose(binned.y[0, 1:], means)
    # The objective of any two curves differs by as much as that of all points.
    theta = np.array([[0.2, 0.7, 0.5, -1.0], [0.1, 0.9, 0.2, 0.3]])
    lost = np.diff(whole.cost(theta)), np.diff(binned.cost(theta))
    np.testing.assert_allclose(*lost, rtol=1e-6)


def test_usual_curves_are_not_binned(wandering):
    x, y = (values[:MOST_POINTS] for values in wandering)
    found = fit(x, y)
    assert found.problem.whole is None and found.num_points == found.num_means
    assert "n_means" not in found.to_record() and "bins" not in fit_text(found, "run")


def test_the_fit_is_that_of_every_evaluation():
    """SciPy's least squares over all points gives the numbers and their errors."""
    x = np.linspace(6.3 / COUNT, 6.3, COUNT)
    y = sigmoid(x, **TRUTH) + np.random.default_rng(2).normal(0, 0.02, COUNT)
    best, covariance = curve_fit(law, x, y, p0=list(TRUTH.values()), xtol=1e-12)
    found = fit(x, y)
    assert found.problem.whole is not None
    for name, value, error in zip(
        found.parameters, best, np.sqrt(np.diag(covariance)), strict=True
    ):
        assert found.value(name) == pytest.approx(value, abs=0.02 * error)
        low, high = found.interval(name).low, found.interval(name).high
        if name == "A":  # its upper limit is wider (`selected_quantile`)
            high = 2 * value - low
        assert (high - low) / 2 == pytest.approx(1.645 * error, rel=0.05)
    spare = COUNT - 4
    residuals = y - law(x, *best)
    assert found.sigma == pytest.approx(
        np.sqrt(residuals @ residuals / spare), rel=1e-4
    )


def test_noise_that_wanders_is_seen_in_the_order_of_the_evaluations(wandering, fitted):
    x, y = wandering
    residuals = (y - fitted.predict(x))[1:]
    rho = residuals[1:] @ residuals[:-1] / (residuals @ residuals)
    assert fitted.autocorrelation == pytest.approx(rho, abs=1e-9)
    assert rho == pytest.approx(0.5, abs=0.05)
    assert fitted.residual_p_value < 1e-6
    widened = fitted.unit_growth / fitted.sigma**2  # (1 + rho) / (1 - rho)
    assert widened == pytest.approx((1 + rho) / (1 - rho), rel=0.05)


def test_blocks_of_the_bootstrap_are_of_evaluations(fitted):
    """Independent ones of 4000 points, and blocks as long as Carlstein's rule says."""
    found = bootstrap(fitted, num_resamples=150)
    rho = fitted.autocorrelation
    length = (6**0.5 * rho / (1 - rho**2)) ** (2 / 3) * COUNT ** (1 / 3)
    assert found.block_length == np.ceil(length)
    assert found.num_failed == 0
    for name in ("B", "C_mid"):
        drawn, known = found.intervals[name], fitted.interval(name)
        ratio = (drawn.high - drawn.low) / (known.high - known.low)
        assert 0.75 < ratio < 1.3


def test_what_is_binned_is_told(fitted):
    assert fitted.to_record()["n_means"] == fitted.num_means <= MOST_POINTS
    assert fitted.to_record()["n_points"] == COUNT
    told = f"means of {fitted.num_means} bins of neighbours"
    status = Status(curve=fitted.curve, fit=fitted, level=0.9, alarm_level=0.99)
    assert told in fit_text(fitted, "run") and told in to_text(status)


@pytest.mark.parametrize("runs", [1, 2])
def test_a_picture_of_a_long_curve_is_bounded_and_says_what_it_leaves_out(fitted, runs):
    figure = draw_fits([fitted] * runs, ["run"] * runs, title="t")
    (axes,) = figure.axes
    drawn = max(len(line.get_xdata()) for line in axes.lines)
    assert NUM_CELLS <= drawn <= MOST_POINTS
    said = axes.get_title(loc="left") if runs > 1 else axes.lines[0].get_label()
    assert f"{COUNT}" in said and "drawn" in said
    assert len(to_svg(figure)) < 600_000


def test_shapes_that_do_not_move_within_the_data_give_a_forecast():
    """Of thousands of points their sums differ by rounding alone, and not by NaN."""
    x = np.linspace(0.0, 0.4, 3001)
    y = sigmoid(x, **TRUTH) + np.random.default_rng(3).normal(0, 0.01, x.size)
    found = fit_curve(make_curve(x, y))
    assert found.predict(0.4) == pytest.approx(sigmoid(0.4, **TRUTH), abs=0.005)
    assert found.forecast(0.4) == pytest.approx(sigmoid(0.4, **TRUTH), abs=0.005)
