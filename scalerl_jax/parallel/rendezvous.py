"""The start of several processes that train as one; one process meets nobody.

Every process reports to process 0 before JAX starts, over a plain TCP connection:
`jax.distributed.initialize` ends a process from C++ when another stays away, and does
not say which.  Here process 0 listens at the coordinator's address until all have
come, then tells each of them to go on, or who is missing; after that the port is free
for JAX.
"""

import dataclasses
import json
import os
import socket
import time
from typing import Any

import jax
from jax._src import clusters

from scalerl_jax.parallel.multihost import agree

# A process that died is noticed after so long; the others then end with status 134.
HEARTBEAT_S = 60
# One that ended with an error waits so long for the others, then ends them.
SHUTDOWN_S = 60
_RETRY_S = 0.2
_HELLO_S = 2.0  # for a connection to say who it is
_GRACE_S = 10.0  # between the time-out of process 0 and the others'
_LINE = 65_536  # bytes of a message, at most


def initialize(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: int = HEARTBEAT_S,
) -> None:
    """Join the other processes; before anything else that asks JAX for devices.

    Without arguments they are found out (TPU VMs, Kubernetes, Slurm, Open MPI).

    Args:
        coordinator: HOST:PORT of process 0; the port must be free.
        num_processes: how many there are.
        process_id: which this is, from 0.
        timeout_s: for all of them to come.
        heartbeat_s: a process that is silent for so long is dead.

    Raises:
        ValueError: an argument is wrong or missing.
        RuntimeError: the coordinator's port is taken.
        TimeoutError: a process did not come; says which.
    """
    given = (coordinator, num_processes, process_id)
    local_devices = None
    if given == (None, None, None):
        detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
        found = detect(None, None, None, None, None, int(timeout_s))
        coordinator, num_processes, process_id, local_devices = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "--distributed needs --coordinator=HOST:PORT, --num_processes and "
            "--process_id, all three; they are found out on TPU VMs, Kubernetes, "
            "Slurm and Open MPI only"
        )
    place = Place(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )
    meet(place, timeout_s=timeout_s)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=local_devices,
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=heartbeat_s,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )
    agree(jax.__version__, name="the version of JAX", timeout_s=timeout_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in a run."""

    coordinator: str  # HOST:PORT, of process 0
    num_processes: int
    process_id: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator.

        Raises:
            ValueError: there is none in `coordinator`.
        """
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError(
                f"--coordinator={self.coordinator} is not HOST:PORT with a port of 1 "
                f"to 65535; name the host of process 0 and a free port of it, e.g. "
                f"10.0.0.1:8476"
            )
        return host.strip("[]"), int(port)


def meet(place: Place, *, timeout_s: float) -> None:
    """Return once all processes of a run are there; the same error on all if not.

    Raises:
        ValueError: the arguments are wrong, or those of two processes contradict.
        RuntimeError: the coordinator's port is taken.
        TimeoutError: a process did not come.
    """
    if place.num_processes < 1:
        raise ValueError(f"--num_processes={place.num_processes} must be above 0")
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"--process_id={place.process_id} must be from 0 to --num_processes - 1 "
            f"= {place.num_processes - 1}"
        )
    _ = place.address  # refused before anybody waits
    if place.process_id == 0:
        _gather(place, timeout_s)
    else:
        _report(place, timeout_s)


def _gather(place: Place, timeout_s: float) -> None:
    """Wait, as process 0, for the others and tell them how it went."""
    deadline = time.monotonic() + timeout_s
    come: dict[int, socket.socket] = {}
    fault = ""
    with _listen(place) as server:
        while len(come) < place.num_processes - 1 and not fault:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            fault = _admit(connection, come, place)
    missing = sorted(set(range(1, place.num_processes)) - come.keys())
    error: Exception | None = None
    if fault:
        error = ValueError(fault)
    elif missing:
        names = ", ".join(map(str, missing))
        error = TimeoutError(
            f"process {names} of {place.num_processes} did not come to the coordinator "
            f"at {place.coordinator} within {timeout_s:g} s (process 0 waits there); "
            f"see whether it runs, and whether it reaches that address"
        )
    answer = {"error": str(error or ""), "mistake": bool(fault)}
    for connection in come.values():
        _tell(connection, answer)
    if error:
        raise error


def _listen(place: Place) -> socket.socket:
    """Open a listening socket at the coordinator's port, on every interface."""
    _, port = place.address
    both = socket.has_dualstack_ipv6()
    try:
        if not both:
            return socket.create_server(("", port))
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RuntimeError(
            f"process 0 cannot listen at the port of --coordinator="
            f"{place.coordinator}: {reason}; end what has the port, or give all "
            f"processes another"
        ) from error


def _admit(
    connection: socket.socket, come: dict[int, socket.socket], place: Place
) -> str:
    """Enter a connection among those that came; what is wrong, if anything is."""
    connection.settimeout(_HELLO_S)
    hello = _read(connection)
    try:
        process, count = int(hello["process_id"]), int(hello["num_processes"])
    except (KeyError, TypeError, ValueError):
        connection.close()  # a stranger: a port scanner, a health check
        return ""
    before = come.get(process)
    come[process] = connection
    if count != place.num_processes:
        return (
            f"process {process} was started with --num_processes={count} and process "
            f"0 with {place.num_processes}; start all with the same"
        )
    if before is None or not _is_open(before):  # it ended, and was started anew
        return ""
    fault = (
        f"two processes were started with --process_id={process}; each needs one of "
        f"its own, from 0 to {place.num_processes - 1}"
    )
    _tell(before, {"error": fault, "mistake": True})
    return fault


def _report(place: Place, timeout_s: float) -> None:
    """Tell process 0, from another one, that this one is there; wait for its word."""
    deadline = time.monotonic() + timeout_s
    hello = {"process_id": place.process_id, "num_processes": place.num_processes}
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place.address, timeout=left) as connection:
                _tell(connection, hello, close=False)
                connection.settimeout(timeout_s + _GRACE_S)
                answer = _read(connection)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if answer is not None:
                if answer["error"]:
                    kind = ValueError if answer["mistake"] else TimeoutError
                    raise kind(answer["error"])
                return
            reason = "it closed the connection"
        time.sleep(_RETRY_S)
    raise TimeoutError(
        f"process 0 did not answer at --coordinator={place.coordinator} within "
        f"{timeout_s:g} s ({reason}), seen from process {place.process_id} of "
        f"{place.num_processes}; see whether it runs there, and whether this host "
        f"reaches that address"
    )


def _tell(connection: socket.socket, message: Any, *, close: bool = True) -> None:
    """Send a line; a peer that is gone is found elsewhere."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
        if close:
            # The peer closes first: the port then has no connection that lingers.
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_HELLO_S)
            connection.recv(1)
    except OSError:
        if not close:
            raise
    finally:
        if close:
            connection.close()


def _read(connection: socket.socket) -> Any:
    """Return the object that a line holds; None if it is not such a line."""
    try:
        with connection.makefile("rb") as file:
            found = json.loads(file.readline(_LINE))
    except (TimeoutError, ValueError, ConnectionError):
        return None
    return found if isinstance(found, dict) else None


def _is_open(connection: socket.socket) -> bool:
    """Return whether the peer, which sends no second message, is still there."""
    try:
        connection.setblocking(False)
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(_HELLO_S)
