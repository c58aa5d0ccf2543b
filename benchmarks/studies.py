"""The data and the picture of a study in `studies/NAME`, from its folder and report.

    scalerl study run NAME && scalerl study report NAME
    python benchmarks/studies.py NAME            # --root: another folder of the study

Copies the report's tables, writes the settings (all of the first arm, and in which the
others differ) with versions, and draws each arm: its seeds thin, their mean thick.
"""

import argparse
import csv
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scalerl_jax.scaling.plots import COLOURS, axis_label

ROOT = Path(__file__).resolve().parents[1]
TABLES = ("curves.csv", "runs.csv", "differences.csv")


def main() -> None:
    """Write what `studies/NAME` holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of a file in configs/studies")
    parser.add_argument("--root", type=Path, help="default: runs/studies/NAME")
    flags = parser.parse_args()
    root = flags.root or Path("runs") / "studies" / flags.name
    out = ROOT / "studies" / flags.name
    out.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        (out / table).write_bytes((root / "report" / table).read_bytes())
    record = json.loads((root / "study.json").read_text())
    text = json.dumps(settings(record), indent=1, sort_keys=True)
    (out / "settings.json").write_text(text + "\n")
    with (out / "curves.csv").open() as file:
        draw(list(csv.DictReader(file)), record["axis"], flags.name, out / "curves.png")
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


if __name__ == "__main__":
    main()
