"""The effect of a loss's bound: CISPO's cap beside DAPO's upper clip.

    make stability                  # 18 runs of the demo, an hour on two idle cores
    python benchmarks/stability.py --steps=100 --seeds 0 1

ScaleRL (https://arxiv.org/abs/2510.13786, section 3.2 and appendix) finds CISPO alike
for caps of 4, 5 and 8, and DAPO's asymptote moved by its upper clip.  Here: the demo's
policy and tasks, eight optimizer steps per batch that is generated together, all else
as in `configs/tiny.py`.  Prints the final pass rate of every run and the spread of each
loss over its bounds, and draws both.  Finished runs are not run again.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib
from seeds import processor

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

OFF_POLICY_STEPS = 8
# Loss -> the setting of its bound, the bounds, and its other settings.
ARMS = {
    "CISPO": ("max_importance_ratio", (4.0, 5.0, 8.0), {}),
    "DAPO": (
        "clip_high",
        (0.20, 0.26, 0.28),
        {"loss": "clipped", "clip_low": 0.2},
    ),
}


def main() -> None:
    """Start the missing runs, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/stability"))
    parser.add_argument("--out", type=Path, default=Path("docs/stability.png"))
    options = parser.parse_args()
    found: dict[str, dict[float, list[list[dict]]]] = {}
    for loss, (setting, bounds, others) in ARMS.items():
        for bound in bounds:
            runs = [
                evaluations(
                    options.runs / f"{loss}-{bound}-seed{seed}",
                    others | {setting: bound},
                    seed=seed,
                    steps=options.steps,
                )
                for seed in options.seeds
            ]
            found.setdefault(loss, {})[bound] = runs
    print_tables(found)
    draw(found, options.out)
    print(f"\n{options.steps} steps, seeds {options.seeds}; {processor()}; "
          f"picture: {options.out}")  # fmt: skip


def evaluations(
    workdir: Path, objective: dict[str, object], *, seed: int, steps: int
) -> list[dict]:
    """Return the rows of a run's evals.jsonl; run it first if they are missing."""
    settings = {f"objective.{name}": value for name, value in objective.items()}
    settings |= {
        "seed": seed,
        "queue.mode": "batched",
        "queue.max_staleness": OFF_POLICY_STEPS,
        "train.num_steps": steps,
        "eval.every": max(steps // 5, 1),
        "eval.samples_per_prompt": 4,
    }
    subprocess.run(
        [
            sys.executable,
            "-m",
            "scalerl_jax.main",
            "--config=configs/tiny.py",
            f"--workdir={workdir}",
            *(f"--config.{name}={value}" for name, value in settings.items()),
        ],
        check=True,
    )
    lines = (workdir / "evals.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def print_tables(found: dict[str, dict[float, list[list[dict]]]]) -> None:
    """Print final pass rates by bound and seed, and each loss's spread over bounds."""
    print("\n| loss | bound | final pass rate of each seed | mean |")
    print("|---|---|---|---|")
    for loss, bounds in found.items():
        for bound, runs in bounds.items():
            rates = [run[-1]["pass_rate"] for run in runs]
            listed = ", ".join(f"{rate:.3f}" for rate in rates)
            print(f"| {loss} | {bound} | {listed} | {statistics.mean(rates):.3f} |")
    print("\n| loss | spread of the means over the bounds | of single runs |")
    print("|---|---|---|")
    for loss, bounds in found.items():
        rates = [[run[-1]["pass_rate"] for run in runs] for runs in bounds.values()]
        means = [statistics.mean(each) for each in rates]
        single = [rate for each in rates for rate in each]
        print(f"| {loss} | {max(means) - min(means):.3f} | "
              f"{max(single) - min(single):.3f} |")  # fmt: skip


def draw(found: dict[str, dict[float, list[list[dict]]]], out: Path) -> None:
    """Draw pass rate over optimizer steps: a panel per loss, a color per bound."""
    figure, panels = pyplot.subplots(1, len(found), figsize=(9, 3.8), sharey=True)
    for axes, (loss, bounds) in zip(panels, found.items(), strict=True):
        for number, (bound, runs) in enumerate(bounds.items()):
            for seed, run in enumerate(runs):
                axes.plot(
                    [row["step"] for row in run],
                    [row["pass_rate"] for row in run],
                    color=f"C{number}",
                    label=None if seed else f"{ARMS[loss][0]} = {bound:g}",
                )
        axes.set_title(loss)
        axes.set_xlabel("optimizer steps")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("pass rate on held-out prompts")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
