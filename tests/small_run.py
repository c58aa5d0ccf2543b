"""A small run of `configs/tiny.py`, for every test that needs a whole one."""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import scalerl_jax
from scalerl_jax import config as config_lib
from scalerl_jax import wiring
from scalerl_jax.run import metric_table
from scalerl_jax.run.progress import Progress

ROOT = Path(scalerl_jax.__file__).resolve().parents[1]
SETTINGS = {
    "compile_cache": "",
    "batch.num_prompts": 4,
    "batch.group_size": 4,
    "batch.rows_per_microbatch": 8,
    "sampler.slots": 16,
    "sampler.page_size": 112,  # a whole sequence: fewer programs
    "data.train_prompts": 60,
    "optimizer.learning_rate": 3e-4,
    "optimizer.warmup_steps": 2,
    "eval.num_prompts": 9,
    "eval.samples_per_prompt": 1,
    "eval.every": 2,
    "checkpoint.every": 2,
    "train.num_steps": 4,
}

# An objective with a state of its own: a scale over all batches so far, of rewards that
# scores of the window change.
OF_STATE = {
    "objective.advantage_normalization": "running",
    "objective.kl_coefficient": 0.05,
    "objective.kl_estimator": "k1",
    "objective.kl_in": "reward",
}


def make_config(changes=None):
    """The settings of a small run, with these changes."""
    settings = runpy.run_path(str(ROOT / "configs" / "tiny.py"))["get_config"]()
    settings.update_from_flattened_dict(SETTINGS | (changes or {}))
    return config_lib.resolve(settings)


def arguments(directory, changes=None):
    """The same settings as a command line."""
    settings = SETTINGS | (changes or {})
    return [
        "--config=configs/tiny.py",
        f"--workdir={directory}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
    ]


def start(*command, environment=None, **options):
    """A Python process in the source tree, on the CPU."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {}), "JAX_PLATFORMS": "cpu"},
        **options,
    )


def start_main(directory, changes, **options):
    """`python -m scalerl_jax.main` on the small run."""
    command = ("-m", "scalerl_jax.main", *arguments(directory, changes))
    return start(*command, **options)


@contextlib.contextmanager
def built(config, directory, *, ledger=None):
    """A run, for a test to change some of its parts."""
    arch = wiring.make_architecture(config)
    config = wiring.fit_devices(config, arch, len(jax.devices()))
    ledger = ledger or wiring.make_ledger(config)
    ledger.start()
    run = wiring.make_run(config, Path(directory), ledger, Progress())
    try:
        yield run
    finally:
        run.close()


@contextlib.contextmanager
def mounted(directory, options):
    """A file system of its own, where the system lets us make one."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"mount cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def rows(directory, name="metrics.jsonl"):
    """The complete rows of a file of a run, which another process may be writing."""
    path = Path(directory) / name
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.splitlines(True) if line[-1:] == "\n"]
    if name in metric_table.TABLES:  # and docs/metrics.md has all of its numbers
        names = {each for row in found for each in row}
        unknown = {each for each in names if not metric_table.find(each, name)}
        assert not unknown, f"not in scalerl_jax/run/metric_table.py: {unknown}"
    return found


def wait_for_rows(process, directory, count, name="metrics.jsonl"):
    """Return once a process has written so many rows, or has ended."""
    while process.poll() is None and len(rows(directory, name)) < count:
        time.sleep(0.005)


def checkpoints(directory):
    """The checkpoints of a run, oldest first."""
    return sorted((Path(directory) / "checkpoints").glob("step_*"))


def books(directory):
    """The controller's books of a run's newest checkpoint."""
    return json.loads((checkpoints(directory)[-1] / "host.json").read_text())


def saved_arrays(checkpoint):
    """The train state of a checkpoint by name, as it lies on the disk."""
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    tree = reader.metadata(checkpoint / "state").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    state = reader.restore(
        checkpoint / "state", args=ocp.args.PyTreeRestore(restore_args=as_numpy)
    )
    reader.close()
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
