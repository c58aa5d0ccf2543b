"""Groups that take longer than `reissue_after_s`: they end, wherever they are moved."""

import pytest
from fleet_world import FleetWorld
from hypothesis import given, settings
from hypothesis import strategies as st

LIMIT_S = 10.0


class TimedWorld:
    """A world in which second follows second, and each group needs its time."""

    def __init__(self, *, needs_s, replicas=2, capacity=4):
        """`needs_s`: by ticket."""
        self.needs_s = needs_s
        self.world = FleetWorld(
            replicas=replicas,
            capacity=capacity,
            by_ticket=False,
            reissue_after_s=LIMIT_S,
            num_prompts=len(needs_s),
            max_staleness=0,
            num_steps=1,
            mode="pipeline",
        )
        self.since_s = {}  # when a replica began a group
        self.begun = dict.fromkeys(range(len(needs_s)), 0)  # how often, by ticket
        self.ended_s = {}

    def run(self, seconds):
        for _ in range(seconds):
            self.world.dispatcher.turn()
            for number in list(self.world.coming):
                self.world.come(number)
            for number, link in self.world.links.items():
                self._second(number, link)
            self.world.check()
            self.world.now += 1.0

    def _second(self, number, link):
        while link.calls:
            link.arrive()
        link.swap()
        replica, now = link.replica, self.world.now
        before = set(replica.open)
        replica.begin()
        for ticket in replica.open.keys() - before:
            self.since_s[number, ticket] = now
            self.begun[ticket] += 1
        for ticket in sorted(replica.open):
            if now - self.since_s[number, ticket] >= self.needs_s[ticket]:
                replica.sample(ticket)
                replica.judge(ticket)
                self.ended_s[ticket] = now
        while link.arrived:
            link.answer()


# Limits of 10, 20, 40, ... s; a second or two pass on the way to a replica.
@pytest.mark.parametrize(
    "needs_s, begun, ends_s", [(5, 1, 5), (15, 2, 25), (35, 3, 65), (100, 5, 250)]
)
def test_a_group_that_is_long_anywhere_moves_until_it_fits(needs_s, begun, ends_s):
    timed = TimedWorld(needs_s=[needs_s])
    timed.run(ends_s + 30)
    assert timed.begun == {0: begun}
    assert ends_s <= timed.ended_s[0] <= ends_s + 5 * begun
    assert timed.world.dispatcher.events["reissued"] == begun - 1
    assert timed.world.queue.buffered == 1
    assert not timed.world.dispatcher._moves  # nothing is kept of a group that ended


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=6),
    st.integers(2, 3),
    st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_every_group_ends_after_as_many_moves_as_doublings(needs_s, replicas, capacity):
    timed = TimedWorld(needs_s=needs_s, replicas=replicas, capacity=capacity)
    timed.run(6 * 500)  # one after another: 150 s, and the limits before 160
    assert sorted(timed.ended_s) == list(range(len(needs_s)))
    for ticket, need_s in enumerate(needs_s):
        # It may also wait for its place at a replica, hence a doubling more.
        doublings = sum(LIMIT_S * 2**n < need_s + 5 for n in range(10))
        assert timed.begun[ticket] <= doublings + 2
