"""The rule that assigns groups to replicas, in runs and in simulations."""

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Protocol, TypeVar


class Roomy(Protocol):
    """A replica to which groups can be assigned."""

    @property
    def up(self) -> bool:
        """Return whether the replica has reported."""
        ...

    @property
    def room(self) -> int:
        """Number of groups that the replica can start now."""
        ...

    @property
    def version(self) -> int:
        """Policy version with which the replica starts its next group; -1: none yet."""
        ...


class Ticketed(Protocol):
    """An order, or a group to be sampled."""

    @property
    def ticket(self) -> int:
        """Return the number that the queue has given to it."""
        ...


R = TypeVar("R", bound=Roomy)
T = TypeVar("T", bound=Ticketed)


def freest(replicas: Iterable[R]) -> R | None:
    """Return the replica that gets the next group: the first with the most room.

    Return None if all are full, or have no params.
    """
    found, most = None, 0
    for each in replicas:
        if each.up and each.version >= 0 and (room := each.room) > most:
            found, most = each, room
    return found


def deal(
    replicas: Sequence[R],
    again: MutableSequence[int],
    *,
    newest: int,
    by_ticket: bool,
    admit: Callable[[int], T | None],
    reissue: Callable[[int, int], tuple[T, int]],
    takes: Callable[[R, int], bool] = lambda replica, ticket: True,
) -> Iterator[tuple[R, T, int]]:
    """Yield (replica, group, admission version) for every group that may start now.

    The caller assigns a group to its replica before it requests the next.  Groups of
    lost replicas come first, then new ones; each goes to the replica with the most
    room.  A new group is admitted with the version in use at that replica; if that is
    too old, with the newest version, for whose params it waits at the replica.

    Args:
        again: tickets of lost replicas; the assigned ones are removed.
        newest: the published version.
        by_ticket: assign groups to replicas in turn, free or not, with `newest`.
        admit: returns a new group for a version; None: no group may start.
        reissue: returns the group of a ticket and its admission version.
        takes: whether a replica may get the group of a lost replica's ticket.
    """
    for ticket in list(again):
        if by_ticket:
            replica, version = replicas[ticket % len(replicas)], newest
        else:
            replica = freest(each for each in replicas if takes(each, ticket))
            if replica is None:
                continue
            version = replica.version
        again.remove(ticket)
        yield replica, *reissue(ticket, version)
    while replica := replicas[0] if by_ticket else freest(replicas):
        versions = [newest] if by_ticket else [replica.version, newest]
        for version in dict.fromkeys(versions):
            if (group := admit(version)) is not None:
                break
        else:
            return
        if by_ticket:
            replica = replicas[group.ticket % len(replicas)]
        yield replica, group, version
