"""Sizes, layers and habits that STYLE.md asks for, checked on the source."""

import ast
import collections
import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import scalerl_jax
from scalerl_jax import config as config_lib
from scalerl_jax.run.record import flatten

PACKAGE = Path(scalerl_jax.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path):
    source = path.read_text()
    lines, said = len(source.splitlines()), ast.get_docstring(ast.parse(source)) or ""
    explained = f"above {MAX_FILE_LINES} lines" in " ".join(said.split())
    assert lines <= MAX_FILE_LINES or explained, f"{name_of(path)} has {lines} lines"
    long = {
        f"{node.name} (line {node.lineno})": node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_says_what_it_holds(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_few_public_classes_share_a_name():
    """So that a name which is read or searched for has one meaning."""
    holders = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                holders[node.name].append(name_of(path))
    shared = {name: files for name, files in holders.items() if len(files) > 1}
    assert len(shared) <= 8, shared


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_default_hides_in_a_config_get(path):
    assert not re.search(r"config[\w.]*\.get\(", path.read_text())


def test_every_module_of_algo_has_a_test():
    modules = {path.stem for path in (PACKAGE / "algo").glob("*.py")} - {"__init__"}
    tested = {path.stem for path in (ROOT / "tests/algo").glob("test_*.py")}
    assert {f"test_{name}" for name in modules} <= tested


def test_setup_and_package_have_one_version():
    (version,) = re.findall(
        r'^VERSION = "(.+?)"', (ROOT / "setup.py").read_text(), re.M
    )
    assert version == scalerl_jax.__version__


def test_no_module_imports_itself_by_way_of_others():
    measures = runpy.run_path(str(ROOT / "benchmarks" / "measures.py"))
    assert measures["cycle"]() == ""


HEAVY = ("sympy", "scipy", "ray", "wandb", "tensorflow_datasets", "starlette", "torch")
HEAVY += ("transformers", "matplotlib", "reasoning_gym", "orbax", "tensorboard")
HEAVY += ("jax.experimental.pallas",)


def test_a_run_imports_no_heavy_library_before_it_asks_for_it():
    code = "import gc, json, sys; kept = gc.get_threshold(); import scalerl_jax.main; "
    code += "print(json.dumps([*sys.modules])); assert gc.get_threshold() == kept"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert not set(HEAVY) & set(json.loads(done.stdout))
    assert done.returncode == 0, "only a command's process may change the collector"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_late_import_of_our_own_says_why(path):
    """A comment stands in its line, or in front of it and of its neighbours."""
    source = path.read_text()
    lines = source.splitlines()
    late = {
        each.lineno
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in ast.walk(function)
        if isinstance(each, ast.ImportFrom)
        and (each.module or "").startswith("scalerl_jax")
    }
    for number in late:
        first = number
        while first - 1 in late:
            first -= 1
        said = "  # " in lines[number - 1] or lines[first - 2].lstrip().startswith("#")
        assert said, f"{name_of(path)}:{number}"


def test_imports_keep_to_the_layers():
    lint_imports = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run(
        [lint_imports, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def named_objects():
    """Names like `model.sizes.ARCHITECTURES` in the texts, with their files."""
    settings = flatten(config_lib.to_json(config_lib.Config()))
    packages = {path.stem for path in PACKAGE.iterdir()}
    found = {}
    for path in FILES:
        for name in re.findall(r"`((?:\w+\.)+\w+)(?:\(\))?`", path.read_text()):
            is_file = name.endswith((".py", ".json", ".jsonl"))
            if name.split(".")[0] in packages and name not in settings and not is_file:
                found[name] = name_of(path)
    return found


@pytest.mark.parametrize("name", named_objects())
def test_an_object_that_a_text_names_exists(name):
    module, _, rest = f"scalerl_jax.{name}".rpartition(".")
    try:
        found = importlib.import_module(f"{module}.{rest}")
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(module), rest, None)
    assert found is not None, f"{named_objects()[name]} names {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_that_a_text_names_exists(path):
    if path.name == "harness.py":
        pytest.skip("its files are made in the sandbox")
    names = re.findall(r"(?<![\w/.:])((?:[\w-]+/)*[\w-]+\.py)\b", path.read_text())
    folders = (ROOT, PACKAGE, path.parent, ROOT / "configs")
    # A user's files of reward functions, and a run's copies.
    users = {"FILE.py", "my_task.py", "reward.py", "environment.py", "cell.py"}
    missing = {n for n in names if not any((at / n).exists() for at in folders)}
    assert not missing - users
