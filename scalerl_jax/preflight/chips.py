"""TPUs by name, topologies of them, and the least that programs cost there.

A topology is NAME:AxB or NAME:AxBxC, chips along each side of a slice, with `N*` before
it for several slices.  A device is what JAX counts: a chip, or half of a tpu7x.

Work is counted by hand from the model's shapes, for one call and all devices of its
mesh.  A row is taken to be one sequence, the most that causal attention can cost.
"""

import dataclasses
import math
import re
from typing import Any

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.preflight.hlo import Traffic


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU; bytes and FLOPs per second are those of one device.

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
        """Return whether the compiler takes a whole slice or one host's devices alone.

        On a 2D torus it does not route between some hosts of a slice alone.
        """
        return self.sides == 2


_G = 2**30
# v4 to v6e: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e, "System
# architecture"; tpu7x: /tpu7x, half a chip for each of its devices.
_MEGACORE = (("chip_config_name", "megacore"),)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 3, 4096, 275e12, 32 * _G, 1200e9, 150e9, options=_MEGACORE),
        Chip("v5e", 2, 256, 197e12, 16 * _G, 819e9, 200e9, host=(2, 4)),
        Chip("v5p", 3, 8960, 459e12, 95 * _G, 2765e9, 600e9),
        Chip("v6e", 2, 256, 918e12, 32 * _G, 1638e9, 400e9, host=(2, 4)),
        Chip("tpu7x", 3, 9216, 2307e12 / 2, 96 * _G, 7380e9 / 2, 600e9 / 2, 2),
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
        """Devices of all slices."""
        return self.slices * math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def name(self) -> str:
        """The topology as it is written."""
        sides = "x".join(map(str, self.shape))
        return f"{f'{self.slices}*' * (self.slices > 1)}{self.chip.name}:{sides}"

    def devices(self) -> list[Any]:
        """Return its devices, by slice; they hold no array.

        Raises:
            ValueError: the compiler knows no slice of this shape.
        """
        from jax.experimental import topologies

        options: dict[str, Any] = dict(self.chip.options)
        if self.chip.host:
            # Chips of a host along a side: as many as its largest, if they divide it.
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
        except Exception as error:  # noqa: BLE001  of no public type
            raise ValueError(
                f"--topology={self.name}: the compiler does not take it: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
        # A device of one slice alone has no slice_index.
        return sorted(
            found.devices, key=lambda one: getattr(one, "slice_index", 0) or 0
        )


def parse_topology(text: str) -> Topology:
    """Return the topology that a text names.

    Raises:
        ValueError: it is not written as one, or there is no such chip.
    """
    written = {
        chip.name: f"{chip.name}:{'x'.join('ABC'[: chip.sides])}"
        for chip in CHIPS.values()
    }
    found = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", text)
    if not found or found[2] not in CHIPS:
        raise ValueError(
            f"--topology={text}: choose from {', '.join(written.values())}, with "
            f"numbers of chips for the letters, and N* before it for N slices "
            f"(2*v5e:16x16)"
        )
    chip = CHIPS[found[2]]
    shape = tuple(map(int, found[3].split("x")))
    slices = int(found[1] or 1)
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


def part_of(topology: Topology, devices: int, *, setting: str) -> Topology:
    """Return the most compact rectangle of a 2D slice that has so many devices.

    Raises:
        ValueError: there is none; `setting` says what asked for it.
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


# -- the least work -------------------------------------------------------------------

# A product of float32 operands at the highest precision is six bfloat16 products on a
# TPU: each operand is three bfloat16 terms, and of the nine products the three
# smallest are left out.
HIGHEST_PASSES = 6
# Matmuls of queries x keys in each pass of attention: scores and mixing; of the
# backward pass, a kernel that makes the scores once, and the TPU's two kernels.
FORWARD_ATTENTION = 2
BACKWARD_ATTENTION = {"blockwise": 5, "cudnn": 5, "splash": 7}
# Remat policy -> whether (the linears, the attention) of a layer are made again.
RECOMPUTED = {
    "none": (False, False),
    "dots": (False, False),
    "attention": (True, False),
    "full": (True, True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs, those of float32 products apart, and bytes to and from HBM."""

    layers: float = 0.0  # bfloat16 products of the layers, attention included
    head: float = 0.0  # counted once, whatever its precision
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return self.layers + self.head

    def passes(self, *, float32_head: bool) -> float:
        """Return the FLOPs of the matrix units: a float32 product is several."""
        return self.layers + self.head * (HIGHEST_PASSES if float32_head else 1)

    def __add__(self, other: "Work") -> "Work":
        """Return both."""
        mine, theirs = vars(self), vars(other)
        return Work(**{name: mine[name] + theirs[name] for name in mine})

    def __mul__(self, count: float) -> "Work":
        """Return the work done several times."""
        return Work(**{name: value * count for name, value in vars(self).items()})


def _linears(
    arch: Architecture, tokens: float, copies: int = 1, *, last: bool = True
) -> Work:
    """Return the matmuls of a layer, without the `last` one if it is False.

    A value has 2 bytes; each of `copies` replicas reads the weights.
    """
    width, queries = arch.hidden_size, arch.num_heads * arch.head_dim
    keys, ffn = arch.num_kv_heads * arch.head_dim, arch.ffn_size
    sides = [(width, queries), (width, keys), (width, keys), (queries, width)]
    sides += [(width, ffn), (width, ffn), *[(ffn, width)] * last]
    return Work(
        layers=sum(2 * tokens * n * k for n, k in sides),
        bytes=sum(2 * (tokens * (n + k) + copies * n * k) for n, k in sides),
    )


def _attention(arch: Architecture, rows: float, length: float, matmuls: int) -> Work:
    """Return the attention of one layer over whole causal rows."""
    seen = length * (length + 1) / 2
    values = rows * length * arch.head_dim
    return Work(
        layers=matmuls * 2 * rows * seen * arch.num_heads * arch.head_dim,
        bytes=2 * values * (2 * arch.num_heads + 2 * arch.num_kv_heads),
    )


def _cached(
    arch: Architecture, tokens: float, rows: float, context: float, itemsize: int
) -> Work:
    """Return a layer of tokens that attend to `rows` cached sequences of `context`."""
    heads = arch.head_dim * arch.num_heads
    return _linears(arch, tokens) + Work(
        layers=4 * tokens * context * heads,
        bytes=rows * context * 2 * arch.num_kv_heads * arch.head_dim * itemsize,
    )


def _head(
    arch: Architecture, tokens: float, copies: int = 1, *, float32_head: bool
) -> Work:
    """Return one product with the head."""
    width, vocabulary = arch.hidden_size, arch.vocab_size
    moved = tokens * (width + vocabulary) + copies * width * vocabulary
    return Work(
        head=2 * tokens * width * vocabulary, bytes=(4 if float32_head else 2) * moved
    )


def microbatch(
    arch: Architecture,
    *,
    rows: int,
    row_tokens: int,
    devices: int,
    tensor: int,
    remat: str,
    attention: str,
    float32_head: bool,
    param_bytes: int,
) -> Work:
    """Return the forward and backward pass of a microbatch, and its gradients added up.

    The head is multiplied four times: forward, again for the backward pass, and for
    the gradients of its two operands.
    """
    tokens, copies = rows * row_tokens, devices // tensor
    again, attention_again = RECOMPUTED[remat]
    layer = _linears(arch, tokens, copies) * 3
    if again:  # nobody needs the last product again
        layer += _linears(arch, tokens, copies, last=False)
    matmuls = FORWARD_ATTENTION * (1 + attention_again) + BACKWARD_ATTENTION[attention]
    layer += _attention(arch, rows, row_tokens, matmuls)
    head = _head(arch, tokens, copies, float32_head=float32_head) * 4
    # Params are read, the gradients so far are read and written.
    state = Work(bytes=arch.num_params * (param_bytes + 4 + 4))
    return layer * arch.num_layers + head + state


def optimizer_update(arch: Architecture, *, param_bytes: int) -> Work:
    """Return an update: params and both moments read and written, gradients read twice.

    The second time is for their norm.
    """
    return Work(bytes=arch.num_params * (2 * param_bytes + 4 * 4 + 2 * 4))


def decode(
    arch: Architecture,
    *,
    rows: int,
    context: float,
    steps: int,
    itemsize: int,
    float32_head: bool,
) -> Work:
    """Return `steps` tokens in each of `rows` sequences that hold `context` tokens.

    Heads are cut over the devices: together they read everything once.  The output
    head is kept in the sampler's dtype, and made float32 on its way.
    """
    layer = _cached(arch, rows, rows, context, itemsize)
    return (layer * arch.num_layers + _head(arch, rows, float32_head=float32_head)) * (
        steps
    )


def prefill(arch: Architecture, *, tokens: int, context: float, itemsize: int) -> Work:
    """Return a chunk of prompt tokens, the last of `context`; it has no head."""
    return _cached(arch, tokens, 1, context, itemsize) * arch.num_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one call if each resource were the only one."""

    compute: float = 0.0
    hbm: float = 0.0
    ici: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds with everything overlapped: a bound from below, not a forecast."""
        return max(self.compute, self.hbm, self.ici)

    @property
    def bound_by(self) -> str:
        """The resource that takes the longest."""
        return max(("compute", "hbm", "ici"), key=lambda name: getattr(self, name))


def roofline(
    chip: Chip,
    work: Work,
    traffic: dict[str, Traffic],
    *,
    devices: int,
    float32_head: bool,
) -> Roofline:
    """Return the bounds of a call over `devices` devices of a kind.

    Collectives are taken to use all links of a device at once; the slower network
    between slices is left out.
    """
    return Roofline(
        compute=work.passes(float32_head=float32_head) / devices / chip.flops,
        hbm=work.bytes / devices / chip.hbm_bandwidth,
        ici=sum(each.sent_bytes for each in traffic.values()) / chip.ici_bandwidth,
    )
