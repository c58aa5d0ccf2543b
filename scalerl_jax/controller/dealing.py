"""The rule by which groups are dealt out to replicas, in runs and in simulated ones."""

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Protocol, TypeVar


class Roomy(Protocol):
    """A replica that groups can be given to."""

    @property
    def up(self) -> bool:
        """Return whether the replica has answered."""
        ...

    @property
    def room(self) -> int:
        """Groups that the replica could begin now."""
        ...

    @property
    def version(self) -> int:
        """Policy version with which the replica would begin its next group."""
        ...


class Ticketed(Protocol):
    """An order, or a group to be sampled."""

    @property
    def ticket(self) -> int:
        """Return the number that its queue has given it."""
        ...


R = TypeVar("R", bound=Roomy)
T = TypeVar("T", bound=Ticketed)


def freest(replicas: Iterable[R]) -> R | None:
    """Return the replica that gets the next group: the first with the most room.

    Return None if all are full.
    """
    found, most = None, 0
    for each in replicas:
        if each.up and (room := each.room) > most:
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
    """Yield who gets which group, admitted with which version, while any may start.

    The caller gives it to the replica before it asks for the next.  Groups of lost
    replicas come first, then new ones; each goes to the replica with the most room.  A
    new one is admitted with the version in use there; if that is too old, with the
    newest version, and it waits at the replica until its params come.

    Args:
        again: tickets of lost replicas; those dealt out are removed.
        newest: version that is published.
        by_ticket: groups go to replicas in turn, whichever is free, with `newest`.
        admit: returns a new group for a version; None: no group may start.
        reissue: returns the group of a ticket and the version it is admitted with.
        takes: whether a replica may have the group of a ticket of a lost one.
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
