"""Parse the text of a topology, and compute rooflines of programs on it.

A topology is NAME:AxB or NAME:AxBxC, chips along each side of a slice, with the prefix
`N*` for several slices.  Google's types (v5p-128, v5litepod-16) are accepted too, and
NAME:A is A GPUs of a host.
"""

import dataclasses
import importlib.util
import math
import re
from typing import Any

from scalerl_jax.machines.chips import CHIPS, Chip
from scalerl_jax.machines.slices import parse_type
from scalerl_jax.planning.work import Work
from scalerl_jax.preflight import gpus
from scalerl_jax.preflight.collectives import Traffic

_MOST_SLICES = 1024  # Google's largest jobs have a few hundred


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """One or more slices of equal chips and shape."""

    chip: Chip
    shape: tuple[int, ...]  # chips along each side
    slices: int = 1

    @property
    def num_devices(self) -> int:
        """Number of devices in all slices."""
        return self.slices * math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def name(self) -> str:
        """The topology's text form: v5p:4x4x4."""
        sides = "x".join(map(str, self.shape))
        return f"{f'{self.slices}*' * (self.slices > 1)}{self.chip.name}:{sides}"

    def devices(self) -> list[Any]:
        """Return the devices, ordered by slice; they cannot hold arrays.

        Raises:
            ValueError: the compiler is not installed, or has no slice of this shape.
        """
        check_compiler(self)
        if self.chip.platform == "gpu":
            return gpus.devices(self.chip, self.num_devices)
        from jax.experimental import topologies

        options: dict[str, Any] = dict(self.chip.options)
        if self.chip.host:
            # Chips of a host along a side: the greatest divisor shared with the side.
            sides = zip(self.shape, self.chip.host, strict=True)
            options["chips_per_host_bounds"] = (*(math.gcd(*each) for each in sides), 1)
        one = dataclasses.replace(self, slices=1)
        try:
            found = topologies.get_topology_desc(
                platform="tpu",
                topology_name=one.name,
                num_slices=self.slices,
                **options,
            )
        except Exception as error:  # its type is not public
            raise ValueError(
                f"--topology={self.name}: the compiler refuses it: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
        # Devices of a single slice have no slice_index.
        return sorted(
            found.devices, key=lambda one: getattr(one, "slice_index", 0) or 0
        )


def parse_topology(text: str) -> Topology:
    """Parse a topology, given as sides or as an accelerator type.

    Raises:
        ValueError: the text is malformed, or names an unknown chip or shape.
    """
    written = {
        chip.name: f"{chip.name}:{'x'.join('ABC'[: chip.sides])}"
        for chip in CHIPS.values()
    }
    if typed := re.fullmatch(r"(?:([1-9]\d{,17})\*)?([a-z0-9-]+-\d{1,18})", text):
        name, sides = parse_type(typed[2], setting=f"--topology={text}")
        shape = sides[: CHIPS[name].sides]
        return Topology(
            chip=CHIPS[name], shape=shape, slices=_slices(typed[1] or "1", text)
        )
    found = re.fullmatch(r"(?:(\d{1,18})\*)?([a-z0-9]+):(\d{1,18}(?:x\d{1,18})*)", text)
    if not found or found[2] not in CHIPS:
        raise ValueError(
            f"--topology={text}: choose from {', '.join(written.values())}, with "
            f"numbers of chips for the letters, or an accelerator type like v5p-128, "
            f"and N* before it for N slices (2*v5e:16x16)"
        )
    chip = CHIPS[found[2]]
    shape = tuple(map(int, found[3].split("x")))
    slices = _slices(found[1] or "1", text)
    if chip.platform == "gpu":
        if len(shape) != 1 or not 0 < shape[0] <= chip.most or slices != 1:
            raise ValueError(
                f"--topology={text}: GPUs are compiled for one host; write "
                f"{chip.name}:N, with N from 1 to {chip.most}"
            )
        return Topology(chip=chip, shape=shape)
    if len(shape) != chip.sides or not all(shape) or not slices:
        raise ValueError(
            f"--topology={text}: {chip.name} is a {chip.sides}D torus; write "
            f"{written[chip.name]} with numbers above 0"
        )
    longest = math.isqrt(chip.most) if chip.sides == 2 else chip.most
    if math.prod(shape) > chip.most or max(shape) > longest:
        raise ValueError(
            f"--topology={text}: a slice of {chip.name} has at most {chip.most} chips"
            + f", {longest}x{longest}" * (chip.sides == 2)
            + f"; for more write slices: 2*{chip.name}:..."
        )
    return Topology(chip=chip, shape=shape, slices=slices)


def check_compiler(topology: Topology) -> None:
    """Raise ValueError if the compiler for a topology's devices is not installed."""
    name, extra = "TPU", "tpu"
    installed = importlib.util.find_spec("libtpu") is not None
    if topology.chip.platform == "gpu":
        name, extra, installed = "GPU", "cuda", gpus.is_installed()
    if not installed:
        raise ValueError(
            f"--topology={topology.name}: the {name} compiler is not installed; on any "
            f'Linux machine: pip install -e ".[{extra}]"'
        )


def _slices(number: str, text: str) -> int:
    """Parse and check the number of slices in a topology's text."""
    if int(number) > _MOST_SLICES:
        raise ValueError(
            f"--topology={text}: {number} slices; a job has at most {_MOST_SLICES}"
        )
    return int(number)


def part_of(topology: Topology, devices: int, *, setting: str) -> Topology:
    """Return the most compact rectangle of a 2D slice with `devices` devices in all.

    Raises:
        ValueError: no rectangle has them; the message names `setting`.
    """
    each, left = divmod(devices, topology.slices)
    rectangles = [
        (rows, each // rows)
        for rows in range(1, min(topology.shape) + 1)
        if each % rows == 0 and each // rows <= max(topology.shape)
    ]
    if left or not each or not rectangles:
        raise ValueError(
            f"{setting} = {devices} devices are no rectangle of {topology.name}, and "
            f"a program on {topology.chip.name} takes a whole slice or a rectangle of "
            f"its hosts; change {setting}"
        )
    best = min(rectangles, key=lambda sides: (sum(sides), sides))
    return dataclasses.replace(topology, shape=best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one call for each resource, as if it were the only limit."""

    compute: float = 0.0
    hbm: float = 0.0
    ici: float = 0.0
    dcn: float = 0.0  # the network between slices

    @property
    def seconds(self) -> float:
        """Seconds if all resources overlap: a lower bound, not a forecast."""
        return max(self.compute, self.hbm, self.ici, self.dcn)

    @property
    def bound_by(self) -> str:
        """The resource that takes the longest."""
        names = ("compute", "hbm", "ici", "dcn")
        return max(names, key=lambda name: getattr(self, name))


def roofline(
    chip: Chip,
    work: Work,
    traffic: dict[str, Traffic],
    *,
    devices: int,
    links: float = 1.0,
) -> Roofline:
    """Return the roofline of a call on `devices` equal devices.

    Collectives use the share `links` (see `link_share`) of a device's links at once,
    and between slices a device's share of its host's network.
    """
    sent = sum(each.sent_bytes for each in traffic.values())
    sent_far = sum(each.dcn_bytes for each in traffic.values())
    return Roofline(
        compute=work.passes / devices / chip.flops,
        hbm=work.bytes / devices / chip.hbm_bandwidth,
        ici=sent / (chip.ici_bandwidth * links),
        dcn=sent_far / chip.host_bandwidth,
    )


def link_share(box: Topology) -> float:
    """Return the share of a chip's links that rings over a box of chips can use.

    A chip has two links along each side of the box.  A ring uses both if the side is
    closed (has wraparound links): if it is a multiple of 4 chips on a 3D torus, of 16
    on a 2D one.  A side of two chips, or an open line of more, uses one of the two.  A
    side of one chip uses none.

    Google, "TPU v4", https://arxiv.org/abs/2304.01433, section 2; the sides of v5e and
    v6e are closed only in whole slices (docs.cloud.google.com/tpu/docs/v5e).
    """
    closed = 4 if box.chip.sides == 3 else 16

    if box.chip.platform == "gpu":
        return 1.0  # a switch joins all

    def side(length: int) -> float:
        if length == 1:
            return 0.0
        return 1.0 if length % closed == 0 else 0.5

    share = sum(side(length) for length in box.shape) / len(box.shape)
    return share or 1.0  # a single chip: tpu7x has two devices on it
