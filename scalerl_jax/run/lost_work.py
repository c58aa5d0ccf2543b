"""Compute of a run that goes on: what it has cost, and what of that is lost.

A run that goes on from a checkpoint has lost what it did after it.  The chip-seconds
were paid all the same: on a resume they are charged as `lost`, so that the training
axis never goes back.  Start-ups, evaluations and the writing of checkpoints are not
undone and stay what they were.  A kill before the first checkpoint loses everything:
the run begins again at step 0, and at what it has cost so far.

Tokens and FLOPs are what the method has used, not what was paid: work that is done
again is counted once, so these counters go on from the checkpoint.  What was lost is
told apart: `lost_tokens` (generated) and `lost_flops` (of sampler and learner).
"""

from collections import Counter
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_value
from scalerl_jax.run.ledger import CATEGORIES, LEDGER_FILE, Ledger
from scalerl_jax.run.resume import sound

_NOT_UNDONE = ("startup", "eval", "checkpoint")  # by a kill
# Categories that a kill adds to, and those whose amounts since the checkpoint it adds.
_LOST = {
    "lost": tuple(name for name in CATEGORIES if name not in _NOT_UNDONE),
    "lost_tokens": ("generated_tokens", "lost_tokens"),
    "lost_flops": ("train_flops", "generate_flops", "teacher_flops", "lost_flops"),
}


def restore(
    ledger: Ledger, saved: dict[str, Any] | None, *, latest: dict[str, Any] | None
) -> None:
    """Continue a ledger from `saved`, a checkpoint's state; None: from the start.

    What `latest`, the state that was last written down, has beyond it is lost; the time
    in between is not counted.

    Raises:
        ValueError: they count the hours of another chip.
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
    """Return amounts to go on from at a checkpoint; it may be newer than `latest`."""
    past = saved.copy()
    for name in _NOT_UNDONE:
        past[name] = max(saved[name], latest[name])
    for name, parts in _LOST.items():
        past[name] += max(0, sum(latest[part] - saved[part] for part in parts))
    return past


def read_ledger(directory: Path) -> dict[str, Any] | None:
    """Return the state last written in the directory of a run, if any was.

    Raises:
        ValueError: the file is no ledger's.
    """
    path = directory / LEDGER_FILE
    if not path.exists():
        return None
    unknown = "what the run has cost since its last checkpoint"
    with sound(path, else_unknown=unknown, way_out="remove it to go on without that"):
        state = read_value(path)
        if state.keys() != {"chip", "chip_s", "counts"}:
            raise KeyError(f"it holds {sorted(state)}")
    return state
