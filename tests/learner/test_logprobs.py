"""The chunked float32 head against torch in float64, which sees all logits at once."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.learner.logprobs import token_logprobs

torch = pytest.importorskip("torch")

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 12, 8, 11
TEMPERATURE = 0.7
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
TARGETS = RNG.integers(0, VOCABULARY, (ROWS, LENGTH))
# What a loss may ask of a token: any mix of its log-probability and entropy.
OF_LOGPROB, OF_ENTROPY = RNG.normal(size=(2, ROWS, LENGTH))
# From one token per row to more than there are; 10 // 2 = 5 does not divide 12.
CHUNKS = [1, 2, 6, 10, 12, 24, 10_000]


@functools.partial(jax.jit, static_argnames="options")
def compute(hidden, head, options):
    return token_logprobs(hidden, head, TARGETS, **dict(options))


def chunked(hidden, head, *, chunk_tokens, temperature=TEMPERATURE, float32_head=True):
    options = {
        "temperature": temperature,
        "float32_head": float32_head,
        "chunk_tokens": chunk_tokens,
    }
    return compute(hidden, head, tuple(options.items()))


def in_torch(hidden, head, temperature=TEMPERATURE):
    """Log-probabilities and entropies, in float64 and without chunks."""
    logits = torch.einsum("rsd,vd->rsv", hidden, head) / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(torch.tensor(TARGETS)), distribution.entropy()


def doubles(*arrays):
    return [
        torch.tensor(np.asarray(array, np.float64), requires_grad=True)
        for array in arrays
    ]


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_any_chunk_gives_the_values_of_torch(chunk_tokens):
    found = chunked(HIDDEN, HEAD, chunk_tokens=chunk_tokens)
    for ours, theirs in zip(found, in_torch(*doubles(HIDDEN, HEAD)), strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 10_000])
def test_any_chunk_gives_the_gradients_of_torch(chunk_tokens):
    def loss(hidden, head):
        logprobs, entropy = chunked(hidden, head, chunk_tokens=chunk_tokens)
        return (OF_LOGPROB * logprobs + OF_ENTROPY * entropy).sum()

    found = jax.grad(loss, argnums=(0, 1))(HIDDEN, HEAD)
    variables = doubles(HIDDEN, HEAD)
    logprobs, entropy = in_torch(*variables)
    total = torch.tensor(OF_LOGPROB) * logprobs + torch.tensor(OF_ENTROPY) * entropy
    total.sum().backward()
    # Gradients are of size 1 to 10; log z - sum(p * logits) cancels logits of 15.
    for ours, variable in zip(found, variables, strict=True):
        np.testing.assert_allclose(ours, variable.grad, rtol=1e-5, atol=5e-5)


def test_two_tokens_by_hand():
    # Logits (0, log 3) at temperature 1: probabilities 1/4 and 3/4.
    logprobs, entropy = token_logprobs(
        jnp.ones((1, 2, 1)),
        jnp.array([[0.0], [np.log(3.0)]]),
        jnp.array([[0, 1]]),
        temperature=1.0,
        float32_head=True,
        chunk_tokens=1,
    )
    np.testing.assert_allclose(logprobs, [[np.log(0.25), np.log(0.75)]], rtol=1e-6)
    by_hand = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(entropy, [[by_hand, by_hand]], rtol=1e-6)


def test_the_float32_head_keeps_what_bfloat16_would_round():
    hidden = jnp.asarray(4.0 * HIDDEN, jnp.bfloat16)
    head = jnp.asarray(HEAD, jnp.bfloat16)
    expected, _ = in_torch(*doubles(hidden.astype(float), head.astype(float)))
    exact, _ = chunked(hidden, head, chunk_tokens=6)
    rounded, _ = chunked(hidden, head, chunk_tokens=6, float32_head=False)
    np.testing.assert_allclose(exact, expected.detach(), rtol=1e-5, atol=1e-5)
    # bfloat16 has 8 bits: logits of about 30 are off by up to 0.06.
    assert np.abs(rounded - expected.detach().numpy()).max() > 0.01


def test_logits_of_ten_thousand_make_no_nan():
    def loss(hidden):
        logprobs, entropy = chunked(hidden, HEAD, chunk_tokens=6)
        return (logprobs + entropy).sum()

    assert np.isfinite(jax.grad(loss)(jnp.asarray(1e4 * HIDDEN))).all()


def array_sizes(jaxpr):
    """Elements of every array that a program makes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from array_sizes(inner)


def test_the_logits_of_all_tokens_never_exist():
    vocabulary = 5000
    head = jnp.zeros((vocabulary, WIDTH))

    def largest(chunk_tokens):
        def loss(hidden):
            logprobs, entropy = token_logprobs(
                hidden,
                head,
                TARGETS,
                temperature=1.0,
                float32_head=True,
                chunk_tokens=chunk_tokens,
            )
            return (logprobs + entropy).sum()

        return max(array_sizes(jax.make_jaxpr(jax.grad(loss))(HIDDEN).jaxpr))

    assert largest(10_000) == ROWS * LENGTH * vocabulary
    assert largest(6) == 6 * vocabulary
