"""Pictures: what is on the axes, and where the legend goes."""

import numpy as np
import pytest

from scalerl_jax.scaling import compare_many, extrapolate_curve, fit_curve, make_curve
from scalerl_jax.scaling.checking import assess
from scalerl_jax.scaling.plots import (
    draw_extrapolation,
    draw_fits,
    draw_linearised,
    draw_status,
)

X = np.linspace(0.0, 100.0, 41)


def climbing(asymptote=1.0, noise=0.1, seed=0, reverse=False):
    """A curve to 1 with noise that leaves points in every corner."""
    y = 0.2 + (asymptote - 0.2) / (1 + (20.0 / np.maximum(X, 1e-9)) ** 2)
    y = np.clip(y + np.random.default_rng(seed).normal(0, noise, X.size), 0, 1)
    return make_curve(X, y[::-1].copy() if reverse else y)


def rate_axes(figure):
    return [axes for axes in figure.axes if "actual" not in axes.get_ylabel()]


@pytest.mark.parametrize("noise", [0.005, 0.1, 0.3])
@pytest.mark.parametrize("reverse", [False, True])
def test_no_axis_of_pass_rates_goes_beyond_0_and_1(noise, reverse):
    curves = [climbing(noise=noise, seed=seed, reverse=reverse) for seed in range(3)]
    fits = [fit_curve(curve) for curve in curves]
    figures = [draw_fits(fits[:1], ["a"]), draw_fits(fits, ["a", "b", "c"])]
    figures += [draw_extrapolation(extrapolate_curve(curves[0]))]
    figures += [draw_status(assess(curves[0]))]
    for axes in (axes for figure in figures for axes in rate_axes(figure)):
        low, high = axes.get_ylim()
        assert 0.0 <= low < high <= 1.0


def test_a_legend_that_has_no_corner_goes_below_the_axes():
    fits = [fit_curve(climbing(1.0, 0.3, seed)) for seed in range(9)]
    figure = draw_fits(fits, [f"recipe {i}" for i in range(9)])
    (legend,) = figure.legends
    assert rate_axes(figure)[0].get_legend() is None
    figure.draw_without_rendering()
    lowest = rate_axes(figure)[0].xaxis.label.get_window_extent().y0
    assert legend.get_window_extent().y1 < lowest


def test_the_slopes_of_runs_with_another_plateau_are_not_drawn():
    fits = {str(a): fit_curve(climbing(a, 0.005)) for a in (0.5, 0.9, 0.905)}
    figure = draw_linearised(compare_many(fits))
    (axes,) = figure.axes
    assert len(axes.lines) == 2 * 2  # points and line of two runs
    assert "1 with another A left out" in axes.get_title(loc="left")
