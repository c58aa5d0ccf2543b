"""Checkpoints in a bucket, whose server is a small one of the tests."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_bucket

from scalerl_jax.learner.checkpoint import Checkpointer, CheckpointReader, UnsavedError
from scalerl_jax.learner.places import BucketPlace

pytestmark = small_bucket.NEEDS_EXTRA

URL = "gs://bucket/run/checkpoints"
ABSTRACT = {
    "params": {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)},
    "step": jax.ShapeDtypeStruct((), jnp.int32),
}


@pytest.fixture
def bucket():
    return small_bucket.empty()


@pytest.fixture
def checkpointer(bucket):
    made = Checkpointer(URL, every=1, keep=2)
    yield made
    bucket.denied = False
    made.close()


def state(step):
    values = np.arange(512, dtype=np.float32).reshape(64, 8) / 7 + step
    return {"params": {"w": jnp.asarray(values)}, "step": jnp.int32(step)}


def save(checkpointer, step):
    checkpointer.save(step, state=state(step), host={"step": step}, groups=())


def restored_step(checkpointer):
    """The step that is gone on from, all of whose content is checked."""
    found = checkpointer.restore(ABSTRACT)
    assert found is not None and found.host == {"step": found.step}
    expected = state(found.step)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.state, expected))
    return found.step


def test_nothing_saved_is_none(checkpointer):
    assert checkpointer.restore(ABSTRACT) is None
    assert checkpointer.steps() == []


def test_what_is_saved_reads_back_and_the_newest_are_kept(bucket, checkpointer):
    for step in (1, 2, 3):
        save(checkpointer, step)
    assert checkpointer.steps() == [2, 3]
    folders = {name.split("/")[2] for name in bucket.names("run/checkpoints/")}
    assert folders == {"step_00000002", "step_00000003"}
    assert restored_step(checkpointer) == 3
    step, params = CheckpointReader(BucketPlace(URL)).restore_params(ABSTRACT["params"])
    assert step == 3 and np.array_equal(params["w"], state(3)["params"]["w"])


def test_the_manifest_comes_last_and_what_must_precede_it_before(bucket):
    before = []
    checkpointer = Checkpointer(
        URL, every=1, keep=2, before_seal=lambda: before.append(list(bucket.written))
    )
    save(checkpointer, 1)
    (written,) = before
    assert bucket.written == [
        *written,
        "run/checkpoints/step_00000001/manifest.json",
        "run/checkpoints.json",
    ]
    checkpointer.close()


def test_checkpoints_that_were_removed_are_missed(bucket, checkpointer):
    save(checkpointer, 1)
    for name in bucket.names("run/checkpoints/"):
        bucket.delete(name)
    with pytest.raises(
        ValueError, match=r"step 1 was there.*remove gs://bucket/run/ch"
    ):
        checkpointer.restore(ABSTRACT)
    for broken in (b"[1]", b"7", b"{"):
        bucket.write("run/checkpoints.json", broken)
        with pytest.raises(ValueError, match=r"gs://bucket/run/checkpoints\.json "):
            checkpointer.restore(ABSTRACT)
    bucket.delete("run/checkpoints.json")
    assert checkpointer.restore(ABSTRACT) is None


def test_without_a_manifest_it_is_none_and_a_save_clears_it_away(bucket, checkpointer):
    save(checkpointer, 1)
    save(checkpointer, 2)
    bucket.delete("run/checkpoints/step_00000002/manifest.json")
    assert checkpointer.steps() == [1]
    assert restored_step(checkpointer) == 1
    bucket.write("run/checkpoints/step_00000003/state/of-a-killed-save", b"half")
    save(checkpointer, 4)
    folders = {name.split("/")[2] for name in bucket.names("run/checkpoints/")}
    assert folders == {"step_00000001", "step_00000004"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda bucket, name, data: bucket.write(name, data[: len(data) // 2]),
        lambda bucket, name, data: bucket.write(name, bytes([data[0] ^ 1]) + data[1:]),
        lambda bucket, name, data: bucket.delete(name),
    ],
    ids=["torn", "a flipped bit", "missing"],
)
def test_damage_to_any_object_is_found(bucket, checkpointer, damage, caplog):
    save(checkpointer, 1)
    save(checkpointer, 2)
    newest = "run/checkpoints/step_00000002/"
    names = [name for name in bucket.names(newest) if bucket.objects[name][0]]
    assert {f"{newest}host.json", f"{newest}manifest.json"} < set(names)
    for name in names:
        data = bucket.objects[name][0]
        damage(bucket, name, data)
        found = checkpointer.restore(ABSTRACT)
        assert found.step == 1, name
        bucket.write(name, data)
    assert restored_step(checkpointer) == 2


def test_a_step_saved_again_replaces_the_first(bucket, checkpointer):
    save(checkpointer, 1)
    # How many objects a state has may differ from one save to the next: their
    # generations say that none is left of the first.
    newest = max(generation for _, generation in bucket.objects.values())
    checkpointer.save(1, state=state(5), host={"step": 5}, groups=())
    assert checkpointer.steps() == [1]
    assert int(checkpointer.restore(ABSTRACT).state["step"]) == 5
    assert all(generation > newest for _, generation in bucket.objects.values())


def test_a_bucket_that_takes_nothing_is_one_error(bucket, checkpointer):
    save(checkpointer, 1)
    bucket.denied = True
    with pytest.raises(UnsavedError, match=r"step 2 to gs://bucket/run/checkpoints/st"):
        save(checkpointer, 2)
    bucket.denied = False
    assert restored_step(checkpointer) == 1


def test_a_bucket_that_does_not_answer_damages_no_checkpoint(bucket, checkpointer):
    class Silent(BucketPlace):
        """It does not answer once, and the older checkpoint could be read."""

        asked = 0

        def known_files(self, path):
            self.asked += 1
            if self.asked == 1:
                raise TimeoutError("no answer within 120 s")
            return super().known_files(path)

    save(checkpointer, 1)
    save(checkpointer, 2)
    reader = CheckpointReader(Silent(URL))
    with pytest.raises(TimeoutError, match="no answer"):
        reader.restore(ABSTRACT)
    assert not reader.damaged
    assert restored_step(reader) == 2


def test_a_save_under_way_is_no_checkpoint_yet(bucket):
    reached, let_go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        assert let_go.wait(60.0)

    checkpointer = Checkpointer(URL, every=1, keep=2, background=True, before_seal=hold)
    save(checkpointer, 1)
    assert reached.wait(60.0)
    assert CheckpointReader(BucketPlace(URL)).restore(ABSTRACT) is None
    let_go.set()
    checkpointer.wait()
    assert restored_step(CheckpointReader(BucketPlace(URL))) == 1
    checkpointer.close()
