"""What the data cannot say is not said."""

import numpy as np
import pytest

from scalerl_jax.scaling import LAWS, Interval, fit, make_curve
from scalerl_jax.scaling.identifiability import open_limit
from scalerl_jax.scaling.search import A
from scalerl_jax.scaling.uncertainty import Profiles


def curve(first, last, *, seed, sigma, truth=(0.30, 0.645, 1.70, 8e3), points=30):
    r0, a, b, c = truth
    x = np.linspace(first, last, points)
    noise = np.random.default_rng(seed).normal(0, sigma, points)
    return x, r0 + (a - r0) / (1 + (c / x) ** b) + noise


@pytest.mark.parametrize("seed", range(4))
def test_a_curve_that_ends_before_its_midpoint_has_no_upper_limit(seed):
    result = fit(*curve(1500, 4000, seed=seed, sigma=0.005), initial_reward=0.30)
    assert not result.identified
    assert result.asymptote_interval.high is None
    assert result.reason is not None and "2.4 times is usually needed" in result.reason


@pytest.mark.parametrize(
    "low, evidence, asymptote, says",
    [
        pytest.param(
            0.5,
            (1.0, 9.0, 9.0),
            0.7,
            "upper limit: A = 1 fits about as well",
            id="upper",
        ),
        pytest.param(
            None, (1.0, 9.0, 9.0), 0.7, "limit on either side: A = 1", id="both"
        ),
        pytest.param(
            0.5, (0.0, 9.0, 9.0), 1.0, "upper limit: A = 1, the largest", id="1"
        ),
        pytest.param(
            0.5, (9.0, 1.0, 9.0), 0.7, "upper limit: C_mid has none inside", id="C_mid"
        ),
        pytest.param(
            0.5, (9.0, 2.5, 9.0), 0.7, "upper limit: A = 1, or C_mid beyond", id="near"
        ),
        pytest.param(
            0.5, (9.0, 9.0, 1.0), 0.7, "upper limit: a power law of the", id="power"
        ),
    ],
)
@pytest.mark.parametrize(
    "half, advice",
    [(0.5, "2 times the fitted C_mid; more than 2.4"), (0.1, "10 times the fitted C_")],
)
def test_the_reason_names_the_open_limit(low, evidence, asymptote, half, advice, says):
    curve = make_curve([0, 50, 100], [0.2, 0.3, 0.4])
    best = np.array([0.2, asymptote, 0.0, np.log(half)])
    profiles = Profiles({A: Interval(low, None)}, best[None], *evidence)
    said = open_limit(curve, LAWS["sigmoid"], best, profiles, 1.645)
    assert said.startswith(f"A has no {says}") and advice in said
    # Ten times the midpoint is more than 2.4 times: no advice to go there.
    assert ("more than 2.4" in said) == (half > 1 / 2.4)


@pytest.mark.parametrize("seed", range(4))
def test_a_curve_far_past_its_midpoint_has_a_narrow_interval(seed):
    result = fit(*curve(1500, 100_000, seed=seed, sigma=0.005), initial_reward=0.30)
    interval = result.asymptote_interval
    assert result.identified
    assert interval.low is not None and interval.high is not None
    assert interval.high - interval.low < 0.05
    assert abs(result.asymptote - 0.645) < 0.02


def test_data_up_to_the_midpoint_are_seldom_called_enough():
    truth = (0.25, 0.61, 1.92, 2542)
    identified = [
        fit(
            *curve(300, 2550, seed=seed, sigma=0.006, truth=truth, points=16),
            initial_reward=0.25,
        ).identified
        for seed in range(15)
    ]
    assert sum(identified) <= 3  # 5 % of 150 such curves


def test_an_upper_limit_of_one_is_open():
    x, y = curve(200, 9000, seed=0, sigma=0.004, truth=(0.3, 1.0, 2.5, 1500))
    result = fit(x, np.clip(y, 0, 1), initial_reward=0.30)
    assert not result.identified and "A = 1" in result.reason
    assert result.asymptote_interval.high is None
    assert result.asymptote_interval.low > 0.95


def test_a_collapse_is_called_a_collapse():
    # Eval pass rates of a real GRPO run that lost its answer format.
    x = np.array([1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 9216, 10240.0])
    y = np.array([0.64, 0.672, 0.68, 0.701, 0.375, 0.096, 0.137, 0.232, 0.331, 0.438])
    result = fit(x, y, initial_reward=0.6)
    assert not result.identified and not result.climbs
    assert result.reason is not None and "the curve falls from 0.701" in result.reason
    assert result.asymptote_interval.high is None


@pytest.mark.parametrize("seed", range(3))
def test_noise_around_a_plateau_is_not_a_fall(seed):
    x, y = curve(300, 30_000, seed=seed, sigma=0.02, truth=(0.3, 0.6, 2.0, 2000))
    assert fit(x, y, initial_reward=0.30).climbs


def test_a_curve_below_its_start_does_not_climb():
    x = np.linspace(1.0, 9.0, 9)
    y = 0.4 + 0.01 * np.array([0, 1, -1, 1, 0, -1, 1, 0, 1])
    result = fit(x, y, initial_reward=0.5)
    assert not result.identified
    assert result.reason is not None and "does not climb" in result.reason


@pytest.mark.parametrize("law", ["sigmoid", "logistic", "exponential", "power"])
def test_a_collapse_is_called_one_whatever_the_law(law):
    x, y = curve(200, 9000, seed=0, sigma=0.004, truth=(0.3, 0.7, 2.5, 1500))
    y[20:] = np.linspace(y[19], 0.2, 10)
    result = fit(x, y, law=law)
    assert not result.climbs and not result.identified
    assert result.reason is not None and "collapse: the curve falls" in result.reason
    assert all(
        parameter.interval is None or parameter.interval.low is None
        for parameter in result.parameters.values()
    )


def test_noise_alone_is_not_called_a_collapse():
    for seed in range(8):
        x, y = curve(200, 9000, seed=seed, sigma=0.02, truth=(0.3, 0.7, 2.5, 1500))
        assert fit(x, y, initial_reward=0.30).climbs


def test_a_curve_without_a_plateau_has_no_identified_asymptote():
    """The sigmoid bends through it and says 0.87; a sigmoid as long keeps its A."""
    generator, x = np.random.default_rng(0), np.linspace(0.0, 6.0, 41)
    without = 1.0 - 0.75 * (1.0 + x / 0.05) ** -0.3
    with_one = 0.25 + 0.36 * x**1.92 / (1.0 + x**1.92)
    found = {"without": [], "with one": []}
    for _ in range(4):
        noise = generator.normal(0.0, 0.005, x.size)
        found["without"].append(fit(x, without + noise))
        found["with one"].append(fit(x, with_one + noise))
    assert not any(each.identified for each in found["without"])
    assert all("a power law" in (each.reason or "") for each in found["without"])
    assert all(each.identified for each in found["with one"])
