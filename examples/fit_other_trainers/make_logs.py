"""Logs in the formats of other trainers, for one curve with a known answer.

python examples/fit_other_trainers/make_logs.py runs/others
"""

import csv
import json
import random
import sys
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

RATE = "eval/pass_rate"
# These classes are made at import, where a type checker cannot see them.
Event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
Summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]


def make_curve(seed: int) -> list[tuple[int, float]]:
    """Return steps and noisy rates: R0 0.25, A 0.65, C_mid 200 steps, B 1.4."""
    noise = random.Random(seed)
    return [
        (step, noise.gauss(0.25 + 0.4 / (1 + (200 / max(step, 1)) ** 1.4), 0.004))
        for step in range(0, 1001, 25)
    ]


def write_wandb(file: Path) -> None:
    """Write the export of a chart with two runs, as W&B's download button makes it."""
    curves = [make_curve(0), make_curve(1)]
    names = [f"seed{seed} - {RATE}{end}" for seed in (0, 1) for end in ("", "__MIN")]
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["Step", *names])
        for (step, first), (_, second) in zip(*curves, strict=True):
            rows.writerow([step, first, first, second, second])


def write_trl(directory: Path) -> None:
    """Write the state that TRL and other Hugging Face trainers keep."""
    directory.mkdir()
    log = [{"step": step, "eval_reward": rate} for step, rate in make_curve(0)]
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": log}))


def write_verl(file: Path) -> None:
    """Write what verl prints."""
    name = "val-core/gsm8k/reward/mean@1"
    lines = [f"step:{step} - {name}:{rate:.4f}\n" for step, rate in make_curve(0)]
    file.write_text("".join(lines))


def write_board(directory: Path) -> None:
    """Write TensorBoard's event files."""
    writer = EventFileWriter(str(directory))
    for step, rate in make_curve(0):
        value = Summary.Value(tag=RATE, simple_value=rate)
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
    writer.close()


def main() -> None:
    """Write one log of each kind into the directory of the command line."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    write_wandb(directory / "wandb.csv")
    write_trl(directory / "trl")
    write_verl(directory / "verl.log")
    write_board(directory / "board")


if __name__ == "__main__":
    main()
