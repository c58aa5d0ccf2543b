"""The learner's attention compiled for TPUs, by their compiler."""

import pytest
from tpu_compiler import NEEDS_COMPILER, compile_for_tpu

pytestmark = NEEDS_COMPILER


# A v4's cores have the least memory for the gradients that a kernel holds.
@pytest.mark.parametrize("chip", ["v4", "v6e"])
def test_both_passes_of_attention_fit_the_chips_vector_memory(chip):
    report = compile_for_tpu("splash", chip)
    assert len(report) == 4
    # Of 32 heads of 16,384 queries a gradient has 0.125 GiB, and no score is kept.
    assert report["(1, 16384, 32, 128) 8 bfloat16"] < 1.25 * 2**30
