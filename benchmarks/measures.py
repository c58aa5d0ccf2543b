"""How large the house is: lines, what a run loads, cycles, repeated places, test time.

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
WINDOW = 6  # lines that make a repeated place
# A run of two steps that says at its end which of our modules it has loaded.
RUN = """
import atexit, json, runpy, sys
def tell():
    files = {getattr(each, "__file__", None) for name, each in list(sys.modules.items())
             if name.partition(".")[0] == "scalerl_jax"}
    json.dump(sorted(filter(None, files)), open(sys.argv[0] + ".json", "w"))
out = sys.argv[1]
sys.argv = [out, "--config=configs/tiny.py", f"--workdir={out}/run",
    "--config.train.num_steps=2", "--config.eval.num_prompts=20",
    "--config.batch.num_prompts=4"]
atexit.register(tell)
sys.argv[0] = out
runpy.run_module("scalerl_jax.main", run_name="__main__", alter_sys=False)
"""


def main() -> None:
    """Print every measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-run", action="store_true", help="leave out the tiny run")
    options = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    print(f"package: {sum(map(lines, files)):,} lines in {len(files)} files")
    if not options.no_run:
        loaded = loaded_files()
        total = sum(map(lines, loaded))
        print(f"a tiny run loads: {len(loaded)} modules, {total:,} lines")
    print(f"import cycles: {cycle() or 'none'}")
    print(f"functions: {functions(files)}")
    print(f"repeated places: {repeated(files)} pairs that share {WINDOW} lines or more")
    print(f"README: {(ROOT / 'README.md').stat().st_size:,} bytes")


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text().splitlines())


def loaded_files() -> list[Path]:
    """Return our modules in `sys.modules` at the end of a run of `configs/tiny.py`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN, folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return [Path(name) for name in json.loads(Path(f"{folder}.json").read_text())]


def cycle() -> str:
    """Return one cycle of imports, late and type-only ones counted; empty: none."""
    graph = grimp.build_graph("scalerl_jax")
    imports = {
        each: graph.find_modules_directly_imported_by(each) for each in graph.modules
    }
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
    """Return how many pairs of places share `WINDOW` lines of code or more."""
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
