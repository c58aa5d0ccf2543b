"""The supervisor, which restarts a run's command according to its exit status.

0 (done) and 2 (a mistake of the user): no restart.  75 (preempted and saved): restart
at once.  Any other: restart after a pause that doubles, up to a limit of failures in a
row.  SIGTERM to the supervisor means that the machine ends: it is passed on, and
nothing is restarted.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import is_remote
from scalerl_jax.launch import ray_token
from scalerl_jax.launch.outcome import (
    FINAL,
    Outcome,
    State,
    read_outcome,
    write_outcome,
)
from scalerl_jax.machines.discovery import NotOnTpu, discover
from scalerl_jax.process.ending import FAILURE, MISTAKE
from scalerl_jax.process.preemption import PREEMPTED
from scalerl_jax.process.printing import to_stderr
from scalerl_jax.run.files import CHECKPOINTS_FOLDER

DONE = 0  # exit status
_LONGEST_PAUSE_S = 600.0
_AGAIN_S = 5.0  # seconds before a follower looks for its head again
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl, in linux/prctl.h
# Looked up here, as a process that has just forked should take no lock of the loader.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_UNSTARTABLE = 127  # a shell's status for a command that it cannot start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits and pauses, in seconds, of restarting a command."""

    failures: int = 5  # in a row; after more the run is given up
    pause_s: float = 10.0  # before the first restart; doubles with each further one
    healthy_s: float = 600.0  # a longer attempt resets the count of failures
    grace_s: float = 30.0  # between SIGTERM and SIGKILL


class Supervisor:
    """A command that is restarted until it is done; `run` returns its exit status."""

    def __init__(
        self,
        command: Sequence[str],
        workdir: str,
        *,
        rules: Rules,
        follower: bool = False,
    ) -> None:
        """Store the arguments; start nothing.

        Args:
            command: the program and its arguments.
            workdir: the run's directory, local or in a bucket, with the outcome file.
            rules: limits and pauses of restarts.
            follower: the command only serves a head on another machine, whose
                supervisor writes the outcome: status 0 does not mean the run is done.
        """
        self._command, self._workdir, self._rules = tuple(command), workdir, rules
        self._follower = follower
        self._stopped = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._said = ""
        self._failures = 0  # in a row
        self._outcome = Outcome(state="running", command=self._command)

    def stop(self, *_: object) -> None:
        """Signal handler: pass SIGTERM on to the command and do not restart it."""
        self._stopped.set()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            timer = threading.Timer(self._rules.grace_s, self._child.kill)
            timer.daemon = True
            timer.start()

    def run(self) -> int:
        """Run the command until it needs no restart; return its exit status."""
        if self._was_done():
            return DONE
        while True:
            self._warn_of_long_saves()
            self._note("running")
            began = time.monotonic()
            status = self._run_once()
            lasted_s = time.monotonic() - began
            ended = f"attempt {self._outcome.attempts} ended {_named(status)} after "
            ended += f"{lasted_s:.0f} s"
            if self._stopped.is_set():
                final = "done" if status == DONE and not self._follower else "preempted"
                self._end(final, status, f"{ended}; this machine is being stopped")
                return status if status >= 0 else PREEMPTED
            if lasted_s > self._rules.healthy_s:
                self._failures = 0
            pause_s = self._after(status, ended, lasted_s=lasted_s)
            if pause_s is None:
                return status if status in (DONE, MISTAKE) else FAILURE
            if self._stopped.wait(pause_s):
                self._end("preempted", status, "this machine is being stopped")
                return PREEMPTED

    def _warn_of_long_saves(self) -> None:
        """Warn if a save takes longer than the grace period after SIGTERM."""
        try:
            took_s = save_seconds(self._workdir)
        except (OSError, ValueError) as error:
            self._tell(f"how long a save takes is not known: {error}")
            return
        if took_s is not None and took_s > self._rules.grace_s:
            self._tell(
                f"the last checkpoint took {took_s:.0f} s to write, and SIGTERM leaves "
                f"{self._rules.grace_s:g} s: a preemption will lose the work since "
                f"the last checkpoint; lower checkpoint.every"
            )

    def _was_done(self) -> bool:
        """Return True if the run is finished; else continue its earlier counts."""
        before = None if self._follower else self._read()
        if before is None:
            return False
        if before.state == "done" and before.command == self._command:
            self._tell(
                f"the run in {self._workdir} was finished at {before.at}; it is not "
                f"started again"
            )
            return True
        self._outcome = dataclasses.replace(
            self._outcome, attempts=before.attempts, preemptions=before.preemptions
        )
        return False

    def _after(self, status: int, ended: str, *, lasted_s: float) -> float | None:
        """Return the seconds to wait before the next start; None: no further start."""
        if self._follower and status == DONE:
            outcome = self._read()
            if outcome is not None and outcome.state in FINAL:
                return None
            self._tell(f"{ended}, but the run is not over; joining it again")
            return _AGAIN_S
        if status == DONE:
            self._end("done", status, ended)
            return None
        if status == MISTAKE:
            why = "a mistake that a restart cannot fix"
            self._end("mistake", status, f"{ended}: {why}")
            return None
        if status == PREEMPTED:
            self._end("preempted", status, f"{ended}, saved; it starts again at once")
            return 0.0 if lasted_s > _AGAIN_S else _AGAIN_S
        self._failures += 1
        if self._failures > self._rules.failures:
            why = f"it is given up after {self._failures} failures in a row"
            self._end("failed", status, f"{ended}; {why}")
            return None
        doublings = min(self._failures - 1, 20)  # 2**1024 is no float
        pause_s = min(self._rules.pause_s * 2**doublings, _LONGEST_PAUSE_S)
        self._tell(
            f"{ended}; failure {self._failures} of at most {self._rules.failures} in a "
            f"row, it starts again in {pause_s:g} s"
        )
        return pause_s

    def _run_once(self) -> int:
        """Run the command once; return its exit status, or minus its signal."""
        self._said = ""
        try:
            child = subprocess.Popen(
                self._command, stderr=subprocess.PIPE, preexec_fn=_end_with_parent
            )
        except OSError as error:
            self._said = f"error: {self._command[0]} cannot be started: {error}"
            self._tell(self._said)
            return _UNSTARTABLE
        self._child = child
        if self._stopped.is_set():  # SIGTERM arrived while the command was started
            self.stop()
        assert child.stderr is not None, "it is a pipe"
        reader = threading.Thread(target=self._pass_on, args=(child.stderr,))
        reader.daemon = True
        reader.start()
        status = child.wait()
        reader.join(5.0)  # children of the command may hold the pipe longer
        return status

    def _pass_on(self, errors: IO[bytes]) -> None:
        """Copy the command's stderr to ours, and store its last `error:` line.

        A log that cannot be written, as on a full disk, is no reason to end the run.
        """
        with errors:
            for line in errors:
                with contextlib.suppress(OSError):
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()
                if line.startswith(b"error:"):
                    self._said = line.decode(errors="replace").strip()

    def _read(self) -> Outcome | None:
        """Return the run's outcome; None: there is none, or it cannot be read now."""
        try:
            return read_outcome(self._workdir)
        except (OSError, ValueError) as error:  # the command says so, too, and waits
            self._tell(f"the run's outcome cannot be read: {error}")
            return None

    def _note(self, state: State, status: int | None = None) -> None:
        """Write the outcome; a failure to write it does not end the run."""
        starts, preempted = state == "running", status == PREEMPTED
        self._outcome = dataclasses.replace(
            self._outcome,
            state=state,
            status=status,
            said=self._said if status else "",
            attempts=self._outcome.attempts + starts,
            preemptions=self._outcome.preemptions + preempted,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        if self._follower:
            return
        try:
            write_outcome(self._workdir, self._outcome)
        except (OSError, ValueError) as error:
            self._tell(f"the run's outcome cannot be written: {error}")

    def _end(self, state: State, status: int, line: str) -> None:
        self._note(state, status)
        self._tell(line)

    def _tell(self, line: str) -> None:
        at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # see `_pass_on`
            to_stderr(f"supervisor {at}: {line}\n")
            sys.stderr.flush()


def save_seconds(workdir: str) -> float | None:
    """Return the seconds that writing the newest complete checkpoint took, or None.

    The span is between the times of its first and its last file (or object of a
    bucket), the manifest.  It is a lower bound: the first file took time before that.

    Raises:
        ValueError: the bucket cannot be used.
        TimeoutError: the bucket does not answer in time.
    """
    times = _times_in_bucket if is_remote(workdir) else _times_here
    written = times(workdir)
    whole = [name for name in written if re.fullmatch(r"step_\d+/manifest\.json", name)]
    if not whole:
        return None
    newest = max(whole).removesuffix("manifest.json")
    of_it = [at for name, at in written.items() if name.startswith(newest)]
    return max(of_it) - min(of_it)


def _times_here(workdir: str) -> dict[str, float]:
    """Return when each file of the checkpoints was written, in seconds."""
    directory = Path(workdir).expanduser() / CHECKPOINTS_FOLDER
    return {
        file.relative_to(directory).as_posix(): file.stat().st_mtime
        for file in directory.rglob("*")
        if file.is_file()
    }


def _times_in_bucket(workdir: str) -> dict[str, float]:
    path = remote.open_path(workdir, setting="--workdir=", in_run=True)
    found = remote.entries(path / CHECKPOINTS_FOLDER)
    return {name: each["mtime"].timestamp() for name, each in found.items()}


def supervise(
    command: Sequence[str],
    workdir: str,
    *,
    rules: Rules,
    follow: bool = False,
    token: str = "",
) -> int:
    """Supervise a command from this process, whose SIGTERM is passed on to it.

    Args:
        command: of the run, or of a node of its cluster.
        workdir: the run's directory.
        rules: limits and pauses of restarts.
        follow: the command serves a head elsewhere; implied on hosts other than
            worker 0 with `--ray=slice`.
        token: URL of the object with the cluster's token; empty: no token.
    """
    if token:
        with ray_token.fetched(token):
            return supervise(command, workdir, rules=rules, follow=follow)
    follower = follow
    if "--ray=slice" in command:
        with contextlib.suppress(NotOnTpu, ValueError):  # the command reports it
            follower |= not discover(os.environ).is_first
    supervisor = Supervisor(command, workdir, rules=rules, follower=follower)
    signal.signal(signal.SIGTERM, supervisor.stop)
    signal.signal(signal.SIGINT, supervisor.stop)  # Ctrl-C also reaches the run
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent when an ssh connection closes
    return supervisor.run()


def _end_with_parent() -> None:
    """Make the system send this process SIGTERM when its supervisor is gone.

    Else a run whose supervisor was killed would go on, and keep the directory locked
    for the next one.
    """
    if _PRCTL is not None:
        _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _named(status: int) -> str:
    if status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}"
