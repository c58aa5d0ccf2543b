"""Settings that a config leaves open, decided by the slices of a cluster."""

import dataclasses
from collections.abc import Sequence

from scalerl_jax import wiring
from scalerl_jax.cluster.placement import JoinedSlice, Seats, place
from scalerl_jax.config import Config
from scalerl_jax.machines.chips import CHIPS
from scalerl_jax.machines.partition import box_sizes
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.planning.chooser import Slices, choose, is_open


def fit_slices(
    config: Config, arch: Architecture, slices: Sequence[JoinedSlice]
) -> tuple[Config, Seats]:
    """Return the config with numbers for all that is left open, and who sits where.

    A role has a process on each host of its box; mesh.processes and
    generators.processes = 1, the default, become their number.  What
    `planning.chooser` can decide it does; with nothing but mesh.fsdp = 0 the learner
    has what replicas leave.

    Args:
        config: with generators.placement = "apart".
        slices: of `slices_of`.

    Raises:
        ValueError: they do not fit, or a setting contradicts them.
    """
    if is_open(config):
        config = _balanced(config, arch, slices)
    generators = config.generators
    generators = dataclasses.replace(
        generators, devices=generators.devices or config.mesh.tensor
    )
    seats = place(
        slices,
        learner_chips=_learner_sizes(config, arch, slices),
        open_learner=not config.mesh.fsdp,
        generators=generators.count,
        generator_chips=generators.devices,
        learner_slices=config.mesh.slices,
    )
    config = _seated(config, seats)
    hosts = _hosts_of_a_replica(seats)
    of_replica = f"a replica's generators.devices = {generators.devices} chips"
    _check_processes("generators", generators.processes, of_replica, hosts)
    generators = dataclasses.replace(
        generators, count=len(seats.replicas), processes=hosts
    )
    config = dataclasses.replace(config, generators=generators)
    total = seats.learner_chips + len(seats.replicas) * generators.devices
    return wiring.fit_devices(config, arch, total), seats


def fit_learner_slices(
    config: Config, arch: Architecture, slices: Sequence[JoinedSlice]
) -> tuple[Config, Seats]:
    """Return the config and the seats of a learner without replicas, as `fit_slices`.

    Args:
        config: with generators.placement = "shared".
        slices: of `slices_of`.

    Raises:
        ValueError: it does not fit, or a setting contradicts the slices.
    """
    mesh, generators = config.mesh, config.generators
    if not mesh.data or not mesh.tensor or config.model.remat == "auto":
        config = _balanced(config, arch, slices)
        config = dataclasses.replace(config, generators=generators)
    seats = place(
        slices,
        learner_chips=_learner_sizes(config, arch, slices),
        open_learner=not config.mesh.fsdp,
        generators=None,
        generator_chips=0,
        learner_slices=config.mesh.slices,
    )
    return wiring.fit_devices(_seated(config, seats), arch, seats.learner_chips), seats


def _learner_sizes(
    config: Config, arch: Architecture, slices: Sequence[JoinedSlice]
) -> list[int]:
    """Return the numbers of chips that a learner may have, the largest first."""
    mesh = config.mesh
    others = mesh.data * mesh.context * mesh.tensor
    if mesh.fsdp:
        return [others * mesh.fsdp]
    known = {size * mesh.slices for each in slices for size in box_sizes(each.slice)}
    return [
        size
        for size in sorted(known, reverse=True)
        if _usable(config, arch, size, others)
    ]


def _seated(config: Config, seats: Seats) -> Config:
    """Return the config with the learner's shards and processes in these seats."""
    mesh, learner, ranks = config.mesh, seats.learner_chips, len(seats.ranks())
    _check_processes("mesh", mesh.processes, f"the learner's {learner} chips", ranks)
    fsdp = learner // (mesh.data * mesh.context * mesh.tensor)
    mesh = dataclasses.replace(mesh, fsdp=fsdp, processes=ranks)
    return dataclasses.replace(config, mesh=mesh)


def _hosts_of_a_replica(seats: Seats) -> int:
    """Return on how many hosts each replica is.

    Raises:
        ValueError: the slices' hosts differ, and with them the replicas.
    """
    found = {len(seats.replica(number)) for number in range(len(seats.replicas))}
    if len(found) > 1:
        raise ValueError(
            f"replicas would be on {' or '.join(map(str, sorted(found)))} hosts, for "
            f"the slices' hosts are of different sizes; lower generators.devices to "
            f"the chips of the smallest host, or leave a slice out"
        )
    return found.pop()


def _check_processes(section: str, asked: int, chips: str, hosts: int) -> None:
    """Refuse a number of processes that is not that of a role's hosts."""
    if asked not in (1, hosts):
        raise ValueError(
            f"{section}.processes = {asked}, but {chips} are on {hosts} hosts, with a "
            f"process each; set {section}.processes = {hosts}, or leave it at 1"
        )


def _balanced(
    config: Config, arch: Architecture, slices: Sequence[JoinedSlice]
) -> Config:
    """Return the config with the best split of the slices, which are of one kind."""
    kinds = sorted({each.slice.generation for each in slices})
    if len(kinds) > 1:
        raise ValueError(
            f"what mesh.data, generators.count or sampler.slots = 0 and model.remat = "
            f"'auto' leave open is chosen for slices of one kind, and these are "
            f"{', '.join(kinds)}; set numbers, and the policy by name"
        )
    room = Slices(tuple(each.slice for each in slices), of_learner=config.mesh.slices)
    return choose(config, arch, CHIPS[kinds[0]], room).config


def _usable(config: Config, arch: Architecture, size: int, others: int) -> bool:
    """Return whether a learner's params and rows divide evenly over `size` chips."""
    rows = config.batch.rows_per_microbatch
    shards = size // others
    return (
        size % others == 0
        and arch.hidden_size % shards == 0
        and rows % (config.mesh.data * shards) == 0
    )
