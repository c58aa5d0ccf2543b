"""TPUs by name, with the data-sheet figures of one device.

A device is the unit that JAX counts: a chip, or half of a tpu7x.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU; bytes and FLOPs per second are those of one device.

    `ici_bandwidth` is what a device can send over all its links at once: half of the
    bidirectional figure that the sources give.  `host_bandwidth` is a chip's share of
    its host's network outside the slice.
    """

    name: str
    sides: int  # dimensions of the torus: 2 or 3
    most: int  # chips in the largest slice
    flops: float  # bfloat16
    hbm_bytes: int  # of the data sheet; programs get a little less
    hbm_bandwidth: float
    ici_bandwidth: float
    host_bandwidth: float
    devices_per_chip: int = 1
    host: tuple[int, int] | None = None  # chips of the largest host, if hosts differ
    options: tuple[tuple[str, str], ...] = ()  # for the compiler's topology

    @property
    def whole_slices(self) -> bool:
        """True if the compiler accepts only a whole slice, or devices of one host.

        On a 2D torus it does not route between some hosts of a slice only.
        """
        return self.sides == 2


_G = 2**30
# v4 to v6e: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e, "System
# architecture"; tpu7x: /tpu7x, half a chip per device.  Network: "data center network
# bandwidth" on these pages, in Gbit/s per chip: 50 for v4 and v5p, 25 for v5e, 100 for
# the others.
_MEGACORE = (("chip_config_name", "megacore"),)
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
}


def chip_of(kind: str) -> Chip | None:
    """Return the chip of a JAX `device_kind`; None if it is not in `CHIPS`."""
    return CHIPS.get(_KINDS.get(kind, ""))
