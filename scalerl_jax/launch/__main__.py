"""Create machines for a run, start and watch it, report its cost, remove the machines.

    scalerl launch run --place=local --name=tiny --bucket=runs \\
        --config=configs/tiny.py

`run` does everything in turn: create, start, replace machines after a preemption,
fetch, stop, and fit.  Flags after -- go to the run: -- --config.train.num_steps=50.
Every command but `supervise` may be repeated at any time, from any machine.

One file above 400 lines: the flags and the actions of the commands name each other.
"""

import argparse
import dataclasses
import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl_jax import status as run_status
from scalerl_jax.launch import estimate, supervisor
from scalerl_jax.launch.client import Client
from scalerl_jax.launch.job import Job, add_flags, read_job
from scalerl_jax.launch.local import LocalPlace, Preempting
from scalerl_jax.launch.outcome import FINAL, Outcome
from scalerl_jax.launch.place import (
    Machines,
    Patience,
    Place,
    Refused,
    keep,
    say,
)
from scalerl_jax.launch.places import make_place
from scalerl_jax.launch.watching import find_alarm, forecast
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.process.ending import FAILURE, MISTAKE, Parser, answer
from scalerl_jax.process.printing import to_stderr, to_stdout

_ALARM = 3  # exit status
_LAST_LINES = 50  # of each host's log, shown when a run has failed
# Number that a flag gives -> its least and greatest value.
_RANGES = {
    "poll_s": (0.01, 3600.0),
    "fetch_s": (0.01, 86_400.0),
    "lines": (1, 1_000_000),
    "preemptions": (0, 1000),
    "failures": (0, 1_000_000),
    "pause_s": (0.0, 3600.0),
    "grace_s": (0.0, 3600.0),
}
COMMANDS = {
    "run": "all of the below, until the run is over",
    "create": "check config, price and place, ask, and create the machines",
    "start": "start the run on the machines, unless it runs or is finished",
    "status": "machines, run, roles, forecast and cost; 3 after an alarm",
    "logs": "the last log lines of all hosts",
    "fetch": "copy the run's files here, except checkpoints",
    "stop": "save the run, and remove the machines",
    "cost": "chip-hours and price of the machines since their creation, and of the run",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of all commands."""
    parser = Parser(
        "python -m scalerl_jax.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        add_flags(command)
        if name in ("run", "create"):
            command.add_argument("--yes", action="store_true", help="do not ask")
        if name == "run":
            command.add_argument(
                "--preemptions", type=int, default=0, help="place=local: simulate N"
            )
            command.add_argument(
                "--keep-machines", action="store_true", help="when the run is over"
            )
            command.add_argument(
                "--no-fit", action="store_true", help="of the curve at the end"
            )
            command.add_argument(
                "--fetch-s",
                type=float,
                default=600.0,
                help="seconds between two fetches, each with a check for an alarm",
            )
        command.add_argument("--poll-s", type=float, help="seconds between two polls")
        command.add_argument("--dry-run", action="store_true", help="print commands")
        if name == "status":
            command.add_argument("--json", action="store_true", help="one JSON object")
        if name == "logs":
            command.add_argument("--lines", type=int, default=50, help="per host")
    supervise = commands.add_parser(
        "supervise", help="run the command after --, and restart it when it fails"
    )
    supervise.add_argument("--workdir", required=True, help="directory of the run")
    supervise.add_argument(
        "--failures", type=int, default=5, help="give up after more in a row"
    )
    supervise.add_argument(
        "--follow", action="store_true", help="the command serves a head elsewhere"
    )
    supervise.add_argument(
        "--ray-token", default="", help="gs://BUCKET/OBJECT with the cluster's token"
    )
    supervise.add_argument(
        "--pause-s", type=float, default=10.0, help="before the first restart"
    )
    supervise.add_argument(
        "--grace-s", type=float, default=30.0, help="from SIGTERM to SIGKILL"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    more: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, more = words[:at], words[at + 1 :]
    flags = make_parser().parse_args(words)
    _check_numbers(flags)
    if flags.command == "supervise":
        if not more:
            raise ValueError("supervise: the command to run is missing after --")
        rules = supervisor.Rules(
            failures=flags.failures, pause_s=flags.pause_s, grace_s=flags.grace_s
        )
        return supervisor.supervise(
            more,
            flags.workdir,
            rules=rules,
            follow=flags.follow,
            token=flags.ray_token,
        )
    job = read_job(flags)
    if flags.command in ("run", "create", "start") and not job.config:
        raise ValueError("--config is missing: --config=configs/tiny.py")
    if flags.dry_run:
        return _print(job, flags, more)
    if flags.poll_s is None:
        flags.poll_s = 1.0 if job.place == "local" else 60.0
    client = Client(pause_s=flags.poll_s / 4)
    place = make_place(job, more, client, poll_s=flags.poll_s / 4)
    try:
        return _ACTIONS[flags.command](job, place, flags, more)
    except Refused as refused:
        raise RuntimeError(f"{refused}; try again, or let `launch run` do so") from (
            refused
        )


def _check_numbers(flags: argparse.Namespace) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(flags, name, None)
        if value is not None and not least <= value <= most:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}={value:g} must be from {least:g} to {most:g}")


def _print(job: Job, flags: argparse.Namespace, more: list[str]) -> int:
    """Print the commands that a command would run, and run none."""
    if job.place == "local":
        raise ValueError("--dry-run: --place=local runs no cloud commands")
    place = make_place(job, more, Client(dry_run=True), poll_s=0.0)
    if flags.command in ("run", "create"):
        estimate.check_files(job, estimate.resolve_config(job, more), more)
        if job.preflight == "require":
            to_stdout(f"{shlex.join(estimate.preflight_command(job, more))}\n")
    kept = flags.command == "run" and flags.keep_machines
    for step in _STEPS[flags.command]:
        if kept and step in ("end", "remove"):
            continue
        to_stdout(f"# {step}\n")
        if step == "logs":
            place.logs(flags.lines)
        elif step == "fetch":
            place.fetch(str(_files(job)))
        else:
            getattr(place, step)()
    if flags.command == "run" and not flags.no_fit:
        to_stdout(f"# fit\n{shlex.join(_fit_command(job))}\n")
    return 0


def _run(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    look: Callable[[Machines, Outcome | None], None] = _Watching(
        job, place, every_s=flags.fetch_s
    )
    if flags.preemptions:
        if not isinstance(place, LocalPlace):
            raise ValueError("--preemptions needs --place=local; clouds make theirs")
        steps = estimate.resolve_config(job, more).train.num_steps
        look = Preempting(place, flags.preemptions, num_steps=steps)
    if not _finished(job, place, more):
        _prepare(job, place, flags, more)
    patience = Patience(poll_s=flags.poll_s, first_pause_s=flags.poll_s)
    try:
        outcome = keep(place, patience=patience, tell=say, look=look)
    except BaseException:
        say(
            "machines that there are stay without this command, and cost: `launch run` "
            "resumes it, `launch stop` removes them"
        )
        raise
    say(
        f"the run is {outcome.state} after {outcome.attempts} attempts, "
        f"{outcome.preemptions} of them preempted"
    )
    if outcome.state != "done":
        _show_last_lines(place)
    # First, so that nothing is paid for a fetch that fails or takes its time.
    left = [] if flags.keep_machines else _stop_all(place)
    place.fetch(str(_files(job)))
    if outcome.state != "done":
        to_stderr(f"{outcome.said or 'error: the run has failed; its log is above'}\n")
        return MISTAKE if outcome.state == "mistake" else FAILURE
    if flags.no_fit:
        return FAILURE if left else 0
    fitted = subprocess.run(_fit_command(job))
    return FAILURE if left or fitted.returncode else 0


def _fit_command(job: Job) -> list[str]:
    return [*own_python(), "-m", "scalerl_jax.scaling", "fit", str(_files(job))]


def _show_last_lines(place: Place) -> None:
    """Show the hosts' last log lines: they go with the machines."""
    try:
        to_stderr(place.logs(_LAST_LINES))
    except (OSError, RuntimeError, ValueError) as error:
        say(f"the logs of the hosts cannot be read: {error}")


class _Watching:
    """Fetches the run's files every `every_s`, and reports a run that stalled."""

    def __init__(self, job: Job, place: Place, *, every_s: float) -> None:
        self._job, self._place, self._every_s = job, place, every_s
        self._next, self._told = time.monotonic() + every_s, ""

    def __call__(self, machines: Machines, outcome: Outcome | None) -> None:
        if machines.state != "up" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        try:
            self._place.fetch(str(_files(self._job)))
            alarm = _find_alarm(self._job, self._place, machines, outcome)
        except (OSError, RuntimeError, ValueError) as error:  # not worth the run's end
            say(f"the run cannot be looked at now: {error}")
            return
        if alarm and not self._told:
            say(f"ALARM: {alarm}")
        self._told = alarm


def _find_alarm(
    job: Job, place: Place, there: Machines, outcome: Outcome | None
) -> str:
    now = datetime.datetime.now(datetime.UTC)
    last = place.last_step()
    return find_alarm(there, outcome, _files(job), last_step=last, now=now)


def _create(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    _prepare(job, place, flags, more)
    there = place.machines()
    if there.wrong:
        raise ValueError(there.wrong)
    if there.state in ("absent", "partial"):
        place.create()
        say("machines are requested")
    else:
        say(f"machines are {there.said} already")
    return 0


def _prepare(
    job: Job, place: Place, flags: argparse.Namespace, more: list[str]
) -> None:
    """Check config, price and place, print the estimate, and ask for confirmation.

    Raises:
        ValueError: a check fails, or the answer is no.
    """
    found = estimate.make_estimate(job, more)
    place.check()
    for line in found.lines(datetime.datetime.now()):
        say(line)
    if job.place == "local" or flags.yes:
        return
    estimate.confirm()


def _finished(job: Job, place: Place, more: list[str]) -> str:
    """Return when this very command was done; "": it is to be run.

    The final outcome of another command, or of one that failed, is forgotten.
    """
    before = place.outcome()
    if before is None or before.state not in FINAL:
        return ""
    # The first word is the machine's own path of Python.
    if before.state == "done" and before.command[1:] == (*job.command(more)[1:],):
        return before.at
    say(f"the run was {before.state} at {before.at}; it goes on with this command")
    place.forget(before)
    return ""


def _start(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    finished, there = _finished(job, place, more), place.machines()
    if there.state != "up":
        raise ValueError(f"machines of {job.name} are {there.said}; nothing can start")
    if finished:
        say(f"the run was finished at {finished}; it is not started again")
        return 0
    say(place.start())
    return 0


def _status(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    there, outcome = place.machines(), place.outcome()
    since = f" since {there.created}" if there.created else ""
    text = f"machines: {there.said}{since}\n"
    facts: dict[str, Any] = {
        "machines": dataclasses.asdict(there),
        "run": outcome and dataclasses.asdict(outcome),
        "alarms": [],
    }
    if outcome is None:
        text += "run: never started\n"
    else:
        text += (
            f"run: {outcome.state} at {outcome.at}, attempt {outcome.attempts}, "
            f"{outcome.preemptions} preempted\n"
        )
        text += f"{outcome.said}\n" if outcome.said else ""
        place.fetch(str(_files(job)))
        if (_files(job) / "config.json").is_file():
            status, fitted = run_status.read(_files(job)), forecast(_files(job))
            text += status.text + fitted.text
            facts |= {"status": status.facts, "forecast": fitted.numbers}
            facts["alarms"] += [fitted.alarm] if fitted.alarm else []
        now = datetime.datetime.now(datetime.UTC)
        cost = estimate.cost_so_far(job, there, _files(job), now)
        text += "".join(f"{line}\n" for line in cost.lines())
        facts["cost"] = dataclasses.asdict(cost)
        alarm = _find_alarm(job, place, there, outcome)
        facts["alarms"] = ([alarm] if alarm else []) + facts["alarms"]
    text += "".join(f"ALARM: {alarm}\n" for alarm in facts["alarms"])
    to_stdout(json.dumps(facts) + "\n" if flags.json else text)
    return _ALARM if facts["alarms"] else 0


def _cost(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    place.fetch(str(_files(job)))
    now = datetime.datetime.now(datetime.UTC)
    for line in estimate.cost_so_far(job, place.machines(), _files(job), now).lines():
        to_stdout(f"{line}\n")
    return 0


def _logs(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    to_stdout(place.logs(flags.lines))
    return 0


def _fetch(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    place.fetch(str(_files(job)))
    say(f"the run's files are in {_files(job)}")
    return 0


def _stop(job: Job, place: Place, flags: argparse.Namespace, more: list[str]) -> int:
    return FAILURE if _stop_all(place) else 0


def _stop_all(place: Place) -> list[str]:
    """Save the run and remove the machines; report and return those that remain.

    Raises:
        ValueError: the machines are another run's.
    """
    there = place.machines()
    if there.wrong:
        raise ValueError(there.wrong)
    if there.state == "absent":
        say("there are no machines")
        return []
    if there.state == "up":
        place.end()
    left = place.remove()
    for each in left:
        say(f"NOT stopped: {each}")
    if not left:
        say("all machines are removed")
    return left


def _files(job: Job) -> Path:
    """Return the directory of the run's files on this machine."""
    if job.files:
        return Path(job.files).expanduser()
    if job.place == "local":
        return Path(job.directory).expanduser()
    return Path("runs") / job.name


_STEPS = {
    "run": ("check", "outcome", "machines", "create", "start")
    + ("end", "remove", "fetch"),
    "create": ("check", "machines", "create"),
    "start": ("outcome", "machines", "start"),
    "status": ("machines", "outcome", "fetch", "last_step"),
    "logs": ("logs",),
    "fetch": ("fetch",),
    "stop": ("machines", "end", "remove"),
    "cost": ("fetch", "machines"),
}
_ACTIONS: dict[str, Callable[[Job, Place, argparse.Namespace, list[str]], int]] = {
    "run": _run,
    "create": _create,
    "start": _start,
    "status": _status,
    "logs": _logs,
    "fetch": _fetch,
    "stop": _stop,
    "cost": _cost,
}

if __name__ == "__main__":
    sys.exit(answer(main))
