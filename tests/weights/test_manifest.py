"""Manifests from elsewhere: believed where each of their statements holds."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.weights.manifest import (
    FORMAT,
    Manifest,
    ManifestShard,
    merge,
)


def make_shard(start, stop, **changes):
    """Rows of a float32 leaf of 4 by 6."""
    fields = dict(
        leaf="layers/0/up",
        shape=(4, 6),
        dtype="float32",
        start=start,
        stop=stop,
        checksum=7,
        form="full",
        reference="",
        buffer=0,
        num_bytes=4 * (stop[0] - start[0]) * (stop[1] - start[1]),
    )
    return ManifestShard(**fields | changes)


def make_part(rank, *shards, num_ranks=2, **changes):
    """A rank's manifest, of which one object has all shards."""
    shards = tuple(
        dataclasses.replace(shard, reference=f"rank{rank}-v3", buffer=place)
        for place, shard in enumerate(shards)
    )
    fields = dict(
        ranks=(rank,),
        num_ranks=num_ranks,
        policy_version=3,
        base_version=None,
        frozen_digest="",
        shards=shards,
    )
    return Manifest(**fields | changes)


def halves():
    return [
        make_part(0, make_shard((0, 0), (2, 6))),
        make_part(1, make_shard((2, 0), (4, 6))),
    ]


def test_a_manifest_survives_its_way_as_a_text():
    quarter = make_shard((0, 0), (2, 2), form="delta", num_bytes=15)
    rest = make_shard((0, 2), (2, 6))
    first = make_part(0, quarter, rest, base_version=2)
    second = make_part(
        1, make_shard((2, 0), (4, 2)), make_shard((2, 2), (4, 6)), base_version=2
    )
    whole = merge([second, first])
    for manifest in (first, second, whole):
        assert Manifest.from_json(manifest.to_json()) == manifest
        assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert whole.shards == (*first.shards, *second.shards)
    assert (whole.ranks, first.is_whole, whole.is_whole) == ((0, 1), False, True)
    assert (whole.policy_version, whole.base_version) == (3, 2)
    assert whole.objects == {
        "rank0-v3": list(first.shards),
        "rank1-v3": list(second.shards),
    }


def test_handles_go_along_and_are_no_part_of_the_text():
    parts = [
        dataclasses.replace(part, handles={f"rank{rank}-v3": rank})
        for rank, part in enumerate(halves())
    ]
    whole = pickle.loads(pickle.dumps(merge(parts)))
    assert whole.handles == {"rank0-v3": 0, "rank1-v3": 1}
    assert Manifest.from_json(whole.to_json()).handles == {}


def test_a_forged_manifest_is_refused_as_it_comes_out_of_a_pickle():
    forged = dataclasses.replace(halves()[0], base_version=7)
    with pytest.raises(ValueError, match="base_version = 7 must be an integer"):
        pickle.loads(pickle.dumps(forged))


def test_the_digest_says_which_bytes_are_meant():
    first, second = halves()
    other = make_part(1, dataclasses.replace(second.shards[0], checksum=8))
    assert merge([first, second]).digest == merge([second, first]).digest
    assert merge([first, second]).digest != merge([first, other]).digest
    text = merge([first, second]).to_json().replace('"checksum": 7', '"checksum": 8', 1)
    with pytest.raises(ValueError, match="version 3 has digest .* and says"):
        Manifest.from_json(text)


def test_a_rank_may_have_nothing_to_publish():
    whole = make_part(0, make_shard((0, 0), (4, 6)))
    assert merge([whole, make_part(1)]).is_whole


WRONG_PARTS = {
    "none": (lambda a, b: [], "at least one rank"),
    "a missing rank": (lambda a, b: [a], r"ranks \[0\] and not by each of 2 once"),
    "one twice": (lambda a, b: [a, b, b], r"ranks \[0, 1, 1\]"),
    "another count": (
        lambda a, b: [a, dataclasses.replace(b, num_ranks=3)],
        "num_ranks by ranks is {2: .0., 3: .1.}",
    ),
    "another version": (
        lambda a, b: [a, dataclasses.replace(b, policy_version=4)],
        r"policy_version by ranks is {3: \[0\], 4: \[1\]}; .* full=True",
    ),
    "another base": (
        lambda a, b: [a, dataclasses.replace(b, base_version=2)],
        r"base_version by ranks is {None: \[0\], 2: \[1\]}",
    ),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_parts_that_are_not_of_one_version_are_not_merged(case):
    change, words = WRONG_PARTS[case]
    with pytest.raises(ValueError, match=words):
        merge(change(*halves()))


WRONG_COVERS = {
    "a gap at the end": ([((0, 0), (2, 6)), ((2, 0), (3, 6))], "has a gap"),
    "a gap at the start": (
        [((1, 0), (4, 6))],
        r"no shard of it holds element \[0, 0\]",
    ),
    "a gap between": ([((0, 0), (1, 6)), ((2, 0), (4, 6))], "has a gap"),
    "a missing corner": (
        [((0, 0), (2, 3)), ((0, 3), (2, 6)), ((2, 0), (4, 3))],
        r"no shard of it holds element \[2, 3\]",
    ),
    "one twice": ([((0, 0), (4, 6)), ((0, 0), (4, 6))], "overlaps another"),
    "an overlap": ([((0, 0), (3, 6)), ((2, 0), (4, 6))], "overlaps another"),
    "bricks, which no mesh cuts": (
        [((0, 0), (2, 6)), ((2, 0), (4, 3)), ((2, 3), (4, 6))],
        "overlaps another",
    ),
}


@pytest.mark.parametrize("case", WRONG_COVERS)
def test_a_leaf_that_is_not_covered_exactly_once_is_not_merged(case):
    boxes, words = WRONG_COVERS[case]
    shards = [make_shard(start, stop) for start, stop in boxes]
    with pytest.raises(ValueError, match=words):
        merge([make_part(0, *shards, num_ranks=1)])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_grid_covers_and_no_grid_with_a_hole_or_a_copy_does(data):
    rows = sorted(data.draw(st.sets(st.integers(1, 3)))) + [4]
    columns = sorted(data.draw(st.sets(st.integers(1, 5)))) + [6]
    shards = [
        make_shard((top, left), (bottom, right))
        for top, bottom in zip([0, *rows], rows, strict=False)
        for left, right in zip([0, *columns], columns, strict=False)
    ]
    merge([make_part(0, *shards, num_ranks=1)])
    one = data.draw(st.sampled_from(shards))
    with pytest.raises(ValueError, match="overlaps"):
        merge([make_part(0, *shards, one, num_ranks=1)])
    shards.remove(one)
    if shards:
        with pytest.raises(ValueError, match="gap"):
            merge([make_part(0, *shards, num_ranks=1)])


def test_a_leaf_of_two_shapes_is_not_merged():
    other = make_shard((2, 0), (4, 6), shape=(5, 6))
    with pytest.raises(ValueError, match="layers/0/up is published as all of"):
        merge([make_part(0, make_shard((0, 0), (2, 6)), other, num_ranks=1)])


def part_as_json():
    return json.loads(halves()[0].to_json())


WRONG_FIELDS = [
    ((), "ranks", [-1], "rank = -1"),
    ((), "ranks", [True], "rank = True"),
    ((), "ranks", [0.0], "rank = 0.0"),
    ((), "ranks", 0, "ranks must be a list"),
    ((), "ranks", [], r"ranks = \[\] must be different, in order"),
    ((), "ranks", [1, 0], r"ranks = \[1, 0\] must be different, in order"),
    ((), "ranks", [0, 0], r"ranks = \[0, 0\] must be different, in order"),
    ((), "ranks", [0, 1], "layers/0/up has a gap"),
    ((), "ranks", [2], "rank = 2 must be an integer from 0 to 1"),
    ((), "num_ranks", 0, "num_ranks = 0 must be an integer from 1"),
    ((), "num_ranks", 2**50, "num_ranks = 1125899906842624"),
    ((), "policy_version", "3", "policy_version = 3"),
    ((), "base_version", 3, "base_version = 3 must be an integer from 0 to 2"),
    ((), "shards", {}, "shards must be a list"),
    ((), "shards", [3], "a shard must have exactly the fields"),
    (
        (),
        "format",
        FORMAT - 1,
        f"of format {FORMAT - 1} and this code reads",
    ),
    ((), "format", FORMAT + 1, f"of format {FORMAT + 1} and this code reads"),
    ((), "format", "2", "of format 2"),
    ((), "format", True, "of format True"),
    ((), "more", 2, "exactly the fields"),
    (("shards", 0), "reference", "", "reference must be a text"),
    (("shards", 0), "reference", "x" * 1001, "reference must be a text"),
    (("shards", 0), "buffer", 1, "buffer 0 of object rank0-v3"),
    (("shards", 0), "buffer", 2**50, "buffer 0 of object rank0-v3"),
    (("shards", 0), "leaf", None, "leaf must be a text"),
    (("shards", 0), "dtype", "object", "dtype = 'object'; known are"),
    (("shards", 0), "dtype", ["float32"], "dtype = "),
    (("shards", 0), "form", "pickle", "form = 'pickle'; known are"),
    (("shards", 0), "form", "delta", "is delta with 48 bytes; its values take 48"),
    (("shards", 0), "num_bytes", 47, "is full with 47 bytes"),
    (("shards", 0), "checksum", 2**64, "checksum = 18446744073709551616"),
    (("shards", 0), "shape", [4], "of layers/0/up is from"),
    (("shards", 0), "shape", [4] * 9, "shape has 9 numbers"),
    (("shards", 0), "shape", [2**50, 6], "shape = 1125899906842624"),
    (("shards", 0), "start", [0, -1], "start = -1"),
    (("shards", 0), "start", [2, 0], "is from"),
    (("shards", 0), "stop", [5, 6], "is from"),
    (("shards", 0), "stop", "26", "stop must be a list"),
]


@pytest.mark.parametrize("path, name, value, words", WRONG_FIELDS)
def test_a_manifest_with_a_wrong_field_is_refused(path, name, value, words):
    part = part_as_json()
    place = part
    for step in path:
        place = place[step]
    place[name] = value
    with pytest.raises(ValueError, match=words):
        Manifest.from_json(json.dumps(part))


def test_a_delta_without_a_version_that_it_is_against_is_refused():
    part = part_as_json()
    part["shards"][0] |= {"form": "delta", "num_bytes": 20}
    with pytest.raises(ValueError, match="delta against no version"):
        Manifest.from_json(json.dumps(part))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"format": 2}', "[" * 5000])
def test_a_text_that_is_no_manifest_is_refused(text):
    with pytest.raises(ValueError):
        Manifest.from_json(text)
