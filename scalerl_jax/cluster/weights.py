"""Publications of the learner's ranks, as the controller hands them to replicas."""

import dataclasses
from collections.abc import Callable, Sequence

from scalerl_jax.parallel.channels import Parcel
from scalerl_jax.parallel.offers import Offer, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsOf:
    """A publication, as it goes to replicas: texts that say where the bytes are."""

    policy_version: int
    base_version: int | None  # what a replica must hold; None: nothing
    parcel: Callable[[], Parcel]
    # The same version by itself, for who holds no base; None: it comes.
    whole: Callable[[], Parcel | None]

    def to_replica(self, held_version: int) -> Parcel | None:
        """Return what a replica can use that was given that version before."""
        if held_version in (self.policy_version, self.base_version):
            return self.parcel()
        return self.parcel() if self.base_version is None else self.whole()


def merged(parts: Sequence[Parcel]) -> tuple[Parcel, int | None]:
    """Return what all ranks offer, and the version that its deltas are against."""
    publication = merge([Offer.from_json(part.text) for part in parts])
    handles = {name: handle for part in parts for name, handle in part.handles.items()}
    parcel = Parcel(text=publication.to_json(), handles=handles)
    return parcel, publication.base_version
