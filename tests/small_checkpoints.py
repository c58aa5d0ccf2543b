"""Small checkpoints: a state and groups, and a comparison of what reads back."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_run
from flax import struct

from scalerl_jax import config as config_lib
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.learner.contents import ArrayFiles
from scalerl_jax.learner.places import measure, sealed
from scalerl_jax.learner.step import init_state
from scalerl_jax.types import Group, Prompt, Rollout
from scalerl_jax.wiring.learning import make_adamw

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


def rewrite_state(checkpoint, state):
    """Give a checkpoint another state, which no save would have to accept.

    Its manifest is right: only the numbers can be wrong.
    """
    shutil.rmtree(checkpoint / "state")
    (checkpoint / "state").mkdir()
    files = ArrayFiles()
    for future in files.copy(checkpoint / "state", state):
        future.result()
    files.finalize(checkpoint / "state")
    files.close()
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    path.unlink()
    manifest["files"] = {
        str(file.relative_to(checkpoint)): measure(file)
        for file in checkpoint.rglob("*")
        if file.is_file()
    }
    path.write_text(sealed(manifest))


def save_run(directory, *params):
    """A run's settings, and a checkpoint of each params from step 1 on."""
    settings = small_run.make_config()
    optimizer = make_adamw(settings)
    checkpointer = Checkpointer(directory / "checkpoints", every=1, keep=len(params))
    for step, each in enumerate(params, start=1):
        state = init_state(each, optimizer)
        checkpointer.save(step, state=state, host={}, groups=())
    checkpointer.close()
    record = {"config": config_lib.to_json(settings)}
    (directory / "config.json").write_text(json.dumps(record))
