"""Pictures in the form of ScaleRL's figures: points, curves, bands, asymptotes.

A curve is solid where it was fitted and dashed where it is extrapolated.  Points that
were not fitted are hollow.  Of more than MOST_POINTS points only the middle one of each
bin is drawn, and the picture says so.  Forecasts are drawn against later measurements:
of a run under way, and in the extrapolation test.  Matplotlib is imported when a figure
is made, so that fitting does not wait for it; no window is opened.

One file above 400 lines: all pictures share their axes, points and lines.
"""

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scalerl_jax.scaling.bins import MOST_POINTS, bin_starts
from scalerl_jax.scaling.checking import Status
from scalerl_jax.scaling.compare import RunRow, RunTable
from scalerl_jax.scaling.forecasts import Extrapolation, Prediction
from scalerl_jax.scaling.records import Array, Bools, Curve, CurveError, amount
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.text import AMOUNT, number, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LOG_AXIS_RATIO = 12.0  # last over first compute from which log x reads better
HEIGHT = 4.6  # inches
LEGEND_LINE = 0.2  # inches
ORANGE, GREY, GREEN, RED = "#c9541a", "#6b6b6b", "#2e8b57", "#c0182b"
COLOURS = (
    "#1f5fa8 #c9541a #2e8b57 #8a4fbf #b8860b #c2417c #3d8fa3 #6b6b6b #7a9a01 #a0522d"
).split()

AXIS_LABELS = {
    "compute_chip_hours": "compute (chip-hours)",
    "train_flops": "training compute (FLOPs)",
    "train_tokens": "compute (tokens trained on)",
    "generated_tokens": "compute (tokens generated)",
    "policy_version": "compute (policy version, in optimizer steps)",
    "step": "compute (optimizer steps)",
    "pass_rate": "pass rate on held-out prompts",
}
Corner = Literal["lower right", "upper left", "lower left", "upper right"]
EXTRAPOLATION = 2.0  # the paper's forecasts reach 2 to 2.8 times the data
LONGEST_TITLE = 95  # letters of a line
LONGEST_NAME = 41  # letters of a run's name in a legend
MOST_NAMED = 10  # runs that get a line in the legend


def axis_label(name: str) -> str:
    """Return the label of an axis for a column."""
    return textwrap.fill(
        _printable(AXIS_LABELS.get(name.removeprefix("eval/"), name)), 40
    )


def to_png(figure: "Figure") -> bytes:
    """Return the figure as a PNG file."""
    return _save(figure, format="png", dpi=150)


def to_svg(figure: "Figure") -> bytes:
    """Return the figure as an SVG file; the same figure gives the same bytes."""
    return _save(figure, format="svg", metadata={"Date": None})


def _save(figure: "Figure", **options: Any) -> bytes:
    """Return the figure as a file; "$" in the name of a run is not parsed as maths."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    style: dict[Any, Any] = {"svg.hashsalt": "scalerl", "svg.fonttype": "none"}
    style["text.parse_math"] = False
    file = io.BytesIO()
    with rc_context(style):
        for each in figure.findobj(Text):
            assert isinstance(each, Text)
            each.set_parse_math(False)
        figure.savefig(file, **options)
    return file.getvalue()


def label_of(name: str, most: int = LONGEST_NAME) -> str:
    """Return a run's name for a picture: one line of at most `most` letters."""
    name = _printable(name)
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def _printable(text: str) -> str:
    """Return a text in one line, without letters that an SVG file cannot hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def make_axes(*, height: float = HEIGHT, share: float = 1.0) -> "tuple[Figure, Axes]":
    """Return a figure with axes in its upper `share`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, height))
    bottom, top = 0.575 / height, 0.45 / height  # room for labels, and the title
    lowest = 1.0 - share + bottom
    axes = figure.add_axes((0.1, lowest, 0.87, 1.0 - top - lowest))
    plain_frame(axes)
    return figure, axes


def plain_frame(axes: "Axes") -> None:
    """Draw no box, and a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def set_compute_axis(
    axes: "Axes", first: float, right: float, *, log_axis: bool | None = None
) -> float:
    """Set scale and limits of the compute axis; returns its left end."""
    from matplotlib.ticker import LogLocator, NullLocator

    if log_axis is None:
        log_axis = right / first >= LOG_AXIS_RATIO
    left = first / 1.4 if log_axis else 0.0
    if log_axis:
        axes.set_xscale("log")
        many = right / left > 300.0
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if many else (1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())  # each tick costs a millisecond
    axes.xaxis.set_major_formatter(notation(left or right / 10.0, right))
    axes.set_xlim(left, right)
    return left


def notation(low: float, high: float) -> Callable[[float, float], str]:
    """Make a formatter that writes all ticks of an axis alike: 20,000, 0.005 or 2e+18.

    Args:
        low: the end of the axis that is nearest to 0.
        high: the other end.
    """
    if low >= 1e-4 and high < 1e7:
        return lambda value, _: f"{value:,.10g}"

    def scientific(value: float, _: float) -> str:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{exponent}" if value else "0"

    return scientific


def limit_rates(axes: "Axes", shown: Sequence[float], *, above: float = 0.08) -> None:
    """Limit an axis of pass rates to the values shown with some air, within [0, 1].

    Args:
        shown: pass rates that must be seen.
        above: air at the top, as a share of their range.
    """
    low, high = min(shown), max(shown)
    air = max(high - low, 0.1)
    axes.set_ylim(max(low - 0.08 * air, 0.0), min(high + above * air, 1.0))


def legend_below(axes: "Axes", handles: list[Any], **style: Any) -> None:
    """Put a legend of `axes` at the foot of the figure, which grows by its height."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes are drawn in a figure"
    extra = LEGEND_LINE * -(-len(handles) // 2) + 0.1
    width, height = figure.get_size_inches()
    for each in figure.axes:
        left, bottom, wide, high = each.get_position().bounds
        bottom = (bottom * height + extra) / (height + extra)
        each.set_position((left, bottom, wide, high * height / (height + extra)))
    figure.set_size_inches(width, height + extra)
    figure.legend(handles=handles, loc="lower center", ncols=2, **style)


def draw_fits(
    fits: Sequence[Fit], names: Sequence[str], *, title: str = ""
) -> "Figure":
    """Draw one or several fitted runs over compute.

    One run is drawn with its band, asymptote, midpoint and R0; several are drawn each
    in its own colour with its asymptote.  A log axis cannot show compute 0, so R0 is a
    dotted line.

    Args:
        fits: at least one; all have x in one unit.
    """
    figure, axes = make_axes()
    right = max(
        result.x_last * (EXTRAPOLATION if result.climbs else 1.05) for result in fits
    )
    first = min(float(result.whole_curve.x[0]) for result in fits)
    left = set_compute_axis(axes, first, right)
    limit_height(axes, fits, right)
    if len(fits) == 1:
        handles = draw_alone(axes, fits[0], left, right)
        title = headline(fits[0], label_of(title, LONGEST_TITLE))
    else:
        handles = []
        for place, (result, name) in enumerate(zip(fits, names, strict=True)):
            size = 3.0 if len(fits) <= MOST_NAMED else 1.2
            handle = _draw_among(axes, result, name, place, (left, right, size))
            handles += [handle] if place < MOST_NAMED else []
        title = label_of(title, LONGEST_TITLE)
        title += _named_text(len(fits))
        title += _drawn_text(max(result.whole_curve.x.size for result in fits))
    finish(axes, fits, handles, title)
    return figure


def draw_linearised(runs: RunTable, *, names: Sequence[str] | None = None) -> "Figure":
    """Draw ScaleRL's straight-line form: F(R) over compute, both logarithmic; slope B.

    All runs have the shared A, so that their slopes can be compared; a run that does
    not share it is left out.  Points whose pass rate is not between R0 and A have no
    value and are left out.  `names` gives runs the colours that they have in
    `draw_fits`; by default, and if there are more names than colours, colours follow
    the rank, so that no two of the legend are alike.
    """
    if runs.shared_asymptote is None:
        raise CurveError("A is identified for no run: the runs have no A to share")
    figure, axes = make_axes()
    handles: list[Any] = []
    rows = [row for row in runs.rows if row.linearised is not None]
    if not names or len(names) > len(COLOURS):
        names = [row.name for row in rows]
    for place, row in enumerate(rows):
        assert row.linearised is not None and row.shared_exponent is not None
        colour = COLOURS[names.index(row.name) % len(COLOURS)]
        outside = int(np.isnan(row.linearised).sum())
        drawn = drawn_points(row.x)
        points = row.x[drawn], row.linearised[drawn]
        axes.plot(*points, "o", color=colour, markersize=3.5, alpha=0.7)
        ends = row.x[[0, -1]]
        (line,) = axes.plot(
            ends,
            ends**row.shared_exponent,
            color=colour,
            label=_slope_label(row, outside),
        )
        handles += [line] if place < MOST_NAMED else []
    left = min(float(row.x[0]) for row in rows)
    right = max(float(row.x[-1]) for row in rows)
    set_compute_axis(axes, left, 1.1 * right, log_axis=True)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(notation(*axes.get_ylim()))
    heading = f"slope B at the shared A = {runs.shared_asymptote:.3f}"
    if len(rows) < len(runs.rows):
        heading += f" ({len(runs.rows) - len(rows)} with another A or none left out)"
    heading += _named_text(len(rows))
    heading += _drawn_text(max(row.x.size for row in rows))
    finish(axes, [row.fit for row in rows], handles, heading)
    axes.tick_params("y", labelsize=8.5)  # 1e+12 is wide
    formula = "F(R) = C_mid^B / ((A - R0) / (R - R0) - 1)"
    axes.set_ylabel(formula, fontsize=9.0, labelpad=1.0)
    return figure


def _slope_label(row: RunRow, num_outside: int) -> str:
    """Return the legend's text for a run's line, with the count of points left out."""
    assert row.fit_at_shared is not None, "asked by the caller"
    interval = row.fit_at_shared.exponent_interval
    said = f"{label_of(row.name)}: B {row.shared_exponent:.2f} {show(interval, '.2f')}"
    if num_outside:
        said += f", {num_outside} point{'s' * (num_outside > 1)} not in (R0, A)"
    return said


def limit_height(axes: "Axes", fits: Sequence[Fit], right: float) -> None:
    """Show points, R0 and identified A, with some air; not the whole band."""
    shown: list[float] = []
    for result in fits:
        curve = result.whole_curve
        errors = 0.0 if curve.y_se is None else curve.y_se
        shown += [*(curve.y - errors), *(curve.y + errors)]
        if "R0" in result.parameters:
            shown.append(result.initial_reward)
        if result.identified and "A" in result.parameters:
            shown += [result.asymptote, result.asymptote_interval.high or 0.0]
        if result.climbs:
            shown.append(float(result.predict(right)))
    limit_rates(axes, shown)


def compute_grid(result: Fit, left: float, right: float) -> Array:
    """Return the compute values of a drawn curve, the end of the data included."""
    space = np.geomspace if left > 0 else np.linspace
    return np.unique([*space(left, right, 240), result.x_last])


def drawn_points(x: Array) -> Bools:
    """Mark the evaluations at x [n] that are drawn: all, or one per bin if many."""
    if x.size <= MOST_POINTS:
        return np.ones(x.size, bool)
    starts = bin_starts(np.log(x))
    drawn = np.zeros(x.size, bool)
    drawn[(starts + np.append(starts[1:], x.size)) // 2] = True
    return drawn


def _named_text(count: int) -> str:
    """Return that the legend names some of `count` runs; "" if it names all."""
    if count <= MOST_NAMED:
        return ""
    return f" (of {count} runs, the legend names {MOST_NAMED})"


def _drawn_text(count: int) -> str:
    """Return a remark that not all of `count` evaluations are drawn; "": all are."""
    if count <= MOST_POINTS:
        return ""
    return f" (of a run's {count} evaluations, {MOST_POINTS} at most are drawn)"


def draw_errors(axes: "Axes", curve: Curve, colour: str) -> None:
    """Draw error bars of one standard error, if the errors are known."""
    if curve.y_se is not None:
        style = {"fmt": "none", "ecolor": colour, "elinewidth": 0.9, "alpha": 0.45}
        axes.errorbar(curve.x, curve.y, yerr=curve.y_se, zorder=2, **style)


def _draw_points(axes: "Axes", result: Fit, colour: str, size: float) -> Any:
    """Draw the evaluations, hollow where they were not fitted; returns a handle."""
    used = result.curve
    drawn = drawn_points(result.whole_curve.x)
    whole = result.whole_curve.part(drawn)
    draw_errors(axes, whole, colour)
    early = ~np.isin(whole.x, used.x)
    # A point at 0 or 1 is on the edge of the axes, and is drawn whole.
    style = {"color": colour, "markersize": size, "linestyle": "none", "zorder": 4}
    style["clip_on"] = False
    if early.any():
        axes.plot(whole.x[early], whole.y[early], "o", fillstyle="none", **style)
    label = f"evaluations ({used.x.size} fitted"
    left_out = drawn.size - used.x.size
    label += f", {left_out} left out" if left_out else ""
    label += ")" if drawn.all() else f"; {int(drawn.sum())} drawn)"
    label += " ± 1 standard error" if used.y_se is not None else ""
    (points,) = axes.plot(whole.x[~early], whole.y[~early], "o", label=label, **style)
    return points


def draw_alone(axes: "Axes", result: Fit, left: float, right: float) -> list[Any]:
    """Draw everything of one run; returns legend handles."""
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
    """Draw the fitted curve, dashed outside of the points that were fitted."""
    y = result.predict(x)
    first, last = float(result.curve.x[0]), result.x_last
    inside = (x >= first) & (x <= last)
    style: dict[str, Any] = {"color": colour, "linewidth": width, "zorder": 3}
    (line,) = axes.plot(x[inside], y[inside], label=name, **style)
    for outside in (x <= first, x >= last):
        axes.plot(x[outside], y[outside], linestyle=(0, (2, 1.5)), **style)
    return line


def _draw_levels(axes: "Axes", result: Fit, left: float, right: float) -> list[Any]:
    """Draw A with its interval, the midpoint, and R0; returns legend handles."""
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
                label=f"C_mid = {amount(result.midpoint)}, B = {result.exponent:.3g}",
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
    """Draw one run of several in a frame: left, right, size of points."""
    left, right, size = frame
    colour = COLOURS[place % len(COLOURS)]
    points = _draw_points(axes, result, colour, size)
    if not result.climbs:
        points.set_label(f"{label_of(name)}: does not climb")
        return points
    x = compute_grid(result, left, right)
    low, high = result.band(x)
    axes.fill_between(x, low, high, color=colour, alpha=0.10, linewidth=0)
    verdict = "A not identified"
    if result.identified and "A" in result.parameters:
        low, high = result.asymptote_interval.low, result.asymptote_interval.high
        verdict = f"A {result.asymptote:.3f} [{low or 0.0:.3f}, {high or 1.0:.3f}]"
        # Only where the curve ends, so that many runs' asymptotes can be told apart.
        axes.axhline(
            result.asymptote, 0.86, 1.0, color=colour, linestyle="--", linewidth=1
        )
    if "B" in result.parameters and result.identified:
        verdict += f", B {result.exponent:.2f}"
    return _draw_line(axes, result, x, colour, 1.6, f"{label_of(name)}: {verdict}")


def finish(axes: "Axes", fits: Sequence[Fit], handles: list[Any], title: str) -> None:
    """Draw legend, labels and title."""
    result = fits[0]
    style = {"fontsize": 8.5, "framealpha": 0.9, "edgecolor": "none"}
    longest = max(len(handle.get_label()) for handle in handles)
    corner = _empty_corner(axes, len(handles), longest)
    if corner is None:
        legend_below(axes, handles, **style)
    else:
        axes.legend(handles=handles, loc=corner, **style)
    axes.set_xlabel(axis_label(result.x_name))
    axes.set_ylabel(axis_label(result.y_name))
    lines = [
        textwrap.fill(_printable(line), LONGEST_TITLE) for line in title.split("\n")
    ]
    axes.set_title("\n".join(lines), loc="left", fontsize=9.5)


def _empty_corner(axes: "Axes", num_lines: int, longest: int) -> Corner | None:
    """Return a corner where a legend covers neither points nor curves, or None.

    Levels (two ends each) cross the whole width and do not count.

    Args:
        longest: letters of the legend's longest line.
    """
    paths = [
        line.get_transform().transform(points)
        for line in axes.lines
        if len(points := np.asarray(line.get_xydata())) > 2
    ]
    across, up = axes.transAxes.inverted().transform(np.concatenate(paths)).T
    width, height = max(0.45, 0.06 + 0.0095 * longest), 0.06 * num_lines + 0.04
    left, right = across < width, across > 1.0 - width
    low, high = up < height, up > 1.0 - height
    covered: dict[Corner, Array] = {
        "lower right": right & low,
        "upper left": left & high,
        "lower left": left & low,
        "upper right": right & high,
    }
    return next((name for name, found in covered.items() if not found.any()), None)


def headline(result: Fit, title: str) -> str:
    """Return the title, with the reason if the asymptote is not identified."""
    if result.identified:
        return title
    reason = (result.reason or "").split(":")[0].split(", and")[0]
    return f"{title}\nasymptote not identified: {reason}"


def draw_extrapolation(found: Extrapolation, *, title: str = "") -> "Figure":
    """Draw each law's forecast from each part of the data, over the measured points.

    One panel per fraction: the fitted part is shaded, held-out points are hollow.
    """
    from matplotlib.figure import Figure

    count = len(found.fractions)
    figure = Figure(figsize=(4.2 * count, 4.6), layout="constrained")
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    whole = found.curve
    curve, first, last = whole.part(drawn_points(whole.x)), whole.x[0], whole.x[-1]
    for axes, fraction in zip(panels, found.fractions, strict=True):
        plain_frame(axes)
        left = set_compute_axis(axes, float(first), 1.05 * float(last))
        seen = curve.x <= fraction * last
        draw_errors(axes, curve, "black")
        # A point at 0 or 1 is on the edge of the axes, and is drawn whole.
        style: dict[str, Any] = {"color": "black", "markersize": 3.5, "clip_on": False}
        axes.plot(curve.x[seen], curve.y[seen], "o", **style)
        axes.plot(curve.x[~seen], curve.y[~seen], "o", fillstyle="none", **style)
        for place, law in enumerate(found.laws):
            prediction = found.get(law, fraction)
            _draw_prediction(axes, prediction, COLOURS[place], whole.x, left)
        axes.axvspan(left, fraction * float(last), color=GREY, alpha=0.07, linewidth=0)
        limit_rates(axes, whole.y.tolist(), above=0.24)
        axes.set_title(f"fitted on {100 * fraction:.0f} %", fontsize=9.5, loc="left")
        axes.set_xlabel(axis_label(found.x_name))
        if not axes.get_legend_handles_labels()[0]:
            continue  # too few points for any law
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
    title = label_of(title) + _drawn_text(whole.x.size)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _draw_prediction(
    axes: "Axes", prediction: Prediction, colour: str, x: Array, left: float
) -> None:
    """Draw one law's curve, dashed where it is a forecast."""
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


def draw_status(status: Status) -> "Figure":
    """Draw a run under way: its fit, and below it the errors of its early forecast.

    The lower panel shows measured minus forecast pass rates, and the forecast's band.
    """
    result, checks = status.fit, status.checks
    assert result is not None, "asked by the caller"
    figure, axes = make_axes(
        height=6.4 if checks else HEIGHT, share=0.66 if checks else 1.0
    )
    right = max(status.horizon or 0.0, 1.05 * result.x_last)
    left = set_compute_axis(axes, float(result.whole_curve.x[0]), right)
    limit_height(axes, [result], right)
    handles = draw_alone(axes, result, left, right)
    title = headline(result, label_of(status.curve.name))
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
        until = f"foretold up to {number(status.fitted_until, AMOUNT)}"
        name = f"{100 * status.alarm_level:g} % band {until}"
        below.fill_between(x, low, high, color=GREEN, alpha=0.2, label=name)
        below.axhline(0.0, color=GREEN)
        below.plot(x[~outside], error[~outside], "o", color="black", markersize=4)
        name = "outside" if outside.any() else None
        below.plot(x[outside], error[outside], "o", color=RED, label=name, markersize=5)
        below.legend(loc="best", fontsize=8, framealpha=0.9, edgecolor="none")
        below.xaxis.set_major_formatter(notation(float(x[0]), float(x[-1])))
        below.set_ylabel("actual - foretold", labelpad=1.0)
        below.set_xlabel(axis_label(result.x_name))
        axes.set_xlabel("")
    return figure
