"""A mixture made of a dense decoder is that decoder where its experts complement."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.architecture import Architecture, Experts
from scalerl_jax.model.ffn_moe import expert_feed_forward
from scalerl_jax.model.layers import rms_norm
from scalerl_jax.model.transformer import init_params
from scalerl_jax.model.upcycling import draw_units, upcycle

DENSE = Architecture(
    family="qwen3",
    vocab_size=16,
    hidden_size=8,
    ffn_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
    qk_norm=True,
)


def mixture(count, top_k, ffn_size):
    return dataclasses.replace(
        DENSE,
        family="qwen3_moe",
        ffn_size=ffn_size,
        experts=Experts(count, top_k, "normalized"),
    )


def upcycled(arch):
    params = init_params(DENSE, jax.random.key(0), dtype=jnp.float32)
    start = init_params(arch, jax.random.key(1), dtype=jnp.float32)
    return params, start, upcycle(params, DENSE, start, arch, seed=3)


def test_experts_that_share_an_order_have_every_unit_once():
    units = draw_units(8, 2, 12, 3, seed=0)
    assert units.shape == (3, 8, 6)
    for layer in units:
        for pair in layer.reshape(4, 12):
            assert sorted(pair) == list(range(12))
    assert len({tuple(sorted(each)) for each in units.reshape(24, 6)}) == 24


def test_an_expert_is_its_part_of_the_dense_matrices_times_the_number_of_parts():
    dense, start, params = upcycled(mixture(4, 2, 6))
    units = draw_units(4, 2, 12, 2, seed=3)
    layers, old = params["layers"], dense["layers"]
    for layer in range(2):
        for expert in range(4):
            for place, unit in enumerate(units[layer, expert]):
                here = layers["expert_gate_up"][layer, expert, :, :, place]
                np.testing.assert_array_equal(here[:, 0], old["gate"][layer, :, unit])
                np.testing.assert_array_equal(here[:, 1], old["up"][layer, :, unit])
                np.testing.assert_array_equal(
                    layers["expert_down"][layer, expert, place],
                    2 * old["down"][layer, unit],
                )
    np.testing.assert_array_equal(layers["router"], start["layers"]["router"])
    for name in ("query", "key", "value", "output", "attention_norm", "ffn_norm"):
        np.testing.assert_array_equal(layers[name], old[name])
    np.testing.assert_array_equal(params["embedding"], dense["embedding"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, start)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_all_parts_with_equal_gates_are_the_dense_feed_forward(parts):
    arch = mixture(6, parts, 12 // parts)
    dense, _, params = upcycled(arch)
    x = jax.random.normal(jax.random.key(2), (5, 8))
    feed_forward = jax.jit(expert_feed_forward, static_argnums=1)
    for layer in range(2):
        old = {name: leaf[layer] for name, leaf in dense["layers"].items()}
        new = {name: leaf[layer] for name, leaf in params["layers"].items()}
        normed = rms_norm(x, old["ffn_norm"], arch.rms_eps)
        hidden = jax.nn.silu(normed @ old["gate"]) * (normed @ old["up"])
        for group in range(6 // parts):
            given = np.arange(parts) + group * parts
            found, _ = feed_forward(
                new | {"router": jnp.zeros((8, 6))},
                arch,
                x,
                np.broadcast_to(given, (5, parts)),
            )
            np.testing.assert_allclose(found, hidden @ old["down"], atol=1e-6)


@pytest.mark.parametrize(
    "arch, message",
    [
        (DENSE, "num_experts above 0"),
        (mixture(4, 2, 5), "ffn_size = 5"),
        (mixture(4, 2, 4), "number divides num_experts = 4"),
        (mixture(4, 2, 24), "ffn_size = 24 must divide the dense decoder's 12"),
        (
            dataclasses.replace(mixture(4, 2, 6), hidden_size=16),
            "hidden_size = 16 must be the dense decoder's: 8",
        ),
    ],
)
def test_what_cannot_be_upcycled_is_said(arch, message):
    with pytest.raises(ValueError, match=message):
        upcycle({}, DENSE, {}, arch, seed=0)
