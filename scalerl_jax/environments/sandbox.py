"""Sandboxes for untrusted Python, by bubblewrap: `bwrap`, of the package "bubblewrap".

In the sandbox are a read-only system and Python, a small /tmp, no network, no other
process, no environment variables, an unprivileged user and few resources.  A solution
may have threads but no child process: limits of its process limit the sandbox.  Without
bubblewrap, or where the machine forbids what it needs, nothing is run at all.

As root this needs no user namespace, and the harness switches to a user of its own.
As another user it needs user namespaces that the machine allows.
"""

import contextlib
import dataclasses
import json
import math
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.environments import harness, seccomp
from scalerl_jax.environments.verdict import adopt

_INSTRUCTIONS = (
    "solutions are run in a sandbox or not at all; install bubblewrap 0.8 or newer "
    "(`apt-get install bubblewrap`, `dnf install bubblewrap`) on every machine that "
    "verifies, and allow it to make namespaces: in a container, by --privileged or "
    "--security-opt seccomp=unconfined with --cap-add SYS_ADMIN; on Ubuntu 24.04, "
    "for other users than root, by `sysctl kernel.apparmor_restrict_unprivileged_"
    "userns=0`"
)
_MIB = 2**20
_START_S = 20.0  # to set up a sandbox, before its time counts
_SHORT_REPLY = 2**16  # bytes of a message that holds neither values nor output
_FIRST_USER, _USERS = 20_000, 40_000  # user ids of sandboxes that root makes
_MAX_STDERR = 2000  # characters
_ENVIRONMENT = {  # one thread for numerical libraries: threads count as processes
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """The sandbox itself has failed, not the program in it."""


class OutOfTime(Exception):
    """The deadline has passed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resources that one side of a sandbox may use."""

    cpu_s: int
    memory_mib: int = 1024  # of address space; beside it the harness and /tmp
    threads: int = 16  # at a time, those of the sandbox itself among them
    file_mib: int = 8  # of one file, a program's output among them
    disk_mib: int = 64  # of /tmp, which is memory
    packages: str = ""  # directory to import from, readable by everyone

    def rlimits(self) -> dict[str, int]:
        """Return the limits that the harness sets for itself and its children."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mib * _MIB,
            "RLIMIT_FSIZE": self.file_mib * _MIB,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": self.threads,
        }


class FrameChannel:
    """Frames to and from a sandbox, each with a deadline."""

    def __init__(self, reading: int, writing: int) -> None:
        """Take both descriptors, which `close` closes."""
        self.reading, self.writing = reading, writing
        os.set_blocking(writing, False)

    def send(self, message: Any, *, deadline: float) -> None:
        """Write one message.

        Raises:
            OutOfTime: the other side does not read.
            EOFError: the other side has ended.
        """
        body = json.dumps(message).encode()
        rest = memoryview(struct.pack("=I", len(body)) + body)
        while rest:
            _wait(self.writing, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self.writing, rest[:65536]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise EOFError("the sandbox has ended") from error

    def receive(self, *, deadline: float, most: int = _SHORT_REPLY) -> dict[str, Any]:
        """Read one message of `most` bytes at most, which may hold anything.

        Raises:
            OutOfTime: no message has come.
            EOFError: the other side has ended, or what it sends is no message.
        """
        (length,) = struct.unpack("=I", self._read(4, deadline))
        if length > most:
            raise EOFError(f"a message of {length} bytes is over {most}")
        try:
            message = json.loads(self._read(length, deadline))
        except (ValueError, RecursionError) as error:
            raise EOFError("what was sent is not a message") from error
        if not isinstance(message, dict):
            raise EOFError("what was sent is not a message")
        return message

    def ask(
        self, message: Any, *, deadline: float, most: int = _SHORT_REPLY
    ) -> dict[str, Any]:
        """Send a message and receive the next one."""
        self.send(message, deadline=deadline)
        return self.receive(deadline=deadline, most=most)

    def hand_over(self) -> None:
        """Leave the channel to the sandbox that got it, as blocking descriptors."""
        os.set_blocking(self.writing, True)

    def _read(self, length: int, deadline: float) -> bytes:
        body = bytearray()
        while len(body) < length:
            _wait(self.reading, select.POLLIN, deadline)
            part = os.read(self.reading, min(length - len(body), _MIB))
            if not part:
                raise EOFError("the sandbox has ended")
            body += part
        return bytes(body)

    def close(self) -> None:
        """Close both descriptors."""
        for descriptor in (self.reading, self.writing):
            os.close(descriptor)


class Sandbox:
    """One side of the harness in a sandbox of its own, and the channel to it.

    Args:
        side: "solution" or "tests".
        limits: resources of the sandbox.
        solution: for the tests' side, the channel to the solution's side, which the
            tests' side then owns.
    """

    def __init__(
        self, side: str, limits: SandboxLimits, *, solution: FrameChannel | None = None
    ) -> None:
        """Start the sandbox without waiting; the caller must `close` it.

        Raises:
            SandboxError: there is no bubblewrap.
        """
        command = _command(limits)
        adopt()
        shared = (solution.reading, solution.writing) if solution else ()
        # Differs between a process's two live sandboxes, and between processes.
        number = 2 * os.getpid() + (side == "tests")
        options = {
            "limits": limits.rlimits(),
            "user": 0 if os.geteuid() else _FIRST_USER + number % _USERS,
            "solution": shared,
            "filter": (seccomp.one_process() or b"").hex(),
        }
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.channel = FrameChannel(ours_in, ours_out)
        self._info, theirs_info = os.pipe()
        self._stderr = tempfile.TemporaryFile()
        filtering = _filter()
        passed = [*shared, theirs_info]
        passed += [filtering] if filtering is not None else []
        try:
            self._process = subprocess.Popen(
                [
                    *command[:1],
                    *("--info-fd", str(theirs_info)),
                    *(() if filtering is None else ("--seccomp", str(filtering))),
                    *command[1:],
                    side,
                    json.dumps(options),
                ],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=self._stderr,
                env={},  # the solution can read its first process's environment
                pass_fds=passed,
            )
        finally:
            for descriptor in (theirs_in, theirs_out, *passed[len(shared) :]):
                os.close(descriptor)

    def await_ready(self, *, deadline: float = math.inf) -> None:
        """Wait until the sandbox has set its limits and reads.

        Raises:
            OutOfTime: the deadline has passed, and the sandbox may be only slow.
            SandboxError: it could not be set up; has bubblewrap's message.
        """
        longest = time.monotonic() + _START_S
        try:
            ready = self.channel.receive(deadline=min(deadline, longest))
        except (EOFError, OutOfTime) as error:
            if isinstance(error, OutOfTime) and deadline < longest:
                raise
            self._kill()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace").strip()
            raise SandboxError(
                f"no sandbox can be made: {said[-_MAX_STDERR:] or error!r}; "
                f"{_INSTRUCTIONS}"
            ) from error
        assert ready == {"ready": True}, ready

    def close(self) -> None:
        """Kill the sandbox and all its processes, and leave no zombie."""
        self._kill()
        os.close(self._info)
        self._stderr.close()
        self.channel.close()

    def _kill(self) -> None:
        """Kill bubblewrap and, if that leaves it, the sandbox's first process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OutOfTime, ValueError, ChildProcessError):
            _wait(self._info, select.POLLIN, time.monotonic())
            first = json.loads(os.read(self._info, 4096))["child-pid"]
            # It is now this process's child, if it still exists.
            os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)


def check(packages: str = "") -> None:
    """Check that a sandbox can be made; `packages` is reward.code_packages.

    Raises:
        ValueError: there is no such directory.
        SandboxError: it cannot be made; the message has the remedy.
    """
    if packages and not Path(packages).is_dir():
        raise ValueError(
            f"reward.code_packages = {packages!r} is no directory; make one with "
            f"`pip install --target=DIRECTORY PACKAGE ...`, or leave it empty"
        )
    trial = Sandbox("solution", SandboxLimits(cpu_s=5))
    try:
        trial.await_ready()
    finally:
        trial.close()


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise OutOfTime


def _filter() -> int | None:
    """Return a descriptor from which bubblewrap reads the filter of system calls."""
    program = seccomp.program()
    if program is None:
        return None
    reading, writing = os.pipe()
    os.write(writing, program)
    os.close(writing)
    return reading


def _command(limits: SandboxLimits) -> list[str]:
    """Return the command of the sandbox and the harness, without the last options.

    Raises:
        SandboxError: there is no bubblewrap.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"bwrap is not installed; {_INSTRUCTIONS}")
    root = os.geteuid() == 0
    rights = (
        # For the harness, which loses them when it switches its user.
        ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if root
        else ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    )
    python = Path(sys.base_prefix)
    interpreter = python / "bin" / f"python3.{sys.version_info.minor}"
    options = [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *("--unshare-cgroup-try", "--die-with-parent", "--new-session"),
        *rights,
        *_read_only_system(python),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        # Bubblewrap's own process: its memory can be written by one of the same user.
        *("--perms", "0000", "--size", "4096", "--tmpfs", "/proc/1"),
        *("--remount-ro", "/proc/1"),
        *("--perms", "1777", "--size", str(limits.disk_mib * _MIB), "--tmpfs", "/tmp"),
        *("--ro-bind", str(Path(harness.__file__).resolve()), "/harness.py"),
        *(("--ro-bind", limits.packages, "/packages") if limits.packages else ()),
        *("--remount-ro", "/", "--chdir", "/tmp", "--hostname", "sandbox"),
        "--clearenv",
    ]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    # Without -S, a start takes five times as long.
    return [bwrap, *options, "--", str(interpreter), "-IBS", "/harness.py"]


def _read_only_system(python: Path) -> Sequence[str]:
    """Return options that mount programs, libraries and Python without its packages."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            options += ["--ro-bind", str(path), str(path)]
    if not python.is_relative_to("/usr"):
        for parent in reversed(python.parents):  # else only root can read it
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", str(python), str(python)]
    return options
