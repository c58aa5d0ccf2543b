"""Roles of a run on the hosts of a slice: who starts what, with which environment."""

import dataclasses
from collections.abc import Sequence

from scalerl_jax.pod.partition import Box, Split
from scalerl_jax.pod.processes import Process, processes
from scalerl_jax.pod.slices import Slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """A process with chips: a rank of the learner, or one of a replica."""

    name: str  # learner or replica
    number: int  # of the replica, from 0; 0 of the learner
    process: Process

    @property
    def rank(self) -> int:
        """Its place in its job, from 0."""
        return self.process.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host and what runs on it."""

    worker: int
    address: str
    roles: tuple[Role, ...]  # empty: its chips are idle

    @property
    def head(self) -> bool:
        """Return whether the controller, and Ray's head, run here too."""
        return self.worker == 0


def deal(slice: Slice, split: Split, *, addresses: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts of a slice with their roles, by worker.

    Args:
        slice: all of the run's hosts.
        split: of `split_slice`.
        addresses: of the hosts, by worker.

    Raises:
        ValueError: there is not one address for each host.
    """

    def roles(name: str, number: int, box: Box) -> list[Role]:
        return [
            Role(name=name, number=number, process=process)
            for process in processes(slice, box, addresses=addresses)
        ]

    found = roles("learner", 0, split.learner)
    for number, box in enumerate(split.replicas):
        found += roles("replica", number, box)
    return tuple(
        Host(
            worker=worker,
            address=address,
            roles=tuple(role for role in found if role.process.worker == worker),
        )
        for worker, address in enumerate(addresses)
    )
