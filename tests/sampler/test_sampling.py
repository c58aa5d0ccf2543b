"""The distribution that tokens are drawn from, by hand and by counting draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.sampler.sampling import (
    Sampling,
    SamplingRows,
    draw_tokens,
    interruption_lengths,
    sample_keys,
    scaled_logits,
)

draw = jax.jit(draw_tokens)


@jax.jit
def all_logprobs(logits, sampling):
    """Log-probabilities in nats of the distribution that is sampled from."""
    return jax.nn.log_softmax(scaled_logits(logits, sampling)[0], axis=-1)


FOUR = np.log([0.45, 0.3, 0.2, 0.05]).astype(np.float32)
# Quarters: what differs still differs once divided by a temperature.
LOGITS = hnp.arrays(
    np.float32, (6,), elements=st.integers(-36, 36).map(lambda quarters: quarters / 4)
)


def logprobs_of(logits, **options):
    """Of one row."""
    rows = SamplingRows.of(Sampling(**options), 1)
    return all_logprobs(jnp.asarray(logits)[None], rows)[0]


@pytest.mark.parametrize(
    "options, expected",
    [
        pytest.param({}, [0.45, 0.3, 0.2, 0.05], id="plain"),
        pytest.param({"temperature": 0.5}, "squares", id="temperature 1/2 squares"),
        pytest.param({"temperature": 0.0}, [1, 0, 0, 0], id="temperature 0 is greedy"),
        pytest.param({"top_k": 1}, [1, 0, 0, 0], id="top_k 1 is greedy"),
        pytest.param({"top_k": 2}, [0.6, 0.4, 0, 0], id="top_k 2"),
        pytest.param({"top_k": 99}, [0.45, 0.3, 0.2, 0.05], id="top_k above V"),
        pytest.param({"top_k": 0}, [0.45, 0.3, 0.2, 0.05], id="top_k 0 is off"),
        pytest.param({"top_p": 0.01}, [1, 0, 0, 0], id="the likeliest is kept"),
        pytest.param({"top_p": 0.5}, [0.6, 0.4, 0, 0], id="top_p 0.5 needs two"),
        pytest.param({"top_p": 0.9}, "three", id="top_p 0.9 needs three"),
        # Among the two likeliest, 0.6 of the probability is the first alone.
        pytest.param({"top_k": 2, "top_p": 0.59}, [1, 0, 0, 0], id="top_k, then top_p"),
        # Bounds of 0.45 / 10, 0.45 / 5 and 0.9 * 0.45 = 0.405.
        pytest.param({"min_p": 0.1}, [0.45, 0.3, 0.2, 0.05], id="min_p keeps 1/9"),
        pytest.param({"min_p": 0.2}, "three", id="min_p 0.2 leaves 1/9 out"),
        pytest.param({"min_p": 0.9}, [1, 0, 0, 0], id="min_p 0.9"),
        pytest.param({"min_p": 1.0}, [1, 0, 0, 0], id="min_p 1 is greedy"),
        # Squares: 0.2 / 0.45 becomes 0.1975.
        pytest.param(
            {"temperature": 0.5, "min_p": 0.25}, "two squares", id="min_p comes later"
        ),
        pytest.param({"min_p": 0.2, "top_k": 2}, [0.6, 0.4, 0, 0], id="both bounds"),
        pytest.param({"min_p": 0.7, "top_k": 2}, [1, 0, 0, 0], id="the stricter bound"),
        pytest.param({"temperature": 0.0, "top_p": 0.9}, [1, 0, 0, 0], id="all greedy"),
    ],
)
def test_probabilities_by_hand(options, expected):
    squares = np.array([0.45, 0.3, 0.2, 0.05]) ** 2
    expected = {
        "squares": squares / squares.sum(),
        "two squares": squares * [1, 1, 0, 0] / squares[:2].sum(),
        "three": np.array([0.45, 0.3, 0.2, 0.0]) / 0.95,
    }.get(str(expected), expected)
    np.testing.assert_allclose(
        jnp.exp(logprobs_of(FOUR, **options)), expected, rtol=1e-5
    )


def test_temperature_comes_before_top_p():
    # Squared and normalised: 0.62, 0.28, 0.12, ...: now one token holds 0.6.
    found = logprobs_of(FOUR, temperature=0.5, top_p=0.6)
    assert jnp.exp(found).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_without_its_filters_a_greedy_row_is_at_temperature_1():
    rows = SamplingRows.of(Sampling(temperature=0.0, top_k=2), 1)
    kept, full = scaled_logits(jnp.asarray(FOUR)[None], rows)
    np.testing.assert_array_equal(full[0], FOUR)
    assert kept[0].tolist() == [FOUR[0].item()] + [-np.inf] * 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature = -0.1; it must be 0 or more"),
        ({"temperature": float("nan")}, "temperature = nan; it must be 0 or more"),
        ({"temperature": float("inf")}, "temperature = inf; it must be 0 or more"),
        ({"top_k": -1}, r"top_k = -1; it must be 0 \(off\) or more"),
        ({"top_p": 0.0}, "top_p = 0.0; "),
        ({"top_p": 1.1}, "top_p = 1.1; it must be above 0"),
        ({"top_p": float("nan")}, "top_p = nan; it must be above 0"),
        ({"min_p": 2.0}, "min_p = 2.0; "),
        ({"min_p": -0.1}, "min_p = -0.1; it must be from 0"),
        ({"min_p": float("nan")}, "min_p = nan; it must be from 0"),
    ],
    ids=str,
)
def test_what_is_no_distribution_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="beams"):
        Sampling(beams=4)


@settings(deadline=None, max_examples=50)
@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 7),
    st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_what_is_left_is_normalised_and_holds_the_likeliest(
    logits, temperature, top_k, top_p, min_p
):
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.asarray(logprobs_of(logits, **options), np.float64)
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
    if min_p:
        assert probs[kept].min() >= min_p * probs.max() * (1 - 1e-4)


def in_float64(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Log-probabilities with and without the filters, a token at a time."""
    logits = np.asarray(logits, np.float64)
    full = logits / (temperature or 1.0)
    full = full - scipy.special.logsumexp(full)
    order = np.argsort(-full, kind="stable")
    kept = list(order[: top_k or None])
    if top_p < 1:
        share, nucleus = 0.0, []
        for token in kept:
            if share < top_p * np.exp(full[kept]).sum():
                nucleus.append(token)
            share += np.exp(full[token])
        kept = nucleus
    kept = [token for token in kept if np.exp(full[token] - full.max()) >= min_p]
    if temperature == 0:
        kept = [order[0]]
    logprobs = np.full(len(full), -np.inf)
    logprobs[kept] = full[kept] - scipy.special.logsumexp(full[kept])
    return logprobs, full


DISTRIBUTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
]


DRAWS = 10_000


@functools.cache
def many_keys(purpose="train"):
    return sample_keys(5, purpose, prompt_id=7, epoch=1, num_samples=DRAWS)


def draw_many(logits, options, *, along="samples", place=3):
    """Draws from one row of logits: one completion's places, or many completions."""
    keys, index = many_keys(), np.full(DRAWS, place, np.int32)
    if along == "positions":
        keys = np.broadcast_to(keys[1], keys.shape)
        index = np.arange(DRAWS, dtype=np.int32)
    rows = np.broadcast_to(np.asarray(logits, np.float32), (DRAWS, len(logits)))
    sampling = SamplingRows.of(Sampling(**options), DRAWS)
    return jax.device_get(draw(rows, sampling, keys=keys, index=index))


# One token; a prime: blocks of one; 6 x 6 and 11 x 13.
@pytest.mark.parametrize("vocabulary", [1, 7, 36, 143])
@pytest.mark.parametrize("along", ["positions", "samples"])
@pytest.mark.parametrize("options", DISTRIBUTIONS, ids=str)
def test_tokens_come_as_often_as_their_probabilities_say(options, along, vocabulary):
    logits = np.random.default_rng(1).normal(size=vocabulary).astype(np.float32)
    logits[vocabulary // 2] -= 60.0  # possible, and never seen
    found = draw_many(logits, options, along=along)
    logprobs, full = in_float64(logits, **options)
    np.testing.assert_allclose(found.logprobs, logprobs[found.tokens], atol=1e-5)
    np.testing.assert_allclose(found.full_logprobs, full[found.tokens], atol=1e-5)
    assert not found.failed.any()
    probs = np.exp(logprobs)
    counts = np.bincount(found.tokens, minlength=vocabulary)
    assert counts[probs == 0].sum() == 0
    often = DRAWS * probs >= 5  # the test's condition; the rest in one bin
    if often.sum() < 2:
        assert often.sum() == 1 and counts[often] == DRAWS
        return
    observed, expected = counts[often], DRAWS * probs[often]
    if (rest := DRAWS - expected.sum()) > 1:
        observed = np.append(observed, counts[~often].sum())
        expected = np.append(expected, rest)
    expected *= DRAWS / expected.sum()
    # A fixed seed: it passes always or never.  A wrong temperature gives p < 1e-50.
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


FILTERS = [{}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.9}]


@pytest.mark.parametrize("vocabulary", [7, 36, 143])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_at_temperature_0_the_first_of_equal_tokens_is_drawn(filters, vocabulary):
    # Of three values and both zeros, hence with many of the highest in each row.
    rng = np.random.default_rng(4)
    values = np.array([-3.0, -0.0, 0.0, 1.5], np.float32)
    logits = values[rng.integers(0, 4, size=(300, vocabulary))]
    logits[100:200] = np.where(logits[100:200] > 0, -np.inf, logits[100:200])
    ties = (logits == logits.max(axis=1, keepdims=True)).sum(axis=1)
    assert np.median(ties) > 1
    sampling = SamplingRows.of(Sampling(temperature=0.0, **filters), 300)
    index = np.arange(300, dtype=np.int32)
    for keys in (many_keys()[:300], many_keys()[300:600]):
        found = jax.device_get(draw(logits, sampling, keys=keys, index=index))
        np.testing.assert_array_equal(found.tokens, logits.argmax(axis=1))
        np.testing.assert_array_equal(found.logprobs, np.zeros(300))
        full = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
        np.testing.assert_allclose(found.full_logprobs, full.max(axis=1), atol=1e-5)
        assert not found.failed.any()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_among_equal_tokens_keep_their_log_probabilities(temperature):
    rng = np.random.default_rng(5)
    logits = rng.integers(0, 3, size=(200, 36)).astype(np.float32)
    keys, index = many_keys()[:200], np.arange(200, dtype=np.int32)
    warm = SamplingRows.of(Sampling(temperature=temperature), 200)
    alone = jax.device_get(draw(logits, warm, keys=keys, index=index))
    full = scipy.special.log_softmax(logits.astype(np.float64) / temperature, axis=1)
    own = np.take_along_axis(full, alone.tokens[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(alone.logprobs, own, atol=1e-5)
    assert (alone.tokens != logits.argmax(axis=1)).mean() > 0.5
    # Every second row greedy: the others are the same, bit for bit.
    greedy = np.arange(200) % 2 == 1
    mixed = warm.replace(temperature=np.where(greedy, 0.0, warm.temperature))
    found = jax.device_get(draw(logits, mixed, keys=keys, index=index))
    np.testing.assert_array_equal(found.tokens[~greedy], alone.tokens[~greedy])
    np.testing.assert_array_equal(found.logprobs[~greedy], alone.logprobs[~greedy])
    np.testing.assert_array_equal(found.tokens[greedy], logits[greedy].argmax(axis=1))


def test_what_is_impossible_is_never_drawn():
    logits = np.full(36, -np.inf, np.float32)
    logits[[0, 17, 35]] = [0.0, -1.0, 1.0]
    found = draw_many(logits, {})
    assert sorted(set(found.tokens.tolist())) == [0, 17, 35]
    assert not found.failed.any() and np.isfinite(found.logprobs).all()


def one_of_each():
    """Seven rows of twelve logits, a distribution of `DISTRIBUTIONS` for each."""
    logits = np.random.default_rng(2).normal(size=(7, 12)).astype(np.float32) * 2
    rows = [SamplingRows.of(Sampling(**each), 1) for each in DISTRIBUTIONS]
    sampling = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
    keys = sample_keys(3, "train", prompt_id=1, epoch=0, num_samples=7)
    return logits, sampling, keys, np.arange(7, dtype=np.int32) * 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", range(7))
def test_logits_that_are_not_numbers_fail_their_row_alone(row, bad):
    logits, sampling, keys, index = one_of_each()
    good = draw(logits, sampling, keys=keys, index=index)
    assert not good.failed.any()
    logits[row, slice(None) if bad == -np.inf else 5] = bad
    found = draw(logits, sampling, keys=keys, index=index)
    assert found.failed.tolist() == [each == row for each in range(7)]
    assert 0 <= found.tokens[row] < 12
    others = np.arange(7) != row
    for name in ("tokens", "logprobs", "full_logprobs"):
        np.testing.assert_array_equal(
            getattr(found, name)[others], getattr(good, name)[others]
        )


@pytest.mark.parametrize("row", range(7))
def test_a_row_does_not_depend_on_the_others(row):
    logits, sampling, keys, index = one_of_each()
    whole = draw(logits, sampling, keys=keys, index=index)
    # In another place, among seven like itself.
    alike = jax.tree.map(
        lambda leaf: np.repeat(leaf[row : row + 1], 7, axis=0),
        (logits, sampling, keys, index),
    )
    alone = draw(alike[0], alike[1], keys=alike[2], index=alike[3])
    assert alone.tokens.tolist() == [whole.tokens[row]] * 7
    np.testing.assert_allclose(alone.logprobs, whole.logprobs[row], atol=1e-6)
    np.testing.assert_allclose(alone.full_logprobs, whole.full_logprobs[row], atol=1e-6)


def bits(keys):
    return [tuple(each) for each in np.asarray(keys).tolist()]


def test_every_sample_of_a_run_has_a_key_of_its_own():
    seen = []
    for seed in (0, 1):
        for purpose in ("train", "eval", "serve"):
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
    assert len(set(seen)) == 2 * 3 * 4 * 2 * 3


def test_a_key_does_not_depend_on_how_many_samples_there_are():
    name = dict(prompt_id=4, epoch=2)
    few = sample_keys(1, "train", num_samples=2, **name)
    many = sample_keys(1, "train", num_samples=16, **name)
    assert bits(few) == bits(many)[:2]


def test_interruptions_are_even_on_the_whole_interval():
    lengths = interruption_lengths(many_keys(), min_tokens=10, max_tokens=15)
    counts = np.bincount(lengths)
    assert counts[:10].sum() == 0 and len(counts) == 16
    assert scipy.stats.chisquare(counts[10:]).pvalue > 1e-3


def test_an_interval_of_one_length_is_that_length():
    found = interruption_lengths(many_keys(), min_tokens=7, max_tokens=7)
    assert found.tolist() == [7] * DRAWS


def assert_independent(first, second, count):
    table = np.zeros((first.max() + 1, count))
    np.add.at(table, (first, second), 1)
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-3


def test_the_interruption_says_nothing_of_the_tokens():
    late = interruption_lengths(many_keys(), min_tokens=0, max_tokens=1)
    first = draw_many(np.zeros(36), {}, place=0).tokens
    assert_independent(late, first // 9, 4)


def test_the_places_of_a_completion_are_drawn_independently():
    # A block of six tokens, and the place in it, have a number each.
    first, second = (draw_many(np.zeros(36), {}, place=n).tokens for n in (0, 1))
    for one in (first // 6, first % 6):
        for other in (second // 6, second % 6):
            assert_independent(one, other, 6)
    assert_independent(first // 6, first % 6, 6)


def test_more_tokens_than_there_are_is_all_of_them():
    np.testing.assert_allclose(
        jnp.exp(logprobs_of(FOUR, top_k=2**40)), [0.45, 0.3, 0.2, 0.05], rtol=1e-5
    )
