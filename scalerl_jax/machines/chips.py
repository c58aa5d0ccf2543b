"""TPUs and GPUs by name, with the data-sheet figures of one device.

A device is the unit that JAX counts: a chip, or half of a tpu7x.
"""

import dataclasses
import os
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU or GPU; bytes and FLOPs per second are those of one device.

    `ici_bandwidth` is what a device can send over all its links (a GPU's NVLink) at
    once: half of the bidirectional figure that the sources give.  `host_bandwidth` is a
    chip's share of its host's network outside the slice.
    """

    name: str
    sides: int  # dimensions of the torus: 2 or 3; 1 for the GPUs of a host
    most: int  # chips in the largest slice, or host of GPUs
    flops: float  # bfloat16
    hbm_bytes: int  # of the data sheet; programs get a little less
    hbm_bandwidth: float
    ici_bandwidth: float
    host_bandwidth: float
    devices_per_chip: int = 1
    host: tuple[int, int] | None = None  # chips of the largest host, if hosts differ
    options: tuple[tuple[str, str], ...] = ()  # for the compiler's topology
    platform: Literal["tpu", "gpu"] = "tpu"
    capability: str = ""  # of a GPU: its compute capability
    kind: str = ""  # of a GPU: JAX's `device_kind`

    @property
    def program_bytes(self) -> float:
        """Bytes of a device that JAX gives to programs; on TPUs a little less.

        On a GPU they are the share that JAX allocates when it starts:
        https://docs.jax.dev/en/latest/gpu_memory_allocation.html
        """
        share = memory_fraction() if self.platform == "gpu" else 1.0
        return share * self.hbm_bytes

    @property
    def whole_slices(self) -> bool:
        """True if the compiler accepts only a whole slice, or devices of one host.

        On a 2D torus it does not route between some hosts of a slice only.
        """
        return self.sides == 2


MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"  # JAX's setting for GPUs
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # deprecated


def memory_fraction() -> float:
    """Return the share of a GPU's memory that JAX allocates for programs.

    Raises:
        ValueError: the variable that sets it is no share.
    """
    name = MEMORY_FRACTION if os.environ.get(MEMORY_FRACTION) else _OLD_NAME
    given = os.environ.get(name) or "0.75"
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ValueError(
            f"{name} = {given!r} must be a share of a GPU's memory above 0 "
            f"and at most 1; JAX's default is 0.75"
        )
    return share


_G = 2**30
# v4 to v6e: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e, "System
# architecture"; tpu7x: /tpu7x, half a chip per device.  Network: "data center network
# bandwidth" on these pages, in Gbit/s per chip: 50 for v4 and v5p, 25 for v5e, 100 for
# the others.
_MEGACORE = (("chip_config_name", "megacore"),)

# a100 to h200: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM, FLOPs
# without sparsity; memory as the driver reports it.  Network: a card of 200 (A100) or
# 400 Gbit/s for each GPU, as in DGX.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 3, 4096, 275e12, 32 * _G, 1200e9, 150e9, 6.25e9, options=_MEGACORE),
        Chip("v5e", 2, 256, 197e12, 16 * _G, 819e9, 200e9, 3.125e9, host=(2, 4)),
        Chip("v5p", 3, 8960, 459e12, 95 * _G, 2765e9, 600e9, 6.25e9),
        Chip("v6e", 2, 256, 918e12, 32 * _G, 1638e9, 400e9, 12.5e9, host=(2, 4)),
        Chip(
            "tpu7x", 3, 9216, 2307e12 / 2, 96 * _G, 7380e9 / 2, 600e9 / 2, 12.5e9 / 2, 2
        ),
        Chip(
            *("a100", 1, 8, 312e12, 85_100_068_864, 2039e9, 300e9, 25e9),
            platform="gpu",
            capability="8.0",
            kind="NVIDIA A100-SXM4-80GB",
        ),
        Chip(
            *("h100", 1, 8, 989e12, 84_942_979_072, 3352e9, 450e9, 50e9),
            platform="gpu",
            capability="9.0",
            kind="NVIDIA H100 80GB HBM3",
        ),
        Chip(
            *("h200", 1, 8, 989e12, 151_397_597_184, 4800e9, 450e9, 50e9),
            platform="gpu",
            capability="9.0",
            kind="NVIDIA H200",
        ),
    )
}
# JAX's `device_kind` -> name of the chip.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    **{chip.kind: name for name, chip in CHIPS.items() if chip.kind},
}


def chip_of(kind: str) -> Chip | None:
    """Return the chip of a JAX `device_kind`; None if it is not in `CHIPS`."""
    return CHIPS.get(_KINDS.get(kind, ""))
