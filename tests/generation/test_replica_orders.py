"""The news that a replica's order book has for the controller."""

import time

from scalerl_jax.contract import Assignment, Instructions, Order
from scalerl_jax.generation.replica_orders import ReplicaOrders


def test_free_slots_are_news_until_an_order_comes():
    orders = ReplicaOrders()

    def is_told():
        began = time.monotonic()
        orders.await_news(0.5)
        orders.news()
        return time.monotonic() - began < 0.5

    assert orders.admit(0) is None
    assert is_told()
    assert orders.admit(0) is None
    assert not is_told()
    order = Order(prompt=None, ticket=7, begun_version=0)
    orders.deliver(Instructions(assignments=(Assignment(order=order, version=0),)))
    assert orders.admit(0) is order
    assert not is_told()
    assert orders.admit(0) is None
    assert is_told()
