"""JSON asked of a server over HTTP: bounded, with a key, and following no redirect."""

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from typing import Any

from scalerl_jax.formats.reading import parse_json

SCHEMES = ("http://", "https://")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before a retry; doubled for each
_SHOWN = 120  # characters of a reply in an error


class AskError(RuntimeError):
    """A server gave no answer; `passing` if it may when it is asked again.

    The message goes on where the server has been named.
    """

    def __init__(
        self, why: str, *, passing: bool = False, after_s: float = 0.0
    ) -> None:
        """Take the reason, and the seconds that the server asks to wait."""
        super().__init__(why)
        self.passing, self.after_s = passing, after_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for the host that was named."""

    def redirect_request(
        self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any
    ) -> None:
        """Make no other request; the status is an error then."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def ask(
    url: str, body: Any = None, *, key: str = "", timeout_s: float, most: int
) -> Any:
    """Return the JSON that a URL answers with, to a POST of JSON or, without, to a GET.

    Args:
        url: of http or https.
        body: JSON values.
        key: name of the variable of the environment that has the key; "": there is
            none.
        timeout_s: of the whole reply's parts, each.
        most: bytes of a reply that are read.

    Raises:
        AskError: there is no answer, or none in JSON.
    """
    assert url.startswith(SCHEMES), "who takes the URL refuses others"
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    if key:
        if not os.environ.get(key):
            raise AskError(f"wants a key, and {key} of the environment holds none")
        headers["Authorization"] = f"Bearer {os.environ[key]}"
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            content = reply.read(most + 1)
    except urllib.error.HTTPError as error:
        after = error.headers.get("Retry-After", "")
        try:
            said = error.read(_SHOWN).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            said = ""
        error.close()
        if _may_pass(error.code):
            after_s = float(after) if after.isdecimal() else 0.0
            why = f"status {error.code}"
            raise AskError(why, passing=True, after_s=after_s) from error
        raise AskError(
            f"answered with status {error.code}{f': {said}' if said else ''}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise AskError(str(error) or type(error).__name__, passing=True) from error
    if len(content) > most:
        raise AskError(f"answered with more than {most:,} bytes")
    try:
        return parse_json(content)
    except ValueError as error:
        raise AskError(f"answered with no JSON: {content[:_SHOWN]!r}") from error


def _may_pass(status: int) -> bool:
    """Return whether another try may end otherwise; 501 is "not implemented"."""
    return status in (408, 409, 429) or (status >= 500 and status != 501)


def pause_s(tries: int, error: AskError) -> float:
    """Return the seconds to wait before the next retry, after `tries` failures."""
    wait_s = max(_FIRST_PAUSE_S * 2 ** (tries - 1), error.after_s)
    return min(wait_s * random.uniform(1.0, 1.5), _LONGEST_PAUSE_S)


def ask_persistently(
    url: str, body: Any = None, *, retries: int, **options: Any
) -> Any:
    """Return the answer of `ask`, which is called again while its failure may pass.

    Raises:
        AskError: there is none after that number of retries.
    """
    for tries in range(1, retries + 2):
        try:
            return ask(url, body, **options)
        except AskError as error:
            if not error.passing:
                raise
            if tries > retries:
                raise AskError(f"failed {tries} times: {error}") from error
            time.sleep(pause_s(tries, error))
    raise AssertionError("the last failure is raised")
