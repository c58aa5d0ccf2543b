"""The address at which process 0 of several is met, and where JAX's coordinator is.

Process 0 listens at one address of its machine, never at all of them.  There JAX's
coordinator follows it, which serves whoever reaches it: a stranger that says that it is
process 1 ends the run.  On several machines, their network has to be private.  On one,
where the address is that of the loopback, it has no port: it listens at a socket file
that this user alone can open, and which is gone after the start.
"""

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence

# JAX's own variable: where process 0 listens, if its machine does not have the address
# of --coordinator, as behind a Service of Kubernetes.
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
MAX_PROCESSES = 2**16
_MAX_FILE = 100  # characters: the system's limit of a socket's file is 107
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[?[0-9A-Fa-f:.]+(%\w+)?\]?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """A process's place in a run."""

    coordinator: str  # HOST:PORT, of process 0
    num_processes: int
    process_id: int
    local_devices: Sequence[int] | None = None  # None: all of its machine

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator.

        Raises:
            ValueError: there is none in `coordinator`.
        """
        return split_address(self.coordinator, setting="--coordinator")

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: says which argument is wrong.
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
    """Return host and port of HOST:PORT.

    Raises:
        ValueError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or int(port) > 65_535:
        raise ValueError(
            f"{setting}={text} is not HOST:PORT with a port of 1 to 65535; name the "
            f"host of process 0 and a free port of it, e.g. 10.0.0.1:8476"
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HeldPort:
    """A port of one address of this machine, kept free for this user's process.

    It is bound and does not listen.  Programs of other users cannot bind it, and those
    of this user that share ports, as gRPC's servers do, can listen at it.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Take it; port 0 is any that is free.

        Raises:
            ValueError: the host names all addresses of the machine.
            OSError: the machine does not have the address, or the port is taken.
        """
        error: OSError | None = None
        for family, kind, _, _, address in _resolved(host, port):
            if ipaddress.ip_address(address[0]).is_unspecified:
                raise ValueError(
                    f"{host} stands for all addresses of a machine; name the one by "
                    f"which the other processes reach it"
                )
            self._family, self._socket = family, socket.socket(family, kind)
            try:
                # A port whose last connections linger is free; one that is bound so
                # could be taken by others, and hence it is given up at once.
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
        """HOST:PORT, with the number of the address."""
        return join_address(*self._socket.getsockname()[:2])

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        return ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback

    def listen(self) -> socket.socket:
        """Return a socket that listens at it, to close before another does."""
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
        """Give it up."""
        self._socket.close()

    def _reuse(self, option: int, value: bool) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, int(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordinator:
    """Where process 0 listens: at a port itself, and then JAX's coordinator."""

    held: HeldPort
    address: str  # by which JAX's clients find it
    bind_address: str  # at which it listens


@contextlib.contextmanager
def opened_coordinator(
    place: ProcessPlace, held: HeldPort | None
) -> Iterator[Coordinator | None]:
    """Keep the port of process 0 while the block runs, in which JAX starts.

    Args:
        place: of this process; None is yielded unless it is process 0.
        held: the port, if there is one already.

    Raises:
        ValueError, RuntimeError: as `hold_coordinator`.
    """
    if place.process_id:
        yield None
        return
    with contextlib.ExitStack() as opened:
        held = held or hold_coordinator(place, os.environ)
        opened.callback(held.close)
        address, bind_address = place.coordinator, held.address
        if held.is_loopback:
            # Connections that exist outlive the file.
            folder = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="scalerl_jax-")
            )
            file = f"unix:{folder}/coordinator"
            if len(file) <= _MAX_FILE:
                address = bind_address = file
        yield Coordinator(held=held, address=address, bind_address=bind_address)


def hold_coordinator(place: ProcessPlace, environment: Mapping[str, str]) -> HeldPort:
    """Take the port of process 0 on its machine, before anybody waits.

    Raises:
        ValueError: the coordinator stands for all addresses of a machine.
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
            f"process 0 cannot listen at {setting}={value}: {reason}; end what has "
            f"the port, or give all processes another; where this machine does not "
            f"have that address, name its own in {BIND_ADDRESS}=HOST:PORT"
        ) from error


def _resolved(host: str, port: int) -> list:
    with contextlib.suppress(UnicodeError):  # of a name that is no name
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    raise OSError(f"{host!r} is no name of a host")
