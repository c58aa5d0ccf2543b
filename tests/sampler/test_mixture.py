"""Families beyond the dense ones that see all, against the slow sampler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture

from scalerl_jax.model.architecture import Experts, LocalLayers
from scalerl_jax.model.rope import Rope
from scalerl_jax.model.transformer import abstract_params, hidden_states
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.kernels import choose_attention, why_not_pallas

PROMPTS = [np.random.default_rng(3).integers(0, 13, n) for n in (1, 5, 16, 17, 20)]
QWEN3 = small_architecture(
    vocab_size=13,
    family="qwen3_moe",
    experts=Experts(count=4, top_k=2, gate="normalized"),
)
BIASED = small_architecture(
    vocab_size=13,
    family="qwen3_moe",
    experts=Experts(count=4, top_k=2, gate="softmax", bias=True),
)
# Sequences of 38 tokens in chunks of 8, in every second layer.
LLAMA4 = small_architecture(
    vocab_size=13,
    family="llama4_text",
    experts=Experts(count=3, top_k=1, gate="sigmoid", gate_input=True, shared=True),
    local=LocalLayers((True, False), 8, True, 0.3, 4),
)
# Sequences of 38 tokens; every second layer sees 7, and its positions are its own.
NEAR = dict(windows=(7, 0), window_rope=Rope(100.0))
GEMMA = small_architecture(vocab_size=13, family="gemma3_text", **NEAR)
OLMO = small_architecture(vocab_size=13, family="olmo3", **NEAR)
GPT_OSS = small_architecture(
    vocab_size=13,
    family="gpt_oss",
    experts=Experts(count=4, top_k=2, gate="normalized", biased=True, clamp=0.3),
    windows=(0, 7),
)
SMOLLM = small_architecture(vocab_size=13, family="smollm3", rotated=(True, False))


slow_param = functools.partial(pytest.param, marks=pytest.mark.slow)


def params_of(arch):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(arch, dtype=jnp.float32),
    )


def talking(params, eos_ids):
    """The params with completions that seldom end: the first number of every token
    speaks against EOS."""
    head = params["head"].at[:, 0].set(0.0)
    return params | {
        "embedding": params["embedding"].at[:, 0].set(4.0),
        "head": head.at[np.array(eos_ids), 0].set(-2.0),
        "final_norm": params["final_norm"].at[0].set(1.0),
    }


# 4 slots gather their experts, 20 compute all of them; two kv heads on four devices.
@pytest.mark.parametrize(
    "arch, attention, slots, devices, kv_dtype",
    [
        pytest.param(QWEN3, "gathered", 4, 1, "model", id="qwen3, gathered experts"),
        slow_param(QWEN3, "gathered", 20, 1, "model", id="qwen3, dense experts"),
        pytest.param(QWEN3, "gathered", 20, 4, "model", id="qwen3, divided experts"),
        slow_param(BIASED, "gathered", 4, 1, "model", id="qwen3 with a bias"),
        slow_param(LLAMA4, "gathered", 4, 1, "model", id="llama4, gathered attention"),
        pytest.param(LLAMA4, "paged", 4, 1, "model", id="llama4, paged attention"),
        pytest.param(LLAMA4, "paged", 6, 3, "int8", id="llama4, rows over copies"),
        pytest.param(GEMMA, "gathered", 4, 1, "model", id="gemma3"),
        slow_param(OLMO, "paged", 4, 2, "int8", id="olmo3 on two devices"),
        pytest.param(SMOLLM, "cudnn", 4, 1, "model", id="smollm3"),
        pytest.param(GPT_OSS, "gathered", 4, 1, "int8", id="gpt-oss, gathered"),
        slow_param(GPT_OSS, "paged", 20, 4, "model", id="gpt-oss, divided experts"),
    ],
)
def test_the_engine_draws_the_tokens_of_the_slow_sampler(
    make_bench, arch, attention, slots, devices, kv_dtype
):
    bench = make_bench(
        arch=arch,
        attention=attention,
        slots=slots,
        devices=jax.devices()[:devices],
        kv_dtype=kv_dtype,
    )
    requests = [bench.request(number, each) for number, each in enumerate(PROMPTS)]
    params = params_of(arch)
    found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))
    assert all(each.experts is None for each in found.values())  # nobody asked
    assert max(len(each.tokens) for each in found.values()) > 8


def test_kernels_are_asked_for_chunks_of_whole_pages_alone(make_bench):
    bench = make_bench(arch=LLAMA4)
    mesh = make_mesh(jax.devices()[:1])
    wide = dataclasses.replace(LLAMA4, head_dim=128)
    settings = dataclasses.replace(bench.settings, arch=wide, page_size=4)
    assert why_not_pallas(settings, tensor=1) is None
    broken = dataclasses.replace(settings, page_size=3)
    said = why_not_pallas(broken, tensor=1) or ""
    assert "chunks of 8 tokens: set sampler.page_size = 3 to a divisor" in said
    with pytest.raises(ValueError, match="'cudnn' .*chunks of 8 tokens"):
        changed = make_bench(arch=LLAMA4, attention="cudnn").settings
        choose_attention(changed, mesh)


# -- the experts that are reported ----------------------------------------------------


def chosen_by(params, arch, tokens):
    """Experts of a whole row of tokens, in a pass that knows no cache: [T, L, k]."""
    row = np.zeros((1, 38), np.int32)
    row[0, : len(tokens)] = tokens
    found = _chosen(params, arch, row, np.arange(38)[None] < len(tokens))
    return np.asarray(found)[:, 0].transpose(1, 0, 2)[: len(tokens)]


@functools.partial(jax.jit, static_argnums=1)
def _chosen(params, arch, row, there):
    _, said = hidden_states(
        params,
        arch,
        row,
        positions=jnp.arange(row.shape[1])[None],
        segment_ids=there.astype(jnp.int32),
        dtype=jnp.float32,
    )
    return said["experts"]


def assert_experts(params, arch, request, each):
    """What is reported is what a whole pass chooses."""
    known = np.concatenate([request.tokens, each.tokens])[:-1]
    wanted = chosen_by(params, arch, known).astype(np.uint8)
    before = len(request.tokens) - 1
    if before:
        wanted[:before, -1] = 255  # nothing reads what the last layer made of them
    assert each.experts.dtype == np.uint8
    np.testing.assert_array_equal(each.experts, wanted)


@pytest.mark.parametrize("arch", [QWEN3, LLAMA4], ids=["qwen3", "llama4"])
def test_completions_have_the_experts_of_every_token(make_bench, arch):
    """Prompts in several chunks, forced tokens, and pages that do not last."""
    bench = make_bench(
        arch=arch, attention="gathered", report_experts=True, cache_tokens=44
    )
    requests = [bench.request(number, each) for number, each in enumerate(PROMPTS)]
    params = talking(params_of(arch), bench.settings.eos_ids)
    scheduler = bench.scheduler(*requests)
    found = bench.finish(scheduler, params)
    assert scheduler.stats.suspended > 0
    assert any(not each.mask.all() for each in found.values())
    for (number, _), each in found.items():
        assert_experts(params, arch, requests[number], each)


def test_tokens_keep_the_experts_of_the_version_that_chose_them(make_bench):
    """Weights change in flight; keys and values of the old ones are kept."""
    bench = make_bench(arch=QWEN3, attention="gathered", report_experts=True)
    old = talking(params_of(QWEN3), bench.settings.eos_ids)
    # Another router alone: embeddings and the first layer's attention are as they were.
    turned = {"router": old["layers"]["router"][..., ::-1]}
    new = old | {"layers": old["layers"] | turned}
    request = bench.request(0, PROMPTS[2], num_samples=2, limits=None)
    scheduler, found, version = bench.scheduler(request), {}, 0
    while scheduler.busy:
        for each in bench.step(scheduler, new if version else old, version=version):
            found[each.sample] = each
        version = 1
    for each in found.values():
        before = len(request.tokens) - 1
        assert set(each.versions) == {0, 1}
        known = np.concatenate([request.tokens, each.tokens])[:-1]
        first_layer = each.experts[:, 0]
        # The first layer has seen nothing of the router: whoever asks it decides.
        by_version = [chosen_by(params, QWEN3, known)[:, 0] for params in (old, new)]
        np.testing.assert_array_equal(first_layer[:before], by_version[0][:before])
        for place, asked in enumerate(each.versions, start=before):
            np.testing.assert_array_equal(first_layer[place], by_version[asked][place])
        assert (by_version[0] != by_version[1]).any()


def test_an_opened_completion_has_the_experts_of_all_its_tokens(make_bench):
    bench = make_bench(arch=QWEN3, attention="gathered", report_experts=True)
    params = talking(params_of(QWEN3), bench.settings.eos_ids)
    request = bench.request(0, PROMPTS[2], num_samples=2, limits=None)
    openings = (np.array([4, 1, 2], np.int32), np.zeros(0, np.int32))
    samples = dataclasses.replace(request.samples, openings=openings)
    opened = dataclasses.replace(request, samples=samples)
    found = bench.complete(params, opened)
    for (_, sample), each in found.items():
        assert each.tokens[: len(openings[sample])].tolist() == [*openings[sample]]
        known = np.concatenate([request.tokens, each.tokens])[:-1]
        wanted = chosen_by(params, QWEN3, known).astype(np.uint8)
        # Nothing reads what the last layer made of tokens that nobody drew behind.
        wanted[: len(request.tokens) + len(openings[sample]) - 1, -1] = 255
        np.testing.assert_array_equal(each.experts, wanted)


def test_a_resumed_completion_has_the_experts_of_all_its_tokens(make_bench):
    bench = make_bench(arch=QWEN3, attention="gathered", report_experts=True)
    params = talking(params_of(QWEN3), bench.settings.eos_ids)
    request = bench.request(0, PROMPTS[2], num_samples=1, limits=None, max_tokens=5)
    turn = bench.complete(params, request)[0, 0]
    longer = bench.request(0, PROMPTS[2], num_samples=1, limits=None)
    scheduler = bench.scheduler()
    scheduler.resume(longer, turn, np.array([4, 1, 2], np.int32))
    found = bench.finish(scheduler, params)[0, 0]
    assert len(found.tokens) > len(turn.tokens) + 3
    known = np.concatenate([longer.tokens, found.tokens])[:-1]
    wanted = chosen_by(params, QWEN3, known).astype(np.uint8)
    # Tokens whose next one nobody draws: of the prompt, and before appended ones.
    first = len(turn.experts)
    for part in (slice(len(longer.tokens) - 1), slice(first, first + 3)):
        wanted[part, -1] = 255
    np.testing.assert_array_equal(found.experts, wanted)
