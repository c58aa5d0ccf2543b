"""Processes of a job on a box of chips: their environment, hosts and roles.

libtpu takes the whole slice unless environment variables name the chips of this
process, the other processes of its job and their order.  They must be set before JAX is
imported.  The names are those of jax._src.test_multiprocess, JAX's own tests with
several processes; vLLM also writes the bounds under older names.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from scalerl_jax.machines.partition import Box, Split
from scalerl_jax.machines.slices import Bounds, Slice

# A process listens at TPU_PORT + its first chip (8471 to 8478), so that the roles of a
# host have different ports.  JAX's coordinator listens at 8482 by default.
TPU_PORT = 8471
COORDINATOR_PORT = 8490
# At which the slices of a job meet; libtpu reads it with the address.
MEGASCALE_PORT = 8081
# Variables that describe another job.
STALE = (
    # In libtpu these override TPU_VISIBLE_CHIPS.
    *("TPU_VISIBLE_DEVICE_PATHS", "TPU_VISIBLE_DEVICES"),
    *("TPU_MESH_CONTROLLER_ADDRESS", "TPU_MESH_CONTROLLER_PORT"),
    "TPU_PROCESS_ADDRESSES_PATH",
    *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
_OF_SLICES = "MEGASCALE_"  # begins the names of variables for several slices
Extent = Literal["part of a host", "whole hosts", "whole slice"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceOfSeveral:
    """A slice's place in a job over several slices."""

    number: int
    count: int
    first: str  # address of the first process of slice 0

    def environment(self) -> dict[str, str]:
        """Return the variables by which libtpu joins the slices.

        JAX's `clusters.cloud_tpu_cluster` reads them too, and numbers the processes of
        slice 0 first.
        """
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": join_address(self.first, MEGASCALE_PORT),
            "MEGASCALE_PORT": str(MEGASCALE_PORT),
            "MEGASCALE_NUM_SLICES": str(self.count),
            "MEGASCALE_SLICE_ID": str(self.number),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a job: its host, its chips, and the job's other processes.

    Of a job over several slices these are the ones on its own slice.
    """

    worker: int  # number of its host in the slice
    rank: int  # among the job's processes on the slice
    processes: Bounds  # of the job, along each side
    chips: Bounds  # of this process, along each side
    visible: tuple[int, ...]  # the host's numbers of its chips
    addresses: tuple[str, ...]  # of the job's hosts, by rank
    extent: Extent  # of the job's box
    slice: SliceOfSeveral | None = None  # None: the job is on one slice

    @property
    def port(self) -> int:
        """The port of libtpu, the same for all processes of a job."""
        return TPU_PORT + self.visible[0]

    @property
    def coordinator(self) -> str:
        """HOST:PORT for `rendezvous.initialize`, the same for all of a job."""
        return join_address(self.addresses[0], COORDINATOR_PORT + self.visible[0])

    def own_environment(self) -> dict[str, str]:
        """Return the variables that give this process its part of the slice."""
        processes, chips = _comma(self.processes), _comma(self.chips)
        own = {
            "TPU_PROCESS_BOUNDS": processes,
            "TPU_HOST_BOUNDS": processes,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": chips,
            "TPU_CHIPS_PER_HOST_BOUNDS": chips,
            "TPU_VISIBLE_CHIPS": _comma(self.visible),
            "TPU_PROCESS_ADDRESSES": _comma(
                join_address(address, self.port) for address in self.addresses
            ),
            "TPU_PROCESS_PORT": str(self.port),
            "CLOUD_TPU_TASK_ID": str(self.rank),
            # Kubernetes sets these for the whole slice; JAX and libtpu read them.
            "TPU_WORKER_ID": str(self.rank),
            "TPU_WORKER_HOSTNAMES": _comma(self.addresses),
        }
        if self.extent == "part of a host":
            # Otherwise the host's second process fails on libtpu's lock file.
            own["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        if self.extent != "whole slice":
            # A part of a torus has no wraparound links and is not twisted.  On a TPU VM
            # libtpu would ask the metadata server for values that are not set.
            own["TPU_TOPOLOGY_WRAP"] = "false,false,false"
            own["TPU_TOPOLOGY_ALT"] = "false"
        return own | (self.slice.environment() if self.slice else {})

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with which to start the process.

        Variables in `inherited` that describe another job or slice are removed.
        """
        kept = {
            name: value
            for name, value in inherited.items()
            if not is_dropped(name, self.dropped)
        }
        return kept | self.own_environment()

    @property
    def dropped(self) -> tuple[str, ...]:
        """Variables that are not inherited, as `is_dropped` reads them."""
        topology = ("TPU_TOPOLOGY",) * (self.extent != "whole slice")
        return STALE + topology + (f"{_OF_SLICES}*",) * (self.slice is None)


def is_dropped(name: str, dropped: Iterable[str]) -> bool:
    """Return True if a variable is among these names, or begins as one that ends in *.

    Variables for several slices, which may have options of their network, are kept in
    a job over several.
    """
    return any(
        name.startswith(each[:-1]) if each.endswith("*") else name == each
        for each in dropped
    )


def processes(
    slice: Slice, box: Box, *, addresses: Sequence[str]
) -> tuple[Process, ...]:
    """Return the processes of a job on a box of chips, by rank.

    A host has one process, for all its chips in the box.

    Args:
        slice: the slice that contains the box.
        box: a box of `split_slice`.
        addresses: addresses of the slice's hosts, by worker.

    Raises:
        ValueError: the number of addresses is not the number of hosts.
    """
    if len(addresses) != slice.num_hosts:
        raise ValueError(
            f"{len(addresses)} addresses for the {slice.num_hosts} hosts of "
            f"{slice.name}; give one for each, in the order of the workers"
        )
    at = {corner: worker for worker, corner in enumerate(slice.corners)}
    chips: dict[int, list[int]] = {}  # worker -> its chips in the box
    for chip in box.chips:  # along x first, as libtpu counts
        worker = at[_corner(slice, chip)]
        chips.setdefault(worker, []).append(number_on_host(slice, chip))
    extent: Extent = "whole hosts"
    if box.num_chips < slice.chips_per_host:
        extent = "part of a host"
    elif box.num_chips == slice.num_chips:
        extent = "whole slice"
    return tuple(
        Process(
            worker=worker,
            rank=rank,
            processes=_hosts(box.shape, slice.host),
            chips=box.shape if extent == "part of a host" else slice.host,
            visible=tuple(sorted(chips[worker])),
            addresses=tuple(addresses[each] for each in chips),
            extent=extent,
        )
        for rank, worker in enumerate(chips)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """A process with chips: a rank of the learner, or of a replica."""

    name: str  # learner or replica
    number: int  # of the replica, from 0; 0 for the learner
    process: Process

    @property
    def rank(self) -> int:
        """Rank of the process in its job, from 0."""
        return self.process.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the roles that run on it."""

    worker: int
    address: str
    roles: tuple[Role, ...]  # empty: its chips are idle

    @property
    def head(self) -> bool:
        """True if the controller and Ray's head run on this host."""
        return self.worker == 0


def deal(slice: Slice, split: Split, *, addresses: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts of a slice with their roles, by worker.

    Args:
        slice: the slice with all hosts of the run.
        split: the result of `split_slice`.
        addresses: addresses of the hosts, by worker.

    Raises:
        ValueError: the number of addresses is not the number of hosts.
    """

    def roles(name: str, number: int, box: Box) -> list[Role]:
        return [
            Role(name=name, number=number, process=process)
            for process in processes(slice, box, addresses=addresses)
        ]

    found = roles("learner", 0, split.learner)
    for number, box in enumerate(split.replicas):
        found += roles("replica", number, box)
    return tuple(
        Host(
            worker=worker,
            address=address,
            roles=tuple(role for role in found if role.process.worker == worker),
        )
        for worker, address in enumerate(addresses)
    )


def number_on_host(slice: Slice, chip: Bounds) -> int:
    """Return a chip's number on its host, from 0.

    Chips are numbered by squares of 2x2, and within a square along y first.  JAX's
    tests give a process of two chips the numbers 0,1 or 2,3 with the bounds 1,2,1, and
    a process of four of a host's eight chips 0 to 3 or 4 to 7 with 2,2,1.
    """
    x, y, _ = (at % side for at, side in zip(chip, slice.host, strict=True))
    squares = max(slice.host[0] // 2, 1)
    return 4 * (x // 2 + squares * (y // 2)) + 2 * (x % 2) + y % 2


def _corner(slice: Slice, chip: Bounds) -> Bounds:
    """Return the coordinates of the first chip on a chip's host."""
    x, y, z = (at - at % side for at, side in zip(chip, slice.host, strict=True))
    return x, y, z


def _hosts(shape: Bounds, host: Bounds) -> Bounds:
    """Return the number of a box's hosts along each side."""
    x, y, z = (max(side // part, 1) for side, part in zip(shape, host, strict=True))
    return x, y, z


def _comma(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
