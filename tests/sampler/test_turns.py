"""Completions of several turns, with tokens appended between them that nobody drew.

Token u is letter u; where a policy counts, u + 1 follows u, and 3 and 11 are EOS.
"""

import dataclasses

import numpy as np
import pytest
from small_detokenizer import LETTERS

from scalerl_jax.sampler.reference import ReferenceSampler

MOST_TURNS = 3


def one_turn(sampler, params, version=0):
    """Step until nothing is left; the only completion of that."""
    found = []
    sampler.load(params, version)
    while sampler.busy:
        found += sampler.step()
    (completion,) = found
    return completion


@pytest.fixture
def counted(any_bench, counting_params):
    """A sampler, its request and its first turn: 9, 10 and EOS after 4, 8."""
    request = any_bench.request(7, [4, 8], num_samples=2, limits=None)
    sampler = any_bench.scheduler()
    alone = any_bench.request(7, [4, 8], num_samples=1, limits=None)
    sampler.submit(alone)
    turn = one_turn(sampler, counting_params)
    assert turn.tokens.tolist() == [9, 10, 11]
    return any_bench, sampler, request, turn


def test_a_turn_goes_on_behind_what_is_appended(counted, counting_params):
    bench, sampler, request, turn = counted
    bench.assert_idle(sampler)  # between two turns nothing is held
    sampler.resume(request, turn, np.array([3, 5]))
    assert sampler.free_slots == 3
    second = one_turn(sampler, counting_params, version=4)
    assert second.tokens.tolist() == [9, 10, 11, 3, 5, 6, 7, 8, 9, 10, 11]
    assert second.mask.tolist() == [True] * 3 + [False] * 2 + [True] * 6
    assert second.versions.tolist() == [0] * 5 + [4] * 6
    np.testing.assert_allclose(second.logprobs, 0.0, atol=1e-6)
    assert not (second.cut_off or second.interrupted or second.stopped)
    assert (second.request_id, second.sample) == (7, 0)
    sampler.resume(request, second, np.array([12] * 5))
    third = one_turn(sampler, counting_params, version=4)
    assert third.tokens.tolist() == [*second.tokens, *[12] * 5, 0, 1]  # 18 are the most
    assert third.cut_off
    bench.assert_idle(sampler)
    assert sampler.stats.generated_tokens == 3 + 6 + 2 + sampler.stats.wasted_tokens


@pytest.mark.parametrize("limit", [3, 4, 5])
def test_an_interruption_within_what_is_appended_comes_behind_it(
    any_bench, counting_params, limit
):
    """So does the version that is loaded while it is appended."""
    request = any_bench.request(7, [4, 8], num_samples=1, limits=(limit, limit))
    sampler = any_bench.scheduler(request)
    turn = one_turn(sampler, counting_params)
    assert turn.tokens.tolist() == [9, 10, 11] and not turn.interrupted
    sampler.resume(request, turn, np.array([3, 5]))
    second = one_turn(sampler, counting_params, version=4)
    phrase = list(any_bench.settings.phrase)
    assert second.tokens.tolist() == [9, 10, 11, 3, 5, *phrase, 6, 7, 8, 9, 10, 11]
    assert second.mask.tolist() == [True] * 3 + [False] * 5 + [True] * 6
    assert second.versions.tolist() == [0] * 5 + [4] * 9
    assert second.interrupted and not second.cut_off
    # It comes once.
    sampler.resume(request, second, np.array([3]))
    third = one_turn(sampler, counting_params, version=4)
    assert third.tokens.tolist()[14:] == [3, 4, 5, 6]  # 18 are the most
    any_bench.assert_idle(sampler)


def test_what_leaves_nothing_to_sample_is_refused(counted):
    bench, sampler, request, turn = counted
    with pytest.raises(ValueError, match="3 tokens and 15 appended .* may have 18"):
        sampler.resume(request, turn, np.zeros(15, np.int32))
    with pytest.raises(ValueError, match="appended ids from 2 to 13; .* 0 to 12"):
        sampler.resume(request, turn, np.array([2, 13]))
    bench.assert_idle(sampler)


def test_a_cancelled_turn_loses_what_was_sampled_since(counted, talkative_params):
    bench, sampler, request, turn = counted
    sampler.resume(request, turn, np.array([1, 2]))
    assert sampler.cancel(7) == 0
    heard = []
    listening = bench.request(
        7, [4, 8], limits=None, listener=lambda sample, tokens, _: heard.extend(tokens)
    )
    sampler.resume(listening, turn, np.array([1, 2]))
    sampler.load(talkative_params(0), 1)
    assert sampler.step() + sampler.step() == [] and heard
    assert sampler.cancel(7) == len(heard)
    assert sampler.step() == []
    bench.assert_idle(sampler)


def test_completions_begin_with_what_nobody_draws(any_bench, counting_params):
    """Samples that begin alike are prefilled together, and others by themselves."""
    openings = tuple(np.array(each, np.int32) for each in ([5, 6], [12], [5, 6], []))
    request = any_bench.request(7, [4, 8], num_samples=4, limits=None)
    samples = dataclasses.replace(request.samples, openings=openings)
    request = dataclasses.replace(request, samples=samples)
    sampler = any_bench.scheduler()
    sampler.load(counting_params, 0)
    sampler.submit(request)  # the params of its first draw come later
    assert sampler.free_slots == 0
    found = any_bench.finish(sampler, counting_params, version=4)
    any_bench.assert_idle(sampler)
    drawn = [[7, 8, 9, 10, 11], [0, 1, 2, 3], [7, 8, 9, 10, 11], [9, 10, 11]]
    for sample, (opening, own) in enumerate(zip(openings, drawn, strict=True)):
        each = found[7, sample]
        assert each.tokens.tolist() == [*opening.tolist(), *own]
        assert each.mask.tolist() == [False] * len(opening) + [True] * len(own)
        assert each.versions.tolist() == [4] * len(each.tokens)
        assert not (each.cut_off or each.interrupted)
        np.testing.assert_allclose(each.logprobs, 0.0, atol=1e-6)
    stats = sampler.stats
    alike = len([4, 8, 5]) + len([4, 8]) + len([4])
    assert stats.prefilled_tokens in (alike, 0)  # 0: the slow one has no cache
    assert stats.generated_tokens == sum(map(len, drawn)) + stats.wasted_tokens
    # A turn goes on behind it as behind any other.
    sampler.resume(request, found[7, 1], np.array([5], np.int32))
    second = one_turn(sampler, counting_params, version=5)
    assert second.tokens.tolist() == [12, 0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert second.versions.tolist() == [4] * 6 + [5] * 6
    sampler.submit(request)
    assert sampler.cancel(7) == 0  # nothing of it was drawn
    long = dataclasses.replace(
        samples, openings=(np.zeros(18, np.int32), *openings[1:])
    )
    with pytest.raises(ValueError, match="18 appended ones leave none to sample"):
        sampler.submit(dataclasses.replace(request, samples=long))
    any_bench.assert_idle(sampler)


class Episodes:
    """Episodes whose tools answer after a few steps, with tokens known beforehand."""

    def __init__(self, sampler, requests, params):
        self.sampler, self.params = sampler, params
        self.requests = {each.request_id: each for each in requests}
        self.turns, self.ended, self.appended = {}, {}, {}
        self.working = []  # (step at which the tool answers, completion)
        self.steps = 0
        for each in requests:
            sampler.submit(each)

    def run(self, versions):
        """Completions by (request, sample), each of up to three turns."""
        while self.sampler.busy or self.working:
            version = versions[min(self.steps, len(versions) - 1)]
            self.sampler.load(self.params(version), version)
            for each in self.sampler.step():
                self.take(each)
            self.steps += 1
            for due, each in list(self.working):
                if due <= self.steps:
                    self.working.remove((due, each))
                    request = self.requests[each.request_id]
                    self.sampler.resume(request, each, self.answer(each))
        return self.ended

    def answer(self, each):
        """What a tool says to a turn, whatever else happens."""
        place = each.request_id, each.sample
        rng = np.random.default_rng([*place, self.turns[place]])
        tokens = rng.integers(0, 13, rng.integers(1, 5))
        self.appended[place] = self.appended.get(place, 0) + len(tokens)
        return tokens

    def take(self, each):
        place = each.request_id, each.sample
        self.turns[place] = self.turns.get(place, 0) + 1
        room = len(each.tokens) + 4 < 18
        if each.cut_off or not room or self.turns[place] == MOST_TURNS:
            assert place not in self.ended
            self.ended[place] = each
        else:
            wait = (7 * each.request_id + each.sample) % 4
            self.working.append((self.steps + wait, each))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_episodes_are_those_of_the_slow_sampler_and_of_the_whole_sequence(
    any_bench, talkative_params, seed
):
    bench, params = any_bench, talkative_params(seed)
    rng, heard = np.random.default_rng(seed), {}

    def listen(number):
        def listener(sample, tokens, logprobs):
            heard.setdefault((number, sample), []).extend(logprobs.tolist())

        return listener

    requests = [
        bench.request(
            number,
            rng.integers(0, 13, rng.integers(1, 21)),
            num_samples=2,
            limits=(2, 16) if number % 2 else None,
            stop=("a", "gg", "c"),
            temperature=0.7 + 0.3 * (number % 3),
            listener=listen(number),
        )
        for number in range(5)
    ]
    sampler = bench.scheduler(detokenizer=LETTERS)
    episodes = Episodes(sampler, requests, lambda _: params)
    found = episodes.run([0])
    assert len(found) == 10
    bench.assert_idle(sampler)

    assert sum(count == MOST_TURNS for count in episodes.turns.values()) > 2

    # No token is drawn twice, and none that is kept is drawn unheard.
    own = {
        place: len(each.tokens) - episodes.appended.get(place, 0)
        for place, each in found.items()
    }
    assert {place: len(logprobs) for place, logprobs in heard.items()} == own
    stats = sampler.stats
    assert stats.generated_tokens == sum(own.values()) + stats.wasted_tokens

    for place, each in found.items():  # each token again, from all before it
        request = requests[place[0]]
        tokens, logprobs = bench.replay(request, each, {0: params})
        assert each.tokens.tolist() == tokens
        np.testing.assert_allclose(each.logprobs, logprobs, atol=3e-5)

    alone = {}
    for each in requests:
        slow = ReferenceSampler(bench.settings, detokenizer=LETTERS)
        alone |= Episodes(slow, [each], lambda _: params).run([0])
    bench.assert_same(found, alone)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_turns_at_other_versions_see_the_weights_of_their_own(
    any_bench, talkative_params, mode
):
    """Other weights every third step; a turn goes on with those of its resumption."""
    bench, of_version = any_bench, [talkative_params(n) for n in range(3)]
    requests = [
        bench.request(
            number, [4, 7, 4, 7, 4, 7, number], num_samples=2, limits=None, stop=("a",)
        )
        for number in range(4)
    ]
    sampler = bench.scheduler(detokenizer=LETTERS, kv_on_update=mode)
    episodes = Episodes(sampler, requests, lambda version: of_version[version % 3])
    found = episodes.run([step // 3 for step in range(600)])
    bench.assert_idle(sampler)
    turns = [each for each in found.values() if len(set(each.versions.tolist())) > 1]
    assert len(found) == 8 and len(turns) > 3
    for each in found.values():
        assert (np.diff(each.versions) >= 0).all()
    if mode == "recompute":
        params = {version: of_version[version % 3] for version in range(200)}
        for place, each in found.items():
            tokens, logprobs = bench.replay(requests[place[0]], each, params)
            assert each.tokens.tolist() == tokens
            np.testing.assert_allclose(each.logprobs, logprobs, atol=5e-5)
