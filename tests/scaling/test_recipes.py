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
    fit_curve,
    linearise,
    make_curve,
    plan,
    pool_extrapolations,
    pool_seeds,
)
from scalerl_jax.scaling.compare import Recipe
from scalerl_jax.scaling.differences import RecipeSample, difference
from scalerl_jax.scaling.obstacles import measured_alike
from scalerl_jax.scaling.recipes import compare_recipes
from scalerl_jax.scaling.text import (
    choice_text,
    comparison_text,
    pooled_extrapolation_text,
    pooled_text,
    runs_text,
    verdict_text,
)

X = np.linspace(400.0, 16_000.0, 50)


def rate(x, a=0.61, b=1.9, c=2500.0, r0=0.25):
    return r0 + (a - r0) / (1 + (c / x) ** b)


def run(seed=None, sigma=0.005, x=X, **truth):
    noise = (
        0.0 if seed is None else np.random.default_rng(seed).normal(0, sigma, x.size)
    )
    return fit(x, rate(x, **truth) + noise, initial_reward=0.25)


def seeds(first, count=3, *, spread=0.01, a=0.61, **truth):
    """Runs of one recipe whose A differ as runs' do."""
    shifts = spread * np.random.default_rng(first).normal(size=count)
    return [run(first + i, a=a + shifts[i], **truth) for i in range(count)]


def test_a_clearly_higher_plateau_of_several_seeds_decides():
    result = compare(seeds(10), seeds(20, a=0.52), names=("fp32", "bf16"))
    assert result.winner == "fp32" and result.reason == "A is higher"
    assert result.num_runs == (3, 3) and "4 degrees of freedom" in result.run_sd_source
    found = result.asymptote_difference
    assert found.interval.low < 0.09 < found.interval.high
    assert found.level == pytest.approx(0.95)  # B has the other half of the error
    rule = result.paper_rule
    assert rule.winner == "fp32" and not rule.equal_asymptotes
    assert "the higher A" in rule.says


def test_one_run_each_names_no_winner_and_the_interval_holds_the_spread_of_runs():
    """1.96 sqrt(2) 0.015 = 0.0416 at 95 %, and the noise of both fits beside it."""
    result = compare(run(0, a=0.61), run(1, a=0.50), names=("fp32", "bf16"))
    assert result.winner is None and result.reason == "one run each: not decided"
    assert result.paper_rule.winner == "fp32"  # a rule of points
    found = result.asymptote_difference
    assert found.run_sd == 0.015 and found.degrees is None
    assert 0.083 < found.interval.high - found.interval.low < 0.12
    narrow = compare(run(0, a=0.61), run(1, a=0.50), run_sd=0.0).asymptote_difference
    assert narrow.interval.high - narrow.interval.low < 0.06
    said = comparison_text(result)
    assert said.index("one run each: not decided") < said.index("the paper's rule")
    assert json.loads(result.to_json())["winner"] is None


def test_seeds_on_one_side_alone_decide_nothing():
    result = compare(seeds(10), run(1, a=0.4))
    assert result.winner is None and "there is one run of b" in result.reason


def test_at_one_plateau_the_exponent_at_the_mean_plateau_decides():
    fast, slow = seeds(30, spread=0.002, b=2.2), seeds(40, spread=0.002, b=1.4)
    result = compare(fast, slow, names=("cispo", "dapo"))
    assert result.winner == "cispo" and result.reason == "B at the shared A is higher"
    assert result.shared_asymptote == pytest.approx(np.mean(result.asymptotes))
    found = result.log_exponent_difference
    assert found.interval.low < np.log(2.2 / 1.4) < found.interval.high
    assert result.paper_rule.equal_asymptotes and result.paper_rule.winner == "cispo"
    assert "with A held at" in result.paper_rule.says


def test_the_refit_at_a_held_plateau_gives_the_published_exponent():
    # ScaleRL's curve (A .61, B 1.92, C_mid 2542) refitted with A = .605, which the
    # paper's leave-one-out table gives as B = 2.01.
    x = np.arange(1500.0, 8001.0, 150.0)
    scalerl = run(x=x, a=0.61, b=1.92, c=2542)
    other = run(x=x, a=0.60, b=1.92, c=2542)
    result = compare(scalerl, other)
    assert result.shared_asymptote == pytest.approx(0.605, abs=1e-6)
    assert result.exponents_at_shared[0] == pytest.approx(2.0, abs=0.02)


def test_seeds_of_one_recipe_are_not_told_apart():
    pairs = [(seeds(100 * i), seeds(100 * i + 50)) for i in range(1, 5)]
    decided = [compare(*pair).winner for pair in pairs]
    # 90 %: about 0.4 of 4 expected, 3 would be 4 in 1,000.
    assert sum(winner is not None for winner in decided) <= 2


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("spread, noise", [(0.0, 0.01), (0.01, 0.01), (0.03, 0.003)])
def test_an_interval_between_seeds_holds_the_truth_as_often_as_it_says(
    count, spread, noise
):
    """4,000 pairs of one recipe: binomial error of the share at most 0.5 %."""
    generator = np.random.default_rng(count)
    size = np.hypot(spread, noise)
    limits = np.full((count, 2), 1.96 * noise)
    draws = generator.normal(0.0, size, (4000, 2, count))
    outside = np.mean(
        [
            difference(
                RecipeSample(a, limits),
                RecipeSample(b, limits),
                level=0.95,
                run_sd=0.015,
            ).sign
            != 0
            for a, b in draws
        ]
    )
    assert outside <= 0.06


def test_paired_seeds_cancel_what_a_seed_adds_to_both():
    """Differences of 0.02, 0.02 and 0.023 whose mean has an error of 0.001."""
    a, b = np.array([0.60, 0.63, 0.563]), np.array([0.58, 0.61, 0.54])
    none = np.zeros((3, 2))
    paired = difference(
        RecipeSample(a, none),
        RecipeSample(b, none),
        level=0.9,
        run_sd=0.015,
        paired=True,
    )
    assert paired.value == pytest.approx(0.021) and paired.degrees == 2
    assert paired.interval.low == pytest.approx(0.021 - 2.919986 * 0.001, abs=1e-6)
    assert paired.sign == 1
    apart = difference(
        RecipeSample(a, none), RecipeSample(b, none), level=0.9, run_sd=0.015
    )
    assert apart.sign == 0 and apart.degrees == 4
    with pytest.raises(CurveError, match="paired runs are as many of each recipe"):
        compare(seeds(1, 2), seeds(5, 3), paired=True)


def seeded(fits, numbers):
    return [
        dataclasses.replace(fit, curve=dataclasses.replace(fit.curve, **own))
        for fit, seed in zip(fits, numbers, strict=True)
        for own in [{"seed": str(seed), "name": f"run {seed}"}]
    ]


def test_runs_are_paired_by_their_seeds_and_not_by_their_places():
    first, second, third = seeds(1), seeds(5, a=0.5), seeds(9, 2, a=0.4)
    crowd = [Recipe(tuple(seeded(third, [3, 2]))), Recipe((first[0],))]
    found = compare(
        seeded(first, [1, 2, 3]), seeded(second, [3, 5, 2]), paired=True, others=crowd
    )
    by_hand = compare(
        *(first[1:], [second[2], second[0]]),
        paired=True,
        others=[Recipe((third[1], third[0]))],
    )
    assert (found.paired_by, by_hand.paired_by) == ("seed", "order")
    assert found.rate_difference == by_hand.rate_difference
    assert found.asymptote_difference == by_hand.asymptote_difference
    assert found.asymptote_difference.num_recipes == 3 and found.num_runs == (2, 2)
    assert found.warnings[0].endswith("left out: run 1; run 5")
    assert "2 and 2 runs, paired by seed" in comparison_text(found)
    assert "2 and 2 runs, paired by order" in comparison_text(by_hand)
    assert "get a winner if all spread alike" in comparison_text(by_hand)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        pytest.param([3, 4, 5], r"there are 1 \(a: 1, 2, 3; b: 3, 4, 5\)", id="few"),
        pytest.param([1, 2, 2], "run 2 and run 2 of b have one seed, 2", id="twice"),
        pytest.param([1, 2, ""], "that of run  is not known", id="unknown"),
    ],
)
def test_runs_without_partners_are_not_paired(numbers, message):
    fits = seeds(1)
    with pytest.raises(CurveError, match=message):
        compare(seeded(fits, [1, 2, 3]), seeded(fits, numbers), paired=True)


def held_by(a, b, others, **options):
    none = np.zeros((2, 2))
    samples = (RecipeSample(np.array(each), none) for each in (a, b))
    others = [np.array(each) for each in others]
    return difference(*samples, level=0.9, run_sd=0.015, others=others, **options)


@pytest.mark.parametrize(
    ("b", "others", "variance", "degrees", "recipes"),
    [
        pytest.param((0.50, 0.52), [], 2e-4, 2, 2, id="two recipes alone"),
        pytest.param((0.50, 0.52), [(0.4, 0.42)], 2e-4, 3, 3, id="a third like them"),
        pytest.param((0.50, 0.52), [(0.1, 0.9)], 2e-4, 2, 2, id="one far from it"),
        pytest.param((0.50, 0.52), [(0.4,)], 2e-4, 2, 2, id="a third with one run"),
        pytest.param((0.50, 0.54), [(0.4, 0.42)], 5e-4, 3, 3, id="wider than all"),
    ],
)
def test_other_recipes_say_how_far_runs_lie_from_each_other(
    b, others, variance, degrees, recipes
):
    """a is 0.60 and 0.62: squares of 2e-4 about its mean, with one degree."""
    found = held_by((0.60, 0.62), b, others)
    quantile = {2: 2.919986, 3: 2.353363}[degrees]
    reach = quantile * np.sqrt(variance)
    assert found.interval.low == pytest.approx(found.value - reach, rel=1e-5)
    assert (found.degrees, found.num_recipes) == (degrees, recipes)


def test_paired_the_luck_of_a_seed_is_taken_from_all_recipes():
    """Rows 0.60 0.62, 0.50 0.52 and 0.40 0.44 less rows' and columns' means.

    Rows leave -0.01 0.01 twice and -0.02 0.02; their columns' means are 4/3 of 0.01.
    """
    found = held_by((0.60, 0.62), (0.50, 0.52), [(0.40, 0.44)], paired=True)
    left = np.array([1, -1, 1, -1, -2, 2]) / 300
    assert found.degrees == 2
    assert found.run_sd == pytest.approx(np.sqrt((left**2).sum() / 2))


def test_one_run_each_takes_the_spread_of_recipes_with_several():
    none = np.zeros((1, 2))
    one, other = (RecipeSample(np.array([each]), none) for each in (0.6, 0.5))
    found = difference(
        one, other, level=0.9, run_sd=0.015, others=[np.array([0.4, 0.42])]
    )
    assert found.run_sd == pytest.approx(np.sqrt(2e-4)) and found.degrees == 1
    crowd = [Recipe(tuple(seeds(number))) for number in (30, 40)]
    alone = compare(seeds(1)[0], seeds(5, a=0.4)[0], others=crowd)
    assert alone.winner is None and alone.asymptote_difference.degrees == 4


def test_chip_hours_of_a_cpu_decide_nothing():
    def on_a_cpu(fits):
        return [
            dataclasses.replace(
                fit, curve=dataclasses.replace(fit.curve, is_wall_time=True)
            )
            for fit in fits
        ]

    result = compare(on_a_cpu(seeds(10)), on_a_cpu(seeds(20, a=0.4)))
    assert result.winner is None and "wall time" in result.reason
    assert result.paper_rule.winner is None


def test_runs_without_a_plateau_are_compared_where_all_end():
    early = X[X < 2600]
    a, b = seeds(8, x=early, a=0.61), seeds(19, x=early, a=0.45)
    result = compare(a, b)
    assert result.identified == (False, False) and result.paper_rule.winner is None
    assert "not decided: A of a and b is not identified" in result.paper_rule.says
    assert result.asymptote_difference is None
    assert result.winner == "a" and result.reason.startswith("the pass rate")


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
    """Rank 1 = nobody is higher for certain, by 1.64 sqrt(2) 0.015 = 0.035."""
    equal = {str(i): run(i) for i in range(4)}
    assert {row.rank for row in compare_many(equal).rows} == {1}
    steps = {str(a): run(a=a) for a in (0.52, 0.55, 0.6)}
    ranks = {row.name: row.rank for row in compare_many(steps).rows}
    assert ranks == {"0.6": 1, "0.55": 2, "0.52": 2}
    ranks = {row.name: row.rank for row in compare_many(steps, run_sd=0.0).rows}
    assert ranks == {"0.6": 1, "0.55": 2, "0.52": 3}
    # Nearer than the margin of equal recipes: seeds alone move A by 0.015.
    close = {str(a): run(a=a) for a in (0.6, 0.61)}
    assert {row.rank for row in compare_many(close).rows} == {1}


def test_no_exponent_is_compared_where_no_plateau_fits_both():
    apart = compare(seeds(10), seeds(20, a=0.45))
    assert apart.shared_asymptote is None and apart.exponents_at_shared is None
    assert apart.log_exponent_difference is None
    near = compare(seeds(10), seeds(20, a=0.612))
    assert near.log_exponent_difference is not None
    assert "B at the shared A" in comparison_text(near)
    early = compare(run(0, x=X[:7]), run(1))
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
    late = [fit_curve(run(i).curve, fit_from=X[3 + i]) for i in range(2)]
    assert pool_seeds(late).fit.num_left_out == 3 + 4
    with pytest.raises(CurveError, match="one law"):
        pool_seeds([run(), fit(X, rate(X), law="power")])


def test_pooled_tests_carry_the_spread_between_seeds():
    tests = [extrapolate_curve(run(i).curve, fractions=(0.05, 0.5)) for i in range(3)]
    pooled = pool_extrapolations(tests)
    (found,) = [
        each
        for each in pooled.predictions
        if (each.law, each.fraction) == ("sigmoid", 0.5)
    ]
    errors = [test.get("sigmoid", 0.5).last_error for test in tests]
    assert found.num_seeds == 3 and found.last_error == pytest.approx(np.mean(errors))
    reach = 2.919986 * np.std(errors, ddof=1) / np.sqrt(3)  # t(2) at 95 %
    assert found.last_error_interval.high == pytest.approx(np.mean(errors) + reach)
    few = pooled.predictions[0]  # sigmoid on 5 %: two points
    assert few.num_seeds == 0 and few.mean_error is None
    alone = pool_extrapolations(tests[:1])
    assert alone.warnings == ("one seed: what seeds change is not measured",)
    assert "1 seed of one recipe" in pooled_extrapolation_text(alone)
    with pytest.raises(CurveError, match="same laws, parts"):
        pool_extrapolations([tests[0], extrapolate_curve(run().curve)])


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
    rival = table.get("power", 0.5)
    assert rival.mean_absolute_error > half.mean_absolute_error
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


def test_runs_that_are_fewer_and_spread_further_decide_no_more_often():
    """Five runs alike and two far apart: by the pooled spread 40 % would be decided."""
    generator, decided = np.random.default_rng(5), []
    limits = np.zeros((5, 2))
    for _ in range(2000):
        many, few = generator.normal(0, 1e-3, 5), generator.normal(0, 0.03, 2)
        found = difference(
            RecipeSample(many, limits),
            RecipeSample(few, limits[:2]),
            level=0.95,
            run_sd=0.015,
        )
        decided.append(found.sign != 0)
    assert np.mean(decided) <= 0.07  # 5 %, and four standard errors


def test_a_run_and_its_copy_are_no_two_seeds():
    """They have no spread, and by a spread of 0 the higher run would always win."""
    first, second = run(1), run(2, a=0.58)
    begun = fit(X[:40], first.curve.y[:40], initial_reward=0.25)
    for copied in (first, begun):
        found = compare([first, copied], [second, second])
        assert found.winner is None and found.paper_rule.winner is None
        assert "one run and another of a have the same evaluations" in found.reason
        assert Recipe((first, copied)).asymptotes is None
        assert Recipe((first, copied)).rates_at(100.0) is None
        with pytest.raises(CurveError, match="the same evaluations"):
            pool_seeds([first, copied])
    tests = [extrapolate_curve(first.curve, laws=["power"], fractions=[0.5])] * 2
    with pytest.raises(CurveError, match="the same evaluations"):
        pool_extrapolations(tests)


def test_runs_of_one_seed_get_a_warning():
    (warning,) = compare(seeded(seeds(1), [1, 2, 1]), seeds(5)).warnings
    assert warning.startswith("runs of a have one seed, 1: they may differ less")


def test_equal_recipes_that_end_elsewhere_are_compared_where_both_have_data():
    """A saturating exponential: its sigmoids end higher, the earlier the data end."""

    def runs(first, count, every=400.0):
        x = every * np.arange(1, count + 1)
        level = 0.61 + 0.003 * np.random.default_rng(first).normal(size=3)
        noise = np.random.default_rng(first).normal(0.0, 0.005, (3, 40))[:, :count]
        y = 0.25 + (level[:, None] - 0.25) * -np.expm1(-x / 2500.0) + noise
        return [fit(x, each, initial_reward=0.25) for each in y]

    short, long, cut = runs(3, 20), runs(7, 40), runs(7, 20)
    found, by_hand = compare(short, long), compare(short, cut)
    assert found.winner is by_hand.winner is None
    assert found.asymptote_difference == by_hand.asymptote_difference
    assert found.rate_difference == by_hand.rate_difference is not None
    for others, end in (
        (long, 8000.0),
        (runs(7, 21), 8000.0),
        (runs(7, 20, every=408.0), 8160.0),  # within 2 %
        ([*runs(7, 20, every=408.0)[:2], long[2]], 8160.0),
    ):
        (_, ours), *_ = measured_alike((tuple(short), tuple(others)), ("a", "b"))
        assert max(each.x_last for each in ours) == end
    assert found.compared_at == 8000.0 and by_hand.warnings == ()
    assert found.warnings[0].startswith("the runs end at 8,000 to 16,000")
    (warning,) = compare_many({"a": run(1, x=X[:30]), "b": run(2)}).warnings
    assert "that end at 9,633 to 16,000 are ranked" in warning


@pytest.mark.parametrize(
    "first, reason",
    [(7, "a run up to there: 1 point"), (9, "a run has no evaluation up to there")],
)
def test_nothing_is_decided_where_a_long_run_has_too_few_evaluations(first, reason):
    sparse = fit(X[first::6], rate(X[first::6]), initial_reward=0.25)
    short = fit(X[:8], rate(X[:8]), initial_reward=0.25)
    found = compare([short, run(1)], [sparse, run(2)])
    assert found.winner is None and reason in found.reason


def test_a_fall_behind_the_end_of_other_runs_counts():
    y = rate(X, a=0.8)
    y[35:] = np.linspace(y[34], 0.2, 15)
    fallen = [fit(X, y, initial_reward=0.25), run(1, a=0.8)]
    found = compare(fallen, [run(2, x=X[:25]), run(3, x=X[:25])])
    assert found.winner is None and found.reason == "not decided: a does not climb"


def test_a_spread_that_is_given_and_not_used_is_told():
    pair = seeds(10, 2), seeds(20, 2)
    assert "--run-sd is not used" in compare(*pair, run_sd=0.1).warnings[0]
    assert compare(*pair).warnings == compare(run(0), run(1), run_sd=0.1).warnings == ()


def test_a_few_recipes_are_compared_each_with_each_and_many_with_the_best():
    """All pairs share the error of 10 %, and the tests of A and of B halve it again."""
    heights = {"low": 0.5, "best": 0.7, "next": 0.65, "third": 0.6, "last": 0.4}
    fits = {name: run(i, a=a) for i, (name, a) in enumerate(heights.items())}
    recipes = {name: (fit,) for name, fit in fits.items()}
    found = compare_recipes(fits, recipes)
    order = ["best", "next", "third", "low", "last"]
    assert [row.name for row in found.runs.rows] == order
    assert [pair.names for pair in found.pairs] == [("best", n) for n in order[1:]]
    for pair in found.pairs:
        assert pair.asymptote_difference.level == pytest.approx(1 - 0.1 / 10 / 2)
    cut = compare_recipes(fits, recipes, most_pairs=3)
    assert [pair.names for pair in cut.pairs] == [("best", n) for n in order[1:4]]
    assert cut.num_left_out == 1
    few = {name: fits[name] for name in ("low", "best", "next")}
    found = compare_recipes(few, {name: recipes[name] for name in few})
    assert [pair.names for pair in found.pairs] == [
        *(("low", "best"), ("low", "next"), ("best", "next"))
    ]
    assert found.pairs[0].asymptote_difference.level == pytest.approx(1 - 0.1 / 3 / 2)


def test_a_verdict_is_a_sentence_with_its_numbers_and_the_rule_another():
    better = compare(seeds(20, a=0.7), seeds(10), names=("high", "low"))
    said = verdict_text(better)
    assert re.match(
        r"high against low: high is better: A is higher \(high - low: A \+0\.\d{4} "
        r"\[\+0\.\d{4}, \+0\.\d{4}\]\)\. The paper's rule, .* too: high\.$",
        said,
    )
    single = verdict_text(compare(run(1, a=0.7), run(2), names=("high", "low")))
    assert "high against low: one run each: not decided (high - low: A +0.0" in single
    assert single.endswith("too: high.")
