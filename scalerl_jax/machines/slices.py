"""TPU slices: which ones can be rented, their hosts, and the hosts' positions.

A slice is a box of chips, given by three sides; the third is 1 on v5e and v6e, whose
slices are flat.  A host is a virtual machine with a box of these chips.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

Bounds = tuple[int, int, int]  # along x, y and z


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The slices of a TPU generation."""

    name: str
    types: tuple[str, ...]  # prefixes of its accelerator types, before the number
    counted: int  # units per chip in a type's number: 2 TensorCores, or 1 chip
    shapes: tuple[Bounds, ...]  # of its slices, the smallest first

    @property
    def flat(self) -> bool:
        """True if every slice has only two sides, as on a 2D torus."""
        return all(shape[2] == 1 for shape in self.shapes)

    def written(self, shape: Bounds) -> str:
        """Return a shape as text: 4x4x4, or 4x4 for a flat slice."""
        sides = shape[:2] if self.flat and shape[2] == 1 else shape
        return "x".join(map(str, sides))

    def listed(self, shapes: Iterable[Bounds]) -> str:
        """Return the list of shapes for an error message."""
        names = [self.written(shape) for shape in shapes]
        several = [*names[:10], "...", names[-1]] if len(names) > 12 else names
        return ", ".join(several)


def _cubes(*most: int) -> tuple[Bounds, ...]:
    """Return the shapes made of cubes of 4x4x4 chips, the smallest first."""
    sides = [range(4, side + 1, 4) for side in most]
    shapes = [(x, y, z) for x, y, z in itertools.product(*sides) if x <= y <= z]
    # Among shapes of one size the most compact comes first.
    return tuple(sorted(shapes, key=lambda shape: (math.prod(shape), sum(shape))))


_BELOW_A_CUBE: tuple[Bounds, ...] = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT: tuple[Bounds, ...] = (
    *((1, 1, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1)),
    *((4, 8, 1), (8, 8, 1), (8, 16, 1), (16, 16, 1)),
)
# docs.cloud.google.com/tpu/docs/v4, /v5p, /v5e and /v6e; all but the first names of a
# generation are those of machines in Kubernetes.
GENERATIONS = {
    each.name: each
    for each in (
        Generation(
            name="v4",
            types=("v4", "tpu-v4-podslice"),
            counted=2,
            shapes=(*_BELOW_A_CUBE, *_cubes(12, 16, 16)),
        ),
        Generation(
            name="v5p",
            types=("v5p", "tpu-v5p-slice"),
            counted=2,
            shapes=(*_BELOW_A_CUBE, *_cubes(16, 16, 24)),
        ),
        Generation(
            name="v5e",
            types=("v5litepod", "v5e", "tpu-v5-lite-podslice", "tpu-v5-lite-device"),
            counted=1,
            shapes=_FLAT,
        ),
        Generation(name="v6e", types=("v6e", "tpu-v6e-slice"), counted=1, shapes=_FLAT),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice and its hosts; `make_slice` checks that it exists."""

    generation: str
    topology: Bounds  # chips along each side
    host: Bounds  # chips of a host along each side
    order: tuple[int, ...] = ()  # worker -> position; empty: worker n is at position n

    @property
    def kind(self) -> Generation:
        """The generation's entry."""
        return GENERATIONS[self.generation]

    @property
    def name(self) -> str:
        """The slice's text form: v5p:4x4x4."""
        return f"{self.generation}:{self.kind.written(self.topology)}"

    @property
    def type(self) -> str:
        """The slice's accelerator type: v5p-128."""
        return f"{self.kind.types[0]}-{self.num_chips * self.kind.counted}"

    @property
    def num_chips(self) -> int:
        """Number of chips of all hosts."""
        return math.prod(self.topology)

    @property
    def chips_per_host(self) -> int:
        """Number of chips of a host."""
        return math.prod(self.host)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.num_chips // self.chips_per_host

    @property
    def corners(self) -> tuple[Bounds, ...]:
        """The chip nearest the origin of each worker's host, by worker.

        Positions are counted along x first, then y, then z.  Workers of TPU VMs are
        numbered like this.  Kubernetes numbers pods before it places them: see `order`.
        """
        places = [
            (x, y, z)
            for z in range(0, self.topology[2], self.host[2])
            for y in range(0, self.topology[1], self.host[1])
            for x in range(0, self.topology[0], self.host[0])
        ]
        return tuple(places[place] for place in self.order or range(len(places)))


def make_slice(
    generation: str,
    topology: Bounds,
    *,
    host: Bounds | None = None,
    order: tuple[int, ...] = (),
    setting: str = "topology",
) -> Slice:
    """Return the slice of this shape.

    Args:
        generation: one of `GENERATIONS`.
        topology: chips along each side.
        host: chips of a host; None: unknown.  Eight chips of v5e and v6e are by default
            one host; they can also be two hosts of 2x2.
        order: position of each worker; empty: worker n is at position n.
        setting: name of the topology in error messages.

    Raises:
        ValueError: no such slice, host or order exists.
    """
    kind = choose_generation(generation, setting=setting)
    x, y, z = topology
    # Some machines report the bounds of a flat slice the other way, 4,2,1.
    if topology not in kind.shapes and not (kind.flat and (y, x, z) in kind.shapes):
        raise ValueError(
            f"{setting} = {kind.written(topology)} is no slice of {generation}; "
            f"choose from {kind.listed(kind.shapes)}"
        )
    alone = kind.flat and math.prod(topology) <= 8  # the whole slice in one host
    hosts: tuple[Bounds, ...] = (topology, (2, 2, 1)) if alone else ((2, 2, 1),)
    hosts = tuple(dict.fromkeys(each for each in hosts if tiles(each, topology)))
    found = Slice(
        generation=generation, topology=topology, host=host or hosts[0], order=order
    )
    if found.host not in hosts:
        raise ValueError(
            f"host = {kind.written(found.host)} chips is no host of {found.name}; "
            f"choose from {kind.listed(hosts)}"
        )
    if order and sorted(order) != list(range(found.num_hosts)):
        raise ValueError(
            f"order = {order} must name each of the {found.num_hosts} places of "
            f"{found.name}'s hosts once, from 0"
        )
    return found


def tiles(shape: Bounds, around: Bounds) -> bool:
    """Return True if adjacent boxes of `shape` exactly fill the box `around`."""
    return all(whole % side == 0 for side, whole in zip(shape, around, strict=True))


def order_of(slice: Slice, seen: Sequence[Iterable[Sequence[int]]]) -> tuple[int, ...]:
    """Return the position of each worker, from the coordinates of its chips.

    Args:
        slice: a slice with unknown `order`.
        seen: by worker, the `coords` of its local devices in JAX, from a job on the
            whole slice.

    Raises:
        ValueError: a worker's chips are not those of a host of the slice.
    """
    plain = dataclasses.replace(slice, order=())
    places = {corner: place for place, corner in enumerate(plain.corners)}
    if len(seen) != slice.num_hosts:
        raise ValueError(
            f"the chips of {len(seen)} workers were seen, but {slice.name} has "
            f"{slice.num_hosts}; look from a job on the whole slice"
        )
    order = []
    for worker, chips in enumerate(seen):
        x, y, z = (
            min(along) for along in zip(*((*c, 0)[:3] for c in chips), strict=True)
        )
        if (x, y, z) not in places:
            raise ValueError(
                f"worker {worker} has its first chip at {(x, y, z)}, where no host of "
                f"{slice.name} begins; look from a job on the whole slice"
            )
        order.append(places[x, y, z])
    return make_slice(
        slice.generation, slice.topology, host=slice.host, order=tuple(order)
    ).order


def choose_generation(name: str, *, setting: str) -> Generation:
    """Return the generation of this name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in GENERATIONS:
        raise ValueError(
            f"{setting}: {name!r} is no TPU whose slices can be shared; choose from "
            f"{', '.join(GENERATIONS)}"
        )
    return GENERATIONS[name]


def parse_sides(text: str, *, setting: str) -> Bounds:
    """Parse sides from text like 4x4x4, 4x4 or 2,2,1.

    Raises:
        ValueError: the text has another form.
    """
    sides = text.strip().replace(",", "x")
    if not re.fullmatch(r"[1-9]\d{,17}(x[1-9]\d{,17}){1,2}", sides):
        raise ValueError(
            f"{setting} = {text!r}: write the chips along each side, above 0: 4x4x4 "
            f"for v4 and v5p, 4x4 for v5e and v6e"
        )
    x, y, z = (*map(int, sides.split("x")), 1)[:3]
    return x, y, z


def parse_type(text: str, *, setting: str = "accelerator type") -> tuple[str, Bounds]:
    """Return generation and topology of an accelerator type, like v5p-128 or v6e-16.

    The number counts TensorCores on v4 and v5p, two per chip, and chips on v5e and v6e.
    Among topologies with that number of chips the most compact one is returned.

    Raises:
        ValueError: the type is unknown.
    """
    found = re.fullmatch(r"(.+)-([1-9]\d{,17})", text.strip())
    kind = generation_of(found[1]) if found else None
    if not found or not kind:
        known = ", ".join(f"{each.types[0]}-N" for each in GENERATIONS.values())
        raise ValueError(
            f"{setting} = {text!r} is no type of TPU whose slices can be shared; "
            f"choose from {known}"
        )
    count = int(found[2])
    shapes = [each for each in kind.shapes if math.prod(each) * kind.counted == count]
    if not shapes:
        counts = sorted({math.prod(each) * kind.counted for each in kind.shapes})
        near = sorted(sorted(counts, key=lambda known: abs(known - count))[:4])
        unit = "TensorCores, two a chip" if kind.counted == 2 else "chips"
        raise ValueError(
            f"{setting} = {text!r}: no slice of {kind.name} has {count} {unit}; the "
            f"nearest are {', '.join(f'{kind.types[0]}-{known}' for known in near)}"
        )
    return kind.name, shapes[0]


def generation_of(text: str) -> Generation | None:
    """Return the generation of a type given without its number, or None."""
    return next((each for each in GENERATIONS.values() if text in each.types), None)


def parse_slice(text: str, *, host: Bounds | None = None) -> Slice:
    """Parse a slice from text like v5p:4x4x4, or from a type like v5p-128.

    Raises:
        ValueError: the text names no slice.
    """
    if ":" not in text:
        return make_slice(*parse_type(text, setting="slice"), host=host)
    generation, sides = text.split(":", 1)
    kind = choose_generation(generation, setting=f"slice = {text!r}")
    shape = parse_sides(sides, setting="slice")
    if (len(sides.split("x")) == 2) != kind.flat:
        raise ValueError(
            f"slice = {text!r}: {generation} has {2 if kind.flat else 3} sides; write "
            f"{generation}:{'AxB' if kind.flat else 'AxBxC'}"
        )
    return make_slice(generation, shape, host=host, setting=f"slice = {text!r}: sides")
