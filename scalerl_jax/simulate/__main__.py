"""Predict a run's cost and idle time before machines are paid for:

    scalerl simulate --config=configs/8b.py --topology=v5p:4x4x4

A sweep simulates a run with several values of its settings, the cheapest step first.
Exit status: 0 simulated, 2 a mistake in a setting or a flag.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from scalerl_jax import config as config_lib
from scalerl_jax.process.ending import answer
from scalerl_jax.process.full_disk import naming
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.simulate.outcome import SimulationOutcome, draw
from scalerl_jax.simulate.world import World

COLUMNS = {  # figure -> heading of its column in a sweep's table
    "chip_hours_per_step": "chip-hours a step",
    "step_s": "s a step",
    "learner_idle": "learner idle",
    "generators_idle": "generators idle",
    "controller_busy": "controller busy",
    "slots_in_use": "slots in use",
    "staleness_in_flight": "staleness in flight",
    "staleness_queued": "queued",
}
# Settings that a sweep may vary.
SWEPT = (
    "batch.group_size",
    "batch.num_prompts",
    "generators.count",
    "generators.devices",
    "queue.max_staleness",
    "queue.max_waiting",
    "sampler.slots",
)
_MOST_POINTS = 500  # of a sweep
_PROMPT_TOKENS = 200  # mean of a prompt, unless it is given


def run(argv: Sequence[str]) -> int:
    """Run the simulation of the flags, print its result, and return the exit status."""
    return answer(lambda: _run(list(argv)))


def _define(values: flags.FlagValues) -> None:
    for name, meaning in {
        "topology": "TPUs of the run: v5p:4x4x4.",
        "rates": "JSON file of measured rates, in place of a topology.",
        "lengths": "A run's directory, whose lengths replace --mean_tokens and --tail; "
        "or a file with a JSON list of a group's lengths on each line.",
        "sweep": "Settings and values: 'generators.count=2,4 sampler.slots=64,128'.",
        "picture": "File for a picture.",
    }.items():
        flags.DEFINE_string(name, None, meaning, flag_values=values)
    for name, (default, meaning) in {
        "mean_tokens": (
            0.0,
            "Mean tokens of a completion at the start; 0: half of the longest.",
        ),
        "tail": (4.0, "99th percentile of the lengths over their median."),
        "alike": (0.5, "Share of the variance of lengths that is between prompts."),
        "drift": (
            1.0,
            "Mean length at the end over that at the start; in between it changes "
            "by the same factor each step.",
        ),
        "prompt_tokens": (
            None,
            "Mean tokens of a prompt; default: 200, or sampler.max_prompt_tokens if "
            "that is less.",
        ),
        "zero_variance": (0.0, "Share of the groups without a gradient."),
        "replica_mtbf_h": (0.0, "Hours between two losses of a replica; 0: never."),
        "learner_mtbf_h": (0.0, "Hours between two losses of the learner; 0: never."),
        "replica_start_s": (180.0, "Seconds until a lost replica samples again."),
        "learner_start_s": (240.0, "Seconds until a lost learner is back."),
        "price": (0.0, "Price of a chip-hour."),
    }.items():
        flags.DEFINE_float(name, default, meaning, flag_values=values)
    flags.DEFINE_integer(
        "steps", 200, "Optimizer steps to simulate.", flag_values=values
    )
    flags.DEFINE_integer(
        "learner_chips", 0, "With --rates; 0: one.", flag_values=values
    )
    flags.DEFINE_bool("json", False, "One JSON object on stdout.", flag_values=values)


def _run(argv: list[str]) -> int:
    values = flags.FlagValues()
    given = config_lib.define_config(values, argv)
    _define(values)
    if extra := config_lib.read_flags(
        values, argv, settings=config_lib.Config, about=__doc__
    )[1:]:
        raise ValueError(f"unknown arguments {extra}")
    if not values["config"].value:
        raise ValueError("--config is missing: --config=configs/8b.py")
    config = config_lib.resolve(given.value)
    longest = config.sampler.max_prompt_tokens
    said: dict[str, Any] = {name: values[name].value for name in values}
    if said["prompt_tokens"] is None:
        said["prompt_tokens"] = float(min(_PROMPT_TOKENS, longest))
    _check(said)
    if said["prompt_tokens"] > longest:
        raise ValueError(
            f"--prompt_tokens={said['prompt_tokens']:g} is a mean above the longest "
            f"prompt, sampler.max_prompt_tokens = {longest}; lower it or raise that"
        )
    world = World(config, said)
    if said["sweep"] is not None:
        return _sweep(world, parse_sweep(said["sweep"]), as_json=said["json"])
    outcome = world.simulate({})
    if said["picture"]:
        _draw(outcome, said["picture"])
    figures = outcome.figures()
    if said["json"]:
        answer = figures | outcome.counts | {"chips": outcome.scenario.chips}
        if said["price"]:
            answer["price_per_step"] = said["price"] * figures["chip_hours_per_step"]
        answer |= dataclasses.asdict(world.basis)
        to_stdout(json.dumps(answer) + "\n")
    else:
        to_stdout(_text(outcome, figures, price=said["price"]))
        to_stdout(world.basis.text())
    return 0


def _check(said: dict[str, Any]) -> None:
    """Raise ValueError for contradicting flags and numbers out of range."""
    if (said["topology"] is None) == (said["rates"] is None):
        raise ValueError(
            "one of --topology and --rates is needed: --topology=v5p:4x4x4, or "
            "--rates=rates.json"
        )
    if said["rates"] is None and said["learner_chips"]:
        raise ValueError(
            f"--learner_chips={said['learner_chips']} is read with --rates only; with "
            f"--topology the learner has the chips of its mesh: leave it out, or set "
            f"mesh.data and mesh.fsdp"
        )
    unread = [name for name in ("picture", "price") if said[name]]
    if said["sweep"] is not None and unread:
        raise ValueError(
            f"--sweep does not read --{' and --'.join(unread)}; leave it out, or "
            f"simulate one combination, without --sweep"
        )
    limits = {
        "prompt_tokens": (0, 10_000_000),
        "mean_tokens": (0, 10_000_000),
        "replica_mtbf_h": (0, 1e6),
        "learner_mtbf_h": (0, 1e6),
        "replica_start_s": (0, 1e6),
        "learner_start_s": (0, 1e6),
        "price": (0, 1e6),
        "steps": (2, 1_000_000),
        "learner_chips": (0, 1_000_000),
    }
    for name, (lowest, highest) in limits.items():
        if not lowest <= said[name] <= highest:
            raise ValueError(
                f"--{name}={said[name]:g} must be from {lowest:,} to {highest:,.0f}"
            )
    for name in ("replica_mtbf_h", "learner_mtbf_h"):
        if 0 < said[name] < 0.01:
            raise ValueError(f"--{name}={said[name]:g} must be 0, or 0.01 or more")
    for name in ("tail", "alike", "drift", "zero_variance"):
        if not math.isfinite(said[name]):
            raise ValueError(f"--{name}={said[name]} must be a finite number")


def parse_sweep(text: str) -> dict[str, list[int]]:
    """Parse the values of each setting: `generators.count=1,2,4 sampler.slots=64`.

    Raises:
        ValueError: the text is malformed, or names a setting that cannot be swept.
    """
    found: dict[str, list[int]] = {}
    for word in text.split():
        name, _, values = word.partition("=")
        if name not in SWEPT:
            raise ValueError(f"--sweep has {name!r}; choose from {list(SWEPT)}")
        if name in found:
            raise ValueError(f"--sweep has {name} twice")
        try:
            found[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise ValueError(
                f"--sweep={word} must be a setting and whole numbers, such as "
                f"generators.count=1,2,4"
            ) from None
    if not found:
        raise ValueError("--sweep is empty: --sweep='generators.count=1,2,4'")
    count = math.prod(map(len, found.values()))
    if count > _MOST_POINTS:
        raise ValueError(f"--sweep has {count:,} combinations; {_MOST_POINTS} at most")
    return found


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of a sweep."""

    settings: dict[str, int]
    figures: dict[str, float]  # empty if the settings are not valid
    reason: str = ""  # why they are not valid


def sweep(world: World, values: dict[str, list[int]]) -> list[Point]:
    """Return every combination, the cheapest step first, invalid ones last."""
    points = []
    for each in itertools.product(*values.values()):
        settings = dict(zip(values, each, strict=True))
        try:
            points.append(Point(settings, world.simulate(settings).figures()))
        except ValueError as error:
            points.append(Point(settings, {}, str(error)))
    return sorted(
        points, key=lambda point: point.figures.get("chip_hours_per_step", math.inf)
    )


def table(points: Sequence[Point]) -> str:
    """Return a Markdown table of a sweep."""
    names = list(points[0].settings)
    lines = ["| " + " | ".join([*names, *COLUMNS.values()]) + " |"]
    lines.append("|" + "---|" * (len(names) + len(COLUMNS)))
    for point in points:
        cells = [str(point.settings[name]) for name in names]
        if point.figures:
            cells += [f"{point.figures[name]:.4g}" for name in COLUMNS]
        else:
            cells += [point.reason, *[""] * (len(COLUMNS) - 1)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _sweep(world: World, values: dict[str, list[int]], *, as_json: bool) -> int:
    points = sweep(world, values)
    best = points[0]
    if not best.figures:
        raise ValueError(f"no combination of --sweep is valid: {best.reason}")
    if as_json:
        answer = [
            point.settings | (point.figures or {"reason": point.reason})
            for point in points
        ]
        to_stdout(json.dumps(answer) + "\n")
    else:
        to_stdout(table(points))
        words = " ".join(
            f"--config.{name}={value}" for name, value in best.settings.items()
        )
        to_stdout(f"\nleast chip-hours a step: {words}\n")
        if world.learner_takes_rest(best.settings):
            to_stdout(
                "the learner is the best for these generators: --config.mesh.data=0 "
                "--config.mesh.fsdp=0\n"
            )
        to_stdout(world.basis.text())
    return 0


def _draw(outcome: SimulationOutcome, name: str) -> None:
    path = Path(name)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture={name} must end in .png, .pdf or .svg")
    with naming(path):
        draw(outcome, path)


def _text(
    outcome: SimulationOutcome, figures: dict[str, float], *, price: float
) -> str:
    scenario, counts = outcome.scenario, outcome.counts
    hours = figures["chip_hours_per_step"]
    money = f", {hours * price:.4g} of money" if price else ""
    per_chip = scenario.devices_per_chip
    unused = ""
    if scenario.unused_devices:
        unused = f", {scenario.unused_devices / per_chip:g} are paid for without a role"
    lines = [
        f"{scenario.learner_devices / per_chip:g} chips learn, {scenario.replicas} x "
        f"{scenario.replica_devices / per_chip:g} generate with {scenario.slots} slots "
        f"each{unused}; {scenario.num_steps} steps simulated",
        f"a step: {figures['step_s']:.4g} s, {hours:.4g} chip-hours{money}; "
        f"{figures['busy_share']:.0%} of the chips' time trains or decodes",
        f"idle: learner {figures['learner_idle']:.1%}, generators "
        f"{figures['generators_idle']:.1%} (slots in use while they decode: "
        f"{figures['slots_in_use']:.1%}); the controller takes groups in "
        f"{figures['controller_busy']:.2%} of the time",
        f"staleness: {figures['staleness']:.2f} = {figures['staleness_in_flight']:.2f} "
        f"in flight + {figures['staleness_queued']:.2f} queued, "
        f"{figures['staleness_max']:.0f} at most",
        f"groups: {figures['groups_running']:.0f} running, "
        f"{figures['groups_buffered']:.0f} wait for the learner",
        f"evaluations: {figures['eval_share']:.1%} of the time; "
        f"{figures['tokens_per_s']:,.0f} tokens/s",
    ]
    if counts["lost_replicas"] or counts["lost_learners"]:
        lines.append(
            f"losses: {counts['lost_replicas']} replicas, {counts['lost_learners']} "
            f"learners, {counts['reissued_groups']} groups sampled again, "
            f"{counts['lost_tokens']:,} tokens lost"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run(sys.argv))
