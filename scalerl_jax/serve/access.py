"""Access to the server: limits of connections, allowed hosts, and the API key.

uvicorn waits for ever for a request's headers and for a client to read its answer.  It
accepts connections until the process has no file descriptor left.  Here the connection
that has waited longest for its client is closed for a new one, so that clients who
never send a whole request cannot keep others out.

A page in a browser can send requests to a server on the same machine.  It cannot
choose the `Host`: this is the page's own host name, even if that name now resolves to
another address (DNS rebinding).  Without a CORS preflight it cannot send JSON's
content type either, which `app` checks.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import resource
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from scalerl_jax.formats.bounded import read_text
from scalerl_jax.serve.fields import ApiError

_log = logging.getLogger(__name__)

KEY_VARIABLE = "SCALERL_API_KEY"
_OPEN_TO_ALL = ("/", "/health")  # need no key: they show nothing of the model
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?")
_KEY = re.compile(r"[!-~]{1,4096}")  # what a header can hold, without spaces

# Connections that the event loop accepts at a time.  Each takes a file before it is
# counted, and a refused one keeps its file for a moment.
ACCEPTED_TOGETHER = 32
# Connections accepted in four turns of the loop, and files of the devices' libraries.
_SPARE_FILES = 4 * ACCEPTED_TOGETHER + 256
_BETWEEN_LINES_S = 60.0  # of the log: clients can cause any number
_FULL = ApiError(
    "the server has --max_connections connections, all of them busy: try again later",
    status=503,
    code="too_many_connections",
)


def reserve_files(max_connections: int) -> None:
    """Raise the process's limit of open files to what the connections need.

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


@dataclasses.dataclass(kw_only=True)
class Connections:
    """Makes each connection's protocol, and records which wait for their client."""

    max_connections: int
    header_s: float  # from the last answer to the end of the next request's headers
    body_s: float  # from there to the end of the body; and to take 64 KiB of an answer
    waiting: dict["Connection", None] = dataclasses.field(default_factory=dict)
    open: int = 0
    cut: int = 0  # clients that did not take their answer
    _told_at: float = -math.inf  # of them, by the monotonic clock

    def count_cut(self, client: object) -> None:
        """Count a client that did not take its answer, and log it, but not each."""
        self.cut += 1
        now = time.monotonic()
        if now - self._told_at < _BETWEEN_LINES_S:
            return
        self._told_at = now
        _log.warning(
            "warning: %s did not take 64 KiB of its answer within --body_s = %g s and "
            "is disconnected (%d so far)",
            *(client, self.body_s, self.cut),
        )

    def __call__(self, **options: Any) -> "Connection":
        """Make a connection; uvicorn calls this as it would a protocol's class."""
        return Connection(self, **options)


class Connection(H11Protocol):
    """uvicorn's HTTP protocol with a timeout on every wait for the client."""

    def __init__(
        self, connections: Connections, *, config: uvicorn.Config, **options: Any
    ) -> None:
        """Make a connection that is not connected yet."""
        super().__init__(config, **options)
        self._all = connections
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection; above the limit close the longest waiting one."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._all.open += 1
        if self._all.open > self._all.max_connections:
            if not self._all.waiting:
                self._turn_away()
                return
            next(iter(self._all.waiting)).give_up()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.open -= 1
        self._all.waiting.pop(self, None)
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; disconnect a client that sends invalid HTTP behind its answer."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # no error can be answered any more
            self.give_up()

    def handle_events(self) -> None:
        """End the wait for headers; at a request's end, every wait for the client."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._reading)
            if not self.cycle.more_body:
                self._all.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn's own, fixed time for it is not used."""
        self._wait()
        super().on_response_complete()
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """Wait at most `body_s` for the client to read what is written."""
        super().pause_writing()
        self._writing = self.loop.call_later(self._all.body_s, self._cut)

    def resume_writing(self) -> None:
        """Write on."""
        _cancel(self._writing)
        super().resume_writing()

    def give_up(self) -> None:
        """Disconnect the client at once, even if it has not read its answer."""
        self._all.waiting.pop(self, None)
        self.transport.abort()

    def _cut(self) -> None:
        host, port = self.client or ("a client", 0)
        self._all.count_cut(f"{host}:{port}")
        self.give_up()

    def _wait(self) -> None:
        _cancel(self._reading)
        self._all.waiting[self] = None
        self._reading = self.loop.call_later(self._all.header_s, self._end_wait)

    def _end_wait(self) -> None:
        """Disconnect a client without a request, once it can have its last answer."""
        if self.transport.get_write_buffer_size():
            self._reading = self.loop.call_later(self._all.body_s, self._cut)
        else:
            self.give_up()

    def _turn_away(self) -> None:
        body = bytes(_FULL.response().body)
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\n"
            b"Connection: close\r\n"
            b"Retry-After: 1\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def find_key(given: str | None, file: str | None, variables: Mapping[str, str]) -> str:
    """Return the API key of a flag, a file or a variable; empty without any.

    Raises:
        ValueError: there are several, or one is invalid; the message shows no key.
    """
    found = {"--api_key": given, KEY_VARIABLE: variables.get(KEY_VARIABLE)}
    if file is not None:
        try:
            found[f"--api_key_file={file}"] = read_text(Path(file), most=5000)
        except ValueError as error:
            raise ValueError(
                f"--api_key_file={file} cannot be read: {error}"
            ) from None  # the error of a text would show it
    keys = {name: key.strip() for name, key in found.items() if key is not None}
    if len(keys) > 1:
        raise ValueError(f"{' and '.join(keys)} give a key each; leave one of them")
    for name, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"{name} holds no key; it must be one word of printable ASCII"
            )
    return "".join(keys.values())


def known_hosts(address: str, allowed: str) -> frozenset[str] | None:
    """Return the names that a `Host` may have, beside addresses; None: any.

    Args:
        address: The address or name that the server listens on.
        allowed: Further names, separated by commas; "*": any.
    """
    names = [name.strip().lower() for name in allowed.split(",") if name.strip()]
    if "*" in names:
        return None
    own = ("localhost", address.lower(), socket.gethostname().lower())
    return frozenset({*names, *own} - {""})


def guarded(app: ASGIApp, *, key: str, hosts: frozenset[str] | None) -> ASGIApp:
    """Return the application behind checks of the host and, unless "", of the key."""
    digest = _digest(key) if key else None

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if hosts is not None:
                _check_host(headers.get("host", ""), hosts)
            if digest is not None and scope["path"] not in _OPEN_TO_ALL:
                _check_key(headers.get("authorization", ""), digest)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guard


def _check_host(given: str, hosts: frozenset[str]) -> None:
    found = _HOST.fullmatch(given)
    name = (found[1] or found[2]).lower().removesuffix(".") if found else ""
    if name in hosts:
        return
    try:
        ipaddress.ip_address(name)  # an address cannot be rebound to another one
    except ValueError:
        raise ApiError(
            f"Host: {given[:80]!r} is no name of this server; ask it by its address, "
            f"or start it with --allowed_hosts=NAME",
            status=421,
            code="unknown_host",
        ) from None


def _check_key(given: str, digest: bytes) -> None:
    scheme, _, key = given.partition(" ")
    # Digests are equally long: the time reveals nothing about the key.
    if not hmac.compare_digest(_digest(key.strip()), digest) or (
        scheme.lower() != "bearer"
    ):
        raise ApiError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()  # as headers are decoded
