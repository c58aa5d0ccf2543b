"""Log-probabilities of whole batches, without a gradient; FLOPs of a step, by hand."""

import jax
import numpy as np
import pytest
import small_run
from small_model import small_architecture
from small_step import (
    bench,
    make_sequences,
    mesh_of,
    sampled_logprobs,
    start_params,
)

from scalerl_jax.learner.forward import LearnerFlops
from scalerl_jax.learner.window_scores import Scorer
from scalerl_jax.wiring.learning import make_flops


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 2, 2)])
def test_every_token_has_the_log_probability_of_whole_rows_of_logits(shape):
    these = bench(shape=shape, rows=2, row_tokens=24)
    state, batch = these.state(), these.batch()
    score = Scorer(
        lambda params, batch: these.forward.logprobs(params, batch)[0],
        params=state.params,
        batch=jax.tree.map(lambda leaf: leaf[0], batch),
        mesh=mesh_of(shape),
    )
    found = score(state.params, batch)
    assert isinstance(found, np.ndarray) and found.shape == batch.mask.shape
    expected = jax.jit(sampled_logprobs)(start_params())
    behavior = np.concatenate([s.behavior_logprobs[s.mask] for s in make_sequences()])
    # Tokens are told apart by their behavior log-probabilities.
    by_token = zip(batch.behavior_logprobs[batch.mask], found[batch.mask], strict=True)
    wanted = zip(behavior, np.concatenate(expected), strict=True)
    np.testing.assert_allclose(sorted(by_token), sorted(wanted), rtol=1e-5, atol=1e-6)


# q 16x32, k and v 16x16, o 32x16, three of 16x24; two such layers; a head of 16x16,
# tied or not.  Norms are no matmuls.
LAYERS, HEAD = 2 * (512 + 256 + 256 + 512 + 3 * 384), 256
TOKENS, CONTEXT = 100, 10.0
ATTENTION = 2 * 2 * 4 * 8 * 10 * 2  # scores and mixing, 4 heads of 8, 2 layers
POLICY = TOKENS * (2 * (LAYERS + HEAD) + ATTENTION)
CRITIC = TOKENS * (2 * (LAYERS + 16) + ATTENTION)  # a head of one output


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "scores, critic_passes, before, step",
    [
        pytest.param(0, 0, 0, 3 * POLICY, id="the policy alone"),
        pytest.param(1, 0, POLICY, 3 * POLICY, id="a reference, or another anchor"),
        pytest.param(2, 0, 2 * POLICY, 3 * POLICY, id="both"),
        pytest.param(0, 1, CRITIC, 3 * POLICY + 3 * CRITIC, id="a critic"),
        pytest.param(
            1, 2, POLICY + CRITIC, 3 * POLICY + 6 * CRITIC, id="all, two critic passes"
        ),
    ],
)
def test_passes_by_hand(tied, scores, critic_passes, before, step):
    flops = LearnerFlops(
        arch=small_architecture(tied_embeddings=tied),
        scores=scores,
        critic_passes=critic_passes,
    )
    assert flops.annotation(TOKENS, CONTEXT) == before
    assert flops.step(TOKENS, CONTEXT) == step


@pytest.mark.parametrize(
    "changes, scores, critic_passes",
    [
        pytest.param({}, 0, 0, id="ScaleRL: the behavior's log-probabilities"),
        pytest.param(
            {"objective.anchor": "recomputed", "batch.epochs": 2}, 1, 0, id="the anchor"
        ),
        pytest.param(
            {"objective.kl_coefficient": 0.1, "objective.kl_estimator": "k3"},
            1,
            0,
            id="a reference",
        ),
        pytest.param(
            {
                "objective.advantage": "critic",
                "objective.zero_variance_filter": False,
            },
            0,
            1,
            id="a critic",
        ),
    ],
)
def test_what_an_objective_reads_is_paid_for(changes, scores, critic_passes):
    config = small_run.make_config(changes)
    flops = make_flops(config, small_architecture())
    assert (flops.scores, flops.critic_passes) == (scores, critic_passes)


def test_what_is_frozen_costs_no_gradient_by_hand():
    arch = small_architecture()
    flops = LearnerFlops(arch=arch)
    held = small_run.make_config({"model.frozen": ("layers/(query|.*norm)", "head")})
    of_head, query = 16 * 16, 2 * 16 * 32
    found = make_flops(held, arch)
    saved = 2 * TOKENS * (query + of_head)
    assert found.step(TOKENS, CONTEXT) == flops.step(TOKENS, CONTEXT) - saved
    rank = 2
    lora = small_run.make_config(
        {"model.lora.rank": rank, "model.lora.targets": ("layers/(query|key)",)}
    )
    factors = 2 * rank * (16 + 32 + 16 + 16)
    found = make_flops(lora, arch)
    passes = 3 * (POLICY + 2 * TOKENS * factors)
    assert found.step(TOKENS, CONTEXT) == passes - 2 * TOKENS * (LAYERS + HEAD)
