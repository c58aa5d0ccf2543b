"""Questions to the metadata server of Google's virtual machines, with limits."""

import time
import urllib.error
import urllib.request
from collections.abc import Mapping

# The address of metadata.google.internal: a name's resolution cannot be limited, and
# where there is no such server it can take long.
ADDRESS = "169.254.169.254"
FLAVOR = {"Metadata-Flavor": "Google"}
MOST_BYTES = 2**20
TRIES, PAUSE_S = 3, 0.5  # the server says 503 while the machine is moved


class Unanswered(RuntimeError):
    """There is no metadata server of Google, or it does not answer."""


def address(environment: Mapping[str, str]) -> str:
    """Return where the server is; JAX and Google's libraries read the same names."""
    given = environment.get("GCE_METADATA_IP") or environment.get("GCE_METADATA_HOST")
    return given or ADDRESS


def fetch_attribute(key: str, *, server: str, timeout_s: float) -> str | None:
    """Return an attribute of this machine, or None if it has none of this name.

    Raises:
        Unanswered: no answer in time, or not from such a server.
    """
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    for tried in range(1, TRIES + 1):
        try:
            return _get(url, timeout_s=timeout_s)
        except urllib.error.HTTPError as error:
            if error.code == 404 and error.headers["Metadata-Flavor"] == "Google":
                return None
            if error.code < 500 or tried == TRIES:
                raise Unanswered(f"{url} answered {error.code}") from error
        except OSError as error:  # URLError and TimeoutError among them
            said = getattr(error, "reason", error)
            raise Unanswered(
                f"{url} did not answer within {timeout_s} s ({said})"
            ) from error
        time.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _get(url: str, *, timeout_s: float) -> str:
    """Return a text of the server, never by way of a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=FLAVOR)
    end = time.monotonic() + timeout_s
    with opener.open(request, timeout=timeout_s) as response:
        if response.headers["Metadata-Flavor"] != "Google":
            raise OSError("it is not Google's metadata server")
        found = b""
        # The socket's limit starts anew with each byte; this one does not.
        while part := response.read1(2**16):
            found += part
            if time.monotonic() > end or len(found) > MOST_BYTES:
                raise TimeoutError(f"{len(found)} bytes and no end")
    return found.decode()
