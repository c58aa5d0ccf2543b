"""Seats of a run on TPU slices: who runs on which host, with which environment.

All of it is computed from what Ray says of its nodes; nothing here calls Ray.  One file
above 400 lines: from nodes to slices, and from these to seats.

An actor is pinned by labels, the name of its slice and the number of its host, and not
by a node's id: a host that comes back is another node with the same labels, on which an
actor that waits for it starts.  `ray.util.tpu.SlicePlacementGroup` is not used.  It
takes whichever slices are free, with bundles in no order, while the rank of a process
must be its host's place; it has no boxes within a slice, and no name for a slice of one
host.  What it would keep from others, an actor's claim on its chips keeps too.
"""

import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from scalerl_jax.machines.partition import Box, box_sizes, boxes, split_slice
from scalerl_jax.machines.processes import (
    Process,
    SliceOfSeveral,
    is_dropped,
    processes,
)
from scalerl_jax.machines.slices import Slice, make_slice, parse_sides, parse_type

_NAME, _WORKER = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
_TOPOLOGY, _TYPE = "ray.io/tpu-topology", "ray.io/tpu-pod-type"
_NODE = "ray.io/node-id"
# Ray starts an actor with its node's environment and can only add to it; the names in
# this variable are dropped by the actor itself.
DROPPED = "SCALERL_DROPPED_VARIABLES"
# Else Ray writes chips and bounds of its own over those of `Process`.
_OURS = {"RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1"}
_LEARNER = "mesh.data * mesh.fsdp * mesh.context * mesh.tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostNode:
    """A host with TPU chips, as Ray lists it."""

    slice: str  # its name
    worker: int
    address: str
    chips: int
    type: str  # of the slice: v5p-128
    topology: str  # of the slice: 4x4x4; empty: the usual one of its type
    labels: Mapping[str, str]  # that an actor must ask for to run here


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedSlice:
    """A slice, all of whose hosts are in the cluster."""

    name: str
    slice: Slice
    hosts: tuple[HostNode, ...]  # by worker

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.name} ({self.slice.name})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """The host and the chips of one process."""

    labels: Mapping[str, str]
    process: Process

    def options(self) -> dict[str, Any]:
        """Return the Ray options of the process's actor: chips, labels, environment."""
        told = {
            "JAX_PLATFORMS": "tpu,cpu",  # params are loaded by way of the host
            DROPPED: ",".join(self.process.dropped),
        }
        return {
            "num_cpus": 1,
            "resources": {"TPU": len(self.process.visible)},
            "label_selector": dict(self.labels),
            "runtime_env": {"env_vars": self.process.own_environment() | _OURS | told},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlicePart:
    """A box of one of several slices."""

    at: int  # of the slices
    box: Box


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seats:
    """Chips of the slices by who has them; the rest stays idle."""

    slices: tuple[JoinedSlice, ...]
    learner: tuple[SlicePart, ...]  # equal boxes, on a slice each
    replicas: tuple[SlicePart, ...]

    @property
    def learner_chips(self) -> int:
        """Number of chips of the learner."""
        return sum(part.box.num_chips for part in self.learner)

    def ranks(self) -> tuple[Seat, ...]:
        """Return the learner's seats, by rank: slice by slice, as JAX counts."""
        found = [self._of(part) for part in self.learner]
        if len(found) == 1:
            return found[0]
        first = found[0][0].process.addresses[0]
        ranks: list[Seat] = []
        for number, seats in enumerate(found):
            own = SliceOfSeveral(number=number, count=len(found), first=first)
            ranks += [
                dataclasses.replace(
                    seat, process=dataclasses.replace(seat.process, slice=own)
                )
                for seat in seats
            ]
        return tuple(ranks)

    def replica(self, number: int) -> tuple[Seat, ...]:
        """Return the seats of the replica of a number, the first one's first."""
        return self._of(self.replicas[number])

    def refreshed(self, hosts: Iterable[HostNode]) -> "Seats":
        """Return the seats with the addresses that the hosts have now.

        Hosts that are away keep the last one that is known.
        """
        now = {(host.slice, host.worker): host for host in hosts}
        slices = tuple(
            dataclasses.replace(
                each,
                hosts=tuple(now.get((h.slice, h.worker), h) for h in each.hosts),
            )
            for each in self.slices
        )
        return dataclasses.replace(self, slices=slices)

    def _of(self, part: SlicePart) -> tuple[Seat, ...]:
        reached = self.slices[part.at]
        addresses = [host.address for host in reached.hosts]
        return tuple(
            Seat(labels=reached.hosts[process.worker].labels, process=process)
            for process in processes(reached.slice, part.box, addresses=addresses)
        )


def forget_others(environment: MutableMapping[str, str]) -> None:
    """Drop what describes another job, in an actor that has a `Seat`."""
    if DROPPED not in environment:
        return
    names = environment.pop(DROPPED).split(",")
    for name in list(environment):
        if is_dropped(name, names):
            del environment[name]


# From nodes to slices.


def hosts_of(nodes: Iterable[Mapping[str, Any]]) -> list[HostNode]:
    """Return the hosts with TPU chips among the nodes that `ray.nodes()` lists.

    Raises:
        ValueError: one does not say what it is a part of.
    """
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get("TPU")]
    found = [_host(node) for node in alive]
    keys = [(host.slice, host.worker) for host in found]
    hosts = []
    for node, host in zip(alive, found, strict=True):
        if keys.count((host.slice, host.worker)) > 1 and _slice(host).num_hosts == 1:
            # Machines of one host each need not have names of their own.
            own = {_NODE: node["NodeID"]}
            host = dataclasses.replace(host, slice=node["NodeID"], labels=own)
        hosts.append(host)
    return hosts


def _host(node: Mapping[str, Any]) -> HostNode:
    labels, address = node["Labels"], node["NodeManagerAddress"]
    if _TYPE not in labels:
        raise ValueError(
            f"the node at {address} has TPU chips but no label {_TYPE}; start Ray "
            f"there with TPU_ACCELERATOR_TYPE in its environment, as on other machines"
        )
    named = all(labels.get(key) for key in (_NAME, _WORKER))
    keys = (_NAME, _WORKER) if named else (_NODE,)
    pinned = {key: labels.get(key, node["NodeID"]) for key in keys}
    return HostNode(
        slice=labels[_NAME] if named else node["NodeID"],
        worker=int(labels[_WORKER]) if named else 0,
        address=address,
        chips=int(node["Resources"]["TPU"]),
        type=labels[_TYPE],
        topology=labels.get(_TOPOLOGY, ""),
        labels=pinned,
    )


def slices_of(hosts: Iterable[HostNode]) -> tuple[JoinedSlice, ...]:
    """Return the slices that the hosts make, by name.

    Raises:
        ValueError: a slice lacks hosts, or they disagree.
    """
    by_name: dict[str, list[HostNode]] = {}
    for host in hosts:
        by_name.setdefault(host.slice, []).append(host)
    return tuple(_reached(name, by_name[name]) for name in sorted(by_name))


def _reached(name: str, hosts: Sequence[HostNode]) -> JoinedSlice:
    first, *others = hosts
    for other in others:
        for said in ("type", "topology", "chips"):
            one, two = getattr(first, said), getattr(other, said)
            if one != two:
                raise ValueError(
                    f"slice {name}: worker {first.worker} has {said} {one} and worker "
                    f"{other.worker} {two}; give each slice a TPU_NAME of its own"
                )
    slice = _slice(first)
    workers = [host.worker for host in hosts]
    missing = sorted(set(range(slice.num_hosts)) - set(workers))
    if missing or len(workers) != slice.num_hosts:
        twice = sorted({worker for worker in workers if workers.count(worker) > 1})
        wrong = f"missing: {_some(missing)}" if missing else f"twice: {_some(twice)}"
        raise ValueError(
            f"slice {name} ({slice.name}) has {slice.num_hosts} hosts, and the cluster "
            f"has {len(hosts)}; workers {wrong}; start Ray on each host once (a "
            f"node that is lost is listed for half a minute)"
        )
    by_worker = sorted(hosts, key=lambda host: host.worker)
    return JoinedSlice(name=name, slice=slice, hosts=tuple(by_worker))


def _slice(host: HostNode) -> Slice:
    setting = f"slice {host.slice}: {_TYPE}"
    generation, shape = parse_type(host.type, setting=setting)
    if host.topology:
        shape = parse_sides(host.topology, setting=f"slice {host.slice}: {_TOPOLOGY}")
    chips = {1: (1, 1, 1), 4: (2, 2, 1)}.get(host.chips, shape)
    return make_slice(
        generation, shape, host=chips, setting=f"slice {host.slice}: topology"
    )


def _some(numbers: Sequence[int]) -> str:
    names = list(map(str, numbers))
    return ", ".join(names if len(names) <= 8 else [*names[:7], "..."])


# From slices to seats.


def place(
    slices: Sequence[JoinedSlice],
    *,
    learner_chips: Sequence[int],
    open_learner: bool,
    generators: int | None,
    generator_chips: int,
    learner_slices: int = 1,
) -> Seats:
    """Return who has which chips.

    One slice is cut by `split_slice`.  Of several, `learner_slices` have equal parts of
    the learner; the replicas have boxes of the others, and of what the learner leaves.
    A learner without replicas may have all chips.

    Args:
        slices: of `slices_of`.
        learner_chips: numbers that the learner can use, the best first.
        open_learner: whether the learner gets what the replicas leave; else there is
            one number.
        generators: how many replicas; 0 for as many as fit, None for none.
        generator_chips: of each.
        learner_slices: of the learner, mesh.slices.

    Raises:
        ValueError: no such cut; says which would be.
    """
    largest = max(slices, key=lambda each: each.slice.num_chips)
    most = largest.slice.num_chips * learner_slices
    if learner_chips and min(learner_chips) > most:
        what = "the largest slice" if learner_slices == 1 else "as many slices as that"
        raise ValueError(
            f"the learner's {min(learner_chips)} chips ({_LEARNER}) on mesh.slices = "
            f"{learner_slices} are more than the {most} of {what}, {largest}; lower "
            f"one of the four, or raise mesh.slices and mesh.data"
        )
    if learner_slices > len(slices):
        raise ValueError(
            f"mesh.slices = {learner_slices}, and the cluster has {len(slices)}: "
            f"{', '.join(map(str, slices))}; lower it, or wait for the others"
        )
    if len(slices) == 1 and generators is not None:
        return _within(
            slices[0], learner_chips, open_learner, generators, generator_chips
        )
    for chips in learner_chips:
        for homes in _homes(slices, learner_slices):
            each = chips // learner_slices
            seats = _across(slices, homes, each, generators, generator_chips)
            if seats is not None:
                return seats
    beside, which = "", "; lower one of the two"
    if generators is not None:
        beside = f" and generators.count = {generators} of generators.devices = "
        beside, which = f"{beside}{generator_chips}", "; lower one of the four"
    raise ValueError(
        f"a learner of {_some(learner_chips) or 'any number of'} chips ({_LEARNER}) on "
        f"mesh.slices = {learner_slices}{beside} do not fit "
        f"{', '.join(map(str, slices))}{which}"
    )


def _homes(slices: Sequence[JoinedSlice], count: int) -> list[tuple[int, ...]]:
    """Return the slices that may have the learner: alike ones, the smallest first."""
    order = sorted(range(len(slices)), key=lambda at: slices[at].slice.num_chips)
    alike: dict[Slice, list[int]] = {}
    for at in order:
        kind = dataclasses.replace(slices[at].slice, order=())
        alike.setdefault(kind, []).append(at)
    if count == 1:
        return [(at,) for at in order]
    return [tuple(found[:count]) for found in alike.values() if len(found) >= count]


def _within(
    reached: JoinedSlice,
    learner_chips: Sequence[int],
    open_learner: bool,
    generators: int,
    generator_chips: int,
) -> Seats:
    """Return the seats of one slice."""

    def split(chips: int) -> Any:
        try:
            return split_slice(
                reached.slice,
                learner_chips=chips,
                generators=generators,
                generator_chips=generator_chips,
            )
        except ValueError as error:
            raise ValueError(
                f"on slice {reached}, with learner_chips = {_LEARNER}, generators = "
                f"generators.count, generator_chips = generators.devices: {error}"
            ) from error

    if not open_learner:
        found = split(learner_chips[0])
    else:
        limit = split(0).learner.num_chips
        fitting = [chips for chips in learner_chips if chips <= limit]
        if not fitting:
            raise ValueError(
                f"mesh.fsdp = 0 finds no shards for the learner on slice {reached}: "
                f"beside the generators it has at most {limit} chips, in boxes of "
                f"{_some(box_sizes(reached.slice))}, and none of them suits "
                f"model.size, batch.rows_per_microbatch and the other sides of mesh"
            )
        found = split(fitting[0])
    return Seats(
        slices=(reached,),
        learner=(SlicePart(at=0, box=found.learner),),
        replicas=tuple(SlicePart(at=0, box=box) for box in found.replicas),
    )


def _across(
    slices: Sequence[JoinedSlice],
    homes: Sequence[int],
    each: int,
    generators: int | None,
    generator_chips: int,
) -> Seats | None:
    """Return the seats with `each` chips of the learner on these slices, or None."""
    learner: dict[int, Box] = {}
    for at in homes:
        found = boxes(slices[at].slice, each)
        if not found:
            return None
        learner[at] = found[0]
    order = [at for at in range(len(slices)) if at not in learner] + list(homes)
    parts = []
    if generators is not None:
        parts = [
            SlicePart(at=at, box=box)
            for at in order
            for box in boxes(slices[at].slice, generator_chips, beside=learner.get(at))
        ]
        if len(parts) < max(generators, 1):
            return None
    return Seats(
        slices=tuple(slices),
        learner=tuple(SlicePart(at=at, box=box) for at, box in learner.items()),
        replicas=tuple(parts[: generators or len(parts)]),
    )
