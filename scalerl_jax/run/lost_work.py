"""Compute of a resumed run: what it has cost, and how much of that is lost.

A run that resumes from a checkpoint has lost its work after the checkpoint.  These
chip-seconds were paid all the same: on a resume they are charged as `lost`, so that the
training axis never goes back.  Start-ups, evaluations and writes of checkpoints are not
undone; their categories stay unchanged.  A kill before the first checkpoint loses all
work: the run starts again at step 0, with its cost so far.

Tokens and FLOPs count what the method has used, not what was paid: repeated work counts
once, so these counters continue from the checkpoint.  Lost amounts are in separate
counters: `lost_tokens` (generated) and `lost_flops` (of sampler and learner).
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_value
from scalerl_jax.run.ledger import CATEGORIES, LEDGER_FILE, Ledger
from scalerl_jax.run.resume import sound

_NOT_UNDONE = ("startup", "eval", "checkpoint")  # by a kill
# Counter that a kill increases -> those whose amounts since the checkpoint it adds.
_LOST = {
    "lost": tuple(name for name in CATEGORIES if name not in _NOT_UNDONE),
    "lost_tokens": ("generated_tokens", "lost_tokens"),
    "lost_flops": ("train_flops", "generate_flops", "teacher_flops", "lost_flops"),
}


def resume(
    ledger: Ledger, directory: Path, checkpoint: Mapping[str, Any] | None
) -> None:
    """Continue the ledger of the run in a directory, if the run has begun.

    `checkpoint` has the books of the newest checkpoint; None: there is none yet.
    Errors are those of `restore` and `read_ledger`.
    """
    latest = read_ledger(directory)
    if checkpoint is None and latest is None:
        return
    saved = None if checkpoint is None else checkpoint["ledger"]
    restore(ledger, saved, latest=latest)


def restore(
    ledger: Ledger, saved: dict[str, Any] | None, *, latest: dict[str, Any] | None
) -> None:
    """Continue a ledger from `saved`, a checkpoint's state; None: from the start.

    The difference between `latest`, the state last written to disk, and `saved` is
    lost.  Time after `latest` is not counted.

    Raises:
        ValueError: the states count hours of another kind of chip.
    """
    amounts: list[Counter[str]] = []
    for state in (saved, latest):
        if state is not None and state["chip"] != ledger.chip:
            raise ValueError(
                f"the ledger of this run counts hours of {state['chip']!r} and this "
                f"machine has {ledger.chip!r}; they cannot be added: resume on "
                f"{state['chip']!r}, or start a new run with another --workdir"
            )
        amounts.append(Counter(state["chip_s"] | state["counts"] if state else {}))
    ledger.add_past(_resumed(*amounts))


def _resumed(saved: Counter[str], latest: Counter[str]) -> Counter[str]:
    """Return the amounts to resume from; the checkpoint may be newer than `latest`."""
    past = saved.copy()
    for name in _NOT_UNDONE:
        past[name] = max(saved[name], latest[name])
    for name, parts in _LOST.items():
        past[name] += max(0, sum(latest[part] - saved[part] for part in parts))
    return past


def read_ledger(directory: Path) -> dict[str, Any] | None:
    """Return the ledger's state in the directory of a run; None: no file.

    Raises:
        ValueError: the file does not hold a ledger's state.
    """
    path = directory / LEDGER_FILE
    if not path.exists():
        return None
    unknown = "what the run has cost since its last checkpoint"
    with sound(path, else_unknown=unknown, way_out="remove it to resume without it"):
        state = read_value(path)
        if state.keys() != {"chip", "chip_s", "counts"}:
            raise KeyError(f"it holds {sorted(state)}")
        for amount in (*state["chip_s"].values(), *state["counts"].values()):
            if type(amount) not in (int, float) or not math.isfinite(amount):
                raise ValueError(f"{amount!r} is no amount")
    return state
