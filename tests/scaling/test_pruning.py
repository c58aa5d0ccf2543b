"""Stopping hopeless runs: which are, and what a replay says of it."""

import numpy as np
import pytest

from scalerl_jax.scaling import make_curve, sigmoid
from scalerl_jax.scaling.pruning import cannot_reach, fit_to_judge, replay

X = np.linspace(0.0, 6.0, 41)


def curve(asymptote, seed, *, until=6.0, late=0.0):
    """A sigmoid with B = 2 and C_mid = 1; `late` is a second climb from x = 4 on."""
    y = sigmoid(X, initial_reward=0.2, asymptote=asymptote, exponent=2.0, midpoint=1.0)
    y += late / (1.0 + np.exp(-8.0 * (X - 5.0)))
    y += np.random.default_rng(seed).normal(0.0, 0.005, X.size)
    seen = X <= until
    return make_curve(X[seen], y[seen])


def done(asymptote, seed):
    return fit_to_judge(curve(asymptote, seed))


def test_a_run_that_is_far_below_a_finished_one_cannot_reach_it():
    finished = {"good": done(0.6, 0), "poor": done(0.3, 1)}
    low = curve(0.4, 2, until=3.0)
    assert cannot_reach(low, finished, 6.0) == "good"
    assert cannot_reach(low, {"poor": finished["poor"]}, 6.0) is None
    assert cannot_reach(low, {}, 6.0) is None


@pytest.mark.parametrize(
    ("asymptote", "until"),
    [
        pytest.param(0.58, 3.0, id="as near as another seed of the recipe"),
        pytest.param(0.4, 1.4, id="a quarter of its compute is not spent"),
    ],
)
def test_a_run_that_may_reach_it_goes_on(asymptote, until):
    near = curve(asymptote, 3, until=until)
    assert cannot_reach(near, {"good": done(0.6, 0)}, 6.0) is None


@pytest.mark.parametrize("count", [2, 3, 6])
def test_no_run_is_stopped_for_or_by_a_curve_that_falls(count):
    """0.8 until the last evaluations, which are 0.1; the others end at 0.35."""
    y = curve(0.8, 0).y.copy()
    y[-count:] = 0.1
    collapsed, low = make_curve(X[1:], y), curve(0.35, 1, until=3.0)
    assert cannot_reach(low, {"collapsed": fit_to_judge(collapsed)}, 6.0) is None
    assert cannot_reach(low, {"good": done(0.8, 2)}, 6.0) == "good"
    seen = collapsed.part(X[1:] < 6.0)
    assert cannot_reach(seen, {"good": done(0.8, 2)}, 6.0) is None


def test_a_finished_run_is_no_better_than_its_last_evaluations():
    """Its fit still climbs, to 0.6, and it ended at 0.5, as the other will."""
    y = curve(0.6, 0).y.copy()
    y[-3:] -= 0.08
    finished = fit_to_judge(make_curve(X[1:], y))
    assert finished.climbs and float(finished.forecast(6.0)) > 0.57
    assert cannot_reach(curve(0.5, 1, until=4.5), {"it": finished}, 6.0) is None


def test_a_replay_counts_what_is_saved_and_what_is_wrong():
    """The last run overtakes all late, where no forecast could have seen it."""
    runs = [
        ("good", 0, curve(0.6, 0)),
        ("near", 0, curve(0.59, 1)),
        ("poor", 0, curve(0.4, 2)),
        ("late", 0, curve(0.4, 3, late=0.4)),
        ("poor", 1, curve(0.4, 4)),  # the first of its seed: nothing to reach
    ]
    found = replay(runs)
    assert found.num_runs == 5
    assert [(each.arm, each.seed) for each in found.stopped] == [
        ("poor", 0),
        ("late", 0),
    ]
    assert [each.wrong for each in found.stopped] == [False, True]
    assert found.stopped[1].lost > 0.15
    assert found.saved == pytest.approx(sum(1.0 - s.at for s in found.stopped) / 5)
    assert 0.1 < found.saved < 0.4


def test_runs_of_one_recipe_are_hardly_ever_stopped():
    """Fifteen runs at half their compute; A spreads by 0.015, as ScaleRL's does."""
    generator = np.random.default_rng(5)
    finished = {"good": done(0.6, 0)}
    stopped = [
        cannot_reach(curve(a, seed, until=3.0), finished, 6.0)
        for seed, a in enumerate(generator.normal(0.6, 0.015, 15), 1)
    ]
    assert stopped.count("good") <= 1
