"""Pictures of forecasts against what came: a run under way, the extrapolation test."""

from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_jax.scaling.axes import (
    COLOURS,
    GREEN,
    GREY,
    HEIGHT,
    RED,
    axis_label,
    limit_rates,
    make_axes,
    plain_frame,
    set_compute_axis,
)
from scalerl_jax.scaling.checking import Status
from scalerl_jax.scaling.extrapolate import Extrapolation, Prediction
from scalerl_jax.scaling.figure import (
    compute_grid,
    draw_alone,
    draw_errors,
    finish,
    headline,
    limit_height,
)
from scalerl_jax.scaling.laws import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_extrapolation(found: Extrapolation, *, title: str = "") -> "Figure":
    """Each law's curve from each part of the data, over the points it foretold.

    One panel per fraction: the fitted part is shaded, held-out points are hollow.
    """
    from matplotlib.figure import Figure

    count = len(found.fractions)
    figure = Figure(figsize=(4.2 * count, 4.6), layout="constrained")
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    curve = found.curve
    for axes, fraction in zip(panels, found.fractions, strict=True):
        plain_frame(axes)
        left = set_compute_axis(axes, float(curve.x[0]), 1.05 * float(curve.x[-1]))
        seen = curve.x <= fraction * curve.x[-1]
        draw_errors(axes, curve, "black")
        # A point at 0 or 1 lies on the end of the axis, and is drawn whole.
        style: dict[str, Any] = {"color": "black", "markersize": 3.5, "clip_on": False}
        axes.plot(curve.x[seen], curve.y[seen], "o", **style)
        axes.plot(curve.x[~seen], curve.y[~seen], "o", fillstyle="none", **style)
        for place, law in enumerate(found.laws):
            prediction = found.get(law, fraction)
            _draw_prediction(axes, prediction, COLOURS[place], curve.x, left)
        axes.axvspan(
            left, fraction * float(curve.x[-1]), color=GREY, alpha=0.07, linewidth=0
        )
        limit_rates(axes, curve.y.tolist(), above=0.24)
        axes.set_title(f"fitted on {100 * fraction:.0f} %", fontsize=9.5, loc="left")
        axes.set_xlabel(axis_label(found.x_name))
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),  # below: the points may lie anywhere
            ncols=2,
            fontsize=7.5,
            edgecolor="none",
            title="mean |error| of the prediction",
            title_fontsize=7.5,
        )
    panels[0].set_ylabel(axis_label(found.y_name))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _draw_prediction(
    axes: "Axes", prediction: Prediction, colour: str, x: Array, left: float
) -> None:
    """One law's curve, dashed where it foretells."""
    error = prediction.mean_absolute_error
    if error is None or prediction.last_predicted is None:
        return
    name = f"{prediction.law.replace('_', ' ')} {error:.3f}"
    style: dict[str, Any] = {"color": colour, "linewidth": 1.4}
    if prediction.law == "sigmoid":
        style |= {"zorder": 3, "linewidth": 2.0}  # above its rivals
    start = prediction.fit_until
    if prediction.fit is None:  # the last value
        level = [prediction.last_predicted] * 2
        axes.plot([start, x[-1]], level, linestyle=":", label=name, **style)
        return
    grid = compute_grid(prediction.fit, left, float(x[-1]))
    y = prediction.fit.forecast(grid)
    axes.plot(grid[grid <= start], y[grid <= start], **style)
    axes.plot(
        grid[grid >= start], y[grid >= start], linestyle="--", label=name, **style
    )


def draw_status(status: "Status") -> "Figure":
    """A run under way: its fit, and below it what its first half foretold of the rest.

    The lower panel shows measured minus foretold pass rates, and the band foretold.
    """
    result, checks = status.fit, status.checks
    assert result is not None, "asked by the caller"
    figure, axes = make_axes(
        height=6.4 if checks else HEIGHT, share=0.66 if checks else 1.0
    )
    right = max(status.horizon or 0.0, 1.05 * status.x_last)
    left = set_compute_axis(axes, float(result.whole_curve.x[0]), right)
    limit_height(axes, [result], right)
    handles = draw_alone(axes, result, left, right)
    title = headline(result, status.name)
    if status.alarm is not None:
        title = f"ALARM: {status.alarm.split(', and')[0]}"
    finish(axes, [result], handles, title)
    if checks:
        below = figure.add_axes((0.1, 0.08, 0.87, 0.25))
        plain_frame(below)
        x = np.array([check.x for check in checks])
        foretold = np.array([check.predicted for check in checks])
        error = np.array([check.actual for check in checks]) - foretold
        bands = [check.band for check in checks]
        low = np.array([band.low for band in bands]) - foretold
        high = np.array([band.high for band in bands]) - foretold
        outside = np.array([check.side != 0 for check in checks])
        until = f"foretold up to {status.fitted_until:.4g}"
        name = f"{100 * status.alarm_level:g} % band {until}"
        below.fill_between(x, low, high, color=GREEN, alpha=0.2, label=name)
        below.axhline(0.0, color=GREEN)
        below.plot(x[~outside], error[~outside], "o", color="black", markersize=4)
        name = "outside" if outside.any() else None
        below.plot(x[outside], error[outside], "o", color=RED, label=name, markersize=5)
        below.legend(loc="best", fontsize=8, framealpha=0.9, edgecolor="none")
        below.set_ylabel("actual - foretold")
        below.set_xlabel(axis_label(result.x_name))
        axes.set_xlabel("")
    return figure
