"""Shared parts of the benchmarks: processes that print a JSON line, tables, options.

Every measurement is a separate process that prints one JSON line; contenders take
turns.  Prints Markdown tables; every single figure is written to `--out`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import work

HERE = Path(__file__).resolve().parent
OURS = "scalerl_jax"
QUIET = 0.2  # cores that others may use before a figure is marked as disturbed
TIMEOUT_S = 3600  # of one process

Line = dict[str, Any]
# Name of a peer -> its environment's folder and its script.
Peers = Mapping[str, tuple[str, str]]


class Bench:
    """Options, weights and environments; runs one process at a time."""

    def __init__(
        self, options: argparse.Namespace, weights: Path, script: str, peers: Peers
    ) -> None:
        """Make a bench, which writes a workload's weights when they are first needed.

        `script` is our side of the benchmark, beside this file.
        """
        self.options = options
        self._weights = weights
        self._ours = (sys.executable, HERE / script)
        self._peers = peers

    def weights(self, workload: str) -> Path:
        """Return the workload's Hugging Face directory, the same for all contenders."""
        directory = self._weights / workload
        if not directory.exists():
            run_line([*self._ours, "weights", f"--workload={workload}",
                      f"--weights={directory}"])  # fmt: skip
        return directory

    def ours(self, command: str, workload: str, *arguments: str) -> Line:
        """Run one measurement of ours."""
        return run_line([*self._ours, command, *self._work(workload), *arguments])

    def peer(self, name: str, workload: str, *arguments: str) -> Line:
        """Run one measurement of a peer."""
        environment, script = self._peers[name]
        python = self.options.peer_venvs / environment / "bin/python"
        script_path = HERE / "peers" / script
        return run_line([python, script_path, *self._work(workload), *arguments])

    def _work(self, workload: str) -> list[str]:
        return [f"--workload={workload}", f"--weights={self.weights(workload)}"]


Section = Callable[[Any], Line]


def take_turns(
    bench: Bench, workload: str, contend: Callable[[str, str], Line]
) -> dict[str, list[Line]]:
    """Run ours and the chosen peers `--rounds` times; return the lines of each."""
    bench.weights(workload)
    rows: dict[str, list[Line]] = {name: [] for name in (OURS, *bench.options.peers)}
    for _ in range(bench.options.rounds):
        for name, lines in rows.items():
            lines.append(contend(name, workload))
    return rows


def run_line(command: Sequence[object]) -> Line:
    """Return the JSON line that a process prints last.

    Raises:
        RuntimeError: the process fails; has the end of its messages.
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


def print_ratio(label: str, rates: Mapping[str, Sequence[float]]) -> None:
    """Print our rate over that of the best peer, both medians."""
    medians = {name: statistics.median(found) for name, found in rates.items() if found}
    ours = medians.pop(OURS)
    if medians:
        best = max(medians, key=medians.__getitem__)
        print(f"\n{label}: ours / best peer ({best}) = **{ours / medians[best]:.2f}**")


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return median, least and greatest."""
    if not values:
        return "not measured"
    median, low, high = (
        f"{value:,.{digits}f}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} to {high})"


def print_disturbance(other_cores: Mapping[str, Sequence[float]]) -> None:
    """Print the cores that other processes used during each measurement."""
    worst = {name: max(cores) for name, cores in other_cores.items()}
    figures = ", ".join(f"{name} {cores:.2f}" for name, cores in worst.items())
    print(f"\nCores used by others, worst: {figures}.")
    disturbed = [name for name, cores in worst.items() if cores > QUIET]
    if disturbed:
        print(f"DISTURBED (above {QUIET}): {', '.join(disturbed)}; do not compare.")


def print_versions(rows: Mapping[str, Sequence[Line]]) -> None:
    """Print the packages of each contender."""
    for name, lines in rows.items():
        packages = ", ".join(f"{p} {v}" for p, v in lines[0]["versions"].items())
        print(f"- {name}: {packages}")


def machine() -> Line:
    """Return processor, cores and versions of the process that drives the benchmark."""
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
    """Return a parser of a comma-separated choice of `known`, in that order."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        wrong = sorted(set(names) - set(known))
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong}; choose from {list(known)}")
        return [name for name in known if name in names]

    return parse


def parser(
    description: str, *, sections: Mapping[str, Section], peers: Peers, out: str
) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    for name, known in (
        ("sections", sections), ("workloads", work.WORKLOADS), ("peers", peers),
    ):  # fmt: skip
        made.add_argument(
            f"--{name}", type=chosen(list(known)), default=list(known),
            help=f"comma-separated, of {', '.join(known)}",
        )  # fmt: skip
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--peer-venvs", type=Path, default=Path(".venv-peers"))
    made.add_argument("--out", type=Path, default=Path(out))
    return made


def run(
    options: argparse.Namespace,
    sections: Mapping[str, Section],
    peers: Peers,
    make_bench: Callable[[argparse.Namespace, Path], Bench],
) -> None:
    """Run the chosen sections, print their tables, write the JSON after each."""
    for environment, _ in (peers[name] for name in options.peers):
        python = options.peer_venvs / environment / "bin/python"
        if "peers" in options.sections and not python.exists():
            sys.exit(f"{python} does not exist: `make {options.out.stem}` makes it")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: Line = dict(machine=machine(), rounds=options.rounds)
    print(f"{found['machine']['processor']}, {found['machine']['cores']} cores, "
          f"load {found['machine']['load_before']} before")  # fmt: skip
    with tempfile.TemporaryDirectory() as weights:
        bench = make_bench(options, Path(weights))
        for section in options.sections:
            found[section] = sections[section](bench)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            sys.stdout.flush()
    print(f"\nEvery figure: {options.out}")
