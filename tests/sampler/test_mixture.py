"""Mixtures of experts, and layers that see chunks, against the slow sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture

from scalerl_jax.model.architecture import Experts, LocalLayers
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.kernels import choose_attention, why_not_pallas

PROMPTS = [np.random.default_rng(3).integers(0, 13, n) for n in (1, 5, 16, 17, 20)]
QWEN3 = small_architecture(
    vocab_size=13,
    family="qwen3_moe",
    experts=Experts(count=4, top_k=2, gate="normalized"),
)
# Sequences of 38 tokens in chunks of 8, in every second layer.
LLAMA4 = small_architecture(
    vocab_size=13,
    family="llama4_text",
    experts=Experts(count=3, top_k=1, gate="sigmoid", gate_input=True, shared=True),
    local=LocalLayers((True, False), 8, True, 0.3, 4),
)


def params_of(arch):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(arch, dtype=jnp.float32),
    )


# 4 slots gather their experts, 20 compute all of them.
@pytest.mark.parametrize(
    "arch, attention, slots",
    [
        pytest.param(QWEN3, "gathered", 4, id="qwen3, gathered experts"),
        pytest.param(QWEN3, "gathered", 20, id="qwen3, dense experts"),
        pytest.param(LLAMA4, "gathered", 4, id="llama4, gathered attention"),
        pytest.param(LLAMA4, "paged", 4, id="llama4, paged attention"),
    ],
)
def test_the_engine_draws_the_tokens_of_the_slow_sampler(
    make_bench, arch, attention, slots
):
    bench = make_bench(arch=arch, attention=attention, slots=slots)
    requests = [bench.request(number, each) for number, each in enumerate(PROMPTS)]
    params = params_of(arch)
    found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))
    assert max(len(each.tokens) for each in found.values()) > 8


def test_kernels_are_not_asked_for_chunks(make_bench):
    bench = make_bench(arch=LLAMA4)
    mesh, settings = make_mesh(jax.devices()[:1]), bench.settings
    assert "chunks of 8 tokens" in (why_not_pallas(settings, tensor=1) or "")
    with pytest.raises(ValueError, match="'cudnn' does not take .*chunks of 8 tokens"):
        changed = make_bench(arch=LLAMA4, attention="cudnn").settings
        choose_attention(changed, mesh)
