"""Power of the comparison of two recipes, by simulation and by a known table."""

import numpy as np
import pytest

from scalerl_jax.scaling.differences import RecipeSample, difference
from scalerl_jax.scaling.power import power_of, runs_to_decide
from scalerl_jax.scaling.records import CurveError


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("runs", "size"), [(2, 2.0), (3, 1.5), (8, 1.0)])
def test_it_is_the_share_of_simulated_comparisons_with_a_winner(paired, runs, size):
    rng = np.random.default_rng(runs)
    # Paired, the spread is that of the differences: sqrt(2) of the runs' own.
    scale = np.sqrt(0.5) if paired else 1.0
    repeats, found = 1500, 0
    none = np.zeros((runs, 2))
    for _ in range(repeats):
        a, b = rng.normal(size, scale, runs), rng.normal(0.0, scale, runs)
        tested = difference(
            RecipeSample(a, none),
            RecipeSample(b, none),
            level=0.9,
            run_sd=0.0,
            paired=paired,
        )
        found += tested.sign > 0
    power = power_of(size, 1.0, runs, level=0.9, paired=paired)
    assert abs(found / repeats - power) < 4 * np.sqrt(0.25 / repeats)


def test_cohens_table():
    """d = 0.8 at 5 % two-sided with power 0.8 takes 26 of each (Cohen, 1988)."""
    assert runs_to_decide(0.8, 1.0, level=0.95) == 26
    assert runs_to_decide(0.5, 1.0, level=0.95) == 64
    assert runs_to_decide(0.0, 1.0, level=0.95) is None
    assert runs_to_decide(1e-4, 1.0, level=0.95) is None
    assert runs_to_decide(1.0, 0.0, level=0.95) == 2


def test_without_a_spread_there_is_no_power():
    with pytest.raises(CurveError, match="run_sd = nan"):
        power_of(1.0, float("nan"), 3, level=0.9)
    with pytest.raises(CurveError, match="runs = 1"):
        power_of(1.0, 1.0, 1, level=0.9)
