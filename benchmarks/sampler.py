"""Our sampler beside its peers on the same work, and what its own parts cost.

    make bench-sampler                                       # everything
    python benchmarks/sampler.py --sections=peers --workloads=W1 --rounds=1

Every measurement is a process of its own that prints one JSON line; contenders take
turns.  Prints Markdown tables; `--out` holds every single figure.  README.md beside
this file says what is measured.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import work

HERE = Path(__file__).resolve().parent
OURS = "scalerl_jax"
OUR_COMMAND = (sys.executable, HERE / "sampler_ours.py")
# Name -> its environment's folder and its script.
PEERS = {
    "tunix": ("tunix", "run_tunix.py"),
    "generate": ("torch", "run_generate.py"),
    "continuous": ("torch", "run_continuous.py"),
}
QUIET = 0.2  # cores that others may use before a figure is marked as disturbed
TIMEOUT_S = 3600  # of one process

Line = dict[str, Any]


class Bench:
    """Options, weights and environments; runs one process at a time."""

    def __init__(self, options: argparse.Namespace, weights: Path) -> None:
        """A bench whose weights are written when a workload is first asked for."""
        self.options = options
        self._weights = weights

    def weights(self, workload: str) -> Path:
        """The workload's Hugging Face directory, the same for every contender."""
        directory = self._weights / workload
        if not directory.exists():
            run_line([*OUR_COMMAND, "weights", f"--workload={workload}",
                      f"--weights={directory}"])  # fmt: skip
        return directory

    def ours(self, command: str, workload: str, *arguments: str) -> Line:
        """One measurement of our sampler."""
        options = self.options
        settings = [
            f"--workload={workload}",
            f"--weights={self.weights(workload)}",
            f"--rounds={options.rounds}",
            f"--page-size={options.page_size}",
            f"--tokens-per-call={options.tokens_per_call}",
        ]
        return run_line([*OUR_COMMAND, command, *settings, *arguments])

    def contend(self, contender: str, workload: str) -> Line:
        """Both rates of a contender on a workload."""
        if contender == OURS:
            return self.ours("contender", workload, f"--slots={self.options.slots}")
        environment, script = PEERS[contender]
        command = [
            self.options.peer_venvs / environment / "bin/python",
            HERE / "peers" / script,
            f"--workload={workload}",
            f"--weights={self.weights(workload)}",
        ]
        if contender == "continuous" and self.options.continuous_raw:
            command.append("--raw")
        return run_line(command)


def run_line(command: Sequence[object]) -> Line:
    """The JSON line that a process prints last.

    Raises:
        RuntimeError: with the end of its messages, where it fails.
    """
    words = list(map(str, command))
    print("#", " ".join(words), file=sys.stderr, flush=True)
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return json.loads(lines[-1])


def peers(bench: Bench) -> Line:
    """Every contender on every workload, in turns."""
    rows: dict[str, dict[str, list[Line]]] = {}
    for workload in bench.options.workloads:
        bench.weights(workload)
        contenders = [OURS, *bench.options.peers]
        rows[workload] = {name: [] for name in contenders}
        for _ in range(bench.options.rounds):
            for name in contenders:
                rows[workload][name].append(bench.contend(name, workload))
        print_peers(workload, rows[workload])
    return rows


def print_peers(workload: str, rows: dict[str, list[Line]]) -> None:
    """A table of rates, and our ratio to the best peer."""
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
        print_ratio(rows, kind)
    print_disturbance(rows)
    for name, lines in rows.items():
        packages = ", ".join(f"{p} {v}" for p, v in lines[0]["versions"].items())
        print(f"- {name}: {packages}")


def print_ratio(rows: dict[str, list[Line]], kind: str) -> None:
    """Our rate over that of the best peer, medians both."""
    medians = {
        name: statistics.median(found)
        for name, lines in rows.items()
        if (found := rates(lines, kind))
    }
    ours = medians.pop(OURS)
    if medians:
        best = max(medians, key=medians.__getitem__)
        print(f"\n{kind}: ours / best peer ({best}) = **{ours / medians[best]:.2f}**")


def rates(lines: Sequence[Line], kind: str) -> list[float]:
    """Tokens per second of each round; none where the kind was not measured."""
    return [line[f"{kind}_tokens_per_s"] for line in lines if line[kind]]


def spread(values: Sequence[float]) -> str:
    """Median, least and greatest."""
    if not values:
        return "not measured"
    median = statistics.median(values)
    return f"{median:,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def print_disturbance(rows: dict[str, list[Line]]) -> None:
    """Cores that other processes used while each contender was measured."""
    worst = {
        name: max(
            line[kind]["other_cores"]
            for line in lines
            for kind in ("useful", "raw")
            if line[kind]
        )
        for name, lines in rows.items()
    }
    figures = ", ".join(f"{name} {cores:.2f}" for name, cores in worst.items())
    print(f"\nCores used by others, worst round: {figures}.")
    disturbed = [name for name, cores in worst.items() if cores > QUIET]
    if disturbed:
        print(f"DISTURBED (above {QUIET}): {', '.join(disturbed)}; do not compare.")


def head(bench: Bench) -> Line:
    """What the float32 head costs."""
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
    """What handing over new params costs."""
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
    """How long the device waits for Python."""
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
    """Cache bytes in use against tokens held."""
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


SECTIONS: dict[str, Callable[[Bench], Line]] = {
    "peers": peers,
    "head": head,
    "update": update,
    "host": host,
    "memory": memory,
}


def machine() -> Line:
    """Processor, cores and versions of what drives the benchmark."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return dict(
        processor=model,
        cores=os.cpu_count(),
        system=platform.platform(),
        load_before=os.getloadavg()[0],
    )


def chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A comma-separated choice of `known`, in that order."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        wrong = sorted(set(names) - set(known))
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong}; choose from {list(known)}")
        return [name for name in known if name in names]

    return parse


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, known in (
        ("sections", SECTIONS), ("workloads", work.WORKLOADS), ("peers", PEERS),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", type=chosen(list(known)), default=list(known),
            help=f"comma-separated, of {', '.join(known)}",
        )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=work.SEQUENCES,
                        help="of our useful run; the raw one has 128")  # fmt: skip
    parser.add_argument("--tokens-per-call", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=32, help="tokens")
    parser.add_argument("--peer-venvs", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--continuous-raw", action="store_true",
                        help="also measure that peer's raw rate (minutes)")  # fmt: skip
    parser.add_argument("--trace", type=Path, default=Path("runs/bench-sampler-trace"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-sampler.json"))
    return parser.parse_args()


def main() -> None:
    """Run the chosen sections, print their tables, write the JSON."""
    options = parse_options()
    for environment, _ in (PEERS[name] for name in options.peers):
        python = options.peer_venvs / environment / "bin/python"
        if "peers" in options.sections and not python.exists():
            sys.exit(f"{python} does not exist: `make bench-sampler` makes it")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: Line = dict(machine=machine(), rounds=options.rounds)
    print(f"{found['machine']['processor']}, {found['machine']['cores']} cores, "
          f"load {found['machine']['load_before']} before")  # fmt: skip
    with tempfile.TemporaryDirectory() as weights:
        bench = Bench(options, Path(weights))
        for section in options.sections:
            found[section] = SECTIONS[section](bench)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nEvery figure: {options.out}")


if __name__ == "__main__":
    main()
