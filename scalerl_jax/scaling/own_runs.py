"""What a run directory of this package says beside its curve."""

import json
from pathlib import Path

import numpy as np

from scalerl_jax.scaling.curves import DEFAULT_X, Curve
from scalerl_jax.scaling.readers import read_table

_WALL_TIME = (
    "  note      chip-hours of a CPU are its wall time, which moves with whatever else "
    "it does; tokens do not: --x generated_tokens\n"
)


def when_enough(folder: Path, missing: int) -> str:
    """When a run will have so many more evaluations, as far as its files say."""
    try:
        rows = [row for _, row in read_table(folder / "metrics.jsonl").rows]
        settings = json.loads((folder / "config.json").read_bytes())["config"]
        every, last = settings["eval"]["every"], settings["train"]["num_steps"]
        done, seconds = rows[-1]["step"], np.mean([row["time/step_s"] for row in rows])
        enough = (done // every + missing) * every
        minutes = (enough - done) * seconds / 60.0
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""  # no files of a run, or not of this version
    more = "" if enough <= last else f": go on with --config.train.num_steps={enough}"
    return (
        f". That is step {enough} of {last}, {minutes:.1f} more minutes at "
        f"{seconds:.1f} s a step{more}"
    )


def on_a_cpu(folder: Path, curve: Curve) -> str:
    """What chip-hours are, where the run was on a CPU."""
    try:
        chip = json.loads((folder / "ledger.json").read_bytes())["chip"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return _WALL_TIME if chip == "cpu" and curve.x_name == DEFAULT_X else ""
