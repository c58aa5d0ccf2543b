"""Seconds by hand, of a chip of 100 FLOP/s and 10 byte/s."""

import dataclasses
import functools

import pytest
from small_arch import SMALL, WEIGHTS

from scalerl_jax.machines.chips import CHIPS
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.planning import work
from scalerl_jax.planning.rates import (
    BOUND,
    EXPECTED,
    Reached,
    between_slices_seconds,
    decode_seconds,
    learner_seconds,
    prefill_seconds,
    publish_seconds,
)

SIDES = 16 + 12 + 12 + 16 + 24 + 24 + 24  # of those matrices, added up
SLOW = dataclasses.replace(
    CHIPS["v5p"], flops=100.0, hbm_bandwidth=10.0, host_bandwidth=2.0
)
STARVED = dataclasses.replace(SLOW, flops=1e9)  # whose memory alone is slow


def test_decoding_reads_weights_and_cache_in_time():
    """A token of each of 5 slots that hold 7: bfloat16, a head of float32."""
    linears = 2 * (WEIGHTS + 5 * SIDES)
    cached = 5 * 7 * 2 * 4 * 2
    head = 2 * (5 * 8 + 8 * 100) + 4 * 5 * 100
    seconds = (3 * (linears + cached) + head) / 2 / 10
    arguments = dict(slots=5, mean_context=7, chips=2)
    assert decode_seconds(SMALL, STARVED, **arguments, reached=BOUND) == seconds
    # Half of the bandwidth, and 2 x 3 + 18 collectives of a second each.
    slower = Reached(bandwidth=0.5, collective_s=1.0)
    found = decode_seconds(SMALL, STARVED, **arguments, reached=slower)
    assert found == 2 * seconds + 24
    four = decode_seconds(SMALL, STARVED, **arguments, steps=4, reached=slower)
    assert four == 4 * found


def test_one_chip_waits_for_no_collective():
    arguments = dict(slots=5, mean_context=7, chips=1)
    waiting = Reached(collective_s=1.0)
    assert decode_seconds(SMALL, SLOW, **arguments, reached=waiting) == decode_seconds(
        SMALL, SLOW, **arguments, reached=BOUND
    )


def test_many_short_sequences_are_bound_by_compute():
    quick = dataclasses.replace(SLOW, hbm_bandwidth=1e9)
    layer = 2 * 1000 * WEIGHTS + 4 * 1000 * 7 * 8
    head = 2 * 1000 * 8 * 100
    found = decode_seconds(
        SMALL, quick, slots=1000, mean_context=7, chips=1, reached=BOUND
    )
    assert found == (3 * layer + head) / 100  # both operands are bfloat16
    exact = decode_seconds(
        *(SMALL, quick),
        slots=1000,
        mean_context=7,
        chips=1,
        itemsize=4,
        reached=BOUND,
    )
    assert exact == (3 * layer + 6 * head) / 100


def test_the_published_decode_bound_of_an_8b_model():
    """64 slots of 4,688 tokens on 8 chips: 25k tokens/s by their bandwidth.

    16 GB of weights less the embedding, and 128 KiB for each of 300,000 tokens.
    """
    arguments = dict(slots=64, mean_context=300_000 / 64, chips=8)
    arch = ARCHITECTURES["llama3.1-8b"]
    weights = 2 * (arch.num_params - arch.vocab_size * arch.hidden_size)
    cache = 300_000 * 2**17
    bound = decode_seconds(arch, CHIPS["v5p"], **arguments, reached=BOUND)
    assert bound == pytest.approx((weights + cache) / 8 / 2765e9, rel=0.04)
    # The compiler's estimate of the program is 14k tokens/s.
    found = decode_seconds(arch, CHIPS["v5p"], **arguments, reached=EXPECTED)
    assert 64 / found == pytest.approx(14_000, rel=0.07)


@pytest.mark.parametrize(
    "slices, seconds",
    [
        pytest.param(1, 0.0, id="nothing from one slice"),
        pytest.param(2, 400.0, id="a shard there, and its sum back: half of each"),
        pytest.param(4, 600.0, id="three quarters of each"),
    ],
)
def test_gradients_between_slices_by_hand(slices, seconds):
    """1,000 weights on 5 shards: 800 bytes a chip, at 2 bytes a second."""
    found = between_slices_seconds(1_000, SLOW, slices=slices, shards=5)
    assert found == pytest.approx(seconds)


def test_a_chunk_of_a_prompt_by_hand():
    found = prefill_seconds(
        SMALL, STARVED, tokens=6, context=10, chips=2, reached=BOUND
    )
    linears, cached = 2 * (WEIGHTS + 6 * SIDES), 10 * 2 * 4 * 2
    assert found == 3 * (linears + cached) / 2 / 10


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_training_takes_its_products_in_time(share):
    """A microbatch of 4 rows of 10 tokens, and an update, on 2 chips."""
    quick = dataclasses.replace(SLOW, hbm_bandwidth=1e9)
    made = dict(rows=4, row_tokens=10, devices=2, tensor=1, remat="none")
    one = work.microbatch(SMALL, **made, float32_head=True, param_bytes=4)
    linear = 2 * 40 * 3 * WEIGHTS
    attention = 2 * (2 + 5) * (4 * 55) * 2 * 4
    head = (3 + 3 + 2 + 3) * 2 * 40 * 8 * 100
    products = (3 * (linear + attention) + head) / 2 / (share * 100)
    take = functools.partial(learner_seconds, chips=2, reached=Reached(flops=share))
    assert take(quick, one) == pytest.approx(products)
    update = SMALL.num_params * (3 * 4 + 3 * 8 + 4 * 4) / 2 / 1e9
    assert take(quick, work.optimizer_update(SMALL, param_bytes=4)) == update


@pytest.mark.parametrize(
    "replicas, replica_chips, seconds",
    [
        # A version of N bytes: each of 4 learner chips sends N / 4 a replica.
        pytest.param(1, 2, 1 / 2, id="what a replica takes"),
        pytest.param(6, 2, 6 / 4, id="what the learner sends"),
    ],
)
def test_a_version_passes_the_hosts_network(replicas, replica_chips, seconds):
    found = publish_seconds(
        SMALL, SLOW, learner_chips=4, replicas=replicas, replica_chips=replica_chips
    )
    assert found == seconds * 2 * SMALL.num_params / 2.0
