"""Whole runs with a learned value function."""

import shutil

import jax
import numpy as np
import pytest
import small_run

from scalerl_jax import main
from scalerl_jax.learner.critic import PairedStep
from scalerl_jax.learner.step import TrainStep
from scalerl_jax.objective.assembly import make_pack
from scalerl_jax.objective.terms import needs_of, with_scores
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.wiring import devices, learning
from scalerl_jax.wiring.supervision import supervised

PPO = {
    "objective.advantage": "critic",
    "objective.zero_variance_filter": False,
    "objective.aggregation": "token",
    "objective.loss": "clipped",
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.2,
    "objective.kl_coefficient": 0.05,
    "objective.kl_estimator": "k1",
    "objective.kl_in": "reward",
    "critic.learning_rate": 1e-3,
    "critic.warmup_steps": 1,
    "critic.pretrain_steps": 2,
    "critic.gae_lambda": 0.95,
    "critic.minibatches": 2,
    "critic.value_clip": 0.2,
    "batch.group_size": 1,
    "batch.num_prompts": 8,
    "batch.epochs": 2,
    "queue.max_staleness": 1,  # in turn, so that two runs are alike
    "checkpoint.every": 4,
    "eval.every": 6,
    "eval.num_prompts": 2,
    "train.num_steps": 6,
}


ALONE = {"objective.advantage": "critic", "objective.zero_variance_filter": False}
BESIDE_FACTORS = ALONE | {"model.lora.rank": 2, "model.param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changes, words",
    [
        pytest.param(
            {"objective.advantage": "critic"},
            ("objective.zero_variance_filter = True", "set it to False"),
            id="a filter of groups",
        ),
        pytest.param(
            ALONE | {"objective.advantage_normalization": "prompt"},
            ("objective.advantage_normalization = 'prompt'", "'batch'", "'none'"),
            id="a scale of groups",
        ),
        pytest.param(
            ALONE | {"batch.dynamic_sampling": True},
            ("batch.dynamic_sampling = True", "zero_variance_filter"),
            id="groups generated anew",
        ),
        pytest.param(
            ALONE | {"critic.pretrain_steps": 4},
            ("critic.pretrain_steps = 4", "train.num_steps = 4"),
            id="no step for the policy",
        ),
        pytest.param(
            ALONE | {"critic.gae_lambda": 1.5},
            ("critic.gae_lambda = 1.5", "1 at most"),
            id="lambda above 1",
        ),
        pytest.param(
            ALONE | {"critic.learning_rate": 0.0},
            ("critic.learning_rate = 0.0", "above 0"),
            id="a critic that learns nothing",
        ),
        pytest.param(
            ALONE | {"critic.minibatches": 17},
            ("critic.minibatches = 17", "= 16 rollouts"),
            id="more run than rollouts",
        ),
        pytest.param(
            ALONE | {"critic.value_clip": 0.2},
            ("critic.value_clip = 0.2", "one step", "critic.minibatches"),
            id="a clip about where the only step begins",
        ),
        pytest.param(
            {"critic.value_clip": 0.5},
            ("critic.value_clip = 0.5", "'group_mean'", "0.0"),
            id="a setting that nothing reads",
        ),
        pytest.param(
            {"batch.group_size": 1},
            ("batch.group_size = 1", "objective.advantage = 'critic'"),
            id="one rollout without a critic",
        ),
        pytest.param(
            BESIDE_FACTORS,
            (
                "model.param_dtype = 'bfloat16' with model.lora.rank = 2",
                "set optimizer.stochastic_rounding = True, or",
                "model.param_dtype = 'float32'",
            ),
            id="weights that ignore small updates",
        ),
    ],
)
def test_what_cannot_go_with_a_critic_is_refused(changes, words):
    with pytest.raises(ValueError) as refusal:
        small_run.make_config(changes)
    for word in words:
        assert word in str(refusal.value)


def test_a_critic_beside_factors_is_rounded_at_random():
    """A warm start with the same settings has the factors alone, which are not."""
    rounded = {"optimizer.stochastic_rounding": True}
    config = small_run.make_config(BESIDE_FACTORS | rounded)
    arch, mesh = learning.make_architecture(config), make_mesh(jax.devices()[:1])
    state = learning.abstract_state(config, arch, mesh)
    trunk = state.critic.params["layers"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trunk)} == {"bfloat16"}
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(state.params))
    warm = supervised(config, num_steps=2)
    assert warm.model.lora.rank == 2 and not warm.optimizer.stochastic_rounding


@pytest.mark.parametrize(
    "changes",
    [
        {"critic.minibatches": 2},
        {"batch.epochs": 2},
        {"queue.mode": "batched", "queue.max_staleness": 2},
    ],
)
def test_a_clip_of_values_is_for_a_second_step(changes):
    config = small_run.make_config(ALONE | changes | {"critic.value_clip": 0.2})
    assert config.critic.value_clip == 0.2


def test_the_critics_rate_falls_with_the_policys():
    """Both cosines end at step 40 of the policy, which is step 120 of the critic."""
    cosine = {"optimizer.schedule": "cosine", "optimizer.decay_steps": 40}
    cosine |= {"optimizer.base_rollouts": 1}  # of the policy's rate alone
    steps = {"critic.minibatches": 3, "critic.warmup_steps": 1}
    config = small_run.make_config(ALONE | cosine | steps)
    optimizer = learning.make_critic_adamw(config)
    params = {"weight": np.ones(1, np.float32)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    moved = []
    for _ in range(121):
        updates, state = update({"weight": np.ones(1, np.float32)}, state, params)
        moved.append(float(updates["weight"][0]))
    assert moved[0] == pytest.approx(-config.critic.learning_rate, rel=0.02)
    halfway = moved[60] / moved[0]
    assert halfway == pytest.approx(0.5, abs=1e-3) and moved[120] == 0.0


def test_with_a_critic_a_group_may_be_one_rollout():
    config = small_run.make_config(ALONE | {"batch.group_size": 1})
    assert config.batch.group_size == 1


@pytest.mark.parametrize("changes, has_critic", [({}, False), (ALONE, True)])
def test_only_with_a_critic_is_there_anything_of_it(changes, has_critic):
    config = small_run.make_config(changes)
    arch = learning.make_architecture(config)
    mesh, _ = devices.make_meshes(config, arch, jax.devices())
    state = learning.abstract_state(config, arch, mesh)
    step = learning.make_train_step(
        config, learning.make_forward(config, arch, mesh), mesh
    )
    assert (state.critic is not None) == has_critic
    assert isinstance(step, PairedStep if has_critic else TrainStep)
    batch = with_scores(make_pack(config, arch)[1], needs_of(config))
    assert ({"values", "returns"} <= batch.scores.keys()) == has_critic


@pytest.mark.slow
def test_ppo_runs_and_resumes_bit_for_bit(tmp_path, shared_parts):
    first, second = tmp_path / "first", tmp_path / "second"
    config = small_run.make_config(PPO)
    main.run(config, str(first))
    rows = small_run.rows(first)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # The values are 0 at first, and all of the first window comes from those; the
    # critic's second step of the first row finds them moved by its first.
    assert rows[0]["value/explained_variance"] == 0.0 != rows[0]["value/mean"]
    assert rows[1]["value/loss"] < rows[0]["value/loss"]
    # By passes forward: one of the reference and one for the values before the window,
    # three of the policy and three of the critic in each of its two steps.
    flops = [row["compute/train_flops"] for row in rows]
    assert flops[0] == pytest.approx((flops[1] - flops[0]) * 8 / 6, rel=1e-9)
    # The policy is as it was in both of them, and changes from there on.
    assert rows[0]["grad_norm"] == rows[1]["grad_norm"] > 0.0
    assert rows[3]["ratio/max"] > rows[1]["ratio/max"]
    for row in rows:
        values = [value for name, value in row.items() if name.startswith("value/")]
        assert len(values) == 6 and np.isfinite(values).all()

    shutil.copytree(first, second)
    shutil.rmtree(small_run.checkpoints(second)[-1])
    assert small_run.checkpoints(second)[-1].name == "step_00000004"
    main.run(config, str(second))
    expected, found = (
        small_run.saved_arrays(small_run.checkpoints(run)[-1])
        for run in (first, second)
    )
    assert any("critic" in name for name in expected)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
