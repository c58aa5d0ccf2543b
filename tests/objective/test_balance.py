"""Experts are evened out: by a loss and by a bias, each worked by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_mesh import mesh_of
from small_model import small_architecture
from small_step import make_sequences, rated

from scalerl_jax import config as config_lib
from scalerl_jax.batching.packing import pack
from scalerl_jax.batching.replay import expert_load, load_metrics
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.optimizer import make_optimizer
from scalerl_jax.learner.step import (
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
    state_layout,
)
from scalerl_jax.model.architecture import Experts, param_shardings
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import init_params
from scalerl_jax.objective.balance import LoadBalancing
from scalerl_jax.objective.loss import Objective
from scalerl_jax.wiring.learning import make_architecture
from scalerl_jax.wiring.mixtures import load_with_biases

ARCH = small_architecture(
    family="qwen3_moe",
    experts=Experts(count=4, top_k=2, gate="normalized", bias=True),
)
RATE = 0.25


def microbatch(segments, weights):
    """A row of these segments; only what is read has a value."""
    batch = jax.tree.map(
        lambda leaf: leaf[0],
        pack(make_sequences(), row_tokens=12, rows_per_microbatch=1).batch,
    )
    there = np.asarray(segments)
    return dataclasses.replace(
        batch,
        segment_ids=there[None],
        weights=np.asarray(weights)[None],
        mask=np.asarray(weights)[None] > 0,
    )


def test_the_loss_is_that_of_the_paper():
    chosen = jnp.asarray([[[[0, 1], [0, 2], [3, 3]]]])  # a layer, a row, three tokens
    scores = jnp.asarray([[[[0.7, 0.3, 0.0, 0.0], [0.5, 0.1, 0.4, 0.0], [9.0] * 4]]])
    said = {"experts": chosen, "scores": scores}
    batch = microbatch([1, 1, 0], [0.5, 0.25, 0.0])
    loss, taken = LoadBalancing(coefficient=0.1)(said, batch)
    np.testing.assert_array_equal(taken, [[2, 1, 1, 0]])  # the third is padding
    # Shares 1/2, 1/4, 1/4, 0; means 0.6, 0.2, 0.2, 0: a sum of 0.4, of 4 experts.
    np.testing.assert_allclose(loss, 0.1 * 0.75 * 4 * 0.4, rtol=1e-6)


def test_it_is_the_coefficient_where_all_are_taken_alike():
    said = {
        "experts": jnp.asarray([[[[0, 1], [2, 3]]]] * 3),
        "scores": jnp.full((3, 1, 2, 4), 0.25),
    }
    loss, _ = LoadBalancing(coefficient=0.1)(said, microbatch([1, 2], [0.5, 0.5]))
    np.testing.assert_allclose(loss, 0.1, rtol=1e-6)


def test_a_bias_moves_towards_those_that_few_tokens_take():
    old = {"layers": {"router_bias": jnp.ones((2, 3))}}
    new = {"layers": {"router_bias": jnp.full((2, 3), 9.0)}}  # never read
    taken = jnp.asarray([[4.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    LoadBalancing(bias_rate=0.5).adjust(new, taken, old=old)
    wanted = [[0.5, 1.5, 1.5], [1.0, 1.0, 1.0]]
    np.testing.assert_array_equal(new["layers"]["router_bias"], wanted)


@functools.cache
def stepped(shape=(1, 1, 1, 1), rows=2, coefficient=0.0):
    """State before and after a step, its sums, and its loss."""
    step, state, batch = step_of(shape, rows, coefficient)
    state = jax.tree.map(jnp.copy, state)  # a step deletes what it is given
    before = jax.device_get(state.params)
    total = step.total(state.params, batch)
    taken, loss = np.asarray(total.taken), float(total.loss)
    state, _ = step.apply(state, total)
    return before, jax.device_get(state.params), taken, loss


@functools.cache
def step_of(shape, rows, coefficient):
    """A step, the state that it starts from, and a batch in microbatches of rows."""
    mesh = mesh_of(shape)
    optimizer = make_optimizer(
        lambda count: 0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    params = jax.device_put(
        init_params(ARCH, jax.random.key(0), dtype=jnp.float32),
        param_shardings(ARCH, mesh),
    )
    layout = state_layout(
        params, optimizer, everywhere=jax.NamedSharding(mesh, jax.P())
    )
    state = jax.device_put(
        init_state(params, optimizer),
        jax.tree.map(lambda leaf: leaf.sharding, layout),
    )
    sequences = make_sequences()
    batch = rated(pack(sequences, row_tokens=12, rows_per_microbatch=rows), sequences)
    balance = LoadBalancing(coefficient=coefficient, bias_rate=RATE)
    step = TrainStep(
        make_accumulate(
            Forward(arch=ARCH, dtype=jnp.float32, mesh=mesh),
            Objective(token_loss=lambda tokens: -tokens.advantages * tokens.logprobs),
            balance=balance,
        ),
        make_update(optimizer, balance=balance),
        state=state,
        batch=jax.tree.map(lambda leaf: leaf[0], batch),
        mesh=mesh,
    )
    return step, state, batch


def gradient(rows, coefficient):
    """Of a batch in microbatches of so many rows, as one vector; and their number."""
    step, state, batch = step_of((1, 1, 1, 1), rows, coefficient)
    grads = step.total(state.params, batch).grads
    return jax.flatten_util.ravel_pytree(grads)[0], len(batch.tokens)


@pytest.mark.slow
def test_the_balancing_loss_alone_depends_on_the_microbatches():
    (whole, one), (parts, several) = gradient(8, 0.0), gradient(2, 0.0)
    assert one == 1 and several > 1
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)
    balanced, apart = gradient(8, 1.0)[0], gradient(2, 1.0)[0]
    # Each microbatch evens out its own tokens, which is more than the whole asks for.
    assert jnp.linalg.norm(apart - balanced) > 0.01 * jnp.linalg.norm(balanced - whole)


def test_the_loss_of_microbatches_is_their_mean_by_weight():
    """Two tokens on one expert and two on the other: even as a whole, not apart."""
    one = {
        "experts": jnp.asarray([[[[0], [0]]]]),
        "scores": jnp.eye(2)[None, None, [0, 0]],
    }
    two = {
        "experts": jnp.asarray([[[[1], [1]]]]),
        "scores": jnp.eye(2)[None, None, [1, 1]],
    }
    both = jax.tree.map(lambda *each: jnp.concatenate(each, axis=2), one, two)
    balancing = LoadBalancing(coefficient=0.1)
    whole, _ = balancing(both, microbatch([1, 1, 1, 1], [0.3, 0.3, 0.2, 0.2]))
    first, _ = balancing(one, microbatch([1, 1], [0.3, 0.3]))
    second, _ = balancing(two, microbatch([1, 1], [0.2, 0.2]))
    np.testing.assert_allclose(whole, 0.1 * 2 * (0.5 * 0.5 + 0.5 * 0.5), rtol=1e-6)
    np.testing.assert_allclose(first, 0.1 * 0.6 * 2 * 1.0 * 1.0, rtol=1e-6)
    np.testing.assert_allclose(second, 0.1 * 0.4 * 2 * 1.0 * 1.0, rtol=1e-6)


def test_biases_move_by_the_rate_and_by_nothing_else():
    before, after, taken, _ = stepped()
    tokens = sum(len(each.tokens) - 1 for each in make_sequences())  # that are read
    assert (taken.sum(axis=1) == 2 * tokens).all()
    assert (before["layers"]["router_bias"] == 0).all()  # no decay to see
    wanted = RATE * np.sign(taken.mean(axis=1, keepdims=True) - taken)
    np.testing.assert_array_equal(after["layers"]["router_bias"], wanted)
    assert np.abs(wanted).max() == RATE
    assert (after["layers"]["router"] != before["layers"]["router"]).any()


# Each of two slices has half of a microbatch, as one device with half as many rows.
@pytest.mark.parametrize(
    "shape, rows",
    [
        ((1, 4, 1, 2, 2), 4),
        pytest.param((2, 2, 1, 2), 4, marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 2, 1, 2), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mesh_counts_as_one_device_does(shape, rows):
    _, after, taken, loss = stepped(rows=rows, coefficient=1.0)
    _, ours, counted, found = stepped(shape, rows=4, coefficient=1.0)
    np.testing.assert_array_equal(counted, taken)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_array_equal(
        ours["layers"]["router_bias"], after["layers"]["router_bias"]
    )


def test_the_loss_is_added_and_its_gradient_reaches_the_router():
    _, without, _, plain = stepped()
    _, with_it, _, loss = stepped(coefficient=1.0)
    assert 1.0 <= loss - plain < 4.0  # 1 if even, 4 if one expert took all
    assert (with_it["layers"]["router"] != without["layers"]["router"]).any()


@pytest.mark.parametrize("architecture", ["checkpoint", "small mixture"])
@pytest.mark.parametrize("stored", [False, True], ids=["without", "with"])
def test_a_checkpoint_with_biases_or_without(
    architecture, stored, tmp_path, monkeypatch
):
    experts = dataclasses.replace(ARCH.experts, bias=stored)
    arch = dataclasses.replace(ARCH, experts=experts)
    params = init_params(arch, jax.random.key(0), dtype=jnp.float32)
    if stored:
        params["layers"]["router_bias"] += 0.5
    save_params(tmp_path, params, arch, dtype=jnp.float32)
    monkeypatch.setitem(ARCHITECTURES, "small mixture", read_architecture(tmp_path))
    settings = config_lib.defaults()
    settings.model.update(architecture=architecture, checkpoint=str(tmp_path))
    settings.objective.expert_bias_rate = RATE
    config = config_lib.resolve(settings)
    asked = make_architecture(config)
    assert asked.experts.bias
    shardings = param_shardings(asked, mesh_of((1, 1, 1, 1)))
    found = load_with_biases(
        str(tmp_path), asked, dtype=jnp.dtype("float32"), shardings=shardings
    )
    wanted = np.full((ARCH.num_layers, 4), 0.5 * stored, np.float32)
    np.testing.assert_array_equal(found["layers"]["router_bias"], wanted)


@pytest.mark.parametrize("name", ["expert_balance", "expert_bias_rate"])
def test_a_dense_model_has_none_to_balance(name):
    settings = config_lib.defaults()
    settings.model.architecture = "qwen3-8b"
    settings.objective[name] = 0.1
    with pytest.raises(ValueError, match=f"objective.{name} = 0.1 balances experts"):
        make_architecture(config_lib.resolve(settings))


def test_loads_are_those_that_sequences_have():
    taken = np.asarray([[6, 2, 0, 0], [2, 2, 2, 2]])
    found = load_metrics(jnp.asarray(taken, jnp.float32))
    chosen = [np.repeat(np.arange(4), layer) for layer in taken]
    travelled = np.stack(chosen, axis=1)[:, :, None].astype(np.uint8)
    one = dataclasses.replace(ARCH, experts=dataclasses.replace(ARCH.experts, top_k=1))
    wanted = expert_load([travelled], one)
    assert {name: float(value) for name, value in found.items()} == wanted
    assert wanted["experts/dead"] == 2
