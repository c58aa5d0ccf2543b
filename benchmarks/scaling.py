"""Is the fitter right, are its intervals honest, and is it fast?

    make bench-scaling                          # everything, hours of one core
    python benchmarks/scaling.py --only=published,speed
    python benchmarks/scaling.py --curves=100   # fewer simulated curves

Prints Markdown.  Curves are simulated from the rows of ScaleRL's table 1
(https://arxiv.org/abs/2510.13786) with independent Gaussian noise, R0 = 0.25 known and
one evaluation per 150 GPU-hours from 1.5k GPU-hours on, unless a table says otherwise.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # one core, before NumPy is imported

import numpy as np  # noqa: E402
import scaling_cells  # noqa: E402
import scaling_claims  # noqa: E402
import scaling_compare  # noqa: E402
import scaling_fitters  # noqa: E402
import scaling_studies  # noqa: E402

from scalerl_jax import scaling  # noqa: E402
from scalerl_jax.scaling.identifiability import (  # noqa: E402
    NUM_POINTS,
    find_collapse,
    largest_fall,
    point_noise,
)

# C_mid, B, A, last GPU-hours.
PUBLISHED = {
    "ScaleRL": (2542, 1.92, 0.610, 16_000),
    "ScaleRL-32k": (11272, 1.89, 0.645, 50_000),
    "8 per prompt": (2542, 2.44, 0.585, 8_000),
    "24 per prompt": (3054, 2.22, 0.590, 8_000),
    "32 per prompt": (2936, 2.07, 0.595, 8_000),
    "Scout": (4242, 1.65, 0.710, 45_000),
    "batch 512": (2818, 1.77, 0.605, 16_000),
    "batch 2048": (10909, 1.70, 0.645, 100_000),
    "maths": (2896, 2.05, 0.595, 16_000),
    "code": (1675, 1.09, 0.615, 16_000),
}
TRUTH = {"A": 0.61, "B": 1.92, "C_mid": 2542.0}
R0 = 0.25
SIGMAS = (0.003, 0.006, 0.012)


def rate(x, c=2542.0, b=1.92, a=0.61):
    """Return pass rates by equation 1."""
    return R0 + (a - R0) / (1.0 + (c / x) ** b)


def hours(last, step=150.0):
    """Return the GPU-hours of the evaluations."""
    return np.arange(1500.0, last + 1, step)


def holds(interval, truth):
    """Return whether an interval contains a value; a missing end is no limit."""
    above = interval.low is None or interval.low <= truth
    return above and (interval.high is None or truth <= interval.high)


def table(*rows):
    """Print a Markdown table; the first row is its header."""
    head, *body = [[str(cell) for cell in row] for row in rows]
    for row in (head, ["---"] * len(head), *body):
        print("| " + " | ".join(row) + " |")
    print()


def published(_):
    """Print the fits of table 1's curves without noise."""
    print("### Published rows, noise-free\n")
    rows = [("row", "A, B, C_mid", "default", "--protocol paper", "largest error")]
    for name, (c, b, a, last) in PUBLISHED.items():
        x, found = hours(last), []
        for protocol in ("default", "paper"):
            fit = scaling.fit(x, rate(x, c, b, a), initial_reward=R0, protocol=protocol)
            found.append((fit.asymptote, fit.exponent, fit.midpoint))
        errors = np.abs(np.array(found) - (a, b, c)).max(axis=0) / (1, 1, c)
        rows.append(
            (
                name,
                f"{a:.3f}, {b:.2f}, {c}",
                *("{:.4f}, {:.3f}, {:.1f}".format(*values) for values in found),
                "{:.1g}, {:.1g}, {:.1g} of C_mid".format(*errors),
            )
        )
    table(*rows)


def coverage(num_curves):
    """Print how often the 90 % intervals contain the truth."""
    print(f"### Coverage of 90 % intervals, {num_curves} curves each, in %\n")
    head = (
        "noise",
        "data to",
        "A",
        "B",
        "C_mid",
        "curve at 2x the data",
        "A identified",
    )
    rows = [head]
    for last in (16_000, 8_000):
        for sigma in SIGMAS:
            rows.append(_coverage_row(last, sigma, num_curves))
    table(*rows)
    print("A point costs 1.3 % of standard error at 500 curves.\n")


def _coverage_row(last, sigma, num_curves):
    """Return the row of one noise level and window."""
    x, hits = hours(last), np.zeros(5)
    generator = np.random.default_rng(round(sigma * 1e4) + last)
    for _ in range(num_curves):
        y = rate(x) + generator.normal(0, sigma, x.size)
        fit = scaling.fit(x, y, initial_reward=R0)
        low, high = fit.band(2.0 * last)
        hits += [
            *(holds(fit.interval(name), truth) for name, truth in TRUTH.items()),
            low <= rate(2.0 * last) <= high,
            fit.identified,
        ]
    return (sigma, f"{last / 1000:g}k", *(f"{100 * h / num_curves:.1f}" for h in hits))


def variants(num_curves):
    """Print coverage of A by other intervals, and under correlated noise."""
    print(f"### Coverage for A of other intervals, {num_curves // 2} curves, in %\n")
    rows = [("noise 0.006, data to 16k", "profile", "moving-block bootstrap")]
    x, errors = hours(16_000, 300.0), np.full(49, 0.006)
    cases = {
        "independent": (0.0, {}),
        "independent, errors known": (
            0.0,
            {"standard_errors": errors, "errors_known": True},
        ),
        "independent, --robust": (0.0, {"robust": True}),
        "independent, R0 free": (0.0, {"initial_reward": "free"}),
        "AR(1), correlation 0.5": (0.5, {}),
    }
    for name, (correlation, settings) in cases.items():
        hits, generator = np.zeros(2), np.random.default_rng(5)
        for seed in range(num_curves // 2):
            noise = generator.normal(0, 0.006, x.size)
            for i in range(1, x.size):
                fresh = np.sqrt(1 - correlation**2) * noise[i]
                noise[i] = correlation * noise[i - 1] + fresh
            settings = {"initial_reward": R0} | settings
            fit = scaling.fit(x, rate(x) + noise, **settings)
            drawn = scaling.bootstrap(fit, num_resamples=300, seed=seed)
            hits += [holds(fit.interval("A"), 0.61), holds(drawn.intervals["A"], 0.61)]
        rows.append((name, *(f"{200 * h / num_curves:.1f}" for h in hits)))
    table(*rows)


def identified(num_curves):
    """Print how far the data must reach before A is called identified."""
    print(f"### A called identified, {num_curves // 5} curves each, in %\n")
    reaches = (1.0, 1.6, 2.4, 3.1, 6.3)
    rows = [("noise", *(f"data to {reach} C_mid" for reach in reaches))]
    for sigma in SIGMAS:
        shares = []
        for reach in reaches:
            x, generator = hours(reach * 2542), np.random.default_rng(9)
            calls = [
                scaling.fit(
                    x, rate(x) + generator.normal(0, sigma, x.size), initial_reward=R0
                ).identified
                for _ in range(num_curves // 5)
            ]
            shares.append(f"{100 * np.mean(calls):.0f}")
        rows.append((sigma, *shares))
    table(*rows)


def windows(_):
    """Print the paper's comparison of laws on one long run."""
    print("### A over windows of a simulated 100k-hour run (A = 0.645, noise 0.005)\n")
    x = np.arange(750.0, 100_001, 1350.0)
    y = rate(x, 10909, 1.70, 0.645) + np.random.default_rng(1).normal(0, 0.005, x.size)
    rows = [("window, GPU-hours", "sigmoid", "power law", "paper: sigmoid, power law")]
    for low, high, said in (
        (0, 100_000, "0.655, -"),
        (0, 50_000, "0.645, -"),
        (1500, 50_000, "0.645, 1.0"),
        (5000, 50_000, "0.645, 0.74"),
        (30_000, 60_000, "-, right"),
    ):
        seen = (x >= low) & (x <= high)
        fits = [
            scaling.fit(x[seen], y[seen], law=law, initial_reward=R0)
            for law in ("sigmoid", "power")
        ]
        cells = [
            f"{fit.asymptote:.3f}" + ("" if fit.identified else " (not identified)")
            for fit in fits
        ]
        rows.append((f"{low} to {high}", *cells, said))
    table(*rows)


FALL_POINTS = (5, 8, 12, 20, 50)


def collapse(num_curves):
    """Print how often a curve is called a collapse, rightly and not."""
    count = 10 * num_curves
    print(f"### Called a collapse, {count} curves each, in %\n")
    rows = [("curve", *(f"{n} points" for n in FALL_POINTS))]
    for sigma in (0.006, 0.012, 0.025, 0.05):
        for known in (False, True):
            name = f"climbs, noise {sigma}, {'known' if known else 'unknown'}"
            rows.append((name, *_fall_rates(count, sigma, known=known)))
    rows += [
        ("stays, noise 0.025", *_fall_rates(count, 0.025, gain=0.0)),
        ("climbs, 100 completions", *_fall_rates(count, 0.0, completions=100)),
        ("climbs, AR(1) noise 0.025, 0.5", *_fall_rates(count, 0.025, correlation=0.5)),
        ("half is lost, noise 0.012", *_fall_rates(count, 0.012, lost=0.5)),
        ("half is lost, noise 0.025", *_fall_rates(count, 0.025, lost=0.5)),
        ("all is lost, noise 0.025", *_fall_rates(count, 0.025, lost=1.0)),
    ]
    table(*rows)
    print("### Score that constant curves with noise 1 exceed in 0.5 %\n")
    generator, rows = np.random.default_rng(0), [("points", "known", "estimated")]
    for n in NUM_POINTS:
        curves = generator.normal(size=(count, n))
        scores = np.array([largest_fall(y)[0] for y in curves])
        noises = np.array([point_noise(y) for y in curves])
        limits = np.quantile(scores, 0.995), np.quantile(scores / noises, 0.995)
        rows.append((str(n), *(f"{limit:.2f}" for limit in limits)))
    table(*rows)


def _fall_rates(
    count,
    sigma,
    *,
    gain=1.0,
    lost=0.0,
    known=False,
    correlation=0.0,
    completions=0,
):
    """Return the share of sigmoids called a collapse, for each of FALL_POINTS, in %.

    With `lost`, that share of the gain is lost over the last third.
    """
    cells = []
    for n in FALL_POINTS:
        generator, called, x = np.random.default_rng(n), 0, np.arange(1.0, n + 1)
        for _ in range(count):
            a, b = generator.uniform(0.35, 0.95), generator.uniform(1.0, 2.5)
            c = n * np.exp(generator.uniform(-4.0, 0.7))
            y = R0 + gain * (rate(x, c, b, a) - R0)
            y -= lost * (y.max() - R0) * np.clip(4.0 * (x / n - 0.7), 0.0, 1.0)
            noise = generator.normal(0.0, sigma, n)
            for i in range(1, n):
                fresh = np.sqrt(1.0 - correlation**2) * noise[i]
                noise[i] = correlation * noise[i - 1] + fresh
            y = np.clip(y + noise, 0.0, 1.0)
            if completions:
                y = generator.binomial(completions, y) / completions
            errors = np.full(n, sigma) if known else None
            called += find_collapse(scaling.make_curve(x, y, y_se=errors)) is not None
        cells.append(f"{100 * called / count:.1f}")
    return cells


def speed(_):
    """Print seconds on one core: the least of several runs."""
    print("### Speed, one core, seconds\n")
    x = np.linspace(150.0, 16_000.0, 100)
    y = rate(x) + np.random.default_rng(0).normal(0, 0.006, x.size)
    fit = scaling.fit(x, y, initial_reward=R0)
    command = [sys.executable, "-c", "import scalerl_jax.scaling"]
    bare = [sys.executable, "-c", ""]
    importing = least(lambda: subprocess.run(command, check=True), 5)
    importing -= least(lambda: subprocess.run(bare, check=True), 5)
    fitting = least(lambda: scaling.fit(x, y, initial_reward=R0), 9)
    drawing = least(lambda: scaling.bootstrap(fit, num_resamples=1000), 3)
    paper = least(lambda: scaling.fit(x, y, initial_reward=R0, protocol="paper"), 3)
    table(
        ("what", "measured", "wanted"),
        (
            "fit of 100 points, profile intervals, R0 held and free",
            f"{fitting:.3f}",
            0.15,
        ),
        ("1,000 bootstrap refits of it", f"{drawing:.2f}", 5),
        ("the same by --protocol paper", f"{paper:.2f}", "-"),
        ("import scalerl_jax.scaling", f"{importing:.2f}", 0.5),
        ("report of 100 runs x 200 points", f"{report_seconds():.1f}", 60),
    )


def report_seconds():
    """Return seconds of the command `report` over many runs in one file."""
    generator, lines = np.random.default_rng(2), ["run,gpu_hours,pass_rate"]
    for run in range(100):
        x = np.linspace(80.0, 16_000.0, 200)
        noise = generator.normal(0, 0.006, 200)
        y = rate(x, a=generator.uniform(0.5, 0.65)) + noise
        lines += [f"{run},{a},{b}" for a, b in zip(x, y, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "runs.csv")
        file.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "scalerl_jax.scaling", "report", str(file)]
        command += ["--x=gpu_hours", "--y=pass_rate", "--group=run", "--r0=0.25"]
        command += [f"--out={folder}/report.html"]
        return least(
            lambda: subprocess.run(command, check=True, capture_output=True), 1
        )


def least(action, times):
    """Return the shortest of several runs, which other work disturbed least."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


PARTS = {
    part.__name__: part
    for part in (published, coverage, variants, identified, collapse, windows, speed)
} | {
    name: functools.partial(part, table=table)
    for parts in (
        scaling_claims.PARTS,
        scaling_compare.PARTS,
        scaling_cells.PARTS,
        scaling_studies.PARTS,
        scaling_fitters.PARTS,
    )
    for name, part in parts.items()
}


def main() -> None:
    """Print the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts: %(default)s")
    parser.add_argument("--curves", type=int, default=500, help="simulated, per row")
    options = parser.parse_args()
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error(f"--only: no part {part!r}; choose from {', '.join(PARTS)}")
        PARTS[part](options.curves)


if __name__ == "__main__":
    main()
