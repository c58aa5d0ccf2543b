"""Size of the code: lines, modules that a run loads, cycles, repeated code, test time.

    make measures

Prints a line per measure.
"""

import argparse
import ast
import collections
import graphlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "scalerl_jax"
WINDOW = 6  # equal lines that count as repeated code
# A run of a few steps.  At its end it prints which of our modules it has loaded, and
# which functions ran from the second batch to the checkpoint: the path of a rollout.
RUN = """
import atexit, json, runpy, sys, threading
out = sys.argv[1]
batches, ran = 0, set()
def note(frame, event, _):
    global batches
    code = frame.f_code
    if event != "call" or "/scalerl_jax/" not in code.co_filename:
        return
    if code.co_filename.endswith("/monitor.py") and code.co_name == "open":
        batches += 1
    elif code.co_filename.endswith("/train.py") and code.co_name == "save":
        batches = -100
    if batches >= 2:
        ran.add((code.co_filename, code.co_firstlineno))
def tell():
    files = {getattr(each, "__file__", None) for name, each in list(sys.modules.items())
             if name.partition(".")[0] == "scalerl_jax"}
    found = {"loaded": sorted(filter(None, files)), "ran": sorted(ran)}
    json.dump(found, open(out + ".json", "w"))
sys.argv = [out, "--config=configs/tiny.py", f"--workdir={out}/run",
    "--config.train.num_steps=4", "--config.eval.num_prompts=20",
    "--config.eval.every=100", "--config.batch.num_prompts=4"]
atexit.register(tell)
threading.setprofile(note)
sys.setprofile(note)
runpy.run_module("scalerl_jax.main", run_name="__main__", alter_sys=False)
"""
# Not on a rollout's path: files, books, settings.
BESIDE = {"utils", "config", "wiring", "parallel"}


def main() -> None:
    """Print every measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-run", action="store_true", help="leave out the tiny run")
    options = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    print(f"package: {sum(map(lines, files)):,} lines in {len(files)} files")
    if not options.no_run:
        loaded, ran = run_tiny()
        total = sum(map(lines, loaded))
        print(f"a tiny run loads: {len(loaded)} modules, {total:,} lines")
        passed = dict(passes(path, begins) for path, begins in ran.items())
        print(
            f"a rollout passes: {len(passed)} files, {sum(passed.values()):,} lines of "
            f"functions"
        )
    print(f"import cycles: {cycle() or 'none'}")
    print(f"functions: {functions(files)}")
    print(f"repeated places: {repeated(files)} pairs that share {WINDOW} lines or more")
    print(f"README: {(ROOT / 'README.md').stat().st_size:,} bytes")


def lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def run_tiny() -> tuple[list[Path], dict[Path, set[int]]]:
    """Return modules that a run of `configs/tiny.py` loads, and a rollout's functions.

    The functions are given by the lines on which they begin, by file.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN, folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        found = json.loads(Path(f"{folder}.json").read_text())
    ran = collections.defaultdict(set)
    for name, line in found["ran"]:
        path = Path(name)
        if path.relative_to(PACKAGE).parts[0] not in BESIDE:
            ran[path].add(line)
    return [Path(name) for name in found["loaded"]], ran


def passes(path: Path, begins: set[int]) -> tuple[Path, int]:
    """Return a file, and the length of its functions that begin on these lines."""
    return path, sum(
        node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and begins & {node.lineno, *(each.lineno for each in node.decorator_list)}
    )


def cycle() -> str:
    """Return one cycle of imports, late and type-only ones included; "" if no cycle.

    `from package import module` imports the package too, which the graph leaves out.
    """
    graph = grimp.build_graph("scalerl_jax")
    imports = {
        each: graph.find_modules_directly_imported_by(each) for each in graph.modules
    }
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        own = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in imports:
                imports[own] |= {node.module} - {own}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return " > ".join(error.args[1])
    return ""


def functions(files: list[Path]) -> str:
    """Return the median and the greatest length of a function."""
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return f"median {lengths[len(lengths) // 2]} lines, at most {lengths[-1]}"


def repeated(files: list[Path]) -> int:
    """Return the number of pairs of code passages that share `WINDOW` lines or more."""
    places = collections.defaultdict(list)
    for path in files:
        text = [
            re.sub(r"\s+", " ", line).strip() for line in path.read_text().splitlines()
        ]
        code = [
            (number, line)
            for number, line in enumerate(text)
            if re.search(r"\w", line) and not line.startswith(("#", "import ", "from "))
        ]
        for start in range(len(code) - WINDOW + 1):
            run = code[start : start + WINDOW]
            places[tuple(line for _, line in run)].append((path, run[0][0]))
    pairs = set()
    for found in places.values():
        for (one, at), (other, there) in zip(found, found[1:], strict=False):
            pairs.add((one, other, there - at))  # a longer run is one pair
    return len(pairs)


if __name__ == "__main__":
    main()
