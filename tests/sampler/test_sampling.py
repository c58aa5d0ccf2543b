"""The distribution that tokens are drawn from, by hand and by counting draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.sampler.sampling import (
    draw_token,
    interruption_lengths,
    sample_keys,
    token_logprobs,
)

FOUR = np.log([0.45, 0.3, 0.2, 0.05]).astype(np.float32)
# Quarters: what differs still differs once divided by a temperature.
LOGITS = hnp.arrays(
    np.float32, (6,), elements=st.integers(-36, 36).map(lambda quarters: quarters / 4)
)


@pytest.mark.parametrize(
    "options, expected",
    [
        pytest.param({}, [0.45, 0.3, 0.2, 0.05], id="plain"),
        pytest.param({"temperature": 0.5}, "squares", id="temperature 1/2 squares"),
        pytest.param({"top_k": 1}, [1, 0, 0, 0], id="top_k 1 is greedy"),
        pytest.param({"top_k": 2}, [0.6, 0.4, 0, 0], id="top_k 2"),
        pytest.param({"top_k": 99}, [0.45, 0.3, 0.2, 0.05], id="top_k above V"),
        pytest.param({"top_k": 0}, [0.45, 0.3, 0.2, 0.05], id="top_k 0 is off"),
        pytest.param({"top_p": 0.01}, [1, 0, 0, 0], id="the likeliest is kept"),
        pytest.param({"top_p": 0.5}, [0.6, 0.4, 0, 0], id="top_p 0.5 needs two"),
        pytest.param({"top_p": 0.9}, "three", id="top_p 0.9 needs three"),
        # Among the two likeliest, 0.6 of the probability is the first alone.
        pytest.param({"top_k": 2, "top_p": 0.59}, [1, 0, 0, 0], id="top_k, then top_p"),
    ],
)
def test_probabilities_by_hand(options, expected):
    squares = np.array([0.45, 0.3, 0.2, 0.05]) ** 2
    expected = {
        "squares": squares / squares.sum(),
        "three": np.array([0.45, 0.3, 0.2, 0.0]) / 0.95,
    }.get(str(expected), expected)
    found = token_logprobs(FOUR, **({"temperature": 1.0} | options))
    np.testing.assert_allclose(jnp.exp(found), expected, rtol=1e-5)


def test_temperature_comes_before_top_p():
    # Squared and normalised: 0.62, 0.28, 0.12, ...: now one token holds 0.6.
    found = token_logprobs(FOUR, temperature=0.5, top_p=0.6)
    assert jnp.exp(found).tolist() == [1.0, 0.0, 0.0, 0.0]


@settings(deadline=None, max_examples=50)
@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 7),
    st.sampled_from([0.1, 0.5, 0.95, 1.0]),
)
def test_what_is_left_is_normalised_and_holds_the_likeliest(
    logits, temperature, top_k, top_p
):
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    found = np.asarray(token_logprobs(logits, **options), np.float64)
    probs = np.exp(found)
    np.testing.assert_allclose(probs.sum(), 1.0, rtol=1e-5)
    assert probs[np.argmax(logits)] == probs.max() > 0
    kept = probs > 0
    # What is kept keeps its proportions: the rest of softmax(logits / temperature).
    scaled = logits[kept].astype(np.float64) / temperature
    differences = found[kept] - found[kept][0]
    np.testing.assert_allclose(differences, scaled - scaled[0], rtol=1e-4, atol=1e-4)
    if kept.any() and not kept.all():
        assert logits[kept].min() > logits[~kept].max()
    if top_k and len(set(logits.tolist())) == 6:
        assert kept.sum() <= top_k


@functools.partial(jax.jit, static_argnames=("along", "draws"))
def draw_many(logprobs, key, *, along, draws):
    indices = jnp.arange(draws)
    if along == "positions":  # one completion, place after place
        return jax.vmap(lambda index: draw_token(logprobs, key, index))(indices)
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
    return jax.vmap(lambda each: draw_token(logprobs, each, jnp.int32(3)))(keys)


@pytest.mark.parametrize("along", ["positions", "samples"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.7},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.8},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_logprobs_say(options, along):
    logits = np.random.default_rng(1).normal(size=8).astype(np.float32)
    logprobs = token_logprobs(logits, **({"temperature": 1.0} | options))
    draws = 20_000
    key = sample_keys(5, "train", prompt_id=7, epoch=1, num_samples=2)[1]
    tokens = draw_many(logprobs, key, along=along, draws=draws)
    counts = np.bincount(np.asarray(tokens), minlength=8)
    probs = np.exp(np.asarray(logprobs, np.float64))
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = draws * probs[possible] / probs[possible].sum()
    # A fixed seed: it passes always or never.  A wrong temperature gives p < 1e-50.
    assert scipy.stats.chisquare(counts[possible], expected).pvalue > 1e-3


def bits(keys):
    return [tuple(each) for each in np.asarray(jax.random.key_data(keys)).tolist()]


def test_every_sample_of_a_run_has_a_key_of_its_own():
    seen = []
    for seed in (0, 1):
        for purpose in ("train", "eval"):
            for prompt_id in (0, 1, 2, 2**31):
                for epoch in (0, 1):
                    seen += bits(
                        sample_keys(
                            seed,
                            purpose,
                            prompt_id=prompt_id,
                            epoch=epoch,
                            num_samples=3,
                        )
                    )
    assert len(set(seen)) == 2 * 2 * 4 * 2 * 3


def test_a_key_does_not_depend_on_how_many_samples_there_are():
    name = dict(prompt_id=4, epoch=2)
    few = sample_keys(1, "train", num_samples=2, **name)
    many = sample_keys(1, "train", num_samples=16, **name)
    assert bits(few) == bits(many)[:2]


def test_interruptions_are_even_on_the_whole_interval():
    keys = sample_keys(0, "train", prompt_id=0, epoch=0, num_samples=6000)
    lengths = np.asarray(interruption_lengths(keys, min_tokens=10, max_tokens=15))
    counts = np.bincount(lengths)
    assert counts[:10].sum() == 0 and len(counts) == 16
    assert scipy.stats.chisquare(counts[10:]).pvalue > 1e-3


def test_an_interval_of_one_length_is_that_length():
    keys = sample_keys(0, "train", prompt_id=0, epoch=0, num_samples=5)
    found = interruption_lengths(keys, min_tokens=7, max_tokens=7)
    assert found.tolist() == [7] * 5


def test_the_interruption_says_nothing_of_the_tokens():
    keys = sample_keys(0, "train", prompt_id=0, epoch=0, num_samples=4000)
    late = np.asarray(interruption_lengths(keys, min_tokens=0, max_tokens=1))
    logprobs = token_logprobs(np.zeros(2, np.float32), temperature=1.0)
    first = np.asarray(jax.vmap(lambda key: draw_token(logprobs, key, 0))(keys))
    table = [[np.sum((late == a) & (first == b)) for b in (0, 1)] for a in (0, 1)]
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-3
