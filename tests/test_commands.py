"""What README and docs tell a reader to type works as it stands, in that order.

Every block of shell runs in one directory that looks like a clean clone.  What a block
needs that not every machine has stands in a comment before it, `<!-- needs a TPU -->`;
of such a block the configs alone are resolved.  A step and an evaluation of the run
that is made have fewer prompts than the config says.
"""

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_commands

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?:<!-- needs (?P<needs>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# Tan et al.'s base models: log10 of the error at 1 FLOP, by size.
TAN = {0.5e9: 0.0640, 1.5e9: 0.2074, 7e9: 0.7045, 32e9: 1.5359}
# Not run: they install what the tests run in, or are tests and long runs themselves.
PRELUDE = """
set -euo pipefail
# A server that a failed block leaves would keep the pipes open.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
pip() { :; }
make() { :; }
"""
# Stands for python: as typed, but for how many prompts a step and an evaluation have.
# It becomes what it starts, so that a block can kill what it has started.
PYTHON = f"""#!/bin/sh
case "$*" in
  *scalerl_jax.main*--workdir=runs/x*) exec {sys.executable} "$@" \\
    --config.batch.num_prompts=8 --config.eval.num_prompts=60 \\
    --config.eval.samples_per_prompt=1 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    place: str
    needs: str | None
    language: str
    text: str
    named: str  # the file that the line before it names

    @property
    def commands(self):
        """Its lines, each whole and without a comment."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.split(" #")[0].strip() for line in lines if line.strip()]


def read_blocks(page):
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        before = text[: found.start()].rstrip().rsplit("\n\n", 1)[-1]
        named = re.findall(r"`([\w.]+\.jsonl)`", before)
        line = text[: found.start("language")].count("\n") + 1
        yield Block(
            place=f"{page}:{line}",
            needs=found["needs"],
            language=found["language"],
            text=found["text"],
            named=named[0] if named else "",
        )


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]


@pytest.fixture
def clone(tmp_path):
    """A directory like a clean clone, with a reader's own files beside it."""
    for path in ROOT.glob("[!.]*"):
        if path.name not in ("docs", "runs"):  # written to
            (tmp_path / path.name).symlink_to(path)
    write_files(tmp_path)
    return tmp_path


def write_files(directory):
    """The files that a reader of the docs has: questions, and curves of known laws."""
    questions = [{"question": f"{n} + 1", "answer": n + 1} for n in range(20)]
    lines = [json.dumps(question) + "\n" for question in questions]
    (directory / "questions.jsonl").write_text("".join(lines))
    noise = np.random.default_rng(0).normal(0.0, 0.004, (4, 40))
    hours = np.geomspace(50.0, 5000.0, 40)
    curve = 0.25 + 0.4 / (1 + (600.0 / hours) ** 1.4)
    for name, each in zip(("curve", "seed0", "seed1", "seed2"), noise, strict=True):
        write(directory / f"{name}.csv", "gpu_hours,pass_rate", hours, curve + each)
    for name, each in (("a", noise[0]), ("b", noise[1] - 0.05)):
        write_run(directory / "runs" / name, hours / 1000, curve + each)
    rows = [
        (
            f"n{n}",
            n,
            32,
            step,
            0.2 + (0.3 + 0.001 * n) / (1 + (1000 / (32 * step)) ** 2),
        )
        for n in (8, 128)
        for step in range(10, 200, 10)
    ]
    write(
        directory / "sweep.csv",
        "run,n,prompts,step,pass_rate",
        *zip(*rows, strict=True),
    )
    rows = [
        (f"size{size:.0f}", size, flops, 1 - 10 ** (above - slope * np.log10(flops)))
        for size, above in TAN.items()
        for slope in [0.13304 / (1 + 13.78e9 / size)]
        for flops in np.geomspace(1e18, 1e20, 40)
    ]
    write(directory / "sizes.csv", "run,size,flops,pass_rate", *zip(*rows, strict=True))
    rows = [
        (
            size,
            tokens,
            6 * size * tokens,
            1.69 + 406.4 / size**0.34 + 410.7 / tokens**0.28,
        )
        for size in np.geomspace(4e7, 1.6e10, 6)
        for tokens in np.geomspace(2e8, 5e11, 6)
    ]
    write(
        directory / "models.csv", "params,tokens,flops,loss", *zip(*rows, strict=True)
    )


def write_run(directory, hours, pass_rates):
    """What the fitter reads of a run of a week before."""
    directory.mkdir(parents=True)
    settings = {"train": {"num_steps": 10 * len(hours)}, "eval": {"every": 10}}
    (directory / "config.json").write_text(json.dumps({"config": settings}))
    rows = [
        {"step": 10 * place, "compute_chip_hours": hour, "pass_rate": rate}
        for place, (hour, rate) in enumerate(zip(hours, pass_rates, strict=True), 1)
    ]
    (directory / "evals.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def write(file, header, *columns):
    rows = (",".join(map(str, row)) for row in zip(*columns, strict=True))
    file.write_text("\n".join([header, *rows, ""]))


def on_a_free_port(text):
    """The commands with a port of their own: another server may have 8000."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return re.sub(r"(?<=--port=)8000\b|(?<=127\.0\.0\.1:)8000\b", str(port), text)


def shell(text, directory):
    """Run it as a reader's shell would, in his directory and with a home of its own."""
    python = directory / "home" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = os.environ | {
        "HOME": str(directory / "home"),
        "PATH": f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        ["bash", "-c", PRELUDE + text],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_block_runs_in_its_order(clone):
    shown = ""
    for block in BLOCKS:
        if block.language in ("json", "jsonl") and block.named:
            (clone / block.named).write_text(block.text)
        if block.language == "sh" and block.needs is None:
            done = shell(on_a_free_port(block.text), clone)
            assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
            shown = done.stdout
        if block.language == "text":
            assert block.text.strip() in shown, f"{block.place}\n{shown}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in SHELL if block.needs], ids=lambda block: block.place
)
def test_configs_of_other_machines_are_resolved(block, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in block.commands:
        if "scalerl_jax.main" in command:
            _, _, module, *flags = words_of(command, tmp_path)
            name = module.removeprefix("scalerl_jax.")
            line = shlex.join([name, *flags, "--describe"])
            status, _, said = small_commands.outcome(line)
            assert status == 0, f"{block.place}\n{command}\n{said}"


def words_of(command, directory):
    """The words that a shell makes of a command."""
    done = shell(f"printf '%s\\0' {command}", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def test_what_the_blocks_install_and_make_exists():
    commands = [command for block in SHELL for command in block.commands]
    extras = (ROOT / "setup.py").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands:
        for extra in re.findall(r"pip install -e \"\.\[([\w,-]+)\]\"", command):
            assert all(f'"{name}"' in extras for name in extra.split(",")), command
        if made := re.match(r"make ([\w-]+)", command):
            assert made[1] in targets, command


def test_a_server_of_the_blocks_is_asked_where_it_listens():
    (text,) = [block.text for block in SHELL if "--port=" in block.text]
    ports = re.findall(r"(?:--port=|127\.0\.0\.1:)(\d+)", on_a_free_port(text))
    assert len(ports) == 2 and ports[0] == ports[1] != "8000"


def test_the_blocks_are_found():
    assert len(SHELL) > 12
    assert json.dumps([block.place for block in SHELL if block.needs is None])
