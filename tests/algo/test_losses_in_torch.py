"""Every loss against its paper's equation, written in torch.

An oracle takes one sequence at a time, in float64, loops over its tokens, and shares
nothing with `scalerl_jax.algo`; autograd gives its gradient.  Ours are packed.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from small_tokens import LOSSES, floats, make_tokens, values_and_slopes

torch = pytest.importorskip("torch")

CAP, LOW, HIGH, DUAL, TV_LOW, TV_HIGH = 5.0, 0.2, 0.3, 3.0, 0.2, 0.3
IDS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 2, 2, 0]])
MASK = np.array([[1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0]], bool)


def clipped(ratio, advantage):
    return -torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def cispo(logp, mu, _, advantages):
    """MiniMax-M1 equation 4 with ScaleRL's absolute cap."""
    weight = torch.exp(logp - mu).clamp(max=CAP).detach()
    return -weight * advantages * logp


def ppo(logp, mu, _, advantages):
    """PPO equation 7; GRPO equation 3; DAPO equation 8."""
    return clipped(torch.exp(logp - mu), advantages)


def dual_clip(logp, mu, _, advantages):
    """Ye et al.: max(min(...), c * A) for A < 0."""
    surrogate = -clipped(torch.exp(logp - mu), advantages)
    bounded = torch.max(surrogate, DUAL * advantages)
    return -torch.where(advantages < 0, bounded, surrogate)


def dppo(logp, mu, _, advantages):
    """The Binary-TV mask of DPPO."""
    with torch.no_grad():
        moved = logp.exp() - mu.exp()
        outside = ((advantages > 0) & (moved > TV_HIGH)) | (
            (advantages < 0) & (moved < -TV_LOW)
        )
    return -(~outside).double() * torch.exp(logp - mu) * advantages


def gspo(logp, mu, _, advantages):
    """GSPO equations 5 and 7."""
    ratio = torch.exp((logp - mu).sum() / len(logp))
    return clipped(ratio, advantages)


def gspo_token(logp, mu, _, advantages):
    """GSPO equations 13 and 14."""
    ratio = torch.exp((logp - mu).sum() / len(logp)).detach()
    own = torch.exp(logp) / torch.exp(logp).detach()
    return clipped(ratio * own, advantages)


def sequence_truncated_is(logp, mu, _, advantages):
    """The likelihood ratio of the whole completion, truncated."""
    ratio = torch.exp(logp).prod() / torch.exp(mu).prod()
    return -ratio.clamp(max=CAP).detach() * advantages * logp


def decoupled(logp, mu, proximal, advantages):
    """AReaL: pi_prox / pi_behave * min(u A, clip(u) A), u = pi / pi_prox."""
    weight = (proximal.exp() / mu.exp()).clamp(max=CAP)
    return weight * clipped(torch.exp(logp - proximal), advantages)


ORACLES = {
    "reinforce": lambda logp, mu, proximal, advantages: -advantages * logp,
    "cispo": cispo,
    "truncated_is": cispo,
    "clipped": ppo,
    "dual_clip": dual_clip,
    "dppo": dppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sequence_truncated_is": sequence_truncated_is,
    "decoupled": decoupled,
    "corrected": decoupled,
    "anchored": lambda logp, mu, proximal, advantages: ppo(
        logp, proximal, None, advantages
    ),
}
NATS = floats(IDS.shape, -3, 0)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=20)
@given(
    logprobs=NATS,
    behavior=NATS,
    proximal=NATS,
    advantages=floats((2, 3), -2, 2),
    weights=floats(IDS.shape, 0, 1),
)
def test_losses_and_gradients_are_those_of_the_papers(
    name, logprobs, behavior, proximal, advantages, weights
):
    advantages = np.take_along_axis(advantages, IDS, axis=1)
    weights = np.where(MASK, weights, 0.0)
    expected, expected_slope = np.zeros(IDS.shape), np.zeros(IDS.shape)
    for row in range(2):
        for sequence in (1, 2):
            places = np.flatnonzero((IDS[row] == sequence) & MASK[row])
            fields = (
                torch.tensor(array[row, places], dtype=torch.float64)
                for array in (logprobs, behavior, proximal, advantages, weights)
            )
            logp, mu, prox, advantage, weight = fields
            logp.requires_grad_()
            loss = ORACLES[name](logp, mu, prox, advantage)
            (weight * loss).sum().backward()
            expected[row, places] = loss.detach().numpy()
            expected_slope[row, places] = logp.grad.numpy()
    tokens = make_tokens(
        logprobs,
        behavior,
        advantages,
        proximal=proximal,
        mask=MASK,
        sequence_ids=IDS,
    )
    values, slopes = values_and_slopes(LOSSES[name], tokens, weights)
    values, slopes = np.where(MASK, values, 0.0), np.where(MASK, slopes, 0.0)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(slopes, expected_slope, rtol=2e-5, atol=1e-6)
