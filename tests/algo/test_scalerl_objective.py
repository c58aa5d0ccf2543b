"""The parts of `algo` together against ScaleRL's objective, written in torch.

The oracle below is a transcription of the equation (reference: DESIGN.md "Objective
(ScaleRL)", https://arxiv.org/abs/2510.13786, section 2 and equation 4), with a loop
per prompt, completion and token and autograd in float64; it shares no code with
`scalerl_jax.algo`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small_tokens import make_tokens

from scalerl_jax.algo.advantages import (
    group_advantages,
    has_reward_variance,
    normalize_by_batch,
    prompt_weights,
)
from scalerl_jax.algo.losses import cispo_loss

torch = pytest.importorskip("torch")

N, G, T = 3, 4, 5
CAP, EPS = 5.0, 1e-6

NATS = hnp.arrays(
    np.float32, (N, G, T), elements=st.floats(-4, 0, width=32, allow_subnormal=False)
)
REWARDS = hnp.arrays(np.float32, (N, G), elements=st.sampled_from([-1.0, 1.0]))
LENGTHS = hnp.arrays(np.int32, (N, G), elements=st.integers(1, T))
EVERY = np.ones((N, G), bool)
SOME = st.one_of(st.just(EVERY), hnp.arrays(np.bool_, (N, G)))


def torch_objective(logprobs, behavior_logprobs, rewards, lengths, judged, ended):
    """-J(theta), from the equation; `logprobs` is a tensor [N][G][T].

    The baseline of a prompt is over its judged completions; trained on are those of
    them that ended, and their advantages set the scale.
    """
    advantages = {}
    for x in range(N):
        known = {i: float(rewards[x, i]) for i in range(G) if judged[x, i]}
        if len(set(known.values())) > 1:
            mean = sum(known.values()) / len(known)
            advantages |= {(x, i): r - mean for i, r in known.items() if ended[x, i]}
    loss = torch.zeros((), dtype=torch.float64)
    if not advantages:
        return loss
    std = (sum(a**2 for a in advantages.values()) / len(advantages)) ** 0.5
    kept = sorted({x for x, _ in advantages})
    for x in kept:
        of_prompt = torch.zeros((), dtype=torch.float64)
        tokens = 0
        for i in (i for y, i in advantages if y == x):
            for t in range(lengths[x, i]):
                ratio = torch.exp(logprobs[x, i, t] - float(behavior_logprobs[x, i, t]))
                capped = torch.clamp(ratio, max=CAP).detach()
                normalized = advantages[x, i] / (std + EPS)
                of_prompt = of_prompt - capped * normalized * logprobs[x, i, t]
                tokens += 1
        loss = loss + of_prompt / tokens
    return loss / len(kept)


@jax.jit
def objective(logprobs, behavior_logprobs, rewards, mask, judged, ended):
    """Return it from `algo`, as the assembler and the step put it together."""
    kept = has_reward_variance(rewards, judged, group_size=G) & judged & ended
    advantages = group_advantages(rewards, judged, group_size=G)
    advantages = normalize_by_batch(advantages, kept, eps=EPS)
    weights = prompt_weights(mask & kept[:, None], group_size=G)
    behavior_logprobs = jnp.where(mask, behavior_logprobs, logprobs)
    tokens = make_tokens(logprobs, behavior_logprobs, advantages[:, None], mask=mask)
    losses = cispo_loss(tokens, max_importance_ratio=CAP)
    return (weights * jnp.where(mask, losses, 0.0)).sum()


def flat_inputs(
    logprobs, behavior_logprobs, rewards, lengths, judged=EVERY, ended=EVERY
):
    mask = np.arange(T) < lengths.reshape(-1, 1)
    return (
        logprobs.reshape(-1, T),
        behavior_logprobs.reshape(-1, T),
        rewards.ravel(),
        mask,
        judged.ravel(),
        ended.ravel(),
    )


@settings(deadline=None, max_examples=25)
@given(NATS, NATS, REWARDS, LENGTHS, SOME, SOME)
def test_loss_and_gradient_are_those_of_the_equation(
    logprobs, behavior_logprobs, rewards, lengths, judged, ended
):
    others = (behavior_logprobs, rewards, lengths, judged, ended)
    tensor = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    expected = torch_objective(tensor, *others)
    if expected.requires_grad:
        expected.backward()
    gradient = np.zeros((N, G, T)) if tensor.grad is None else tensor.grad.numpy()

    inputs = flat_inputs(logprobs, *others)
    loss, found = jax.value_and_grad(objective)(*inputs)
    # Terms of up to 35 may cancel: their float32 rounding is about 1e-5.
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found, gradient.reshape(-1, T), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(NATS, NATS, REWARDS, LENGTHS, st.permutations(range(G)))
def test_the_order_of_completions_does_not_matter(
    logprobs, behavior_logprobs, rewards, lengths, order
):
    values = (logprobs, behavior_logprobs, rewards, lengths)
    loss = objective(*flat_inputs(*values))
    shuffled = objective(*flat_inputs(*(value[:, order] for value in values)))
    np.testing.assert_allclose(shuffled, loss, rtol=1e-5, atol=2e-5)


@settings(deadline=None, max_examples=25)
@given(NATS, NATS, REWARDS, LENGTHS, st.sampled_from([1e30, -1e30, 3e4, -3e4, 0.0]))
def test_wild_padding_changes_neither_loss_nor_gradient(
    logprobs, behavior_logprobs, rewards, lengths, wild
):
    inputs = flat_inputs(logprobs, behavior_logprobs, rewards, lengths)
    mask = inputs[3]
    function = jax.value_and_grad(objective)
    loss, gradient = function(*inputs)
    tame = inputs[:2]
    strange = [np.where(mask, value, np.float32(wild)) for value in tame]
    for seen in (
        (strange[0], tame[1]),
        (tame[0], strange[1]),
        (strange[0], np.where(mask, tame[1], -strange[1])),
    ):
        loss_, gradient_ = function(*seen, *inputs[2:])
        assert loss_ == loss
        np.testing.assert_array_equal(gradient_, gradient)
        np.testing.assert_array_equal(np.asarray(gradient_)[~mask], 0.0)


def test_a_batch_of_equal_rewards_has_no_loss_and_no_gradient():
    values = np.full((N, G, T), -1.0, np.float32)
    inputs = flat_inputs(
        values, values - 1, np.ones((N, G), np.float32), np.full((N, G), T)
    )
    loss, gradient = jax.value_and_grad(objective)(*inputs)
    assert loss == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
