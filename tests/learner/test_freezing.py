"""Frozen parameters: which they are, and that the others train as if alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_step import (
    ADAMW,
    ARCH,
    CISPO,
    PLAIN,
    Bench,
    assert_trees_close,
    mesh_of,
    slow_result,
    start_params,
)

from scalerl_jax.learner.freezing import freeze, frozen_params, without_gradient
from scalerl_jax.learner.optimizer import make_optimizer, make_schedule
from scalerl_jax.learner.step import TrainStep, make_accumulate, make_update
from scalerl_jax.model.architecture import param_shardings

PARAMS = {
    "embedding": jnp.array([[1.0, 2.0]]),
    "layers": {"query": jnp.array([3.0]), "query_norm": jnp.array([-1.0])},
}
GRADIENT = {
    "embedding": jnp.array([[300.0, 400.0]]),
    "layers": {"query": jnp.array([0.3]), "query_norm": jnp.array([0.4])},
}


def adamw(max_grad_norm=0.1):
    return make_optimizer(
        make_schedule(learning_rate=0.1, warmup_steps=0),
        beta1=0.9,
        beta2=0.95,
        eps=1e-15,
        weight_decay=0.3,
        max_grad_norm=max_grad_norm,
    )


@pytest.mark.parametrize(
    "patterns, frozen",
    [
        ((), []),
        (("embedding",), ["embedding"]),
        (("layers/query",), ["layers/query"]),  # the whole name: not query_norm
        (("layers/.*",), ["layers/query", "layers/query_norm"]),
        ((".*norm", "embedding"), ["embedding", "layers/query_norm"]),
    ],
)
def test_a_pattern_matches_whole_names(patterns, frozen):
    found = jax.tree_util.tree_leaves_with_path(frozen_params(PARAMS, patterns))
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, held in found
        if held
    ]
    assert names == frozen


@pytest.mark.parametrize(
    "patterns, message",
    [
        (("embeding",), "'embeding', .*'embedding'"),
        (("layers/(",), r"'layers/\('"),
        ((".*",), "matches every parameter"),
        (("embedding", "layers/.*"), "matches every parameter"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns, message):
    with pytest.raises(ValueError, match=rf"model\.frozen .*{message}"):
        frozen_params(PARAMS, patterns)


def test_the_others_are_trained_as_if_alone():
    # The gradient of the embedding would rule the norm; only (0.3, 0.4) is clipped.
    optimizer, alone = freeze(adamw(), ("embedding",)), adamw()
    state, others = optimizer.init(PARAMS), PARAMS["layers"]
    alone_state = alone.init(others)
    params = PARAMS
    for _ in range(3):
        updates, state = optimizer.update(GRADIENT, state, params)
        params = optax.apply_updates(params, updates)
        updates, alone_state = alone.update(GRADIENT["layers"], alone_state, others)
        others = optax.apply_updates(others, updates)
    np.testing.assert_array_equal(params["embedding"], PARAMS["embedding"])
    jax.tree.map(np.testing.assert_array_equal, params["layers"], others)
    moments = [leaf.size for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))]
    assert moments == [1, 1]  # none of the embedding's two


FROZEN = ("embedding", "layers/.*norm")
SHAPE = (1, 2, 1, 2)


def held(tree):
    """Which leaves of the small policy are frozen, and the others alone."""
    kept, rest = [], []
    for frozen, leaf in zip(
        jax.tree.leaves(frozen_params(start_params(), FROZEN)),
        jax.tree.leaves(tree),
        strict=True,
    ):
        (kept if frozen else rest).append(leaf)
    return kept, rest


@pytest.mark.slow
def test_a_step_over_a_mesh_trains_the_others_as_the_slow_loss_says():
    these = Bench(optimizer=freeze(PLAIN, FROZEN), shape=SHAPE)
    step = TrainStep(
        without_gradient(make_accumulate(these.forward, CISPO), FROZEN),
        make_update(these.optimizer),
        state=these.state(),
        batch=jax.tree.map(lambda leaf: leaf[0], these.batch()),
        mesh=mesh_of(SHAPE),
    )
    after, metrics = step(these.state(), these.batch())
    _, gradient, expected = slow_result()
    frozen, others = held(after.params)
    assert len(frozen) >= 3
    jax.tree.map(np.testing.assert_array_equal, frozen, held(start_params())[0])
    assert_trees_close(others, held(expected)[1], rtol=1e-5, atol=1e-6)
    norm = optax.tree.norm(held(gradient)[1])
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm < 0.99 * optax.tree.norm(gradient)


def test_over_a_mesh_moments_lie_as_their_params_and_the_frozen_have_none():
    state = Bench(optimizer=freeze(ADAMW, FROZEN), shape=SHAPE).state()
    params = held(param_shardings(ARCH, mesh_of(SHAPE)))[1]
    for moment in ("mu", "nu"):
        moments = jax.tree.leaves(optax.tree.get(state.opt_state, moment))
        assert [leaf.sharding for leaf in moments] == params
