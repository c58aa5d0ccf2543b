"""Our train step beside its peers' on the same rollouts, and the cost of its parts.

    make bench-learner                                       # everything
    python benchmarks/learner.py --sections=peers --workloads=W1 --rounds=1

`learner_ours.py` is our side; README.md beside this file describes the measurements.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import bench as shared
import matplotlib
import numpy as np
from bench import OURS, Line, Section, print_disturbance, print_ratio, spread
from peers import work

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

# Name -> its environment's folder and its script.
PEERS = {"tunix": ("tunix", "train_tunix.py"), "trl": ("torch", "train_trl.py")}
RATES = {"dense": "tokens_per_s", "tail": "sequences_per_s"}
# Dense bfloat16 FLOP/s by a part of the device's name (NVIDIA's data sheets).
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
MIB, GIB = 2**20, 2**30
TOKENS, GPU_TOKENS = [2**power for power in range(10, 15)], [4096, 8192, 16384]


# Rows of 288 positions, shared and own tokens of our microbatch for a kind of lengths.
MICROBATCHES = {
    "W1": dict(dense="8,32,2048", tail="8,128,1664"),
    "W2": dict(dense="4,32,1024", tail="4,64,896"),
}


class Bench(shared.Bench):
    """Contenders with the options of learners."""

    def __init__(self, options: argparse.Namespace, weights: Path) -> None:
        """Make a bench of learners."""
        super().__init__(options, weights, "learner_ours.py", PEERS)

    def ours(self, command: str, workload: str, *arguments: str) -> Line:
        """Run one measurement of our learner."""
        options = self.options
        return super().ours(
            command,
            workload,
            f"--rounds={options.rounds}",
            f"--rows={options.rows}",
            f"--row-tokens={options.row_tokens}",
            *arguments,
        )

    def contend(self, contender: str, workload: str) -> Line:
        """Measure both rates of a contender on a workload."""
        if contender == OURS:
            shapes = MICROBATCHES[workload]
            given = (f"--{kind}={shape}" for kind, shape in shapes.items())
            return self.ours("contender", workload, *given)
        return self.peer(contender, workload)


def peers(bench: Bench) -> Line:
    """Measure every contender on every workload, in turns."""
    rows: Line = {}
    for workload in bench.options.workloads:
        before = bench.ours("product", workload)
        rows[workload] = shared.take_turns(bench, workload, bench.contend)
        # The faster of two: the machine is shared.
        after = bench.ours("product", workload)
        product = max(before, after, key=lambda line: line["peak_flops"])
        print_peers(workload, rows[workload], product)
    return rows


def print_peers(workload: str, rows: dict[str, list[Line]], product: Line) -> None:
    """Print a table of rates, shares of the product's, and ours to the best peer's.

    A share counts three times the forward FLOPs of every token, prompts of a group
    that a contender computes once included.
    """
    rounds = len(rows[OURS])
    per_token, peak = product["dense_flops_per_token"], product["peak_flops"]
    print(f"\n### {workload}: median of {rounds} rounds (least to greatest)\n")
    print(
        "| contender | dense, tokens/s | of the product's peak | "
        "long-tailed, rollouts/s | peak MiB after dense / after both |"
    )
    print("|---|---|---|---|---|")
    for name, lines in rows.items():
        memory = " / ".join(
            f"{statistics.median(line[kind]['peak_rss_mb'] for line in lines):,.0f}"
            for kind in RATES
        )
        dense, tail = (rates(lines, kind) for kind in RATES)
        share = statistics.median(dense) * per_token / peak
        print(
            f"| {name} | {spread(dense)} | {share:.0%} | {spread(tail, 1)} | {memory} |"
        )
    print(
        f"\n100 % is the machine's fastest float32 product, {peak / 1e9:,.0f} GFLOP/s: "
        f"{peak / per_token:,.0f} tokens/s"
    )
    for kind in RATES:
        print_ratio(kind, {name: rates(lines, kind) for name, lines in rows.items()})
    print_disturbance(
        {
            name: [line[kind]["other_cores"] for line in lines for kind in RATES]
            for name, lines in rows.items()
        }
    )
    shared.print_versions(rows)


def rates(lines: Sequence[Line], kind: str) -> list[float]:
    """Return the rate of each round."""
    return [line[kind][RATES[kind]] for line in lines]


def seconds(timings: Sequence[Line]) -> list[float]:
    """Return the seconds of every timing."""
    return [timing["seconds"] for timing in timings]


def disturbance(named: Mapping[str, Sequence[Line]]) -> None:
    """Print the cores that other processes used during these timings."""
    print_disturbance(
        {
            name: [timing["other_cores"] for timing in timings]
            for name, timings in named.items()
        }
    )


def packing(bench: Bench) -> Line:
    """Measure the gain of packing at the real lengths."""
    lines = {
        workload: bench.ours("packing", workload)
        for workload in bench.options.workloads
    }
    share = work.MEAN_NEW_TOKENS / work.MAX_NEW_TOKENS
    print(f"\n### Packing: completions of mean / greatest length = {share:.2f}\n")
    print("| | packed, tokens of loss/s | padded, tokens of loss/s | ratio |")
    print("|---|---|---|---|")
    for workload, line in lines.items():
        packed, padded = (
            [timing["tokens"] / timing["seconds"] for timing in line[way]]
            for way in ("packed", "padded")
        )
        ratio = statistics.median(packed) / statistics.median(padded)
        print(f"| {workload} | {spread(packed)} | {spread(padded)} | **{ratio:.2f}** |")
    disturbance(
        {name: [*line["packed"], *line["padded"]] for name, line in lines.items()}
    )
    return lines


def tokens(bench: Bench) -> Line:
    """Measure the time of a step against the tokens of its row."""
    listed = ",".join(map(str, bench.options.tokens))
    line = bench.ours("tokens", "W1", f"--tokens={listed}")
    sizes = np.array([row["tokens"] for row in line["rows"]], float)
    fits: Line = {}
    for way in ("whole", "cut"):
        measured = [statistics.median(seconds(row[way])) for row in line["rows"]]
        per_token, per_square = fit(sizes, np.array(measured))
        fits[way] = dict(seconds=measured, per_token=per_token, per_square=per_square)
    names = dict(whole="one segment", cut=f"segments of {line['segment']}")
    print("\n### A step on one row of T tokens, W1, attention in plain XLA\n")
    print("| T | one segment, s | its quadratic part | " + names["cut"] + ", s |")
    print("|---|---|---|---|")
    for place, row in enumerate(line["rows"]):
        quadratic = fits["whole"]["per_square"] * row["tokens"] ** 2
        print(
            f"| {row['tokens']:,} | {spread(seconds(row['whole']), 3)} "
            f"| {quadratic / fits['whole']['seconds'][place]:.0%} "
            f"| {spread(seconds(row['cut']), 3)} |"
        )
    print()
    for way, found in fits.items():
        print(
            f"- {names[way]}: a T + b T^2 with a = {1e6 * found['per_token']:.1f} us, "
            f"b = {1e12 * found['per_square']:.0f} ps"
        )
    disturbance({names[w]: [t for row in line["rows"] for t in row[w]] for w in names})
    picture = bench.options.out.parent / "bench-learner-tokens.png"
    draw_tokens(picture, sizes, fits, names)
    print(f"\nPicture: {picture}")
    return line | dict(fits=fits)


def fit(sizes: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Return a and b of a T + b T^2 with the least relative squared error."""
    terms = np.stack([sizes, sizes**2], axis=1) / measured[:, None]
    found, *_ = np.linalg.lstsq(terms, np.ones_like(measured), rcond=None)
    return float(found[0]), float(found[1])


def draw_tokens(
    path: Path, sizes: np.ndarray, fits: Line, names: Mapping[str, str]
) -> None:
    """Draw measured times as points, fits as lines, attention's share shaded."""
    grid = np.linspace(0.0, sizes.max() * 1.03, 300)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for way, color in (("whole", "C0"), ("cut", "C1")):
        found = fits[way]
        curve = found["per_token"] * grid + found["per_square"] * grid**2
        axes.plot(grid, curve, color=color, linewidth=1.5)
        axes.plot(sizes, found["seconds"], "o", color=color, markersize=5)
        axes.annotate(
            names[way], (grid[-1], curve[-1]), xytext=(6, 0), color=color,
            textcoords="offset points", va="center",
        )  # fmt: skip
    whole = fits["whole"]
    linear = whole["per_token"] * grid
    curve = linear + whole["per_square"] * grid**2
    axes.plot(grid, linear, "--", color="C0", linewidth=1.0, label="a T, of its fit")
    axes.fill_between(
        grid, linear, curve, color="C0", alpha=0.15, linewidth=0,
        label="b T²: the quadratic part of attention",
    )  # fmt: skip
    axes.set_xlabel("tokens of the row, T")
    axes.set_ylabel("seconds of an optimizer step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xticks([size for size in sizes if size >= sizes.max() / 8])
    axes.set_xlim(0, grid[-1])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def head(bench: Bench) -> Line:
    """Measure the head in chunks against all logits at once."""
    line = bench.ours("head", "W2")
    print(f"\n### Head, value and gradient: {line['workload']}\n")
    print("| tokens | way | s | temporary MiB |")
    print("|---|---|---|---|")
    for row in line["rows"]:
        print(
            f"| {row['tokens']:,} | {row['way']} "
            f"| {spread(seconds(row['timings']), 2)} "
            f"| {row['temporary_bytes'] / MIB:,.0f} |"
        )
    disturbance({f"{row['way']} {row['tokens']}": row["timings"]
                 for row in line["rows"]})  # fmt: skip
    return line


def remat(bench: Bench) -> Line:
    """Measure the time and the memory of each remat policy."""
    line = bench.ours("remat", "W2")
    options = bench.options
    print(
        f"\n### Rematerialisation: {line['workload']}, microbatches of {options.rows} "
        f"rows of {options.row_tokens} tokens\n"
    )
    print("| remat | update, s | against none | temporary MiB | against none |")
    print("|---|---|---|---|---|")
    first = line["rows"][0]
    for row in line["rows"]:
        time = statistics.median(seconds(row["timings"]))
        time /= statistics.median(seconds(first["timings"]))
        memory = row["temporary_bytes"] / first["temporary_bytes"]
        print(
            f"| {row['remat']} | {spread(seconds(row['timings']), 2)} | {time:.2f} "
            f"| {row['temporary_bytes'] / MIB:,.0f} | {memory:.2f} |"
        )
    disturbance({row["remat"]: row["timings"] for row in line["rows"]})
    return line


def gpu(bench: Bench) -> Line:
    """Measure the share of a GPU's FLOP/s of large shapes, by tokens of a row."""
    options = bench.options
    script = shared.HERE / "learner_gpu.py"
    print("\n### One GPU, bfloat16, one row of one segment\n")
    rows: list[Line] = []
    for model in ("1B", "8B"):
        for size in options.gpu_tokens:
            head = "float32-head" if options.float32_head else "no-float32-head"
            rows.append(
                shared.run_line(
                    [sys.executable, script, f"--model={model}", f"--tokens={size}",
                     f"--rounds={options.rounds}", f"--remat={options.remat}",
                     f"--{head}"]
                )
            )  # fmt: skip
            if "timings" not in rows[-1]:
                print("no GPU")
                return dict(rows=rows)
    print_gpu(rows)
    return dict(rows=rows)


def print_gpu(rows: Sequence[Line]) -> None:
    """Print a table of time, FLOP/s, utilisation and memory."""
    device = rows[0]["device"]
    peak = next((PEAK_FLOPS[name] for name in PEAK_FLOPS if name in device), None)
    print(f"{device}, remat {rows[0]['remat']}, "
          f"float32_head {rows[0]['float32_head']}\n")  # fmt: skip
    print("| model | layers | parameters | tokens | step, s | TFLOP/s | MFU | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        shape = (
            f"| {row['model']} | {row['layers']} of {row['of_layers']} "
            f"| {row['parameters'] / 1e9:.2f} B | {row['tokens']:,} "
        )
        if row["timings"] is None:
            print(f"{shape}| out of memory | | | |")
            continue
        times = seconds(row["timings"])
        flops = row["flops"] / statistics.median(times)
        share = f"{flops / peak:.1%}" if peak else "peak unknown"
        memory = row["peak_bytes"]
        print(
            f"{shape}| {spread(times, 3)} | {flops / 1e12:.0f} | {share} "
            f"| {f'{memory / GIB:.1f}' if memory else 'unknown'} |"
        )


SECTIONS: dict[str, Section] = {
    "peers": peers,
    "packing": packing,
    "tokens": tokens,
    "head": head,
    "remat": remat,
    "gpu": gpu,
}


def main() -> None:
    """Run the command line."""
    parser = shared.parser(
        __doc__.splitlines()[0],
        sections=SECTIONS,
        peers=PEERS,
        out="runs/bench-learner.json",
    )
    parser.add_argument("--rows", type=int, default=8, help="of our microbatch")
    parser.add_argument("--row-tokens", type=int, default=288)
    parser.add_argument("--tokens", type=sizes, default=TOKENS,
                        help="rows of section tokens, multiples of 512")  # fmt: skip
    parser.add_argument("--gpu-tokens", type=sizes, default=GPU_TOKENS)
    parser.add_argument("--remat", default="none", help="of section gpu")
    parser.add_argument("--float32-head", action=argparse.BooleanOptionalAction,
                        default=True, help="of section gpu")  # fmt: skip
    shared.run(parser.parse_args(), SECTIONS, PEERS, Bench)


def sizes(text: str) -> list[int]:
    """Parse comma-separated numbers of tokens."""
    return [int(size) for size in text.split(",")]


if __name__ == "__main__":
    main()
