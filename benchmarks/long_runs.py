"""The cost of the commands and of a resume on the files of a very long run.

    python benchmarks/long_runs.py                       # everything, two minutes
    python benchmarks/long_runs.py --only=fitter --evaluations=10000
    python benchmarks/long_runs.py --only=resume --rows=100000
    python benchmarks/long_runs.py --only=binning --curves=100

Makes run directories with rows like those of a real run (300 prompts, 80 metrics per
step), and prints Markdown with the machine's name.  `binning` fits simulated curves
with and without the fitter's bins.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # one core, before NumPy is imported

import numpy as np  # noqa: E402
from scipy.signal import lfilter  # noqa: E402

from scalerl_jax.run.metrics import MetricsWriter  # noqa: E402
from scalerl_jax.scaling import Settings, make_curve, sigmoid  # noqa: E402
from scalerl_jax.scaling import bins as bins_of  # noqa: E402
from scalerl_jax.scaling.fit import fit_alone  # noqa: E402

TRUTH = {"initial_reward": 0.25, "asymptote": 0.61, "exponent": 1.92, "midpoint": 1.0}
REACH = 6.3  # C_mid
NUM_PROMPTS, NUM_SAMPLES = 300, 2
NAMES = {"A": "asymptote", "B": "exponent", "C_mid": "midpoint"}
# Evaluations, their spacing, reach in C_mid, noise and its AR(1) correlation.
DESIGNS = (
    (2000, "linear", 6.3, 0.012, 0.0),
    (2000, "linear", 6.3, 0.05, 0.5),
    (2000, "linear", 1.6, 0.025, 0.0),
    (2000, "log", 6.3, 0.003, 0.0),
    (10_000, "linear", 40.0, 0.006, 0.0),
)
COMMANDS = ("fit", "watch", "extrapolate", "plan", "report")
LONG_ROW = 10 * 2**20  # bytes


def machine():
    """Return the processor's name and the number of cores."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def table(title, *rows):
    """Print a Markdown table; the first row is its header."""
    print(f"### {title} ({machine()})\n")
    head, *body = [[str(cell) for cell in row] for row in rows]
    for row in (head, ["---"] * len(head), *body):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def evaluation(step, compute, generator):
    """Return a row of evals.jsonl at a compute."""
    chance = np.clip(sigmoid(compute, **TRUTH), 0.0, 1.0)
    rates = generator.binomial(NUM_SAMPLES, chance, NUM_PROMPTS) / NUM_SAMPLES
    return {
        "step": step,
        "policy_version": step,
        "compute_chip_hours": compute,
        "train_tokens": 2000 * step,
        "generated_tokens": 4000 * step,
        "pass_rate": float(rates.mean()),
        "pass_rate_se": float(rates.std() / NUM_PROMPTS**0.5),
        "num_prompts": NUM_PROMPTS,
        "samples_per_prompt": NUM_SAMPLES,
        "prompt_pass_rates": rates.tolist(),
    }


def make_run(folder, evaluations, metrics=0):
    """Write the files of a run; every step has an evaluation or a row of metrics."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    last = max(evaluations, metrics)
    config = {"config": {"train": {"num_steps": 2 * last}, "eval": {"every": 1}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "ledger.json").write_text(json.dumps({"chip": "v5e"}))
    with (folder / "evals.jsonl").open("w") as file:
        for step in range(evaluations + 1):
            row = evaluation(step, REACH * step / last, generator)
            file.write(json.dumps(row) + "\n")
    if metrics:
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, metrics + 1):
                numbers = generator.normal(size=80).tolist()
                row = {f"part/metric_{i}": number for i, number in enumerate(numbers)}
                file.write(json.dumps({"step": step, **row}) + "\n")
    return folder


def seconds(command):
    """Return wall time and CPU time of a command of `scalerl`."""
    begun, before = time.perf_counter(), _of_children()
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):  # 3: an alarm
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return f"{time.perf_counter() - begun:.1f}", f"{_of_children() - before:.1f}"


def _of_children():
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fitter(options, folder):
    """Time the commands over one run."""
    count = options.evaluations
    path = str(make_run(folder / "long", count, metrics=count))
    rows = [("command", "seconds", "of CPU", "largest file, kB")]
    for name in options.commands.split(","):
        extra = ["--once"] if name == "watch" else []
        extra += [f"--out={folder}/report.html"] if name == "report" else []
        took = seconds(["scalerl_jax.scaling", name, path, *extra])
        made = [*folder.glob("*.html"), *(folder / "long").glob("fit.*")]
        size = max((file.stat().st_size for file in made), default=0)
        rows.append((name, *took, f"{size / 1000:.0f}"))
        for file in made:
            file.unlink()
    table(f"A run of {options.evaluations} evaluations", *rows)


def status(options, folder):
    """Time `status` where the last row is long."""
    rows = [("last row of metrics.jsonl", "seconds", "of CPU")]
    run = make_run(folder / "status", 10)
    for size in (1000, LONG_ROW):
        whole = {"step": 1, "staleness/mean": 0.0, "staleness/in_flight_mean": 0.0}
        whole |= {"staleness/queued_mean": 0.0, "staleness/max": 0, "queue/dropped": 0}
        whole |= {"throughput/generated_tokens_per_s": 0.0, "verifier/restarts": 0}
        whole |= {"throughput/trained_tokens_per_s": 0.0, "text": "x" * size}
        (run / "metrics.jsonl").write_text(json.dumps(whole) + "\n")
        rows.append((f"{size} bytes", *seconds(["scalerl_jax.status", str(run)])))
    table("status", *rows)


def resume(options, folder):
    """Time the files of numbers in a resume, at their end and before it."""
    rows = [("rows", "goes on from", "MB", "seconds", "of CPU")]
    for count in (1000, options.rows):
        for share in (1.0, 0.9):
            run = make_run(folder / f"resume-{count}-{share}", count, count)
            step = round(share * count)
            size = sum(file.stat().st_size for file in run.glob("*.jsonl")) / 1e6
            begun, own = time.perf_counter(), time.process_time()
            with MetricsWriter(run, after=step) as writer:
                assert writer.has_eval(step) and not writer.has_eval(step + 1)
            took = time.perf_counter() - begun, time.process_time() - own
            shown = (f"{each:.2f}" for each in took)
            rows.append((count, f"step {step}", f"{size:.0f}", *shown))
            for file in run.glob("*.jsonl"):
                file.unlink()
    table("metrics.jsonl and evals.jsonl of a run that goes on", *rows)


def binning(options, _):
    """Compare fits of the means of neighbours with fits of every evaluation."""
    rows = [
        (
            "evaluations",
            "reach",
            "noise (AR(1))",
            "A, B, C_mid in 90 % intervals: all, binned",
            "identified: all, binned",
            "largest difference of A, B, C_mid in half-widths",
            "of the half-widths themselves",
        )
    ]
    for design in DESIGNS:
        rows.append(_binning_row(*design, options.curves))
    table(f"Fits of means of bins, {options.curves} curves each", *rows)


def _binning_row(count, spacing, reach, noise, correlation, num_curves):
    """Return the row of one design."""
    generator = np.random.default_rng([count, round(10 * reach), round(1e4 * noise)])
    x = np.geomspace(reach / count, reach, count)
    x = x if spacing == "log" else np.linspace(reach / count, reach, count)
    x = np.append(0.0, x)
    covered, identified = np.zeros((2, 3), int), np.zeros(2, int)
    moved, wider = np.zeros(3), np.zeros(3)
    most = bins_of.MOST_POINTS
    for _ in range(num_curves):
        shocks = generator.normal(0, noise * (1 - correlation**2) ** 0.5, x.size)
        errors = lfilter([1.0], [1.0, -correlation], shocks)
        curve = make_curve(x, np.clip(sigmoid(x, **TRUTH) + errors, 0.0, 1.0))
        fits = []
        for place, limit in enumerate((count + 2, most)):
            bins_of.MOST_POINTS = limit
            fits.append(fit_alone(curve, Settings()))
            covered[place] += [_holds(fits[-1], name) for name in NAMES]
            identified[place] += fits[-1].identified
        whole, binned = (
            np.array([_widths(fit, name) for name in NAMES]) for fit in fits
        )
        half = whole[:, 1:].mean(axis=1)
        moved = np.fmax(moved, np.abs(binned[:, 0] - whole[:, 0]) / half)
        wider = np.fmax(wider, np.abs(binned[:, 1:].mean(axis=1) / half - 1.0))
    shares = ["/".join(f"{100 * c / num_curves:.0f}" for c in each) for each in covered]
    return (
        f"{count}, {spacing} x",
        reach,
        f"{noise} ({correlation})",
        ", ".join(shares),
        ", ".join(f"{100 * each / num_curves:.0f}" for each in identified),
        ", ".join(f"{each:.3f}" for each in moved),
        ", ".join(f"{each:.3f}" for each in wider),
    )


def _holds(fit, name):
    """Return whether an interval contains the truth; an open end is no limit."""
    interval, truth = fit.interval(name), TRUTH[NAMES[name]]
    above = interval.low is None or interval.low <= truth
    return above and (interval.high is None or truth <= interval.high)


def _widths(fit, name):
    """Return a parameter's value, and its distances to the interval's ends."""
    value, interval = fit.value(name), fit.interval(name)
    low = np.nan if interval.low is None else value - interval.low
    return value, low, np.nan if interval.high is None else interval.high - value


PARTS = {part.__name__: part for part in (fitter, status, resume, binning)}


def main():
    """Print the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts: %(default)s")
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--evaluations", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--curves", type=int, default=60)
    options = parser.parse_args()
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error(f"--only: no part {part!r}; choose from {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](options, Path(folder))


if __name__ == "__main__":
    main()
