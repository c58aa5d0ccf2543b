"""The frame of every picture: axes, compute axis, labels, and the files they make.

Matplotlib is imported when a figure is made, so that fitting does not wait for it; no
window is opened.
"""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def axis_label(name: str) -> str:
    """What a column is called on an axis."""
    return textwrap.fill(AXIS_LABELS.get(name.removeprefix("eval/"), name), 40)


def to_png(figure: "Figure") -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def to_svg(figure: "Figure") -> bytes:
    """The figure as an SVG file; the same figure gives the same bytes."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "scalerl", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def make_axes(*, height: float = HEIGHT, share: float = 1.0) -> "tuple[Figure, Axes]":
    """A figure with axes in the upper `share` of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, height))
    bottom, top = 0.575 / height, 0.45 / height  # room for labels, and the title
    lowest = 1.0 - share + bottom
    axes = figure.add_axes((0.1, lowest, 0.87, 1.0 - top - lowest))
    plain_frame(axes)
    return figure, axes


def plain_frame(axes: "Axes") -> None:
    """No box, a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def set_compute_axis(
    axes: "Axes", first: float, right: float, *, log_axis: bool | None = None
) -> float:
    """Scale and limits of the compute axis; returns its left end."""
    from matplotlib.ticker import LogLocator, NullLocator

    if log_axis is None:
        log_axis = right / first >= LOG_AXIS_RATIO
    left = first / 1.4 if log_axis else 0.0
    if log_axis:
        axes.set_xscale("log")
        many = right / left > 300.0
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if many else (1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: _plain(value))
        axes.xaxis.set_minor_locator(NullLocator())  # each tick costs a millisecond
    axes.set_xlim(left, right)
    return left


def limit_rates(axes: "Axes", shown: Sequence[float], *, above: float = 0.08) -> None:
    """Limits of a pass-rate axis: the values shown with some air, within [0, 1].

    Args:
        axes: to limit.
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


def _plain(value: float) -> str:
    """A tick: 20,000 and 0.005, but 2e+18."""
    return f"{value:,.10g}" if 1e-4 <= abs(value) < 1e6 else f"{value:g}"
