"""Frozen parameters: which they are, and that the others train as if alone."""

import dataclasses

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
    assert_trees_equal,
    mesh_of,
    slow_result,
    start_params,
)

from scalerl_jax.learner.step import (
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
)
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.lora import join
from scalerl_jax.model.trainable import frozen_params, split
from scalerl_jax.weights.shards import named_leaves

PARAMS = {
    "embedding": jnp.array([[1.0, 2.0]]),
    "layers": {"query": jnp.array([3.0]), "query_norm": jnp.array([-1.0])},
}


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


FROZEN = ("embedding", "layers/.*norm")
SHAPE = (1, 2, 1, 2)


def parts_of(tree):
    """The trained and the frozen parts of a tree of the small policy's params."""
    return split(tree, frozen_params(start_params(), FROZEN))


@pytest.mark.slow
def test_a_step_over_a_mesh_trains_the_others_as_the_slow_loss_says():
    mesh = mesh_of(SHAPE)
    layout = jax.device_put(start_params(), param_shardings(ARCH, mesh))
    trained, frozen = parts_of(layout)
    these = Bench(shape=SHAPE)
    state = init_state(jax.tree.map(jnp.copy, trained), PLAIN)
    state = dataclasses.replace(state, frozen=frozen)
    everywhere = jax.NamedSharding(mesh, jax.P())
    state = state.replace(policy_version=jax.device_put(jnp.int32(0), everywhere))
    step = TrainStep(
        make_accumulate(these.forward, CISPO),
        make_update(PLAIN),
        state=state,
        batch=jax.tree.map(lambda leaf: leaf[0], these.batch()),
        mesh=mesh,
    )
    sums = step.total(state.params, these.batch(), state.frozen)
    assert jax.tree.structure(sums.grads) == jax.tree.structure(trained)
    after, metrics = step(state, these.batch())
    _, gradient, expected = slow_result()
    assert len(jax.tree.leaves(frozen)) >= 3
    assert_trees_equal(after.frozen, parts_of(start_params())[1])
    assert_trees_close(after.params, parts_of(expected)[0], rtol=1e-5, atol=1e-6)
    norm = optax.tree.norm(parts_of(gradient)[0])
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm < 0.99 * optax.tree.norm(gradient)


def test_two_trees_are_one_again_and_the_frozen_has_no_moments():
    trained, frozen = parts_of(start_params())
    names = {*named_leaves(trained), *named_leaves(frozen)}
    assert sorted(names) == list(named_leaves(start_params()))
    assert_trees_equal(join(trained, frozen), start_params())
    moments = optax.tree.get(ADAMW.init(trained), "mu")
    assert list(named_leaves(moments)) == list(named_leaves(trained))
