"""One command on every host of TPU slices: who starts Ray, and who joins it.

Each host finds out which it is.  Worker 0, of several slices that of the first, starts
Ray's head and is the controller; the others are nodes until the head goes.  Slices are
several where the machines say so by MEGASCALE_NUM_SLICES.  `ray start` reads the slice
from the same variables as on Kubernetes, and makes labels and resources of them.
"""

import contextlib
import dataclasses
import json
import logging
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from scalerl_jax.cluster.parent_watch import watching_parent
from scalerl_jax.cluster.placement import HostNode
from scalerl_jax.machines.discovery import FoundSlice, discover
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.process.ending import INTERRUPTED
from scalerl_jax.process.preemption import PREEMPTED, Preemption

_log = logging.getLogger(__name__)
PORT = 6379  # of Ray's head on worker 0; Ray's own default
_PAUSE_S = 1.0
_STARTED = "Ray runtime started"  # says `ray start` once a node is in the cluster
_LIVED_S = 30.0  # in the cluster; who dies after that begins anew
_GONE_S = 15.0  # without an answer of the head, after which a host leaves
_LEAVING_S = 3.0  # the same once the host has got SIGTERM


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceHost:
    """This host, and how it takes part in the cluster of its slice."""

    found: FoundSlice
    port: int = PORT

    @property
    def head(self) -> str:
        """HOST:PORT of Ray's head."""
        several = self.found.several
        first = several.first if several else self.found.addresses[0]
        return f"{first}:{self.port}"

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all slices."""
        several = self.found.several
        return self.found.slice.num_hosts * (several.count if several else 1)

    def __str__(self) -> str:
        """Return it for people."""
        several = self.found.several
        of = f" (slice {several.number} of {several.count})" if several else ""
        return f"worker {self.found.worker} of {self.found.slice.name}{of}"

    def command(self) -> list[str]:
        """Return the command that makes this host a node, until it is ended.

        Raises:
            RuntimeError: this host's name cannot be resolved.
        """
        name = self.found.addresses[self.found.worker]
        try:
            own = socket.gethostbyname(name)
        except OSError as error:
            raise RuntimeError(
                f"{self}: this host's name in TPU_WORKER_HOSTNAMES, {name}, cannot be "
                f"resolved here: {error.strerror}; see the DNS of the hosts"
            ) from error
        if not self.found.is_first:
            role = [f"--address={self.head}"]
        else:
            role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        if not own.startswith("127."):  # Kubernetes' name of a single host; Ray's own
            role.append(f"--node-ip-address={own}")  # choice is seen from outside
        resources = {"TPU": self.found.slice.chips_per_host}
        return [
            *(*own_python(), "-m", "ray.scripts.scripts", "start", *role),
            f"--resources={json.dumps(resources)}",
            "--disable-usage-stats",
            "--block",
        ]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of that command, from which Ray makes its labels."""
        slice, several = self.found.slice, self.found.several
        name = self.found.name or f"slice-{slice.type}"
        return dict(inherited) | {
            # Slices of one job may have one name.
            "TPU_NAME": f"{name}-{several.number}" if several else name,
            "TPU_WORKER_ID": str(self.found.worker),
            "TPU_ACCELERATOR_TYPE": slice.type,
            "TPU_TOPOLOGY": slice.kind.written(slice.topology),
        }


@contextlib.contextmanager
def slice_cluster(
    inherited: Mapping[str, str], *, timeout_s: float, port: int = PORT
) -> Iterator[SliceHost | None]:
    """Be a host of the cluster of the slice, or of several.

    On worker 0, of the first slice, Ray's head runs while the block runs.  The others
    are nodes until the head goes, and None is yielded.

    Raises:
        NotOnTpu: this machine has no TPU.
        TimeoutError: there was no head in time.
        RuntimeError: Ray cannot be started here, or this host cannot join.
    """
    host = SliceHost(found=discover(inherited), port=port)
    if not host.found.is_first:
        serve(host, inherited, timeout_s=timeout_s)
        yield None
        return
    if answers(host.head):
        raise RuntimeError(
            f"port {port} of {host} is taken, perhaps by another cluster of Ray; end "
            f"that one, or take it with --ray=auto"
        )
    with _node(host, inherited) as (process, said):
        end = time.monotonic() + timeout_s
        while not answers(host.head):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"Ray's head does not start on {host} within --start_timeout_s = "
                    f"{timeout_s:g}: {_last_line(said)}"
                )
            time.sleep(_PAUSE_S)
        yield host


def serve(host: SliceHost, inherited: Mapping[str, str], *, timeout_s: float) -> None:
    """Be a node of the cluster until its head goes; join again if that is needed.

    A node stays after SIGTERM, too: worker 0, which has got it as well, needs the
    learner's processes here to save the run.  Ctrl-C ends it at once.

    Raises:
        TimeoutError: there was no head in time.
        RuntimeError: this host cannot join.
        SystemExit: this process got a signal; with the status for that.
    """
    end = time.monotonic() + timeout_s
    while not answers(host.head):
        if time.monotonic() > end:
            raise TimeoutError(
                f"{host} found no head of Ray at {host.head} within --start_timeout_s "
                f"= {timeout_s:g}: run the same command on worker 0, and let the "
                f"hosts reach each other"
            )
        time.sleep(_PAUSE_S)
    _log.info("%s joins the cluster at %s", host, host.head)
    with _recorded() as signals:
        _stay(host, inherited, signals, end=end, timeout_s=timeout_s)
    if signals.requested:
        sys.exit(INTERRUPTED if signals.interrupted else PREEMPTED)


@contextlib.contextmanager
def _recorded() -> Iterator[Preemption]:
    """Record signals during the block; outside the main thread there are none."""
    signals = Preemption()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    with signals:
        yield signals


def _stay(
    host: SliceHost,
    inherited: Mapping[str, str],
    signals: Preemption,
    *,
    end: float,
    timeout_s: float,
) -> None:
    """Be a node until the head is gone; see `serve`, which waits for it until `end`.

    A node that has been in the cluster and dies has `timeout_s` again to join.
    """
    while True:
        began = time.monotonic()
        with _node(host, inherited) as (process, said):
            gone = _wait_for_end(process.poll, lambda: answers(host.head), signals)
            cause, joined = _last_line(said), _STARTED in _text(said)
        if signals.requested:
            _log.info("%s leaves", host)
            return
        if gone:
            _log.info("the head of Ray is gone; %s leaves", host)
            return
        now = time.monotonic()
        if joined and now - began > _LIVED_S:
            end = now + timeout_s
        if now > end:
            raise RuntimeError(
                f"{host} cannot join the cluster at {host.head} within "
                f"--start_timeout_s = {timeout_s:g}: {cause}"
            )
        time.sleep(_PAUSE_S)


def await_hosts(
    host: SliceHost,
    hosts: Callable[[], Iterable[HostNode]],
    *,
    timeout_s: float,
) -> None:
    """Return when all hosts of the slices are in the cluster.

    Raises:
        TimeoutError: says which are not.
    """
    slice = host.found.slice
    end = time.monotonic() + timeout_s
    while True:
        here = {(each.slice, each.worker) for each in hosts()}
        if len(here) >= host.num_hosts:
            return
        if time.monotonic() > end:
            workers = {worker for _, worker in here}
            missing = [each for each in range(slice.num_hosts) if each not in workers]
            names = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            if host.found.several:
                names = f"(all but {len(here)} of the {host.num_hosts})"
            raise TimeoutError(
                f"workers {names} of {slice.name} have not joined within "
                f"--start_timeout_s = {timeout_s:g}: run the same command on every host"
            )
        time.sleep(_PAUSE_S)


def answers(head: str) -> bool:
    """Return whether somebody listens at HOST:PORT."""
    address, _, port = head.rpartition(":")
    try:
        socket.create_connection((address, int(port)), 5.0).close()
    except OSError:
        return False
    return True


def _wait_for_end(
    ended: Callable[[], int | None],
    head_answers: Callable[[], bool],
    signals: Preemption,
) -> bool:
    """Return when a node has ended or the head is gone: whether the head is.

    Return at Ctrl-C as well.
    """
    seen, told = time.monotonic(), False
    while ended() is None and not signals.interrupted:
        if signals.requested and not told:
            _log.info("SIGTERM: this host stays until the run is saved and Ray's ends")
            told = True
        now = time.monotonic()
        if head_answers():
            seen = now
        elif now - seen > (_LEAVING_S if told else _GONE_S):
            return True
        time.sleep(_PAUSE_S)
    return not head_answers()


@contextlib.contextmanager
def _node(
    host: SliceHost, inherited: Mapping[str, str]
) -> Iterator[tuple[Any, IO[bytes]]]:
    """Run Ray on this host while the block runs; also return what it says."""
    with (
        tempfile.TemporaryFile() as said,
        watching_parent(
            host.command(), environment=host.environment(inherited), output=said
        ) as process,
    ):
        yield process, said


def _text(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode(errors="replace")


def _last_line(said: IO[bytes]) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in _text(said).splitlines()]
    return ([line for line in lines if line] or ["it said nothing"])[-1][:300]
