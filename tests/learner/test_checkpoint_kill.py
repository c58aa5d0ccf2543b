"""What a killed process or a full disk leaves behind, in processes of their own."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalerl_jax
from scalerl_jax.learner.checkpoint import Checkpointer

pytestmark = pytest.mark.slow  # processes that are killed

SAVE = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from scalerl_jax.learner.checkpoint import Checkpointer

def save(step):
    state = {"w": jnp.full((300, 200), step / 7), "step": jnp.int32(step)}
    host = {"step": step, "padding": "x" * 300_000}
    checkpointer.save(step, state=state, host=host, groups=())

background = sys.argv[2:] == ["beside"]
checkpointer = Checkpointer(sys.argv[1], every=1, keep=2, background=background)
save(1)
checkpointer.wait()
"""
SAVE_FOREVER = """
step = 1
while True:
    print(step, flush=True)
    step += 1
    save(step)
"""
SAVE_BEYOND_A_LIMIT = """
import resource
# No file may grow past this: as on a full disk, the write ends in an OSError.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    save(2)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
save(3)
print(checkpointer.steps())
"""
ABSTRACT = {
    "w": jax.ShapeDtypeStruct((300, 200), jnp.float32),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
}


def child(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", SAVE + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(scalerl_jax.__file__).parents[1],
    )


def restore(directory):
    """The step of the newest checkpoint, whose content is checked against it."""
    checkpointer = Checkpointer(directory, every=1, keep=2)
    restored = checkpointer.restore(ABSTRACT)
    assert restored is not None
    assert restored.host == {"step": restored.step, "padding": "x" * 300_000}
    assert int(restored.state["step"]) == restored.step
    expected = np.full((300, 200), np.float32(restored.step / 7))
    assert np.asarray(restored.state["w"]).tobytes() == expected.tobytes()
    checkpointer.save(restored.step + 1, state=restored.state, host={}, groups=())
    assert checkpointer.steps() == [restored.step, restored.step + 1]
    checkpointer.close()
    assert len(os.listdir(directory)) == 2  # nothing half-written is left
    return restored.step


KILLS = int(os.environ.get("SCALERL_JAX_KILLS", "2"))


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_kill_at_any_moment_leaves_the_newest_whole(tmp_path, caplog, seed):
    process = child(SAVE_FOREVER, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    time.sleep(random.Random(seed).uniform(0.0, 0.8))
    process.kill()
    output, _ = process.communicate(timeout=30)
    told = int((output.split() or ["1"])[-1])
    assert restore(tmp_path) in (told, told + 1)  # killed before it could say so
    assert not [r for r in caplog.records if "is not used" in r.getMessage()]


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_kill_beside_a_save_leaves_that_before_it_whole(tmp_path, caplog, seed):
    process = child(SAVE_FOREVER, tmp_path, "beside")
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    time.sleep(random.Random(seed).uniform(0.0, 0.8))
    process.kill()
    output, _ = process.communicate(timeout=30)
    told = int((output.split() or ["1"])[-1])  # begun, and the one before it complete
    assert restore(tmp_path) in (max(told - 1, 1), told, told + 1)
    assert not [r for r in caplog.records if "is not used" in r.getMessage()]


@pytest.mark.parametrize(
    "limit", [100, 700, 280_000], ids=["metadata", "arrays", "host state"]
)
def test_a_full_disk_is_named_and_older_checkpoints_stay(tmp_path, limit):
    directory = tmp_path / "checkpoints"
    output, errors = child(SAVE_BEYOND_A_LIMIT, directory, limit).communicate(
        timeout=60
    )
    message, *_, steps = output.splitlines()
    assert "cannot write the checkpoint of step 2" in message, errors
    assert str(directory) in message
    assert "those of steps [1] are untouched: free space" in output
    assert steps == "[1, 3]"
    assert restore(directory) == 3
