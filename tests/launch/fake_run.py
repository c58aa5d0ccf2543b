"""Stands for a run: rows in a bucket, one after another; SIGTERM is 75, as there.

fake_run.py --config=... --workdir=gs://... [--config.train.num_steps=N]

After the row at which the fake cloud takes a machine away it waits, until as many
machines are there as at its start: no test needs rows that only pass the time.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from scalerl_jax.formats import remote

CLOUD = Path(os.environ["FAKE_CLOUD"])
UP = {"ACTIVE", "READY", "RUNNING"}


def limit():
    """The row after which a machine goes; asked before `machines`, written after."""
    limits = json.loads((CLOUD / "script.json").read_text()).get("preempt")
    return max(limits[0], begun + 1) if limits else steps


def machines():
    """The run's own: those of another run go with its end."""
    if not (CLOUD / "state.json").exists():  # in a pod, which goes with its node
        return 0
    state = json.loads((CLOUD / "state.json").read_text())
    state.pop("made", None)
    own = [each for name, each in state.items() if f"{name}-".startswith(f"{run}-")]
    return sum(each["state"] in UP for each in own)


flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
steps = int(flags.get("config.train.num_steps", 12))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
run = flags["workdir"].rstrip("/").rpartition("/")[2]
path = remote.open_path(flags["workdir"], setting="--workdir=")
config = {"config": {"train": {"num_steps": steps}, "eval": {"every": 1}}}
remote.write(path / "config.json", json.dumps(config).encode())
rows = (remote.read(path / "metrics.jsonl") or b"").splitlines()
evals = (remote.read(path / "evals.jsonl") or b"").splitlines()
begun, most = len(rows), machines()
while len(rows) < steps:
    if stopped:
        sys.exit(75)
    if len(rows) >= limit() or machines() < most:
        time.sleep(0.02)
        continue
    step = len(rows) + 1
    rows.append(json.dumps({"step": step}).encode())
    rate = 0.9 - 0.6 / step
    row = {"step": step, "compute_chip_hours": step / 10, "pass_rate": rate}
    row |= {"generated_tokens": 10 * step}
    evals.append(json.dumps(row).encode())
    remote.write(path / "evals.jsonl", b"\n".join(evals) + b"\n")
    remote.write(path / "metrics.jsonl", b"\n".join(rows) + b"\n")
