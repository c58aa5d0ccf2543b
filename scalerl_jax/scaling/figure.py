"""Pictures in the form of ScaleRL's figures: points, curves, bands, asymptotes.

Solid where a curve was fitted, dashed where it is extrapolated; points that were not
fitted are hollow.  `forecast_figure.py` draws what was foretold.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scalerl_jax.scaling.axes import (
    COLOURS,
    GREY,
    ORANGE,
    axis_label,
    legend_below,
    limit_rates,
    make_axes,
    set_compute_axis,
)
from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.ranking import RunTable
from scalerl_jax.scaling.result import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Corner = Literal["lower right", "upper left", "lower left", "upper right"]
EXTRAPOLATION = 2.0  # the paper's forecasts reach 2 to 2.8 times the data
LONGEST_TITLE = 95  # letters of a line
MOST_NAMED = 10  # runs that get a line in the legend


def draw_fits(
    fits: Sequence[Fit],
    names: Sequence[str],
    *,
    title: str = "",
    until: float | None = None,
) -> "Figure":
    """One or several fitted runs over compute.

    One run is drawn with its band, asymptote, midpoint and R0; of several, each in a
    colour of its own with its asymptote.  Compute 0 has no place on a log axis, so R0
    is a dotted line.

    Args:
        fits: at least one; x of all is in one unit.
        names: of the runs.
        title: above the picture.
        until: compute up to which the curves are drawn; twice the data by default.
    """
    figure, axes = make_axes()
    right = until or max(
        result.x_last * (EXTRAPOLATION if result.climbs else 1.05) for result in fits
    )
    first = min(float(result.whole_curve.x[0]) for result in fits)
    left = set_compute_axis(axes, first, right)
    limit_height(axes, fits, right)
    if len(fits) == 1:
        handles = draw_alone(axes, fits[0], left, right)
        title = headline(fits[0], title)
    else:
        handles = []
        for place, (result, name) in enumerate(zip(fits, names, strict=True)):
            size = 3.0 if len(fits) <= MOST_NAMED else 1.2
            handle = _draw_among(axes, result, name, place, (left, right, size))
            handles += [handle] if place < MOST_NAMED else []
        if len(fits) > MOST_NAMED:
            title += f" (of {len(fits)} runs, the legend names {MOST_NAMED})"
    finish(axes, fits, handles, title)
    return figure


def draw_linearised(
    runs: RunTable, *, title: str = "", names: Sequence[str] | None = None
) -> "Figure":
    """ScaleRL's straight-line form: F(R) over compute, both logarithmic; slope B.

    All runs have the shared A, so that their slopes can be compared; a run that does
    not share it is left out.  Points whose pass rate is not between R0 and A have no
    value and are left out.  `names` gives runs the colours that they have in
    `draw_fits`; by default they go by rank.
    """
    if runs.shared_asymptote is None:
        raise CurveError("A is identified for no run: the runs have no A to share")
    figure, axes = make_axes()
    handles: list[Any] = []
    names = names or [row.name for row in runs.rows]
    rows = [row for row in runs.rows if row.linearised is not None]
    for place, row in enumerate(rows):
        assert row.linearised is not None and row.shared_exponent is not None
        colour = COLOURS[names.index(row.name) % len(COLOURS)]
        axes.plot(row.x, row.linearised, "o", color=colour, markersize=3.5, alpha=0.7)
        ends = row.x[[0, -1]]
        (line,) = axes.plot(
            ends,
            ends**row.shared_exponent,
            color=colour,
            label=f"{row.name}: B {row.shared_exponent:.2f}",
        )
        handles += [line] if place < MOST_NAMED else []
    left = min(float(row.x[0]) for row in rows)
    right = max(float(row.x[-1]) for row in rows)
    set_compute_axis(axes, left, 1.1 * right, log_axis=True)
    axes.set_yscale("log")
    heading = f"slope B at the shared A = {runs.shared_asymptote:.3f}"
    if len(rows) < len(runs.rows):
        heading += f" ({len(runs.rows) - len(rows)} with another A left out)"
    finish(axes, [row.fit for row in rows], handles, f"{title}  {heading}".strip())
    axes.set_ylabel("F(R) = C_mid^B / ((A - R0) / (R - R0) - 1)")
    return figure


def limit_height(axes: "Axes", fits: Sequence[Fit], right: float) -> None:
    """Show points, R0 and identified A, with some air; not the whole band."""
    shown: list[float] = []
    for result in fits:
        curve = result.whole_curve
        errors = 0.0 if curve.y_se is None else curve.y_se
        shown += [*(curve.y - errors), *(curve.y + errors), *_levels(result)]
        if result.climbs:
            shown.append(float(result.predict(right)))
    limit_rates(axes, shown)


def _levels(result: Fit) -> list[float]:
    """R0 and the top of A's interval, where they have meaning."""
    levels = []
    if "R0" in result.parameters:
        levels.append(result.initial_reward)
    if result.identified and "A" in result.parameters:
        levels += [result.asymptote, result.asymptote_interval.high or 0.0]
    return levels


def compute_grid(result: Fit, left: float, right: float) -> Array:
    """Compute at which a curve is drawn; the end of the data is among it."""
    space = np.geomspace if left > 0 else np.linspace
    grid = space(max(left, 0.0), right, 240)
    return np.unique(np.append(grid, result.x_last))


def draw_errors(axes: "Axes", curve: Curve, colour: str) -> None:
    """One standard error up and down, where they are known."""
    if curve.y_se is not None:
        style = {"fmt": "none", "ecolor": colour, "elinewidth": 0.9, "alpha": 0.45}
        axes.errorbar(curve.x, curve.y, yerr=curve.y_se, zorder=2, **style)


def _draw_points(axes: "Axes", result: Fit, colour: str, size: float) -> Any:
    """The evaluations; those that were not fitted hollow."""
    whole, used = result.whole_curve, result.curve
    draw_errors(axes, whole, colour)
    early = ~np.isin(whole.x, used.x)
    # A point at 0 or 1 lies on the end of the axis, and is drawn whole.
    style = {"color": colour, "markersize": size, "linestyle": "none", "zorder": 4}
    style["clip_on"] = False
    if early.any():
        axes.plot(whole.x[early], whole.y[early], "o", fillstyle="none", **style)
    label = f"evaluations ({used.x.size} fitted"
    label += f", {int(early.sum())} left out)" if early.any() else ")"
    label += " ± 1 standard error" if used.y_se is not None else ""
    (points,) = axes.plot(used.x, used.y, "o", label=label, **style)
    return points


def draw_alone(axes: "Axes", result: Fit, left: float, right: float) -> list[Any]:
    """Everything of one run: legend handles."""
    curve = result.curve
    handles = [_draw_points(axes, result, "black", 4.5)]
    if result.climbs:
        x = compute_grid(result, left, right)
        low, high = result.band(x)
        name = f"{100 * result.level:g} % band of the curve"
        handles.append(
            axes.fill_between(
                x, low, high, color=COLOURS[0], alpha=0.16, linewidth=0, label=name
            )
        )
        name = f"{result.definition.title}, R² = {result.r_squared:.3f}"
        handles.insert(1, _draw_line(axes, result, x, COLOURS[0], 2.0, name))
        axes.axvspan(
            float(curve.x[0]), result.x_last, color=GREY, alpha=0.05, linewidth=0
        )
    return handles + _draw_levels(axes, result, left, right)


def _draw_line(
    axes: "Axes", result: Fit, x: Array, colour: str, width: float, name: str
) -> Any:
    """The fitted curve, dashed outside of the points that were fitted."""
    y = result.predict(x)
    first, last = float(result.curve.x[0]), result.x_last
    inside = (x >= first) & (x <= last)
    style: dict[str, Any] = {"color": colour, "linewidth": width, "zorder": 3}
    (line,) = axes.plot(x[inside], y[inside], label=name, **style)
    for outside in (x <= first, x >= last):
        axes.plot(x[outside], y[outside], linestyle=(0, (2, 1.5)), **style)
    return line


def _draw_levels(axes: "Axes", result: Fit, left: float, right: float) -> list[Any]:
    """A with its interval, the midpoint, and R0: legend handles."""
    handles: list[Any] = []
    if result.identified and "A" in result.parameters:
        interval = result.asymptote_interval
        low, high = interval.low or 0.0, interval.high or 1.0
        name = f"A = {result.asymptote:.3f}  [{low:.3f}, {high:.3f}]"
        axes.axhspan(low, high, color=ORANGE, alpha=0.12, linewidth=0)
        handles.append(
            axes.axhline(result.asymptote, color=ORANGE, linestyle="--", label=name)
        )
    if result.identified and "C_mid" in result.parameters:
        if left < result.midpoint < right:
            handles += axes.plot(
                result.midpoint,
                result.predict(result.midpoint),
                marker="D",
                color=COLOURS[0],
                markeredgecolor="white",
                markersize=8,
                linestyle="none",
                zorder=5,
                label=f"C_mid = {result.midpoint:.4g}, B = {result.exponent:.3g}",
            )
    if "R0" in result.parameters and result.climbs:
        source = result.initial_reward_source
        name = f"R0 = {result.initial_reward:.3f} ({source})"
        handles.append(
            axes.axhline(result.initial_reward, color=GREY, linestyle=":", label=name)
        )
    return handles


def _draw_among(
    axes: "Axes", result: Fit, name: str, place: int, frame: tuple[float, float, float]
) -> Any:
    """One run of several: its legend handle; frame: left, right, size of points."""
    left, right, size = frame
    colour = COLOURS[place % len(COLOURS)]
    points = _draw_points(axes, result, colour, size)
    if not result.climbs:
        points.set_label(f"{name}: does not climb")
        return points
    x = compute_grid(result, left, right)
    low, high = result.band(x)
    axes.fill_between(x, low, high, color=colour, alpha=0.10, linewidth=0)
    verdict = "A not identified"
    if result.identified and "A" in result.parameters:
        verdict = f"A {result.asymptote:.3f}"
        # Where the curve ends, so that those of many runs can be told apart.
        axes.axhline(
            result.asymptote, 0.86, 1.0, color=colour, linestyle="--", linewidth=1
        )
    if "B" in result.parameters and result.identified:
        verdict += f", B {result.exponent:.2f}"
    return _draw_line(axes, result, x, colour, 1.6, f"{name}: {verdict}")


def finish(axes: "Axes", fits: Sequence[Fit], handles: list[Any], title: str) -> None:
    """Legend, labels, title."""
    result = fits[0]
    style = {"fontsize": 8.5, "framealpha": 0.9, "edgecolor": "none"}
    corner = _empty_corner(axes, len(handles))
    if corner is None:
        legend_below(axes, handles, **style)
    else:
        axes.legend(handles=handles, loc=corner, **style)
    axes.set_xlabel(axis_label(result.x_name))
    axes.set_ylabel(axis_label(result.y_name))
    lines = [textwrap.fill(line, LONGEST_TITLE) for line in title.splitlines()]
    axes.set_title("\n".join(lines), loc="left", fontsize=9.5)


def _empty_corner(axes: "Axes", num_lines: int) -> Corner | None:
    """The corner where a legend covers neither points nor curves; None: there is none.

    Levels (two ends each) run through the whole width and do not count.
    """
    drawn = [(line, np.asarray(line.get_xydata())) for line in axes.lines]
    paths = [
        line.get_transform().transform(points)
        for line, points in drawn
        if len(points) > 2
    ]
    across, up = axes.transAxes.inverted().transform(np.concatenate(paths)).T
    width, height = 0.45, 0.06 * num_lines + 0.04
    left, right, low, high = (
        across < width,
        across > 1.0 - width,
        up < height,
        up > 1.0 - height,
    )
    covered: dict[Corner, Array] = {
        "lower right": right & low,
        "upper left": left & high,
        "lower left": left & low,
        "upper right": right & high,
    }
    return next((name for name, found in covered.items() if not found.any()), None)


def headline(result: Fit, title: str) -> str:
    """The title, with what the figure cannot show: why there is no asymptote."""
    if result.identified:
        return title
    reason = (result.reason or "").split(":")[0].split(", and")[0]
    return f"{title}\nasymptote not identified: {reason}"
