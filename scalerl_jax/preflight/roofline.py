"""The least time that a program can take on a chip, and what binds it."""

import dataclasses

from scalerl_jax.preflight.chips import Chip
from scalerl_jax.preflight.collectives import Traffic
from scalerl_jax.preflight.flops import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one call if each resource were the only one."""

    compute: float
    hbm: float
    ici: float

    @property
    def seconds(self) -> float:
        """With everything overlapped: a bound from below, not a forecast."""
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
    """Of a call over `devices` devices of a kind.

    Collectives are taken to use all links of a device at once; the slower network
    between slices is left out.
    """
    return Roofline(
        compute=work.passes(float32_head=float32_head) / devices / chip.flops,
        hbm=work.bytes / devices / chip.hbm_bandwidth,
        ici=sum(each.sent_bytes for each in traffic.values()) / chip.ici_bandwidth,
    )
