"""TPUs by name: what a device of each can do, and the topologies that are asked for.

A topology is NAME:AxB or NAME:AxBxC, chips along each side of a slice, with `N*` before
it for several slices.  A device is what JAX counts: a chip, or half of a tpu7x.
"""

import dataclasses
import math
import re
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What a device of one kind has; bytes and FLOPs per second of one device.

    `ici_bandwidth` is what a device can send over all its links at once: half of the
    bidirectional figure that the sources give.
    """

    name: str
    sides: int  # of a topology: a 2D or a 3D torus
    most: int  # chips in a slice
    flops: float  # bfloat16
    hbm_bytes: int  # of the data sheet; programs get a little less
    hbm_bandwidth: float
    ici_bandwidth: float
    devices_per_chip: int = 1
    host: tuple[int, int] | None = None  # chips of the largest host, where it is chosen
    options: tuple[tuple[str, str], ...] = ()  # of the compiler's topology

    @property
    def whole_slices(self) -> bool:
        """Whether the compiler takes all devices of a slice or those of one host.

        On a 2D torus it does not route between some hosts of a slice alone.
        """
        return self.sides == 2


_GIB, _GB = 2**30, 1e9
# v4 to v6e: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e, "System
# architecture"; tpu7x: /tpu7x, half a chip for each of its devices.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            sides=3,
            most=4096,
            flops=275e12,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth=1200 * _GB,
            ici_bandwidth=150 * _GB,
            options=(("chip_config_name", "megacore"),),
        ),
        Chip(
            name="v5e",
            sides=2,
            most=256,
            flops=197e12,
            hbm_bytes=16 * _GIB,
            hbm_bandwidth=819 * _GB,
            ici_bandwidth=200 * _GB,
            host=(2, 4),
        ),
        Chip(
            name="v5p",
            sides=3,
            most=8960,
            flops=459e12,
            hbm_bytes=95 * _GIB,
            hbm_bandwidth=2765 * _GB,
            ici_bandwidth=600 * _GB,
        ),
        Chip(
            name="v6e",
            sides=2,
            most=256,
            flops=918e12,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth=1638 * _GB,
            ici_bandwidth=400 * _GB,
            host=(2, 4),
        ),
        Chip(
            name="tpu7x",
            sides=3,
            most=9216,
            flops=2307e12 / 2,
            hbm_bytes=96 * _GIB,
            hbm_bandwidth=7380 / 2 * _GB,
            ici_bandwidth=600 / 2 * _GB,
            devices_per_chip=2,
        ),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Slices of one chip and one shape."""

    chip: Chip
    shape: tuple[int, ...]  # chips along each side
    slices: int = 1

    @property
    def num_devices(self) -> int:
        """Of all slices."""
        return self.slices * math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def name(self) -> str:
        """As it is written."""
        sides = "x".join(map(str, self.shape))
        return f"{f'{self.slices}*' * (self.slices > 1)}{self.chip.name}:{sides}"

    def devices(self) -> list[Any]:
        """Its devices, by slice; they hold no array.

        Raises:
            ValueError: the compiler knows no slice of this shape.
        """
        from jax.experimental import topologies

        options: dict[str, Any] = dict(self.chip.options)
        if self.chip.host:
            sides = zip(self.shape, self.chip.host, strict=True)
            options["chips_per_host_bounds"] = (*map(_common, sides), 1)
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        try:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=name, num_slices=self.slices, **options
            )
        except Exception as error:  # noqa: BLE001  of no public type
            raise ValueError(
                f"--topology={self.name}: the compiler does not take it: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
        # A device of one slice alone has no slice_index.
        order = sorted(
            range(len(found.devices)),
            key=lambda at: (getattr(found.devices[at], "slice_index", 0) or 0, at),
        )
        return [found.devices[at] for at in order]


def _common(sides: tuple[int, int]) -> int:
    """Chips of a host along a side: as many as its largest, if they divide it."""
    return math.gcd(*sides)


def parse_topology(text: str) -> Topology:
    """The topology that a text names.

    Raises:
        ValueError: it is not written as one, or there is no such chip.
    """
    found = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", text)
    known = ", ".join(
        f"{chip.name}:{'x'.join('ABC'[: chip.sides])}" for chip in CHIPS.values()
    )
    if not found or found[2] not in CHIPS:
        raise ValueError(
            f"--topology={text}: choose from {known}, with numbers of chips for the "
            f"letters, and N* before it for N slices (2*v5e:16x16)"
        )
    chip = CHIPS[found[2]]
    shape = tuple(map(int, found[3].split("x")))
    slices = int(found[1] or 1)
    if len(shape) != chip.sides or not all(shape) or not slices:
        raise ValueError(
            f"--topology={text}: {chip.name} is a {chip.sides}D torus; write "
            f"{chip.name}:{'x'.join('ABC'[: chip.sides])} with numbers above 0"
        )
    longest = math.isqrt(chip.most) if chip.sides == 2 else chip.most
    if math.prod(shape) > chip.most or max(shape) > longest:
        raise ValueError(
            f"--topology={text}: a slice of {chip.name} has at most {chip.most} chips"
            + f", {longest}x{longest}" * (chip.sides == 2)
            + f"; for more write slices: 2*{chip.name}:..."
        )
    return Topology(chip=chip, shape=shape, slices=slices)


def part_of(topology: Topology, devices: int, *, setting: str) -> Topology:
    """The most compact rectangle of a 2D slice that has so many devices.

    Raises:
        ValueError: there is none; `setting` says what asked for it.
    """
    each, left = divmod(devices, topology.slices)
    rectangles = [
        (rows, each // rows)
        for rows in range(1, each + 1)
        if each % rows == 0
        and rows <= min(topology.shape)
        and each // rows <= max(topology.shape)
    ]
    if left or not rectangles:
        raise ValueError(
            f"{setting} = {devices} devices are no rectangle of {topology.name}, and "
            f"a program on {topology.chip.name} takes a whole slice or a rectangle of "
            f"its hosts; change {setting}"
        )
    best = min(rectangles, key=lambda sides: (sum(sides), sides))
    return dataclasses.replace(topology, shape=best)
