import contextlib
import gc
import resource
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_checkpoints import (
    GROUPS,
    HOST,
    abstract,
    assert_restored,
    exact,
    make_state,
    save,
)

from scalerl_jax.learner.checkpoint import Checkpointer, UnsavedError


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", every=10, keep=3)
    yield made
    made.close()


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
        0xFF7FFFFF,
    ]
    values = np.array(bits, np.uint32).view(np.float32)
    state = {"a": jax.device_put(values), "b": jax.device_put(values[1])}
    checkpointer.save(1, state=state, host={}, groups=())
    assert exact(checkpointer.restore(abstract(state)).state) == exact(state)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(two, checkpointer, value):
    state = make_state(30)
    params = state.params | {"embed": state.params["embed"].at[1, 2].set(value)}
    with pytest.raises(UnsavedError) as failure:
        checkpointer.save(30, state=state.replace(params=params), host={}, groups=())
    message = str(failure.value)
    assert message.startswith(
        "the state of step 30 is not saved, as params.embed holds"
    )
    assert "those of steps [10, 20] are untouched" in message
    assert_restored(checkpointer.restore(abstract(state)), 20, make_state(20))


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


def test_a_run_goes_on_over_a_damaged_checkpoint(two, checkpointer):
    (two / "step_00000020" / "host.json").unlink()
    assert checkpointer.steps() == checkpointer.good() == [10, 20]  # not yet known
    assert checkpointer.restore(abstract(make_state())).step == 10
    assert checkpointer.good() == [10] and checkpointer.damaged() == {20}
    save(checkpointer, 15)
    assert checkpointer.steps() == [10, 15]  # the damaged one does not count
    save(checkpointer, 20)
    assert checkpointer.good() == [10, 15, 20]
    assert_restored(checkpointer.restore(abstract(make_state())), 20, make_state(20))


@pytest.mark.parametrize(
    "told, good", [([{20}, set()], [10]), ([set(), set()], [10, 20]), ([], [10, 20])]
)
def test_over_processes_what_a_rank_has_found_damaged_does_not_count(told, good):
    processes = pytest.importorskip("scalerl_jax.cluster.learner_processes")
    ranks = SimpleNamespace(call={"await_save": told}.__getitem__)
    files = SimpleNamespace(steps=lambda: [10, 20])
    assert processes.RemoteCheckpoints(files, ranks).good() == good


@contextlib.contextmanager
def file_limit(disk):
    """No file may be longer than this, as with `ulimit -f`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only(disk):
    """As a file system becomes one when its disk fails."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield


@pytest.mark.parametrize(
    "size, fault, words",
    [
        (
            "400k",
            contextlib.nullcontext,
            "No space left on device; .* 3,600,000 bytes",
        ),
        ("8m", read_only, r"\(Read-only file system\)"),
        ("8m", file_limit, r"\(File too large\)"),
    ],
    ids=["full", "read-only", "long files"],
)
@pytest.mark.parametrize("background", [False, True], ids=["at once", "beside"])
# What orbax leaves unfinished when one of its arrays cannot be written.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_error_and_no_log(
    tmp_path, caplog, capfd, size, fault, words, background
):
    with small_run.mounted(tmp_path / "disk", f"size={size}") as disk:
        checkpointer = Checkpointer(
            disk / "checkpoints", every=1, keep=2, background=background
        )
        save(checkpointer, 1)
        checkpointer.wait()
        big = {f"w{place}": jnp.full(10**5, place) for place in range(9)}
        with (
            fault(disk),
            pytest.raises(RuntimeError, match=f"step 2 .*{words}.*\\[1\\] are untou"),
        ):
            checkpointer.save(2, state=big, host={}, groups=())
            checkpointer.wait()
        restored = checkpointer.restore(abstract(make_state()))
        assert_restored(restored, 1, make_state(1))
        checkpointer.close()
        gc.collect()  # asyncio logs what nobody has asked for when it is collected
    assert not caplog.records
    assert not capfd.readouterr().err  # where threads of orbax write tracebacks


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
        match=r"0\.05 s in .*those of steps \[\]",
    ):
        save(held, 20)
    held._timeout_s = 60.0


def test_checkpoints_that_were_removed_are_missed(checkpointer, tmp_path):
    for step in (10, 20):
        save(checkpointer, step)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"step 20 was there.*remove .*points\.json "):
        checkpointer.restore(abstract(make_state()))
    (tmp_path / "checkpoints.json").unlink()
    assert checkpointer.restore(abstract(make_state())) is None


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
