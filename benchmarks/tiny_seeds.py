"""The demo over several seeds: one table and one picture for the README.

    make seeds                                  # runs the seeds, then this
    python benchmarks/tiny_seeds.py runs/tiny-seed0 runs/tiny-seed1 --out=docs/tiny.png

Prints, per run: pass rate before and after, the fit with its 90 % interval, R^2, and
how well a fit on the first half of the compute predicts the last evaluation.
"""

import argparse
import json
import platform
from pathlib import Path

import matplotlib
import numpy as np

from scalerl_jax import scaling

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  after the backend is chosen


def main() -> None:
    """Read the runs, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/tiny.png"))
    options = parser.parse_args()
    print("| seed | before | after | A | B | C_mid, chip-hours | R² | last predicted "
          "from the first half | chip-hours |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for run in options.runs:
        curve = scaling.load_curve(run)
        result = scaling.fit_curve(curve)
        seed = json.loads((run / "config.json").read_text())["seed"]
        print(row(seed, curve, result))
        draw(axes, f"seed {seed}", curve, result)
    axes.set_xlabel("compute (chip-hours of one CPU)")
    axes.set_ylabel("pass rate on held-out prompts")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=150)
    print(f"\n{platform.machine()}, {processor()}; picture: {options.out}")


def row(seed: int, curve: scaling.Curve, result: scaling.Fit) -> str:
    """One line of the table, in Markdown."""
    interval = result.asymptote_interval
    bounds = f"[{interval.low:.3f}, {interval.high:.3f}]" if result.identified else ""
    asymptote = f"{result.asymptote:.3f} {bounds or 'not identified'}"
    forecast = result.half_forecast
    predicted = (
        f"{forecast.predicted:.3f} ({forecast.error:+.3f})" if forecast else "too few"
    )
    return (
        f"| {seed} | {result.initial_reward:.3f} | {curve.y[-1]:.3f} | {asymptote} | "
        f"{result.exponent:.2f} | {result.midpoint:.4f} | {result.r_squared:.3f} | "
        f"{predicted} | {curve.x[-1]:.3f} |"
    )


def draw(
    axes: pyplot.Axes, label: str, curve: scaling.Curve, result: scaling.Fit
) -> None:
    """Evaluations as points, their fit as a line."""
    grid = np.linspace(0.0, curve.x[-1] * 1.05, 400)
    (line,) = axes.plot(grid, result.predict(grid), label=label)
    axes.plot(curve.x, curve.y, "o", markersize=3.5, color=line.get_color())


def processor() -> str:
    """The name of the processor, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
