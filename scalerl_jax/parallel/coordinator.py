"""The address at which process 0 listens, for the start and for JAX's coordinator.

Process 0 listens at one address of its machine, never at all of them.  After the start
JAX's coordinator listens there, without authentication: any program that claims to be
process 1 can end the run.  So several machines need a private network.  On a single
machine, with a loopback address, the coordinator has no port: it listens at a socket
file that only this user can open, and which is removed after the start.
"""

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from scalerl_jax.machines.processes import join_address

# JAX's own variable: the address at which process 0 listens, if its machine does not
# have the address of --coordinator (behind a Service of Kubernetes).
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
MAX_PROCESSES = 2**16
_MAX_FILE = 100  # characters; the system's limit for a socket's path is 107
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[?[0-9A-Fa-f:.]+(%\w+)?\]?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Number and coordinator of a process in a run."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_devices: Sequence[int] | None = None  # None: all of its machine

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator.

        Raises:
            ValueError: `coordinator` is not HOST:PORT.
        """
        return split_address(self.coordinator, setting="--coordinator")

    def check(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: an argument is out of range or malformed.
        """
        if not 1 <= self.num_processes <= MAX_PROCESSES:
            raise ValueError(
                f"--num_processes={self.num_processes} must be above 0 and at most "
                f"{MAX_PROCESSES}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process_id={self.process_id} must be from 0 to --num_processes - 1 "
                f"= {self.num_processes - 1}"
            )
        _ = self.address


def split_address(text: str, *, setting: str) -> tuple[str, int]:
    """Parse HOST:PORT.

    Raises:
        ValueError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or int(port) > 65_535:
        raise ValueError(
            f"{setting}={text} is not HOST:PORT with a port of 1 to 65535; name the "
            f"host of process 0 and a free port of it, e.g. 10.0.0.1:8476"
        )
    return host.strip("[]"), int(port)


class HeldPort:
    """A port of one address of this machine, reserved for this user's processes.

    The port is bound, but nothing listens.  Programs of other users cannot bind it;
    programs of this user that share ports (SO_REUSEPORT, as in gRPC) can listen at it.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Bind the port; 0 means any free port.

        Raises:
            ValueError: the host names all addresses of the machine.
            OSError: the machine does not have the address, or the port is taken.
        """
        error: OSError | None = None
        for family, kind, _, _, address in _resolved(host, port):
            if ipaddress.ip_address(address[0]).is_unspecified:
                raise ValueError(
                    f"{host} means all addresses of a machine; name the one at "
                    f"which the other processes reach it"
                )
            self._family, self._socket = family, socket.socket(family, kind)
            try:
                # SO_REUSEADDR lets us bind a port whose old connections linger.  It is
                # cleared at once, since it would let others bind the port too.
                self._reuse(socket.SO_REUSEADDR, True)
                self._socket.bind(address)
                self._reuse(socket.SO_REUSEADDR, False)
                self._reuse(socket.SO_REUSEPORT, True)
                return
            except OSError as failure:
                error = failure
                self.close()
        raise error or OSError(f"{host} has no address")

    @property
    def address(self) -> str:
        """HOST:PORT with the numeric address."""
        return join_address(*self._socket.getsockname()[:2])

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this machine can reach the port."""
        return ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback

    def listen(self) -> socket.socket:
        """Return a socket that listens at the port; close it before another listens."""
        listening = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(self._socket.getsockname())
            listening.listen()
        except BaseException:
            listening.close()
            raise
        return listening

    def close(self) -> None:
        """Release the port."""
        self._socket.close()

    def _reuse(self, option: int, value: bool) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, int(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordinator:
    """Addresses of process 0: its own port, and those of JAX's coordinator."""

    held: HeldPort
    address: str  # to which JAX's clients connect
    bind_address: str  # at which JAX's coordinator listens


@contextlib.contextmanager
def opened_coordinator(
    place: ProcessPlace, held: HeldPort | None
) -> Iterator[Coordinator | None]:
    """Hold the port of process 0 during the block, in which JAX starts.

    Args:
        place: this process; unless it is process 0, None is yielded.
        held: the port, if it is held already.

    Raises:
        ValueError, RuntimeError: see `hold_coordinator`.
    """
    if place.process_id:
        yield None
        return
    with contextlib.ExitStack() as opened:
        held = held or hold_coordinator(place, os.environ)
        opened.callback(held.close)
        address, bind_address = place.coordinator, held.address
        if held.is_loopback:
            # Open connections survive the removal of the file.
            folder = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="scalerl_jax-")
            )
            file = f"unix:{folder}/coordinator"
            if len(file) <= _MAX_FILE:
                address = bind_address = file
        yield Coordinator(held=held, address=address, bind_address=bind_address)


def hold_coordinator(place: ProcessPlace, environment: Mapping[str, str]) -> HeldPort:
    """Bind the port of process 0 on its machine, before any process waits.

    Raises:
        ValueError: the coordinator's host means all addresses of a machine.
        RuntimeError: the port is taken, or the machine does not have that address.
    """
    setting, value = "--coordinator", place.coordinator
    if named := environment.get(BIND_ADDRESS):
        setting, value = BIND_ADDRESS, named
    host, port = split_address(value, setting=setting)
    try:
        return HeldPort(host, port)
    except ValueError as error:
        raise ValueError(f"{setting}={value}: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise RuntimeError(
            f"process 0 cannot listen at {setting}={value}: {reason}; end the program "
            f"that has the port, or give all processes another; if this machine does "
            f"not have that address, name its own in {BIND_ADDRESS}=HOST:PORT"
        ) from error


def _resolved(host: str, port: int) -> list:
    with contextlib.suppress(UnicodeError):  # for a text that is no host name
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    raise OSError(f"{host!r} is no name of a host")
