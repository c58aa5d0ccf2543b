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


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_the_kernel_compiles_at_its_limits(chip):
    assert compile_for_tpu("kernel", chip)["compiled"] == 15
