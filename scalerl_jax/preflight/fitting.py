"""Assign the devices of a topology to roles, by the same code as a run.

A slice of several hosts uses `cluster.fit_slices`, as under --ray=slice; one host uses
`wiring.fit_devices`, as in one process.  A layout that a run would refuse is compiled
too, and reported as one that cannot be started.
"""

import dataclasses

from scalerl_jax.cluster.fit_slices import fit_slices
from scalerl_jax.cluster.placement import HostNode, JoinedSlice, Seats
from scalerl_jax.config import Config
from scalerl_jax.machines.slices import GENERATIONS, Bounds, Slice, make_slice
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.planning.chooser import OneProcess, Room, Slices, choose, is_open
from scalerl_jax.preflight.topologies import Topology
from scalerl_jax.wiring.devices import fit_devices, why_not_one_process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A config with all numbers set for a topology, and whether a run can start."""

    config: Config
    room: Room
    seats: Seats | None = None  # None: one process, or the run cannot start
    why_not: str = ""  # why the run cannot start; empty: it can

    @property
    def can_start(self) -> bool:
        """True if a run of the config can be started on the topology."""
        return not self.why_not

    @property
    def processes(self) -> int:
        """Number of processes of learner and generators."""
        if self.seats is None:
            return 1
        replicas = len(self.seats.replicas) * len(self.seats.replica(0))
        return len(self.seats.ranks()) + replicas


def fit_topology(config: Config, arch: Architecture, topology: Topology) -> Fitted:
    """Return the config with every setting that depends on the devices set.

    Raises:
        ValueError: no way of starting fits on the devices.
    """
    slices, room = slices_of(topology), OneProcess(topology.num_devices)
    if slices:
        kinds = tuple(each.slice for each in slices)
        room = Slices(kinds, of_learner=config.mesh.slices)
        apart = dataclasses.replace(config.generators, placement="apart")
        try:
            if config.generators.placement == "shared":
                raise ValueError(
                    "generators.placement = 'shared' needs one process, and a slice of "
                    "several hosts has one on each; leave it at 'auto'"
                )
            fitted, seats = fit_slices(
                dataclasses.replace(config, generators=apart), arch, slices
            )
            return Fitted(config=fitted, room=room, seats=seats)
        except ValueError as error:
            if is_open(config) and not config.sampler.slots:
                raise
            why = str(error)
        return Fitted(
            config=fit_devices(config, arch, topology.num_devices),
            room=room,
            why_not=why,
        )
    if is_open(config):
        config = choose(config, arch, topology.chip, room).config
    why = why_not_one_process(config)
    if topology.chip.platform == "tpu" and topology.chip.name not in GENERATIONS:
        why = (
            f"the processes of a {topology.chip.name} slice cannot be given their "
            f"chips yet; known are {', '.join(GENERATIONS)}"
        )
    return Fitted(
        config=fit_devices(config, arch, topology.num_devices), room=room, why_not=why
    )


def slices_of(topology: Topology) -> tuple[JoinedSlice, ...]:
    """Return the slices of a topology, with made-up addresses of their hosts.

    It returns () for a single host, and for chips that are not in `GENERATIONS`.

    Raises:
        ValueError: no slice has this shape.
    """
    if topology.chip.name not in GENERATIONS:
        return ()
    sides: Bounds = (*topology.shape, 1)[:3]  # pyright: ignore[reportAssignmentType]
    slice = make_slice(topology.chip.name, sides, setting="--topology")
    if slice.num_hosts * topology.slices == 1:
        return ()
    return tuple(_reached(slice, number) for number in range(topology.slices))


def _reached(slice: Slice, number: int) -> JoinedSlice:
    name = f"slice {number}"
    return JoinedSlice(
        name=name,
        slice=slice,
        hosts=tuple(
            HostNode(
                slice=name,
                worker=worker,
                address=f"10.{number}.{worker // 250}.{worker % 250 + 1}",
                chips=slice.chips_per_host,
                type=slice.type,
                topology=slice.kind.written(slice.topology),
                labels={},
            )
            for worker in range(slice.num_hosts)
        ),
    )
