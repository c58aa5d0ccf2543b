"""Check before machines are paid for: is the config valid, does it fit, its cost.

`scalerl_jax.preflight` answers.  It runs in its own process, since it needs an
environment that hides real TPUs.
"""

import dataclasses
import datetime
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from scalerl_jax import config as config_lib
from scalerl_jax.formats.reading import is_remote, parse_json
from scalerl_jax.launch.job import Job
from scalerl_jax.launch.place import Machines
from scalerl_jax.launch.watching import last_rows
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.run.directory import EVALS_FILE

_LIMIT_S = 3600.0  # timeout of the preflight; it compiles a large config for minutes
_FITS, _TOO_LARGE = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Steps, time and chips that a run will take, as far as they are known."""

    num_steps: int
    chips: int
    price: float  # per chip-hour; 0: not given
    step_s: float | None = None  # None: not in the preflight's result
    step_chip_hours: float | None = None

    @property
    def chip_hours(self) -> float | None:
        """Chip-hours of all steps; None: not known."""
        if self.step_s is None:
            return None
        each = self.step_chip_hours or self.chips * self.step_s / 3600.0
        return self.num_steps * each

    def lines(self, now: datetime.datetime) -> list[str]:
        """Return the estimate as lines for people."""
        said = f"{self.num_steps:,} optimizer steps"
        if not self.chips:
            return [f"{said} on this machine"]
        said = f"{self.chips} chips, {said}"
        spent = self.chip_hours
        if self.step_s is None or spent is None:
            return [f"{said}; how long a step takes is not known beforehand"]
        hours = self.num_steps * self.step_s / 3600.0
        end = now + datetime.timedelta(hours=hours)
        rows = [
            f"{said} of {self.step_s:.1f} s: {hours:.1f} h, {spent:,.0f} chip-hours, "
            f"until about {end:%Y-%m-%d %H:%M}; evaluations, starts and preemptions "
            f"are extra"
        ]
        if self.price:
            rows.append(f"price: {spent * self.price:,.2f} at {self.price:g} each")
        else:
            rows.append("price: unknown without --price-per-chip-hour")
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Chip-hours of a job so far; None: there is nothing to count."""

    chips: int
    machine_hours: float | None  # since the machines were requested
    run_chip_hours: float | None  # compute of the run, on all its machines so far
    run_step: int | None  # of the evaluation that says so
    price_per_chip_hour: float  # 0: not given

    def lines(self) -> list[str]:
        """Return the cost as lines for people."""
        rows = []
        if self.machine_hours is not None:
            spent = self.chips * self.machine_hours
            rows.append(
                f"these machines: {self.chips} chips x {self.machine_hours:.2f} h "
                f"since their request = {spent:.2f} chip-hours at most"
                f"{self._price(spent)}"
            )
        if self.run_chip_hours is not None:
            rows.append(
                f"the run: {self.run_chip_hours:.4f} chip-hours of compute at step "
                f"{self.run_step}, on all its machines so far"
                f"{self._price(self.run_chip_hours)}"
            )
        return rows or ["nothing was spent"]

    def _price(self, chip_hours: float) -> str:
        price = self.price_per_chip_hour
        return f", {chip_hours * price:,.2f} at {price:g} each" if price else ""


def cost_so_far(job: Job, there: Machines, files: Path, now: datetime.datetime) -> Cost:
    """Return the cost of the machines and of the run so far.

    Args:
        job: the run and its machines, with their price.
        there: the machines, with their time of creation.
        files: the run's directory on this machine.
        now: the time, with its zone.
    """
    hours = None
    if there.created and job.chips:
        since = now - datetime.datetime.fromisoformat(there.created)
        hours = since.total_seconds() / 3600.0
    last = next(iter(last_rows(files / EVALS_FILE, 1)), {})
    return Cost(
        chips=job.chips,
        machine_hours=hours,
        run_chip_hours=last["compute_chip_hours"] if last else None,
        run_step=last["step"] if last else None,
        price_per_chip_hour=job.price_per_chip_hour,
    )


def settings_flags(more: Sequence[str]) -> list[str]:
    """Return the flags that change a setting: --config.NAME=VALUE."""
    return [each for each in more if each.startswith("--config.")]


def resolve_config(job: Job, more: Sequence[str]) -> config_lib.Config:
    """Return the settings of the run.

    Raises:
        ValueError: a setting is wrong, or an entry of `more` is not a flag.
    """
    for each in more:
        if not each.startswith("--") or "=" not in each:
            raise ValueError(f"{each!r} after --: write flags as --NAME=VALUE")
    values = flags.FlagValues()
    argv = ["launch", f"--config={job.config}", *settings_flags(more)]
    given = config_lib.define_config(values, argv)
    config_lib.read_flags(values, argv, settings=config_lib.Config)
    return config_lib.resolve(given.value)


def check_files(job: Job, settings: config_lib.Config, more: Sequence[str]) -> None:
    """Check that the run's machines can have its checkpoint and tokenizer.

    An absolute path of this machine is on no machine that is made for the run, except
    below the mount of the bucket; images of `gke` may hold any path.

    Raises:
        ValueError: there is neither, or a flag names a file of this machine alone.
    """
    way_out = "gs://BUCKET/PATH or OWNER/NAME of the hub"
    if not (settings.model.checkpoint or settings.data.tokenizer):
        raise ValueError(
            f"{job.config} has neither model.checkpoint nor data.tokenizer, and a run "
            f"needs a tokenizer; add -- --config.model.checkpoint={way_out}"
        )
    given = {each.partition("=")[2] for each in settings_flags(more)}
    given.add(job.config.partition(":")[2])
    for setting, value in (
        ("model.checkpoint", settings.model.checkpoint),
        ("data.tokenizer", settings.data.tokenizer),
    ):
        # A relative path may be an id of the hub there, or a file of the code.
        path = Path(value).expanduser()
        mounted = path.is_relative_to(job.mount)
        made = job.place != "gke" and not mounted and not is_remote(value)
        if made and value in given and path.is_absolute() and path.exists():
            raise ValueError(
                f"{setting} = {value!r} is on this machine, and not on those that are "
                f"made for the run; copy it to the bucket, and name {way_out}"
            )


def preflight_command(job: Job, more: Sequence[str]) -> list[str]:
    """Return the command that checks whether the run fits its machines."""
    count, slice = job.slices
    assert slice is not None, "`make_job` requires a topology"
    topology = f"{count}*{slice.name}" if count > 1 else slice.name
    return [
        *(*own_python(), "-m", "scalerl_jax.preflight", "--json"),
        *(f"--config={job.config}", f"--topology={topology}", *settings_flags(more)),
    ]


def make_estimate(job: Job, more: Sequence[str]) -> RunEstimate:
    """Estimate the steps, time and chip-hours of a run, by the preflight.

    Raises:
        ValueError: the run does not fit or cannot be started, or the preflight fails.
    """
    settings = resolve_config(job, more)
    known = RunEstimate(
        num_steps=settings.train.num_steps,
        chips=job.chips,
        price=job.price_per_chip_hour,
    )
    if job.place == "local":
        return known
    check_files(job, settings, more)
    if job.preflight == "skip":
        return known
    done = subprocess.run(
        preflight_command(job, more), capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode not in (_FITS, _TOO_LARGE):
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(
            f"the preflight of {job.config} on {job.topology} fails: "
            f"{why.removeprefix('error: ')}; --preflight=skip omits it"
        )
    return read_preflight(known, parse_json(done.stdout), job)


def read_preflight(known: RunEstimate, found: dict[str, Any], job: Job) -> RunEstimate:
    """Return the estimate `known` with the figures of a preflight added.

    Raises:
        ValueError: the run does not fit, or cannot be started.
    """
    refusals = {
        "fits": f"{job.config} does not fit {job.topology}",
        "can_start": f"{job.config} cannot be started on {job.topology}",
    }
    for name, refusal in refusals.items():
        if not found.get(name, True):
            advice = found.get("advice") or ["scalerl preflight says why"]
            advice = [advice] if isinstance(advice, str) else list(advice)
            raise ValueError(f"{refusal}: {'; '.join(map(str, advice))}")
    return dataclasses.replace(
        known,
        step_s=found.get("step_seconds"),
        step_chip_hours=found.get("chip_hours_per_step"),
    )


def confirm() -> None:
    """Ask on the terminal whether machines are to be made.

    Raises:
        ValueError: there is no terminal, or the answer is no.
    """
    if not sys.stdin.isatty():
        raise ValueError("stdin is no terminal to confirm on; pass --yes")
    if input("make these machines? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was made")
