"""Comparing, ranking and pooling runs; extrapolating and planning from them."""

import dataclasses
import json
import re

import numpy as np
import pytest

from scalerl_jax.scaling import (
    LAWS,
    CurveError,
    Settings,
    compare,
    compare_many,
    extrapolate_curve,
    fit,
    linearise,
    make_curve,
    plan,
    pool_seeds,
)
from scalerl_jax.scaling.text import choice_text, pooled_text, runs_text

X = np.linspace(400.0, 16_000.0, 50)


def rate(x, a=0.61, b=1.9, c=2500.0, r0=0.25):
    return r0 + (a - r0) / (1 + (c / x) ** b)


def run(seed=None, sigma=0.005, x=X, **truth):
    noise = (
        0.0 if seed is None else np.random.default_rng(seed).normal(0, sigma, x.size)
    )
    return fit(x, rate(x, **truth) + noise, initial_reward=0.25)


def test_a_clearly_higher_plateau_decides():
    result = compare(
        run(0, a=0.61), run(1, a=0.52), names=("fp32", "bf16"), num_resamples=100
    )
    assert not result.equal_asymptotes
    assert result.rule_winner == result.test_winner == "fp32"
    assert "the higher A decides" in result.rule
    low, high = result.asymptote_difference.low, result.asymptote_difference.high
    assert 0.07 < low < high < 0.11


def test_at_one_plateau_the_exponent_at_the_mean_plateau_decides():
    result = compare(
        run(2, b=2.0), run(3, a=0.605, b=1.7), names=("cispo", "dapo"), num_resamples=50
    )
    assert result.equal_asymptotes and result.rule_winner == "cispo"
    assert result.shared_asymptote == pytest.approx(np.mean(result.asymptotes))
    assert result.exponents_at_shared[0] > result.exponents_at_shared[1]
    assert "with A held at" in result.rule


def test_the_refit_at_a_held_plateau_gives_the_published_exponent():
    # ScaleRL's curve (A .61, B 1.92, C_mid 2542) refitted with A = .605, which the
    # paper's leave-one-out table gives as B = 2.01.
    x = np.arange(1500.0, 8001.0, 150.0)
    scalerl = run(x=x, a=0.61, b=1.92, c=2542)
    other = run(x=x, a=0.60, b=1.92, c=2542)
    result = compare(scalerl, other, num_resamples=10)
    assert result.shared_asymptote == pytest.approx(0.605, abs=1e-6)
    assert result.exponents_at_shared[0] == pytest.approx(2.0, abs=0.02)


def test_equal_runs_are_not_told_apart_by_the_test_at_the_stated_rate():
    pairs = [(run(2 * seed), run(2 * seed + 1)) for seed in range(20, 26)]
    decided = [compare(*pair, num_resamples=100).test_winner for pair in pairs]
    # Two intervals of 90 % each: about 1 of 6 expected, 5 would be 1 in 1,000.
    assert sum(winner is not None for winner in decided) <= 4


def test_paired_prompts_cancel_what_the_choice_of_prompts_adds():
    generator = np.random.default_rng(7)
    hardness = generator.uniform(-0.24, 0.24, 150)
    a, b = rate(X, a=0.60)[:, None] + hardness, rate(X, a=0.58)[:, None] + hardness
    fits = [fit(X, rates.mean(axis=1), initial_reward="free") for rates in (a, b)]
    paired = compare(*fits, prompt_rates=(a, b), num_resamples=100)
    assert paired.test == "150 paired prompts" and paired.test_winner == "a"
    difference = paired.rate_difference
    assert difference.low <= 0.02 * 0.98 <= difference.high + 1e-3
    assert difference.high - difference.low < 0.002  # unpaired: 2 * 1.6 * .014
    with pytest.raises(CurveError, match="the same prompts in both"):
        compare(*fits, prompt_rates=(a, b[:, :20]))


def test_runs_without_a_plateau_are_compared_where_both_end():
    early = X[X < 2600]
    a, b = run(8, x=early, a=0.61), run(9, x=early, a=0.5)
    result = compare(a, b)
    assert result.identified == (False, False) and result.rule_winner is None
    assert "not decided: A of a and b is not identified" in result.rule
    assert result.test_winner == "a" and "pass_rate at compute_chip_hours" in (
        result.verdict
    )


def test_many_runs_are_ranked_by_plateau_then_by_exponent():
    """Noise 0.005: A is known to about 0.01, so 0.61 and 0.605 are not told apart."""
    fits = {
        "low": run(1, a=0.50),
        "slow": run(2, a=0.61, b=1.5),
        "fast": run(3, a=0.605, b=2.2),
        "early": run(10, x=X[:7]),
    }
    table = compare_many(fits)
    assert [row.name for row in table.rows] == ["fast", "slow", "low", "early"]
    assert [(row.rank, row.tied) for row in table.rows] == [
        (1, True),
        (1, True),
        (3, False),
        (None, False),
    ]
    near = [fits["fast"].asymptote, fits["slow"].asymptote]
    assert table.shared_asymptote == pytest.approx(np.mean(near))
    assert [row.within_margin for row in table.rows] == [True, True, False, False]
    # No A fits both "low" and the others, so there is none to compare B at.
    assert table.rows[2].shared_exponent is None and table.rows[2].linearised is None
    assert "early" in table.warnings[0]
    assert json.loads(table.to_json())["rows"][0]["shared_exponent"] > 2
    said = runs_text(table)
    assert re.search(r"3 +low +0\.\S+ +\[.*\] +\S+ +\S+ +- +-\n", said)
    assert re.search(r"1= +fast", said) and re.search(r"- +early +not identified", said)


def test_runs_of_one_recipe_share_a_rank_whatever_their_order():
    """Rank 1 = nobody is higher for certain; noise-free runs are told apart."""
    seeds = {str(i): run(i) for i in range(4)}
    assert {row.rank for row in compare_many(seeds).rows} == {1}
    steps = {str(a): run(a=a) for a in (0.5, 0.55, 0.6)}
    ranks = {row.name: row.rank for row in compare_many(steps).rows}
    assert ranks == {"0.6": 1, "0.55": 2, "0.5": 3}
    # Nearer than the margin of equal recipes: seeds alone move A by 0.015.
    close = {str(a): run(a=a) for a in (0.6, 0.61)}
    assert {row.rank for row in compare_many(close).rows} == {1}


def test_no_exponent_is_compared_where_no_plateau_fits_both():
    apart = compare(run(0, a=0.61), run(1, a=0.52), num_resamples=20)
    assert apart.shared_asymptote is None and apart.exponents_at_shared is None
    assert apart.exponent_difference is None and "shared" not in apart.verdict
    near = compare(run(0), run(0, a=0.612), num_resamples=20)
    assert near.exponent_difference is not None
    assert "B at the shared A" in near.verdict
    early = compare(run(0, x=X[:7]), run(1), num_resamples=20)
    assert early.shared_asymptote is None and early.exponents_at_shared is None


def test_where_no_plateau_is_identified_nothing_is_ranked():
    table = compare_many({"a": run(8, x=X[:7]), "b": run(9, x=X[:7])})
    assert [row.rank for row in table.rows] == [None, None]
    assert table.shared_asymptote is None and "not ranked" in runs_text(table)


def test_the_linearised_points_of_a_fit_lie_on_its_line():
    result = run(a=0.61, b=1.9)
    slope, _ = np.polyfit(np.log(X), np.log(linearise(result)), 1)
    assert slope == pytest.approx(1.9, abs=1e-3)
    y = result.predict(X)
    y[:2] = 0.2, 0.65  # not between R0 and A
    form = linearise(
        dataclasses.replace(result, curve=dataclasses.replace(result.curve, y=y))
    )
    assert np.isnan(form[:2]).all()
    np.testing.assert_allclose(form[2:], X[2:] ** result.exponent)  # by its definition


def test_comparisons_need_the_sigmoid_and_one_x():
    power = fit(X, rate(X), law="power")
    with pytest.raises(CurveError, match="b was fitted with --law power"):
        compare(run(), power)
    tokens = fit(X, rate(X), initial_reward=0.25, x_name="tokens")
    with pytest.raises(CurveError, match="different x"):
        compare(run(), tokens)
    with pytest.raises(CurveError, match="no runs"):
        compare_many({})


def test_pooled_seeds_carry_the_spread_between_them():
    shifts = (-0.015, 0.0, 0.015)
    pooled = pool_seeds([run(i, a=0.61 + s) for i, s in enumerate(shifts)])
    a = pooled.parameters["A"]
    assert a.mean == pytest.approx(np.mean(a.values))
    reach = 2.919986 * np.std(a.values, ddof=1) / np.sqrt(3)  # t(2) at 95 %
    assert a.interval.high == pytest.approx(a.mean + reach, rel=1e-6)
    assert a.largest_deviation == pytest.approx(0.015, abs=0.005)
    assert pooled.fit.num_points == 150
    assert pooled.fit.asymptote == pytest.approx(0.61, abs=0.005)
    assert pool_seeds([run()]).warnings == (
        "one seed: what seeds change is not measured",
    )
    with pytest.raises(CurveError, match="one law"):
        pool_seeds([run(), fit(X, rate(X), law="power")])


def test_pooled_text_has_no_number_for_what_a_seed_does_not_fix():
    early = run(3, x=X[:7])
    pooled = pool_seeds([run(1), run(2), early])
    a = pooled.parameters["A"]
    assert a.mean is None and a.interval.low is None and a.largest_deviation is None
    assert a.reason == "not fixed by 1 of 3 seeds"
    (line,) = [row for row in pooled_text(pooled).splitlines() if "  A " in row]
    assert re.fullmatch(r"  A +- +- +not fixed by 1 of 3 seeds", line)
    assert json.loads(pooled.to_json())["parameters"]["A"]["mean"] is None
    falls = fit(X, rate(X)[::-1].copy(), initial_reward=0.25)
    said = pooled_text(pool_seeds([run(1), falls]))
    rows = [row for row in said.splitlines()[2:] if not row.startswith("warning")]
    assert len(rows) == 3 and all("not fixed by 1 of 2 seeds" in row for row in rows)


def test_the_true_law_wins_the_extrapolation_test():
    noise = np.random.default_rng(11).normal(0, 0.003, X.size)
    table = extrapolate_curve(
        make_curve(X, rate(X) + noise), settings=Settings(initial_reward=0.25)
    )
    assert table.best_law == "sigmoid" and table.beats_last_value
    assert len(table.predictions) == 3 * 6
    half = table.get("sigmoid", 0.5)
    assert half.num_fitted + half.num_held_out == 50
    assert half.mean_absolute_error < 0.005
    assert table.get("power", 0.5).mean_absolute_error > 0.008
    last = table.get("last_value", 0.5)
    seen = (rate(X) + noise)[X <= 8000]
    assert last.last_predicted == pytest.approx(seen[-3:].mean())
    assert last.last_error == pytest.approx(last.last_predicted - last.last_actual)


def test_a_law_is_chosen_by_what_it_did_not_see_not_by_r_squared():
    # Saturating exponentially, with noise: all laws fit the first half well.
    y = 0.6 - 0.4 * np.exp(-X / 2500) + np.random.default_rng(12).normal(0, 0.004, 50)
    table = extrapolate_curve(make_curve(X, y))
    assert table.best_law in ("exponential", "logistic")
    fitted = table.get("power", 0.5).fit
    assert fitted.r_squared > 0.97  # and yet
    assert table.mean_errors["power"] > 3 * table.mean_errors[table.best_law]


def test_what_cannot_be_fitted_is_said_in_the_table():
    table = extrapolate_curve(make_curve(X[::4], rate(X[::4])), fractions=(0.33, 0.5))
    row = table.get("sigmoid", 0.33)
    assert row.mean_absolute_error is None and "at least 5 are needed" in row.reason
    # The sigmoid has no fit to 33 %, so that nobody is rated there.
    assert table.ranked_on == (0.5,)
    for law in (*LAWS, "last_value"):
        error = table.get(law, 0.5).mean_absolute_error
        assert table.mean_errors[law] == error
    assert table.best_law in LAWS and table.mean_errors["sigmoid"] is not None
    assert "over 50 %, to which all laws could be fitted" in choice_text(table)
    with pytest.raises(CurveError, match="no law can be fitted to 50 %"):
        extrapolate_curve(make_curve(X[::12], rate(X[::12])))
    with pytest.raises(CurveError, match=r"1.5 is not in \(0, 1\)"):
        extrapolate_curve(make_curve(X, rate(X)), fractions=(1.5,))
    with pytest.raises(ValueError, match="no prediction of law"):
        table.get("sigmoid", 0.9)


def test_compute_to_a_target_is_the_inverse_of_the_curve():
    result = run(13, sigma=0.004)
    planned = plan(result, target=[0.5, 0.55, 0.8], price_per_chip_hour=3.0)
    for target in planned.targets[:2]:
        assert result.predict(target.compute.value) == pytest.approx(target.pass_rate)
        assert target.compute.interval.low < target.compute.value
        assert target.compute.value < target.compute.interval.high
        assert target.cost.value == pytest.approx(3.0 * target.compute.value)
        assert target.further_compute.value == 0.0
    never = planned.targets[2]
    assert never.compute.value is None and never.reached_by == 0.0


def test_the_marginal_gain_and_the_stop_are_those_of_the_formula():
    result = run()  # noise-free: the fit is the truth
    end, h = X[-1], 1e-3
    planned = plan(result, price_per_chip_hour=2.0, value_of_a_point=500.0)
    slope = (rate(end + h) - rate(end - h)) / (2 * h)
    assert planned.marginal_gain.value == pytest.approx(slope, rel=1e-4)
    assert planned.doubled.value == pytest.approx(rate(2 * end) - rate(end), abs=1e-6)
    assert planned.stop_below == pytest.approx(0.01 * 2.0 / 500.0)
    stop = planned.stop_at.value
    at_stop = (rate(stop + h) - rate(stop - h)) / (2 * h)
    assert at_stop == pytest.approx(4e-5, rel=1e-3)
    assert planned.advice.startswith("stop:") and stop < end
    assert plan(result, stop_below=1e-8).advice.startswith("go on:")


def test_a_plan_from_an_early_curve_says_what_it_rests_on():
    planned = plan(run(14, x=X[:7]), target=0.55)
    assert not planned.identified and "A is not identified" in planned.warnings[0]
    assert planned.targets[0].compute.interval.high is None
    assert "null" in planned.to_json()


@pytest.mark.parametrize(
    "settings, message",
    [
        pytest.param({"target": 60.0}, "divide percent by 100", id="percent"),
        pytest.param({"price_per_chip_hour": -1.0}, "above 0", id="price"),
        pytest.param({"stop_below": float("inf")}, "above 0", id="stop"),
    ],
)
def test_plans_with_bad_numbers_are_refused(settings, message):
    with pytest.raises(CurveError, match=message):
        plan(run(), **settings)


def test_nothing_is_planned_from_a_collapse():
    y = rate(X)
    y[30:] = np.linspace(y[29], 0.2, 20)
    with pytest.raises(CurveError, match="nothing to plan from: collapse"):
        plan(fit(X, y, initial_reward=0.25), target=0.6)
