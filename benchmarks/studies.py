"""The data and the picture of a study in `studies/NAME`, from its folder and report.

    scalerl study run NAME && scalerl study report NAME
    python benchmarks/studies.py NAME            # --root: another folder of the study
    python benchmarks/studies.py                 # forecasts, over all kept curves

Copies the report's tables, writes the settings (all of the first arm, and in which the
others differ) with versions, and draws each arm: its seeds thin, their mean thick.

Halfway: the pass rate at half of the compute that all runs reached, first arm against
each other one, by Student's t of the differences of equal seeds; all pairs share the
error of 10 %.  The report compares ends, and says nothing of who was there earlier.

Forecasts: each law is fitted to the evaluations up to 25 and to 50 % of a run's
compute, and foretells the last one; beside them the last value seen.
"""

import argparse
import csv
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from scalerl_jax.scaling.forecasts import LAST_VALUE, extrapolate_curve
from scalerl_jax.scaling.plots import COLOURS, axis_label
from scalerl_jax.scaling.records import Curve, make_curve

ROOT = Path(__file__).resolve().parents[1]
TABLES = ("curves.csv", "runs.csv", "differences.csv")
AXES = ("generated_tokens", "train_flops", "compute_chip_hours")
SHARES = (0.25, 0.5)
LAWS = ("sigmoid", "power", "exponential", "logistic")


def main() -> None:
    """Write what `studies/NAME` holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="of a file in configs/studies")
    parser.add_argument("--root", type=Path, help="default: runs/studies/NAME")
    flags = parser.parse_args()
    if flags.name is None:
        print(forecasts([curve for _, curve in kept_curves()]))
        return
    root = flags.root or Path("runs") / "studies" / flags.name
    out = ROOT / "studies" / flags.name
    out.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        (out / table).write_bytes((root / "report" / table).read_bytes())
    record = json.loads((root / "study.json").read_text())
    text = json.dumps(settings(record), indent=1, sort_keys=True)
    (out / "settings.json").write_text(text + "\n")
    with (out / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    draw(rows, record["axis"], flags.name, out / "curves.png")
    print(halfway(rows, record["axis"]))
    print(f"wrote {out.relative_to(ROOT)}")


def settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a study was run with: one arm whole, of the others what differs."""
    first, *others = record["arms"]
    whole = record["arms"][first]
    differing = {
        arm: {
            name: value
            for name, value in record["arms"][arm].items()
            if whole.get(name) != value
        }
        for arm in others
    }
    kept = ("axis", "base", "budget", "code", "seeds", "versions")
    return {
        **{name: record[name] for name in kept},
        "first_arm": first,
        "settings": whole,
        "differences": differing,
    }


def draw(rows: list[dict[str, str]], axis: str, title: str, file: Path) -> None:
    """Pass rate over the axis, an arm in each colour."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        runs: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["arm"] == arm:
                point = float(row[axis]), float(row["pass_rate"])
                runs.setdefault(row["seed"], []).append(point)
        colour = COLOURS[place % len(COLOURS)]
        dash = "--" if place >= len(COLOURS) else "-"
        for points in runs.values():
            axes.plot(*zip(*points, strict=True), color=colour, lw=0.6, alpha=0.5)
        # Runs of an arm evaluate at equal steps; a run under way ends the mean.
        together = list(zip(*runs.values(), strict=False))
        mean = [tuple(map(statistics.fmean, zip(*at, strict=True))) for at in together]
        axes.plot(*zip(*mean, strict=True), dash, color=colour, lw=1.8, label=arm)
    axes.set(xlabel=axis_label(axis), ylabel=axis_label("pass_rate"), title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(file, dpi=90)


def halfway(rows: list[dict[str, str]], axis: str) -> str:
    """A table of the differences of the arms from the first one, halfway."""
    runs: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        point = float(row[axis]), float(row["pass_rate"])
        runs.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(point)
    half = min(run[-1][0] for arm in runs.values() for run in arm.values()) / 2.0
    at = {
        arm: {
            seed: np.interp(half, *zip(*run, strict=True)) for seed, run in by.items()
        }
        for arm, by in runs.items()
    }
    first, *others = at
    lines = [f"at {axis} = {half:,.0f}:"]
    for arm in others:
        seeds = at[first].keys() & at[arm].keys()
        apart = [at[arm][seed] - at[first][seed] for seed in sorted(seeds)]
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


def kept_curves() -> list[tuple[str, Curve]]:
    """The curves in `studies/`, each with the name of its study."""
    found = []
    for file in sorted((ROOT / "studies").glob("*/curves.csv")):
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        axis = next(name for name in rows[0] if name in AXES)
        runs = itertools.groupby(rows, key=lambda row: (row["arm"], row["seed"]))
        for _, points in runs:
            curve = [(float(row[axis]), float(row["pass_rate"])) for row in points]
            x, y = zip(*curve, strict=True)
            found.append(
                (file.parent.name, make_curve(x, y, names=(axis, "pass_rate")))
            )
    return found


def forecasts(curves: Sequence[Curve]) -> str:
    """A table: how far from the last evaluation each law ends that saw a part."""
    errors: dict[tuple[float, str], list[float]] = {}
    inside: dict[tuple[float, str], list[bool]] = {}
    for curve in curves:
        tried = extrapolate_curve(curve, fractions=SHARES, laws=LAWS)
        for law, share in itertools.product((*LAWS, LAST_VALUE), SHARES):
            found = tried.get(law, share)
            if found.last_error is None:
                continue
            errors.setdefault((share, law), []).append(found.last_error)
            if found.fit is not None:
                low, high = found.fit.prediction_band(curve.x[-1])
                held = bool(low <= found.last_actual <= high)
                inside.setdefault((share, law), []).append(held)
    lines = [
        "| fitted up to | law | runs | mean error | mean abs. error | in the band |",
        "|---|---|---|---|---|---|",
    ]
    for (share, law), found in sorted(errors.items()):
        held = inside.get((share, law))
        band = f"{sum(held)} of {len(held)}" if held else "-"
        spread = statistics.fmean(abs(error) for error in found)
        lines.append(
            f"| {share:.0%} | {law} | {len(found)} of {len(curves)} | "
            f"{statistics.fmean(found):+.3f} | {spread:.3f} | {band} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
