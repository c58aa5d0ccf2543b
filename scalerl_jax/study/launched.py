"""Runs of a study on machines of their own: each is a job of `scalerl launch`.

The job's file says which machines.  The run's name is made of the study's, the arm's
and the seed, and its small files are copied to its folder in the study while it goes
on, so that whatever reads a study's folder needs to know nothing of machines.
"""

import dataclasses
import datetime
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import last_lines
from scalerl_jax.launch import estimate
from scalerl_jax.launch.client import Client
from scalerl_jax.launch.job import Job, make_job, read_file
from scalerl_jax.launch.place import Refused
from scalerl_jax.launch.places import make_place
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.run.writing import open_to_append, write_json
from scalerl_jax.study.design import Planned, Study, interleaved
from scalerl_jax.study.runs import LOG_FILE, setting_flags

_OWN = {"config": "it is the study's base", "files": "--root says where they go"}
_LOCAL_LOOK_S, _LOOK_S = 1.0, 60.0
_SEED = re.compile(r"-?\d+")
_END_S = 3600.0  # for machines to be removed; ssh alone may take half of it
JOB_FILE = "job.json"  # in a study's folder


def read_launched(file: str, study: Study, *, title: str, root: Path) -> "Launched":
    """Read a job's file, TOML or JSON; without a name, runs are named by `title`.

    Raises:
        ValueError: it cannot be read, or sets what is the study's.
    """
    values = read_file(file, flag="--launch")
    for name, why in _OWN.items():
        if name in values:
            raise ValueError(f"{file}: leave {name} out; {why}")
    named = {**values, "name": values.get("name") or title}
    return Launched(named, f"--launch={file}", study, root)


def begun_runs(root: Path) -> list[Planned]:
    """Return the runs that were begun in a study's folder, also of former arms."""
    logs = sorted(root.glob(f"*/seed*/{LOG_FILE}"))
    names = [(log.parent.parent.name, log.parent.name[len("seed") :]) for log in logs]
    return [Planned(arm, int(seed)) for arm, seed in names if _SEED.fullmatch(seed)]


@dataclasses.dataclass(frozen=True)
class Launched:
    """The jobs of a study.

    Args:
        values: of the job's file; their `name` begins the names of all runs.
        source: of the values, for errors.
        study: the study.
        root: the folder of the study.
        look_s: seconds between two looks at machines, and two copies of a run's files;
            None: 1 on this machine, else 60.
    """

    values: Mapping[str, Any]
    source: str
    study: Study
    root: Path
    look_s: float | None = None

    @property
    def record(self) -> dict[str, str]:
        """Settings that may not change while the study goes on."""
        job = self.job(interleaved(self.study)[0])
        names = ("place", "bucket", "project", "zone", "cluster", "topology")
        found = {name: getattr(job, name) for name in names}
        return found | {"name": self.values["name"]}

    def job(self, planned: Planned) -> Job:
        """Return the job of a run.

        Raises:
            ValueError: a value, or a name that follows from it, is wrong.
        """
        values = {
            **self.values,
            "name": _name(self.values["name"], planned),
            "config": self.study.base,
            "files": str(self.root / planned.name),
        }
        try:
            return make_job(values)
        except ValueError as error:
            raise ValueError(
                f"{self.source}, for the run {planned.name}: {error}"
            ) from error

    def check_names(self) -> None:
        """Raise ValueError if a job is wrong, or two runs would have one name."""
        runs: dict[str, Planned] = {}
        for planned in interleaved(self.study):
            name = self.job(planned).name
            if name in runs:
                raise ValueError(
                    f"the runs {runs[name].name} and {planned.name} would both be "
                    f"machines of the name {name}; rename one of the arms"
                )
            runs[name] = planned

    def check_place(self, missing: Sequence[Planned]) -> None:
        """Check the place, and that no missing run has been begun by another study.

        Raises:
            ValueError: the place cannot be used, or has a run of this name.
        """
        client = Client(pause_s=1.0)
        try:
            for number, planned in enumerate(missing):
                more = self._more(planned)
                place = make_place(self.job(planned), more, client, poll_s=1.0)
                if number == 0:
                    place.check()
                ours = (self.root / planned.name / LOG_FILE).exists()
                if not ours and place.outcome() is not None:
                    job = self.job(planned)
                    raise ValueError(
                        f"{self.source}: {job.bucket} has a run {job.name} already, "
                        f"which {self.root} did not begin; give the file another name "
                        f"or bucket"
                    )
        except Refused as refused:
            raise RuntimeError(f"{refused}; try again") from refused

    def keep(self) -> None:
        """Write the values beside the runs, for their commands and for `study stop`."""
        write_json(self.root / JOB_FILE, dict(self.values))

    def price(self, runs: Sequence[Planned]) -> list[str]:
        """Estimate what runs take, by the preflight of each arm; return lines.

        Raises:
            ValueError: an arm does not fit the machines, or cannot be started.
        """
        lines, total = [], 0.0
        for arm in dict.fromkeys(planned.arm for planned in runs):
            those = [planned for planned in runs if planned.arm == arm]
            job = self.job(those[0])
            try:
                found = estimate.make_estimate(job, self._more(those[0]))
            except ValueError as error:
                raise ValueError(f"arm {arm}: {error}") from error
            said = found.lines(datetime.datetime.now())
            lines.append(f"{len(those)} x {arm}: {said[0]}")
            total += len(those) * (found.chip_hours or float("nan"))
        if total > 0.0:
            price = self.job(runs[0]).price_per_chip_hour
            cost = f", {total * price:,.2f} at {price:g} each" if price else ""
            lines.append(f"{len(runs)} runs: {total:,.0f} chip-hours{cost}")
        return lines

    def command(self, study: Study, root: Path, planned: Planned) -> list[str]:
        """Return the command line that keeps machines under a run until it is over."""
        local = self.job(planned).place == "local"
        look_s = self.look_s or (_LOCAL_LOOK_S if local else _LOOK_S)
        return [
            *self._launch("run", planned),
            *("--yes", "--preflight=skip", "--no-fit"),
            *(f"--poll-s={look_s:g}", f"--fetch-s={look_s:g}"),
            *("--", *self._more(planned)),
        ]

    def release(self, planned: Planned) -> str:
        """Save a run, remove its machines, fetch its files; "": all are removed."""
        log = self.root / planned.name / LOG_FILE
        with open_to_append(log) as output:
            for what in ("stop", "fetch"):
                try:
                    done = subprocess.run(
                        self._launch(what, planned),
                        stdout=output,
                        stderr=output,
                        timeout=_END_S,
                        start_new_session=True,  # Ctrl-C is for the study
                    ).returncode
                except subprocess.TimeoutExpired:
                    done = -1
                if done and what == "stop":
                    said = b"".join(last_lines(log)).decode(errors="replace").strip()
                    name = self.job(planned).name
                    return f"machines of {name} may remain, and cost: {said}"
        return ""

    def _launch(self, what: str, planned: Planned) -> list[str]:
        job = self.job(planned)
        return [
            *(*own_python(), "-m", "scalerl_jax.launch", what),
            *(f"--job={self.root / JOB_FILE}", f"--name={job.name}"),
            *(f"--config={job.config}", f"--files={job.files}"),
        ]

    def _more(self, planned: Planned) -> list[str]:
        return setting_flags(self.study, planned)


def _name(first: str, planned: Planned) -> str:
    """Return the name of a run's machines."""
    words = f"{first}-{planned.arm}-s{planned.seed}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")
