"""`examples/scalerl_in_one_file.py` computes what a run does."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run

from scalerl_jax import wiring
from scalerl_jax.model.weights import load_params
from scalerl_jax.objective.assembly import make_assembler
from scalerl_jax.parallel.mesh import AXES, make_mesh
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import Group, Prompt, Rollout

FILE = small_run.ROOT / "examples" / "scalerl_in_one_file.py"


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("scalerl_in_one_file", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def completions(random, count, vocabulary):
    """Random tokens, whose log-probs are off enough for the cap of the ratio."""
    for sample in range(count):
        length = int(random.integers(3, 12))
        yield Completion(
            request_id=0,
            sample=sample,
            tokens=random.integers(3, vocabulary, length).astype(np.int32),
            mask=random.random(length) > 0.1,
            logprobs=random.uniform(-20.0, -1.0, length).astype(np.float32),
            full_logprobs=np.zeros(length, np.float32),
            top_tokens=np.zeros((length, 0), np.int32),
            top_logprobs=np.zeros((length, 0), np.float32),
            versions=np.zeros(length, np.int32),
            cut_off=False,
            interrupted=False,
        )


def as_of_a_run(group, number):
    """The same group, as a run's queue has it."""
    return Group(
        ticket=number,
        prompt=Prompt(
            prompt_id=number,
            epoch=0,
            task="chain_sum",
            text="",
            tokens=group.prompt_tokens,
            reference={},
        ),
        rollouts=tuple(
            Rollout(
                completion_tokens=each.tokens,
                completion_mask=each.mask,
                behavior_logprobs=each.logprobs,
                policy_versions=each.versions,
                cut_off=False,
                interrupted=False,
                reward=float(reward),
                passed=bool(reward > 0),
                status="correct" if reward > 0 else "wrong",
            )
            for each, reward in zip(group.completions, group.rewards, strict=True)
        ),
        finished_version=0,
    )


def test_loss_and_update_are_those_of_a_run(one_file):
    random = np.random.default_rng(0)
    policy = one_file.make_policy()
    groups = []
    for number in range(one_file.PROMPTS):
        solved = random.random(one_file.GROUP) < (0.0 if number == 2 else 0.5)
        groups.append(
            one_file.Group(
                random.integers(3, 60, random.integers(4, 20)).astype(np.int32),
                tuple(completions(random, one_file.GROUP, 60)),
                np.where(solved, 1.0, -1.0).astype(np.float32),
            )
        )
    params = load_params(one_file.BASE, policy.arch, dtype=jnp.float32)
    moments = one_file.make_optimizer().init(params)
    batch = one_file.lay_out(groups)
    found, _, loss = one_file.train_step(params, moments, batch, arch=policy.arch)

    config = small_run.make_config(
        {
            **{f"mesh.{axis}": 1 for axis in AXES},
            "batch.num_prompts": one_file.PROMPTS,
            "batch.group_size": one_file.GROUP,
            "optimizer.learning_rate": one_file.LEARNING_RATE,
            "optimizer.warmup_steps": one_file.WARMUP,
            "objective.max_importance_ratio": one_file.MAX_RATIO,
        }
    )
    assemble = make_assembler(config, policy.arch)
    learner, state = wiring.make_local_learner(
        config,
        policy.arch,
        make_mesh(jax.devices()[:1], **dict.fromkeys(AXES, 1)),
        to_sampler=None,
        checkpointer=None,
        progress=Progress(),
    )
    asked = [as_of_a_run(group, number) for number, group in enumerate(groups)]
    packed = assemble(asked, learner_version=0)
    (scores,) = learner.annotate(state, [packed.packed])
    state, metrics, skipped = learner.step(
        state, assemble.complete(packed, scores).packed
    )
    assert not skipped
    assert float(loss) == pytest.approx(metrics["loss"], rel=1e-5)
    expected, updated = jax.tree.leaves(state.params), jax.tree.leaves(found)
    before = jax.tree.leaves(params)
    for one, other, start in zip(expected, updated, before, strict=True):
        change = np.asarray(one) - np.asarray(start)
        assert np.abs(change).max() > 0
        np.testing.assert_allclose(other - start, change, rtol=0.02, atol=2e-6)
