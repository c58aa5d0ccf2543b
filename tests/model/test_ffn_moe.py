"""Experts: three ways to compute them, gates by hand, and a selection replayed."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_mesh import mesh_of
from small_model import small_architecture

from scalerl_jax.model import ffn_moe
from scalerl_jax.model.architecture import (
    Experts,
    batch_sharding,
    param_shardings,
    sampler_mesh,
    sampler_shardings,
)
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import (
    REMAT,
    cached_hidden,
    hidden_states,
    unstack_layers,
)
from scalerl_jax.parallel.mesh import make_mesh

SOFTMAX = Experts(count=5, top_k=2, gate="normalized")
SIGMOID = Experts(count=4, top_k=1, gate="sigmoid", gate_input=True, shared=True)
MIXTURES = {
    "qwen3": small_architecture(family="qwen3_moe", experts=SOFTMAX),
    "llama4": small_architecture(family="llama", experts=SIGMOID),
    "two at the input": small_architecture(
        family="llama", experts=dataclasses.replace(SIGMOID, top_k=2, shared=False)
    ),
    "gpt-oss": small_architecture(
        family="gpt_oss",
        experts=dataclasses.replace(SOFTMAX, biased=True, clamp=0.5),
        windows=(3, 0),
    ),
}
ARCH = MIXTURES["qwen3"]


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, random_params):
    arch = MIXTURES[request.param]
    return arch, random_params(arch)


def first_layer(params):
    return {name: leaf[0] for name, leaf in params["layers"].items()}


def states(tokens, arch=ARCH):
    numbers = np.random.default_rng(1).normal(size=(tokens, arch.hidden_size))
    return jnp.asarray(numbers, jnp.float32)


def largest(tree):
    """The largest size of a number in arrays that are on the host."""
    return max(np.abs(leaf).max() for leaf in jax.tree.leaves(tree))


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(layer, arch, x):
    """One token and expert after the other, in float64."""
    layer = {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}
    experts, outputs, chosen = arch.experts, [], []
    for token in np.asarray(x, np.float64):
        h = token / np.sqrt((token**2).mean() + arch.rms_eps) * layer["ffn_norm"]
        logits = h @ layer["router"] + layer.get("router_logit_bias", 0)
        best = np.argsort(-logits)[: experts.top_k]
        if experts.gate == "sigmoid":
            gates = 1 / (1 + np.exp(-logits[best]))
        else:
            gates = np.exp(logits[best]) / np.exp(logits).sum()
            gates = gates / gates.sum() if experts.gate == "normalized" else gates
        total = np.zeros_like(token)
        for expert, gate in zip(best, gates, strict=True):
            given = h * gate if experts.gate_input else h
            into, up = layer["expert_gate_up"][expert].swapaxes(0, 1)
            into, up = given @ into, given @ up
            if experts.biased:
                into, up = (into, up) + layer["expert_gate_up_bias"][expert]
            inner = silu(into) * up
            if experts.clamp:
                into, up = np.minimum(into, 0.5), np.clip(up, -0.5, 0.5)
                inner = into / (1 + np.exp(-1.702 * into)) * (up + 1)
            out = inner @ layer["expert_down"][expert]
            if experts.biased:
                out = out + layer["expert_down_bias"][expert]
            total += out if experts.gate_input else gate * out
        if experts.shared:
            inner = silu(h @ layer["shared_gate"]) * (h @ layer["shared_up"])
            total += inner @ layer["shared_down"]
        outputs.append(total)
        chosen.append(best)
    return np.array(outputs), np.array(chosen)


# Numbers of tokens that are gathered, dense and grouped when they are decoded.
@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_every_way_is_the_sum_by_hand(mixture, tokens):
    arch, params = mixture
    layer, x = first_layer(params), states(tokens)
    expected, chosen = by_hand(layer, arch, x)
    for decoding in (False, True):
        found, said = jax.jit(
            lambda layer, x, decoding=decoding: ffn_moe.expert_feed_forward(
                layer, arch, x, decoding=decoding
            )
        )(layer, x)
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(said["experts"], chosen)


def test_the_ways_have_one_gradient(mixture):
    arch, params = mixture
    layer, x = first_layer(params), states(12)

    def loss(layer, x, decoding):
        out, _ = ffn_moe.expert_feed_forward(layer, arch, x, decoding=decoding)
        return (out**2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    found, wanted = gradient(layer, x, False), gradient(layer, x, True)
    found, wanted = jax.device_get((found, wanted))
    scale = largest(wanted)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=2e-6)


def test_gates_by_hand():
    logits = jnp.log(jnp.array([[1.0, 6.0, 3.0]]))
    kinds = {
        "softmax": [0.6, 0.3],
        "normalized": [2 / 3, 1 / 3],
        "sigmoid": [6 / 7, 0.75],
    }
    for gate, expected in kinds.items():
        chosen, gates, _ = ffn_moe.route(logits, Experts(3, 2, gate))
        assert chosen.tolist() == [[1, 2]]
        np.testing.assert_allclose(gates[0], expected, rtol=1e-6)


def test_a_replayed_selection_has_gates_of_the_own_logits():
    logits = jnp.log(jnp.array([[1.0, 6.0, 3.0]] * 2))
    given = jnp.array([[2, 0], [-1, -1]])

    def gates(logits):
        return ffn_moe.route(logits, Experts(3, 2, "normalized"), given)[1]

    chosen, _, _ = ffn_moe.route(logits, Experts(3, 2, "normalized"), given)
    assert chosen.tolist() == [[2, 0], [1, 2]]
    np.testing.assert_allclose(gates(logits), [[0.75, 0.25], [2 / 3, 1 / 3]], rtol=1e-6)
    # d (a / (a + b)) / d log a = 0.75 * 0.25, and nothing for who was not taken
    slope = jax.grad(lambda logits: gates(logits)[0, 0])(logits)
    np.testing.assert_allclose(slope[0], [-0.1875, 0.0, 0.1875], atol=1e-6)


def test_experts_that_nobody_takes_have_no_gradient(random_params):
    layer, x = first_layer(random_params(ARCH)), states(20)
    given = jnp.tile(jnp.array([[1, 3]]), (20, 1))

    @jax.jit
    def gradient(layer):
        return jax.grad(loss)(layer)

    def loss(layer):
        return (ffn_moe.expert_feed_forward(layer, ARCH, x, given)[0] ** 2).sum()

    of_down = gradient(layer)["expert_down"]
    moved = np.abs(np.asarray(of_down)).max(axis=(1, 2)) > 0
    assert moved.tolist() == [False, True, False, True, False]


@functools.partial(jax.jit, static_argnames=("remat", "scan"))
def whole(params, experts=None, remat="none", scan=True):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 6)))
    return hidden_states(
        params,
        ARCH,
        tokens,
        positions=jnp.tile(jnp.arange(6), (2, 1)),
        segment_ids=jnp.ones_like(tokens),
        dtype=jnp.float32,
        experts=experts,
        remat=remat,
        scan_layers=scan,
    )


def test_a_forward_pass_says_its_experts_and_takes_them(random_params):
    params = random_params(ARCH)
    hidden, said = whole(params)
    assert said["experts"].shape == (ARCH.num_layers, 2, 6, 2)
    again, _ = whole(params, said["experts"])
    np.testing.assert_array_equal(again, hidden)
    others = (said["experts"] + 1) % ARCH.experts.count
    changed, replayed = whole(params, others)
    np.testing.assert_array_equal(replayed["experts"], others)
    assert np.abs(changed - hidden).max() > 0.1
    none, _ = whole(params, jnp.full_like(others, -1), scan=False)
    np.testing.assert_allclose(none, hidden, atol=1e-6)


def test_a_cached_pass_says_and_takes_them_too(random_params):
    params = unstack_layers(random_params(ARCH), ARCH)
    tokens = jnp.arange(7)

    @jax.jit
    def run(experts=None):
        return cached_hidden(
            params,
            ARCH,
            tokens,
            positions=tokens,
            attend=lambda layer, q, k, v: q,
            dtype=jnp.float32,
            experts=experts,
        )

    _, said = run()
    assert said["experts"].shape == (ARCH.num_layers, 7, 2)
    others = (said["experts"] + 2) % ARCH.experts.count
    np.testing.assert_array_equal(run(others)[1]["experts"], others)


@pytest.mark.parametrize("remat", sorted(set(REMAT) - {"none"}))
def test_remat_keeps_the_gradient_of_a_mixture(random_params, remat):
    params = random_params(ARCH)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(remat):
        return jax.grad(lambda params: (whole(params, remat=remat)[0] ** 2).sum())(
            params
        )

    for ours, theirs in zip(
        *map(jax.tree.leaves, (gradient(remat), gradient("none"))), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_router_logits_are_float32_at_the_highest_precision():
    x, router = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)
    program = jax.jit(ffn_moe.router_logits).lower(x, router).as_text()
    product = next(line for line in program.splitlines() if "dot_general" in line)
    assert "HIGHEST" in product
    assert "(tensor<2x8xf32>, tensor<8x4xf32>) -> tensor<2x4xf32>" in product


def test_active_parameters_are_those_of_the_experts_that_are_taken():
    # https://huggingface.co/Qwen/Qwen3-30B-A3B: 3.3B activated; Scout: 17B
    assert ARCHITECTURES["qwen3-30b-a3b"].num_active_params == pytest.approx(
        3.3e9, rel=0.02
    )
    assert ARCHITECTURES["scout"].num_active_params == pytest.approx(17.2e9, rel=0.01)
    dense = ARCHITECTURES["qwen3-8b"]
    assert dense.num_active_params == dense.num_params


def test_flops_count_the_experts_that_are_taken():
    # Of 5 experts 2: what a dense feed-forward of twice the size has, and the router.
    dense = dataclasses.replace(ARCH, family="qwen3", experts=None, ffn_size=48)
    router = 2 * ARCH.num_layers * ARCH.hidden_size * 5
    assert ARCH.flops_per_token(3.0) == dense.flops_per_token(3.0) + router
    biased = dataclasses.replace(ARCH.experts, bias=True)
    with_bias = dataclasses.replace(ARCH, experts=biased)
    assert with_bias.flops_per_token(3.0) == ARCH.flops_per_token(3.0)


@functools.partial(jax.jit, static_argnames=("arch", "mesh", "remat"))
def output_and_gradient(params, tokens, arch, mesh=None, remat="none"):
    def loss(params):
        hidden, said = hidden_states(
            params,
            arch,
            tokens,
            positions=jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1)),
            segment_ids=jnp.ones_like(tokens),
            dtype=jnp.float32,
            remat=remat,
            mesh=mesh,
        )
        return (hidden**2).sum() / hidden.size, (hidden, said["experts"])

    return jax.grad(loss, has_aux=True)(params)


# Two kv heads, four experts in parts, eight devices, in all ways.
WAYS = [
    (*shape, expert)
    for shape in itertools.product((1, 2, 4, 8), repeat=4)
    for expert in (2, 4)
    if math.prod(shape) == 8 and shape[3] <= 2 and shape[1] % expert == 0
]
SOME = [
    *((1, 4, 1, 2), (2, 1, 2, 2), (2, 2, 2, 1)),
    *((1, 4, 1, 2, 2), (1, 8, 1, 1, 4), (2, 2, 2, 1, 2)),
]


@pytest.mark.parametrize(
    "name, shape",
    [
        *(("qwen3", SOME[0]), ("qwen3", SOME[-1])),
        *(("llama4", SOME[3]), ("gpt-oss", SOME[2])),
        *(
            pytest.param(name, shape, marks=pytest.mark.slow)
            for name, shapes in (
                *(("qwen3", SOME[1:-1]), ("llama4", SOME[:3] + SOME[4:])),
                ("gpt-oss", SOME[3:4]),
            )
            for shape in shapes
        ),
    ],
    ids=str,
)
def test_a_mesh_has_the_output_and_the_gradient_of_one_device(
    random_params, name, shape
):
    # The other meshes, which are slow, all compute their layers anew.
    remat = "full" if shape == SOME[-1] or name == "gpt-oss" else "none"
    same_on_a_mesh(random_params, MIXTURES[name], shape, remat=remat)


@pytest.mark.slow  # a compilation each
def test_every_mesh_of_parts_has_the_output_and_gradient_of_one_device(random_params):
    arch = dataclasses.replace(ARCH, num_layers=1)
    for shape in sorted(set(WAYS) - set(SOME)):
        same_on_a_mesh(random_params, arch, shape, remat="full")


def same_on_a_mesh(random_params, arch, shape, *, remat):
    arch = dataclasses.replace(arch, experts=dataclasses.replace(arch.experts, count=4))
    params = random_params(arch)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (8, 8)))
    wanted, (hidden, chosen) = output_and_gradient(params, tokens, arch)
    mesh = mesh_of(shape)
    found, (ours, taken) = output_and_gradient(
        jax.device_put(params, param_shardings(arch, mesh)),
        jax.device_put(tokens, batch_sharding(mesh)),
        arch,
        mesh,
        remat,
    )
    np.testing.assert_array_equal(taken, chosen)
    np.testing.assert_allclose(ours, hidden, atol=2e-5)
    found, wanted = jax.device_get((found, wanted))
    scale = largest(wanted)
    for mine, theirs in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(mine / scale, theirs / scale, atol=2e-6)


def test_a_bias_is_in_the_choice_and_not_in_the_gates():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2]]))
    experts = Experts(3, 2, "softmax", bias=True)
    even = ffn_moe.route(logits, experts, bias=jnp.zeros(3))
    np.testing.assert_array_equal(even[0], [[0, 1]])
    moved = ffn_moe.route(logits, experts, bias=jnp.asarray([-0.31, 0.0, 0.05]))
    np.testing.assert_array_equal(moved[0], [[1, 2]])  # 0.19, 0.3, 0.25
    np.testing.assert_allclose(moved[1], [[0.3, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(moved[2], [[0.5, 0.3, 0.2]], rtol=1e-6)


def test_experts_are_divided_among_devices(random_params):
    arch = dataclasses.replace(ARCH, experts=dataclasses.replace(SOFTMAX, count=4))
    mesh = make_mesh(jax.devices(), fsdp=8, expert=4)
    params = jax.device_put(random_params(arch), param_shardings(arch, mesh))
    layers = params["layers"]
    own = {name: leaf.addressable_shards[0].data.shape for name, leaf in layers.items()}
    wide, inner = arch.hidden_size, arch.ffn_size
    assert own["expert_gate_up"] == (arch.num_layers, 1, wide // 2, 2, inner)
    assert own["expert_down"] == (arch.num_layers, 1, inner, wide // 2)
    assert own["query"][1] == wide // 8  # all else as without the axis


def test_experts_that_an_axis_does_not_divide_are_refused_in_a_line():
    mesh = make_mesh(jax.devices()[:2], fsdp=2, expert=2)
    said = "mesh.expert = 2 .* experts = 5; "
    with pytest.raises(ValueError, match=said):
        param_shardings(ARCH, mesh)
    with pytest.raises(ValueError, match="mesh.expert = 2 .* mesh.fsdp = "):
        make_mesh(jax.devices()[:3], fsdp=3, expert=2)
    with pytest.raises(ValueError, match="generators.devices = 4 .* the 5 experts"):
        sampler_mesh(ARCH, jax.devices()[:4])


@functools.partial(jax.jit, static_argnums=(2, 3))
def decoded(layer, x, arch, mesh=None):
    return ffn_moe.expert_feed_forward(layer, arch, x, decoding=True, mesh=mesh)


# Numbers of tokens: few, computed by all experts, and grouped; devices of two kv heads.
@pytest.mark.parametrize("count", [3, 40, 200])
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_samplers_devices_share_the_experts(random_params, name, count, devices):
    arch = MIXTURES[name]
    arch = dataclasses.replace(arch, experts=dataclasses.replace(arch.experts, count=8))
    layer, x = first_layer(random_params(arch)), states(count, arch)
    mesh = sampler_mesh(arch, jax.devices()[:devices])
    assert mesh.shape["tensor"] == 2 and mesh.shape["expert"] == devices // 2
    cut = sampler_shardings(arch, mesh)["layers"][0]
    wanted, chosen = decoded(layer, x, arch)
    found, said = decoded(jax.device_put(layer, cut), x, arch, mesh)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(said["experts"], chosen["experts"])
