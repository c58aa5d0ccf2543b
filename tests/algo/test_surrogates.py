"""Clipped losses by hand, their gradients in closed form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tokens import LOSSES, at_ratio, make_tokens, slope

from scalerl_jax.algo.losses import surrogate_loss


@pytest.mark.parametrize(
    "ratio, advantage, expected, kept",
    [
        pytest.param(1.25, 2.0, -2.5, True, id="rewarded, within"),
        pytest.param(1.5, 2.0, -2.6, False, id="rewarded, risen past 1.3"),
        pytest.param(0.5, 2.0, -1.0, True, id="rewarded, fallen: brought back"),
        pytest.param(0.9, -2.0, 1.8, True, id="punished, within"),
        pytest.param(0.5, -2.0, 1.6, False, id="punished, fallen past 0.8"),
        pytest.param(1.5, -2.0, 3.0, True, id="punished, risen: brought back"),
        pytest.param(8.0, -2.0, 16.0, True, id="punished, risen far"),
        pytest.param(8.0, 0.0, 0.0, True, id="no advantage"),
    ],
)
@pytest.mark.parametrize("logprob", [-0.1, -1.0, -2.0, -4.0])
def test_a_token_past_ppos_clip_loses_its_gradient(
    logprob, ratio, advantage, expected, kept
):
    tokens = at_ratio(logprob, ratio, advantage)
    np.testing.assert_allclose(LOSSES["clipped"](tokens), expected, rtol=2e-6)
    gradient = -ratio * advantage if kept else 0.0
    np.testing.assert_allclose(slope(LOSSES["clipped"], tokens), gradient, rtol=2e-6)


def test_a_token_at_its_bound_has_a_gradient():
    for ratio, advantage in ((1.5, 1.0), (0.5, -1.0), (3.0, -1.0)):
        found = jax.grad(surrogate_loss)(
            jnp.float32(ratio),
            jnp.float32(advantage),
            clip_low=0.5,
            clip_high=0.5,
            dual_clip=3.0,
        )
        assert found == -advantage


@pytest.mark.parametrize(
    "ratio, advantage, expected, gradient",
    [
        pytest.param(2.0, -2.0, 4.0, 4.0, id="punished, below 3"),
        pytest.param(8.0, -2.0, 6.0, 0.0, id="punished, bounded at 3"),
        pytest.param(0.5, -2.0, 1.6, 0.0, id="punished, past the lower clip"),
        pytest.param(8.0, 2.0, -2.6, 0.0, id="rewarded: as without"),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, expected, gradient):
    tokens = at_ratio(-1.0, ratio, advantage)
    np.testing.assert_allclose(LOSSES["dual_clip"](tokens), expected, rtol=2e-6)
    found = slope(LOSSES["dual_clip"], tokens)
    np.testing.assert_allclose(found, gradient, rtol=2e-6)


@pytest.mark.parametrize(
    "probability, behavior, advantage, dropped",
    [
        pytest.param(0.65, 0.4, 1.0, False, id="rewarded, up by 0.25"),
        pytest.param(0.75, 0.4, 1.0, True, id="rewarded, up by 0.35"),
        pytest.param(0.1, 0.9, 1.0, False, id="rewarded, down"),
        pytest.param(0.25, 0.4, -1.0, False, id="punished, down by 0.15"),
        pytest.param(0.15, 0.4, -1.0, True, id="punished, down by 0.25"),
        pytest.param(0.9, 0.1, -1.0, False, id="punished, up"),
        pytest.param(0.01, 0.0001, 1.0, False, id="a rare token, ratio 100"),
    ],
)
def test_dppo_drops_what_moved_too_far_in_probability(
    probability, behavior, advantage, dropped
):
    tokens = make_tokens(math.log(probability), math.log(behavior), advantage)
    expected = 0.0 if dropped else -probability / behavior * advantage
    np.testing.assert_allclose(LOSSES["dppo"](tokens), expected, rtol=2e-6)
    np.testing.assert_allclose(slope(LOSSES["dppo"], tokens), expected, rtol=2e-6)
