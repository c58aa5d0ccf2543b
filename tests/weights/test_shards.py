"""Boxes of elements: where they overlap, and arrays that are put together from them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.weights.shards import Region, Shard, own_boxes, own_shards, place

SHAPE = (8, 12)


def box(start, stop, leaf="up"):
    return Region(leaf=leaf, start=start, stop=stop)


@pytest.mark.parametrize(
    "first, second, common",
    [
        (((0, 0), (2, 4)), ((1, 2), (5, 9)), ((1, 2), (2, 4))),
        (((0, 0), (8, 12)), ((3, 4), (4, 5)), ((3, 4), (4, 5))),
        (((0, 0), (2, 4)), ((2, 0), (4, 4)), None),
        (((), ()), ((), ()), ((), ())),
    ],
    ids=["a corner", "inside", "neighbours", "scalars"],
)
def test_two_boxes_share_what_is_in_both(first, second, common):
    found = box(*first).overlap(box(*second))
    assert found == box(*second).overlap(box(*first))
    assert found == (common and box(*common))
    assert box(*first).overlap(box(*second, leaf="down")) is None


def test_a_box_is_named_and_found_in_another():
    inner, outer = box((3, 4), (4, 6)), box((2, 4), (8, 12))
    assert str(inner) == "up[3:4, 4:6]"
    assert inner.shape == (1, 2)
    assert inner.within(outer) == (slice(1, 2), slice(0, 2))


def sharding(**axes):
    cut = {name: axes.pop(name, None) for name in ("rows", "columns")}
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return NamedSharding(make_mesh(devices, **axes), PartitionSpec(*cut.values()))


SHARDINGS = {
    "one device": lambda: sharding(data=1),
    "rows": lambda: sharding(rows="fsdp", fsdp=4),
    "columns": lambda: sharding(columns="tensor", tensor=2),
    "both": lambda: sharding(rows="fsdp", columns="tensor", fsdp=2, tensor=4),
    "copies": lambda: sharding(columns="tensor", data=4, tensor=2),
}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.sets(st.integers(1, SHAPE[0] - 1)),
    columns=st.sets(st.integers(1, SHAPE[1] - 1)),
    to=st.sampled_from(sorted(SHARDINGS)),
)
def test_an_array_is_put_together_from_shards_of_any_grid(seed, rows, columns, to):
    whole = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
    rows, columns = [sorted(rows) + [8], sorted(columns) + [12]]
    cuts = [
        box((top, left), (bottom, right))
        for top, bottom in zip([0, *rows], rows, strict=False)
        for left, right in zip([0, *columns], columns, strict=False)
    ]
    shards = [
        Shard(box=cut, shape=SHAPE, values=whole[cut.within(box((0, 0), SHAPE))])
        for cut in cuts
    ]
    layout = jax.ShapeDtypeStruct(SHAPE, whole.dtype, sharding=SHARDINGS[to]())
    found = place({"up": layout}, {"up": shards})["up"]
    assert found.sharding == layout.sharding
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("cut", SHARDINGS)
def test_each_element_is_in_one_shard_whatever_the_copies(cut):
    whole = np.arange(96, dtype=np.float32).reshape(SHAPE)
    params = {"up": jax.device_put(whole, SHARDINGS[cut]())}
    shards = own_shards(params)
    values = np.concatenate([shard.values.reshape(-1) for shard in shards])
    assert sorted(values) == list(range(96))
    assert {shard.box for shard in shards} == own_boxes(params)
    for shard in shards:
        assert shard.shape == SHAPE
        np.testing.assert_array_equal(
            shard.values, whole[shard.box.within(box((0, 0), SHAPE))]
        )


def test_arrays_are_deleted_one_by_one_as_others_take_their_place():
    on = make_mesh(jax.devices()[:2], tensor=2)
    sharding = NamedSharding(on, PartitionSpec("tensor"))
    values = {name: np.full(SHAPE, place) for place, name in enumerate("abc")}
    before = jax.device_put(values, sharding)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        before,
    )
    stood = []

    class Watched(dict):
        def __getitem__(self, name):
            stood.append([leaf.is_deleted() for leaf in before.values()])
            return super().__getitem__(name)

    shards = {
        name: [Shard(box=box((0, 0), SHAPE, name), shape=SHAPE, values=leaf + 10)]
        for name, leaf in values.items()
    }
    found = place(abstract, Watched(shards), instead_of=before)
    assert stood == [[False] * 3, [True, False, False], [True, True, False]]
    assert all(leaf.is_deleted() for leaf in before.values())
    for name, leaf in values.items():
        np.testing.assert_array_equal(found[name], leaf + 10)
