"""Our sampler beside its peers on the same work, and the cost of its own parts.

    make bench-sampler                                       # everything
    python benchmarks/sampler.py --sections=peers --workloads=W1 --rounds=1

`sampler_ours.py` is our side; README.md beside this file describes the measurements.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import bench as shared
from bench import OURS, Line, Section, print_disturbance, print_ratio, spread
from peers import work

# Name -> its environment's folder and its script.
PEERS = {
    "tunix": ("tunix", "run_tunix.py"),
    "generate": ("torch", "run_generate.py"),
    "continuous": ("torch", "run_continuous.py"),
}


class Bench(shared.Bench):
    """Contenders with the options of samplers."""

    def __init__(self, options: argparse.Namespace, weights: Path) -> None:
        """Make a bench of samplers."""
        super().__init__(options, weights, "sampler_ours.py", PEERS)

    def ours(self, command: str, workload: str, *arguments: str) -> Line:
        """Run one measurement of our sampler."""
        options = self.options
        return super().ours(
            command,
            workload,
            f"--rounds={options.rounds}",
            f"--page-size={options.page_size}",
            f"--tokens-per-call={options.tokens_per_call}",
            *arguments,
        )

    def contend(self, contender: str, workload: str) -> Line:
        """Measure both rates of a contender on a workload."""
        if contender == OURS:
            return self.ours("contender", workload, f"--slots={self.options.slots}")
        raw = contender == "continuous" and self.options.continuous_raw
        return self.peer(contender, workload, *(["--raw"] if raw else []))


def peers(bench: Bench) -> Line:
    """Measure every contender on every workload, in turns."""
    rows: Line = {}
    for workload in bench.options.workloads:
        rows[workload] = shared.take_turns(bench, workload, bench.contend)
        print_peers(workload, rows[workload])
    return rows


def print_peers(workload: str, rows: dict[str, list[Line]]) -> None:
    """Print a table of rates, and our ratio to the best peer."""
    rounds = len(rows[OURS])
    print(f"\n### {workload}: median of {rounds} rounds (least to greatest)\n")
    print(
        "| contender | useful tokens/s | raw tokens/s | peak MiB after useful / raw |"
    )
    print("|---|---|---|---|")
    for name, lines in rows.items():
        useful, raw = (rates(lines, kind) for kind in ("useful", "raw"))
        memory = " / ".join(
            f"{statistics.median(marks):,.0f}"
            for kind in ("useful", "raw")
            if (marks := [line[kind]["peak_rss_mb"] for line in lines if line[kind]])
        )
        print(f"| {name} | {spread(useful)} | {spread(raw)} | {memory} |")
    for kind in ("useful", "raw"):
        print_ratio(kind, {name: rates(lines, kind) for name, lines in rows.items()})
    print_disturbance(
        {
            name: [
                line[kind]["other_cores"]
                for line in lines
                for kind in ("useful", "raw")
                if line[kind]
            ]
            for name, lines in rows.items()
        }
    )
    shared.print_versions(rows)


def rates(lines: Sequence[Line], kind: str) -> list[float]:
    """Return tokens per second of each round; [] if the kind was not measured."""
    return [line[f"{kind}_tokens_per_s"] for line in lines if line[kind]]


def head(bench: Bench) -> Line:
    """Measure the cost of the float32 head."""
    line = bench.ours("head", "W2")
    print(
        f"\n### float32 head: {line['workload']}, {work.SEQUENCES} slots, "
        f"{line['new_tokens']} tokens each\n"
    )
    print("| compute dtype | without, s | with float32_head, s | cost |")
    print("|---|---|---|---|")
    seconds = {
        (row["dtype"], row["float32_head"]): [t["seconds"] for t in row["timings"]]
        for row in line["rows"]
    }
    for dtype in dict.fromkeys(row["dtype"] for row in line["rows"]):
        without, with_head = seconds[dtype, False], seconds[dtype, True]
        cost = statistics.median(with_head) / statistics.median(without) - 1.0
        cells = " | ".join(
            f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for values in (without, with_head)
        )
        print(f"| {dtype} | {cells} | {cost:+.1%} |")
    others = max(t["other_cores"] for row in line["rows"] for t in row["timings"])
    print(f"\nCores used by others, worst run: {others:.2f}.")
    return line


def update(bench: Bench) -> Line:
    """Measure the cost of new params."""
    lines = {
        workload: bench.ours("update", workload) for workload in bench.options.workloads
    }
    print("\n### Weight update: one call with new params, one without\n")
    print("| | params, MiB | call, ms | update, ms (quartiles) | of a call | pairs |")
    print("|---|---|---|---|---|---|")
    for workload, line in lines.items():
        low, high = (1e3 * bound for bound in line["update_seconds_quartiles"])
        share = line["update_seconds"] / line["call_seconds"]
        print(
            f"| {workload} | {line['params_mb']:.0f} | {1e3 * line['call_seconds']:.1f}"
            f" | {1e3 * line['update_seconds']:+.2f} ({low:+.2f} to {high:+.2f}) "
            f"| {share:+.2%} | {line['pairs']} |"
        )
    return lines


def host(bench: Bench) -> Line:
    """Measure the time that the device waits for Python."""
    line = bench.ours("host", "W1", f"--trace={bench.options.trace}")
    print(
        f"\n### Device waits for Python: {line['workload']}, {line['slots']} slots "
        f"kept full, {line['calls']} calls\n"
    )
    print(f"- share of the wall time, in the trace: {line['idle_share']:.2%}")
    print(f"- waiting per call: {1e3 * line['idle_seconds_per_call']:.2f} ms")
    print(
        f"- a call takes {1e3 * line['traced_seconds_per_call']:.1f} ms traced and "
        f"{1e3 * line['untraced_seconds_per_call']:.1f} ms untraced; of the latter the "
        f"waiting is {line['idle_share_untraced']:.2%}"
    )
    print(f"- trace ({line['events']} events): {line['trace']}")
    return line


def memory(bench: Bench) -> Line:
    """Measure cache bytes in use against tokens in the cache."""
    line = bench.ours("memory", "W1")
    print("\n### Cache memory against context: one sequence, two layers, one KV head\n")
    print("| context, tokens | pages in use, KiB | tokens held, KiB | ratio |")
    print("|---|---|---|---|")
    for row in line["rows"]:
        pages, tokens = row["pages_bytes"], row["tokens_bytes"]
        print(
            f"| {row['context']:,} | {pages / 1024:,.0f} | {tokens / 1024:,.0f} "
            f"| {pages / tokens:.3f} |"
        )
    return line


def prefix(bench: Bench) -> Line:
    """Measure what the prefix cache saves."""
    lines = {
        workload: bench.ours("prefix", workload) for workload in bench.options.workloads
    }
    print("\n### Prefix cache: prompts that begin alike, turns of conversations\n")
    print("| | | tokens prefilled, found | seconds without | with | ratio |")
    print("|---|---|---|---|---|---|")
    for workload, line in lines.items():
        of_kind: dict[str, list[Line]] = {}
        for row in line["rows"]:  # first without
            of_kind.setdefault(row["kind"], []).append(row)
        for kind, (without, cached) in of_kind.items():
            before, after = (
                statistics.median(timing["seconds"] for timing in row["timings"])
                for row in (without, cached)
            )
            stats = cached["stats"]
            print(
                f"| {workload} | {kind} | {stats['prefilled_tokens']:,}, "
                f"{stats['prefix_hit_tokens']:,} | {before:.2f} | {after:.2f} "
                f"| {before / after:.2f} |"
            )
    return lines


SECTIONS: dict[str, Section] = {
    "peers": peers,
    "head": head,
    "update": update,
    "host": host,
    "memory": memory,
    "prefix": prefix,
}


def main() -> None:
    """Run the command line."""
    parser = shared.parser(
        __doc__.splitlines()[0],
        sections=SECTIONS,
        peers=PEERS,
        out="runs/bench-sampler.json",
    )
    parser.add_argument("--slots", type=int, default=work.SEQUENCES,
                        help="of our useful run; the raw one has 128")  # fmt: skip
    parser.add_argument("--tokens-per-call", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=32, help="tokens")
    parser.add_argument("--continuous-raw", action="store_true",
                        help="also measure that peer's raw rate (minutes)")  # fmt: skip
    parser.add_argument("--trace", type=Path, default=Path("runs/bench-sampler-trace"))
    shared.run(parser.parse_args(), SECTIONS, PEERS, Bench)


if __name__ == "__main__":
    main()
