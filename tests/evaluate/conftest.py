"""The command lines in this process, on the small base checkpoint."""

import json

import jax
import jax.numpy as jnp
import pytest
import small_run
from small_evaluation import BASE, command_line

from scalerl_jax import config as config_lib
from scalerl_jax.evaluate import __main__ as command
from scalerl_jax.evaluate import difficulty
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.step import init_state
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params
from scalerl_jax.wiring.learning import make_adamw


@pytest.fixture
def evaluate(capsys):
    """Run the command; exit status, stdout and stderr."""

    def run(**flags):
        status = command.run(["evaluate", *command_line(flags)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def measure(capsys):
    """Run the command on difficulty; exit status, stdout and stderr."""

    def run(**flags):
        status = difficulty.main(command_line(flags))
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory):
    """A run with two checkpoints: the policy spoiled at step 1, as it was at step 2."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    settings = small_run.make_config()
    params = load_params(BASE, read_architecture(BASE), dtype=jnp.float32)
    checkpointer = Checkpointer(directory / "checkpoints", every=1, keep=2)
    for step, factor in ((1, 0.0), (2, 1.0)):
        scaled = jax.tree.map(lambda leaf, factor=factor: leaf * factor, params)
        state = init_state(scaled, make_adamw(settings))
        checkpointer.save(step, state=state, host={}, groups=())
    checkpointer.close()
    record = {"config": config_lib.to_json(settings)}
    (directory / "config.json").write_text(json.dumps(record))
    return directory
