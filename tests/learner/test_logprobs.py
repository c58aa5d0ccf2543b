"""The tiled head against torch in float64, which sees all logits at once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mesh import mesh_of

from scalerl_jax.learner import head as head_lib
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.logprobs import pointwise_loss, token_logprobs
from scalerl_jax.model import transformer
from scalerl_jax.model.products import by_terms

torch = pytest.importorskip("torch")

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 6, 8, 24
TEMPERATURE = 0.7
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
WEIGHTS = RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
TARGETS = RNG.integers(0, VOCABULARY, (ROWS, LENGTH))
# What a loss may ask of a token: any mix of its log-probability and entropy.
OF_LOGPROB, OF_ENTROPY = RNG.normal(size=(2, ROWS, LENGTH))
# data, fsdp, context, tensor
MESHES = [
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (1, 1, 1, 8),
    (2, 2, 1, 2),
    (1, 2, 2, 2),
    (2, 1, 2, 2),
    (1, 4, 2, 1),
    (1, 8, 1, 1, 4),
]


def head_of(**options):
    return Head(**({"temperature": TEMPERATURE} | options))


@functools.cache
def compiled(head):
    """Values of all tokens, and the gradient of a mix of them."""

    def loss(hidden, weights, of_logprob, of_entropy):
        logprobs, entropy = token_logprobs(hidden, weights, jnp.asarray(TARGETS), head)
        mix = (of_logprob * logprobs + of_entropy * entropy).sum()
        return mix, (logprobs, entropy)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@functools.cache
def compiled_with_loss(head):
    """The same from the loss that is computed with the logits."""

    def loss(hidden, weights, *mix):
        total, *found = pointwise_loss(
            hidden, weights, jnp.asarray(TARGETS), mix, mixed, head
        )
        return total, tuple(found)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def mixed(logprobs, entropy, mix):
    return mix[0] * logprobs + mix[1] * entropy


def in_torch(hidden, weights, of_logprob=OF_LOGPROB, of_entropy=OF_ENTROPY, cap=0.0):
    """The same in float64 and without tiles."""
    hidden, weights = (
        torch.tensor(np.asarray(each, np.float64), requires_grad=True)
        for each in (hidden, weights)
    )
    logits = torch.einsum("rsd,vd->rsv", hidden, weights)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    logits = logits / TEMPERATURE
    distribution = torch.distributions.Categorical(logits=logits)
    logprobs = distribution.log_prob(torch.tensor(TARGETS))
    entropy = distribution.entropy()
    mix = torch.tensor(of_logprob) * logprobs + torch.tensor(of_entropy) * entropy
    mix.sum().backward()
    gradients = (hidden.grad.numpy(), weights.grad.numpy())
    return gradients, (logprobs.detach().numpy(), entropy.detach().numpy())


def assert_as_torch(
    head, of_logprob=OF_LOGPROB, of_entropy=OF_ENTROPY, *, compiled=compiled, times=1
):
    found = compiled(head)(HIDDEN, WEIGHTS, of_logprob, of_entropy)
    expected = in_torch(HIDDEN, WEIGHTS, of_logprob, of_entropy, head.cap)
    # Logits of 15 are rounded by 1e-6 and what sums over them by a few times that;
    # gradients of size 1 to 10 are sums of such terms.
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-5)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=times * 1e-5, atol=times * 2e-5)


@settings(deadline=None, max_examples=12)
@given(
    chunk_tokens=st.sampled_from([1, 5, 6, 16, 48, 10_000]),
    chunk_vocab=st.sampled_from([1, 5, 8, 24, 10_000]),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_tile_gives_values_and_gradients_of_torch(
    chunk_tokens, chunk_vocab, seed, share
):
    mix = np.random.default_rng(seed).normal(size=(2, ROWS, LENGTH))
    head = head_of(chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    assert_as_torch(head, (1 - share) * mix[0], share * mix[1])


@pytest.mark.parametrize("tile", [(3, 2), (10_000, 10_000)], ids=str)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_any_mesh_gives_values_and_gradients_of_torch(shape, tile):
    chunk_tokens, chunk_vocab = tile
    assert_as_torch(
        head_of(mesh=mesh_of(shape), chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    )


@pytest.mark.parametrize("chunk_tokens", [5, 10_000])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), *MESHES[3:6]], ids=str)
def test_a_loss_of_single_tokens_gives_the_same_with_its_logits(shape, chunk_tokens):
    head = head_of(mesh=mesh_of(shape), chunk_tokens=chunk_tokens)
    assert_as_torch(head, compiled=compiled_with_loss)


@pytest.mark.parametrize("compiled", [compiled, compiled_with_loss])
def test_a_soft_cap_gives_values_and_gradients_of_torch(compiled):
    head = head_of(chunk_tokens=6, cap=4.0)  # logits reach 10
    assert_as_torch(head, compiled=compiled)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 2, 2)])
@pytest.mark.parametrize("compiled", [compiled, compiled_with_loss])
def test_products_by_terms_as_on_gpus_give_values_and_gradients_of_torch(
    shape, compiled, monkeypatch
):
    for module in (head_lib, transformer):
        monkeypatch.setattr(module, "float32_einsum", by_terms)
    head = head_of(mesh=mesh_of(shape))
    # Not cached: another test's program has other products.  Gradients are of operands
    # with 16 bits: 2^-17 of each term, of up to 10.
    assert_as_torch(head, compiled=compiled.__wrapped__, times=8)


def test_a_loss_of_single_tokens_is_summed_and_scaled_as_any():
    mix, targets = (OF_LOGPROB, OF_ENTROPY), jnp.asarray(TARGETS)

    def scaled(hidden, weights):
        return 3.0 * pointwise_loss(hidden, weights, targets, mix, mixed, head_of())[0]

    arrays = jnp.asarray(HIDDEN), jnp.asarray(WEIGHTS)
    value, gradients = jax.value_and_grad(scaled, argnums=(0, 1))(*arrays)
    assert scaled(*arrays) == pytest.approx(float(value), rel=1e-6)
    expected, (logprobs, entropy) = in_torch(HIDDEN, WEIGHTS)
    total = (OF_LOGPROB * logprobs + OF_ENTROPY * entropy).sum()
    assert float(value) == pytest.approx(3.0 * total, rel=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, 3.0 * theirs, rtol=1e-5, atol=6e-5)


def test_two_tokens_by_hand():
    # Logits (0, log 3) at temperature 1: probabilities 1/4 and 3/4.
    logprobs, entropy = token_logprobs(
        jnp.ones((1, 2, 1)),
        jnp.array([[0.0], [np.log(3.0)]]),
        jnp.array([[0, 1]]),
        Head(chunk_tokens=1, chunk_vocab=1),
    )
    np.testing.assert_allclose(logprobs, [[np.log(0.25), np.log(0.75)]], rtol=1e-6)
    by_hand = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(entropy, [[by_hand, by_hand]], rtol=1e-6)


@pytest.mark.parametrize("chunk_vocab", [1, 2])
def test_what_all_logits_have_in_common_rounds_nothing(chunk_vocab):
    # Logits 1032 and 1024: float32 has steps of 1.2e-4 there.
    head = Head(chunk_tokens=1, chunk_vocab=chunk_vocab)
    made = (jnp.ones((1, 2, 1)), jnp.array([[1032.0], [1024.0]]), jnp.array([[0, 1]]))
    mix = (jnp.ones((1, 2)), jnp.zeros((1, 2)))
    logprobs, entropy = token_logprobs(*made, head)
    _, *with_loss = pointwise_loss(*made, mix, mixed, head)
    rare = np.exp(-8.0)
    expected = -np.log1p(rare), -8.0 - np.log1p(rare)
    for found in (logprobs, with_loss[0]):
        np.testing.assert_allclose(found, [expected], atol=1e-6)
    by_hand = 8.0 * rare / (1.0 + rare) + np.log1p(rare)
    for found in (entropy, with_loss[1]):
        np.testing.assert_allclose(found, [[by_hand, by_hand]], atol=1e-6)


def test_the_float32_head_keeps_what_bfloat16_would_round():
    # Activations come in bfloat16, and the head's own weights are float32.
    hidden = jnp.asarray(4.0 * HIDDEN, jnp.bfloat16)
    _, (expected, _) = in_torch(hidden, WEIGHTS)
    tile = dict(chunk_tokens=6, chunk_vocab=8)
    mix = (OF_LOGPROB, OF_ENTROPY)
    _, (exact, _) = compiled(head_of(**tile))(hidden, WEIGHTS, *mix)
    rounding = head_of(**tile, float32_head=False)
    _, (rounded, _) = compiled(rounding)(hidden, WEIGHTS, *mix)
    np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=2e-5)
    # bfloat16 has 8 bits: logits of about 30 are off by up to 0.06.
    assert np.abs(rounded - expected).max() > 0.01


@pytest.mark.parametrize("compiled", [compiled, compiled_with_loss], ids=["", "loss"])
@pytest.mark.parametrize("shape", [None, (2, 2, 1, 2)], ids=str)
def test_rounded_weights_are_the_only_ones_that_bfloat16_rounds(shape, compiled):
    """The head of a sampler in bfloat16: float32 products of what was rounded."""
    hidden, seen = (jnp.asarray(each, jnp.bfloat16) for each in (HIDDEN, WEIGHTS))
    head = head_of(
        mesh=shape and mesh_of(shape), chunk_tokens=6, weights_dtype=jnp.bfloat16
    )
    gradients, values = compiled(head)(hidden, WEIGHTS, OF_LOGPROB, OF_ENTROPY)
    expected_gradients, expected_values = in_torch(hidden, seen)
    for ours, theirs in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-5)
    of_hidden, of_weights = gradients
    assert of_weights.dtype == jnp.float32
    np.testing.assert_allclose(of_weights, expected_gradients[1], rtol=1e-5, atol=2e-5)
    # It is of the dtype of the hidden states.
    np.testing.assert_allclose(
        of_hidden.astype(jnp.float32), expected_gradients[0], rtol=2**-8, atol=1e-4
    )


@pytest.mark.parametrize("shape", [None, (2, 2, 1, 2)], ids=str)
def test_a_bfloat16_head_is_torch_to_bfloat16_rounding(shape):
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    head = head_of(
        mesh=shape and mesh_of(shape),
        chunk_tokens=6,
        chunk_vocab=6,
        float32_head=False,
    )
    gradients, values = compiled(head)(hidden, WEIGHTS, OF_LOGPROB, OF_ENTROPY)
    # The weights are float32, of which the product sees 8 bits.
    seen = jnp.asarray(WEIGHTS, jnp.bfloat16)
    expected_gradients, expected_values = in_torch(hidden, seen)
    # Logits reach 10 and are rounded by up to 2^-8 of that, each.
    for ours, theirs in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.1)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        ours = np.asarray(ours, np.float64)
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 0.03
    of_hidden, of_weights = gradients
    assert of_hidden.dtype == jnp.bfloat16
    # A sum over tokens for a float32 weight has more than bfloat16's bits.
    assert of_weights.dtype == jnp.float32
    assert np.any(of_weights != of_weights.astype(jnp.bfloat16).astype(jnp.float32))


def test_logits_of_ten_thousand_make_no_nan():
    hidden = jnp.asarray(1e4 * HIDDEN)
    gradients, values = compiled(head_of(chunk_tokens=6, chunk_vocab=8))(
        hidden, WEIGHTS, OF_LOGPROB, OF_ENTROPY
    )
    assert all(np.isfinite(leaf).all() for leaf in (*gradients, *values))


TOKENS, WIDE, SMALL, LARGE = 16_384, 256, 4_096, 151_936  # LARGE: of Qwen3


@functools.cache
def compiled_for(vocabulary, shape):
    """Value and gradient of 16k tokens, compiled and never run."""
    mesh = mesh_of(shape)
    head = Head(mesh=mesh, chunk_tokens=1024, chunk_vocab=2048)

    def loss(hidden, weights, targets):
        logprobs, entropy = token_logprobs(hidden, weights, targets, head)
        return (logprobs + entropy).sum()

    def abstract(shape, dtype, *axes):
        sharding = jax.NamedSharding(mesh, jax.P(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = ("data", "fsdp")
    arguments = (
        abstract((8, TOKENS // 8, WIDE), jnp.float32, rows, "context", None),
        abstract((vocabulary, WIDE), jnp.float32, "tensor", "fsdp"),
        abstract((8, TOKENS // 8), jnp.int32, rows, "context"),
    )
    step = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1)),
        out_shardings=(None, (arguments[0].sharding, arguments[1].sharding)),
    )
    return step.lower(*arguments).compile()


def largest_array(program):
    """Elements of the largest array that a device ever holds."""
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", program.as_text())
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 8, 1, 1)], ids=str)
def test_peak_memory_does_not_grow_with_the_vocabulary(shape):
    """Temporary bytes of a device: without arguments and results, at their peak.

    The head and its gradient are argument and result.  In between the program may hold
    the head's part of a device once more, in float32.
    """
    small, large = (
        compiled_for(vocabulary, shape).memory_analysis().temp_size_in_bytes
        for vocabulary in (SMALL, LARGE)
    )
    head = 4 * LARGE * WIDE // int(np.prod(shape))
    assert large <= 1.1 * small + head
    # All logits would be 10 GB, and those of a device an eighth of it.
    assert large < 4 * TOKENS * LARGE / np.prod(shape) / 20


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 8, 1, 1)], ids=str)
def test_the_logits_of_all_tokens_never_exist(shape):
    # Nothing is larger than the part of the head that a device keeps anyway: neither
    # logits [16k, 152k] nor, over a mesh, all columns of the head.
    devices = int(np.prod(shape))
    assert largest_array(compiled_for(LARGE, shape)) <= LARGE * WIDE // devices
