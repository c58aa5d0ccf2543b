import shutil

import pytest
from small_checkpoints import save

from scalerl_jax.learner.checkpoint import Checkpointer


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
