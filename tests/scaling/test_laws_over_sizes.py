"""Laws over model sizes and sweeps: constants of the papers put in and got back."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.scaling import CurveError
from scalerl_jax.scaling.isocompute import SweepRun, fit_isocompute, record_points
from scalerl_jax.scaling.laws_over_sizes import (
    compute_optimal,
    extrapolate_inter,
    extrapolate_intra,
    fit_chinchilla,
    fit_kaplan,
    fit_kaplan_one,
    fit_plateau,
    fit_tan,
)

SIZES = np.array([0.5, 1.5, 3, 7, 14, 32, 72]) * 1e9
SAMPLES = 512.0 * np.arange(1, 106)  # 105 evaluations, one per step of 512 samples

# k_max, N0 and E by size: the fits of Tan et al.'s repository on all of their data.
TAN_FITS = {
    "base, data": (
        0.13996,
        13.00e9,
        [0.0040, 0.0309, 0.0477, 0.0713, 0.1146, 0.1535, 0.1849],
    ),
    "base, compute": (
        0.13304,
        13.78e9,
        [0.0640, 0.2074, 0.3741, 0.7045, 1.0848, 1.5359, 1.8957],
    ),
    "instruct, compute": (
        0.12942,
        19.07e9,
        [0.0348, 0.1289, 0.2443, 0.4936, 0.8163, 1.2621, 1.6910],
    ),
}


def tan_curves(case, sigma=0.0):
    k_max, n0, intercepts = TAN_FITS[case]
    size, samples = np.repeat(SIZES, 105), np.tile(SAMPLES, 7)
    # 6 N T FLOPs, with some 3,000 tokens to a sample of 8 rollouts each.
    x = 6 * size * samples * 8 * 3000 if "compute" in case else samples
    k = k_max / (1 + n0 / size)
    error = 10 ** (-k * np.log10(x) + np.repeat(intercepts, 105))
    noise = np.random.default_rng(0).normal(0, sigma, error.size) if sigma else 0.0
    return size, x, np.clip(error + noise, 1e-3, 1.0)


@pytest.mark.parametrize("case", TAN_FITS)
def test_tans_published_constants_come_back(case):
    fit = fit_tan(*tan_curves(case), x_name=case)
    k_max, n0, intercepts = TAN_FITS[case]
    assert fit.converged and fit.identified
    assert fit.parameters["k_max"].value == pytest.approx(k_max, rel=1e-3)
    assert fit.parameters["N0"].value == pytest.approx(n0, rel=1e-3)
    found = [fit.parameters[f"E[{n / 1e9:g}B]"].value for n in SIZES]
    np.testing.assert_allclose(found, intercepts, atol=1e-3)
    assert fit.slope(7e9) == pytest.approx(k_max / (1 + n0 / 7e9), rel=1e-3)


@pytest.mark.parametrize("scale", [1e-5, 1e3])
def test_the_unit_of_model_sizes_changes_only_that_of_n0(scale):
    """Of models far smaller or larger than those of the paper, too."""
    size, x, error = tan_curves("base, data", sigma=0.01)
    papers, scaled = (fit_tan(size * each, x, error) for each in (1.0, scale))
    assert scaled.identified
    for name, unit in [("k_max", 1.0), ("N0", scale)]:
        expected, found = (fit.parameters[name] for fit in (papers, scaled))
        assert found.value == pytest.approx(unit * expected.value, rel=1e-4)
        assert found.interval.low == pytest.approx(
            unit * expected.interval.low, rel=1e-3
        )


def test_with_noise_tans_intervals_hold_the_truth():
    size, x, error = tan_curves("base, data", sigma=0.01)
    fit = fit_tan(size, x, error)
    for name, truth in [("k_max", 0.13996), ("N0", 13.0e9)]:
        interval = fit.parameters[name].interval
        assert interval.low < truth < interval.high
    assert fit.sigma == pytest.approx(0.01, rel=0.1)
    assert (error - fit.predict(size, x)).std() == pytest.approx(0.01, rel=0.1)
    with pytest.raises(ValueError, match="E is known for the sizes"):
        fit.predict(8e9, 512.0)


def test_tans_extrapolations_judge_points_that_were_not_fitted():
    curves = tan_curves("base, data", sigma=0.003)
    intra = extrapolate_intra(*curves, num_first=25)
    assert (intra.num_fitted, intra.num_held_out) == (7 * 25, 7 * 80)
    assert intra.mean_absolute_error < 0.01
    inter = extrapolate_inter(*curves)
    assert (inter.num_held_out, inter.intercept_from) == (105, 105)
    late = extrapolate_inter(*curves, num_intercept=25)
    assert (late.num_held_out, late.intercept_from) == (80, 25)
    assert late.r_squared > 0.9
    size, x, error = curves
    error[-1] = 0.0  # every completion of the largest model is right
    for count in (None, 25):
        with pytest.raises(CurveError, match=f"point {x.size}: error = 0; "):
            extrapolate_inter(size, x, error, num_intercept=count)


def test_tans_form_with_a_plateau_gets_its_fitted_constants_back():
    # The "postopenai" fit of the same repository, instruct models, six sizes.
    alpha, beta, n0 = 0.19811442, 1.08917237, 5.0e8
    scales = [134654.508, 41373.284, 4782.9616, 1634.6561, 337.99171, 341.33125]
    offsets = [412176.126, 142838.367, 27170.3164, 19153.4951, 4333.03925, 4928.63528]
    size, x = np.repeat(SIZES[1:], 35), np.tile(SAMPLES[::3], 6)
    removed = np.repeat(scales, 35) / (x + np.repeat(offsets, 35))
    fit = fit_plateau(size, x, ((n0 / size) ** beta + removed) ** alpha)
    assert fit.converged and fit.identified
    assert fit.parameters["alpha"].value == pytest.approx(alpha, rel=0.02)
    assert fit.parameters["beta"].value == pytest.approx(beta, rel=0.02)
    assert fit.parameters["N0"].value == pytest.approx(n0, rel=0.02)
    for size, scale, offset in zip(SIZES[1:], scales, offsets, strict=True):
        label = f"{size / 1e9:g}B"
        assert fit.parameters[f"B[{label}]"].value == pytest.approx(scale, rel=0.02)
        assert fit.parameters[f"C[{label}]"].value == pytest.approx(offset, rel=0.02)


MODELS, TOKENS = (
    axis.ravel()
    for axis in np.meshgrid(np.geomspace(4e7, 1.6e10, 6), np.geomspace(2e8, 5e11, 6))
)


def test_chinchillas_law_gets_its_constants_back():
    # Hoffmann et al., section 3.3.
    loss = 1.69 + 406.4 / MODELS**0.34 + 410.7 / TOKENS**0.28
    fit = fit_chinchilla(MODELS, TOKENS, loss)
    values = {name: parameter.value for name, parameter in fit.parameters.items()}
    expected = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
    assert values == pytest.approx(expected, rel=1e-4)
    size, tokens = compute_optimal(fit, 5.76e23)
    assert 6 * size * tokens == pytest.approx(5.76e23)
    here = fit.predict(size, tokens)
    for step in (0.9, 1.1):  # at the same compute any other split is worse
        assert fit.predict(size * step, tokens / step) > here


def test_kaplans_laws_get_their_constants_back():
    # Kaplan et al., table 5 and equation 1.1.
    loss = ((8.8e13 / MODELS) ** (0.076 / 0.095) + 5.4e13 / TOKENS) ** 0.095
    both = fit_kaplan(MODELS, TOKENS, loss)
    assert both.parameters["alpha_N"].value == pytest.approx(0.076, rel=1e-4)
    assert both.parameters["D_c"].value == pytest.approx(5.4e13, rel=1e-3)
    np.testing.assert_allclose(both.predict(MODELS, TOKENS), loss, rtol=0.0, atol=1e-8)
    one = fit_kaplan_one(MODELS, (8.8e13 / MODELS) ** 0.076)
    assert one.parameters["X_c"].value == pytest.approx(8.8e13, rel=1e-4)
    with pytest.raises(ValueError, match="2 inputs; the law takes x"):
        one.predict(1e9, 1e9)


def test_a_law_that_the_data_do_not_fix_says_so():
    # All runs with 20 tokens per parameter: the two terms cannot be told apart.
    size = np.geomspace(4e7, 1.6e10, 12)
    loss = 1.69 + 406.4 / size**0.3 + 410.7 / (20 * size) ** 0.3
    noise = np.exp(np.random.default_rng(1).normal(0, 0.005, 12))
    fit = fit_chinchilla(size, 20 * size, loss * noise)
    assert not fit.identified and "not fixed by the data" in fit.warnings[0]
    assert '"identified": false' in fit.to_json()


def test_losses_that_hardly_fall_or_rise_end_in_a_verdict():
    size = np.geomspace(4e7, 1.6e10, 12)
    assert not fit_kaplan_one(size, 3.0 * size**-0.0004).identified
    sizes, tokens = (
        np.repeat(10.0 ** np.arange(6, 11), 5),
        np.tile(10.0 ** np.arange(8, 13), 5),
    )
    loss = 1.7 + 400.0 / sizes**0.34 + 410.0 / tokens**0.28
    assert not fit_chinchilla(sizes, tokens, loss[::-1]).identified


def test_sizes_that_are_alike_in_six_digits_are_two_sizes():
    size = np.repeat([1_234_567_000.0, 1_234_567_890.0, 3e6], 20)
    x = np.tile(np.geomspace(1e10, 1e13, 20), 3)
    error = np.repeat([0.9, 0.5, 0.9], 20) * (x / 1e10) ** (-0.1 / (1.0 + 3e6 / size))
    found = fit_tan(size, x, error)
    np.testing.assert_allclose(found.predict(size, x), error, rtol=1e-4)
    names = ["k_max", "N0", "E[0.003B]", "E[1.234567B]", "E[1.23456789B]"]
    assert list(found.parameters) == names
    assert len(fit_plateau(size, x, error).parameters) == 3 + 2 * 3


@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param(
            lambda: fit_kaplan_one([1.0, 2, -3], [3.0, 2, 1]), "above 0", id="negative"
        ),
        pytest.param(
            lambda: fit_kaplan_one([1.0, 2, 3, 4], [0.2, 0.3, 0.4, 0.5]),
            "does not fall as x grows, from 0.2 to 0.5",
            id="a pass rate",
        ),
        pytest.param(
            lambda: fit_kaplan_one([1.0, 2], [3.0, 2]), "at least 3", id="few"
        ),
        pytest.param(
            lambda: fit_tan([7e9] * 5, range(1, 6), [0.5] * 5), "one model", id="size"
        ),
        pytest.param(
            lambda: fit_tan([7e9, 1e9] * 5, range(1, 11), [50.0] * 10),
            "1 - pass rate",
            id="percent",
        ),
        pytest.param(
            lambda: fit_tan([7e9, 1e9] * 5, range(1, 11), [0.5] * 10),
            "constant curves",
            id="constant",
        ),
        pytest.param(
            lambda: fit_plateau([7e9, 1e9] * 5, range(1, 11), [0.5] * 10),
            "needs three",
            id="two sizes",
        ),
    ],
)
def test_bad_points_are_refused_with_the_way_out(call, message):
    with pytest.raises(CurveError, match=message):
        call()


def test_record_points_by_hand():
    rewards = [0.11, 0.14, 0.21, 0.19, 0.22, 0.30, 0.29, 0.41]
    assert record_points(rewards, 0.1).tolist() == [0, 2, 5, 7]
    assert record_points(rewards, 0.0).tolist() == [0, 1, 2, 4, 5, 7]


def sweep(sigma=0.004):
    """Runs whose plateau and midpoint rise with n, so that n* rises with C."""
    generator = np.random.default_rng(0)
    runs = []
    for i, n in enumerate([8, 16, 32, 64, 128]):
        compute = np.geomspace(2e3, 2e7, 40)
        reward = 0.3 + (0.15 + 0.06 * i) / (1 + (2e4 * 4.0**i / compute) ** 1.2)
        noise = generator.normal(0, sigma, 40)
        runs.append(
            SweepRun(
                rollouts_per_prompt=n,
                prompts_per_step=32,
                compute=compute,
                reward=reward + noise,
            )
        )
    return runs


def test_the_best_number_of_rollouts_is_that_of_the_true_envelope():
    found = fit_isocompute(sweep())
    x = np.geomspace(1e4, 1e7, 7)
    rewards = [
        0.3 + (0.15 + 0.06 * i) / (1 + (2e4 * 4.0**i / x) ** 1.2) for i in range(5)
    ]
    truth = np.array([8, 16, 32, 64, 128])[np.argmax(rewards, axis=0)]
    assert np.all(np.abs(np.log2(found.optimal(x)) - np.log2(truth)) <= 1.0)
    assert np.all(np.diff(found.optimal(x)) >= 0)
    everything = fit_isocompute(sweep(), records_only=False)
    gap = np.log2(everything.optimal(x)) - np.log2(found.optimal(x))
    assert np.all(np.abs(gap) < 0.7)  # the paper: the same curve, only noisier


def test_an_n_does_not_win_because_the_runs_of_others_have_ended():
    """n of 2 is the best everywhere, climbs within few bins, and ends first."""
    runs = []
    for place, n in enumerate((2, 4, 8, 16)):
        compute = np.arange(16.0 * n, 5_000 + 1_000 * place, 16 * n)
        reward = 0.3 + (0.5 - 0.03 * place) / (1 + (200 * 2.0**place / compute) ** 3)
        runs.append(
            SweepRun(
                rollouts_per_prompt=n,
                prompts_per_step=16,
                compute=compute[compute > 500],
                reward=reward[compute > 500],
            )
        )
    assert len(record_points(runs[0].reward, 0.02)) < 5
    found = fit_isocompute(runs)
    assert found.tested == [2, 4, 8, 16] and not found.warnings
    np.testing.assert_allclose(found.optimal([1e3, 3e3, 4.9e3]), 2.0, atol=0.05)
    assert found.allocate(6_000.0).beyond_data
    flat = dataclasses.replace(runs[0], reward=np.full_like(runs[0].reward, 0.5))
    with pytest.raises(CurveError, match=r"no run with rollouts_per_prompt = 2 can"):
        fit_isocompute([flat, *runs[1:]])


def test_an_n_of_more_runs_than_another_gets_a_warning():
    runs = sweep()
    assert not fit_isocompute(runs).warnings
    (warning,) = fit_isocompute([*runs, runs[0]]).warnings
    assert warning.startswith("n = 8 has 2 runs and n = 16 has 1: the best of more")


def test_a_budget_is_spent_on_rollouts_then_prompts_then_steps():
    found = fit_isocompute(sweep())
    spent = found.allocate(1e6)
    n, prompts, steps = (
        spent.rollouts_per_prompt,
        spent.prompts_per_step,
        spent.steps,
    )
    assert n == 2 ** round(np.log2(spent.optimal)) and prompts == 32
    assert steps == 1e6 // (n * prompts) and not spent.beyond_data
    assert found.allocate(1e8, prompts_per_step=64).beyond_data
    with pytest.raises(CurveError, match="do not pay one step"):
        found.allocate(100.0)


def test_a_sweep_of_one_value_of_n_is_refused_and_bad_runs_are_named():
    runs = sweep()
    with pytest.raises(CurveError, match="needs at least two values"):
        fit_isocompute(runs[:1])
    short = dataclasses.replace(runs[0], compute=[1.0, 2.0], reward=[0.1, 0.2])
    found = fit_isocompute([*runs, short])
    assert any("left out the run n = 8" in warning for warning in found.warnings)
