"""Reading: what is accepted, and what each refusal says."""

import json

import numpy as np
import pytest

from scalerl_jax.scaling import CurveError, fit, fit_curve, load_curve


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(step, rate, **more):
    return {
        "step": step,
        "compute_chip_hours": step / 100,
        "pass_rate": rate,
        "pass_rate_se": 0.01,
        **more,
    }


def test_the_row_of_step_zero_is_the_initial_reward(tmp_path):
    write_rows(tmp_path / "evals.jsonl", [row(0, 0.2), row(10, 0.3), row(20, 0.4)])
    curve = load_curve(tmp_path)
    assert curve.r0 == 0.2
    np.testing.assert_array_equal(curve.x, [0.1, 0.2])
    np.testing.assert_array_equal(curve.y_se, [0.01, 0.01])
    assert curve.warnings == ()


def test_an_evaluation_without_a_standard_error_is_a_point_like_the_others(tmp_path):
    # One judged prompt has no standard error; the errors of all are then left out.
    rows = [row(10 * n, 0.2 + 0.6 / (1 + (5 / max(n, 1e-9)) ** 2)) for n in range(13)]
    for alone in (0, 7):
        lacking = [*rows]
        lacking[alone] = rows[alone] | {"pass_rate_se": None}
        write_rows(tmp_path / "evals.jsonl", lacking)
        curve = load_curve(tmp_path)
        assert curve.x.size == 12 and curve.r0 == 0.2
        assert curve.y_se is None and curve.r0_se is None
        (said,) = curve.warnings
        assert "pass_rate_se has no number in 1 of 13 points" in said
        write_rows(tmp_path / "evals.jsonl", rows)
        whole = fit_curve(load_curve(tmp_path))
        found = fit_curve(curve)
        assert found.asymptote == pytest.approx(0.8, abs=0.01)
        assert found.asymptote == pytest.approx(whole.asymptote, abs=0.01)


def test_a_resumed_run_replaces_the_rows_it_evaluates_again(tmp_path):
    rates = [(0, 0.2), (10, 0.3), (20, 0.4), (30, 0.9), (20, 0.41), (30, 0.5)]
    write_rows(tmp_path / "evals.jsonl", [row(*pair) for pair in rates])
    curve = load_curve(tmp_path)
    np.testing.assert_array_equal(curve.y, [0.3, 0.41, 0.5])
    assert "2 rows left out" in curve.warnings[0]


def test_columns_of_a_csv_are_named(tmp_path):
    file = tmp_path / "curve.csv"
    file.write_text("gpu_hours, score\n0,0.1\n5,0.2\n9,0.4\n")
    curve = load_curve(file, x="gpu_hours", y="score")
    assert (curve.r0, curve.x_name, curve.y_name) == (0.1, "gpu_hours", "score")
    np.testing.assert_array_equal(curve.x, [5.0, 9.0])
    with pytest.raises(CurveError, match="'hours'; choose --x from: gpu_h"):
        load_curve(file, x="hours", y="score")


GOOD_X = [0.0, 1.0, 2.0, 3.0, 4.0]
GOOD_Y = [0.1, 0.2, 0.3, 0.35, 0.4]


@pytest.mark.parametrize(
    "x, y, message",
    [
        pytest.param(GOOD_X[:4], GOOD_Y[:4], "at least 4 are needed", id="few"),
        pytest.param(GOOD_X[1:], GOOD_Y[1:], "at least 5 .* give --r0", id="few, free"),
        pytest.param([0, 1, 3, 2, 4], GOOD_Y, "point 4: .* not increase", id="order"),
        pytest.param([0, 1, 2, 2, 4], GOOD_Y, "= 2 appears twice", id="twice"),
        pytest.param([-1, 1, 2, 3, 4], GOOD_Y, "is negative", id="negative compute"),
        pytest.param(
            GOOD_X, [0.1, float("nan"), 0.3, 0.4, 0.5], "point 2: .* nan", id="nan"
        ),
        pytest.param([0, 1, 2, 3, float("inf")], GOOD_Y, "= inf", id="inf"),
        pytest.param(
            GOOD_X, [10, 20, 30, 40, 50], "--map-rewards 0 100 if", id="percent"
        ),
        pytest.param(
            GOOD_X, [-0.5, 0, 0.1, 0.2, 0.3], r"\(reward \+ 1\) / 2", id="rewards"
        ),
        pytest.param(GOOD_X, [0.5] * 5, "constant curve", id="constant"),
        pytest.param(GOOD_X, GOOD_Y[:3], "same length", id="lengths"),
        pytest.param([], [], "no points", id="empty"),
    ],
)
def test_bad_curves_are_refused_with_the_way_out(x, y, message):
    with pytest.raises(CurveError, match=message):
        fit(x, y)


@pytest.mark.parametrize(
    "settings, message",
    [
        pytest.param(
            {"initial_reward": 35.0}, "--r0 = 35 is outside", id="r0 in percent"
        ),
        pytest.param({"level": 90}, "level = 90; give a share", id="level in percent"),
        pytest.param({"fit_from": 9.0}, "leaves out every point", id="start too late"),
        pytest.param({"fit_from": 2.0}, "lower --from", id="start leaves too few"),
    ],
)
def test_bad_settings_are_refused_with_the_way_out(settings, message):
    with pytest.raises(CurveError, match=message):
        fit(GOOD_X, GOOD_Y, **settings)
