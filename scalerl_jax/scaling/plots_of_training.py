"""Picture of the training curves: metrics that runs log at steps, over compute."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_jax.scaling.plots import (
    COLOURS,
    MOST_NAMED,
    axis_label,
    label_of,
    legend_below,
    notation,
    plain_frame,
    set_compute_axis,
)
from scalerl_jax.scaling.records import Array
from scalerl_jax.scaling.run_details import TRAINING_CURVES
from scalerl_jax.scaling.tables import STEP_COLUMN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_MEANS = 80  # points of a line at most: steps are noisy, and each costs bytes
NUM_COLUMNS = 2
PANEL_HEIGHT, FOOT = 2.0, 0.55  # inches


def draw_training(
    training: Mapping[str, Mapping[str, Array]],
    *,
    names: Sequence[str],
    x_name: str,
    first: float,
) -> "Figure | None":
    """Draw reward, length and the like, a panel each and a line for each run.

    A point is the mean over the steps of an 80th of the axis.  The axis is the compute
    of the fits if all runs log it at each step, otherwise steps.  Returns None if
    nothing was logged.

    Args:
        training: columns of each run, as `read_details` returns them.
        names: of all runs, in the order of their colours.
        x_name: the x of the fits.
        first: the first x of a fit.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    logged = {name: each for name, each in training.items() if STEP_COLUMN in each}
    shown = [c for c in TRAINING_CURVES if any(c in each for each in logged.values())]
    if not shown:
        return None
    column = "x" if all("x" in each for each in logged.values()) else STEP_COLUMN
    if column == STEP_COLUMN:
        x_name, first = STEP_COLUMN, 1.0
    num_rows = -(-len(shown) // NUM_COLUMNS)
    height = PANEL_HEIGHT * num_rows + FOOT
    figure = Figure(figsize=(7.4, height))
    last = (float(np.nanmax(each[column])) for each in logged.values())
    right = 1.03 * max(first, *last)
    for place, curve in enumerate(shown):
        row, side = divmod(place, NUM_COLUMNS)
        bottom = (FOOT + PANEL_HEIGHT * (num_rows - 1 - row)) / height
        frame = (0.08 + 0.5 * side, bottom, 0.41, (PANEL_HEIGHT - 0.5) / height)
        axes = figure.add_axes(frame)
        _draw_panel(axes, curve, logged, column, names=names, ends=(first, right))
        axes.tick_params(labelsize=7.5)
        if place + NUM_COLUMNS >= len(shown):
            axes.set_xlabel(axis_label(x_name), fontsize=8.5)
        else:
            axes.tick_params("x", labelbottom=False)
    if len(names) > 1:
        lines = [
            Line2D([], [], color=_colour(name, names), label=label_of(name))
            for name in list(logged)[:MOST_NAMED]
        ]
        legend_below(figure.axes[0], lines, fontsize=8.5, frameon=False)
    return figure


def _colour(name: str, names: Sequence[str]) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _draw_panel(
    axes: "Axes",
    curve: str,
    logged: Mapping[str, Mapping[str, Array]],
    column: str,
    *,
    names: Sequence[str],
    ends: tuple[float, float],
) -> None:
    """Draw one column of the runs that log it."""
    plain_frame(axes)
    left = set_compute_axis(axes, *ends)
    space = np.geomspace if left > 0 else np.linspace
    edges = space(left, ends[1], NUM_MEANS + 1)
    shown: list[Array] = []
    for name, columns in logged.items():
        if curve in columns:
            x, y = means(columns[column], columns[curve], edges)
            shown.append(y)
            marker = "o" if x.size == 1 else ""
            style: dict[str, Any] = {"marker": marker, "linewidth": 1.1}
            axes.plot(x, y, color=_colour(name, names), **style)
    values = np.concatenate(shown)
    if values.size and values.min() >= 0.0:
        top = float(values.max())
        axes.set_ylim(0.0, 1.08 * top or 1.0)
        axes.yaxis.set_major_formatter(notation(top / 10.0 or 0.1, top))
    axes.set_title(TRAINING_CURVES[curve], loc="left", fontsize=9)


def means(x: Array, y: Array, edges: Array) -> tuple[Array, Array]:
    """Return the mean x and y of the points in each non-empty cell between edges."""
    known = np.isfinite(x) & np.isfinite(y) & (x >= edges[0]) & (x <= edges[-1])
    x, y = x[known], y[known]
    place = np.clip(np.searchsorted(edges, x, "right") - 1, 0, len(edges) - 2)
    count = np.bincount(place, minlength=len(edges) - 1)
    filled = count > 0
    sums = (np.bincount(place, each, minlength=len(edges) - 1) for each in (x, y))
    mean_x, mean_y = (each[filled] / count[filled] for each in sums)
    return mean_x, mean_y
