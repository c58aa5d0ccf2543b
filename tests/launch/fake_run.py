"""Stands for a run: rows in a bucket, one every moment; SIGTERM is 75, as it is there.

fake_run.py --config=... --workdir=gs://... [--config.train.num_steps=N]
"""

import json
import signal
import sys
import time

from scalerl_jax.utils import remote

flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
steps = int(flags.get("config.train.num_steps", 12))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
path = remote.open_path(flags["workdir"], setting="--workdir=")
config = {"config": {"train": {"num_steps": steps}, "eval": {"every": 1}}}
remote.write(path / "config.json", json.dumps(config).encode())
rows = (remote.read(path / "metrics.jsonl") or b"").splitlines()
evals = (remote.read(path / "evals.jsonl") or b"").splitlines()
while len(rows) < steps:
    if stopped:
        sys.exit(75)
    step = len(rows) + 1
    rows.append(json.dumps({"step": step}).encode())
    rate = 0.9 - 0.6 / step
    text = f'{{"step": {step}, "compute_chip_hours": {step / 10}, "pass_rate": {rate}}}'
    evals.append(text.encode())
    remote.write(path / "evals.jsonl", b"\n".join(evals) + b"\n")
    remote.write(path / "metrics.jsonl", b"\n".join(rows) + b"\n")
    time.sleep(0.5)
