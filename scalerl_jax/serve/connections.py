"""Connections that end: limits of their number, and of how long a client may take.

uvicorn waits for ever for a request's headers, and for a client to take an answer; and
it accepts connections until the process has no file left.  Here the connection that
has waited longest for its client gives way to a new one, so that clients who never
send a whole request cannot keep others out.
"""

import asyncio
import dataclasses
import json
import os
import resource
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from scalerl_jax.serve.errors import ApiError

# Connections that the event loop accepts at a time.  They are files before they are
# counted, and those that are turned away remain so for a moment.
ACCEPTED_TOGETHER = 32
_QUEUE = 1024  # connections that wait in the kernel, where they cost no file
# What is accepted in four turns of the loop, and files of the devices' libraries.
_SPARE_FILES = 4 * ACCEPTED_TOGETHER + 256

_FULL = ApiError(
    "the server has --max_connections connections, all of them busy: try again later",
    status=503,
    code="too_many_connections",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be, and how long each may take."""

    max_connections: int
    header_s: float  # from the last answer to the end of the next request's headers
    body_s: float  # from there to the end of the body; and to take a part of an answer


def reserve_files(max_connections: int) -> None:
    """Raise the process's limit of open files so far that the connections fit.

    Raises:
        ValueError: the hard limit does not allow it.
    """
    needed = len(os.listdir("/dev/fd")) + _SPARE_FILES + max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"--max_connections={max_connections} needs {needed} open files, and this "
            f"process may have {hard} (ulimit -Hn); lower the first to "
            f"{max_connections - needed + hard}, or raise the limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def widen(listener: socket.socket) -> None:
    """Let the kernel hold more connections than are accepted at a time.

    asyncio takes one number for both.
    """
    listener.listen(_QUEUE)


class Connections:
    """Makes the protocol of each connection, and knows which wait for their client."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """Made once per server."""
        self.limits = limits
        self.waiting: dict[Connection, None] = {}  # for their clients, longest first
        self.open = 0

    def __call__(self, **options: Any) -> "Connection":
        """What uvicorn takes for the class of a protocol."""
        return Connection(self, **options)


class Connection(H11Protocol):
    """uvicorn's, with an end to every wait for the client."""

    def __init__(
        self,
        connections: Connections,
        *,
        config: uvicorn.Config,
        **options: Any,
    ) -> None:
        """Not connected yet."""
        super().__init__(config, **options)
        self._all = connections
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, in place of one that waits if there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._all.open += 1
        if self._all.open > self._all.limits.max_connections:
            if not self._all.waiting:
                self._turn_away()
                return
            next(iter(self._all.waiting)).give_up()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.open -= 1
        self._all.waiting.pop(self, None)
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; a client that breaks off in nonsense behind its answer is left."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # the answer to it cannot be said any more
            self.give_up()

    def handle_events(self) -> None:
        """Stop waiting for the headers, or at the end of a request altogether."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_reading()
            if not self.cycle.more_body:
                self._all.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait for the client to take what is written."""
        super().pause_writing()
        self._writing = self.loop.call_later(self._all.limits.body_s, self.give_up)

    def resume_writing(self) -> None:
        """Write on."""
        self._stop_writing()
        super().resume_writing()

    def give_up(self) -> None:
        """Leave the client at once, whatever it has not taken."""
        self._all.waiting.pop(self, None)
        self.transport.abort()

    def _wait(self) -> None:
        self._stop_reading()
        self._all.waiting[self] = None
        self._reading = self.loop.call_later(self._all.limits.header_s, self.give_up)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _turn_away(self) -> None:
        body = json.dumps(_FULL.body()).encode()
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\n"
            b"Connection: close\r\n"
            b"Retry-After: 1\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()
