"""Discover the slice to which this machine belongs.

In Kubernetes the environment describes it, on a TPU VM the metadata server does.
"""

import dataclasses
import functools
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from scalerl_jax.machines.processes import SliceOfSeveral
from scalerl_jax.machines.slices import (
    Slice,
    generation_of,
    make_slice,
    parse_sides,
    parse_type,
)
from scalerl_jax.process.background import Background

Fetch = Callable[[str], str | None]  # attribute -> its text; None: no such attribute
_KUBERNETES = "the environment"
_MACHINE = "the machine's metadata"
# The address of metadata.google.internal.  Resolving the name has no timeout, and takes
# long where no such server exists.
ADDRESS = "169.254.169.254"
FLAVOR = {"Metadata-Flavor": "Google"}
MOST_BYTES = 2**20
TRIES, PAUSE_S = 3, 0.5  # the server answers 503 while the machine is migrated


class NotOnTpu(RuntimeError):
    """This machine has no TPU, or does not report which."""


class Unanswered(RuntimeError):
    """Google's metadata server does not exist here, or does not answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundSlice:
    """A slice, and the position of this host in it."""

    slice: Slice
    worker: int  # number of this host
    addresses: tuple[str, ...]  # of all hosts, by worker
    name: str = ""  # of the TPU; empty: unknown
    several: SliceOfSeveral | None = None  # in a job over several slices

    @property
    def is_first(self) -> bool:
        """True if this is worker 0, of several slices that of the first."""
        return not self.worker and not (self.several and self.several.number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Said:
    """Unparsed values of a source; empty: not given."""

    source: str
    type: str  # v5p-128, or tpu-v5p-slice
    topology: str  # 4x4x4
    host: str  # chips of a host: 2,2,1
    worker: str
    addresses: tuple[str, ...]
    name: str
    several: Mapping[str, str]  # with variables for several slices, if there are any


def discover(environment: Mapping[str, str], *, timeout_s: float = 5.0) -> FoundSlice:
    """Return the slice of this machine.

    Args:
        environment: the machine's, without variables that give this process a part of
            the slice.
        timeout_s: for each answer of the metadata server.

    Raises:
        NotOnTpu: neither environment nor server describes a TPU.
        ValueError: their values contradict each other.
    """
    if environment.get("TPU_WORKER_HOSTNAMES"):
        return _found(_of_environment(environment))
    if "TPU_SKIP_MDS_QUERY" in environment:
        raise NotOnTpu(_nowhere("TPU_SKIP_MDS_QUERY forbids to ask the server"))
    # JAX and Google's libraries read the same variables.
    given = environment.get("GCE_METADATA_IP") or environment.get("GCE_METADATA_HOST")
    fetch = functools.partial(
        _fetch_attribute, server=given or ADDRESS, timeout_s=timeout_s
    )
    try:
        return _found(_of_metadata(fetch))
    except Unanswered as error:
        raise NotOnTpu(_nowhere(str(error))) from error


def _of_environment(environment: Mapping[str, str]) -> _Said:
    """Read the slice from variables of Google's plugin and webhook for Kubernetes."""
    return _Said(
        source=_KUBERNETES,
        type=environment.get("TPU_ACCELERATOR_TYPE", ""),
        topology=environment.get("TPU_TOPOLOGY", ""),
        host=environment.get("TPU_CHIPS_PER_HOST_BOUNDS", ""),
        worker=environment.get("TPU_WORKER_ID", ""),
        addresses=_split(environment["TPU_WORKER_HOSTNAMES"]),
        name=environment.get("TPU_NAME", ""),
        several=environment,
    )


def _of_metadata(fetch: Fetch) -> _Said:
    """Read the slice from the metadata of a TPU VM.

    Raises:
        NotOnTpu: the machine has no TPU.
    """
    known = _read_lines(fetch("tpu-env") or "")
    type = fetch("accelerator-type") or known.get("ACCELERATOR_TYPE", "")
    type = type or known.get("TPU_ACCELERATOR_TYPE", "")
    if not type:
        raise NotOnTpu(_nowhere("this virtual machine has no accelerator type"))
    worker = fetch("agent-worker-number") or known.get("WORKER_ID", "")
    return _Said(
        source=_MACHINE,
        type=type,
        topology=_product(known) or known.get("TOPOLOGY", ""),
        host=known.get("CHIPS_PER_HOST_BOUNDS", ""),
        worker=worker or known.get("TPU_WORKER_ID", ""),
        addresses=tuple(
            _endpoint(each) for each in _split(fetch("worker-network-endpoints") or "")
        ),
        name=known.get("NODE_ID", ""),
        several=known,
    )


def _found(said: _Said) -> FoundSlice:
    """Return the slice that a source describes; raise ValueError for contradictions."""
    slice = _slice(said)
    if len(said.addresses) != slice.num_hosts:
        raise ValueError(
            f"{said.source} names {len(said.addresses)} hosts "
            f"({', '.join(said.addresses[:4]) or 'none'}), but {slice.name} has "
            f"{slice.num_hosts} with {slice.chips_per_host} chips each; start this "
            f"outside of a process that was given a part of the slice"
        )
    # The only host of a slice need not give its worker number.
    worker = said.worker or "0" * (slice.num_hosts == 1)
    if not worker.isdecimal() or int(worker) >= slice.num_hosts:
        raise ValueError(
            f"{said.source} says that this is worker {worker!r} of {slice.name}, whose "
            f"workers are 0 to {slice.num_hosts - 1}"
        )
    return FoundSlice(
        slice=slice,
        worker=int(worker),
        addresses=said.addresses,
        name=said.name,
        several=_several(said),
    )


def _several(said: _Said) -> SliceOfSeveral | None:
    """Return the slice's place among several; raise ValueError for contradictions."""
    count = said.several.get("MEGASCALE_NUM_SLICES", "") or "1"
    number = said.several.get("MEGASCALE_SLICE_ID", "") or "0"
    first = said.several.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    numbers = count.isdecimal() and number.isdecimal()
    if numbers and int(count) == 1:
        return None
    if not numbers or int(number) >= int(count) or not first:
        raise ValueError(
            f"{said.source} says MEGASCALE_NUM_SLICES = {count!r}, MEGASCALE_SLICE_ID "
            f"= {number!r} and MEGASCALE_COORDINATOR_ADDRESS = {first!r}; slices are "
            f"numbered from 0, and that is the address of the first one's worker 0"
        )
    address = first if first.count(":") > 1 else first.partition(":")[0]
    return SliceOfSeveral(number=int(number), count=int(count), first=address)


def _slice(said: _Said) -> Slice:
    """Return the slice of the source's type, with its topology if given."""
    setting = f"the accelerator type of {said.source}"
    kind = generation_of(said.type) or generation_of(said.type.rpartition("-")[0])
    if said.topology and kind:
        shape = parse_sides(said.topology, setting=f"the topology of {said.source}")
        generation = kind.name
    else:
        generation, shape = parse_type(said.type, setting=setting)
    host = None
    if said.host:
        host = parse_sides(said.host, setting=f"the chips per host of {said.source}")
        # A topology does not give the arrangement of one host's eight chips; this does.
        shape = host if sorted(host) == sorted(shape) else shape
    elif shape == (2, 4, 1) and len(said.addresses) == 2:
        host = (2, 2, 1)
    return make_slice(
        generation, shape, host=host, setting=f"the topology of {said.source}"
    )


def _read_lines(text: str) -> dict[str, str]:
    """Parse the lines of tpu-env, each NAME: 'value'."""
    pairs = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    return {name.strip(): value.strip().strip("'\"") for name, value in pairs}


def _product(known: Mapping[str, str]) -> str:
    """Return the slice's chips along each side, from the bounds of hosts and chips.

    libtpu uses these bounds; TOPOLOGY does not specify which side is x.
    """
    names = ("HOST_BOUNDS", "CHIPS_PER_HOST_BOUNDS")
    if not all(known.get(name) for name in names):
        return ""
    hosts, chips = (parse_sides(known[name], setting=name) for name in names)
    return ",".join(str(n * k) for n, k in zip(hosts, chips, strict=True))


def _endpoint(text: str) -> str:
    """Return the address of a worker from the text ADDRESS or NAME:ID:ADDRESS.

    Raises:
        ValueError: the text has another form.
    """
    parts = text.split(":")
    if len(parts) not in (1, 3):
        raise ValueError(
            f"worker-network-endpoints has {text!r}; only ADDRESS and NAME:ID:ADDRESS "
            f"are known"
        )
    return parts[-1]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _nowhere(why: str) -> str:
    return (
        f"no TPU here: TPU_WORKER_HOSTNAMES is not set, and {why}; start this on each "
        f"machine of a TPU VM, or in pods that ask for google.com/tpu"
    )


# -- requests to the metadata server of Google's virtual machines, with limits ---------


def _fetch_attribute(key: str, *, server: str, timeout_s: float) -> str | None:
    """Return an attribute of this machine, or None if it does not exist.

    Raises:
        Unanswered: no answer in time, or none from Google's server.
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
        except OSError as error:  # includes URLError and TimeoutError
            said = getattr(error, "reason", error)
            raise Unanswered(
                f"{url} did not answer within {timeout_s} s ({said})"
            ) from error
        time.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _get(url: str, *, timeout_s: float) -> str:
    """Return the server's complete text, or raise after `timeout_s` seconds.

    The socket's own timeout restarts with each byte received.
    """
    found: list[str] = []
    asking = Background("the answer")
    asking.start(
        lambda: found.append(_read(url, timeout_s=timeout_s)), timeout_s=timeout_s
    )
    asking.wait(timeout_s)
    return found[0]


def _read(url: str, *, timeout_s: float) -> str:
    """Return a text of the server, without using a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=FLAVOR)
    end = time.monotonic() + timeout_s
    try:
        response = opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    with response:
        if response.headers["Metadata-Flavor"] != "Google":
            raise OSError("it is not Google's metadata server")
        found = b""
        while part := response.read1(2**16):
            found += part
            if time.monotonic() > end or len(found) > MOST_BYTES:
                raise TimeoutError(f"{len(found)} bytes and no end")
    return found.decode()
