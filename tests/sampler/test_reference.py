"""The slow sampler, and the engine, on a policy whose completions are known.

The counting policy says u + 1 after u (12 is followed by 0).  EOS is 11, the forced
phrase is (1, 9), token u spells letter u, thinking ends with "gh", which is (6, 7), and
the limit is 6 tokens.
"""

import dataclasses

import numpy as np
import pytest
from small_detokenizer import marker_of

from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.reference import next_token_logits, sample_completion
from scalerl_jax.sampler.requests import Request, Samples
from scalerl_jax.sampler.sampling import Sampling, sample_keys


@pytest.fixture(scope="module")
def counting_bench(make_bench):
    return make_bench(
        slots=2,
        max_completion_tokens=6,
        eos_ids=(11,),
        phrase=(1, 9),
        end_of_thinking=marker_of("gh", "abcdefghijklm"),
    )


@pytest.fixture(scope="module")
def merged_bench(make_bench):
    """Merges join "</think>" with what stands beside it: 5 6 7 spell "x</think>\\n"."""
    pieces = [*"abcde", "x</", "thi", "nk>\n", *"ijkl", "o</thi"]
    return make_bench(
        slots=2,
        max_completion_tokens=6,
        eos_ids=(11,),
        phrase=(1, 9),
        end_of_thinking=marker_of("</think>", pieces),
    )


@pytest.fixture(scope="module")
def eos_phrase_bench(make_bench):
    return make_bench(
        slots=2,
        max_completion_tokens=6,
        eos_ids=(11,),
        phrase=(11, 9),
        end_of_thinking=None,
    )


def one_sample(limit):
    return Samples(
        keys=sample_keys(0, "train", prompt_id=0, epoch=0, num_samples=1),
        thinking_limits=np.array([limit], np.int32),
    )


def one_request(prompt, limit):
    return Request(
        request_id=0, tokens=np.array(prompt, np.int32), samples=one_sample(limit)
    )


def complete(bench, params, sampler, prompt, limit):
    request = one_request(prompt, limit)
    if sampler == "engine":
        return bench.complete(params, request)[0, 0]
    return sample_completion(params, bench.settings, request, 0)


# Forced tokens are written as negative numbers: -9 is a forced 9.
@pytest.mark.parametrize("sampler", ["reference", "engine"])
@pytest.mark.parametrize(
    "prompt, limit, expected, cut_off",
    [
        pytest.param([8], NEVER, [9, 10, 11], False, id="counts to EOS"),
        pytest.param([5, 8], NEVER, [9, 10, 11], False, id="a longer prompt"),
        pytest.param([10], NEVER, [11], False, id="EOS is the first token"),
        pytest.param([11], NEVER, [12, 0, 1, 2, 3, 4], True, id="EOS in the prompt"),
        pytest.param([5], NEVER, [6, 7, 8, 9, 10, 11], False, id="EOS is the last"),
        pytest.param([2], 2, [3, 4, -1, -9, 10, 11], False, id="interrupted at 2"),
        pytest.param([2], 0, [-1, -9, 10, 11], False, id="interrupted at once"),
        pytest.param([4], 3, [5, 6, 7, 8, 9, 10], True, id="thinking has just ended"),
        pytest.param([4], 2, [5, 6, -1, -9, 10, 11], False, id="half of its end"),
        pytest.param([6], 1, [7, -1, -9, 10, 11], False, id="half in the prompt"),
        pytest.param([12], 5, [0, 1, 2, 3, 4, -1], True, id="the phrase is cut off"),
        pytest.param([12], 4, [0, 1, 2, 3, -1, -9], True, id="the phrase comes last"),
        pytest.param([9], 2, [10, 11], False, id="EOS just before the interruption"),
    ],
)
def test_completions_by_hand(
    counting_bench, counting_params, sampler, prompt, limit, expected, cut_off
):
    found = complete(counting_bench, counting_params, sampler, prompt, limit)
    assert found.tokens.tolist() == [abs(token) for token in expected]
    assert found.mask.tolist() == [token >= 0 for token in expected]
    assert found.cut_off == cut_off
    assert found.interrupted == any(token < 0 for token in expected)
    # Probability 1 where drawn; a forced token carries no log-probability at all,
    # although the policy finds it all but impossible (-40 nats).
    np.testing.assert_allclose(found.logprobs, 0.0, atol=1e-6)
    np.testing.assert_allclose(found.full_logprobs, 0.0, atol=1e-6)
    assert (found.logprobs[~found.mask] == 0.0).all()
    assert (found.full_logprobs[~found.mask] == 0.0).all()
    assert len(found.logprobs) == len(expected)  # that of EOS with them


@pytest.mark.parametrize("sampler", ["reference", "engine"])
@pytest.mark.parametrize(
    "prompt, limit, expected",
    [
        pytest.param([4], 3, [5, 6, 7, 8, 9, 10], id="the thinking has ended"),
        pytest.param([4], 5, [5, 6, 7, 8, 9, 10], id="it ended before"),
        pytest.param([4], 2, [5, 6, 1, 9, 10, 11], id="half of its end"),
        pytest.param([5], 2, [6, 7, 1, 9, 10, 11], id="it began in the prompt"),
        pytest.param([12], 4, [0, 1, 2, 3, 1, 9], id="another text"),
    ],
)
def test_a_thinking_that_ends_in_merged_tokens_is_not_interrupted(
    merged_bench, counting_params, sampler, prompt, limit, expected
):
    found = complete(merged_bench, counting_params, sampler, prompt, limit)
    assert found.tokens.tolist() == expected
    assert found.interrupted == (1 in expected[limit : limit + 1])


@pytest.mark.parametrize("sampler", ["reference", "engine"])
def test_a_forced_eos_ends_nothing(eos_phrase_bench, counting_params, sampler):
    found = complete(eos_phrase_bench, counting_params, sampler, [2], 1)
    assert found.tokens.tolist() == [3, 11, 9, 10, 11]
    assert found.mask.tolist() == [True, False, False, True, True]
    assert not found.cut_off
    # The limit is reached by a forced EOS: cut off all the same.
    found = complete(eos_phrase_bench, counting_params, sampler, [12], 5)
    assert found.tokens.tolist() == [0, 1, 2, 3, 4, 11]
    assert found.cut_off


@pytest.mark.parametrize(
    "before, after, expected",
    [
        # Six tokens, cut off: the last is 6, half of the end of thinking.
        pytest.param(([0], NEVER), ([6], 1), [7, 1, 9, 10, 11], id="half an end"),
        # Cut off when 1 was forced and 9 was to come.
        pytest.param(([12], 5), ([7], NEVER), [8, 9, 10, 11], id="half a phrase"),
        # Thinking was over; that of the next is not.
        pytest.param(([5], NEVER), ([2], 0), [1, 9, 10, 11], id="an ended thinking"),
    ],
)
def test_a_slot_forgets_what_was_in_it(
    counting_bench, counting_params, before, after, expected
):
    scheduler = counting_bench.scheduler(one_request(*before))
    counting_bench.finish(scheduler, counting_params)
    scheduler.submit(one_request(*after))  # into the same slot, the lowest
    found = counting_bench.finish(scheduler, counting_params)[0, 0]
    assert found.tokens.tolist() == expected


def test_the_next_token_is_that_of_the_last_one(counting_bench, counting_params):
    for last in (0, 5, 12):
        found = next_token_logits(
            counting_params, counting_bench.settings, [3, 1, last]
        )
        expected = np.zeros(13)
        expected[(last + 1) % 13] = 40.0
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_sampled_from_still_has_its_probability(
    counting_bench, counting_params
):
    request = Request(
        request_id=0,
        tokens=np.array([8], np.int32),
        samples=one_sample(NEVER),
        sampling=Sampling(temperature=20.0, top_k=1),
    )
    found = sample_completion(counting_params, counting_bench.settings, request, 0)
    assert found.tokens.tolist() == [9, 10, 11]
    assert found.logprobs.tolist() == [0.0, 0.0, 0.0]
    # Logits of 2 for the next token and 0 for the twelve others.
    expected = 2.0 - np.log(np.exp(2.0) + 12.0)
    np.testing.assert_allclose(found.full_logprobs, expected, rtol=3e-5)


def test_a_sample_has_its_own_limit(counting_bench, counting_params):
    samples = dataclasses.replace(one_sample(NEVER), max_tokens=np.array([2]))
    request = Request(request_id=0, tokens=np.array([4], np.int32), samples=samples)
    found = sample_completion(counting_params, counting_bench.settings, request, 0)
    assert found.tokens.tolist() == [5, 6] and found.cut_off


def test_the_versions_are_those_that_were_said(counting_bench, counting_params):
    request = one_request([8], NEVER)
    found = sample_completion(
        counting_params, counting_bench.settings, request, 0, version=4
    )
    assert found.versions.tolist() == [4, 4, 4]
