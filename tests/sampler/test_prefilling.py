"""How prompts are cut and packed into chunks, by hand and against whole prompts."""

import numpy as np
import pytest

from scalerl_jax.sampler.pages import Prefix
from scalerl_jax.sampler.scheduler import fill_chunk

RNG = np.random.default_rng(5)
OTHERS = (2, 3, 4)  # completions of 18, 6 and 18 tokens, none of them 12


def prefix(first, length, pages):
    """Tokens first, first + 1, ..., with their pages."""
    return Prefix(tokens=np.arange(first, first + length), pages=pages, version=0)


def test_a_chunk_holds_one_prompt_after_the_other_by_hand(bench):
    one, two, three = (
        prefix(100, 6, [7, 8]),
        prefix(200, 5, [3, 1]),
        prefix(300, 7, [5, 6]),
    )
    first = fill_chunk(bench.engine, [one, two, three])  # of 16 tokens
    assert first.tokens.tolist() == [
        *(100, 101, 102, 103, 104, 105),
        *(200, 201, 202, 203, 204),
        *(300, 301, 302, 303, 304),
    ]
    assert first.positions.tolist() == [*range(6), *range(5), *range(5)]
    assert first.segments.tolist() == [1] * 6 + [2] * 5 + [3] * 5
    assert first.table[:3, :2].tolist() == [[7, 8], [3, 1], [5, 6]]
    assert first.query_starts[:5].tolist() == [0, 6, 11, 16, 16]
    assert first.lengths[:4].tolist() == [6, 5, 5, 0]
    assert first.num_sequences.tolist() == [3]
    assert [each.ready for each in (one, two, three)] == [True, True, False]
    # What was begun comes first, then a newcomer; the rest is padding.
    four = prefix(400, 3, [0])
    second = fill_chunk(bench.engine, [four, one, three])
    assert second.tokens[:5].tolist() == [305, 306, 400, 401, 402]
    assert second.positions[:5].tolist() == [5, 6, 0, 1, 2]
    assert second.segments.tolist() == [1, 1, 2, 2, 2] + [0] * 11
    assert second.table[:2, :2].tolist() == [[5, 6], [0, 0]]
    assert second.query_starts[:4].tolist() == [0, 2, 5, 5]
    assert second.lengths[:3].tolist() == [7, 3, 0]
    assert fill_chunk(bench.engine, [one, two, three, four]) is None


def test_a_chunk_takes_one_past_only(bench):
    begun = [prefix(0, 20, [0]), prefix(100, 20, [1]), prefix(200, 2, [2])]
    begun[0].done, begun[1].done = 15, 16
    first = fill_chunk(bench.engine, begun)
    assert first.num_sequences.tolist() == [2]
    assert first.tokens[:7].tolist() == [15, 16, 17, 18, 19, 200, 201]
    assert first.positions[:7].tolist() == [15, 16, 17, 18, 19, 0, 1]
    second = fill_chunk(bench.engine, begun)
    assert second.num_sequences.tolist() == [1]
    assert second.tokens[:4].tolist() == [116, 117, 118, 119]
    assert fill_chunk(bench.engine, begun) is None


def test_prompts_with_the_same_pages_share_a_chunk_by_hand(bench):
    """Of three with 8 tokens in the cache, the second has them in pages of its own."""
    pages = [[4, 5, 0], [6, 7, 1], [4, 5, 2], [3]]
    begun = [prefix(0, 11, pages[0]), prefix(0, 10, pages[1]), prefix(0, 9, pages[2])]
    for each in begun:
        each.done = 8
    first = fill_chunk(bench.engine, [*begun, prefix(50, 2, pages[3])])
    assert first.tokens[:6].tolist() == [8, 9, 10, 8, 50, 51]
    assert first.positions[:6].tolist() == [8, 9, 10, 8, 0, 1]
    assert first.table[:3, :3].tolist() == [[4, 5, 0], [4, 5, 2], [3, 0, 0]]
    assert first.lengths[:3].tolist() == [11, 9, 2]
    assert fill_chunk(bench.engine, begun).tokens[:3].tolist() == [8, 9, 0]


@pytest.mark.parametrize(
    "wanted, size",
    [(1, 64), (64, 64), (65, 100), (100, 100), (101, 100)],
)
def test_the_smallest_chunk_that_holds_them_is_taken(ladder_bench, wanted, size):
    prompts = [prefix(0, 50, [0]), prefix(0, wanted - 50, [1])]
    if wanted == 1:
        prompts = [prefix(0, 1, [0])]
    chunk = fill_chunk(ladder_bench.engine, prompts)
    assert len(chunk.tokens) == size
    assert chunk.query_starts[-1] == min(wanted, size)


def test_a_chunk_holds_32_prompts_at_most(ladder_bench):
    prompts = [prefix(10 * number, 2, [number]) for number in range(40)]
    first = fill_chunk(ladder_bench.engine, prompts)
    assert first.num_sequences.tolist() == [32]
    assert first.query_starts[-1] == 64 and first.lengths.tolist() == [2] * 32
    second = fill_chunk(ladder_bench.engine, prompts)
    assert second.num_sequences.tolist() == [8]
    assert second.tokens[:2].tolist() == [320, 321]
    assert [each.ready for each in prompts] == [True] * 40


def test_a_prompt_of_one_token_needs_no_chunk(bench, random_params):
    params = random_params(0)
    assert fill_chunk(bench.engine, [prefix(0, 0, [])]) is None
    request = bench.request(6, [5])
    scheduler = bench.scheduler(request)
    found = bench.finish(scheduler, params)
    assert scheduler.stats.chunks == scheduler.stats.prefilled_tokens == 0
    bench.assert_same(found, bench.expected(params, request))


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_prompts_packed_in_one_chunk_do_not_see_each_other(
    name, random_params, request
):
    bench, params = request.getfixturevalue(name), random_params(1)
    requests = [
        bench.request(number, RNG.integers(0, 13, length), num_samples=1)
        for number, length in enumerate((5, 6, 4, 5))  # 4 + 5 + 3 + 4 tokens
    ]
    scheduler = bench.scheduler(*requests)
    found = {(each.request_id, 0): each for each in bench.step(scheduler, params)}
    assert scheduler.stats.chunks == 1 and scheduler.stats.prefilled_tokens == 16
    found |= bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, *requests))


def test_one_chunk_at_a_time_while_others_decode(bench, random_params):
    params = random_params(0)
    running = bench.request(2, RNG.integers(0, 13, 3), num_samples=1, max_tokens=18)
    running = bench.request(2, [4, 1], num_samples=1, limits=None, temperature=0.0)
    scheduler = bench.scheduler(running)
    bench.step(scheduler, params)
    assert scheduler.stats.chunks == 1
    long = [bench.request(n, RNG.integers(0, 13, 20), num_samples=1) for n in (5, 6)]
    for each in long:
        scheduler.submit(each)
    before = scheduler.stats.prefilled_tokens
    found = {}
    for chunks in (1, 2, 3):  # 19 + 19 tokens in chunks of 16, 16 and 6
        for each in bench.step(scheduler, params):
            found[each.request_id, each.sample] = each
        if not scheduler._running:
            break  # nobody to wait for: the rest at once
        assert scheduler.stats.chunks == 1 + chunks
        assert scheduler.stats.prefilled_tokens - before == min(16 * chunks, 38)
    found |= bench.finish(scheduler, params)
    assert scheduler.stats.prefilled_tokens - before == 38
    bench.assert_same(found, bench.expected(params, running, *long))


@pytest.mark.parametrize("place", [0, 3, 8, 18, 19])
@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_a_token_that_is_not_a_number_fails_its_own_prompt_only(
    name, poisoned_params, random_params, place, request
):
    bench = request.getfixturevalue(name)
    broken = RNG.integers(0, 11, 20)
    broken[place] = 12  # in the first chunk, in the second, or decoded
    others = [
        bench.request(number, [4, 1, 9, 2, 8], num_samples=1, limits=None, top_k=4)
        for number in OTHERS
    ]
    bad = bench.request(1, broken, num_samples=1)
    scheduler = bench.scheduler(others[0], bad, *others[1:])
    found = bench.finish(scheduler, poisoned_params(2))
    failed = found.pop((1, 0))
    assert len(failed.tokens) == 0 and not failed.cut_off and not failed.stopped
    assert failed.failure == (
        "the logits after token 0 of the completion are not finite at policy "
        "version 0; check the params"
    )
    assert scheduler.stats.failed == 1
    expected = bench.expected(random_params(2), *others)
    assert all(12 not in each.tokens for each in expected.values())
    assert min(len(each.tokens) for each in expected.values()) > 1
    bench.assert_same(found, expected)
    bench.assert_idle(scheduler)
    # Its slot and its pages serve others.
    again = [bench.request(n, RNG.integers(0, 12, 20), num_samples=4) for n in (7, 8)]
    for each in again:
        scheduler.submit(each)
    found = bench.finish(scheduler, random_params(2), version=1)
    bench.assert_same(found, bench.expected(random_params(2), *again))


def test_long_prompts_are_cached_though_params_change_at_every_step(
    bench, talkative_params
):
    params = talkative_params(0)
    running = bench.request(2, [4, 1], num_samples=1, limits=None)
    scheduler = bench.scheduler(running)
    bench.step(scheduler, params)
    long = [bench.request(n, RNG.integers(0, 10, 20), num_samples=1) for n in (5, 6)]
    for each in long:
        scheduler.submit(each)
    # Chunks of 16: a part of the first prompt; it is dropped, and the first is cached
    # in one step with a part of the second; then the second.
    found, prefilled, waiting = {}, [], []
    for version in range(4):
        for each in bench.step(scheduler, params, version=version):
            found[each.request_id, each.sample] = each
        prefilled.append(scheduler.stats.prefilled_tokens)
        waiting.append(len(scheduler._waiting))
        assert 2 in {each.request.request_id for each in scheduler._running.values()}
    assert np.diff([1, *prefilled]).tolist() == [16, 19 + 13, 19, 0]
    assert waiting == [2, 1, 0, 0]
    # The second's twice: it had pages, and no token in them, at the first update.
    assert scheduler.stats.prefixes_dropped == 3
    found |= bench.finish(scheduler, params, version=3)
    bench.assert_same(found, bench.expected(params, running, *long))
    versions = [found[number, 0].versions[0].item() for number in (2, 5, 6)]
    assert versions == [0, 1, 2]
    bench.assert_idle(scheduler)
