"""Stop strings on a policy that counts: token u is letter u, and u + 1 follows u.

EOS are 3 (d) and 11 (l); from [4] the policy writes fghijkl, four letters per call.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_detokenizer import LETTERS, detokenizer_of

from scalerl_jax.data.detokenizer import Detokenizer
from scalerl_jax.sampler.requests import StopWatch

# Token u is byte u of these characters, of 3, 2, 4 and 1 bytes; the rest are spaces.
BYTES = detokenizer_of([bytes([byte]) for byte in "€é😀x".encode().ljust(13)])


def one(bench, prompt, **options):
    return bench.request(0, prompt, num_samples=1, limits=None, **options)


def completed(bench, params, prompt, *, detokenizer=LETTERS, **options):
    scheduler = bench.scheduler(one(bench, prompt, **options), detokenizer=detokenizer)
    found = bench.finish(scheduler, params)[0, 0]
    assert bench.step(scheduler, params) == []  # reads the call ahead
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
    assert LETTERS.text(found.tokens) == expected
    assert found.stopped == any(each in expected for each in stop)
    assert not found.cut_off and found.failure == ""
    assert lost == wasted
    np.testing.assert_allclose(found.logprobs, 0.0, atol=1e-6)
    assert len(found.logprobs) == len(found.versions) == len(found.mask)
    assert len(found.full_logprobs) == len(found.top_tokens) == len(expected)


def test_a_stop_on_the_last_token_allowed_is_no_cut(bench, counting_params):
    found, _ = completed(bench, counting_params, [4], stop=("j",), max_tokens=5)
    assert LETTERS.text(found.tokens) == "fghij"
    assert found.stopped and not found.cut_off
    found, _ = completed(bench, counting_params, [4], stop=("k",), max_tokens=5)
    assert LETTERS.text(found.tokens) == "fghij"
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
        bench, counting_params, prompt, stop=(stop,), detokenizer=BYTES
    )
    assert found.stopped == (count is not None)
    if count is not None:
        assert len(found.tokens) == count
        assert BYTES.text(found.tokens).endswith(stop)


def test_others_of_the_call_go_on(bench, counting_params):
    stopped = one(bench, [4], stop=("g",))
    others = bench.request(1, [12], num_samples=2, limits=None)
    scheduler = bench.scheduler(stopped, others, detokenizer=LETTERS)
    listed = bench.request(2, [5], num_samples=4, limits=None)
    scheduler.submit(listed)
    found = bench.finish(scheduler, counting_params)
    assert LETTERS.text(found.pop((0, 0)).tokens) == "fg"
    bench.assert_same(found, bench.expected(counting_params, others, listed))


def test_a_slot_that_a_stop_has_freed_is_used_again(tight_bench, counting_params):
    bench = tight_bench
    scheduler = bench.scheduler(detokenizer=LETTERS)
    for number in range(7):
        scheduler.submit(
            bench.request(number, [4], limits=None, num_samples=2, stop=("gh",))
        )
    found = bench.finish(scheduler, counting_params)
    assert len(found) == 14
    assert {LETTERS.text(each.tokens) for each in found.values()} == {"fgh"}
    bench.assert_idle(scheduler)


# Tokens that join what stands beside a stop string to it; the first one of a text is
# written without its space, which a completion never is, since it follows a prompt.
# The last two have a byte of a character each.
PIECES = [b"a", b" b", b"ab", b"ba ", b" ", b"", b"b a", "€".encode()]
PIECES += [b"a\xe2\x82", b"\xacb"]
PROMPT = 0  # the letter "a"
JOINED = Detokenizer(later=PIECES, first=[piece.removeprefix(b" ") for piece in PIECES])


@given(
    st.lists(st.integers(0, len(PIECES)), max_size=12),
    st.lists(st.text("ab €", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_a_stop_is_found_wherever_tokens_and_calls_are_cut(tokens, stops, data):
    watch, seen, found = StopWatch(stops, JOINED), 0, None
    while seen < len(tokens) and found is None:
        count = data.draw(st.integers(1, len(tokens) - seen))
        found = watch.end(np.array(tokens[seen : seen + count]))
        seen += count if found is None else found
    ends = [
        count
        for count in range(len(tokens) + 1)
        if any(stop in JOINED.text([PROMPT, *tokens[:count]])[1:] for stop in stops)
    ]
    assert (found is not None) == bool(ends)
    assert seen == (ends[0] if ends else len(tokens))
