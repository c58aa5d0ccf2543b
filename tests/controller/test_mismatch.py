"""The check that the sampler is the policy, and what it must find."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import small_run

from scalerl_jax.controller.mismatch import as_sequence
from scalerl_jax.learner.forward import plain_scorer
from scalerl_jax.wiring.learning import make_forward

LIMIT = 0.05


pytestmark = pytest.mark.slow  # the programs of whole runs


@pytest.fixture(scope="module")
def config():
    return small_run.make_config({"train.max_mismatch_nats": LIMIT})


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    with small_run.built(config, tmp_path_factory.mktemp("run")) as run:
        yield run


@pytest.fixture(scope="module")
def params(run):
    """The learner's, and the sampler's copy."""
    return run.state.params, run.learner.publish(run.state).params


def compare(run, learner, sampler, *, require=False):
    """The check of a sampler with these params against a learner with those."""
    state = dataclasses.replace(run.state, params=learner)
    check = run.mismatch.require if require else run.mismatch
    return check(state, run.generators.probe(sampler))


def seen_at(run, config, params):
    """The same, but for a learner with other settings."""
    (pool,) = run.generators.evaluator.make_sampler.args  # a partial over it
    engine = pool.engine
    forward = make_forward(config, engine.settings.arch, engine.mesh)
    check = dataclasses.replace(run.mismatch, score=plain_scorer(forward))
    return check(params[0], run.generators.probe(params[1]))


def test_two_programs_on_one_version_agree(run, params):
    found = compare(run, *params)
    assert found.tokens > 50
    assert 0.0 < found.mean_abs < 1e-5
    assert found.mean_abs <= found.max_abs < 1e-4
    assert 0.0 <= found.kl < 1e-9
    assert found.metrics() == {
        "mismatch/mean_abs": found.mean_abs,
        "mismatch/max_abs": found.max_abs,
        "mismatch/kl": found.kl,
        "mismatch/tokens": found.tokens,
    }
    assert compare(run, *params, require=True) == found  # always the same prompts


def test_prompts_that_are_computed_once_agree_too(tmp_path):
    """In the layout of the train step, and over two devices."""
    config = small_run.make_config(
        {
            "batch.shared_tokens": 48,
            "batch.own_tokens": 288,
            "mesh.data": 2,
            "train.max_mismatch_nats": LIMIT,
        }
    )
    with small_run.built(config, tmp_path) as run:
        sampler = run.learner.publish(run.state).params
        found = compare(run, run.state.params, sampler)
        sampled = run.generators.probe(sampler)
        batch = run.mismatch.pack([as_sequence(*each) for each in sampled]).batch
    assert batch.sharing is not None and batch.mask.sum() == found.tokens > 50
    assert 0.0 < found.mean_abs < 1e-5


def test_two_programs_in_bfloat16_agree_on_average(tmp_path):
    config = small_run.make_config(
        {
            "model.compute_dtype": "bfloat16",
            "model.sampler_dtype": "bfloat16",
            "train.max_mismatch_nats": 0.02,
        }
    )
    with small_run.built(config, tmp_path) as run:
        params = run.state.params
        sampler = run.learner.to_sampler(params, jnp.int32(0)).params
        found = compare(run, params, sampler, require=True)
    assert 1e-4 < found.mean_abs < 0.02


def other_weights(params):
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(
        lambda leaf: leaf + 0.05 * jax.random.normal(next(keys), leaf.shape), params
    )


def no_last_norm(params):
    return params | {"final_norm": jnp.ones_like(params["final_norm"])}


def not_numbers(params):
    return params | {"final_norm": params["final_norm"] * jnp.nan}


def test_a_sampler_without_finite_logits_is_refused(run, params):
    with pytest.raises(FloatingPointError, match="logits .* are not finite"):
        compare(run, params[0], not_numbers(params[1]))


@pytest.mark.parametrize("spoil", [other_weights, no_last_norm])
def test_a_sampler_with_other_params_is_refused(run, params, spoil):
    learner, sampler = params[0], spoil(params[1])
    found = compare(run, learner, sampler)
    assert not found.mean_abs <= LIMIT
    with pytest.raises(RuntimeError) as refusal:
        compare(run, learner, sampler, require=True)
    message = str(refusal.value)
    assert f"train.max_mismatch_nats = {LIMIT}" in message
    assert f"{found.mean_abs:.3g} nats" in message and "checkpoint" in message


def test_a_forgotten_temperature_is_found(run, params):
    other = small_run.make_config({"sampler.temperature": 0.7})
    assert seen_at(run, other, params).mean_abs > LIMIT


def test_forced_tokens_are_not_compared(params, tmp_path):
    # Interrupted at once: most tokens are the phrase's, which nobody drew.
    config = small_run.make_config(
        {"interruption.min_tokens": 0, "interruption.max_tokens": 0}
    )
    with small_run.built(config, tmp_path) as run:
        found = compare(run, *params)
        result = run.generators.evaluator(params[1], policy_version=0)
    assert result.interrupted_share == 1.0
    assert found.tokens > 20
    assert found.max_abs < 1e-3


def test_a_filter_is_left_out_and_hides_nothing(params, tmp_path):
    """Log-probabilities before the filters are compared, to the same limit."""
    config = small_run.make_config(
        {
            "sampler.top_k": 5,
            "sampler.top_p": 0.7,
            "objective.allow_sampling_filters": True,
            "train.max_mismatch_nats": 1e-4,
        }
    )
    learner, sampler = params
    with small_run.built(config, tmp_path) as run:
        found = compare(run, learner, sampler, require=True)
        assert 0.0 < found.mean_abs < 1e-5
        with pytest.raises(RuntimeError, match="max_mismatch_nats = 0.0001"):
            compare(run, learner, no_last_norm(sampler), require=True)
        warmer = dataclasses.replace(config.sampler, temperature=1.5)
        other = dataclasses.replace(config, sampler=warmer)
        assert seen_at(run, other, params).mean_abs > LIMIT
