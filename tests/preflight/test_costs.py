"""FLOPs, bytes and rooflines by hand."""

import dataclasses

import pytest

from scalerl_jax.model.architecture import ARCHITECTURES, Architecture
from scalerl_jax.preflight import flops
from scalerl_jax.preflight.chips import CHIPS
from scalerl_jax.preflight.collectives import Traffic
from scalerl_jax.preflight.roofline import roofline

SMALL = Architecture(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    ffn_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    rms_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
)
# query 8x8, key and value 8x4, output 8x8, gate and up 8x16, down 16x8.
WEIGHTS = 64 + 32 + 32 + 64 + 128 + 128 + 128
ROWS, LENGTH = 4, 10
PAIRS = ROWS * 10 * 11 // 2  # query and key of causal rows
SETTINGS = dict(
    rows=ROWS,
    row_tokens=LENGTH,
    devices=1,
    tensor=1,
    attention="blockwise",
    float32_head=True,
    param_bytes=4,
)


@pytest.mark.parametrize(
    "remat, linear_passes, attention_matmuls",
    [
        # forward 1, backward 2; attention: 2 forward, 5 backward
        pytest.param("none", 3 * WEIGHTS, 7, id="none"),
        pytest.param("dots", 3 * WEIGHTS, 7, id="dots"),
        # all linears again but the last
        pytest.param("attention", 4 * WEIGHTS - 128, 7, id="attention"),
        pytest.param("full", 4 * WEIGHTS - 128, 9, id="full"),
    ],
)
def test_a_microbatch_by_hand(remat, linear_passes, attention_matmuls):
    work = flops.microbatch(SMALL, remat=remat, **SETTINGS)
    linear = 2 * ROWS * LENGTH * linear_passes
    attention = 2 * attention_matmuls * PAIRS * 2 * 4
    assert work.layers == 3 * (linear + attention)
    # forward, forward again, and two gradients
    assert work.head == 4 * 2 * ROWS * LENGTH * 8 * 100


def test_the_tpus_two_backward_kernels_make_the_scores_twice():
    plain = flops.microbatch(SMALL, remat="none", **SETTINGS)
    kernel = flops.microbatch(SMALL, remat="none", **SETTINGS | {"attention": "splash"})
    assert kernel.layers - plain.layers == 3 * 2 * 2 * PAIRS * 2 * 4


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-32b"])
def test_decoding_a_token_costs_what_the_architecture_says(name):
    arch = ARCHITECTURES[name]
    work = flops.decode(
        arch, rows=1, context=1000, steps=1, itemsize=2, float32_head=True
    )
    # That counts norms as matmuls too: a few parameters in a million.
    assert work.flops == pytest.approx(arch.flops_per_token(1000), rel=1e-4)


def test_a_chunk_of_a_prompt_costs_its_tokens_without_the_head():
    arch = ARCHITECTURES["llama3.1-8b"]
    work = flops.prefill(arch, tokens=100, context=1000, itemsize=2)
    head = 2 * arch.vocab_size * arch.hidden_size
    each = arch.flops_per_token(1000) - head
    assert work.flops == pytest.approx(100 * each, rel=1e-4)
    assert work.head == 0


def test_decoding_reads_the_weights_once_and_the_cache_of_every_row():
    one, two = (
        flops.decode(SMALL, rows=2, context=c, steps=5, itemsize=2, float32_head=True)
        for c in (10, 11)
    )
    # One more token of each of 2 rows: a key and a value of 4, in 3 layers, 5 times.
    assert two.bytes - one.bytes == 5 * 3 * 2 * (2 * 4) * 2


def test_a_float32_product_is_six_bfloat16_ones():
    work = flops.Work(layers=10.0, head=2.0)
    assert work.flops == 12.0
    assert work.passes(float32_head=True) == 10.0 + 6 * 2.0
    assert work.passes(float32_head=False) == 12.0


V5E = dataclasses.replace(
    CHIPS["v5e"], flops=100.0, hbm_bandwidth=10.0, ici_bandwidth=5.0
)


@pytest.mark.parametrize(
    "layers, moved, sent, seconds, bound_by",
    [
        pytest.param(8000.0, 40.0, 5.0, 20.0, "compute", id="compute"),
        pytest.param(400.0, 400.0, 5.0, 10.0, "hbm", id="memory"),
        pytest.param(400.0, 40.0, 35.0, 7.0, "ici", id="interconnect"),
    ],
)
def test_the_slowest_resource_is_the_roofline(layers, moved, sent, seconds, bound_by):
    """Of 4 devices of 100 FLOP/s, 10 byte/s of memory, 5 byte/s of links."""
    found = roofline(
        V5E,
        flops.Work(layers=layers, bytes=moved),
        {"all-gather": Traffic(count=1, bytes=sent, sent_bytes=sent)},
        devices=4,
        float32_head=True,
    )
    assert found.compute == layers / 4 / 100
    assert found.hbm == moved / 4 / 10
    assert found.ici == sent / 5
    assert (found.seconds, found.bound_by) == (seconds, bound_by)
