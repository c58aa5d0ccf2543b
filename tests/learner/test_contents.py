import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.learner import contents
from scalerl_jax.types import Group, Prompt, Rollout


@st.composite
def rollouts(draw):
    shape = draw(st.integers(0, 4))
    return Rollout(
        completion_tokens=draw(hnp.arrays(np.int32, shape)),
        completion_mask=draw(hnp.arrays(np.bool_, shape)),
        behavior_logprobs=draw(hnp.arrays(np.float32, shape)),  # NaN and -0.0 too
        policy_versions=draw(hnp.arrays(np.int32, shape)),
        cut_off=draw(st.booleans()),
        interrupted=draw(st.booleans()),
        reward=draw(st.floats(allow_nan=False)),
        passed=draw(st.booleans()),
        judged=draw(st.booleans()),
        status=draw(st.text()),
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)
PROMPTS = st.builds(
    Prompt,
    prompt_id=st.integers(0),
    epoch=st.integers(0),
    task=st.text(),
    text=st.text(),
    tokens=hnp.arrays(np.int32, st.integers(0, 3)),
    reference=st.dictionaries(st.text(), JSON, max_size=2),
)
GROUPS = st.builds(
    Group,
    ticket=st.integers(0),
    prompt=PROMPTS,
    rollouts=st.lists(rollouts(), min_size=1, max_size=3).map(tuple),
    finished_version=st.integers(0),
    detail=st.text(),
)


def exact(groups):
    """Every array as its type, shape and bytes: == is bit for bit."""
    leaves, structure = jax.tree.flatten(groups)
    described = [
        (str(leaf.dtype), leaf.shape, leaf.tobytes())
        if isinstance(leaf, np.ndarray)
        else (type(leaf), leaf)
        for leaf in leaves
    ]
    return described, structure  # fields that are no leaves are in the structure


@settings(deadline=None)
@given(st.lists(GROUPS, max_size=4).map(tuple))
def test_groups_of_any_form_read_back(groups):
    arrays, rows = contents.flatten(groups)
    assert not any(array.dtype.hasobject for array in arrays.values())
    read = contents.unflatten(arrays, json.loads(json.dumps(rows)))
    assert exact(read) == exact(groups)
    with tempfile.TemporaryDirectory() as folder:
        contents.write_groups(Path(folder), arrays, rows)
        assert exact(contents.read_groups(Path(folder))) == exact(groups)


def test_groups_of_a_checkpoint_without_details_are_judged_as_they_were():
    group = one_group(reference={})
    arrays, rows = contents.flatten([group])
    del rows[0]["detail"], rows[0]["rollouts"][0]["judged"]
    (read,) = contents.unflatten(arrays, rows)
    assert exact(read) == exact(group)


def one_group(*, reference, **arrays):
    rollout = Rollout(
        completion_tokens=np.zeros(5, np.int32),
        completion_mask=np.ones(5, np.bool_),
        behavior_logprobs=np.zeros(5, np.float32),
        policy_versions=np.zeros(5, np.int32),
        cut_off=False,
        interrupted=False,
    )
    prompt = Prompt(
        prompt_id=7,
        epoch=0,
        task="chain_sum",
        text="",
        tokens=np.zeros(2, np.int32),
        reference=reference,
    )
    return Group(
        ticket=0,
        prompt=prompt,
        rollouts=(rollout.replace(**arrays),),
        finished_version=0,
    )


@pytest.mark.parametrize(
    "name, array",
    [
        ("completion_tokens", np.zeros(5, np.int64)),
        ("behavior_logprobs", np.zeros(5, np.float64)),
        ("completion_mask", np.zeros(4, np.bool_)),
    ],
)
def test_an_array_of_another_type_or_length_is_refused(name, array):
    group = one_group(reference={}, **{name: array})
    with pytest.raises(ValueError, match=f"{name} is .* to be saved"):
        contents.flatten([group])


def test_a_reference_that_would_change_is_refused():
    group = one_group(reference={"answer": (1, 2)})
    with pytest.raises(ValueError, match=r"reference of prompt 7.answer = \(1, 2\)"):
        contents.flatten([group])


def saved_group(folder, *, arrays=None, rows=None):
    """Write a group's files, some arrays replaced, and `rows` made of its rows."""
    found, kept = contents.flatten([one_group(reference={})])
    contents.write_groups(folder, found | (arrays or {}), kept)
    if rows is not None:
        (folder / "groups.json").write_text(json.dumps(rows(kept)))


@pytest.mark.parametrize(
    "arrays",
    [
        {"completion_mask": np.ones(5, np.int32)},
        {"completion_tokens": np.zeros((5, 1), np.int32)},
        {"behavior_logprobs": np.zeros(4, np.float32)},
        {"behavior_logprobs": np.zeros(9, np.float32)},
        {"prompt_tokens": np.zeros(2, np.int64)},
        {"prompt_offsets": np.array([0, 1, 2])},
        {"completion_offsets": np.array(["0", "5"])},
        {"completion_offsets": np.array(5)},
        {"experts": np.zeros((6, 2, 2), np.uint8)},
    ],
    ids=str,
)
def test_arrays_that_no_save_writes_are_refused_by_their_file(tmp_path, arrays):
    saved_group(tmp_path, arrays=arrays)
    with pytest.raises(
        ValueError, match=r"groups\.npz and groups\.json are not groups"
    ):
        contents.read_groups(tmp_path)


@pytest.mark.parametrize(
    "rows",
    [
        lambda rows: {},
        lambda rows: rows[0],
        lambda rows: [*rows, *rows],
        lambda rows: [7],
        lambda rows: [rows[0] | {"ticket": "0"}],
        lambda rows: [rows[0] | {"surplus": 1}],
        lambda rows: [rows[0] | {"rollouts": 5}],
        lambda rows: [rows[0] | {"prompt": rows[0]["prompt"] | {"text": None}}],
        lambda rows: [
            rows[0] | {"rollouts": [rows[0]["rollouts"][0] | {"reward": True}]}
        ],
        lambda rows: [
            rows[0] | {"rollouts": [rows[0]["rollouts"][0] | {"turns": [0]}]}
        ],
    ],
)
def test_rows_that_no_save_writes_are_refused_by_their_file(tmp_path, rows):
    saved_group(tmp_path, rows=rows)
    with pytest.raises(
        ValueError, match=r"groups\.npz and groups\.json are not groups"
    ):
        contents.read_groups(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + bytes(50), b"{}"])
def test_a_file_that_holds_no_arrays_is_refused_by_its_name(tmp_path, content):
    saved_group(tmp_path)
    (tmp_path / "groups.npz").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"groups\.npz and groups\.json are not groups"
    ):
        contents.read_groups(tmp_path)
