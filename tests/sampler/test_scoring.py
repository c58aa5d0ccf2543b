"""Log-probabilities of given tokens: the learner's, in every family's layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture

from scalerl_jax.learner.head import Head
from scalerl_jax.learner.logprobs import token_logprobs
from scalerl_jax.model.architecture import Experts, LocalLayers, sampler_shardings
from scalerl_jax.model.rope import Rope
from scalerl_jax.model.transformer import (
    abstract_params,
    head_logits,
    head_weights,
    hidden_states,
    unstack_layers,
)
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.scoring import PromptScorer, ToScore

DENSE = small_architecture()
# Sequences of up to 40 tokens; every second layer sees a chunk of 8, or the last 7.
LLAMA4 = small_architecture(
    vocab_size=13,
    family="llama4_text",
    experts=Experts(count=3, top_k=1, gate="sigmoid", gate_input=True, shared=True),
    local=LocalLayers((True, False), 8, True, 0.3, 4),
)
OLMO = small_architecture(
    vocab_size=13, family="olmo3", windows=(7, 0), window_rope=Rope(100.0)
)
GPT_OSS = small_architecture(
    vocab_size=13,
    family="gpt_oss",
    experts=Experts(count=4, top_k=2, gate="normalized", biased=True, clamp=0.3),
    windows=(0, 7),
)
GEMMA_2 = small_architecture(
    vocab_size=13, family="gemma2", windows=(7, 0), attention_cap=0.7, logit_cap=1.5
)
LENGTHS = (1, 2, 17, 36, 40, 31)  # 127 tokens in all


def params_of(arch):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(arch, dtype=jnp.float32),
    )


def scorer(arch, params, devices=1):
    """A scorer of sequences of 70 tokens at most, over so many devices."""
    mesh = make_mesh(jax.devices()[:devices], tensor=devices)
    settings = EngineSettings(
        arch=arch,
        slots=2,
        max_prompt_tokens=40,
        max_completion_tokens=30,
        tokens_per_call=4,
        dtype=jnp.float32,
        eos_ids=(3,),
        top_logprobs=3,
    )
    put = jax.device_put(unstack_layers(params, arch), sampler_shardings(arch, mesh))
    return PromptScorer(settings, put, mesh)


def sequences(temperatures=(1.0,)):
    rng = np.random.default_rng(5)
    return [
        ToScore(
            tokens=rng.integers(0, 12, length).astype(np.int32),
            temperature=temperatures[place % len(temperatures)],
        )
        for place, length in enumerate(LENGTHS)
    ]


def learners(params, arch, each):
    """Log-probabilities of a sequence's tokens by the learner, and of all tokens."""
    row = np.zeros(max(LENGTHS), np.int32)  # what comes later is not seen
    row[: len(each.tokens)] = each.tokens
    found = _learners(params, arch, row, each.temperature)
    return (np.asarray(part)[: len(each.tokens) - 1] for part in found)


@functools.partial(jax.jit, static_argnames=("arch", "temperature"))
def _learners(params, arch, tokens, temperature):
    hidden, _ = hidden_states(
        params,
        arch,
        tokens[None],
        positions=jnp.arange(len(tokens))[None],
        segment_ids=jnp.ones((1, len(tokens)), jnp.int32),
        dtype=jnp.float32,
    )
    weights = head_weights(params)
    head = Head(temperature=temperature, cap=arch.logit_cap)
    logprobs, _ = token_logprobs(hidden[:, :-1], weights, tokens[None, 1:], head)
    options = {"float32_head": True, "cap": arch.logit_cap}
    logits = head_logits(hidden[0, :-1], weights, **options)
    return logprobs[0], jax.nn.log_softmax(logits / temperature)


@pytest.mark.parametrize(
    "arch, devices",
    [
        pytest.param(DENSE, 2, id="over two devices"),
        pytest.param(LLAMA4, 1, id="chunks"),
        pytest.param(OLMO, 1, id="windows"),
        pytest.param(GPT_OSS, 1, id="sinks"),
        pytest.param(GEMMA_2, 1, id="soft caps"),
    ],
)
def test_the_log_probabilities_are_the_learners(arch, devices):
    params, given = params_of(arch), sequences(temperatures=(1.0, 0.5))
    score = scorer(arch, params, devices)
    score.compile(sum(LENGTHS))
    for each, found in zip(given, score(given), strict=True):
        assert found.logprobs.shape == (len(each.tokens) - 1,)
        if len(each.tokens) == 1:
            continue
        expected, all_logprobs = learners(params, arch, each)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
        best = np.sort(all_logprobs, axis=-1)[:, :-4:-1]
        np.testing.assert_allclose(found.top_logprobs, best, atol=1e-4)
        own = np.take_along_axis(all_logprobs, found.top_tokens, axis=-1)
        np.testing.assert_allclose(found.top_logprobs, own, atol=1e-4)


def test_the_likeliest_token_has_the_log_probability_of_the_given_one():
    """To the last bit: who compares the two asks whether it was the likeliest."""
    score = scorer(DENSE, params_of(DENSE))
    score.compile(sum(LENGTHS))
    likeliest = 0
    for each, found in zip(sequences(), score(sequences()), strict=True):
        same = found.top_tokens[:, 0] == each.tokens[1:]
        assert (same == (found.top_logprobs[:, 0] == found.logprobs)).all()
        likeliest += same.sum()
    assert 0 < likeliest < sum(LENGTHS) - len(LENGTHS)


def test_numbers_that_are_not_finite_stay_in_their_sequence():
    params = params_of(DENSE)
    score = scorer(DENSE, params)
    score.compile(sum(LENGTHS))
    expected = score(sequences())
    poisoned = params | {"embedding": params["embedding"].at[12].set(jnp.nan)}
    given = sequences()
    given[2].tokens[5] = 12
    score = scorer(DENSE, poisoned)
    score.compile(sum(LENGTHS))
    found = score(given)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if place == 2:
            assert not np.isfinite(one.logprobs).all()
        else:
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)


def test_a_program_is_compiled_once_for_all_sizes_up_to_its_own():
    score = scorer(DENSE, params_of(DENSE))
    assert score.room == 0 and score.most == 128
    for tokens in (70, 65, 500):
        score.compile(tokens)
        assert score.room == 128
    score.compile(64)
    assert sorted(score._programs) == [64, 128]
