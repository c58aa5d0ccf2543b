"""Print the state of a run: `scalerl status runs/x`.

Reads the files of the run's directory, from any machine that can read it or its bucket,
during the run or after its end.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from scalerl_jax.formats.reading import read_json
from scalerl_jax.formats.remote import files_of_run
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.run.directory import EVALS_FILE, METRICS_FILE, STATUS_FILE
from scalerl_jax.run.resume import last_row, sound

_LATE_S = 30.0  # since the last write of a controller, which writes every second
_CELL = 100  # most characters shown of a cell
_COLUMNS = ("role", "where", "version", "groups", "tokens/s", "idle", "lost")


def main(argv: list[str] | None = None) -> int:
    """Print the status of one run."""
    parser = Parser("python -m scalerl_jax.status", description=__doc__)
    parser.add_argument("workdir", help="directory of the run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    flags = parser.parse_args(argv)
    facts = read(Path(flags.workdir))
    to_stdout(json.dumps(facts) + "\n" if flags.json else _text(facts))
    return 0


def describe(directory: Path) -> str:
    """Return the status as text; errors are those of `read`."""
    return _text(read(directory))


def read(directory: Path) -> dict[str, Any]:
    """Return the status: steps, the last step's metrics, evaluation and processes.

    Metrics and evaluation are the last rows of their files, empty before the first;
    `processes` is None for a run of one process.

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
    facts: dict[str, Any] = {"num_steps": num_steps, "processes": None}
    with _sound(directory / METRICS_FILE):
        facts["metrics"] = step = last_row(directory / METRICS_FILE)
        facts["step"] = int(step.get("step", 0))
        _measures(step)
    with _sound(directory / EVALS_FILE):
        facts["evaluation"] = evaluation = last_row(directory / EVALS_FILE)
        _evaluation(evaluation)
    with _sound(directory / STATUS_FILE):
        if (directory / STATUS_FILE).exists():
            facts["processes"] = status = read_json(directory / STATUS_FILE)
            _roles(status)
    return facts


def _text(facts: dict[str, Any]) -> str:
    evaluated = _evaluation(facts["evaluation"])
    lines = [f"step {facts['step']} of {facts['num_steps']}{evaluated}"]
    lines += _measures(facts["metrics"])
    if facts["processes"] is None:
        lines.append("one process: learner and sampler are its threads")
    else:
        lines += _roles(facts["processes"])
    return "\n".join(lines) + "\n"


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
    said = [
        f"staleness {_shown(step, 'staleness/mean', '.1f')} (in flight "
        f"{_shown(step, 'staleness/in_flight_mean', '.1f')}, queued "
        f"{_shown(step, 'staleness/queued_mean', '.1f')}, max "
        f"{_shown(step, 'staleness/max')})",
        f"{_shown(step, 'throughput/generated_tokens_per_s', '.0f')} tokens/s "
        f"generated, {_shown(step, 'throughput/trained_tokens_per_s', '.0f')} trained; "
        f"idle: {idle}",
        f"groups dropped {_shown(step, 'queue/dropped')}, verifiers restarted "
        f"{_shown(step, 'verifier/restarts')}",
    ]
    failures = {
        "replicas lost": "replicas/lost",
        "replicas that left": "replicas/left",
        "groups started again": "replicas/reissued",
        "late groups refused": "replicas/late",
        "publications refused": "replicas/refused",
        "learner restarted": "learner/restarts",
    }
    told = [
        f"{text} {_shown(step, name)}"
        for text, name in failures.items()
        if name in step
    ]
    return said + ([", ".join(told)] if told else [])


def _shown(row: dict[str, Any], name: str, form: str = "g") -> str:
    """Return a number of a row as text; null means that it was not finite."""
    value = row[name]
    return "unknown" if value is None else format(value, form)


def _roles(status: dict[str, Any]) -> list[str]:
    """Return a line for every process."""
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
