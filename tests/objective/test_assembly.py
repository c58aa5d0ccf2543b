"""What an objective computes of a batch: one program for each part of it."""

import logging

import jax
import numpy as np
import pytest
import small_run

from scalerl_jax import wiring
from scalerl_jax.algo import advantages as algo
from scalerl_jax.objective.assembly import make_assembler
from scalerl_jax.objective.terms import BASELINES

N, G = 6, 4


@pytest.mark.usefixtures("no_program_cache")
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_weights_and_advantages_are_two_programs_and_those_of_the_formulas(
    baseline, caplog
):
    changes = {"batch.num_prompts": N, "batch.group_size": G}
    config = small_run.make_config(changes | {"objective.advantage": baseline})
    assemble = make_assembler(config, wiring.make_architecture(config))
    random = np.random.default_rng(0)
    rewards = jax.numpy.asarray(random.integers(0, 2, N * G).astype(np.float32))
    judged, kept, mask = (
        jax.numpy.asarray(random.random(shape) > 0.2)
        for shape in (N * G, N * G, (N * G, config.sampler.max_completion_tokens))
    )
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        weights = assemble.weigh(mask)
        advantages = assemble.advantages.of_rewards(rewards, judged, kept)
    compiled = [each for each in caplog.messages if each.startswith("Compiling")]
    assert len(compiled) == 2, compiled
    np.testing.assert_array_equal(weights, algo.prompt_weights(mask, group_size=G))
    centered = BASELINES[baseline](rewards, judged, group_size=G)
    scaled = algo.normalize_by_batch(centered, kept, eps=config.objective.advantage_eps)
    np.testing.assert_allclose(advantages, scaled, rtol=1e-6, atol=1e-7)
