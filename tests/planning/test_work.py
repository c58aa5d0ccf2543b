"""FLOPs and bytes of programs by hand."""

import dataclasses
import itertools

import pytest
from small_arch import SMALL, WEIGHTS

from scalerl_jax.model.architecture import Experts
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.planning import work
from scalerl_jax.planning.work import Work

ROWS, LENGTH = 4, 10
PAIRS = ROWS * 10 * 11 // 2  # query and key of causal rows
SETTINGS = dict(
    rows=ROWS,
    row_tokens=LENGTH,
    devices=1,
    tensor=1,
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
    found = work.microbatch(SMALL, remat=remat, **SETTINGS)
    linear = 2 * ROWS * LENGTH * linear_passes
    attention = 2 * attention_matmuls * PAIRS * 2 * 4
    assert found.layers == 3 * (linear + attention)
    # forward, forward again, and two gradients
    assert found.head == 4 * 2 * ROWS * LENGTH * 8 * 100


def test_logits_that_are_kept_save_a_product_of_the_head():
    again, once = (
        work.microbatch(SMALL, remat="none", **SETTINGS, head_once=each)
        for each in (False, True)
    )
    assert once.head == again.head * 3 / 4
    # Hidden states are cast: of 3, 3, 2 and 3 passes the first are made once.
    assert again.head_passes / once.head_passes == 11 / 8
    assert again.layers == once.layers


def test_a_forward_pass_that_scores_by_hand():
    arguments = dict(rows=ROWS, row_tokens=LENGTH, devices=1, tensor=1)
    found = work.scoring(SMALL, **arguments, float32_head=True)
    attention = 2 * 2 * PAIRS * 2 * 4
    assert found.layers == 3 * (2 * ROWS * LENGTH * WEIGHTS + attention)
    assert found.head == 2 * ROWS * LENGTH * 8 * 100
    assert found.head_passes == 3 * found.head  # hidden states are cast
    # Of the work of a microbatch that recomputes nothing it is the first part.
    whole = work.microbatch(SMALL, remat="none", **SETTINGS)
    assert found.bytes < whole.bytes / 3


def test_blocks_that_attention_skips_cost_no_products_and_windows_skip_theirs():
    whole, half = (
        work.microbatch(SMALL, remat="none", **SETTINGS, attention_share=share)
        for share in (1.0, 0.5)
    )
    assert whole.layers - half.layers == 3 * 7 * 2 * PAIRS * 2 * 4 / 2
    assert whole.bytes == half.bytes
    near = dataclasses.replace(SMALL, windows=(3, 3, 3))
    one, other = (
        work.microbatch(near, remat="none", **SETTINGS, attention_share=share)
        for share in (1.0, 0.5)
    )
    assert one == other


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "scout"])
def test_decoding_a_token_costs_what_the_architecture_says(name):
    arch = ARCHITECTURES[name]
    found = work.decode(
        arch, rows=1, context=1000, steps=1, itemsize=2, float32_head=True
    )
    assert found.flops == pytest.approx(arch.flops_per_token(1000), rel=1e-12)


def test_a_chunk_of_a_prompt_costs_its_tokens_without_the_head():
    arch = ARCHITECTURES["llama3.1-8b"]
    found = work.prefill(arch, tokens=100, context=1000, itemsize=2)
    head = 2 * arch.vocab_size * arch.hidden_size
    each = arch.flops_per_token(1000) - head
    assert found.flops == pytest.approx(100 * each, rel=1e-12)
    assert found.head == 0


def test_decoding_reads_the_weights_once_and_the_cache_of_every_row():
    one, two = (
        work.decode(SMALL, rows=2, context=c, steps=5, itemsize=2, float32_head=True)
        for c in (10, 11)
    )
    # One more token of each of 2 rows: a key and a value of 4, in 3 layers, 5 times.
    assert two.bytes - one.bytes == 5 * 3 * 2 * (2 * 4) * 2
    # In int8 a key or a value of 4 numbers has 4 bytes and those of its scale.
    less = work.decode(
        *(SMALL,),
        rows=2,
        context=10,
        steps=5,
        itemsize=2,
        vector_bytes=8 - 3,
        float32_head=True,
    )
    assert one.bytes - less.bytes == 5 * 3 * 2 * 10 * 2 * 3
    assert one.passes == less.passes


def mixture(count, top_k):
    experts = Experts(count=count, top_k=top_k, gate="normalized")
    return dataclasses.replace(SMALL, family="qwen3_moe", qk_norm=True, experts=experts)


def test_a_microbatch_of_a_mixture_multiplies_the_experts_that_are_taken():
    found = work.microbatch(mixture(5, 2), remat="full", **SETTINGS)
    # Attention's four, a router of 8x5 and two experts, with all of it made again.
    weights = (64 + 32 + 32 + 64) + 8 * 5 + 2 * 3 * 128
    attention = 2 * (4 + 5) * PAIRS * 2 * 4
    assert found.layers == 3 * (2 * ROWS * LENGTH * 4 * weights + attention)


def test_experts_hit_are_those_of_all_draws():
    pairs = list(itertools.combinations(range(4), 2))
    draws = list(itertools.product(pairs, repeat=3))
    mean = sum(len(set().union(*each)) for each in draws) / len(draws)
    assert work.experts_hit(mixture(4, 2), 3) == pytest.approx(mean)
    assert work.experts_hit(SMALL, 3) == 0


def test_a_token_reads_its_own_experts_however_many_there_are():
    few, many = (
        work.decode(
            mixture(count, 2), rows=1, context=9, steps=1, itemsize=2, float32_head=True
        )
        for count in (2, 6)
    )
    # Routers of 8x2 and 8x6, and their logits, in 3 layers, of 2 bytes each.
    assert many.bytes - few.bytes == pytest.approx(3 * 2 * (8 * 4 + 4))


def test_a_replica_of_more_devices_than_kv_heads_reads_all_but_experts_again():
    once, twice = (
        work.decode(
            mixture(6, 2),
            rows=5,
            context=9,
            steps=1,
            itemsize=2,
            float32_head=True,
            copies=copies,
        )
        for copies in (1, 2)
    )
    assert (twice.layers, twice.head) == (once.layers, once.head)
    arch = mixture(6, 2)
    queries, keys = (
        heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads)
    )
    width = arch.hidden_size
    layer = width * (2 * queries + 2 * keys + arch.experts.count)
    again = 2 * (arch.num_layers * layer + arch.vocab_size * width)
    assert twice.bytes - once.bytes == again


@pytest.mark.parametrize(
    "float32_head, compute_bytes, head_bytes, passes",
    [
        pytest.param(True, 4, 4, 6 + 6 + 3 + 3, id="float32 operands: six or three"),
        pytest.param(True, 2, 4, 3 + 3 + 2 + 3, id="cast hidden states in all but one"),
        pytest.param(True, 2, 2, 1 + 1 + 2 + 2, id="cast weights, too"),
        pytest.param(False, 2, 4, 4, id="bfloat16: one each"),
    ],
)
def test_a_product_of_the_head_is_several_bfloat16_ones(
    float32_head, compute_bytes, head_bytes, passes
):
    settings = SETTINGS | dict(
        float32_head=float32_head, compute_bytes=compute_bytes, head_bytes=head_bytes
    )
    found = work.microbatch(SMALL, remat="none", **settings)
    product = 2 * ROWS * LENGTH * 8 * 100
    assert found.head == 4 * product
    assert found.passes - found.layers == passes * product


def test_works_add_up_field_by_field():
    one = Work(layers=1.0, head=2.0, head_passes=6.0, bytes=3.0)
    assert one + one * 2 == Work(layers=3.0, head=6.0, head_passes=18.0, bytes=9.0)
