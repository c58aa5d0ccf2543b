"""What no loss and no aggregation may depend on: rows, packing, cut, order, devices.

Log-probabilities are given here, by rollout and token, so that every loss can be tried
in every layout: the model's part of the gradient is `test_step.py`'s.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_step import GROUP, LENGTHS, assert_trees_close, make_sequences, mesh_of

from scalerl_jax.algo import advantages
from scalerl_jax.batching.packing import laid_out, pack
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.config import LOSSES, Config, ObjectiveConfig
from scalerl_jax.model.architecture import batch_sharding
from scalerl_jax.objective.terms import make_objective

MOST = max(completion for _, completion in LENGTHS)
EVERY = range(len(LENGTHS))
WEIGHTINGS = {
    "constant": functools.partial(advantages.constant_weights, max_tokens=MOST),
    "prompt": functools.partial(advantages.prompt_weights, group_size=GROUP),
    "sample": advantages.sample_weights,
    "token": advantages.token_weights,
}
# Bounds that some of the tokens below are past, and others are not.
OBJECTIVES = {
    "cispo": dict(max_importance_ratio=1.5, min_importance_ratio=0.5),
    "clipped": dict(clip_low=0.2, clip_high=0.3),
    "decoupled": dict(clip_low=0.2, clip_high=0.3, max_importance_ratio=1.5),
    "dppo": dict(mask_low=0.01, mask_high=0.01),
    "dual_clip": dict(clip_low=0.2, clip_high=0.3, dual_clip=1.6),
    "gspo": dict(clip_low=0.02, clip_high=0.03),
    "gspo_token": dict(clip_low=0.02, clip_high=0.03),
    "reinforce": dict(),
    "sequence_truncated_is": dict(max_importance_ratio=1.5),
    "truncated_is": dict(max_importance_ratio=1.5),
}
LAYOUTS = {
    "a row each": functools.partial(
        pack, row_tokens=12, rows_per_microbatch=8, row_segments=1
    ),
    "four microbatches": functools.partial(pack, row_tokens=13, rows_per_microbatch=1),
    "two rows": functools.partial(pack, row_tokens=24, rows_per_microbatch=2),
    "mostly padding": functools.partial(pack, row_tokens=40, rows_per_microbatch=4),
    "shared prompts": functools.partial(
        pack_shared,
        shape=StreamShape(
            rows=2, row_tokens=24, shared_tokens=12, own_tokens=26, group_size=GROUP
        ),
        streams=1,
    ),
}
every_loss = pytest.mark.parametrize("loss", OBJECTIVES)
# A weighting says what a token counts for, whatever its loss: each with ScaleRL's loss,
# and the other losses with one of them in turn.
PAIRS = {("cispo", aggregation) for aggregation in WEIGHTINGS} | set(
    zip(OBJECTIVES, itertools.cycle(WEIGHTINGS), strict=False)
)


def test_every_loss_is_here():
    assert OBJECTIVES.keys() == LOSSES.keys()


@functools.cache
def objective_of(loss, *, regularized=True):
    """The loss with a KL, an entropy bonus and its measures."""
    recomputed = dict(anchor="recomputed") if loss == "decoupled" else {}
    fields = dict(
        kl_coefficient=0.1,
        kl_estimator="k3",
        entropy_coefficient=0.01,
        regularize="easy",
    )
    fields = recomputed | OBJECTIVES[loss] | (fields if regularized else {})
    chosen = ObjectiveConfig(loss=loss, **fields)
    return make_objective(dataclasses.replace(Config(), objective=chosen))


@functools.cache
def sequences_of(aggregation):
    """The small step's rollouts with the weights of an aggregation."""
    masks = np.zeros((len(LENGTHS), MOST), bool)
    for row, sequence in zip(masks, make_sequences(), strict=True):
        row[: len(sequence.mask)] = sequence.mask
    counts = np.asarray(WEIGHTINGS[aggregation](jnp.asarray(masks)))
    return tuple(
        dataclasses.replace(sequence, weights=row[: len(sequence.mask)])
        for sequence, row in zip(make_sequences(), counts, strict=True)
    )


def in_layout(layout, aggregation, order=EVERY):
    """The batch, its scores by rollout included, and the rollout of each prediction."""
    sequences = sequences_of(aggregation)
    batch, places = LAYOUTS[layout]([sequences[number] for number in order])
    rollouts = np.where(places >= 0, np.array(order)[places], -1)
    advantages = np.array([each.advantage for each in sequences])
    factors = np.arange(len(LENGTHS)) % 3
    batch = batch.replace(
        advantages=laid_out(advantages, rollouts),
        scores={"regularization": laid_out(factors, rollouts)},
    )
    return batch, rollouts


@functools.cache
def token_values():
    """By field: what a model would say of each token, near the behavior policy."""
    rng = np.random.default_rng(4)
    behavior = [sequence.behavior_logprobs for sequence in make_sequences()]

    def near(spread):
        return [row + spread * rng.normal(size=len(row)) for row in behavior]

    return {
        "logprobs": near(0.4),
        "entropy": [rng.uniform(0.0, 2.0, len(row)) for row in behavior],
        "proximal": near(0.2),
        "reference": near(0.3),
    }


def places(rollouts, number):
    """Where the tokens of a rollout stand, in their order."""
    return tuple(np.argwhere(rollouts == number).T)


def at_tokens(rollouts, values):
    out = np.zeros(rollouts.shape, np.float32)
    for number, row in enumerate(values):
        out[places(rollouts, number)] = row
    return out


def scored(batch, rollouts):
    """The batch with all its scores, and log-probabilities and entropies."""
    found = {name: at_tokens(rollouts, rows) for name, rows in token_values().items()}
    given = found.pop("logprobs"), found.pop("entropy")
    return batch.replace(scores={**batch.scores, **found}), given


def of_microbatch(objective, batch, *given):
    """Loss, and the sums and maxima for its metrics."""
    loss = objective.weighted(*given, batch).sum()
    return loss, objective.measured(*given, batch)


def summed(objective, batch, logprobs, entropy):
    """Loss, sums and maxima of a batch, microbatch by microbatch."""
    total, seen = 0.0, []
    for index in range(len(batch.weights)):
        arrays = jax.tree.map(
            lambda leaf, at=index: jnp.asarray(leaf[at]), (batch, logprobs, entropy)
        )
        loss, parts = of_microbatch(objective, *arrays)
        total += loss
        seen.append(parts)
    sums, maxima = zip(*seen, strict=True)
    add = jax.tree.map(lambda *parts: sum(parts), *sums)
    return total, (add, jax.tree.map(lambda *parts: jnp.stack(parts).max(), *maxima))


def result(loss, batch, rollouts):
    """Loss, metrics, and gradients by rollout, of a batch in some layout."""
    batch, given = scored(batch, rollouts)
    function = functools.partial(summed, objective_of(loss), batch)
    gradient = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
    (value, seen), grads = gradient(*(jnp.asarray(each) for each in given))
    by_rollout = [
        np.asarray(grad)[places(rollouts, number)]
        for number in range(len(LENGTHS))
        for grad in grads
    ]
    return value, seen, by_rollout


@functools.cache
def expected(loss, aggregation):
    return result(loss, *in_layout("a row each", aggregation))


@pytest.mark.parametrize("loss, aggregation", sorted(PAIRS))
@settings(deadline=None, max_examples=3, derandomize=True)
@given(layout=st.sampled_from(sorted(LAYOUTS)), order=st.permutations(range(8)))
def test_no_layout_and_no_order_changes_loss_metrics_or_gradient(
    loss, aggregation, layout, order
):
    found = result(loss, *in_layout(layout, aggregation, order))
    assert_trees_close(found, expected(loss, aggregation), rtol=2e-5, atol=1e-6)


@every_loss
def test_both_sides_of_every_bound_are_met(loss):
    gradients = np.concatenate(expected(loss, "token")[2][::2])
    assert (gradients != 0).sum() > 5
    sums = expected(loss, "token")[1][0]
    for name in ("ratio/clipped_share", "ratio/capped_share"):
        if name in sums:
            assert 0 < sums[name] < sums["tokens"], name


@every_loss
def test_wild_values_where_nothing_is_trained_on_change_nothing(loss):
    batch, (logprobs, entropy) = scored(*in_layout("mostly padding", "prompt"))
    off = ~batch.mask
    rng = np.random.default_rng(0)
    nonsense = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30]), off.shape)

    def wild_where_off(values):
        return np.where(off, nonsense, values).astype(np.float32)

    wild = {
        name: wild_where_off(getattr(batch, name))
        for name in ("advantages", "behavior_logprobs")
    }
    wild["scores"] = {
        name: wild_where_off(values) for name, values in batch.scores.items()
    }
    assert wild["scores"].keys() == {"proximal", "reference", "regularization"}
    found = [
        jax.value_and_grad(
            functools.partial(summed, objective_of(loss), each), has_aux=True
        )(jnp.asarray(logprobs), jnp.asarray(entropy))
        for each in (batch, batch.replace(**wild))
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@every_loss
def test_without_an_advantage_there_is_no_gradient(loss):
    batch, (logprobs, entropy) = scored(*in_layout("two rows", "sample"))
    batch = batch.replace(advantages=np.zeros_like(batch.advantages))
    plain = objective_of(loss, regularized=False)
    gradient = jax.grad(functools.partial(summed, plain, batch), has_aux=True)
    np.testing.assert_array_equal(gradient(jnp.asarray(logprobs), entropy)[0], 0.0)


@every_loss
def test_elementwise_losses_and_no_others_look_at_one_token_alone(loss):
    batch, (logprobs, entropy) = scored(*in_layout("two rows", "token"))
    others = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (entropy, batch))

    def total(logprobs):
        return objective_of(loss).weighted(logprobs, *others).sum()

    def slope(logprobs):
        return jax.grad(total)(jnp.asarray(logprobs))

    first = tuple(np.argwhere(batch.mask[0])[0])
    moved = np.copy(logprobs[0])
    moved[first] += 0.25
    changed = np.array(slope(logprobs[0]) != slope(moved))
    changed[first] = False
    assert objective_of(loss).elementwise == (not changed.any())


@pytest.mark.slow
def test_eight_devices_give_what_one_gives():
    batch, given = scored(*in_layout("mostly padding", "prompt"))
    arguments = jax.tree.map(lambda leaf: leaf[0], (batch, *given))

    def every(batch, logprobs, entropy):
        found = {}
        for loss in OBJECTIVES:
            function = functools.partial(of_microbatch, objective_of(loss), batch)
            gradient = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
            found[loss] = gradient(logprobs, entropy)
        return found

    run = jax.jit(every)
    eight = jax.device_put(arguments, batch_sharding(mesh_of((2, 2, 2, 1))))
    assert_trees_close(run(*eight), run(*arguments), rtol=2e-5, atol=1e-6)
