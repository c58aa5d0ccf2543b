"""Forecast of a whole step on a topology: seconds, idle, chip-hours, best split."""

import dataclasses
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.planning.chooser import Choice, choose, opened, read
from scalerl_jax.planning.forecast import StepForecast, forecast
from scalerl_jax.planning.lengths import Lengths, assumed_lengths
from scalerl_jax.planning.rates import BOUND, EXPECTED
from scalerl_jax.preflight.figures import amount, duration
from scalerl_jax.preflight.fitting import Fitted
from scalerl_jax.preflight.topologies import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Forecasts of a step for a config, and for the best split of the devices."""

    config: Config
    lengths: Lengths
    expected: StepForecast
    bound: StepForecast  # with all hardware at its peak
    best: Choice | None  # None: no split is known to fit

    @property
    def saved(self) -> float:
        """Share of the chip-hours that the best split saves, in [0, 1)."""
        if self.best is None:
            return 0.0
        ours, theirs = self.expected, self.best.forecast
        return max(0.0, 1 - theirs.chip_hours_per_step / ours.chip_hours_per_step)


def make_whole_step(
    fitted: Fitted,
    arch: Architecture,
    topology: Topology,
    lengths: Lengths | None = None,
) -> WholeStep:
    """Return the forecasts of a config's whole step on a topology.

    Args:
        fitted: the result of `fit_topology`.
        arch: the policy's architecture.
        topology: the devices; all are paid for, used or not.
        lengths: token counts of rollouts; None: assumed.
    """
    config = fitted.config
    lengths = lengths or assumed_lengths(config)

    def seconds(reached: Any) -> StepForecast:
        return forecast(
            *(config, arch, topology.chip, lengths),
            devices=topology.num_devices,
            reached=reached,
        )

    try:
        best = choose(opened(config), arch, topology.chip, fitted.room, lengths)
    except ValueError:
        best = None
    return WholeStep(
        config=config,
        lengths=lengths,
        expected=seconds(EXPECTED),
        bound=seconds(BOUND),
        best=best,
    )


def step_json(step: WholeStep, *, price: float | None) -> dict[str, Any]:
    """Return the keys of the report's JSON object about whole steps."""
    best: dict[str, Any] | None = None
    if step.best is not None:
        best = _forecast_json(step.best.forecast, step.best.config, price=price)
        best |= {
            "settings": step.best.settings,
            "can_start": True,  # only splits that can be formed are tried
            "saves": step.saved,
        }
    return _forecast_json(step.expected, step.config, price=price) | {
        "bound": _forecast_json(step.bound, step.config, price=price),
        "lengths": {
            "source": step.lengths.source,
            "mean_tokens": step.lengths.mean,
            "longest_tokens": step.lengths.longest,
            "prompt_tokens": step.lengths.prompt,
        },
        "best": best,
    }


def _forecast_json(
    found: StepForecast, config: Config, *, price: float | None
) -> dict[str, Any]:
    chip_hours = found.chip_hours(config)
    return {
        "generate_seconds": found.generate_seconds,
        "train_seconds": found.train_seconds,
        "dcn_seconds": found.dcn_seconds,
        "publish_seconds": found.publish_seconds,
        "step_seconds": found.step_seconds,
        "busy_share": found.busy_share,
        "learner_idle_share": found.learner_idle,
        "generator_idle_share": found.generator_idle,
        "unused_devices": found.devices - found.devices_at_work,
        "chip_hours_per_step": found.chip_hours_per_step,
        "evaluation_hours": found.evaluation_hours(config),
        "chip_hours": chip_hours,
        "money": None if price is None else price * chip_hours,
    }


def step_lines(step: WholeStep, fitted: Fitted, *, price: float | None) -> list[str]:
    """Return the report's lines about whole steps."""
    found, bound, config = step.expected, step.bound, step.config
    longer = "generation" if found.generate_seconds >= found.train_seconds else "train"
    what = f"the longer of both, {longer}"
    if found.step_seconds > 1.01 * max(found.generate_seconds, found.train_seconds):
        what = (
            "both in turn" if found.shared else "slowed by turns or the longest rollout"
        )
    lines = [
        "",
        f"a whole step, with rollouts of {step.lengths.mean:,.0f} tokens "
        f"({step.lengths.source}):",
        f"{'':<14} {'expected':>8} {'bound':>10}",
    ]
    for name in ("generate", "train", "publish", "step"):
        one, other = (getattr(each, f"{name}_seconds") for each in (found, bound))
        lines.append(f"    {name:<10} {duration(one):>8} {duration(other):>10}")
    if found.dcn_seconds:
        lines.append(
            f"of train: {duration(found.dcn_seconds)} for gradients between "
            f"mesh.slices = {config.mesh.slices}, at the hosts' network bandwidth"
        )
    hours, evaluations = found.chip_hours(config), found.evaluation_hours(config)
    money = (
        "" if price is None else f", {amount(price * hours)} at {price:g} a chip-hour"
    )
    lines += [
        f"a step is {what}; idle: learner {found.learner_idle:.0%}, generators "
        f"{found.generator_idle:.0%}, unused {found.devices - found.devices_at_work} "
        f"devices; {found.busy_share:.0%} of the devices' time is work",
        f"{amount(found.chip_hours_per_step)} chip-hours a step; train.num_steps = "
        f"{config.train.num_steps:,}: {amount(hours)} chip-hours{money}, with "
        f"{duration(3600 * evaluations)} of evaluations",
        f"can be started: yes, {fitted.processes} processes"
        if fitted.can_start
        else f"CANNOT BE STARTED: {fitted.why_not}",
    ]
    return lines + _best_lines(step)


def _best_lines(step: WholeStep) -> list[str]:
    """Return lines on the best split and the settings that it needs."""
    if step.best is None:
        return ["no split of these devices is known to fit with its settings open"]
    found, chosen = step.best.forecast, step.best.settings
    if all(read(step.config, name) == value for name, value in chosen.items()):
        return [f"it is the best of {step.best.tried} splits that fit"]
    if found.chip_hours(step.best.config) > step.expected.chip_hours(step.config):
        return [f"none of the {step.best.tried} splits tried takes fewer chip-hours"]
    written = " ".join(f"--config.{name}={value}" for name, value in chosen.items())
    return [
        f"best split of {step.best.tried}: learner {found.learner_devices}, generators "
        f"{step.best.config.generators.count} x "
        f"{step.best.config.generators.devices}: a step of "
        f"{duration(found.step_seconds)}, {found.busy_share:.0%} work, "
        f"{amount(found.chip_hours_per_step)} chip-hours "
        f"({step.saved:.0%} saved):",
        f"    {written}",
    ]
