"""A config over several seeds: its figures in all texts that quote them, its picture.

    make seeds                                  # runs the demo's seeds, then this
    make smollm2                                # those of configs/smollm2_cpu.py
    python benchmarks/seeds.py tiny runs/tiny-seed0 runs/tiny-seed1
    python benchmarks/seeds.py tiny             # writes the texts again, reads no run

Figures are kept in `docs/figures/NAME.json` and copied from there into the table of a
page and the docstring of `configs/NAME.py`; a test compares the texts with the file.
Per run: pass rate before and after, and over the tokens sampled the fit with its 90 %
interval, R^2, the forecast of the last evaluation from the first half of the compute,
with its 90 % band, and the law with the best forecast.
"""

import argparse
import json
import os
import platform
import re
import textwrap
from pathlib import Path
from typing import Any

from scalerl_jax import scaling
from scalerl_jax.scaling import plots

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {"tiny": "make seeds", "smollm2_cpu": "make smollm2"}  # by config
PAGES = {  # with the table
    "tiny": "docs/tutorials/first-run.md",
    "smollm2_cpu": "docs/smollm2.md",
}
AXIS = "generated_tokens"  # chip-hours of a CPU depend on its other load


def main() -> None:
    """Read the runs, keep their figures, draw the picture, write the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=COMMANDS, help="of the config")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument(
        "--busy",
        action="store_true",
        help="the machine had other work: keep the times of the runs before",
    )
    options = parser.parse_args()
    if options.runs:
        figures = read(options.name, options.runs)
        if options.busy:
            before = json.loads(kept(options.name).read_text())
            figures["machine"] = before["machine"]
            for run, old in zip(figures["runs"], before["runs"], strict=True):
                run["seconds"] = old["seconds"]
        kept(options.name).write_text(json.dumps(figures, indent=2) + "\n")
        draw(options.runs, ROOT / "docs" / f"{options.name}.png")
    for path, pattern, text in places(options.name):
        path.write_text(replaced(path, pattern, text))
        print(f"{path.relative_to(ROOT)}:\n{text}")


def kept(name: str) -> Path:
    """Return the file of the figures of a config."""
    return ROOT / "docs" / "figures" / f"{name}.json"


def read(name: str, runs: list[Path]) -> dict[str, Any]:
    """Return the figures of the runs, and where they were measured."""
    settings = [json.loads((run / "config.json").read_text()) for run in runs]
    return {
        "command": COMMANDS[name],
        # The times' own, as `--busy` keeps both.
        "machine": f"{os.cpu_count()} cores of {processor()}",
        "jax": settings[0]["versions"]["jax"],
        "steps": settings[0]["config"]["train"]["num_steps"],
        "runs": [
            {"seed": each["seed"]} | measured(run)
            for each, run in zip(settings, runs, strict=True)
        ],
    }


def measured(run: Path) -> dict[str, Any]:
    """Return the figures of one run; None for those that its data do not give."""
    evals = rows(run / "evals.jsonl")
    return {
        "before": round(evals[0]["pass_rate"], 3),
        "after": round(evals[-1]["pass_rate"], 3),
        # From the start of the loop on: steps, and the evaluations between them.
        "seconds": round(
            sum(row["time/step_s"] for row in rows(run / "metrics.jsonl"))
        ),
        "fit": fitted(run),
    }


def fitted(run: Path) -> dict[str, Any]:
    """Return the fit of one run, and the forecast from its first half."""
    curve = scaling.load_curve(run, x=AXIS)
    fit = scaling.fit_curve(curve)
    interval, forecast = fit.asymptote_interval, fit.half_forecast
    band = best = None
    if forecast is not None:
        tested = scaling.extrapolate_curve(curve)
        early = tested.get("sigmoid", 0.5).fit
        low, high = early.prediction_band(fit.x_last)
        band = [round(float(low), 3), round(float(high), 3)]
        best = tested.best_law
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
        "band": band,
        "best_law": best,
    }


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(name: str) -> list[tuple[Path, str, str]]:
    """Return each file that quotes figures, the pattern to replace, and its text."""
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
    """Return the file's text, with `text` in place of the one match of the pattern."""
    found, count = re.subn(pattern, lambda _: text, path.read_text(), flags=re.DOTALL)
    assert count == 1, f"{path}: {count} places for {pattern}"
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the table of a page, in Markdown."""
    lines = [
        "| seed | before | after | A (90 % interval) | B | C_mid | R² | last "
        "evaluation, foretold from the first half | its 90 % band | best law |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(line_of(run) for run in figures["runs"]),
        "",
        "Over tokens sampled. Errors are foretold minus measured; the best law has the "
        "least error of `extrapolate` on later points.",
        *missed(figures["runs"]),
        f"JAX {figures['jax']}. `{figures['command']}` does it again.",
    ]
    return "\n".join(lines) + "\n"


def missed(runs: list[dict[str, Any]]) -> list[str]:
    """Return how often the band held the last evaluation, among forecasts."""
    bands = [run["fit"]["band"] for run in runs]
    told = [b is not None for b in bands]
    if not any(told):
        return []
    held = sum(is_inside(run) for run in runs if run["fit"]["band"])
    return [f"The last evaluation lay in the band in {held} of {sum(told)} runs."]


def is_inside(run: dict[str, Any]) -> bool:
    """Return whether the last evaluation of a run was inside the forecast's band."""
    low, high = run["fit"]["band"]
    return low <= run["after"] <= high


def line_of(run: dict[str, Any]) -> str:
    """Return the line of a run in the table."""
    fit = run["fit"]
    asymptote, predicted, band = "not identified", "too few evaluations", "-"
    if fit["interval"]:
        low, high = fit["interval"]
        asymptote = f"{fit['asymptote']:.3f} [{low:.3f}, {high:.3f}]"
    if fit["predicted"] is not None:
        predicted = f"{fit['predicted']:.3f} ({fit['error']:+.3f})"
        low, high = fit["band"]
        band = f"[{low:.3f}, {high:.3f}], {'inside' if is_inside(run) else 'outside'}"
    return (
        f"| {run['seed']} | {run['before']:.3f} | {run['after']:.3f} | {asymptote} | "
        f"{fit['exponent']:.2f} | {fit['midpoint']:,.0f} | {fit['r_squared']:.3f} | "
        f"{predicted} | {band} | {fit['best_law'] or '-'} |"
    )


def sentence(figures: dict[str, Any]) -> str:
    """Return the sentence on the result in the config's docstring."""
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
    """Draw evaluations with their fits, bands and A, over tokens sampled."""
    fits, names = [], []
    for run in runs:
        seed = json.loads((run / "config.json").read_text())["seed"]
        fits.append(scaling.fit_curve(scaling.load_curve(run, x=AXIS)))
        names.append(f"seed {seed}")
    picture.write_bytes(plots.to_png(plots.draw_fits(fits, names)))


def processor() -> str:
    """Return the name of the processor, AMD's or Intel's, if the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = re.sub(r"\((R|TM)\)|Processor", "", line.partition(":")[2])
                return f"an {' '.join(name.split())}"
    return f"an {platform.processor()}"


if __name__ == "__main__":
    main()
