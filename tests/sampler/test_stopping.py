"""Stop strings on a policy that counts: token u is letter u, and u + 1 follows u.

EOS are 3 (d) and 11 (l); from [4] the policy writes fghijkl, four letters per call.
"""

import numpy as np
import pytest

from scalerl_jax.sampler.requests import Request, Sample, Samples
from scalerl_jax.sampler.stopping import end_of_stop


def letters(tokens):
    return "".join("abcdefghijklm"[token] for token in tokens)


# Token u is byte u of these characters, of 3, 2, 4 and 1 bytes; the rest are spaces.
BYTES = "€é😀x".encode().ljust(13)


def characters(tokens):
    return bytes(BYTES[token] for token in tokens).decode(errors="replace")


def one(bench, prompt, **options):
    return bench.request(0, prompt, num_samples=1, limits=None, **options)


def completed(bench, params, prompt, *, decode=letters, **options):
    scheduler = bench.scheduler(one(bench, prompt, **options), decode=decode)
    found = bench.finish(scheduler, params)[0, 0]
    assert scheduler.step(params, version=0) == []  # reads the call ahead
    bench.assert_idle(scheduler)
    return found, scheduler.stats.wasted_tokens


@pytest.mark.parametrize(
    "stop, expected, wasted",
    [
        # The call ahead has made jkl, which nobody will read.
        pytest.param(["g"], "fg", 2 + 3, id="one token, in the first call"),
        pytest.param(["i"], "fghi", 0 + 3, id="the last token of a call"),
        pytest.param(["ij"], "fghij", 2, id="over the border of two calls"),
        pytest.param(["ghijk"], "fghijk", 1, id="over five tokens"),
        pytest.param(["gi", "hj"], "fghijkl", 0, id="never"),
        pytest.param(["kl", "jk", "gj"], "fghijk", 1, id="the first to be complete"),
        pytest.param(["k", "h"], "fgh", 1 + 3, id="the first in the text"),
        pytest.param(["l"], "fghijkl", 0, id="EOS itself"),
        pytest.param(["e"], "fghijkl", 0, id="only in the prompt"),
        pytest.param(["ef"], "fghijkl", 0, id="half in the prompt"),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_stop(
    bench, counting_params, stop, expected, wasted
):
    found, lost = completed(bench, counting_params, [4], stop=tuple(stop))
    assert letters(found.tokens) == expected
    assert found.stopped == any(each in expected for each in stop)
    assert not found.cut_off and found.failure == ""
    assert lost == wasted
    np.testing.assert_allclose(found.logprobs, 0.0, atol=1e-6)
    assert len(found.logprobs) == len(found.versions) == len(found.mask)
    assert len(found.full_logprobs) == len(found.top_tokens) == len(expected)


def test_a_stop_on_the_last_token_allowed_is_no_cut(bench, counting_params):
    found, _ = completed(bench, counting_params, [4], stop=("j",), max_tokens=5)
    assert letters(found.tokens) == "fghij"
    assert found.stopped and not found.cut_off
    found, _ = completed(bench, counting_params, [4], stop=("k",), max_tokens=5)
    assert letters(found.tokens) == "fghij"
    assert not found.stopped and found.cut_off


@pytest.mark.parametrize(
    "prompt, stop, count",
    [
        pytest.param([12], "€", 3, id="three bytes in one call"),
        # 0 1 2 | 3 is EOS here; from 3 the tokens are 4, 5, ... up to 11.
        pytest.param([4], "😀", 4, id="four bytes in one call"),
        pytest.param([4], "😀x", 5, id="over the border of two calls"),
        pytest.param([5], "😀", None, id="the first byte is in the prompt"),
    ],
)
def test_a_character_may_be_cut_over_tokens(
    bench, counting_params, prompt, stop, count
):
    found, _ = completed(
        bench, counting_params, prompt, stop=(stop,), decode=characters
    )
    assert found.stopped == (count is not None)
    if count is not None:
        assert len(found.tokens) == count
        assert characters(found.tokens).endswith(stop)


def test_others_of_the_call_go_on(bench, counting_params):
    stopped = one(bench, [4], stop=("g",))
    others = bench.request(1, [12], num_samples=2, limits=None)
    scheduler = bench.scheduler(stopped, others, decode=letters)
    listed = bench.request(2, [5], num_samples=4, limits=None)
    scheduler.submit(listed)
    found = bench.finish(scheduler, counting_params)
    assert letters(found.pop((0, 0)).tokens) == "fg"
    bench.assert_same(found, bench.expected(counting_params, others, listed))


def test_a_slot_that_a_stop_has_freed_is_used_again(tight_bench, counting_params):
    bench = tight_bench
    scheduler = bench.scheduler(decode=letters)
    for number in range(7):
        scheduler.submit(
            bench.request(number, [4], limits=None, num_samples=2, stop=("gh",))
        )
    found = bench.finish(scheduler, counting_params)
    assert len(found) == 14
    assert {letters(each.tokens) for each in found.values()} == {"fgh"}
    bench.assert_idle(scheduler)


def of_text(text, stop):
    """A sample that has written a text, a letter per token and piece."""
    request = Request(
        request_id=0,
        tokens=np.array([0], np.int32),
        samples=Samples(keys=np.zeros((1, 2), np.uint32), thinking_limits=np.zeros(1)),
        stop=stop,
    )
    sample = Sample(request=request, number=0, limit=2000)
    sample.pieces = [(np.array([ord(letter)]),) for letter in text]
    return sample


@pytest.mark.parametrize("border", range(12))
def test_a_stop_is_found_wherever_the_calls_are_cut(border):
    text, stop = "some of <end> and more", ("<end>", "\n\n")
    border += len("some of ") - 4
    new = np.array([ord(letter) for letter in text[border:]])
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    found = end_of_stop(of_text(text[:border], stop), new, decode)
    expected = len("some of <end>") - border
    # Complete before: then the sample had ended, and nobody asks.
    if expected > 0:
        assert found == expected


def test_only_as_many_tokens_are_decoded_as_a_stop_can_take():
    seen = []

    def decode(tokens):
        seen.append(len(tokens))
        return "".join(map(chr, tokens))

    sample = of_text("x" * 1000, ("ab",))
    assert end_of_stop(sample, np.array([ord("y")] * 3), decode) is None
    assert seen == [8 + 1, 8 + 2, 8 + 3]  # two characters of four bytes


def test_no_new_token_and_no_stop_string_end_nothing():
    def decode(tokens):
        raise AssertionError("nothing to decode")

    assert end_of_stop(of_text("abc", ("c",)), np.array([], int), decode) is None
    assert end_of_stop(of_text("abc", ()), np.array([99]), decode) is None
