"""Who gets which group, and with which version it is admitted; worked out by hand."""

import dataclasses

import pytest

from scalerl_jax.controller.dealing import deal


@dataclasses.dataclass
class Replica:
    room: int
    version: int
    up: bool = True


@dataclasses.dataclass
class Group:
    ticket: int


def dealt(replicas, again, *, admitted, newest=5, by_ticket=False, takes=None):
    """Deal until nothing may start; `admitted` are the oldest versions of new groups.

    Return (place of the replica, ticket, version) of each group.
    """
    new = iter(enumerate(admitted, start=100))
    coming = next(new, None)

    def admit(version):
        nonlocal coming
        if coming is None or version < coming[1]:
            return None
        group, coming = Group(coming[0]), next(new, None)
        return group

    found = []
    for replica, group, version in deal(
        replicas,
        again,
        newest=newest,
        by_ticket=by_ticket,
        admit=admit,
        reissue=lambda ticket, version: (Group(ticket), version),
        **({"takes": takes} if takes else {}),
    ):
        replica.room -= 1
        place = next(at for at, each in enumerate(replicas) if each is replica)
        found.append((place, group.ticket, version))
    return found


def test_lost_groups_come_first_and_each_goes_where_there_is_most_room():
    replicas = [Replica(1, 3), Replica(3, 4), Replica(9, 5, up=False)]
    found = dealt(replicas, [7], admitted=[0] * 9)
    # Room 1, 3 -> 1, 2 -> 1, 1 (the first of equals) -> 0, 1 -> 0, 0.
    assert found == [(1, 7, 4), (1, 100, 4), (0, 101, 3), (1, 102, 4)]


def test_a_group_too_new_for_a_replica_waits_there_for_the_newest_params():
    assert dealt([Replica(3, 2)], [], admitted=[2, 4, 6]) == [(0, 100, 2), (0, 101, 5)]


@pytest.mark.parametrize(
    "room, found, left",
    [
        pytest.param(1, [(1, 7, 3), (0, 8, 2)], [], id="another has room"),
        pytest.param(0, [(0, 8, 2)], [7], id="no other has: it waits, others go on"),
    ],
)
def test_a_lost_group_does_not_go_back_to_who_may_not_have_it(room, found, left):
    replicas, again = [Replica(1, 2), Replica(room, 3)], [7, 8]

    def takes(replica, ticket):
        return ticket != 7 or replica is not replicas[0]

    assert dealt(replicas, again, admitted=[], takes=takes) == found
    assert again == left


def test_in_turn_groups_go_to_their_tickets_replicas_full_or_not_yet_up():
    replicas = [Replica(0, 1), Replica(0, 1, up=False)]
    found = dealt(replicas, [7, 8], admitted=[5, 5], by_ticket=True)
    assert found == [(1, 7, 5), (0, 8, 5), (0, 100, 5), (1, 101, 5)]


def test_a_replica_without_params_gets_nothing_until_it_has_some():
    replicas, again = [Replica(9, -1), Replica(2, 0)], [7, 8, 9]
    assert dealt(replicas, again, admitted=[]) == [(1, 7, 0), (1, 8, 0)]
    assert again == [9]
    # A version of -1 would be old enough for each of these.
    assert dealt(replicas, [], admitted=[-1, -1]) == []
    replicas[0].version = 5
    assert dealt(replicas, again, admitted=[-1]) == [(0, 9, 5), (0, 100, 5)]
