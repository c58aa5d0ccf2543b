"""The picture of a study and its comparisons, beside its data in `studies/NAME`.

    scalerl study run NAME && scalerl study report NAME && scalerl study export NAME
    python benchmarks/studies.py NAME            # --root: another folder of the study

Copies two tables of the report: differences.csv, and runs.csv under the name fits.csv,
as the export's own runs.csv has chip-seconds.  Draws each arm in curves.png: its seeds
thin, their mean thick.  Prints which arm is ahead halfway: the pass rate at half of the
compute that all runs reached, the first arm against each other one, by Student's t,
with a shift for each seed and the spread of all arms; all pairs share the error of
10 %.  The report compares ends only, not which arm was ahead earlier.
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
    """Write the files of `studies/NAME` that the export does not write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of a file in configs/studies")
    parser.add_argument("--root", type=Path, help="default: runs/studies/NAME")
    parser.add_argument("--out", type=Path, help="default: studies/NAME")
    flags = parser.parse_args()
    root = flags.root or Path("runs") / "studies" / flags.name
    out = flags.out or ROOT / "studies" / flags.name
    out.mkdir(parents=True, exist_ok=True)
    for table, name in COPIES.items():
        copied = root / "report" / table
        if not copied.is_file():
            parser.error(f"{copied} does not exist; run scalerl study report first")
        (out / name).write_bytes(copied.read_bytes())
    axis = json.loads((root / "study.json").read_text())["axis"]
    runs: Runs = {}
    with (root / "report" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            point = float(row[axis]), float(row["pass_rate"])
            runs.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(point)
    draw(runs, axis, flags.name, out / "curves.png")
    print(halfway(runs, axis))


def draw(runs: Runs, axis: str, title: str, file: Path) -> None:
    """Draw the pass rate over the axis, a colour per arm."""
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
    """Return differences of the arms from the first one, at half of the compute."""
    half = min(run[-1][0] for arm in runs.values() for run in arm.values()) / 2.0
    arms = list(runs)
    seeds = sorted({seed for by in runs.values() for seed in by})
    cells = [(arm, seed, run) for arm, by in runs.items() for seed, run in by.items()]
    # Least squares: a mean for each arm, and a shift for each seed but the first.
    design = np.zeros((len(cells), len(arms) + len(seeds)))
    for row, (arm, seed, _) in enumerate(cells):
        design[row, [arms.index(arm), len(arms) + seeds.index(seed)]] = 1.0
    design = np.delete(design, len(arms), axis=1)
    curves = [np.array(run).T for *_, run in cells]  # x, rates
    rates = np.array([np.interp(half, x, y) for x, y in curves])
    means = np.linalg.lstsq(design, rates)[0]
    left = len(cells) - np.linalg.matrix_rank(design)
    lines = [f"at {axis} = {half:,.0f}:"]
    if left < 1:
        return f"{lines[0]} one seed each, or one arm, shows no spread"
    variance = np.sum((rates - design @ means) ** 2) / left
    covariance = variance * np.linalg.pinv(design.T @ design)
    quantile = stats.t.ppf(1.0 - 0.05 / max(len(arms) - 1, 1), left)
    for place, arm in enumerate(arms[1:], 1):
        apart = np.zeros(design.shape[1])
        apart[[place, 0]] = 1.0, -1.0
        mean, reach = apart @ means, quantile * np.sqrt(apart @ covariance @ apart)
        ends = f"[{mean - reach:+.3f}, {mean + reach:+.3f}]"
        lines.append(f"{arm} - {arms[0]}: {mean:+.3f} {ends}, {len(runs[arm])} seeds")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
