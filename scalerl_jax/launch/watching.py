"""Checks of a run in progress: its forecast, and an alarm if it died or stalled."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import last_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.launch.outcome import Outcome
from scalerl_jax.launch.place import Machines
from scalerl_jax.run.directory import METRICS_FILE

# Seconds without a step before an alarm: before the first step, while hosts install,
# load and compile; and between two steps, for an evaluation, checkpoint or compilation.
_FIRST_S, _LEAST_S = 3600.0, 900.0
_TIMES = 10.0  # multiple of the slowest recent step after which a run has stalled
_LAST = 20  # recent steps that are read


def find_alarm(
    there: Machines,
    outcome: Outcome | None,
    files: Path,
    *,
    last_step: str,
    now: datetime.datetime,
) -> str:
    """Return the alarm for a run that is not over; "": nothing is wrong.

    A run that is "preempted" has one if its machines are gone, also by `stop`.

    Args:
        there: the run's machines.
        outcome: the run's state as its supervisor wrote it.
        files: copies of the run's small files.
        last_step: when a step was last written, ISO 8601; empty: never.
        now: the time, with its zone.
    """
    if outcome is None or outcome.state not in ("running", "preempted"):
        return ""
    if there.state in ("absent", "broken"):
        died = "died with" if outcome.state == "running" else "was preempted with"
        return (
            f"the run {died} its machines, which are {there.said}: `launch run` "
            f"creates others, on which it resumes"
        )
    if outcome.state == "preempted":
        return ""
    heard = [
        datetime.datetime.fromisoformat(at) for at in (outcome.at, last_step) if at
    ]
    silent_s = (now - max(heard, default=now)).total_seconds()
    rows = last_rows(files / METRICS_FILE, _LAST)
    steps = [row["time/step_s"] for row in rows if row.get("time/step_s") is not None]
    limit_s = max(_LEAST_S, _TIMES * max(steps)) if steps else _FIRST_S
    if silent_s <= limit_s:
        return ""
    usual = "there was none yet"
    if steps:
        usual = f"the slowest of the last {len(steps)} took {max(steps):.0f} s"
    return (
        f"the run has made no step for {silent_s / 60:.0f} minutes, and {usual}: "
        f"`launch logs` shows what it does; `launch stop` and `launch run` begin again "
        f"from its newest checkpoint"
    )


def last_rows(file: Path, count: int) -> list[dict[str, Any]]:
    """Return the last complete rows of a run's file; [] if the file is missing."""
    lines = last_lines(file, count) if file.is_file() else []
    return [parse_json(line) for line in lines]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunForecast:
    """Result of `scalerl watch` on a run."""

    text: str
    numbers: dict[str, float] | None  # those that are known; None: no fit yet
    alarm: str  # "": none


def forecast(files: Path) -> RunForecast:
    """Fit the run so far, and forecast its end."""
    # SciPy takes half a second to import, and only this command needs it.
    from scalerl_jax.scaling.checking import scalars, to_text
    from scalerl_jax.scaling.live import Watch
    from scalerl_jax.scaling.records import CurveError

    try:
        status = Watch(path=files).look()
    except CurveError as error:
        text = f"forecast: not yet: {error}\n"
        return RunForecast(text=text, numbers=None, alarm="")
    assert status is not None, "the first look finds something"
    return RunForecast(
        text=to_text(status), numbers=scalars(status), alarm=status.alarm or ""
    )
