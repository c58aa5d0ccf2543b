"""Requests in line, in slots and out of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.sampler.pages import page_digests
from scalerl_jax.sampler.pool import PagePool

PROMPT = [4, 1, 9, 2]
RNG = np.random.default_rng(7)
LONG = RNG.integers(0, 13, 20)
NAMES = ["bench", "paged_bench", "tight_bench"]


def step(scheduler, params, *, version=0, times=1):
    """What some steps return, by (request, sample)."""
    found = {}
    for _ in range(times):
        scheduler.load(params, version)
        found |= {(each.request_id, each.sample): each for each in scheduler.step()}
    return found


# -- slots ----------------------------------------------------------------------------


def test_a_call_is_read_while_the_next_one_runs(bench, counting_params):
    # EOS is 11: eight tokens, two calls; the third was made before that was known.
    scheduler = bench.scheduler(bench.request(0, [2, 3], num_samples=1, limits=None))
    assert [len(step(scheduler, counting_params)) for _ in range(3)] == [0, 0, 1]
    assert scheduler.stats.calls == 3 and not scheduler.busy
    # A limit is known beforehand: no call after the one that reaches it.
    scheduler = bench.scheduler(
        bench.request(0, [2, 3], num_samples=1, limits=None, max_tokens=8)
    )
    assert [len(step(scheduler, counting_params)) for _ in range(3)] == [0, 0, 1]
    assert scheduler.stats.calls == 2


# -- pages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, samples, expected",
    [
        # 16 tokens cached, 4 whole pages; one page each for the first call.
        pytest.param(17, 3, [4 + 3, 4 + 3 * 2], id="whole pages"),
        # 6 cached, one whole page shared, half a page copied, one more for 4 tokens.
        pytest.param(7, 3, [1 + 3 * 2, 1 + 3 * 3], id="a broken page"),
        # Two still wait: the half page is kept for them.
        pytest.param(7, 6, [2 + 4 * 2, 2 + 4 * 3], id="half a group"),
        # Nothing to share: pages for 4 tokens, then for 8.
        pytest.param(1, 4, [4, 8], id="one token"),
    ],
)
def test_a_prompt_is_cached_once_for_its_group(
    bench, counting_params, length, samples, expected
):
    prompt = np.arange(12, 12 + length) % 13  # the last is the first one's neighbour
    prompt[-1] = 12  # twelve tokens to EOS, but 3 is EOS: 0 1 2 3
    params = counting_params | {"head": jnp.roll(counting_params["head"], -5, axis=0)}
    # u - 4 after u: 8, 4, 0, 9, 5, 1, 10, 6, 2, 11, three calls.
    request = bench.request(0, prompt, num_samples=samples, limits=None)
    scheduler = bench.scheduler(request)
    in_use = []
    for _ in expected:
        assert step(scheduler, params) == {}
        in_use.append(scheduler.stats.pages_in_use)
    assert in_use == expected
    assert scheduler.stats.prefilled_tokens == length - 1
    # The second call is under way, its tokens not known yet.
    running = min(samples, 4)
    assert scheduler.stats.tokens_held == running * (length - 1 + 4)
    found = bench.finish(scheduler, params)
    assert len(found) == samples
    for each in found.values():
        assert each.tokens.tolist() == [8, 4, 0, 9, 5, 1, 10, 6, 2, 11]
    assert scheduler.stats.prefilled_tokens == length - 1
    assert scheduler.stats.peak_pages >= max(expected)
    bench.assert_idle(scheduler)


def test_pages_follow_the_tokens_that_are_held(bench, talkative_params):
    params = talkative_params(0)
    scheduler = bench.scheduler()
    for number in range(6):
        scheduler.submit(
            bench.request(number, RNG.integers(0, 13, 3 * number + 1), limits=None)
        )
    steps = 0
    while scheduler.busy:
        step(scheduler, params)
        steps += 1
        running = list(scheduler._running.values())
        owned = {page for sample in running for page in sample.pages}
        for entry in scheduler._waiting:
            owned |= set(entry.prefix.pages if entry.prefix else ())
        assert scheduler.stats.pages_in_use == len(owned)
        for sample in running:
            cached = len(sample.request.tokens) + sample.num_tokens - 1
            # Those of the call under way and what an earlier one has asked for.
            least, most = -(-cached // 4), -(-(cached + 8) // 4)
            assert least <= len(sample.pages) <= most
            assert len(set(sample.pages)) == len(sample.pages)
    assert steps > 8
    bench.assert_idle(scheduler)


def test_a_prompt_gets_the_pages_of_one_that_begins_alike(bench, random_params):
    """By hand, with pages of 4 and chunks of 16 tokens; the last one is decoded."""
    params, other = random_params(0), LONG[::-1]
    requests = [
        bench.request(0, LONG),  # 16 in a chunk, then 3
        bench.request(1, [*LONG[:14], 1, 2, 3, 4]),  # 3 pages and 5 tokens
        bench.request(2, [*LONG[:4], *other[:2]]),  # 1 page and 1 token
        bench.request(3, other),
    ]
    scheduler = bench.scheduler(*requests)
    found = bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, *requests))
    stats = scheduler.stats
    assert (stats.prefix_hit_tokens, stats.prefilled_tokens) == (16, 19 + 5 + 1 + 19)
    # Again: all 4 full pages of the first; nothing of another version, or without.
    scheduler.submit(bench.request(4, LONG))
    found = bench.finish(scheduler, params)
    assert (stats.prefix_hit_tokens, stats.prefilled_tokens) == (32, 44 + 3)
    scheduler.submit(bench.request(4, LONG))
    bench.finish(scheduler, params, version=1)
    assert (stats.prefix_hit_tokens, stats.prefilled_tokens) == (32, 47 + 19)
    without = bench.scheduler(
        *requests, pool=PagePool(bench.engine, prefix_cache=False)
    )
    bench.assert_same(bench.finish(without, params), bench.expected(params, *requests))
    assert without.stats.prefix_hit_tokens == 0
    bench.assert_idle(scheduler)


def test_prompts_that_begin_alike_together_are_cached_once(bench, random_params):
    """By hand: what the second one lacks is there once the first one is cached."""
    requests = [
        bench.request(number, tokens, num_samples=1)
        for number, tokens in enumerate(
            (
                LONG[::-1][:8],  # 7 in the first chunk, beside 9 of:
                LONG,  # then 10; all of 2 pages are there, and then of 4
                LONG,  # 2 pages, then 2 more, and 3 tokens
                [*LONG[:14], 1, 2, 3, 4],  # 2 pages, one more, 5 tokens
            )
        )
    ]
    scheduler = bench.scheduler(*requests)
    found = bench.finish(scheduler, random_params(0))
    stats = scheduler.stats
    assert (stats.prefix_hit_tokens, stats.prefilled_tokens) == (28, 7 + 19 + 3 + 5)
    bench.assert_same(found, bench.expected(random_params(0), *requests))
    bench.assert_idle(scheduler)


def test_a_prompt_that_waits_for_pages_is_hashed_once(
    tight_bench, talkative_params, monkeypatch
):
    hashed = []

    def digests(tokens, page_size):
        hashed.append(len(tokens))
        return page_digests(tokens, page_size)

    monkeypatch.setattr("scalerl_jax.sampler.scheduler.page_digests", digests)
    scheduler = tight_bench.scheduler(
        tight_bench.request(0, LONG, num_samples=1), tight_bench.request(1, LONG[::-1])
    )
    for _ in range(3):
        assert not step(scheduler, talkative_params(0))
    assert len(scheduler._waiting) == 1
    assert hashed == [19, 19]


def test_what_another_prompt_has_cached_is_not_due_at_an_update(
    bench, talkative_params
):
    """By hand: of three that begin alike, a part of the second one's own is lost."""
    old, new = talkative_params(0), talkative_params(2)
    running = bench.request(2, LONG[:16], num_samples=1, limits=None, temperature=0.0)
    scheduler = bench.scheduler(running)
    found = step(scheduler, old, version=0)
    assert scheduler.stats.prefilled_tokens == 15
    others = [
        bench.request(number, [*LONG[:8], *RNG.permutation(12)], num_samples=1)
        for number in (5, 6, 7)
    ]
    for each in others:
        scheduler.submit(each)
    found |= step(scheduler, old, version=0)  # 11 and 5 of 11
    stats = scheduler.stats
    assert (stats.prefilled_tokens, stats.prefix_hit_tokens) == (15 + 16, 3 * 8)
    found |= step(scheduler, new, version=1)  # 16 and 3; the third waits
    assert stats.prefilled_tokens == 15 + 16 + 19
    found |= bench.finish(scheduler, new, version=1)
    late = {place: each for place, each in found.items() if place[0] in (6, 7)}
    bench.assert_same(late, bench.expected(new, *others[1:]))
    bench.assert_idle(scheduler)


@pytest.mark.parametrize(
    "name, seed",
    [("tight_bench", 0), pytest.param("int8_bench", 2, marks=pytest.mark.slow)],
)
def test_pages_for_one_sequence_complete_many_requests(
    talkative_params, name, seed, request
):
    bench, params = request.getfixturevalue(name), talkative_params(seed)
    requests = [
        bench.request(
            number,
            RNG.integers(0, 13, length),
            num_samples=2,
            temperature=0.5 + 0.25 * (number % 3),
            top_k=number % 2 * 7,
        )
        for number, length in enumerate((20, 1, 5, 20, 13, 7, 2, 18))
    ]
    scheduler = bench.scheduler(*requests)
    found = bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, *requests))
    if name == "int8_bench":  # also where a suspended sample's tokens are cached again
        bench.assert_rounded(params, found, *requests)
    assert scheduler.stats.suspended > 2 and scheduler.stats.prefixes_dropped > 0
    assert scheduler.stats.peak_pages == 11
    bench.assert_idle(scheduler)


def test_a_suspended_sample_goes_on_where_it_was(tight_bench, counting_params):
    # Eleven pages of four; 8, 4, 0, 9, ... as above, and 3 is never said from 12.
    params = counting_params | {"head": jnp.roll(counting_params["head"], -5, axis=0)}
    bench = tight_bench
    first = bench.request(0, [5] * 12 + [12], num_samples=1, limits=None)
    second = bench.request(1, [6] * 12 + [12], num_samples=2, limits=None)
    scheduler = bench.scheduler(first, second)
    found = bench.finish(scheduler, params)
    assert scheduler.stats.suspended > 0
    for each in found.values():
        assert each.tokens.tolist() == [8, 4, 0, 9, 5, 1, 10, 6, 2, 11]
        np.testing.assert_allclose(each.logprobs, 0.0, atol=1e-5)
    # 12 of each prompt, and once more the 12 and the tokens of who was suspended.
    assert scheduler.stats.prefilled_tokens > 24
    assert scheduler.stats.wasted_tokens == 0
    bench.assert_idle(scheduler)


# -- cancelled ------------------------------------------------------------------------


def test_every_pass_is_counted_with_what_it_attends_to(bench, counting_params):
    """From 4 on: 5, .. 10 and 11, the end; prompts of 4 and, in two chunks, 20."""
    scheduler = bench.scheduler(
        bench.request(0, [9, 2, 1, 4], num_samples=3, limits=None),
        bench.request(1, [1] * 19 + [4], num_samples=1, limits=None),
    )
    found = bench.finish(scheduler, counting_params)
    assert [len(each.tokens) for each in found.values()] == [7] * 4
    stats = scheduler.stats
    # A prompt is cached once, and without its last token, which is decoded.
    assert stats.prefilled_tokens == 3 + 19
    assert stats.prefill_context == 3 * 4 / 2 + 19 * 20 / 2
    assert stats.generated_tokens == 4 * 7
    assert stats.generated_context == 3 * sum(range(4, 11)) + sum(range(20, 27))
    # Matrices alone: q 16x32, k and v 16x16, o 32x16, three of 16x24; two such layers;
    # a head of 13x16.  Attention: 4 heads of 8, twice.
    layers = 2 * (512 + 256 + 256 + 512 + 3 * 384)
    attended = stats.prefill_context + stats.generated_context
    assert stats.flops(bench.settings.arch) == (
        2 * layers * (22 + 28) + 2 * 13 * 16 * 28 + 2 * 4 * 4 * 8 * attended
    )


def test_what_is_cached_again_is_counted_again(make_bench, counting_params):
    bench = make_bench()
    scheduler = bench.scheduler(
        bench.request(0, [9, 2, 1, 4], num_samples=1, limits=None),
        kv_on_update="recompute",
    )
    step(scheduler, counting_params)
    found = bench.finish(scheduler, counting_params, version=1)
    assert len(found[0, 0].tokens) == 7
    # Its prompt and, of the first call's four tokens, all but the last.
    assert scheduler.stats.recomputed_tokens == 3 + 4
    assert scheduler.stats.prefill_context == 3 * 4 / 2 + 7 * 8 / 2
    assert scheduler.stats.generated_context == sum(range(4, 11))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_cancelled_never_comes_back_and_frees_its_slots(
    name, random_params, request
):
    bench, params = request.getfixturevalue(name), random_params(0)
    kept = bench.request(1, PROMPT, num_samples=2)
    dropped = bench.request(2, [6, 2], num_samples=3)
    scheduler = bench.scheduler(kept, dropped)  # 2 + 2 in slots, 1 in line
    found = step(scheduler, params, times=2)
    assert all(number == 1 for number, _ in found)
    running = [
        sample
        for sample in scheduler._running.values()
        if sample.request.request_id == 2
    ]
    # What still ran had four tokens, all of the call; they are lost.
    assert scheduler.cancel(2) == 4 * len(running) > 0
    assert scheduler.free_slots == 4 - (2 - len(found))
    wasted = scheduler.stats.wasted_tokens
    newcomer = bench.request(5, [8, 8, 1])
    scheduler.submit(newcomer)
    found |= bench.finish(scheduler, params)
    # And the tokens of the call that was under way.
    assert wasted < scheduler.stats.wasted_tokens <= wasted + 4 * len(running)
    bench.assert_same(found, bench.expected(params, kept, newcomer))
    bench.assert_idle(scheduler)


def test_what_waits_is_cancelled_without_loss(bench, random_params):
    params = random_params(0)
    kept = bench.request(1, PROMPT, num_samples=5)
    scheduler = bench.scheduler(kept, bench.request(2, LONG))
    found = step(scheduler, params)
    assert scheduler.cancel(2) == 0
    found |= bench.finish(scheduler, params)
    assert scheduler.stats.prefilled_tokens == 3  # of the other
    bench.assert_same(found, bench.expected(params, kept))
    bench.assert_idle(scheduler)


def test_a_half_made_prompt_is_cancelled_with_its_pages(bench, random_params):
    params = random_params(0)
    kept = bench.request(2, PROMPT, num_samples=1, limits=None)
    scheduler = bench.scheduler(kept)
    found = step(scheduler, params)
    before = scheduler.stats.pages_in_use
    scheduler.submit(bench.request(9, LONG, num_samples=1))
    found |= step(scheduler, params)
    assert scheduler.stats.prefilled_tokens == 3 + 16  # 3 of 19 are to come
    assert scheduler.stats.pages_in_use > before + 1
    assert scheduler.cancel(9) == 0
    again = bench.request(9, LONG[::-1], num_samples=2)
    scheduler.submit(again)
    found |= bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, kept, again))
    bench.assert_idle(scheduler)


def test_a_suspended_sample_is_cancelled_with_its_tokens(tight_bench, counting_params):
    bench = tight_bench
    params = counting_params | {"head": jnp.roll(counting_params["head"], -5, axis=0)}
    first = bench.request(0, [5] * 12 + [12], num_samples=1, limits=None)
    second = bench.request(1, [6] * 12 + [12], num_samples=2, limits=None)
    scheduler = bench.scheduler(first, second)
    found = {}
    while not scheduler.stats.suspended:
        found |= step(scheduler, params)
    waiting = [entry for entry in scheduler._waiting if entry.samples[0].row]
    tokens = sum(entry.samples[0].num_tokens for entry in waiting)
    tokens += sum(
        sample.num_tokens
        for sample in scheduler._running.values()
        if sample.request.request_id == 1
    )
    assert waiting and all(each.samples[0].request.request_id == 1 for each in waiting)
    assert scheduler.cancel(1) == tokens
    found |= bench.finish(scheduler, params)
    assert list(found) == [(0, 0)]
    bench.assert_idle(scheduler)


# -- updates --------------------------------------------------------------------------


def test_the_rest_of_a_group_starts_from_the_newest_weights(bench, random_params):
    old, new = random_params(0), random_params(1)
    request = bench.request(1, PROMPT, num_samples=8)
    scheduler = bench.scheduler(request)
    assert step(scheduler, old, version=5) == {}
    found = bench.finish(scheduler, new, version=6)
    from_new = {
        place: each for place, each in found.items() if (each.versions == 6).all()
    }
    assert {place[1] for place in from_new} == {4, 5, 6, 7}
    expected = bench.expected(new, request)
    bench.assert_same(from_new, {place: expected[place] for place in from_new})
    for (_, sample), each in found.items():
        if sample < 4:  # one call of the old version
            count = len(each.tokens)
            assert each.versions.tolist() == ([5] * 4 + [6] * 99)[:count]
    assert scheduler.stats.prefixes_dropped == 1
    assert scheduler.stats.prefilled_tokens == 2 * 3


def test_a_half_made_prompt_is_made_again_for_new_weights(bench, talkative_params):
    old, new = talkative_params(0), talkative_params(2)
    # 18 greedy tokens would do; anything that runs for a few calls.
    running = bench.request(2, LONG[:16], num_samples=1, limits=None, temperature=0.0)
    late = bench.request(5, LONG[::-1], num_samples=3)
    scheduler = bench.scheduler(running)
    found = step(scheduler, old, version=0)
    scheduler.submit(late)
    found |= step(scheduler, old, version=0)
    assert scheduler.stats.prefilled_tokens == 15 + 16 and scheduler._running
    found |= step(scheduler, new, version=1)
    assert scheduler.stats.prefixes_dropped == 1
    found |= bench.finish(scheduler, new, version=1)
    assert scheduler.stats.prefilled_tokens == 15 + 16 + 19
    found = {place: each for place, each in found.items() if place[0] == 5}
    bench.assert_same(found, bench.expected(new, late))
    assert all((each.versions == 1).all() for each in found.values())


def test_kept_keys_and_values_are_not_those_of_the_newest_weights(
    bench, talkative_params
):
    old, new = talkative_params(0), talkative_params(2)
    request = bench.request(2, LONG[:16], num_samples=4, limits=None)
    scheduler = bench.scheduler(request, kv_on_update="keep")
    found = step(scheduler, old, version=0)
    found |= bench.finish(scheduler, new, version=1)
    furthest = 0.0
    for (_, sample), each in found.items():
        of_token = [(old, new)[version] for version in each.versions]
        tokens, logprobs = bench.dense_replay(request, sample, of_token, warm_up=old)
        assert each.tokens.tolist() == tokens
        np.testing.assert_allclose(each.logprobs, logprobs, atol=2e-5)
        others = bench.replay(request, each, [old, new])[1]
        furthest = max(furthest, np.abs(np.subtract(logprobs, others)).max())
    assert furthest > 0.1  # recomputed, it would be seen
    assert scheduler.stats.recomputed_tokens == 0


# -- failures -------------------------------------------------------------------------


def test_weights_that_are_not_numbers_fail_what_they_sample(bench, talkative_params):
    params = talkative_params(0)
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    request = bench.request(2, LONG[:16], num_samples=5, limits=None)
    scheduler = bench.scheduler(request)
    found = step(scheduler, params, version=3)
    found |= step(scheduler, broken, version=4)  # reads the call of version 3
    found |= step(scheduler, params, version=5)  # and this one that of version 4
    failed = {place: each for place, each in found.items() if each.failure}
    assert len(failed) >= 3
    whole = bench.expected(params, request)
    for place, each in failed.items():
        assert each.tokens.tolist() == whole[place].tokens[:4].tolist()
        assert each.versions.tolist() == [3, 3, 3, 3]
        assert np.isfinite(each.logprobs).all()
        assert not each.cut_off and not each.stopped
        assert each.failure.startswith(
            "the logits after token 4 of the completion are not finite at policy "
            "version 4;"
        )
    found |= bench.finish(scheduler, params, version=5)
    assert len(found) == 5 and scheduler.stats.failed == len(failed)
    good = {place: each for place, each in found.items() if not each.failure}
    bench.assert_same(good, {place: whole[place] for place in good})
    assert any((each.versions == 5).all() for each in good.values())
    bench.assert_idle(scheduler)


def test_one_slot_with_the_cache_it_gets_by_itself(make_bench, random_params):
    bench = make_bench(slots=1)
    requests = [bench.request(7, [1, 2, 3, 4, 5, 6]), bench.request(8, [4])]
    found = bench.complete(random_params(0), *requests)
    bench.assert_same(found, bench.expected(random_params(0), *requests))


def test_no_failure_is_told_of_who_was_cancelled(bench, poisoned_params):
    request = bench.request(1, [3, 12], num_samples=2)
    scheduler = bench.scheduler(request)
    step(scheduler, poisoned_params(0))
    assert scheduler.cancel(1) == 0
    again = dataclasses.replace(request, tokens=np.array([3, 1], np.int32))
    scheduler.submit(again)
    found = bench.finish(scheduler, poisoned_params(0))
    assert scheduler.stats.failed == sum(bool(each.failure) for each in found.values())
    assert all(len(each.tokens) for each in found.values())
