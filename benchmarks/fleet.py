"""A run over processes on this machine, one of which is killed on the way.

    python benchmarks/fleet.py [--workdir=runs/fleet] [--steps=150]

Trains `configs/tiny_fleet.py`, kills a replica at a third of the run and a rank of the
learner at two thirds, fits the curve, and prints what happened.  Ends with status 1 if
the run did not get through it, or a prompt was lost.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import parse_json

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 3600.0


def rows(directory: Path, name: str) -> list[dict[str, Any]]:
    """Return the complete rows of a file that another process may be writing."""
    path = directory / name
    text = path.read_text() if path.exists() else ""
    return [parse_json(line) for line in text.splitlines(True) if line[-1:] == "\n"]


def kill(directory: Path, role: str) -> str:
    """Kill the process of a role; return a description of it."""
    for row in parse_json((directory / "status.json").read_bytes())["roles"]:
        found = re.search(r"process (\d+)", row["where"])
        if row["role"] == role and found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found.group(1)), signal.SIGKILL)
            return f"{role} on {row['where']}"
    return f"{role}, which was not up"


def wait_for(process: subprocess.Popen, directory: Path, step: int) -> None:
    """Return once the run has reached a step, or has ended."""
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None and len(rows(directory, "metrics.jsonl")) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} within {_LIMIT_S:g} s")
        time.sleep(0.2)


def main() -> int:
    """Run, kill, fit, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", default="runs/fleet", type=Path)
    parser.add_argument("--steps", default=150, type=int)
    arguments = parser.parse_args()
    directory, steps = arguments.workdir, arguments.steps
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "scalerl_jax.main", "--ray=local"),
            f"--config={_ROOT / 'configs' / 'tiny_fleet.py'}",
            f"--workdir={directory}",
            f"--config.train.num_steps={steps}",
        ]
    )
    began, killed = time.monotonic(), []
    for share, role in ((1 / 3, "replica 0"), (2 / 3, "learner 1")):
        wait_for(process, directory, max(int(steps * share), 1))
        if process.poll() is None:
            killed.append(kill(directory, role))
            print(f"killed {killed[-1]}", flush=True)
    status = process.wait(_LIMIT_S)
    return tell(directory, status, steps, killed, time.monotonic() - began)


def tell(
    directory: Path, status: int, steps: int, killed: list[str], seconds: float
) -> int:
    """Print what happened; return 1 if something is missing."""
    done, evals = rows(directory, "metrics.jsonl"), rows(directory, "evals.jsonl")
    if not done or not evals:
        print(f"the run ended with status {status} before its first step or evaluation")
        return 1
    last = done[-1]
    made = [row["step"] for row in done] == list(range(1, steps + 1))
    print(
        f"\n{len(killed)} processes killed ({'; '.join(killed)}); {len(done)} steps in "
        f"{seconds:.0f} s; replicas lost {last['replicas/lost']}, groups begun again "
        f"{last['replicas/reissued']}, dropped {last['queue/dropped']}, learner "
        f"restarted {last['learner/restarts']} times; pass rate "
        f"{evals[0]['pass_rate']:.3f} before and {evals[-1]['pass_rate']:.3f} after "
        f"{evals[-1]['generated_tokens']:,.0f} tokens"
    )
    fit = [sys.executable, "-m", "scalerl_jax.scaling", "fit", str(directory)]
    fitted = subprocess.run([*fit, "--x=generated_tokens"]).returncode
    well = status == 0 and made and not last["queue/dropped"] and fitted == 0
    print("the run got through it" if well else "NOT as it should be")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
