"""The news that a replica's desk has for the controller."""

import time

from scalerl_jax.contract import Assignment, Instructions, Order
from scalerl_jax.generation.replica_desk import ReplicaDesk


def test_free_slots_are_news_until_an_order_comes():
    desk = ReplicaDesk()

    def is_told():
        began = time.monotonic()
        desk.await_news(0.5)
        desk.news()
        return time.monotonic() - began < 0.5

    assert desk.admit(0) is None
    assert is_told()
    assert desk.admit(0) is None
    assert not is_told()
    order = Order(prompt=None, ticket=7, begun_version=0)
    desk.deliver(Instructions(assignments=(Assignment(order=order, version=0),)))
    assert desk.admit(0) is order
    assert not is_told()
    assert desk.admit(0) is None
    assert is_told()
