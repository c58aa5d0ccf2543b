"""State of a run: `scalerl status runs/x`.

Reads the files of the run's directory, from any machine that sees it or its bucket,
while the run goes on or after its end.
"""

import sys
import time
from pathlib import Path
from typing import Any

from scalerl_jax.utils.ending import Parser, answer
from scalerl_jax.utils.printing import to_stdout
from scalerl_jax.utils.reading import parse_json
from scalerl_jax.utils.remote import files_of_run
from scalerl_jax.utils.run_directory import EVALS_FILE, METRICS_FILE, STATUS_FILE

_LATE_S = 30.0  # without a word from a controller that writes every second
_COLUMNS = ("role", "where", "version", "groups", "tokens/s", "idle", "lost")


def main(argv: list[str] | None = None) -> int:
    """Print the status of one run."""
    parser = Parser("python -m scalerl_jax.status", description=__doc__)
    parser.add_argument("workdir", help="directory of the run")
    to_stdout(describe(Path(parser.parse_args(argv).workdir)))
    return 0


def describe(directory: Path) -> str:
    """Return the status as text.

    Raises:
        ValueError: it is no run's directory, or in a bucket that cannot be used.
    """
    directory = files_of_run(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} is not the directory of a run: it has no config.json; give "
            f"the --workdir of one"
        )
    config = parse_json((directory / "config.json").read_bytes())
    step, evaluation = _last(directory / METRICS_FILE), _last(directory / EVALS_FILE)
    lines = [_headline(config, step, evaluation), *_measures(step)]
    file = directory / STATUS_FILE
    if file.is_file():
        lines += _roles(parse_json(file.read_bytes()))
    else:
        lines.append("one process: learner and sampler are its threads")
    return "\n".join(lines) + "\n"


def _last(path: Path) -> dict[str, Any]:
    """Return the last whole row of a file of rows; empty without one."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - 2**18, 0))
        rows = [line for line in file.read().splitlines(True) if line.endswith(b"\n")]
    return parse_json(rows[-1]) if rows else {}


def _headline(
    config: dict[str, Any], step: dict[str, Any], evaluation: dict[str, Any]
) -> str:
    steps = config["config"]["train"]["num_steps"]
    said = f"step {step.get('step', 0)} of {steps}"
    if evaluation:
        said += (
            f", pass rate {evaluation['pass_rate']:.3f} at step {evaluation['step']} "
            f"after {evaluation['compute_chip_hours']:.4f} chip-hours"
        )
    return said


def _measures(step: dict[str, Any]) -> list[str]:
    """Return what the last step says of staleness, speed, idle shares and failures."""
    if not step:
        return ["no step is done"]
    idle = ", ".join(
        f"{name.removeprefix('idle/').removesuffix('_share')} {share:.0%}"
        for name, share in step.items()
        if name.startswith("idle/")
    )
    said = [
        f"staleness {step['staleness/mean']:.1f} (in flight "
        f"{step['staleness/in_flight_mean']:.1f}, queued "
        f"{step['staleness/queued_mean']:.1f}, max {step['staleness/max']})",
        f"{step['throughput/generated_tokens_per_s']:.0f} tokens/s generated, "
        f"{step['throughput/trained_tokens_per_s']:.0f} trained; idle: {idle}",
        f"groups dropped {step['queue/dropped']}, verifiers restarted "
        f"{step['verifier/restarts']}",
    ]
    failures = {
        "replicas lost": "replicas/lost",
        "replicas that left": "replicas/left",
        "groups begun again": "replicas/reissued",
        "late groups refused": "replicas/late",
        "publications refused": "replicas/refused",
        "learner restarted": "learner/restarts",
    }
    told = [f"{text} {step[name]}" for text, name in failures.items() if name in step]
    return said + ([", ".join(told)] if told else [])


def _roles(status: dict[str, Any]) -> list[str]:
    """Return a line for every process."""
    age = time.time() - status["at"]
    state = status["state"]
    if state == "running" and age > _LATE_S:
        state = f"its controller has not been heard of for {age:.0f} s"
    rows = [dict.fromkeys(_COLUMNS, "") | row for row in status["roles"]]
    cells = [list(_COLUMNS), *([str(row[c]) for c in _COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(_COLUMNS))]
    return [state] + [
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


if __name__ == "__main__":
    sys.exit(answer(main))
