"""Print the state of a run: `scalerl status runs/x`.

Reads the files of the run's directory, from any machine that can read it or its bucket,
during the run or after its end.
"""

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_json
from scalerl_jax.formats.remote import files_of_run
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.run.directory import (
    EVALS_FILE,
    METRICS_FILE,
    STATUS_FILE,
    is_abandoned,
    why_ended,
)
from scalerl_jax.run.resume import last_row, sound

_LATE_S = 30.0  # since the last write of a controller, which writes every second
_CELL = 100  # most characters shown of a cell
# Lines on the last step: text, metric, form.
_LINES = (
    (
        ("loss {}", "loss", ".4f"),
        ("{} tokens trained so far", "compute/train_tokens", ",.0f"),
    ),
    (
        ("staleness {}", "staleness/mean", ".1f"),
        ("in flight {}", "staleness/in_flight_mean", ".1f"),
        ("queued {}", "staleness/queued_mean", ".1f"),
        ("max {}", "staleness/max", "g"),
    ),
    (
        ("{} tokens/s generated", "throughput/generated_tokens_per_s", ".0f"),
        ("{} tokens/s trained", "throughput/trained_tokens_per_s", ".0f"),
    ),
    (
        ("groups dropped {}", "queue/dropped", "g"),
        ("verifiers restarted {}", "verifier/restarts", "g"),
    ),
    (
        ("replicas lost {}", "replicas/lost", "g"),
        ("replicas that left {}", "replicas/left", "g"),
        ("groups started again {}", "replicas/reissued", "g"),
        ("late groups refused {}", "replicas/late", "g"),
        ("publications refused {}", "replicas/refused", "g"),
        ("learner restarted {}", "learner/restarts", "g"),
    ),
)
_IDLE_AFTER = 3  # of these
_COLUMNS = ("role", "where", "version", "groups", "tokens/s", "idle", "lost")


def main(argv: list[str] | None = None) -> int:
    """Print the status of one run."""
    parser = Parser("python -m scalerl_jax.status", description=__doc__)
    parser.add_argument("workdir", help="directory of the run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    flags = parser.parse_args(argv)
    status = read(Path(flags.workdir))
    to_stdout(json.dumps(status.facts) + "\n" if flags.json else status.text)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """State of a run, as a program and as a person reads it.

    `facts` has steps, the last step's metrics, the last evaluation (both empty before
    the first), the processes (None for a run of one process) and why it ended before
    its last step ("": it has not, or this is unknown).
    """

    facts: dict[str, Any]  # JSON values
    text: str


def read(directory: Path) -> Status:
    """Return the status of a run.

    Raises:
        ValueError: it is no run's directory, its bucket cannot be used, or one of its
            files is broken, which is named.
    """
    directory = files_of_run(directory)
    file = directory / "config.json"
    if not file.exists():
        raise ValueError(
            f"{directory} is not the directory of a run: it has no config.json; give "
            f"the --workdir of one"
        )
    with _sound(file):
        num_steps = int(read_json(file)["config"]["train"]["num_steps"])
    with _sound(directory / METRICS_FILE):
        metrics = last_row(directory / METRICS_FILE)
        step = int(metrics.get("step", 0))
        lines = _measures(metrics)
    with _sound(directory / EVALS_FILE):
        evaluation = last_row(directory / EVALS_FILE)
        lines.insert(0, f"step {step} of {num_steps}{_evaluation(evaluation)}")
    processes = None
    with _sound(directory / STATUS_FILE):
        if (directory / STATUS_FILE).exists():
            processes = read_json(directory / STATUS_FILE)
        lines += _roles(processes)
    ended = why_ended(directory)
    if ended:
        lines.append(f"ended: {ended}")
    if step < num_steps and is_abandoned(directory):
        run = shlex.quote(str(directory))
        lines.append(f"no process runs it: scalerl train {run} resumes it")
    facts = {
        "num_steps": num_steps,
        "step": step,
        "metrics": metrics,
        "evaluation": evaluation,
        "processes": processes,
        "ended": ended,
    }
    return Status(facts=facts, text="\n".join(lines) + "\n")


def _sound(file: Path) -> contextlib.AbstractContextManager[None]:
    return sound(
        file,
        else_unknown="the state of the run",
        way_out="repair the file, or move it away",
    )


def _evaluation(row: dict[str, Any]) -> str:
    if not row:
        return ""
    return (
        f", pass rate {_shown(row, 'pass_rate', '.3f')} at step {int(row['step'])} "
        f"after {_shown(row, 'compute_chip_hours', '.4f')} chip-hours"
    )


def _measures(step: dict[str, Any]) -> list[str]:
    """Return lines on the last step's staleness, speed, idle shares and failures."""
    if not step:
        return ["no step is finished"]
    idle = ", ".join(
        name.removeprefix("idle/").removesuffix("_share")
        + f" {_shown(step, name, '.0%')}"
        for name in step
        if name.startswith("idle/")
    )
    lines = [_told(step, line) for line in _LINES]
    if idle:
        lines.insert(_IDLE_AFTER, f"idle: {idle}")
    return [line for line in lines if line]


def _told(step: dict[str, Any], line: tuple[tuple[str, str, str], ...]) -> str:
    """Return a line of what a row has: a warm start's has nothing of a sampler."""
    return ", ".join(
        text.format(_shown(step, name, form))
        for text, name, form in line
        if name in step
    )


def _shown(row: dict[str, Any], name: str, form: str = "g") -> str:
    """Return a number of a row as text; null means that it was not finite."""
    value = row[name]
    return "unknown" if value is None else format(value, form)


def _roles(status: dict[str, Any] | None) -> list[str]:
    """Return a line for every process; None: a run of one process."""
    if status is None:
        return ["of one process: learner and sampler are its threads"]
    age = time.time() - status["at"]
    state = str(status["state"])[:_CELL]
    if state == "running" and age > _LATE_S:
        state = f"its controller has not reported for {age:.0f} s"
    rows = [dict.fromkeys(_COLUMNS, "") | row for row in status["roles"]]
    cells = [list(_COLUMNS), *([str(row[c])[:_CELL] for c in _COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(_COLUMNS))]
    return [state] + [
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


if __name__ == "__main__":
    sys.exit(answer(main))
