"""Power of the comparison of two recipes, by simulation and by a known table."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.scaling import fit
from scalerl_jax.scaling.compare import compare
from scalerl_jax.scaling.differences import RecipeSample, difference
from scalerl_jax.scaling.power import plan_power, power_of, runs_to_decide
from scalerl_jax.scaling.records import CurveError
from scalerl_jax.scaling.text import power_text


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("runs", "size", "recipes", "noise"),
    [(2, 2.0, 2, 0.0), (8, 1.0, 2, 2.6), (2, 3.0, 4, 3.0), (3, 1.5, 6, 0.0)],
)
def test_it_is_the_share_of_simulated_comparisons_with_a_winner(
    paired, runs, size, recipes, noise
):
    rng = np.random.default_rng(runs)
    repeats, found = 1500, 0
    reach = np.full((runs, 2), noise / np.sqrt(2.0))  # of two runs: noise
    for _ in range(repeats):
        a, b, *others = rng.normal(0.0, 1.0, (recipes, runs))
        tested = difference(
            RecipeSample(a + size, reach),
            RecipeSample(b, reach),
            level=0.9,
            run_sd=0.0,
            paired=paired,
            others=others,
        )
        found += tested.sign > 0
    assert tested.noise == pytest.approx(noise)
    test = {"level": 0.9, "recipes": recipes, "paired": paired}
    power = power_of(size, 1.0, runs, noise=noise, **test)
    # Of recipes that spread alike 2 % are left out, which costs nearly nothing.
    assert abs(found / repeats - power) < 4 * np.sqrt(0.25 / repeats)


def test_cohens_table():
    """d = 0.8 at 5 % two-sided with power 0.8 takes 26 of each (Cohen, 1988)."""
    assert runs_to_decide(0.8, 1.0, level=0.95) == 26
    assert runs_to_decide(0.5, 1.0, level=0.95) == 64
    assert runs_to_decide(0.0, 1.0, level=0.95) is None
    assert runs_to_decide(1e-4, 1.0, level=0.95) is None
    assert runs_to_decide(1.0, 0.0, level=0.95) == 2
    # Of evaluations' noise alone: 1 / sqrt(n) of it is less than the difference.
    assert runs_to_decide(0.1, 0.0, level=0.95, noise=0.45) == 21
    assert runs_to_decide(0.1, 0.0, level=0.95, noise=float("inf")) is None


def test_without_a_spread_there_is_no_power():
    with pytest.raises(CurveError, match="run_sd = nan"):
        power_of(1.0, float("nan"), 3, level=0.9)
    with pytest.raises(CurveError, match="runs = 1"):
        power_of(1.0, 1.0, 1, level=0.9)


def seeds_of(asymptotes):
    """Fits of one recipe with these A and hardly any noise, and of another below."""
    x = np.linspace(0.0, 6.3, 33)[1:]
    noise = np.random.default_rng(0).normal(0.0, 1e-4, x.size)
    return {
        name: [
            fit(x, 0.2 + (a - low - 0.2) / (1 + x**-2.0) + noise) for a in asymptotes
        ]
        for name, low in {"high": 0.0, "low": 0.05}.items()
    }


def test_a_paired_spread_is_that_of_the_seeds_which_all_recipes_have():
    """High less low is 0.05 for seed 1 and 0.04 for seed 3; they share no other."""
    groups = {
        name: [
            dataclasses.replace(each, curve=dataclasses.replace(each.curve, **own))
            for each, seed in zip(seeds_of(of)[name], numbers, strict=True)
            for own in [{"seed": seed, "name": f"{name}/{seed}"}]
        ]
        for name, of, numbers in (
            ("high", [0.60, 0.90, 0.62], "123"),
            ("low", [0.63, 0.60, 0.30], "314"),
        )
    }
    found = plan_power(groups, 0.01, paired=True)
    # Rows' and columns' means taken away, 0.0025 is left of each of four, 1 degree.
    assert found.run_sd == pytest.approx(0.005, abs=3e-4)
    assert "1 degrees of freedom" in found.run_sd_source
    (warning,) = found.warnings
    assert warning.endswith("left out: high/2; low/4")
    assert warning in power_text(found) and "paired by seed" in power_text(found)


def test_a_plan_by_the_pass_rate_is_of_the_test_that_decides_by_it():
    """A is open before the midpoint.  The rate has the whole error, and its noise."""
    x, noise = np.linspace(0.0, 1.0, 13)[1:], np.random.default_rng(1)
    fits = {
        name: [
            fit(x, 0.2 + (a - 0.2) / (1 + (2.0 / x) ** 2) + noise.normal(0, 0.01, 12))
            for a in (top, top, top)
        ]
        for name, top in {"high": 0.7, "low": 0.65}.items()
    }
    found = plan_power(fits, 0.02)
    assert found.quantity.startswith("the pass rate at 1")
    test = {"level": 0.9, "recipes": 2, "noise": found.noise}
    assert found.found_by[4] == power_of(0.02, found.run_sd, 4, **test)
    assert found.runs == runs_to_decide(0.02, found.run_sd, **test)
    tested = compare(fits["high"], fits["low"]).rate_difference
    assert tested.level == pytest.approx(0.9)
    assert tested.run_sd == pytest.approx(found.run_sd)
    assert tested.noise == pytest.approx(found.noise, rel=0.2)
    assert f"+- {found.noise:.4f}" in power_text(found)


def test_runs_that_would_decide_are_planned_by_the_measured_spread():
    """A of 0.59, 0.60 and 0.61 spread by 0.01, in two recipes.

    A then has half of the error: its interval is of 95 %, as in Cohen's table.
    """
    found = plan_power(seeds_of([0.59, 0.6, 0.61]), 0.008)
    assert found.run_sd == pytest.approx(0.01, abs=3e-4)
    assert found.quantity == "A" and "4 degrees of freedom" in found.run_sd_source
    # Chi-squared with 4 degrees is 0.711 and 9.488 at 5 and 95 % (tables).
    low, high = found.run_sd_interval.low, found.run_sd_interval.high
    assert low / found.run_sd == pytest.approx(np.sqrt(4 / 9.488), rel=1e-3)
    assert high / found.run_sd == pytest.approx(np.sqrt(4 / 0.711), rel=1e-3)
    given = plan_power(seeds_of([0.6]), 0.008, run_sd=0.01)
    assert given.runs == 26 and given.run_sd_source == "given"  # Cohen, above
    assert given.compute == pytest.approx(2 * 26 * 6.3)
    assert 0.5 < given.found_by[20] < 0.8
    with pytest.raises(CurveError, match="--paired measures the spread on two"):
        plan_power({"one": seeds_of([0.6, 0.61])["high"]}, 0.01, paired=True)


def test_a_copy_of_a_run_shows_no_spread():
    with pytest.raises(CurveError, match="the same evaluations"):
        plan_power(seeds_of([0.6, 0.6]), 0.01)
