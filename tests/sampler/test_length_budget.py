"""The length budget by hand."""

import numpy as np
import pytest

from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.requests import LengthBudget, Samples

BUDGET = LengthBudget(stages=((0, 40), (10, 60), (30, 80)), max_completion_tokens=80)


def samples(*thinking_limits):
    count = len(thinking_limits)
    return Samples(
        keys=np.zeros((count, 2), np.uint32),
        thinking_limits=np.array(thinking_limits, np.int32),
    )


@pytest.mark.parametrize(
    "step, expected", [(0, 40), (9, 40), (10, 60), (29, 60), (30, 80), (1000, 80)]
)
def test_a_stage_begins_at_its_step(step, expected):
    assert BUDGET.limit(step) == expected


def test_interruptions_keep_their_share_of_the_limit():
    cut = BUDGET.cut(samples(41, 64), step=10)
    assert cut.max_tokens is not None
    assert cut.max_tokens.tolist() == [60, 60]
    assert cut.thinking_limits.tolist() == [30, 48]  # 3 / 4 of 41 is 30.75
    assert {cut.max_tokens.dtype, cut.thinking_limits.dtype} == {np.dtype(np.int32)}


def test_an_interruption_that_never_comes_comes_in_no_stage():
    cut = BUDGET.cut(samples(NEVER), step=0)
    assert cut.thinking_limits[0] > 40


def test_the_whole_limit_and_no_stages_leave_the_samples_as_they_are():
    whole = samples(41)
    assert BUDGET.cut(whole, step=30) is whole
    unlimited = LengthBudget(stages=(), max_completion_tokens=80)
    assert unlimited.limit(0) == 80 and unlimited.cut(whole, step=0) is whole
