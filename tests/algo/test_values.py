"""A critic's rewards, advantages and loss, by hand and against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small_tokens import floats

from scalerl_jax.algo.values import clipped_value_loss, final_rewards, gae, whiten

torch = pytest.importorskip("torch")


OLD_AND_RETURN = (jnp.float32(1.0), jnp.float32(2.0))


@pytest.mark.parametrize(
    "value, expected, gradient",
    [
        pytest.param(1.1, 0.405, -0.9, id="within the clip: (2 - 1.1)^2 / 2"),
        pytest.param(1.5, 0.32, 0.0, id="past the clip, towards the return: 1.2"),
        pytest.param(0.5, 1.125, -1.5, id="past the clip, away from the return"),
    ],
)
def test_the_value_loss_by_hand(value, expected, gradient):
    def loss(value):
        return clipped_value_loss(value, *OLD_AND_RETURN, value_clip=0.2)

    found = jax.value_and_grad(loss)(jnp.float32(value))
    np.testing.assert_allclose(found, (expected, gradient), rtol=1e-5, atol=1e-7)


def test_without_a_clip_it_is_the_squared_error():
    def loss(value):
        return clipped_value_loss(value, *OLD_AND_RETURN, value_clip=0.0)

    assert jax.value_and_grad(loss)(jnp.float32(5.0)) == (4.5, 3.0)


@settings(deadline=None, max_examples=40)
@given(floats(6, -4, 4), floats(6, -4, 4), floats(6, -4, 4))
def test_the_value_loss_is_that_of_torch(values, old_values, returns):
    tensor = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old, target = (torch.tensor(x, dtype=torch.float64) for x in (old_values, returns))
    moved = torch.minimum(torch.maximum(tensor, old - 0.5), old + 0.5)
    worst = torch.max((tensor - target).square(), (moved - target).square())
    expected = (worst / 2).sum()
    expected.backward()

    def loss(values):
        others = map(jnp.asarray, (old_values, returns))
        return clipped_value_loss(values, *others, value_clip=0.5).sum()

    found, gradient = jax.value_and_grad(loss)(jnp.asarray(values))
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5, atol=1e-6)
    # On a kink any slope between the two is right.
    kink = np.abs(np.abs(values.astype(float) - old_values) - 0.5) < 1e-6
    tie = (tensor - target).square() - (moved - target).square()
    kink |= (tie.abs() < 1e-5).detach().numpy() & (np.abs(values - old_values) > 0.5)
    np.testing.assert_allclose(
        np.asarray(gradient)[~kink], tensor.grad.numpy()[~kink], rtol=1e-4, atol=1e-5
    )


def test_the_reward_is_given_on_the_last_sampled_token():
    found = final_rewards(
        jnp.array([[3.0, 3.0, 3.0, 0.0, 5.0, 5.0]]),
        jnp.array([[1, 1, 1, 0, 2, 2]]),
        jnp.array([[True, True, False, False, True, True]]),
    )
    assert found.tolist() == [[0.0, 3.0, 0.0, 0.0, 0.0, 5.0]]


def test_whitened_by_hand():
    # Mean 2, variance (1 + 1 + 4 + 4) / 4.
    found = whiten(
        jnp.array([1.0, 3.0, 0.0, 99.0, 4.0]),
        jnp.array([True, True, True, False, True]),
        eps=0.0,
    )
    expected = np.array([-1.0, 1.0, -2.0, 0.0, 2.0]) / np.sqrt(2.5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@example(
    np.full(6, 0.48481753, np.float32), np.arange(6) > 0, 0.0
)  # a mean that rounds
@given(floats(6, -4, 4), hnp.arrays(np.bool_, 6), st.sampled_from([0.0, 1e-6]))
def test_whitened_advantages_are_finite_and_hide_the_mask(advantages, mask, eps):
    found = np.asarray(whiten(jnp.asarray(advantages), jnp.asarray(mask), eps=eps))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[~mask], 0.0)
    np.testing.assert_allclose(found.sum(), 0.0, atol=1e-4)
    # Whatever survives a mask: no spread is so small that it makes one larger.
    assert (np.abs(found) <= np.sqrt(mask.sum()) * 1.001).all()


def test_gae_by_hand():
    # Two sequences in a row; the second token of the first is forced.
    found = gae(
        jnp.array([[0.0, 9.0, 1.0, 9.0, 3.0]]),
        jnp.array([[0.5, 9.0, 0.25, 9.0, 1.0]]),
        jnp.array([[1, 1, 1, 0, 2]]),
        jnp.array([[True, False, True, False, True]]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    # The end: 1 - 0.25 = 0.75.  Before it: 0.5 * 0.25 - 0.5 + 0.25 * 0.75 = -0.1875.
    assert found.tolist() == [[-0.1875, 0.0, 0.75, 0.0, 2.0]]


JITTED_GAE = jax.jit(gae, static_argnames=("gamma", "gae_lambda"))


def slow_gae(rewards, values, ids, mask, *, gamma, gae_lambda):
    """Equation 16: the discounted sum of a token's own and all later deltas."""
    found = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        for name in set(ids[row]):
            places = np.flatnonzero((ids[row] == name) & mask[row])
            r, v = rewards[row, places], np.append(values[row, places], 0.0)
            deltas = r + gamma * v[1:] - v[:-1]
            for start, place in enumerate(places):
                steps = np.arange(len(places) - start)
                share = (gamma * gae_lambda) ** steps
                found[row, place] = (share * deltas[start:]).sum()
    return found


@settings(deadline=None, max_examples=30)
@given(
    hnp.arrays(np.float32, (2, 8), elements=st.floats(-2, 2, width=16)),
    hnp.arrays(np.float32, (2, 8), elements=st.floats(-2, 2, width=16)),
    hnp.arrays(np.bool_, (2, 8)),
    hnp.arrays(np.int32, (2, 3), elements=st.integers(0, 4)),
    st.sampled_from([(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)]),
)
def test_gae_is_equation_16_for_each_packed_sequence(
    rewards, values, mask, lengths, numbers
):
    ids = np.zeros((2, 8), np.int32)
    for row, counts in zip(ids, lengths, strict=True):
        ends = np.cumsum(counts)
        for name, (end, count) in enumerate(zip(ends, counts, strict=True), start=1):
            row[end - count : end] = name
    mask = mask & (ids > 0)
    options = dict(zip(("gamma", "gae_lambda"), numbers, strict=True))
    found = JITTED_GAE(rewards, values, ids, mask, **options)
    expected = slow_gae(rewards.astype(float), values, ids, mask, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_with_gamma_and_lambda_1_the_return_is_the_reward_of_the_completion():
    rewards = jnp.array([[0.0, 0.0, 1.0, 0.0, -1.0]])
    values = jnp.array([[0.3, -0.2, 0.5, 0.1, 0.7]])
    ids, mask = jnp.array([[1, 1, 1, 2, 2]]), jnp.ones((1, 5), bool)
    found = gae(rewards, values, ids, mask, gamma=1.0, gae_lambda=1.0)
    expected = [[1.0, 1.0, 1.0, -1.0, -1.0]]
    np.testing.assert_allclose(found + values, expected, atol=1e-6)
