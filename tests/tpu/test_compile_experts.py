"""Experts that are divided among a learner's devices, compiled for TPUs."""

import pytest
from tpu_compiler import NEEDS_COMPILER, compile_for_tpu

pytestmark = NEEDS_COMPILER


@pytest.mark.parametrize("chip, parts", [("v5p", 4), ("v6e", 8)])
def test_rows_are_sent_where_there_are_more_parts_than_a_token_has_experts(chip, parts):
    found = compile_for_tpu("experts", chip, parts, 1)
    assert found["ragged-all-to-all"] == 4  # there and back, in both passes
    gathered = compile_for_tpu("experts", chip, 2, 2)
    assert gathered["ragged-all-to-all"] == 0 < gathered["reduce-scatter"]
