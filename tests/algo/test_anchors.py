"""Losses around the policy at the window's start, by hand."""

import math

import numpy as np
import pytest
from small_tokens import LOSSES, at_ratio, make_tokens, slope


@pytest.mark.parametrize(
    "ratio, drift, advantage, expected",
    [
        pytest.param(1.0, 2.0, 1.0, -2.0, id="first step: weighted by the drift"),
        pytest.param(1.5, 2.0, 1.0, -2.6, id="clipped around the recomputed"),
        pytest.param(0.5, 0.5, -1.0, 0.4, id="clipped below"),
        pytest.param(1.0, 40.0, 1.0, -5.0, id="the drift is capped at 5"),
    ],
)
def test_the_decoupled_loss_by_hand(ratio, drift, advantage, expected):
    proximal = -1.0 - math.log(ratio)
    tokens = make_tokens(-1.0, proximal - math.log(drift), advantage, proximal=proximal)
    np.testing.assert_allclose(LOSSES["decoupled"](tokens), expected, rtol=2e-6)
    np.testing.assert_array_equal(
        LOSSES["corrected"](tokens), LOSSES["decoupled"](tokens)
    )
    kept = expected if ratio == 1.0 else 0.0
    np.testing.assert_allclose(slope(LOSSES["decoupled"], tokens), kept, rtol=2e-6)


def test_an_anchored_loss_does_not_see_the_sampler():
    tokens = at_ratio(-1.0, 100.0, 1.0, proximal=-1.0 - math.log(1.25))
    np.testing.assert_allclose(LOSSES["anchored"](tokens), -1.25, rtol=2e-6)
