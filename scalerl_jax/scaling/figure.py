"""The picture of one fit: points, curve, band, asymptote, midpoint.

Matplotlib is imported when a figure is drawn, so that fitting does not wait for it;
no window is opened.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_jax.scaling.curves import Curve
from scalerl_jax.scaling.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG_AXIS_RATIO = 12.0  # last over first compute from which log x reads better
EXTRAPOLATION = 2.0  # the paper's forecasts reach 2 to 2.8 times the data
BLUE, ORANGE, GREY = "#1f5fa8", "#c9541a", "#6b6b6b"

AXIS_LABELS = {
    "compute_chip_hours": "compute (chip-hours)",
    "train_flops": "training compute (FLOPs)",
    "train_tokens": "compute (tokens trained on)",
    "generated_tokens": "compute (tokens generated)",
    "policy_version": "compute (policy version, in optimizer steps)",
    "step": "compute (optimizer steps)",
    "pass_rate": "pass rate on held-out prompts",
}


def draw(result: Fit, curve: Curve, path: Path, *, title: str) -> None:
    """Draw a fit into a PNG file.

    Compute 0 has no place on a log axis, so R0 is a dotted line.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    log_axis = curve.x[-1] / curve.x[0] >= LOG_AXIS_RATIO
    left = curve.x[0] / 1.4 if log_axis else 0.0
    right = curve.x[-1] * (EXTRAPOLATION if result.climbs else 1.05)
    if log_axis:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left, right)
    _limit_height(axes, result, curve, right)

    points = axes.errorbar(
        curve.x,
        curve.y,
        yerr=curve.y_se,
        fmt="o",
        color="black",
        markersize=4.5,
        elinewidth=1.0,
        zorder=4,
        label=f"evaluations ({curve.x.size})",
    )
    space = np.geomspace if log_axis else np.linspace
    grid = np.unique(np.append(space(left, right, 300), curve.x[-1]))
    handles = [
        points,
        *(_draw_curve(axes, result, grid) if result.climbs else []),
        *_draw_levels(axes, result, left, right),
    ]
    axes.legend(
        handles=handles,
        loc="lower right" if result.identified else "best",
        fontsize=8.5,
        framealpha=0.9,
        edgecolor="none",
    )
    axes.set_xlabel(AXIS_LABELS.get(result.x_name, result.x_name))
    axes.set_ylabel(AXIS_LABELS.get(result.y_name, result.y_name))
    axes.set_title(_headline(result, title), loc="left", fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _headline(result: Fit, title: str) -> str:
    """The title, with what the figure cannot show: why there is no asymptote."""
    if result.identified:
        return title
    reason = (result.reason or "").split(":")[0].split(", and")[0]
    return f"{title}\nasymptote not identified: {reason}"


def _draw_curve(axes: "Axes", result: Fit, grid: np.ndarray) -> list[Any]:
    """The fitted curve with its band, dashed beyond the data: legend handles."""
    low, high = result.band(grid)
    name = f"{100 * result.level:g} % band of the fit"
    band = axes.fill_between(
        grid, low, high, color=BLUE, alpha=0.16, linewidth=0, zorder=1, label=name
    )
    measured = grid <= result.x_last
    beyond = grid >= result.x_last
    y = result.predict(grid)
    style: dict[str, Any] = {"color": BLUE, "linewidth": 2.0, "zorder": 3}
    name = f"sigmoid, R² = {result.r_squared:.3f}"
    (line,) = axes.plot(grid[measured], y[measured], label=name, **style)
    axes.plot(grid[beyond], y[beyond], linestyle=(0, (2, 1.5)), **style)
    return [line, band]


def _draw_levels(axes: "Axes", result: Fit, left: float, right: float) -> list[Any]:
    """A with its interval, the midpoint, and R0: legend handles."""
    handles: list[Any] = []
    interval = result.asymptote_interval
    if result.identified:
        low, high = interval.low or 0.0, interval.high or 1.0
        name = f"A = {result.asymptote:.3f}  [{low:.3f}, {high:.3f}]"
        axes.axhspan(low, high, color=ORANGE, alpha=0.12, linewidth=0)
        handles.append(
            axes.axhline(result.asymptote, color=ORANGE, linestyle="--", label=name)
        )
    if result.identified and left < result.midpoint < right:
        handles += axes.plot(
            result.midpoint,
            result.predict(result.midpoint),
            marker="D",
            color=BLUE,
            markeredgecolor="white",
            markersize=8,
            linestyle="none",
            zorder=5,
            label=f"C_mid = {result.midpoint:.4g}, B = {result.exponent:.3g}",
        )
    name = f"R0 = {result.initial_reward:.3f} ({result.initial_reward_source})"
    handles.append(
        axes.axhline(result.initial_reward, color=GREY, linestyle=":", label=name)
    )
    return handles


def _limit_height(axes: "Axes", result: Fit, curve: Curve, right: float) -> None:
    """Show the points, R0 and an identified A, with some air; not the whole band."""
    shown = [*curve.y, result.initial_reward]
    if result.climbs:
        shown.append(float(result.predict(right)))
    if result.identified:
        shown += [result.asymptote, result.asymptote_interval.high or 1.0]
    air = 0.08 * (max(shown) - min(shown))
    axes.set_ylim(max(min(shown) - air, -0.02), min(max(shown) + air, 1.02))
