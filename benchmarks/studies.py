"""The picture of a study and its comparisons, beside its data in `studies/NAME`.

    scalerl study run NAME && scalerl study report NAME && scalerl study export NAME
    python benchmarks/studies.py NAME            # --root: another folder of the study

Copies what the report says of pairs and fits (differences.csv, fits.csv), and draws
each arm: its seeds thin, their mean thick.  Prints who is ahead halfway: the pass rate
at half of the compute that all runs reached, the first arm against each other one, by
Student's t of the differences of equal seeds; all pairs share the error of 10 %.  The
report compares ends, and says nothing of who was there earlier.
"""

import argparse
import csv
import json
import statistics
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from scalerl_jax.scaling.plots import COLOURS, axis_label

ROOT = Path(__file__).resolve().parents[1]
COPIES = {"differences.csv": "differences.csv", "runs.csv": "fits.csv"}
Runs = dict[str, dict[str, list[tuple[float, float]]]]  # points by arm and seed


def main() -> None:
    """Write what `studies/NAME` holds beside the export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of a file in configs/studies")
    parser.add_argument("--root", type=Path, help="default: runs/studies/NAME")
    flags = parser.parse_args()
    root = flags.root or Path("runs") / "studies" / flags.name
    out = ROOT / "studies" / flags.name
    out.mkdir(parents=True, exist_ok=True)
    for table, name in COPIES.items():
        (out / name).write_bytes((root / "report" / table).read_bytes())
    axis = json.loads((root / "study.json").read_text())["axis"]
    runs: Runs = {}
    with (root / "report" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            point = float(row[axis]), float(row["pass_rate"])
            runs.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(point)
    draw(runs, axis, flags.name, out / "curves.png")
    print(halfway(runs, axis))


def draw(runs: Runs, axis: str, title: str, file: Path) -> None:
    """Pass rate over the axis, an arm in each colour."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (arm, seeds) in enumerate(runs.items()):
        colour = COLOURS[place % len(COLOURS)]
        dash = "--" if place >= len(COLOURS) else "-"
        for points in seeds.values():
            axes.plot(*zip(*points, strict=True), color=colour, lw=0.6, alpha=0.5)
        # Runs of an arm evaluate at equal steps; a shorter one ends the mean.
        together = list(zip(*seeds.values(), strict=False))
        mean = [tuple(map(statistics.fmean, zip(*at, strict=True))) for at in together]
        axes.plot(*zip(*mean, strict=True), dash, color=colour, lw=1.8, label=arm)
    axes.set(xlabel=axis_label(axis), ylabel=axis_label("pass_rate"), title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(file, dpi=90)


def halfway(runs: Runs, axis: str) -> str:
    """The differences of the arms from the first one, at half of the compute."""
    half = min(run[-1][0] for arm in runs.values() for run in arm.values()) / 2.0
    at = {
        arm: {
            seed: float(np.interp(half, *np.transpose(run))) for seed, run in by.items()
        }
        for arm, by in runs.items()
    }
    first, *others = at
    lines = [f"at {axis} = {half:,.0f}:"]
    for arm in others:
        seeds = sorted(at[first].keys() & at[arm].keys())
        apart = [at[arm][seed] - at[first][seed] for seed in seeds]
        if len(apart) < 2:
            continue
        reach = stats.t.ppf(1.0 - 0.05 / len(others), len(apart) - 1)
        reach *= statistics.stdev(apart) / len(apart) ** 0.5
        mean = statistics.fmean(apart)
        lines.append(
            f"{arm} - {first}: {mean:+.3f} [{mean - reach:+.3f}, {mean + reach:+.3f}], "
            f"{len(apart)} seeds"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
