"""The demo with and without a bound on the finished groups that wait.

    make waiting                                # starts missing runs, then this
    python benchmarks/tiny_waiting.py runs/tiny-seed0 runs/tiny-unbounded-seed0

Prints a row per run, in the order of `queue.max_waiting`: staleness from step 10 on, in
flight and queued; pass rate; chip-hours and generated tokens, in all and until the pass
rate has first reached `--target` (between two evaluations, on a straight line).  Draws
the pass rate over both, and the two parts of the staleness over the steps.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from seeds import processor

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

FIRST_STEP = 10  # the queue has filled by then
X_AXES = {
    "compute_chip_hours": "compute (chip-hours of one CPU)",
    "generated_tokens": "generated tokens",
}
COLUMNS = (
    "max_waiting | seed | in flight, mean (max) | queued, mean (max) | pass rate | "
    "chip-hours | to {target} | tokens, millions | to {target} | s per step | idle"
)


def main() -> None:
    """Read the runs, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--out", type=Path, default=Path("docs/waiting.png"))
    options = parser.parse_args()
    runs = sorted((read(run) for run in options.runs), key=lambda run: run["order"])
    names = COLUMNS.format(target=options.target)
    print(f"| {names} |\n|{'---|' * (names.count('|') + 1)}")
    for run in runs:
        print(f"| {' | '.join(cells(run, target=options.target))} |")
    draw(runs, options.out)
    print(f"\n{processor()}; picture: {options.out}")


def read(run: Path) -> dict[str, Any]:
    """Return settings, metrics from `FIRST_STEP` on, and evaluations of a run."""
    config = json.loads((run / "config.json").read_text())["config"]
    waiting = config["queue"]["max_waiting"]
    metrics = columns(run / "metrics.jsonl")
    late = metrics["step"] >= FIRST_STEP
    return {
        "order": (waiting == 0, waiting, config["seed"]),
        "waiting": waiting,
        "seed": config["seed"],
        "metrics": {name: values[late] for name, values in metrics.items()},
        "evals": columns(run / "evals.jsonl"),
    }


def columns(path: Path) -> dict[str, np.ndarray]:
    """Return the numbers that all rows of a file have, by name."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = [
        name
        for name in rows[0]
        if all(isinstance(row.get(name), int | float) for row in rows)
    ]
    return {name: np.array([row[name] for row in rows]) for name in names}


def cells(run: dict[str, Any], *, target: float) -> list[str]:
    """Return a row of the table."""
    metrics, evals = run["metrics"], run["evals"]
    staleness = [
        f"{metrics[f'staleness/{part}_mean'].mean():.2f} "
        f"({metrics[f'staleness/{part}_max'].max():.0f})"
        for part in ("in_flight", "queued")
    ]
    hours, tokens = evals["compute_chip_hours"], evals["generated_tokens"] / 1e6
    return [
        str(run["waiting"] or "0 (no bound)"),
        str(run["seed"]),
        *staleness,
        f"{evals['pass_rate'][-1]:.3f}",
        f"{hours[-1]:.4f}",
        reached(hours, evals["pass_rate"], target, digits=4),
        f"{tokens[-1]:.2f}",
        reached(tokens, evals["pass_rate"], target, digits=2),
        f"{metrics['time/step_s'].mean():.2f}",
        f"{metrics['idle/all_share'].mean():.1%}",
    ]


def reached(x: np.ndarray, y: np.ndarray, target: float, *, digits: int) -> str:
    """Return x where y first reaches the target."""
    above = np.flatnonzero(y >= target)
    if not len(above) or not above[0]:
        return "never" if not len(above) else "at once"
    ends = slice(above[0] - 1, above[0] + 1)
    return f"{np.interp(target, y[ends], x[ends]):.{digits}f}"


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Draw pass rate over compute and tokens; staleness over steps, seeds averaged."""
    settings = list(dict.fromkeys(run["waiting"] for run in runs))
    figure, panels = pyplot.subplots(1, 3, figsize=(13.5, 4.0))
    for number, waiting in enumerate(settings):
        color, label = f"C{number}", f"max_waiting = {waiting or '0 (no bound)'}"
        alike = [run for run in runs if run["waiting"] == waiting]
        for axes, (name, text) in zip(panels, X_AXES.items(), strict=False):
            for run in alike:
                evals = run["evals"]
                (line,) = axes.plot(
                    evals[name], evals["pass_rate"], ".-", color=color, alpha=0.7
                )
            line.set_label(label)
            axes.set_xlabel(text)
        steps = min((run["metrics"]["step"] for run in alike), key=len)
        for part, style in (("in_flight", ":"), ("queued", "-")):
            lags = [
                run["metrics"][f"staleness/{part}_mean"][: len(steps)] for run in alike
            ]
            text = f"{part.replace('_', ' ')}, {label}"
            panels[2].plot(steps, np.mean(lags, axis=0), style, color=color, label=text)
    panels[0].set_ylabel("pass rate on held-out prompts")
    panels[2].set(xlabel="optimizer step", ylabel="staleness (optimizer steps)")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
