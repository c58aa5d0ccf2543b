"""What a window's annotation writes into its batches, worked out by hand."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_assembly import CUT, EQUAL, MIXED, ROWS, G, assembler, by_token

from scalerl_jax.algo.advantages import group_advantages, unnormalized
from scalerl_jax.algo.regularizers import kl_k1, kl_k2, kl_k3
from scalerl_jax.batching.packing import abstract_microbatch
from scalerl_jax.learner.step import TrainState
from scalerl_jax.learner.window_scores import Annotator, Scorer, of_params, of_state
from scalerl_jax.objective.advantages import KlPenalty
from scalerl_jax.parallel.mesh import make_mesh

MESH = make_mesh(jax.devices()[:1])


def put(value):
    return jax.device_put(jnp.float32(value), NamedSharding(MESH, PartitionSpec()))


@functools.cache
def scorer():
    """Log-probability of a token = -params * token / 10, for a policy of one number."""
    return Scorer(
        lambda params, batch: -params * batch.targets / 10.0,
        params=put(0.0),
        batch=abstract_microbatch(**ROWS),
        mesh=MESH,
    )


def state(params=1.0, reference=None):
    return TrainState(
        params=put(params),
        opt_state=(),
        policy_version=jnp.int32(0),
        reference=reference,
    )


def centered(rewards, judged, kept):
    advantages = group_advantages(jnp.asarray(rewards), judged, group_size=G)
    return unnormalized(advantages, kept)


def completed(assemble, groups):
    """The batch of these groups with scores of a reference of 1, and its advantages."""
    annotate = Annotator(scores={"reference": of_state("reference", scorer())})
    batch = assemble(groups, learner_version=5)
    (scores,) = annotate(state(reference=put(1.0)), [batch.packed])
    return assemble.complete(batch, scores).packed


def test_log_probabilities_are_of_the_params_asked_for():
    scores = {name: of_state(name, scorer()) for name in ("proximal", "reference")}
    annotate = Annotator(scores=scores | {"teacher": of_params(put(3.0), scorer())})
    batch = assembler()([MIXED, CUT], learner_version=5).packed
    (scores,) = annotate(state(1.0, reference=put(2.0)), [batch])
    mask = batch.mask
    np.testing.assert_allclose(scores["proximal"][mask], -batch.targets[mask] / 10)
    np.testing.assert_allclose(scores["reference"][mask], -batch.targets[mask] / 5)
    np.testing.assert_allclose(
        scores["teacher"][mask], -3 * batch.targets[mask] / 10, rtol=1e-6
    )


@pytest.mark.parametrize(
    "estimator, first, second",
    [
        # behavior -1; tokens 10, 11 and 20, 21, 22 at -1.0, -1.1 and -2.0, -2.1, -2.2
        pytest.param(kl_k1, 0.0 + 0.1, 1.0 + 1.1 + 1.2, id="k1"),
        pytest.param(kl_k2, 0.01 / 2, (1.0 + 1.21 + 1.44) / 2, id="k2"),
    ],
)
def test_the_kl_of_a_rollout_is_taken_off_its_reward(estimator, first, second):
    assemble = assembler(
        advantages=centered, penalty=KlPenalty(estimator=estimator, coefficient=0.5)
    )
    # The group of equal verdicts has left, and its place is kept.
    found = completed(assemble, [EQUAL, MIXED])
    rewards = 1.0 - 0.5 * first, -1.0 - 0.5 * second
    tokens = by_token(found)
    np.testing.assert_allclose(tokens[10][1], (rewards[0] - rewards[1]) / 2, rtol=1e-5)
    np.testing.assert_allclose(tokens[22][1], (rewards[1] - rewards[0]) / 2, rtol=1e-5)


def test_a_hard_prompt_keeps_its_reward():
    assemble = assembler(
        advantages=centered,
        penalty=KlPenalty(estimator=kl_k1, coefficient=0.5),
        scores={"regularization": lambda passed, judged: jnp.zeros(G)},
    )
    found = completed(assemble, [MIXED])
    assert {values[1] for values in by_token(found).values()} == {1.0, -1.0}


@pytest.mark.usefixtures("no_program_cache")
def test_a_step_with_other_sampled_tokens_compiles_nothing_for_the_kl(caplog):
    batch = assembler()([MIXED, CUT], learner_version=5).packed
    scores = {"reference": np.full(batch.mask.shape, -1.5, np.float32)}
    batch = dataclasses.replace(batch, scores=scores)
    penalty = KlPenalty(estimator=kl_k3, coefficient=0.5)
    penalty.of_tokens(batch)
    place = tuple(np.argwhere(batch.mask)[0])
    fewer = batch.mask.copy()
    fewer[place] = False
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = penalty.of_tokens(dataclasses.replace(batch, mask=fewer))
    assert not [each for each in caplog.messages if "ompil" in each]
    assert found[place] == 0 and (found[fewer] > 0).all()
