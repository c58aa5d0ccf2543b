"""The search against a brute-force grid, SciPy, and itself curve by curve."""

import dataclasses

import numpy as np
import pytest
from scipy.optimize import curve_fit, least_squares

from scalerl_jax.scaling import LAWS, fit
from scalerl_jax.scaling.laws import SIGMOID
from scalerl_jax.scaling.search import Grid, Problem, minimise, minimise_each

X = np.linspace(300.0, 8000.0, 30)


def rate(x, a, b, c, r0=0.25):
    return r0 + (a - r0) / (1 + (c / x) ** b)


def noisy(seed, sigma=0.008):
    return rate(X, 0.61, 1.9, 2500) + np.random.default_rng(seed).normal(0, sigma, 30)


@pytest.mark.parametrize("seed", range(3))
def test_no_point_of_a_brute_force_grid_is_better(seed):
    y = noisy(seed, sigma=0.02)
    ours = fit(X, y, initial_reward=0.25)
    a = np.linspace(0.26, 1.0, 75)[:, None, None, None]
    b = np.geomspace(0.3, 10.0, 60)[:, None, None]
    c = np.geomspace(30.0, 2e5, 90)[:, None]
    squares = ((rate(X, a, b, c) - y) ** 2).sum(axis=-1)
    assert ours.cost <= squares.min()
    assert squares.min() < 1.1 * ours.cost  # the grid did come near


def test_weights_are_those_of_scipys_curve_fit():
    y, errors = noisy(4), np.linspace(0.003, 0.02, 30)
    ours = fit(X, y, initial_reward=0.25, standard_errors=errors)
    (a, b, c), _ = curve_fit(rate, X, y, p0=[0.6, 2.0, 2500.0], sigma=errors)
    assert ours.asymptote == pytest.approx(a, abs=1e-6)
    assert ours.exponent == pytest.approx(b, rel=1e-5)
    assert ours.midpoint == pytest.approx(c, rel=1e-5)


def test_the_robust_fit_is_scipys_with_hubers_loss():
    y = noisy(5)
    y[[4, 17]] += 0.3
    ours = fit(X, y, initial_reward=0.25, robust=True)
    independent = least_squares(
        lambda p: rate(X, p[0], p[1], 1000 * p[2]) - y,
        [0.6, 2.0, 2.5],
        loss="huber",
        f_scale=ours.problem.huber,
        xtol=1e-14,
        ftol=1e-14,
    )
    assert ours.cost == pytest.approx(2 * independent.cost, rel=1e-8)
    assert ours.asymptote == pytest.approx(independent.x[0], abs=1e-4)
    plain = fit(X, y, initial_reward=0.25)
    errors = [abs(found.asymptote - 0.61) for found in (ours, plain)]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("huber", [None, 0.01])
def test_many_curves_at_once_are_fitted_as_one_by_one(huber):
    curves = np.stack([noisy(seed) for seed in range(6)])
    problem = Problem(
        law=SIGMOID,
        t=np.log(X / X[-1]),
        y=curves,
        weights=np.ones(30),
        held={0: 0.25},
        huber=huber,
    )
    together, costs, ended = minimise_each(problem, np.array([0.25, 0.6, 0.6, -1.0]))
    assert ended.all()
    for row, cost, y in zip(together, costs, curves, strict=True):
        single = dataclasses.replace(problem, y=y[None])
        alone, least, _ = minimise(single, Grid(single))
        assert cost == pytest.approx(least, rel=1e-6)
        np.testing.assert_allclose(row, alone, atol=1e-3)


@pytest.mark.parametrize(
    "law, truth",
    [
        pytest.param("power", {"A": 0.7, "D": 8.0, "B": 0.5}, id="power"),
        pytest.param(
            "logistic", {"R0": 0.2, "A": 0.6, "k": 1e-3, "x_mid": 3e3}, id="logistic"
        ),
        pytest.param(
            "exponential", {"R0": 0.2, "A": 0.6, "tau": 2e3}, id="exponential"
        ),
        pytest.param("error_power", {"k": 0.2, "E": 0.3}, id="error_power"),
    ],
)
def test_every_law_gets_its_own_parameters_back(law, truth):
    p = truth
    y = {
        "power": lambda: p["A"] - p["D"] / X ** p["B"],
        "logistic": lambda: 0.2 + 0.4 / (1 + np.exp(-1e-3 * (X - 3e3))),
        "exponential": lambda: 0.6 - 0.4 * np.exp(-X / 2e3),
        "error_power": lambda: 1 - 10 ** (p["E"] - p["k"] * np.log10(X)),
    }[law]()
    result = fit(X, y, law=law)
    assert result.law == law and result.formula == LAWS[law].formula
    for name, value in truth.items():
        assert result.value(name) == pytest.approx(value, rel=1e-3), name
        interval = result.interval(name)
        assert interval.low <= value <= interval.high
    np.testing.assert_allclose(result.residuals(X, y), 0.0, atol=1e-6)
