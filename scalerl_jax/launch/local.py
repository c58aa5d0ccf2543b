"""A machine simulated by local processes, to try the whole cycle without a cloud.

The machine is a supervisor with its child processes.  It is preempted like a spot
machine: SIGTERM, a grace period, SIGKILL, and it never comes back.
"""

import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from scalerl_jax.formats.bounded import last_lines, read_lines
from scalerl_jax.formats.reading import read_json
from scalerl_jax.launch.job import Job
from scalerl_jax.launch.outcome import Outcome, read_outcome
from scalerl_jax.launch.place import Machines, say
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.run.directory import METRICS_FILE
from scalerl_jax.run.writing import open_to_append, write_json

GRACE_S = 30.0  # seconds from SIGTERM to SIGKILL, as for a spot machine
_FILE, _LOG = "machine.json", "log.txt"
_NOT_FETCHED = re.compile(r"(checkpoints|weights)$|\.")


class LocalPlace:
    """A machine in a folder beside the run's directory, NAME.machine."""

    def __init__(self, job: Job, more: Sequence[str]) -> None:
        """Store the arguments; create nothing."""
        self._job, self._more = job, tuple(more)
        self.directory = Path(job.directory).expanduser()  # of the run
        self._folder = Path(f"{self.directory}.machine")
        self._before: Outcome | None = None  # forgotten

    def check(self) -> None:
        """Create the parent of the run's directory; raise ValueError if that fails."""
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--bucket={self._job.bucket} cannot be made ({error.strerror}); name "
                f"a directory that you may write"
            ) from error

    def machines(self) -> Machines:
        """Return the state of the machine, from its file and its process."""
        known = self._read()
        if known is None:
            return Machines(state="absent", said="ABSENT")
        if known["pid"] and self._process() is None:
            return Machines(state="broken", said="SUSPENDED", created=known["created"])
        return Machines(state="up", said="ACTIVE", created=known["created"])

    def create(self) -> None:
        """Write the machine's file; `start` creates its process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write({"created": now, "pid": 0, "began": 0.0})

    def replace(self) -> list[str]:
        """Remove the machine."""
        return self.remove()

    def remove(self) -> list[str]:
        """End the machine's processes and delete its file; keep its log."""
        self._stop(grace_s=5.0)
        left = self._process()
        if left is not None:
            return [f"process {left.pid} of {self._job.name}, which does not end"]
        (self._folder / _FILE).unlink(missing_ok=True)
        return []

    def start(self) -> str:
        """Start the supervisor as the leader of a session of its own."""
        process = self._process()
        if process is not None:
            return f"process {process.pid} runs already"
        known = self._read()
        if known is None:
            raise ValueError(f"there is no machine {self._job.name}; create it first")
        command = self._job.command(self._more, python=own_python())
        with open_to_append(self._folder / _LOG) as log:
            child = subprocess.Popen(
                self._job.supervised(command, python=own_python()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        began = psutil.Process(child.pid).create_time()
        self._write({**known, "pid": child.pid, "began": began})
        return f"process {child.pid} supervises the run"

    def end(self) -> None:
        """Ask the run to save itself, and wait at most `GRACE_S` seconds."""
        self._stop(grace_s=GRACE_S)

    def outcome(self) -> Outcome | None:
        """Return the run's outcome as its supervisor wrote it."""
        found = read_outcome(self._job.directory)
        return None if found == self._before else found

    def forget(self, before: Outcome) -> None:
        """Return None from `outcome` until the run has another one than `before`."""
        self._before = before

    def last_step(self) -> str:
        """Return when the run last wrote a step."""
        file = self.directory / METRICS_FILE
        if not file.is_file():
            return ""
        at = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
        return at.isoformat(timespec="seconds")

    def logs(self, lines: int) -> str:
        """Return the last lines of the machine's log."""
        log = self._folder / _LOG
        if not log.is_file():
            return ""
        text = [line.decode(errors="replace") for line in last_lines(log, lines)]
        return "".join(f"{self._job.name}: {line}" for line in text)

    def fetch(self, target: str) -> None:
        """Copy the run's files, except checkpoints, unless that is where they are."""
        if Path(target).resolve() == self.directory.resolve():
            return
        for folder, below, names in os.walk(self.directory):
            here = Path(folder)
            if here == self.directory:
                below[:] = [name for name in below if not _NOT_FETCHED.match(name)]
                names = [name for name in names if not _NOT_FETCHED.match(name)]
            copy = Path(target) / here.relative_to(self.directory)
            copy.mkdir(parents=True, exist_ok=True)
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # the run removed it
                    shutil.copy2(here / name, copy / name)

    def _stop(self, *, grace_s: float) -> None:
        """End the session: SIGTERM to its leader, then SIGKILL to what still runs."""
        process = self._process()
        if process is None:
            return
        members = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + grace_s
        while self._process() is not None and time.monotonic() < end:
            time.sleep(0.1)
        for each in members:  # psutil compares start times: no reused id is killed
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.is_running():
                    each.kill()
        psutil.wait_procs(members, timeout=5.0)

    def _process(self) -> psutil.Process | None:
        """Return the supervisor if it runs; compare start times, as ids are reused."""
        known = self._read()
        if known is None or not known["pid"]:
            return None
        with contextlib.suppress(psutil.Error, ChildProcessError):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(known["pid"], os.WNOHANG)  # reap it, if it is our child
            process = psutil.Process(known["pid"])
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and abs(process.create_time() - known["began"]) < 1.0:
                return process
        return None

    def _read(self) -> dict | None:
        file = self._folder / _FILE
        return read_json(file) if file.is_file() else None

    def _write(self, values: dict) -> None:
        write_json(self._folder / _FILE, values)


class Preempting:
    """Takes the run's machine away a number of times, spread evenly over its steps."""

    def __init__(self, place: LocalPlace, times: int, *, num_steps: int) -> None:
        """Choose the steps; take nothing away yet."""
        self._at = [num_steps * (n + 1) // (times + 1) for n in range(times)]
        self._file, self._place = place.directory / METRICS_FILE, place

    def __call__(self, machines: Machines, outcome: Outcome | None) -> None:
        """Take the machine away if the next of the steps is reached."""
        steps = sum(1 for _ in read_lines(self._file)) if self._file.is_file() else 0
        if machines.state == "up" and self._at and steps >= self._at[0]:
            self._at.pop(0)
            say(f"after step {steps} the machine is taken away")
            self._place.end()  # leaves the same time to save as a spot machine does
