"""Requests in line, in slots and out of them."""

import numpy as np
import pytest

PROMPT = [4, 1, 9, 2]


@pytest.mark.parametrize("length", [0, 21])
def test_a_prompt_that_does_not_fit_is_refused(bench, length):
    request = bench.request(0, [1] * length)
    with pytest.raises(
        ValueError,
        match=rf"a prompt of {length} tokens; sampler.max_prompt_tokens = 20",
    ):
        bench.scheduler(request)


def test_a_sample_does_not_depend_on_its_slot_or_its_neighbours(bench, random_params):
    params = random_params(0)
    wanted = bench.request(7, PROMPT)
    others = [bench.request(number, [number, 5]) for number in range(3)]
    alone = bench.complete(params, wanted)
    for line in (
        [wanted, *others],
        [others[0], wanted, *others[1:]],
        [*others, wanted],
    ):
        found = bench.complete(params, *line)
        assert len(found) == 12
        bench.assert_same(
            {place: each for place, each in found.items() if place[0] == 7}, alone
        )


def test_a_sample_asked_for_again_is_the_same(bench, random_params):
    request = bench.request(7, PROMPT)
    first = bench.complete(random_params(0), request)
    bench.assert_same(bench.complete(random_params(0), request), first)


def test_a_group_larger_than_the_engine_is_completed_in_parts(bench, random_params):
    params = random_params(1)
    request = bench.request(3, PROMPT, num_samples=11)  # four slots
    found = bench.complete(params, request)
    assert sorted(sample for _, sample in found) == list(range(11))
    bench.assert_same(found, bench.expected(params, request))


def test_slots_are_counted_as_they_are_taken_and_freed(bench, random_params):
    scheduler = bench.scheduler()
    assert scheduler.free_slots == 4 and not scheduler.busy
    scheduler.submit(bench.request(0, PROMPT, num_samples=3))
    assert scheduler.free_slots == 1 and scheduler.busy
    done = len(scheduler.step(random_params(0), version=0))
    assert scheduler.free_slots == 1 + done
    bench.finish(scheduler, random_params(0))
    assert scheduler.free_slots == 4 and not scheduler.busy


def test_a_step_without_a_request_returns_nothing(bench, random_params):
    assert bench.scheduler().step(random_params(0), version=0) == []


def test_what_is_cancelled_never_comes_back_and_frees_its_slots(bench, random_params):
    params = random_params(0)
    kept, dropped = bench.request(1, PROMPT, num_samples=2), bench.request(2, [6, 2])
    scheduler = bench.scheduler(kept, dropped)  # 2 + 2 in slots, 1 in line
    found = {(e.request_id, e.sample): e for e in scheduler.step(params, version=0)}
    running = 2 - sum(request == 1 for request, _ in found)
    # What still ran had four tokens, all of the call; they are lost.
    dropped_running = 2 - sum(request == 2 for request, _ in found)
    assert scheduler.cancel(2) == 4 * dropped_running > 0
    assert scheduler.free_slots == 4 - running
    newcomer = bench.request(5, [8, 8, 1])
    scheduler.submit(newcomer)
    found |= bench.finish(scheduler, params)
    found = {place: each for place, each in found.items() if place[0] != 2}
    bench.assert_same(found, bench.expected(params, kept, newcomer))


def test_cancelling_everything_leaves_an_idle_scheduler(bench, random_params):
    scheduler = bench.scheduler(bench.request(1, PROMPT), bench.request(2, PROMPT))
    scheduler.step(random_params(0), version=0)
    scheduler.cancel(1)
    scheduler.cancel(2)
    assert not scheduler.busy and scheduler.free_slots == 4
    assert scheduler.step(random_params(0), version=0) == []
    assert scheduler.cancel(99) == 0  # unknown: nothing to do


def test_a_number_used_again_brings_its_own_prompt(bench, random_params):
    params = random_params(0)
    scheduler = bench.scheduler(bench.request(1, PROMPT, num_samples=6))
    scheduler.step(params, version=0)  # four of six placed, the prompt kept
    scheduler.cancel(1)
    again = bench.request(1, [12, 3, 3], num_samples=6)
    scheduler.submit(again)
    bench.assert_same(bench.finish(scheduler, params), bench.expected(params, again))


def test_the_rest_of_a_group_starts_from_the_newest_weights(bench, random_params):
    old, new = random_params(0), random_params(1)
    request = bench.request(1, PROMPT, num_samples=8)
    scheduler = bench.scheduler(request)
    first = scheduler.step(old, version=5)
    found = bench.finish(scheduler, new, version=6)
    from_new = {
        place: each for place, each in found.items() if (each.versions == 6).all()
    }
    assert {place[1] for place in from_new} >= {4, 5, 6, 7} - {e.sample for e in first}
    expected = bench.expected(new, request)
    bench.assert_same(from_new, {place: expected[place] for place in from_new})
    for each in found.values():
        # Those of the first four hold the old version first and the new one last.
        assert each.versions.tolist() == sorted(each.versions.tolist())
        assert set(each.versions.tolist()) <= {5, 6}


def test_completions_own_their_arrays(bench, random_params):
    request = bench.request(7, PROMPT)
    found = bench.complete(random_params(0), request)
    copies = {place: each.tokens.copy() for place, each in found.items()}
    bench.complete(random_params(1), bench.request(8, [5, 5]))
    for place, each in found.items():
        np.testing.assert_array_equal(each.tokens, copies[place])
        assert each.logprobs.dtype == np.float32 and each.versions.dtype == np.int32
        assert len(each.tokens) == len(each.mask) == len(each.logprobs)
