"""A slice is cut into boxes: disjoint, inside, of whole hosts or inside one."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.machines.partition import box_sizes, split_slice
from scalerl_jax.machines.slices import parse_slice

SLICES = [
    *("v4:2x2x1", "v4:2x2x4", "v4:4x4x8", "v5p:2x2x2", "v5p:2x4x4", "v5p:4x4x4"),
    *("v5p:4x4x12", "v5e:2x2", "v5e:2x4", "v5e:4x8", "v6e:2x4", "v6e:4x4", "v6e:8x16"),
]


def hosts_of(slice):
    """Return the chips of each host, made of its corner by hand."""
    return [
        {
            (x + dx, y + dy, z + dz)
            for dx in range(slice.host[0])
            for dy in range(slice.host[1])
            for dz in range(slice.host[2])
        }
        for x, y, z in slice.corners
    ]


@given(
    text=st.sampled_from(SLICES),
    learner=st.integers(0, 7),
    generators=st.integers(0, 9),
    generator=st.integers(0, 7),
)
def test_boxes_are_disjoint_and_inside_and_their_hosts_are_whole(
    text, learner, generators, generator
):
    slice = parse_slice(text)
    sizes = (0, *box_sizes(slice))
    asked = sizes[learner % len(sizes)], generators, sizes[generator % len(sizes)]
    hosts = hosts_of(slice)
    try:
        split = split_slice(
            slice,
            learner_chips=asked[0],
            generators=generators,
            generator_chips=asked[2],
        )
    except ValueError:
        # The learner takes whole places of the generators' grid, for boxes nest.
        least, count, part = asked[0] or 1, generators or 1, asked[2] or 1
        assert (math.ceil(least / part) + count) * part > slice.num_chips
        return
    boxes = [split.learner, *split.replicas]
    chips = [chip for box in boxes for chip in box.chips]
    assert len(chips) == len(set(chips)), "disjoint"
    assert set(chips) <= set().union(*hosts), "inside"
    for box in boxes:
        assert len(box.chips) == box.num_chips
        mine = set(box.chips)
        met = [host for host in hosts if host & mine]
        assert len(met) == 1 or all(host <= mine for host in met), "hosts are whole"
    assert split.learner.num_chips == (asked[0] or split.learner.num_chips)
    assert len(split.replicas) == (generators or len(split.replicas)) > 0
    sizes = {box.num_chips for box in split.replicas}
    assert len(sizes) == 1 and asked[2] in (0, *sizes)


@pytest.mark.parametrize(
    "text, asked, learner, replicas",
    [
        pytest.param("v5p:4x4x4", (32, 8, 4), 32, [4] * 8, id="half and half"),
        pytest.param("v5p:4x4x4", (0, 0, 0), 32, [4] * 8, id="nothing is asked"),
        pytest.param("v5p:4x4x4", (0, 4, 4), 32, [4] * 4, id="the largest learner"),
        pytest.param("v5p:4x4x4", (16, 0, 8), 16, [8] * 6, id="as many as fit"),
        pytest.param("v5p:4x4x4", (32, 2, 0), 32, [16] * 2, id="the most chips each"),
        pytest.param("v5p:4x4x4", (32, 0, 1), 32, [1] * 32, id="a chip each"),
        pytest.param("v5p:2x2x1", (2, 2, 1), 2, [1, 1], id="inside one host"),
        pytest.param("v6e:2x4", (0, 0, 0), 4, [4], id="half of eight chips"),
        pytest.param("v6e:4x4", (8, 2, 4), 8, [4, 4], id="two hosts and one each"),
        pytest.param("v5p:4x4x12", (64, 0, 16), 64, [16] * 8, id="one cube of three"),
    ],
)
def test_splits_by_hand(text, asked, learner, replicas):
    names = ("learner_chips", "generators", "generator_chips")
    split = split_slice(parse_slice(text), **dict(zip(names, asked, strict=True)))
    assert split.learner.num_chips == learner
    assert [box.num_chips for box in split.replicas] == replicas


def test_a_learner_of_half_a_cube_stands_at_its_left():
    """2x4x4 is a slice, 4x4x2 is none."""
    split = split_slice(parse_slice("v5p:4x4x4"), learner_chips=32, generators=1)
    assert (split.learner.corner, split.learner.shape) == ((0, 0, 0), (2, 4, 4))
    assert [box.corner for box in split.replicas] == [(2, 0, 0)]


@pytest.mark.parametrize(
    "text, sizes",
    [
        pytest.param("v5p:2x2x1", (1, 2, 4), id="a host of four"),
        pytest.param("v6e:2x4", (1, 2, 4, 8), id="a host of eight"),
        pytest.param("v6e:1x1", (1,), id="a chip"),
        pytest.param("v5p:4x4x4", (1, 2, 4, 8, 16, 32, 64), id="a cube"),
        pytest.param("v5p:4x4x12", (1, 2, 4, 8, 16, 32, 64, 192), id="three cubes"),
    ],
)
def test_the_sizes_of_boxes(text, sizes):
    assert box_sizes(parse_slice(text)) == sizes


@pytest.mark.parametrize(
    "text, asked, said",
    [
        pytest.param(
            "v5p:4x4x4",
            {"learner_chips": 24},
            "learner_chips = 24 chips",
            id="no box",
        ),
        pytest.param(
            "v6e:4x4",
            {"generator_chips": 3},
            "generator_chips = 3 chips",
            id="three chips of a host",
        ),
        pytest.param(
            "v5p:4x4x4",
            {"learner_chips": 32, "generators": 10, "generator_chips": 4},
            "8 generators of 4",
            id="too many",
        ),
        pytest.param(
            "v5p:4x4x4", {"learner_chips": 64}, "0 generators of 1 fit", id="no room"
        ),
        pytest.param("v6e:1x1", {}, "take a larger slice", id="one chip"),
        pytest.param(
            "v6e:4x4", {"generators": -1}, "generators = -1 must be 0", id="below 0"
        ),
    ],
)
def test_a_split_that_cannot_be_is_refused(text, asked, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        split_slice(parse_slice(text), **asked)
