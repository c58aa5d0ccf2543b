"""Pictures: what is on the axes, and where the legend goes."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from scalerl_jax.scaling import compare_many, extrapolate_curve, fit_curve, make_curve
from scalerl_jax.scaling.checking import assess
from scalerl_jax.scaling.plots import (
    draw_extrapolation,
    draw_fits,
    draw_linearised,
    draw_status,
    to_png,
    to_svg,
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
    flat = 0.5 + np.random.default_rng(0).normal(0, 0.005, X.size)
    fits["flat"] = fit_curve(make_curve(X, flat))
    figure = draw_linearised(compare_many(fits))
    (axes,) = figure.axes
    assert len(axes.lines) == 2 * 2  # points and line of two runs
    for line in axes.get_legend().get_texts():
        assert re.match(r"0\.90?5?: B \d\.\d\d \[\d\.\d\d, \d\.\d\d\]", line.get_text())
    assert "2 with another A or none left out" in axes.get_title(loc="left")


def test_no_two_lines_of_a_legend_have_one_colour():
    """Of twelve runs the last are among the best, with colours of the first."""
    fits = {f"run {i}": fit_curve(climbing(0.85, 0.02, i)) for i in range(12)}
    figure = draw_linearised(compare_many(fits), names=list(fits))
    (legend,) = figure.legends or [figure.axes[0].get_legend()]
    colours = [line.get_color() for line in legend.get_lines()]
    assert len(colours) == len(set(colours)) == 10
    title = figure.axes[0].get_title(loc="left")
    assert "(of 12 runs, the legend names 10)" in title


def test_a_name_of_a_run_is_drawn_as_it_is_spelled():
    """A "$" begins no formula, and what an SVG file cannot hold is left out."""
    names = [r"$\frac{x$", "_under\x1b\ud800"]
    fits = [fit_curve(climbing(1.0, 0.01, seed)) for seed in range(2)]
    figure = draw_fits(fits, names, title=names[1])
    assert to_png(figure).startswith(b"\x89PNG")
    drawn = ElementTree.fromstring(to_svg(figure))
    said = "".join(drawn.itertext())
    assert r"$\frac{x$: A " in said and "_under  : A " in said


def test_a_legend_of_long_names_covers_no_point():
    fits = [fit_curve(climbing(1.0, 0.005, seed)) for seed in range(2)]
    figure = draw_fits(fits, ["a" * 38, "b" * 300])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend() or figure.legends[0]
    frame = legend.get_window_extent()
    for line in axes.lines:
        if line.get_marker() == "o":
            points = axes.transData.transform(line.get_xydata())
            assert not any(frame.contains(*point) for point in points)


@pytest.mark.parametrize(
    "scale, ticks",
    [
        pytest.param(1.0, {"0", "50", "100"}, id="plain"),
        pytest.param(1e3, {"0", "50,000", "100,000"}, id="thousands"),
        pytest.param(1e6, {"0", "5e+07", "1e+08"}, id="large"),
        pytest.param(1e-6, {"0", "5e-05", "1e-04"}, id="small"),
    ],
)
def test_ticks_of_a_linear_axis_are_in_one_notation(scale, ticks):
    curve = make_curve(scale * X[20:], climbing(1.0, 0.01).y[19:])
    figure = draw_fits([fit_curve(curve)], ["a"])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_xscale() == "linear"
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks <= set(shown)
    assert axes.xaxis.get_offset_text().get_text() == ""
