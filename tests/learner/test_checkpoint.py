import gc
import json
import logging
import random
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalerl_jax.learner.checkpoint import Checkpointer, UnsavedError
from scalerl_jax.learner.places import sealed
from scalerl_jax.types import Group, Prompt, Rollout

HOST = {"cursor": 3, "epoch": 0, "history": [[1, 0.1], [2, 1e-310]], "ledger": None}


@struct.dataclass(kw_only=True)
class State:
    params: dict
    optimizer: tuple
    step: jax.Array


def make_state(step=1, *, width=8):
    params = {
        "embed": jnp.arange(16 * width, dtype=jnp.float32).reshape(16, width) / 7
        + step,
        "layers": [{"w": jnp.full((width, 4), 0.1 * step, jnp.bfloat16)}] * 2,
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(params=params, optimizer=optimizer.init(params), step=jnp.int32(step))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def make_group(ticket, lengths):
    rng = np.random.default_rng(ticket)
    rollouts = tuple(
        Rollout(
            completion_tokens=rng.integers(0, 99, length).astype(np.int32),
            completion_mask=rng.random(length) < 0.5,
            behavior_logprobs=-rng.random(length).astype(np.float32),
            policy_versions=np.full(length, ticket, np.int32),
            cut_off=length > 4,
            interrupted=length == 2,
            reward=1.0 / 3.0,
            passed=length == 1,
            status="verifier_timeout",
        )
        for length in lengths
    )
    prompt = Prompt(
        prompt_id=ticket + 10,
        epoch=2,
        task="chain_sum",
        text="1 + 1 = \u00bd?",
        tokens=np.arange(ticket + 1, dtype=np.int32),
        reference={"answer": "2", "metadata": {"terms": [1, 1.5, None]}},
    )
    return Group(ticket=ticket, prompt=prompt, rollouts=rollouts, finished_version=4)


GROUPS = (make_group(0, [5, 1]), make_group(1, [2, 7]))


def exact(tree):
    """The tree with every array as its type, shape and bytes: == is bit for bit."""

    def described(leaf):
        if isinstance(leaf, jax.Array | np.ndarray):
            array = np.asarray(leaf)
            return (str(array.dtype), array.shape, array.tobytes())
        return (type(leaf), leaf)

    # Fields that are no leaves (task, text, ticket) are compared as structure.
    leaves, structure = jax.tree.flatten(tree)
    return [described(leaf) for leaf in leaves], structure


def assert_restored(restored, step, state, groups=GROUPS):
    assert restored is not None
    assert restored.step == step
    assert exact(restored.state) == exact(state)
    assert restored.host == {**HOST, "step": step}
    assert exact(restored.groups) == exact(groups)
    assert [type(group.rollouts[0].reward) for group in restored.groups] == [
        float for _ in groups
    ]


def save(checkpointer, step, *, groups=GROUPS):
    checkpointer.save(
        step, state=make_state(step), host={**HOST, "step": step}, groups=groups
    )


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", every=10, keep=3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    """A directory with good checkpoints of steps 10 and 20, to be copied."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    made = Checkpointer(directory, every=10, keep=3)
    save(made, 10)
    save(made, 20)
    made.close()
    return directory


@pytest.fixture
def two(tmp_path, two_saves):
    shutil.copytree(two_saves, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_nothing_saved_is_none_and_makes_no_directory(checkpointer, tmp_path):
    assert checkpointer.restore(abstract(make_state())) is None
    assert list(tmp_path.iterdir()) == []
    for step, since, due in [
        (20, 19, True),
        (21, 20, False),
        (21, 18, True),
        (20, 20, False),
        (31, 11, True),
    ]:
        assert checkpointer.due(step, since=since) == due


@pytest.mark.parametrize("groups", [GROUPS, ()], ids=["groups", "no groups"])
def test_all_reads_back_bit_for_bit(checkpointer, groups):
    save(checkpointer, 10, groups=groups)
    restored = checkpointer.restore(abstract(make_state()))
    assert_restored(restored, 10, make_state(10), groups)


def test_float32_extremes_read_back(checkpointer):
    bits = [
        0,
        1,
        0x80000000,
        0x80000001,
        0x007FFFFF,
        0x7F7FFFFF,
        0x7F800000,
        0xFFC00001,
    ]
    values = np.array(bits, np.uint32).view(np.float32)
    state = {"a": jax.device_put(values), "b": jax.device_put(values[1])}
    checkpointer.save(1, state=state, host={}, groups=())
    assert exact(checkpointer.restore(abstract(state)).state) == exact(state)


def test_a_donated_state_is_already_on_disk(checkpointer):
    state = {"w": jnp.arange(1000.0)}
    expected = exact(jax.tree.map(np.array, state))
    checkpointer.save(1, state=state, host={}, groups=())
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state)
    assert state["w"].is_deleted()
    restored = checkpointer.restore({"w": jax.ShapeDtypeStruct((1000,), jnp.float32)})
    assert exact(restored.state) == expected


def test_a_sharded_state_is_restored_onto_another_sharding(checkpointer):
    values = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    other = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"))
    state = {
        "w": jax.device_put(values, NamedSharding(mesh, P("fsdp", "tensor"))),
        "b": jax.device_put(values[0], NamedSharding(mesh, P())),
    }
    wanted = {
        "w": NamedSharding(other, P(None, ("b", "a"))),
        "b": NamedSharding(other, P("a")),
    }
    checkpointer.save(1, state=state, host={}, groups=())
    restored = checkpointer.restore(
        jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            wanted,
        )
    )
    assert exact(restored.state) == exact(state)
    assert {name: leaf.sharding for name, leaf in restored.state.items()} == wanted


def test_the_params_alone_are_read_back(two, checkpointer):
    params = abstract(make_state()).params
    step, found = checkpointer.restore_params(params)
    assert step == 20
    assert exact(found) == exact(make_state(20).params)
    (two / "step_00000020" / "host.json").write_text("{}")
    step, found = checkpointer.restore_params(params)
    assert step == 10
    assert exact(found) == exact(make_state(10).params)
    other = {"embed": params["embed"]}
    with pytest.raises(ValueError, match=r"params\.layers\.0\.w is .* there and ab"):
        checkpointer.restore_params(other)


def test_params_of_a_run_without_checkpoint_are_none(checkpointer):
    assert checkpointer.restore_params(abstract(make_state()).params) is None


def test_the_newest_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, every=1, keep=2)
    for step in (9, 10, 100, 11):
        save(checkpointer, step)
    assert checkpointer.steps() == [11, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000011",
        "step_00000100",
    ]
    checkpointer.close()


def test_a_step_saved_again_replaces_the_first(checkpointer, tmp_path):
    save(checkpointer, 10)
    save(checkpointer, 10, groups=())
    assert_restored(
        checkpointer.restore(abstract(make_state())), 10, make_state(10), ()
    )
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_kill_between_the_two_renames_loses_nothing(two, checkpointer):
    (two / "step_00000020").rename(two / "step_00000020.replaced")
    shutil.copytree(two / "step_00000010", two / ".saving_00000020_1")
    assert_restored(checkpointer.restore(abstract(make_state())), 20, make_state(20))
    save(checkpointer, 20)
    assert sorted(path.name for path in two.iterdir()) == [
        "step_00000010",
        "step_00000020",
    ]


def files_of(directory):
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file()
    )


def damage_each_file(damage):
    """One checkpoint per file of a checkpoint, that file alone damaged."""

    def test(two, checkpointer, caplog):
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
            restored = checkpointer.restore(abstract(make_state()))
            assert_restored(restored, 10, make_state(10))
            (record,) = [
                r
                for r in caplog.records
                if r.levelno == logging.WARNING and "is not" in r.msg
            ]
            assert "step_00000020" in record.getMessage()
            assert name in record.getMessage()
            (newest / name).write_bytes(whole[name])
        restored = checkpointer.restore(abstract(make_state()))
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


def test_a_checkpoint_under_another_name_is_found(two, checkpointer):
    (two / "step_00000020").rename(two / "step_00000030")
    assert_restored(checkpointer.restore(abstract(make_state())), 10, make_state(10))


def test_a_run_goes_on_over_a_damaged_checkpoint(two, checkpointer):
    (two / "step_00000020" / "host.json").unlink()
    assert checkpointer.restore(abstract(make_state())).step == 10
    save(checkpointer, 15)
    assert checkpointer.steps() == [10, 15]  # the damaged one does not count
    save(checkpointer, 20)
    assert_restored(checkpointer.restore(abstract(make_state())), 20, make_state(20))


def test_all_damaged_is_an_error_that_says_what_and_why(two, checkpointer):
    (two / "step_00000010" / "host.json").write_text("{}")
    (two / "step_00000020" / "manifest.json").unlink()
    with pytest.raises(RuntimeError) as failure:
        checkpointer.restore(abstract(make_state()))
    message = str(failure.value)
    assert str(two) in message
    assert "step 20: manifest.json is missing" in message
    assert "step 10: host.json has 2 of" in message
    assert "--workdir" in message


def rewrite(checkpoint, **changes):
    """A manifest with these changes, its checksum right."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"] | changes
    path.write_text(sealed(manifest))


def test_a_checkpoint_of_another_format_is_refused(two, checkpointer):
    rewrite(two / "step_00000020", format=99)
    with pytest.raises(ValueError, match="format 99 and this code reads 1"):
        checkpointer.restore(abstract(make_state()))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "state/../../secret"])
def test_a_manifest_that_leaves_its_checkpoint_is_not_used(two, checkpointer, name):
    (two / "secret").write_text("whole")
    (two / "step_00000020" / "link").symlink_to(two)
    for each in (name, "link/secret"):
        rewrite(two / "step_00000020", files={each: {"bytes": 5, "sha256": ""}})
        restored = checkpointer.restore(abstract(make_state()))
        assert_restored(restored, 10, make_state(10))


@pytest.mark.parametrize("text", ['{"a":', "["], ids=["objects", "lists"])
def test_a_manifest_that_nests_without_end_is_not_used(two, checkpointer, text):
    (two / "step_00000020" / "manifest.json").write_text(text * 10**6)
    assert_restored(checkpointer.restore(abstract(make_state())), 10, make_state(10))


# What orbax leaves unfinished when one of its arrays cannot be written.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_error_and_no_log(tmp_path, caplog):
    with small_run.mounted(tmp_path / "disk", "size=400k") as disk:
        checkpointer = Checkpointer(disk / "checkpoints", every=1, keep=2)
        save(checkpointer, 1)
        big = {f"w{place}": jnp.full(10**5, place) for place in range(9)}
        with pytest.raises(RuntimeError, match=r"step 2 .*No space.*\[1\] are untou"):
            checkpointer.save(2, state=big, host={}, groups=())
        restored = checkpointer.restore(abstract(make_state()))
        assert_restored(restored, 1, make_state(1))
        checkpointer.close()
        gc.collect()  # asyncio logs what nobody has asked for when it is collected
    assert not caplog.records


def test_another_model_is_refused_by_the_name_of_a_parameter(two, checkpointer):
    with pytest.raises(ValueError) as refusal:
        checkpointer.restore(abstract(make_state(width=6)))
    message = str(refusal.value)
    assert "params.embed is float32[16, 8] there and float32[16, 6] here" in message
    assert "settings that it was written with" in message

    less = abstract(make_state())
    less = less.replace(params={"embed": less.params["embed"]})
    with pytest.raises(
        ValueError, match=r"layers\.0\.w is bfloat16\[8, 4\] there and ab"
    ):
        checkpointer.restore(less)


@pytest.mark.parametrize(
    "value",
    [(1, 2), {3: 4}, np.float32(1), {"deep": [np.zeros(2)]}, b"x"],
    ids=repr,
)
def test_a_host_value_that_would_change_is_refused(checkpointer, value):
    with pytest.raises(ValueError, match="host.bad"):
        checkpointer.save(1, state={"w": jnp.ones(1)}, host={"bad": value}, groups=())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints", every=1, keep=1)
    with pytest.raises(RuntimeError, match="step 1 to .*file/checkpoints.*free space"):
        save(checkpointer, 1)
    checkpointer.close()


class HeldFiles:
    """Array files that are not whole before they are let go."""

    def __init__(self, files):
        self._files = files
        self.reached, self.let_go = threading.Event(), threading.Event()

    def finalize(self, directory):
        self.reached.set()
        assert self.let_go.wait(60.0)
        self._files.finalize(directory)

    def __getattr__(self, name):
        return getattr(self._files, name)


@pytest.fixture
def held(tmp_path):
    """A checkpointer that writes beside its caller, and holds what it writes."""
    made = Checkpointer(tmp_path / "checkpoints", every=1, keep=3, background=True)
    made._arrays = HeldFiles(made._arrays)
    yield made
    made._arrays.let_go.set()
    made.close()


def test_what_is_saved_may_change_while_it_is_written(held, tmp_path):
    # Each array once: `make_state` has one twice, which cannot be donated.
    state = jax.tree.map(jnp.copy, make_state(10))
    host = {**HOST, "history": [[1, 0.1]]}
    expected = exact(jax.tree.map(np.array, state))
    held.save(10, state=state, host=host, groups=GROUPS)
    assert held._arrays.reached.wait(60.0)
    host["history"].append([2, 0.5])
    GROUPS[0].rollouts[0].completion_tokens[:] += 1
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state)
    GROUPS[0].rollouts[0].completion_tokens[:] -= 1
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    assert Checkpointer(tmp_path / "checkpoints", every=1, keep=1).steps() == []
    held._arrays.let_go.set()
    held.wait()
    restored = held.restore(abstract(make_state()))
    assert exact(restored.state) == expected
    assert restored.host == {**HOST, "history": [[1, 0.1]]}
    assert exact(restored.groups) == exact(GROUPS)


def test_a_save_waits_for_the_one_before_it(held):
    save(held, 10)
    assert held._arrays.reached.wait(60.0)
    second = threading.Thread(target=lambda: save(held, 20))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    held._arrays.let_go.set()
    second.join(60.0)
    assert not second.is_alive()
    assert held.steps() == [10, 20]


def test_a_save_that_does_not_end_is_told_after_the_limit(tmp_path, held):
    held._timeout_s = 0.05
    save(held, 10)
    assert held._arrays.reached.wait(60.0)
    with pytest.raises(
        UnsavedError,
        match=r"has not ended within 0\.05 s in .*those of steps \[\]",
    ):
        save(held, 20)
    held._timeout_s = 60.0


def test_a_save_that_fails_is_raised_by_the_next_look(held, tmp_path):
    save(held, 10)
    assert held._arrays.reached.wait(60.0)
    shutil.rmtree(tmp_path / "checkpoints")
    held._arrays.let_go.set()
    with pytest.raises(UnsavedError, match="the checkpoint of step 10 to "):
        for _ in range(6000):
            held.check()
            time.sleep(0.01)
    save(held, 20)  # the failure was that of one save
    assert held.steps() == [20]
