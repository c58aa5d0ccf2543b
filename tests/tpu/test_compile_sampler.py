"""The 8B sampler's programs, compiled for TPUs by a host that has none."""

import pytest
from tpu_compiler import NEEDS_COMPILER, compile_for_tpu

pytestmark = NEEDS_COMPILER


@pytest.mark.parametrize(
    "chip, tensor, layers",
    [
        pytest.param("v5e", 8, 2, id="v5e: a kv head on each device"),
        pytest.param("v5e", 1, 2, id="v5e: one device"),
        pytest.param("v5p", 4, 2, id="v5p"),
        pytest.param("v6e", 8, 2, id="v6e"),
        pytest.param("v5e", 8, 32, id="v5e: every layer"),
    ],
)
def test_the_samplers_programs_compile(chip, tensor, layers):
    report = compile_for_tpu("engine", chip, tensor, layers)
    generate, prefill = report["generate"], report["prefill"]
    assert generate["kernels"] == layers
    assert prefill["kernels"] == layers - 1  # the last layer's result is not used
    assert generate["float32_heads"] >= 1
    for program in (generate, prefill):
        # No layer's pages are copied.
        assert program["in_place_bytes"] >= report["pages_bytes"]
        assert program["temporary_bytes"] < report["pages_bytes"] / layers
        assert program["argument_bytes"] > report["pages_bytes"]


@pytest.mark.parametrize(
    "chip, tensor, layers",
    [
        pytest.param("v5e", 8, 2, id="v5e: a kv head on each device"),
        pytest.param("v5p", 4, 2, id="v5p"),
        pytest.param("v6e", 8, 32, id="v6e: every layer"),
    ],
)
def test_a_cache_in_int8_is_read_and_written_in_place(chip, tensor, layers):
    """As above, in 132 of 256 bytes; prompt chunks have no kernel."""
    report = compile_for_tpu("int8", chip, tensor, layers)
    tokens = 64 * 4096
    assert report["pages_bytes"] == layers * tokens * (8 // tensor) * 2 * (128 + 4)
    assert report["generate"]["kernels"] == layers
    assert report["generate"]["float32_heads"] >= 1
    for name in ("generate", "prefill"):
        assert report[name]["in_place_bytes"] >= report["pages_bytes"]
        assert report[name]["temporary_bytes"] < report["pages_bytes"] / layers


def test_matrices_in_int8_are_read_as_they_are():
    whole, half = (
        compile_for_tpu(kind, "v5e", 4, 2)["generate"]
        for kind in ("engine", "int8 weights")
    )
    # Of two layers on four devices: 8 or 2 heads of 128, and a feed-forward of 3,584.
    matrices = 2 * 4096 * (2 * 1024 + 2 * 256 + 3 * 3584)
    saved = whole["argument_bytes"] - half["argument_bytes"]
    assert 0.99 * matrices < saved <= matrices
    # No matrix is written out again in the dtype of the activations.
    assert half["temporary_bytes"] - whole["temporary_bytes"] < 4096 * 3584


@pytest.mark.parametrize(
    "what, chip, tensor, kernels, token_bytes",
    [
        pytest.param("rings", "v5e", 8, (2, 1), 2 * 128, id="floats"),
        pytest.param("int8_rings", "v5e", 8, (2, 0), 128 + 4, id="int8"),
        pytest.param("int8_rings", "v5p", 4, (2, 0), 128 + 4, id="int8 on v5p"),
        pytest.param("paged64", "v5e", 8, (0, 0), 2 * 64, id="short heads"),
    ],
)
def test_layers_that_keep_rings_are_read_and_written_in_place(
    what, chip, tensor, kernels, token_bytes
):
    """Every second layer sees 1,024 tokens of 16,384, and keeps them and a chunk."""
    report = compile_for_tpu(what, chip, tensor, 2)
    pages, in_rings = report["ring_pages"]
    size = 128 if what == "int8_rings" else 32
    assert pages == (1024 + 512) // size + 1
    # A ring for each of 64 slots and 8 prompts, of which a quarter is in the cache.
    assert in_rings == 72 // 4 * pages
    tokens = 64 * 4096 + size * in_rings
    assert report["pages_bytes"] == tokens * (8 // tensor) * 2 * token_bytes
    for name, count in zip(("generate", "prefill"), kernels, strict=True):
        assert report[name]["kernels"] == count
        assert report[name]["in_place_bytes"] >= report["pages_bytes"]
        # Smaller than a layer that sees all.
        assert report[name]["temporary_bytes"] < report["pages_bytes"] / 2


def test_plain_attention_copies_no_pages():
    """At a token's own place the two programs had copied 6.4 and 2.2 GB of 2.1."""
    report = compile_for_tpu("paged", "v5e", 1, 2)
    assert report["pages_bytes"] == 2**31
    for name in ("generate", "prefill"):
        assert report[name]["kernels"] == 0
        assert report[name]["in_place_bytes"] >= 2**31
        assert report[name]["temporary_bytes"] < 2**27


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_the_kernel_compiles_at_its_limits(chip):
    assert compile_for_tpu("kernel", chip)["compiled"] == 15
