"""Who may ask: a key, and a `Host` that this server goes by.

A page in a browser can send requests to a server on the same machine.  It cannot
choose the `Host`, which is its own name even where that name was bent to another
address (DNS rebinding); nor, unasked, the content type of JSON, which `app` checks.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from scalerl_jax.serve.errors import ApiError

KEY_VARIABLE = "SCALERL_API_KEY"
_OPEN_TO_ALL = "/health"  # of a load balancer, which knows no key
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?")
_KEY = re.compile(r"[!-~]{1,4096}")  # what a header can hold, without spaces


def find_key(given: str | None, file: str | None, variables: Mapping[str, str]) -> str:
    """The API key of a flag, a file or a variable; empty without any.

    Raises:
        ValueError: there are several, or it is no key; a key is never shown.
    """
    found: dict[str, str] = {}
    if given is not None:
        found["--api_key"] = given
    if file is not None:
        try:
            with open(file, encoding="utf-8") as opened:
                found[f"--api_key_file={file}"] = opened.read(5000)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a text"
            raise ValueError(
                f"--api_key_file={file} cannot be read: {reason}"
            ) from None  # the error of a text would show it
    if KEY_VARIABLE in variables:
        found[KEY_VARIABLE] = variables[KEY_VARIABLE]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} give a key each; leave one of them")
    for name, key in found.items():
        if not _KEY.fullmatch(key.strip()):
            raise ValueError(
                f"{name} holds no key; it must be one word of printable ASCII"
            )
        return key.strip()
    return ""


def known_hosts(address: str, allowed: str) -> frozenset[str] | None:
    """Names that a `Host` may have, beside addresses; None: any.

    Args:
        address: that the server listens on, which may be a name.
        allowed: further names with commas between them; "*": any.
    """
    names = [name.strip().lower() for name in allowed.split(",") if name.strip()]
    if "*" in names:
        return None
    own = ("localhost", address.lower(), socket.gethostname().lower())
    return frozenset({*names, *own} - {""})


class Guard:
    """Lets requests through that may ask."""

    def __init__(self, app: ASGIApp, *, key: str, hosts: frozenset[str] | None) -> None:
        """Before an application; without a key everyone may ask."""
        self._app = app
        self._digest = _digest(key) if key else None
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or refuse it."""
        try:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""))
            if scope["path"] != _OPEN_TO_ALL:
                self._check_key(headers.get("authorization", ""))
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, given: str) -> None:
        if self._hosts is None:
            return
        found = _HOST.fullmatch(given)
        name = (found[1] or found[2]).lower().removesuffix(".") if found else ""
        if name not in self._hosts and not _is_address(name):
            raise ApiError(
                f"Host: {given[:80]!r} is no name of this server; ask it by its "
                f"address, or start it with --allowed_hosts=NAME",
                status=421,
                code="unknown_host",
            )

    def _check_key(self, given: str) -> None:
        if self._digest is None:
            return
        scheme, _, key = given.partition(" ")
        # Of digests, which are equally long: the time says nothing about the key.
        same = hmac.compare_digest(_digest(key.strip()), self._digest)
        if not same or scheme.lower() != "bearer":
            raise ApiError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer "
                "KEY'",
                status=401,
                code="invalid_api_key",
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()  # as headers are decoded


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which no page can bend to another."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
