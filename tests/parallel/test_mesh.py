"""Meshes and the split of the device list."""

import dataclasses

import jax
import numpy as np
import pytest

from scalerl_jax.parallel.mesh import make_mesh, split_devices


def test_tensor_neighbours_are_neighbours_in_the_device_list():
    devices = jax.devices()[:8]
    mesh = make_mesh(devices, data=2, fsdp=2, tensor=2)
    names = ("slices", "data", "fsdp", "expert", "context", "tensor")
    assert mesh.axis_names == names
    assert mesh.devices[0, 0, 0, 0, 0].tolist() == devices[:2]
    assert mesh.devices[0, 0].ravel().tolist() == devices[:4]


def test_axes_that_are_not_asked_for_have_size_1():
    mesh = make_mesh(jax.devices()[:2], context=2)
    others = {"slices": 1, "data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert dict(mesh.shape) == others | {"context": 2}


def test_parts_of_experts_are_a_part_of_the_shards():
    devices = jax.devices()[:8]
    mesh = make_mesh(devices, data=2, fsdp=4, expert=2)
    assert (mesh.shape["fsdp"], mesh.shape["expert"]) == (2, 2)
    assert mesh.devices[0, 0, 0].ravel().tolist() == devices[:2]
    assert mesh.devices[0, 0].ravel().tolist() == devices[:4]


@dataclasses.dataclass(frozen=True)
class OnSlice:
    """A device as libtpu lists it."""

    number: int
    slice_index: int
    platform: str = "tpu"


def test_replicas_are_spread_over_slices_whatever_the_order_of_the_devices():
    devices = [OnSlice(number, slice_index=number % 2) for number in range(8)]
    mesh = make_mesh(devices, slices=2, data=4, fsdp=2)
    assert (mesh.shape["slices"], mesh.shape["data"], mesh.shape["fsdp"]) == (2, 2, 2)
    assert mesh.devices[0].ravel().tolist() == devices[::2]
    assert mesh.devices[1].ravel().tolist() == devices[1::2]
    alike = make_mesh(jax.devices()[:8], slices=2, data=4, fsdp=2)  # without an index
    assert alike.devices[1].ravel().tolist() == jax.devices()[4:8]


@pytest.mark.parametrize(
    "indices, words",
    [
        pytest.param([0, 0, 0, 0], "devices are 4 of 1 slices", id="one"),
        pytest.param([0, 1, 1, 1], "devices are 1, 3 of 2 slices", id="uneven"),
    ],
)
def test_devices_of_other_slices_than_were_asked_for_are_refused(indices, words):
    devices = [OnSlice(*each) for each in enumerate(indices)]
    with pytest.raises(ValueError, match=f"mesh.slices = 2, .* {words}"):
        make_mesh(devices, slices=2, data=2, fsdp=2)


def test_plain_jit_looks_up_rows_of_a_table_that_is_cut_both_ways():
    """Explicit axes would refuse it: fsdp cuts the rows and what they hold."""
    mesh = make_mesh(jax.devices()[:8], data=2, fsdp=2, tensor=2)
    table = np.arange(32, dtype=np.float32).reshape(4, 8)
    rows = np.array([3, 0, 2, 2])
    shardings = (
        jax.NamedSharding(mesh, jax.P("tensor", "fsdp")),
        jax.NamedSharding(mesh, jax.P(("data", "fsdp"))),
    )
    placed = jax.device_put((table, rows), shardings)
    look_up = jax.jit(lambda table, rows: table[rows], in_shardings=shardings)
    np.testing.assert_array_equal(look_up(*placed), table[rows])


@pytest.mark.parametrize("devices", [7, 9])
def test_another_number_of_devices_than_the_mesh_has_is_refused(devices):
    with pytest.raises(
        ValueError,
        match=rf"= 2 \* 2 \* 2 \* 1 = 8 .* {devices}; ",
    ):
        make_mesh(range(devices), data=2, fsdp=2, context=2)


@pytest.mark.parametrize(
    "learner_count, replicas, each, shared, expected",
    [
        pytest.param(6, 1, 2, False, ([*range(6)], [[6, 7]]), id="all used"),
        pytest.param(2, 1, 1, False, ([0, 1], [[7]]), id="some idle"),
        pytest.param(4, 2, 2, False, ([*range(4)], [[4, 5], [6, 7]]), id="two"),
        pytest.param(8, 1, 8, True, ([*range(8)], [[*range(8)]]), id="shared"),
        pytest.param(3, 1, 1, True, ([0, 1, 2], [[0]]), id="shared, some idle"),
        pytest.param(
            4, 3, 2, True, ([*range(4)], [[0, 1], [2, 3], [0, 1]]), id="by turns"
        ),
    ],
)
def test_the_learner_has_the_first_devices_and_replicas_the_last(
    learner_count, replicas, each, shared, expected
):
    shares = split_devices(
        range(8),
        learner_count=learner_count,
        replicas=replicas,
        each=each,
        shared=shared,
    )
    assert shares == expected


def test_too_few_devices_for_both_are_refused_with_the_way_out():
    with pytest.raises(
        ValueError,
        match=r"generators\.devices = 3 .* 9, .* 8; ",
    ):
        split_devices(range(8), learner_count=6, replicas=1, each=3, shared=False)
    with pytest.raises(ValueError, match="= 5 .* 4 devices"):
        split_devices(range(8), learner_count=4, replicas=1, each=5, shared=True)
