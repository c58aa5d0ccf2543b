"""Processes that run code of others are given no token of this one's environment."""

import ast
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from small_sandbox import sandboxed

import scalerl_jax
from scalerl_jax.data.chat_process import TemplateProcess
from scalerl_jax.environments.sandbox import Sandbox, SandboxLimits
from scalerl_jax.environments.verdict import Setup, Verifier, VerifierProcess
from scalerl_jax.process.child_environment import (
    HANDED_ON,
    child_environment,
    own_python,
)

PACKAGE = Path(scalerl_jax.__file__).parent
TOKENS = {
    name: f"token-of-{name}"
    for name in (
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"),
        *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_AUTH_TOKEN"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_API_KEY", "GITHUB_TOKEN"),
        *("SCALERL_API_KEY", "HTTPS_PROXY", "https_proxy"),
        *("PIP_INDEX_URL", "KUBECONFIG", "SSH_AUTH_SOCK", "DATABASE_URL"),
    )
}
STARTS = {
    *("Popen", "run", "call", "check_call", "check_output", "getoutput"),
    *("getstatusoutput", "system", "popen", "create_subprocess_exec"),
    *("create_subprocess_shell", "ProcessPoolExecutor", "get_context", "fork"),
    *("posix_spawn", "posix_spawnp", "execv", "execve", "execvp", "execvpe", "spawnv"),
}
MAYBE = re.compile("|".join([*STARTS - {"run", "call"}, "subprocess", "multiproc"]))
MODULES = {"subprocess", "os", "asyncio", "concurrent", "futures", "multiprocessing"}
# Children that have all variables, with the number of places where they are started.
INHERITING = {
    "cluster/parent_watch.py": (
        2,
        "Ray's node, whose processes are the run's own roles",
    ),
    "demo.py": (1, "commands of this package, which the user asked for by one name"),
    "process/completion.py": (1, "--help of a command of this package"),
    "launch/__main__.py": (1, "the fit of the run, a command of this package"),
    "launch/client.py": (1, "gcloud, kubectl and others, which log in as the user"),
    "launch/estimate.py": (1, "the preflight, which may read settings from a bucket"),
    "launch/local.py": (1, "the supervisor of the run"),
    "launch/supervisor.py": (1, "the run"),
    "study/launched.py": (1, "the launcher of a run, a command of this package"),
    "preflight/report.py": (1, "the preflight of one config after the other"),
    "environments/harness.py": (1, "a fork inside of the sandbox, which has no token"),
}


def starts_of(tree):
    """Calls that start a process, each with whether its variables are named."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else ""
        name = owner.id if isinstance(owner, ast.Name) else name
        if (
            name in MODULES
            and node.func.attr in STARTS
            and name + node.func.attr
            != (
                "asynciorun"  # a loop of this process
            )
        ):
            given = [each.value for each in node.keywords if each.arg == "env"]
            yield (
                node,
                bool(given)
                and ast.unparse(given[0]).startswith(("child_environment(", "{}")),
            )


def test_every_process_has_named_variables_or_a_reason():
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text, name = file.read_text(), file.relative_to(PACKAGE).as_posix()
        assert 'sys.executable, "-m"' not in text, f"{name}: see own_python"
        if not MAYBE.search(text):  # most are not parsed
            continue
        tree = ast.parse(text)
        inherits = [node for node, named in starts_of(tree) if not named]
        if inherits:
            found[name] = len(inherits)
        for node in ast.walk(tree):
            # Children of multiprocessing have no other environment than this process's.
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
                assert "multiprocessing" not in names, name
            if isinstance(node, ast.ImportFrom):
                names = {each.name for each in node.names}
                if node.module == "multiprocessing":
                    assert names == {"connection"}, name
                elif node.module in ("subprocess", "os", "asyncio"):
                    assert not names & STARTS, name
    assert found == {name: number for name, (number, _) in INHERITING.items()}


@pytest.mark.parametrize(
    "source, named",
    [
        ("subprocess.Popen(c)", False),
        ("subprocess.run(c, env=os.environ)", False),
        ("subprocess.run(c, env={**os.environ, 'A': '1'})", False),
        ("os.system(c)", False),
        ("concurrent.futures.ProcessPoolExecutor()", False),
        ("subprocess.run(c, env=child_environment(A='1'))", True),
        ("subprocess.run(c, env={})", True),
    ],
)
def test_a_start_is_found(source, named):
    assert [found for _, found in starts_of(ast.parse(source))] == [named]


@contextlib.contextmanager
def verifier():
    process = VerifierProcess(
        Setup(
            {"": Verifier("scalerl_jax.environments.judges.maths:judge")}, "", 60.0, 512
        )
    )
    try:
        assert process.pipe.poll(120.0)
        assert process.pipe.recv().failure == ""
        yield process.process.pid
    finally:
        process.kill()
        process.exit_code()


@contextlib.contextmanager
def chat_template():
    with contextlib.closing(TemplateProcess()) as process:
        assert process.render("{{ 6 * 7 }}", {}) == {"text": "42"}
        yield process._process.pid


@contextlib.contextmanager
def sandbox():
    with contextlib.closing(Sandbox("solution", SandboxLimits(cpu_s=20))) as box:
        box.await_ready()
        yield box._process.pid


@pytest.mark.parametrize(
    "kind", [verifier, chat_template, pytest.param(sandbox, marks=sandboxed)]
)
def test_a_child_has_no_token(kind, monkeypatch):
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    with kind() as number:
        child = psutil.Process(number)
        for each in (child, *child.children(recursive=True)):
            variables = each.environ()
            assert not set(TOKENS.values()) & set(variables.values()), each
            assert not TOKENS.keys() & variables.keys(), each
            if kind is not sandbox:  # which has its own few
                assert variables.keys() <= {*HANDED_ON, "PYTHONPATH", "JAX_PLATFORMS"}


def test_a_child_finds_what_it_needs(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    code = "import os, sys, scalerl_jax; print(os.environ['TZ'], os.environ['A'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code + "; print(os.environ['JAX_PLATFORMS'])"],
        env=child_environment(A="own"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["Asia/Kathmandu", "own", "cpu"]
    assert child_environment()["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("place, said", [("/", ""), ("", "here\n")])
def test_a_child_imports_from_the_current_directory_only_if_this_process_does(
    tmp_path, monkeypatch, place, said
):
    (tmp_path / "psutil.py").write_text("print('here')")
    monkeypatch.chdir(tmp_path)
    elsewhere = [each for each in sys.path if each]
    monkeypatch.setattr(sys, "path", [place, *elsewhere])
    done = subprocess.run(
        [*own_python(), "-m", "psutil"],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == said
