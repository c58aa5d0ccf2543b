"""List what this machine has, which parts of the package will not work, and why.

    scalerl doctor
    scalerl doctor --json

Nothing is trained or fetched.  Exit status: 0, or 1 if the demo would not work.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psutil

import scalerl_jax
from scalerl_jax.config import Config
from scalerl_jax.config.names import FOLDER
from scalerl_jax.environments import sandbox
from scalerl_jax.formats.reading import is_remote
from scalerl_jax.machines.platforms import has_tpu
from scalerl_jax.process.ending import Parser, answer, first_line
from scalerl_jax.process.printing import to_stdout

_GIB = 2**30
_DISK_GIB = 1.0  # the demo writes 50 MB, besides compiled programs and checkpoints
_MEMORY_GIB = 2.0  # needed by the demo
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")
# Extra -> (module that it installs, what does not work without it).
_EXTRAS = {
    "serve": ("starlette", "scalerl serve"),
    "ray": ("ray", "several processes: train --ray"),
    "gguf": ("gguf", "checkpoints in GGUF files"),
    "gcs": ("gcsfs", "directories in buckets, gs://"),
    "wandb": ("wandb", "tracking.wandb_project"),
    "tpu": ("libtpu", "TPUs, and scalerl preflight"),
}

State = Literal["ok", "missing", "fails"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        state: ok; missing: a part of the package does not work; fails: the demo does
            not work either.
        said: the facts, and the way out if the state is not ok.
    """

    name: str
    state: State
    said: str


def find() -> list[Finding]:
    """Make all checks; a check that raises is a finding, too."""
    found: list[Finding] = []
    for look in _LOOKS:
        try:
            found += look()
        except Exception as error:  # noqa: BLE001  reported as a finding
            name = look.__name__.strip("_")
            found.append(Finding(name=name, state="fails", said=first_line(error)))
    return found


def _versions() -> Iterator[Finding]:
    place = Path(scalerl_jax.__file__).parent
    of = "in a clone" if FOLDER.parent == place.parent else "installed"
    python = f"Python {platform.python_version()}, {platform.platform()}"
    yield Finding(name="machine", state="ok", said=python)
    said = f"scalerl_jax {scalerl_jax.__version__}, {of}: {place}"
    yield Finding(name="package", state="ok", said=said)
    versions = [f"{each} {importlib.metadata.version(each)}" for each in _LIBRARIES]
    yield Finding(name="libraries", state="ok", said=", ".join(versions))


def _devices() -> Iterator[Finding]:
    try:
        import jax  # here, so that a JAX that fails to start is a finding

        devices = jax.devices()
    except Exception as error:  # noqa: BLE001  reported as a finding
        asked = os.environ.get("JAX_PLATFORMS", "")
        out = f"; unset JAX_PLATFORMS = {asked!r}, or install what it names"
        said = f"JAX does not start: {first_line(error)}{out if asked else ''}"
        yield Finding(name="devices", state="fails", said=said)
        return
    kind = devices[0].platform
    said = f"{len(devices)} x {devices[0].device_kind} ({kind})"
    yield Finding(name="devices", state="ok", said=said)
    if kind != "cpu":
        return
    if has_tpu(os.environ):
        yield _unused("a TPU", "tpu")
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        yield _unused("an NVIDIA GPU", "cuda")


def _unused(device: str, extra: str) -> Finding:
    said = (
        f"this machine has {device} that JAX does not use: "
        f'pip install "scalerl_jax[{extra}]", and leave JAX_PLATFORMS unset'
    )
    return Finding(name="accelerator", state="missing", said=said)


def _resources() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    said = (
        f"{os.cpu_count()} cores; {memory.available / _GIB:.1f} of "
        f"{memory.total / _GIB:.1f} GiB of memory are free"
    )
    low = memory.available < _MEMORY_GIB * _GIB
    more = f"; the demo needs {_MEMORY_GIB:g}" if low else ""
    yield Finding(name="memory", state="fails" if low else "ok", said=said + more)
    yield _disk("disk", Path.cwd(), "change to another directory")


def _programs() -> Iterator[Finding]:
    """Look at the compile cache, without which programs are compiled at every start."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # it takes precedence
    place = Path(given or Config().compile_cache).expanduser()
    out = "set compile_cache to another directory, or to ''"
    if given:
        out = "set JAX_COMPILATION_CACHE_DIR to another directory, or unset it"
    if given and is_remote(given):
        said = f"{given}: a bucket, which is not looked into"
        yield Finding(name="compile cache", state="ok", said=said)
        return
    found = _disk("compile cache", place, out)
    yield found if found.state == "ok" else dataclasses.replace(found, state="missing")


def _disk(name: str, place: Path, way_out: str) -> Finding:
    """Return whether a directory can be written, and its free space, as a finding."""
    there = next(each for each in (place, *place.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free / _GIB
    except OSError as error:
        said = f"{place} cannot be written: {error.strerror}; {way_out}"
        return Finding(name=name, state="fails", said=said)
    low = free < _DISK_GIB
    said = f"{place}: {free:.1f} GiB are free" + (f"; {way_out}" if low else "")
    return Finding(name=name, state="fails" if low else "ok", said=said)


def _sandbox() -> Iterator[Finding]:
    try:
        sandbox.check()
    except sandbox.SandboxError as error:
        said = f"programs that a policy writes cannot run: {first_line(error)}"
        yield Finding(name="sandbox", state="missing", said=said)
    else:
        yield Finding(name="sandbox", state="ok", said="bubblewrap runs programs")


def _extras() -> Iterator[Finding]:
    for extra, (module, what) in _EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding(name=f"[{extra}]", state="ok", said=what)
        else:
            said = f'{what}: pip install "scalerl_jax[{extra}]"'
            yield Finding(name=f"[{extra}]", state="missing", said=said)


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    _resources,
    _programs,
    _sandbox,
    _extras,
)


def main(argv: list[str] | None = None) -> int:
    """Print the findings; return 1 if the demo would not work, else 0."""
    parser = Parser(
        "python -m scalerl_jax.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    flags = parser.parse_args(argv)
    findings = find()
    works = all(each.state != "fails" for each in findings)
    if flags.json:
        record = {"works": works, "findings": [*map(dataclasses.asdict, findings)]}
        to_stdout(json.dumps(record) + "\n")
        return 0 if works else 1
    width = max(len(each.name) for each in findings)
    for each in findings:
        to_stdout(f"{each.state:<8} {each.name:<{width}}  {each.said}\n")
    ready = "runs here: scalerl demo" if works else "does not run here; see above"
    to_stdout(f"\nthe demo {ready}\n")
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(answer(main))
