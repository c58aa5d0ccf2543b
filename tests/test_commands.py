"""What README, docs and examples tell a reader to type works, in that order.

Every block of shell runs as in one bare shell, from README's `git clone` on.  What a
block needs that not every machine has stands in a comment before it, `<!-- needs a TPU
-->`; of such a block the configs alone are resolved.  A step and an evaluation of the
run that is made have fewer prompts than the config says.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
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
# A reader's shell has only what the system has, until a block says otherwise: no
# command of this package before README makes and activates an environment.  Not run:
# what installs extras, and targets that are tests or long runs themselves.  A step and
# an evaluation of runs/x have fewer prompts than typed.  In the background `scalerl`
# becomes what it starts, so that a block can kill what it has started.
PRELUDE = """
set -euo pipefail
# A server that a failed block leaves would keep the pipes open.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
pip() { type -P pip > /dev/null; }
make() {
  [[ "$*" == install ]] || set -- -n "$@"
  command make "$@" > /dev/null
}
scalerl() {
  if [[ "$*" == train*--workdir=runs/x* ]]; then
    set -- "$@" --config.batch.num_prompts=8 --config.eval.num_prompts=60 \\
      --config.eval.samples_per_prompt=1
  fi
  if (( BASHPID == $$ )); then command scalerl "$@"; else exec scalerl "$@"; fi
}
"""
# The next block goes on where this one has ended, as in one shell.
POSTLUDE = """
printf '%s\\n' "$PWD" "$PATH" > "$HOME/shell"
"""
COMPILER = {
    "XLA_FLAGS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
}
# Stands for the system's python3.  An environment that it makes finds the packages of
# the tests, so that `make install` has nothing to fetch: it runs as it stands, and pip
# refuses what is not there.
PYTHON3 = f"""#!/bin/sh
{sys.executable} "$@" || exit
if [ "$1 $2" = "-m venv" ]; then
  packages=$(echo "$3"/lib/python*/site-packages)
  rm -rf "$packages"/setuptools*  # too old to build with, on Python 3.11
  echo {sysconfig.get_path("purelib")} > "$packages/tests.pth"
fi
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
        named = re.findall(r"`([\w.]+\.(?:jsonl|py))`", before)
        line = text[: found.start("language")].count("\n") + 1
        yield Block(
            place=f"{page}:{line}",
            needs=found["needs"],
            language=found["language"],
            text=found["text"],
            named=named[0] if named else "",
        )


PAGES = [
    str(path.relative_to(ROOT))
    for kind in ("README.md", "docs/**/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(kind))
]
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]


def make_repository(directory):
    """A repository of one commit: what git knows here, as it stands, and new files."""

    def git(*words, at=directory):
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
        done = subprocess.run(
            command, cwd=at, capture_output=True, text=True, check=True
        )
        return done.stdout

    listed = git("ls-files", "-co", "--exclude-standard", "-z", at=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")


@pytest.fixture
def home(tmp_path):
    """A reader's home; what he clones is in `home / "origin"`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON3)
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "origin").mkdir()
    make_repository(tmp_path / "origin")
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
        write_run(directory / "runs" / name, hours / 1000, curve + each, recipe=name)
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


def write_run(directory, hours, pass_rates, *, recipe):
    """What the fitter reads of a run of a week before."""
    directory.mkdir(parents=True)
    settings = {"train": {"num_steps": 10 * len(hours)}, "eval": {"every": 10}}
    settings["objective"] = {"loss": recipe}
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


def where(home):
    """Directory and PATH of the reader's shell."""
    if (home / "shell").exists():
        return (home / "shell").read_text().splitlines()
    return str(home), f"{home / 'bin'}:/usr/bin:/bin"


def shell(text, home):
    """Run it as a reader's shell would that has run the blocks before."""
    directory, path = where(home)
    environment = {
        "HOME": str(home),
        "PATH": path,
        "URL": str(home / "origin"),
        "JAX_PLATFORMS": "cpu",
        # The compiler is as quick as in the other tests, and compiles for all once.
        **{name: os.environ[name] for name in os.environ if name in COMPILER},
        # Only what is there already.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip takes 0 for "no isolation"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        ["bash", "-c", PRELUDE + text + POSTLUDE],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_block_runs_in_its_order_from_a_bare_shell(home):
    shown = ""
    for block in BLOCKS:
        here = Path(where(home)[0])
        if block.language in ("json", "jsonl", "python") and block.named:
            (here / block.named).write_text(block.text)
        if block.language == "sh":
            shown = None  # of one that is not run here
        if block.language == "sh" and block.needs is None:
            done = shell(on_a_free_port(block.text), home)
            assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
            shown = done.stdout
            if "git clone" in block.text:
                write_files(Path(where(home)[0]))
        if block.language == "text" and shown is not None:
            assert block.text.strip() in shown, f"{block.place}\n{shown}"


def test_a_bare_shell_has_no_command_of_this_package(tmp_path):
    (tmp_path / "bin").mkdir()
    done = shell("scalerl --version", tmp_path)
    assert done.returncode == 127
    assert "scalerl: command not found" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in SHELL if block.needs], ids=lambda block: block.place
)
def test_configs_of_other_machines_are_resolved(block, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in block.commands:
        if command.startswith("scalerl train"):
            flags = words_of(command, tmp_path)[2:]
            line = shlex.join(["main", *flags, "--describe"])
            status, _, said = small_commands.outcome(line)
            assert status == 0, f"{block.place}\n{command}\n{said}"


def words_of(command, directory):
    """The words that a shell makes of a command, in the first turn of a loop."""
    done = shell(f"seed=0; printf '%s\\0' {command}", directory)
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
    (text,) = [
        block.text for block in SHELL if "--port=" in block.text and not block.needs
    ]
    ports = re.findall(r"(?:--port=|127\.0\.0\.1:)(\d+)", on_a_free_port(text))
    assert len(ports) == 3 and len(set(ports)) == 1 and ports[0] != "8000"


def test_the_blocks_are_found():
    assert len(SHELL) > 12
    assert json.dumps([block.place for block in SHELL if block.needs is None])
