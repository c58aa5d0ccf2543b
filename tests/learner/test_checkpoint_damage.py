import json
import logging
import random

import jax
import jax.numpy as jnp
import pytest
from small_checkpoints import (
    abstract,
    assert_restored,
    exact,
    make_state,
    rewrite_state,
)

from scalerl_jax.learner import checkpoint
from scalerl_jax.learner.checkpoint import CheckpointReader
from scalerl_jax.learner.places import CheckpointPlace, sealed


@pytest.fixture
def reader(tmp_path):
    return CheckpointReader(CheckpointPlace(tmp_path / "checkpoints"))


def test_the_params_alone_are_read_back(two, reader):
    params = abstract(make_state()).params
    step, found = reader.restore_params(params)
    assert step == 20
    assert exact(found) == exact(make_state(20).params)
    (two / "step_00000020" / "host.json").write_text("{}")
    step, found = reader.restore_params(params)
    assert step == 10
    assert exact(found) == exact(make_state(10).params)
    other = {"embed": params["embed"]}
    with pytest.raises(ValueError, match=r"params\.layers\.0\.w is .* there and ab"):
        reader.restore_params(other)


def test_params_of_a_run_without_checkpoint_are_none(reader):
    assert reader.restore_params(abstract(make_state()).params) is None


def files_of(directory):
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file()
    )


def damage_each_file(damage):
    """One checkpoint per file of a checkpoint, that file alone damaged."""

    def test(two, reader, caplog):
        newest = two / "step_00000020"
        names = files_of(newest)
        assert {"manifest.json", "host.json", "groups.npz", "groups.json"} < set(names)
        assert any(name.startswith("state/") for name in names)
        whole = {name: (newest / name).read_bytes() for name in names}
        for name in names:
            if not whole[name]:
                continue
            caplog.clear()
            damage(newest / name, whole[name])
            restored = reader.restore(abstract(make_state()))
            assert_restored(restored, 10, make_state(10))
            (record,) = [
                r
                for r in caplog.records
                if r.levelno == logging.WARNING and "is not" in r.msg
            ]
            assert "step_00000020" in record.getMessage()
            assert name in record.getMessage()
            (newest / name).write_bytes(whole[name])
        restored = reader.restore(abstract(make_state()))
        assert_restored(restored, 20, make_state(20))

    return test


def flip(path, data):
    place = random.Random(len(data)).randrange(len(data))
    if path.name == "manifest.json":  # not in its white space
        place = data.index(b'"bytes": ') + len('"bytes": ')
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


test_a_truncated_file_is_found = damage_each_file(
    lambda path, data: path.write_bytes(data[: len(data) // 2])
)
test_an_emptied_file_is_found = damage_each_file(
    lambda path, data: path.write_bytes(b"")
)
test_a_missing_file_is_found = damage_each_file(lambda path, data: path.unlink())
test_a_flipped_bit_is_found = damage_each_file(flip)


def test_a_checkpoint_under_another_name_is_found(two, reader):
    (two / "step_00000020").rename(two / "step_00000030")
    assert_restored(reader.restore(abstract(make_state())), 10, make_state(10))


class FailingDisk(CheckpointPlace):
    """A place that loses a file of the newest checkpoint once that has been checked."""

    lost = ""

    def known_files(self, path):
        file = path / self.lost
        if path.name != "step_00000020" or not file.exists():
            return None
        file.unlink()
        manifest = json.loads((path / "manifest.json").read_text())
        return manifest["manifest"]["files"]


@pytest.mark.parametrize("lost", ["host.json", "groups.npz", "state/manifest.ocdbt"])
def test_a_file_that_is_lost_after_it_was_checked_is_found_too(two, lost):
    place = FailingDisk(two)
    place.lost = lost
    reader = CheckpointReader(place)
    assert_restored(reader.restore(abstract(make_state())), 10, make_state(10))
    assert reader.damaged == {two / "step_00000020"}


def test_what_fails_to_read_and_is_not_damaged_is_no_reason_for_an_older_one(
    two, reader, monkeypatch
):
    def no_memory(*_, **__):
        raise MemoryError("for the state")

    monkeypatch.setattr(checkpoint, "_load", no_memory)
    with pytest.raises(MemoryError, match="for the state"):
        reader.restore(abstract(make_state()))
    assert not reader.damaged


def test_all_damaged_is_an_error_that_says_what_and_why(two, reader):
    (two / "step_00000010" / "host.json").write_text("{}")
    (two / "step_00000020" / "manifest.json").unlink()
    with pytest.raises(RuntimeError) as failure:
        reader.restore(abstract(make_state()))
    message = str(failure.value)
    assert str(two) in message
    assert "step 20: manifest.json is missing" in message
    assert "step 10: host.json has 2 of" in message
    assert "--workdir" in message


def spoiled(state, place, value):
    """A state with a number of one of its arrays replaced."""
    leaves, tree = jax.tree.flatten(state)
    leaves[place] = leaves[place].at[(0,) * leaves[place].ndim].set(value)
    return jax.tree.unflatten(tree, leaves)


def test_a_state_that_is_not_finite_is_not_used(two, reader, caplog):
    state = make_state(20)
    floating = [
        jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(state)
    ]
    # Params, and both moments of each; the rest counts.
    assert sum(floating) == 3 * 3
    values = [jnp.nan, jnp.inf, -jnp.inf]
    for place in (place for place, held in enumerate(floating) if held):
        caplog.clear()
        rewrite_state(two / "step_00000020", spoiled(state, place, values[place % 3]))
        restored = reader.restore(abstract(state))
        assert_restored(restored, 10, make_state(10))
        (record,) = caplog.records
        assert "step_00000020 is not used: " in record.getMessage()
        assert record.getMessage().endswith(" holds numbers that are NaN or infinite")
    assert reader.damaged == {two / "step_00000020"}
    # Its moments are of no concern to who reads the params alone.
    assert reader.restore_params(abstract(state).params)[0] == 20
    rewrite_state(two / "step_00000010", spoiled(state, 0, jnp.nan))
    with pytest.raises(RuntimeError) as failure:
        reader.restore(abstract(state))
    message = str(failure.value)
    assert "step 10: params.embed holds numbers that are NaN or infinite" in message
    assert "step 20: optimizer." in message and "--workdir" in message
    assert "\n" not in message


def rewrite(checkpoint, **changes):
    """A manifest with these changes, its checksum right."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"] | changes
    path.write_text(sealed(manifest))


def test_a_checkpoint_of_another_format_is_refused(two, reader):
    rewrite(two / "step_00000020", format=99)
    with pytest.raises(ValueError, match="format 99 and this code reads 1"):
        reader.restore(abstract(make_state()))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": None},
        {"files": [["host.json"]]},
        {"files": {"host.json": 5}},
        {"files": {"host.json": {"bytes": "5"}}},
        {"arrays": True},
        {"arrays": {"params.embed": []}},
        {"arrays": {"params.embed": ["float32", ["16"]]}},
        {"step": "20"},
        {"base": 1},
    ],
    ids=str,
)
def test_a_sealed_manifest_of_another_shape_is_not_used(two, reader, changes):
    rewrite(two / "step_00000020", **changes)
    assert_restored(reader.restore(abstract(make_state())), 10, make_state(10))
    assert reader.restore_params(abstract(make_state()).params)[0] == 10


def test_a_sealed_manifest_without_anything_is_not_used(two, reader):
    (two / "step_00000020" / "manifest.json").write_text(sealed({}))
    assert_restored(reader.restore(abstract(make_state())), 10, make_state(10))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "state/../../secret"])
def test_a_manifest_that_leaves_its_checkpoint_is_not_used(two, reader, name):
    (two / "secret").write_text("whole")
    (two / "step_00000020" / "link").symlink_to(two)
    for each in (name, "link/secret"):
        rewrite(two / "step_00000020", files={each: {"bytes": 5, "sha256": ""}})
        restored = reader.restore(abstract(make_state()))
        assert_restored(restored, 10, make_state(10))


@pytest.mark.parametrize("text", ['{"a":', "["], ids=["objects", "lists"])
def test_a_manifest_that_nests_without_end_is_not_used(two, reader, text):
    (two / "step_00000020" / "manifest.json").write_text(text * 10**6)
    assert_restored(reader.restore(abstract(make_state())), 10, make_state(10))


def test_another_model_is_refused_by_the_name_of_a_parameter(two, reader):
    with pytest.raises(ValueError) as refusal:
        reader.restore(abstract(make_state(width=6)))
    message = str(refusal.value)
    assert "params.embed is float32[16, 8] there and float32[16, 6] here" in message
    assert "settings that it was written with" in message

    less = abstract(make_state())
    less = less.replace(params={"embed": less.params["embed"]})
    with pytest.raises(ValueError, match=r"layers\.0\.w is bfloat16\[8, 4\]"):
        reader.restore(less)
