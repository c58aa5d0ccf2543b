"""A whole run of the small mixture, whose routing is replayed."""

import runpy

import pytest
import small_run

from scalerl_jax import config as config_lib

CONFIG = small_run.ROOT / "configs" / "tiny_moe.py"


@pytest.mark.slow  # the programs of a whole run
def test_replay_brings_a_sampler_in_bfloat16_nearer(tmp_path):
    settings = runpy.run_path(str(CONFIG))["get_config"]()
    settings.update_from_flattened_dict(small_run.SETTINGS)
    with small_run.built(config_lib.resolve(settings), tmp_path) as run:
        state = run.state
        sampled = run.generators.probe(run.learner.publish(state).params)
        found = run.mismatch.require(state, sampled)
    assert all(completion.experts is not None for _, completion in sampled)
    assert found.unreplayed is not None
    assert found.tokens == found.unreplayed.tokens > 100
    assert found.kl < found.unreplayed.kl
