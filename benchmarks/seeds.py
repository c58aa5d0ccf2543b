"""A config over several seeds: its figures, wherever they stand, and its picture.

    make seeds                                  # runs the demo's seeds, then this
    make smollm2                                # those of configs/smollm2_cpu.py
    python benchmarks/seeds.py tiny runs/tiny-seed0 runs/tiny-seed1
    python benchmarks/seeds.py tiny             # writes the texts again, reads no run

Figures are kept in `docs/figures/NAME.json` and copied from there into the table of a
page and the docstring of `configs/NAME.py`; a test holds the texts against the file.
Per run: pass rate before and after, and over each of `AXES` the fit with its 90 %
interval, R^2, and how well a fit on the first half of the compute predicts the last
evaluation.
"""

import argparse
import json
import os
import platform
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from scalerl_jax import scaling

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  after the backend is chosen

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {"tiny": "make seeds", "smollm2_cpu": "make smollm2"}  # by config
PAGES = {"tiny": "README.md", "smollm2_cpu": "docs/smollm2.md"}  # with the table
AXES = {"compute_chip_hours": "chip-hours", "generated_tokens": "tokens sampled"}


def main() -> None:
    """Read the runs, keep their figures, draw the picture, write the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=COMMANDS, help="of the config")
    parser.add_argument("runs", nargs="*", type=Path)
    options = parser.parse_args()
    if options.runs:
        figures = read(options.name, options.runs)
        kept(options.name).write_text(json.dumps(figures, indent=2) + "\n")
        draw(options.runs, ROOT / "docs" / f"{options.name}.png")
    for path, pattern, text in places(options.name):
        path.write_text(replaced(path, pattern, text))
        print(f"{path.relative_to(ROOT)}:\n{text}")


def kept(name: str) -> Path:
    """The file of the figures of a config."""
    return ROOT / "docs" / "figures" / f"{name}.json"


def read(name: str, runs: list[Path]) -> dict[str, Any]:
    """The figures of the runs, and where they were measured."""
    settings = [json.loads((run / "config.json").read_text()) for run in runs]
    return {
        "command": COMMANDS[name],
        "machine": f"{os.cpu_count()} cores of {processor()}",
        "jax": settings[0]["versions"]["jax"],
        "steps": settings[0]["config"]["train"]["num_steps"],
        "runs": [
            {"seed": each["seed"]} | measured(run)
            for each, run in zip(settings, runs, strict=True)
        ],
    }


def measured(run: Path) -> dict[str, Any]:
    """The figures of one run; None where its data do not give one."""
    evals = rows(run / "evals.jsonl")
    return {
        "before": round(evals[0]["pass_rate"], 3),
        "after": round(evals[-1]["pass_rate"], 3),
        # From the start of the loop on: steps, and the evaluations between them.
        "seconds": round(
            sum(row["time/step_s"] for row in rows(run / "metrics.jsonl"))
        ),
        "fits": {axis: fitted(run, axis) for axis in AXES},
    }


def fitted(run: Path, axis: str) -> dict[str, Any]:
    """The fit of one run over one axis."""
    fit = scaling.fit_curve(scaling.load_curve(run, x=axis))
    interval, forecast = fit.asymptote_interval, fit.half_forecast
    return {
        "asymptote": round(fit.asymptote, 3) if fit.identified else None,
        "interval": [round(interval.low, 3), round(interval.high, 3)]
        if fit.identified
        else None,
        "exponent": round(fit.exponent, 2),
        "midpoint": float(f"{fit.midpoint:.3g}"),
        "r_squared": round(fit.r_squared, 3),
        "predicted": round(forecast.predicted, 3) if forecast else None,
        "error": round(forecast.error, 3) if forecast else None,
    }


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(name: str) -> list[tuple[Path, str, str]]:
    """Each file that says the figures, a pattern of where, and what it says there."""
    figures = json.loads(kept(name).read_text())
    command = figures["command"]
    return [
        (
            ROOT / PAGES[name],
            rf"(?<=<!-- {command} -->\n).*?(?=<!-- end of {command} -->)",
            table(figures),
        ),
        (
            ROOT / "configs" / f"{name}.py",
            r'(?<=\n\n)Result, .*?(?=""")',
            sentence(figures),
        ),
    ]


def replaced(path: Path, pattern: str, text: str) -> str:
    """The file's text, with `text` in the one place that the pattern finds."""
    found, count = re.subn(pattern, lambda _: text, path.read_text(), flags=re.DOTALL)
    assert count == 1, f"{path}: {count} places for {pattern}"
    return found


def table(figures: dict[str, Any]) -> str:
    """The table of a page, in Markdown."""
    lines = [
        "| seed | before | after | run, s | over | A (90 % interval) | B | C_mid | "
        "R² | last evaluation, predicted from the first half |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(line for run in figures["runs"] for line in lines_of(run)),
        "",
        "Chip-hours of a CPU are its wall time, and move with whatever else it runs; "
        "tokens sampled do not.",
        f"Measured on {figures['machine']}, JAX {figures['jax']}. "
        f"`{figures['command']}` does it again.",
    ]
    return "\n".join(lines) + "\n"


def lines_of(run: dict[str, Any]) -> list[str]:
    """The lines of a run in the table: one for each axis."""
    lines = []
    first = f"| {run['seed']} | {run['before']:.3f} | {run['after']:.3f} | "
    first += f"{run['seconds']} "
    for axis, fit in run["fits"].items():
        asymptote, predicted = "not identified", "too few evaluations"
        if fit["interval"]:
            low, high = fit["interval"]
            asymptote = f"{fit['asymptote']:.3f} [{low:.3f}, {high:.3f}]"
        if fit["predicted"] is not None:
            predicted = f"{fit['predicted']:.3f} ({fit['error']:+.3f})"
        midpoint = f"{fit['midpoint']:{',.0f' if fit['midpoint'] > 1 else '.4f'}}"
        lines.append(
            f"{first}| {AXES[axis]} | {asymptote} | {fit['exponent']:.2f} | "
            f"{midpoint} | {fit['r_squared']:.3f} | {predicted} |"
        )
        first = "| | | | "
    return lines


def sentence(figures: dict[str, Any]) -> str:
    """What the config's docstring says of its result."""
    runs = figures["runs"]
    minutes = -(-max(run["seconds"] for run in runs) // 60)

    def listed(name: str, form: str) -> str:
        return ", ".join(format(run[name], form) for run in runs)

    text = (
        f"Result, seeds {listed('seed', 'd')}: held-out pass rate "
        f"{listed('before', '.3f')} before and {listed('after', '.3f')} after "
        f"{figures['steps']} steps, in at most {minutes} minutes on "
        f"{figures['machine']}."
    )
    return textwrap.fill(text, width=88) + "\n"


def draw(runs: list[Path], picture: Path) -> None:
    """Evaluations as points, their fits as lines."""
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for run in runs:
        seed = json.loads((run / "config.json").read_text())["seed"]
        curve = scaling.load_curve(run)
        grid = np.linspace(0.0, curve.x[-1] * 1.05, 400)
        fitted = scaling.fit_curve(curve).predict(grid)
        (line,) = axes.plot(grid, fitted, label=f"seed {seed}")
        axes.plot(curve.x, curve.y, "o", markersize=3.5, color=line.get_color())
    axes.set_xlabel("compute (chip-hours of one CPU)")
    axes.set_ylabel("pass rate on held-out prompts")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def processor() -> str:
    """The name of the processor, AMD's or Intel's, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = re.sub(r"\((R|TM)\)|Processor", "", line.partition(":")[2])
                return f"an {' '.join(name.split())}"
    return f"an {platform.processor()}"


if __name__ == "__main__":
    main()
