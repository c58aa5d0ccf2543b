"""Slices as they are written, by the tables of Google's documentation."""

import math
import re

import pytest

from scalerl_jax.machines.slices import (
    GENERATIONS,
    make_slice,
    order_of,
    parse_slice,
    parse_type,
)

# docs.cloud.google.com/tpu/docs/v5p: topology, cores, chips, hosts.
V5P = """
2x2x1 8 4 1
2x2x2 16 8 2
2x4x4 64 32 8
4x4x4 128 64 16
4x4x8 256 128 32
4x8x8 512 256 64
8x8x8 1024 512 128
8x8x16 2048 1024 256
8x16x16 4096 2048 512
16x16x16 8192 4096 1024
16x16x24 12288 6144 1536
"""
# docs.cloud.google.com/tpu/docs/v6e: topology, chips, virtual machines.
V6E = """
1x1 1 1
2x2 4 1
2x4 8 1
4x4 16 4
4x8 32 8
8x8 64 16
8x16 128 32
16x16 256 64
"""


@pytest.mark.parametrize("row", V5P.strip().splitlines())
def test_a_v5p_is_what_its_table_says(row):
    topology, cores, chips, hosts = row.split()
    for text in (f"v5p-{cores}", f"v5p:{topology}"):
        found = parse_slice(text)
        assert found.name == f"v5p:{topology}"
        assert (found.num_chips, found.num_hosts) == (int(chips), int(hosts))
        assert found.host == (2, 2, 1)


@pytest.mark.parametrize("generation, type", [("v6e", "v6e"), ("v5e", "v5litepod")])
@pytest.mark.parametrize("row", V6E.strip().splitlines())
def test_v6e_and_v5e_are_what_their_table_says(row, generation, type):
    topology, chips, machines = row.split()
    for text in (f"{type}-{chips}", f"{generation}:{topology}"):
        found = parse_slice(text)
        assert found.name == f"{generation}:{topology}"
        assert (found.num_chips, found.num_hosts) == (int(chips), int(machines))


def test_eight_chips_of_a_v6e_can_be_two_hosts():
    found = parse_slice("v6e-8", host=(2, 2, 1))
    assert (found.num_hosts, found.corners) == (2, ((0, 0, 0), (0, 2, 0)))


def test_eight_chips_of_a_v5e_can_lie_the_other_way():
    found = make_slice("v5e", (4, 2, 1), host=(4, 2, 1))
    assert (found.name, found.num_hosts) == ("v5e:4x2", 1)


@pytest.mark.parametrize(
    "text, corners",
    [
        pytest.param("v5p:2x2x1", [(0, 0, 0)], id="one host"),
        pytest.param("v4:2x2x2", [(0, 0, 0), (0, 0, 1)], id="two, one on the other"),
        # as docs.jax.dev/en/latest/multi_process.html prints a v5litepod-16
        pytest.param(
            "v5e:4x4", [(0, 0, 0), (2, 0, 0), (0, 2, 0), (2, 2, 0)], id="x comes first"
        ),
        pytest.param(
            "v4:2x4x4",
            [(0, y, z) for z in range(4) for y in (0, 2)],
            id="then y, then z",
        ),
    ],
)
def test_workers_stand_along_x_then_y_then_z(text, corners):
    assert list(parse_slice(text).corners) == corners


def test_workers_stand_where_the_order_says():
    found = make_slice("v6e", (4, 4, 1), order=(3, 0, 1, 2))
    assert found.corners == ((2, 2, 0), (0, 0, 0), (2, 0, 0), (0, 2, 0))


def test_hosts_cover_each_chip_once():
    for kind in GENERATIONS.values():
        for shape in kind.shapes[:12]:
            found = make_slice(kind.name, shape)
            chips = {
                (x + dx, y + dy, z + dz)
                for x, y, z in found.corners
                for dx in range(found.host[0])
                for dy in range(found.host[1])
                for dz in range(found.host[2])
            }
            assert len(found.corners) == found.num_hosts
            assert len(chips) == found.num_chips == math.prod(shape)


@pytest.mark.parametrize(
    "text, said",
    [
        pytest.param("v3-8", "v4-N, v5p-N, v5litepod-N, v6e-N", id="v3"),
        pytest.param("v5p", "'v5p' is no type of TPU", id="no number"),
        pytest.param("v5p-0", "'v5p-0' is no type of TPU", id="no cores"),
        pytest.param(
            "v5p-100",
            "v5p-16, v5p-32, v5p-64",
            id="no such number of cores",
        ),
        pytest.param(
            "v6e-24",
            "v6e-4, v6e-8, v6e-16, v6e-32",
            id="no such number of chips",
        ),
        pytest.param("v3:2x2", "'v3' is no TPU", id="a generation that is not known"),
        pytest.param("v5p:4x4", "v5p:AxBxC", id="two sides of a 3D torus"),
        pytest.param("v6e:2x2x1", "v6e:AxB", id="three sides of a 2D torus"),
        pytest.param("v6e:4x", "above 0", id="a side is missing"),
        pytest.param("v6e:0x4", "above 0", id="a side of no chips"),
        pytest.param("v5p:3x3x3", "choose from 2x2x1, 2x2x2,", id="no slice of v5p"),
        pytest.param("v5p:4x4x2", "4x4x2 is no slice of v5p", id="not in order"),
        pytest.param("v6e:2x8", "choose from 1x1, 2x2, 2x4, 4x4", id="no slice of v6e"),
    ],
)
def test_what_is_no_slice_is_refused(text, said):
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        parse_slice(text)
    assert text.split(":")[-1] in str(refused.value)


def test_a_host_that_the_slice_cannot_have_is_refused():
    with pytest.raises(ValueError, match="host = 2x4 chips is no host of v6e:4x4"):
        parse_slice("v6e-16", host=(2, 4, 1))


def test_an_order_that_leaves_a_host_out_is_refused():
    with pytest.raises(ValueError, match=r"each of the 4 places of v6e:4x4"):
        make_slice("v6e", (4, 4, 1), order=(0, 1, 2, 2))


def test_the_types_of_a_generation_are_its_slices():
    for kind in GENERATIONS.values():
        for shape in kind.shapes:
            text = f"{kind.types[0]}-{math.prod(shape) * kind.counted}"
            generation, found = parse_type(text)
            assert generation == kind.name
            assert math.prod(found) == math.prod(shape)
            assert sum(found) <= sum(shape), "the most compact"


def test_the_order_of_workers_is_seen_from_their_chips():
    """Worker 0 stands at the right of worker 1, and 2 and 3 behind them."""
    slice = parse_slice("v6e:4x4")
    corners = [(2, 0), (0, 0), (0, 2), (2, 2)]
    seen = [[(x + dx, y + dy) for dx in (1, 0) for dy in (0, 1)] for x, y in corners]
    order = order_of(slice, seen)
    assert order == (1, 0, 2, 3)
    ordered = make_slice("v6e", (4, 4, 1), order=order)
    assert [corner[:2] for corner in ordered.corners] == corners


@pytest.mark.parametrize(
    "corners, said",
    [
        pytest.param([(0, 0), (1, 0)] * 2, "worker 1 has its first chip", id="between"),
        pytest.param([(0, 0)] * 4, "each of the 4 places", id="each alone"),
        pytest.param([(0, 0)], "chips of 1 workers were seen", id="one worker"),
    ],
)
def test_chips_that_are_no_hosts_of_the_slice_are_refused(corners, said):
    """A worker that sees its own chips alone takes itself for the first."""
    with pytest.raises(ValueError, match=said):
        order_of(parse_slice("v6e:4x4"), [[corner] for corner in corners])
