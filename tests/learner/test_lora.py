"""Low-rank factors beside frozen weights, against dense weights and the chain rule."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import SMALL, small_architecture
from small_step import (
    ARCH,
    CISPO,
    PLAIN,
    Bench,
    assert_trees_close,
    assert_trees_equal,
    mesh_of,
    slow_loss,
    start_params,
)

from scalerl_jax.config import LoraConfig
from scalerl_jax.learner.step import (
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
)
from scalerl_jax.model.architecture import Experts, param_shardings
from scalerl_jax.model.lora import (
    Adapted,
    Factors,
    abstract_factors,
    factor_table,
    init_factors,
    join,
    merged,
)
from scalerl_jax.model.transformer import hidden_states, init_params

LORA = LoraConfig(rank=3, alpha=5.0)
CLOSE = dict(rtol=2e-4, atol=2e-6)


def random_factors(arch=ARCH, lora=LORA):
    """Factors as after some steps: neither of the two is zero."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32),
        init_factors(arch, lora, jax.random.key(0)),
    )


def by_hand(factors):
    """Dense weights W + alpha / r * down @ up, written out matrix by matrix."""
    layers = dict(start_params()["layers"])
    for name, each in factors["layers"].items():
        whole = np.array(layers[name], np.float64)
        for layer, (down, up) in enumerate(zip(each.down, each.up, strict=True)):
            whole[layer] += 5.0 / 3.0 * np.asarray(down, np.float64) @ np.asarray(up)
        layers[name] = jnp.asarray(whole, jnp.float32)
    return start_params() | {"layers": layers}


@pytest.mark.parametrize(
    "shape, remat",
    [
        ((1, 1, 1, 1), "none"),
        pytest.param((1, 2, 1, 2), "dots", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_dense_weights_by_the_chain_rule(shape, remat):
    factors, mesh = random_factors(), mesh_of(shape)
    dense_step = jax.jit(jax.value_and_grad(slow_loss), static_argnums=1)
    loss, dense = jax.device_get(dense_step(by_hand(factors), "prompt"))
    cut = jax.tree.map(lambda x: x.sharding, abstract_factors(ARCH, LORA, mesh))
    state = init_state(jax.device_put(factors, cut), PLAIN)
    state = dataclasses.replace(
        state,
        policy_version=jax.device_put(jnp.int32(0), jax.NamedSharding(mesh, jax.P())),
        frozen=jax.device_put(start_params(), param_shardings(ARCH, mesh)),
    )
    these = Bench(shape=shape, remat=remat)
    step = TrainStep(
        make_accumulate(these.forward, CISPO),
        make_update(PLAIN),
        state=state,
        batch=jax.tree.map(lambda leaf: leaf[0], these.batch()),
        mesh=mesh,
    )
    sums = step.total(state.params, these.batch(), state.frozen)
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    assert sums.grads["layers"].keys() == factors["layers"].keys()
    assert len(factors["layers"]) == 7
    for name, each in factors["layers"].items():
        for layer, (down, up) in enumerate(zip(each.down, each.up, strict=True)):
            of_weight = np.asarray(dense["layers"][name][layer])
            found = sums.grads["layers"][name]
            expected = 5.0 / 3.0 * of_weight @ np.asarray(up).T
            np.testing.assert_allclose(found.down[layer], expected, **CLOSE)
            expected = 5.0 / 3.0 * np.asarray(down).T @ of_weight
            np.testing.assert_allclose(found.up[layer], expected, **CLOSE)
    after, _ = step(state, these.batch())
    assert_trees_equal(after.frozen, start_params())


def test_the_start_is_the_base_bit_for_bit_and_merging_is_the_dense_weight():
    started = init_factors(ARCH, LORA, jax.random.key(3))
    assert_trees_equal(merged(join(started, start_params())), start_params())
    down = started["layers"]["down"].down
    bound = 24**-0.5  # peft's: uniform, by the number of inputs
    assert 0.9 * bound < np.abs(down).max() <= bound and down.dtype == jnp.float32
    factors = random_factors()
    whole = merged(join(factors, start_params()))
    assert_trees_close(whole, by_hand(factors), rtol=1e-6, atol=1e-6)


def test_experts_have_factors_of_their_own():
    experts = Experts(count=4, top_k=2, gate="normalized")
    arch = small_architecture(family="qwen3_moe", experts=experts)
    factors = random_factors(arch)
    params = init_params(arch, jax.random.key(1), dtype=jnp.float32)
    up = factors["layers"]["expert_gate_up"].up
    assert up.shape == (2, 4, 3, 2, 24)  # layers, experts, rank, gate and up, ffn
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    where = dict(
        positions=jnp.broadcast_to(jnp.arange(6), tokens.shape),
        segment_ids=jnp.ones_like(tokens),
        dtype=jnp.float32,
    )

    @jax.jit
    def forward(params):
        return hidden_states(params, arch, tokens, **where)[0]

    beside = forward(join(factors, params))
    whole = forward(merged(join(factors, params)))
    base = forward(params)
    np.testing.assert_allclose(beside, whole, rtol=1e-4, atol=1e-5)
    assert np.abs(beside - base).max() > 0.1


def test_a_merged_weight_is_rounded_once():
    weights = jnp.full((1, 2), 1.0, jnp.bfloat16)
    factors = Factors(down=jnp.ones((1, 1)), up=jnp.array([[2**-9, 2**-6]]), scale=1.0)
    found = Adapted(weights=weights, factors=factors).merged()
    assert found.dtype == jnp.bfloat16
    assert found.astype(jnp.float32).tolist() == [[1.0, 1.0 + 2**-6]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"targets": ("layers/qery",)}, "targets holds 'layers/qery', .*layers/query"),
        ({"targets": ("layers/(",)}, "targets holds 'layers/\\('"),
        (
            {"targets": ("embedding",)},
            "targets matches 'embedding', which is no matrix",
        ),
        ({"rank": 17}, "rank = 17 is above 16, .*layers/down .24 x 16"),
    ],
    ids=str,
)
def test_targets_and_ranks_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=rf"model\.lora\.{message}") as refused:
        factor_table(SMALL, dataclasses.replace(LORA, **changes))
    assert not re.search("\n", str(refused.value))
