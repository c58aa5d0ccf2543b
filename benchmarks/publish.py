"""The cost of publishing weights between processes, in full and as deltas.

    make bench-publish
    python benchmarks/publish.py --sections=moving --params=10

Section `moving`: two learner processes of one mesh (gloo) each send their half of the
params, and two replicas with two devices each receive all of them over a directory.
Section `changes`: runs of two configs with the learning rates of large models; each
version is compared with earlier ones, as bfloat16.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import runpy
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEARNERS, REPLICAS, DEVICES = 2, 2, 2
RATES = (5e-7, 3e-6)
DISTANCES = (1, 4, 8)  # versions back to the base
CONFIGS = {"tiny": ("configs/tiny.py", {}), "SmolLM2-135M": ("configs/smollm2_cpu.py", {
    "batch.num_prompts": 3, "sampler.slots": 48})}  # fmt: skip
TIMEOUT_S = 1800.0
SECRET = "BENCH_PUBLISH_SECRET"  # variable with what the learners share
Line = dict[str, Any]


def main() -> None:
    """Run the requested sections, or one named part, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", default=["moving", "changes"])
    parser.add_argument("--params", type=int, default=100, help="millions")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of section changes")
    parser.add_argument("--models", nargs="+", default=list(CONFIGS))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-publish.json"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        for line in PARTS[options.part](**options.work):
            print(json.dumps(line), flush=True)
        return
    found: dict[str, list[Line]] = {}
    for section in options.sections:
        found[section] = SECTIONS[section](options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))


# -- changes ---------------------------------------------------------------------------


def changes(options: argparse.Namespace) -> list[Line]:
    """Run every model and rate, and return the differences of their versions."""
    lines = []
    for model in options.models:
        for rate in RATES:
            work = {"model": model, "rate": rate, "steps": options.steps}
            lines += [work | line for line in finish(start("compare", work))]
    print(
        "| model | learning rate | versions back | values changed | delta / full "
        "| with the first step |"
    )
    print("|---|---|---|---|---|---|")  # fmt: skip
    groups = defaultdict(list)
    for line in lines:
        groups[line["model"], line["rate"], line["back"]].append(line)
    for (model, rate, back), (first, *others) in sorted(groups.items()):
        if not others:  # too few steps
            continue
        print(f"| {model} | {rate:g} | {back} | {spread(others, 'changed')} "
              f"| {spread(others, 'bytes')} | {100 * first['bytes']:.2f} % |"
              )  # fmt: skip
    return lines


def spread(group: list[Line], name: str) -> str:
    """Return median, least and most, in per cent."""
    values = [100 * line[name] for line in group]
    return f"{statistics.median(values):.2f} % ({min(values):.2f} to {max(values):.2f})"


def compare(*, model: str, rate: float, steps: int) -> Iterator[Line]:
    """Run a config, and compare each version that it publishes with earlier ones."""
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from scalerl_jax import config as config_lib
    from scalerl_jax import wiring
    from scalerl_jax.learner.publish import make_snapshot
    from scalerl_jax.learner.step import LocalLearner
    from scalerl_jax.run.progress import Progress
    from scalerl_jax.train import train
    from scalerl_jax.weights.deltas import delta
    from scalerl_jax.weights.shards import own_shards

    path, settings = CONFIGS[model]
    config = runpy.run_path(str(ROOT / path))["get_config"]()
    config.update_from_flattened_dict(settings | {
        "optimizer.learning_rate": rate, "optimizer.warmup_steps": 1,
        "train.num_steps": steps, "eval.every": 1000, "eval.num_prompts": 4,
        "eval.samples_per_prompt": 1, "checkpoint.every": 1000,
    })  # fmt: skip
    resolved = config_lib.resolve(config)
    arch = wiring.make_architecture(resolved)
    resolved = wiring.fit_devices(resolved, arch, 1)
    ledger = wiring.make_ledger(resolved)
    ledger.start()
    versions: list[dict] = []  # the last ones
    lines: list[Line] = []

    def compared(params: Any) -> None:
        new = {each.box: each.values.copy() for each in own_shards(params)}
        size = sum(values.nbytes for values in new.values())
        for back in DISTANCES:
            if back <= len(versions):
                pairs = [
                    (delta(versions[-back][box], values), values)
                    for box, values in new.items()
                ]
                coded = sum(
                    values.nbytes if each.coded is None else each.coded.nbytes
                    for each, values in pairs
                )
                changed = sum(each.changed for each, _ in pairs)
                lines.append({"back": back,
                              "changed": 2 * changed / size,
                              "bytes": coded / size})  # fmt: skip
                print(lines[-1], file=sys.stderr, flush=True)
        versions.append(new)
        del versions[: -max(DISTANCES)]

    with tempfile.TemporaryDirectory() as directory:
        run = wiring.make_run(resolved, Path(directory), ledger, Progress())
        learner = run.learner
        assert isinstance(learner, LocalLearner), "a run of one process"
        place = learner.layout.policy_version.sharding
        assert isinstance(place, NamedSharding), "it is on the mesh"
        snapshot = make_snapshot(
            arch, dtype=jnp.dtype("bfloat16"), learner_mesh=place.mesh
        )
        to_sampler = learner.to_sampler
        assert to_sampler is not None, "it has a sampler of its own process"

        def publish(params: Any, policy_version: Any) -> Any:
            compared(snapshot(params))
            return to_sampler(params, policy_version)

        learner.to_sampler = publish
        with contextlib.closing(run):
            train(resolved, run, Path(directory))
    yield from lines


# -- moving ----------------------------------------------------------------------------


def moving(options: argparse.Namespace) -> list[Line]:
    """Send versions from two learner processes to two replicas, one by one."""
    with tempfile.TemporaryDirectory() as directory:
        work = {"directory": directory, "millions": options.params}
        work |= {"versions": options.versions}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        processes = [
            start("learn", work | {"rank": rank, "port": port}, devices=DEVICES)
            for rank in range(LEARNERS)
        ] + [
            start("replicate", work | {"replica": replica}, devices=DEVICES)
            for replica in range(REPLICAS)
        ]
        try:
            control(Path(directory), len(kinds(options.versions)), processes)
            lines = [line for process in processes for line in finish(process)]
        finally:
            for process in processes:
                process.kill()
    by_version = defaultdict(list)
    for line in lines:
        by_version[line["version"]].append(line)
    groups = defaultdict(list)
    for version, group in by_version.items():
        began = min(line["began"] for line in group)
        total = max(line["ended"] for line in group) - began
        if version > 0:  # the first compiles
            kind = next(line["kind"] for line in group if "kind" in line)
            groups[kind] += [line | {"total": total} for line in group]
    print_moving(groups)
    return lines


def print_moving(groups: dict[str, list[Line]]) -> None:
    """Print a table of bytes, CPU seconds and wall time of each kind of version."""
    print(
        "| version | MB of all ranks | values changed | CPU s, a rank | CPU s, a "
        "replica | wall s, a rank | wall s, a replica | from first to last, s |"
    )
    print("|---|---|---|---|---|---|---|---|")  # fmt: skip
    for kind, group in groups.items():
        ranks = [line for line in group if line["role"] == "rank"]
        replicas = [line for line in group if line["role"] == "replica"]
        size = statistics.median(line["bytes"] for line in replicas) / 1e6
        shares = [line["changed"] for line in ranks if line["changed"] is not None]
        share = f"{100 * statistics.median(shares):.2f} %" if shares else "not compared"
        print(f"| {kind} | {size:.1f} | {share} | {several(ranks, 'cpu')} "
              f"| {several(replicas, 'cpu')} | {several(ranks, 'wall')} "
              f"| {several(replicas, 'wall')} | {several(replicas, 'total')} |"
              )  # fmt: skip


def several(group: list[Line], name: str) -> str:
    """Return median, least and most."""
    values = [line[name] for line in group]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def control(directory: Path, versions: int, processes: list[Any]) -> None:
    """Merge the manifests of each version, and notify the replicas."""
    from scalerl_jax.weights.manifest import Manifest, merge

    for version in range(versions):
        texts = [
            wait_for(directory / f"manifest-{version}-{rank}", processes)
            for rank in range(LEARNERS)
        ]
        manifest = merge([Manifest.from_json(text) for text in texts])
        write(directory / f"manifest-{version}", manifest.to_json())
        for replica in range(REPLICAS):
            wait_for(directory / f"received-{version}-{replica}", processes)
        write(directory / f"done-{version}", "")


def kinds(versions: int) -> list[str]:
    """Return the kind of each version; the first one compiles and is not counted."""
    deltas = [f"delta, rate {rate:g}" for rate in RATES for _ in range(versions)]
    return ["full"] * (1 + versions) + deltas


def learn(
    *, directory: str, millions: int, versions: int, rank: int, port: int
) -> Iterator[Line]:
    """Run one learner process: full versions, and deltas at each rate."""
    import jax
    import jax.numpy as jnp

    from scalerl_jax.learner.publish import make_snapshot
    from scalerl_jax.model.architecture import param_shardings
    from scalerl_jax.model.transformer import abstract_params
    from scalerl_jax.parallel import multihost, rendezvous
    from scalerl_jax.parallel.mesh import make_mesh
    from scalerl_jax.weights.channels import DirectoryChannel
    from scalerl_jax.weights.sending import Sender
    from scalerl_jax.weights.shards import own_shards

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rendezvous.initialize(
        rendezvous.ProcessPlace(
            coordinator=f"127.0.0.1:{port}", num_processes=LEARNERS, process_id=rank
        ),
        secret=os.environ[SECRET],
    )
    arch, path = architecture(millions), Path(directory)
    mesh = make_mesh(jax.devices(), fsdp=LEARNERS * DEVICES)
    shapes, cuts = abstract_params(arch, dtype=jnp.float32), param_shardings(arch, mesh)

    def noise(scale: float, seed: int) -> Any:
        keys = iter(jax.random.split(jax.random.key(seed), 100))
        return jax.tree.map(
            lambda leaf: scale * jax.random.normal(next(keys), leaf.shape), shapes
        )

    draw = jax.jit(noise, out_shardings=cuts)
    move = jax.jit(
        lambda params, rate, seed: jax.tree.map(jnp.add, params, noise(rate, seed)),
        out_shardings=cuts,
    )
    params = draw(0.02, 0)
    snapshot = make_snapshot(arch, dtype=jnp.dtype("bfloat16"), learner_mesh=mesh)
    jax.block_until_ready(snapshot(params))
    channel = DirectoryChannel(path / "weights", owner=f"rank{rank}")
    sender = Sender(rank=rank, num_ranks=LEARNERS, channel=channel, base_every=1000)
    for version, kind in enumerate(kinds(versions)):
        if kind != "full":
            rate = float(kind.split()[-1])
            params = jax.block_until_ready(move(params, rate, version + 1))
        multihost.exchange("", name="version", timeout_s=TIMEOUT_S)
        line = {"role": "rank", "version": version, "kind": kind}
        with timed(line):
            shards = own_shards(snapshot(params))
            manifest = sender.send(shards, policy_version=version, full=kind == "full")
            write(path / f"manifest-{version}-{rank}", manifest.to_json())
        report = sender.report
        assert report is not None, "it has sent"
        yield line | {"bytes": report.num_bytes, "changed": report.changed_share}
        wait_for(path / f"done-{version}")


def replicate(
    *, directory: str, millions: int, versions: int, replica: int
) -> Iterator[Line]:
    """Run one replica, which receives each version on its own devices."""
    import jax
    import jax.numpy as jnp

    from scalerl_jax.model.architecture import sampler_layout
    from scalerl_jax.parallel.mesh import make_mesh
    from scalerl_jax.weights.channels import DirectoryChannel
    from scalerl_jax.weights.manifest import Manifest
    from scalerl_jax.weights.receiving import Receiver

    path, mesh = Path(directory), make_mesh(jax.devices(), tensor=DEVICES)
    layout = sampler_layout(
        architecture(millions), dtype=jnp.dtype("bfloat16"), mesh=mesh
    )
    receiver = Receiver(DirectoryChannel(path / "weights"), layout)
    for version in range(len(kinds(versions))):
        text = wait_for(path / f"manifest-{version}")
        line = {"role": "replica", "version": version}
        with timed(line):
            receiver.receive(Manifest.from_json(text))
        write(path / f"received-{version}-{replica}", "")
        report = receiver.report
        assert report is not None, "it has received"
        yield line | {"bytes": report.num_bytes}


def architecture(millions: int) -> Any:
    """Return a decoder of about this number of parameters."""
    from scalerl_jax.model.sizes import ARCHITECTURES

    arch = dataclasses.replace(
        ARCHITECTURES["tiny"], vocab_size=16_384, hidden_size=768, ffn_size=2048,
        num_layers=1, num_heads=12, num_kv_heads=4, head_dim=64,
    )  # fmt: skip
    layer = dataclasses.replace(arch, num_layers=2).num_params - arch.num_params
    layers = max(round((1e6 * millions - arch.num_params) / layer) + 1, 1)
    return dataclasses.replace(arch, num_layers=layers)


@contextlib.contextmanager
def timed(line: Line) -> Iterator[None]:
    """Add wall and CPU seconds of this process, all threads included, to a line."""
    began, cpu = time.time(), time.process_time()
    yield
    ended = time.time()
    line |= {"began": began, "ended": ended, "wall": ended - began}
    line["cpu"] = time.process_time() - cpu


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    partial.rename(path)


def wait_for(path: Path, processes: list[Any] | None = None) -> str:
    """Return a file's text once it exists; a process that fails ends the wait."""
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        failed = [each.args for each in processes or () if each.poll()]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(f"no {path} after {TIMEOUT_S} s; failed: {failed}")
        time.sleep(0.01)
    return path.read_text()


# -- processes -------------------------------------------------------------------------


def start(part: str, work: Line, *, devices: int = 1) -> subprocess.Popen:
    """Start a process for one part of a section."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        SECRET: os.environ.setdefault(SECRET, secrets.token_hex(32)),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, __file__, f"--part={part}", f"--work={json.dumps(work)}"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> list[Line]:
    """Return the lines that a process prints, once it has ended with success."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with status {process.returncode}")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


SECTIONS = {"moving": moving, "changes": changes}
PARTS = {"compare": compare, "learn": learn, "replicate": replicate}


if __name__ == "__main__":
    main()
