"""Random schedules on few slots and fewer pages, against the slow sampler.

Requests come in groups, some begin like earlier ones, some of them hold a token that is
not a number, some are cancelled, and the weights change on the way.
"""

import os

import numpy as np
import pytest

from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.reference import sample_completion

BROKEN = 12  # the token that is not a number
DISTRIBUTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 1.3, "top_k": 8, "top_p": 0.95},
]
NUM_SEEDS = int(os.environ.get("SCALERL_JAX_SEEDS", "8"))
SEEDS = [
    pytest.param(seed, marks=() if seed < 2 else pytest.mark.slow)
    for seed in range(NUM_SEEDS)
]


class Schedule:
    """What happened on a scheduler, written down by who made it happen."""

    def __init__(self, bench, params, seed, pool=None):
        self.bench, self.params = bench, params
        self.rng = np.random.default_rng(seed)
        mode = ("keep", "recompute")[seed % 2]
        self.recomputed = mode == "recompute"
        self.scheduler = bench.scheduler(kv_on_update=mode, pool=pool)
        self.requests, self.cancelled, self.found = {}, set(), {}
        self.version = int(self.rng.integers(3))
        self.versions = [self.version]
        self.heard = {}

    def run(self, events):
        """Random events, and steps until nothing is left."""
        for _ in range(events):
            self.do_something()
        self.finish()

    def do_something(self):
        """One random event."""
        names = ["submit", "step", "cancel", "update"]
        getattr(self, self.rng.choice(names, p=[0.35, 0.45, 0.08, 0.12]))()

    def finish(self):
        """Steps until nothing is left."""
        steps = 0
        while self.scheduler.busy:
            self.step()
            steps += 1
            assert steps < 1000, "it does not end"

    def submit(self):
        rng, number = self.rng, len(self.requests)
        length = int(rng.choice([1, 2, 4, 5, rng.integers(1, 21), 20]))
        tokens = rng.integers(0, BROKEN, length)
        if number and rng.random() < 0.5:  # it begins like an earlier one
            earlier = self.requests[rng.integers(number)].tokens
            same = min(length, rng.integers(len(earlier) + 1))
            if BROKEN not in earlier[:same] or rng.random() < 0.2:
                tokens[:same] = earlier[:same]
        if rng.random() < 0.15:
            tokens[rng.integers(length)] = BROKEN
        samples = int(rng.choice([1, 2, 3, 6]))
        max_tokens = rng.integers(1, 19, samples) if rng.random() < 0.5 else None

        def listener(sample, new, logprobs):
            self.heard.setdefault((number, sample), []).extend(new.tolist())

        request = self.bench.request(
            number,
            tokens,
            num_samples=samples,
            limits=(0, 12) if rng.random() < 0.4 else None,
            max_tokens=max_tokens,
            listener=listener,
            **DISTRIBUTIONS[rng.integers(len(DISTRIBUTIONS))],
        )
        self.requests[number] = request
        self.scheduler.submit(request)

    def step(self):
        params = self.params(self.version % 3)
        for each in self.bench.step(self.scheduler, params, version=self.version):
            place = each.request_id, each.sample
            assert place not in self.found and each.request_id not in self.cancelled
            self.found[place] = each
        self.check_pages()

    def cancel(self):
        if self.requests:
            number = int(self.rng.integers(len(self.requests)))
            done = sum(place[0] == number for place in self.found)
            lost = self.scheduler.cancel(number)
            if done < self.requests[number].num_samples:
                self.cancelled.add(number)
            else:
                assert lost == 0

    def update(self):
        self.version += int(self.rng.integers(1, 3))
        self.versions.append(self.version)

    def check_pages(self):
        """Every page in use has an owner, and every sample in a slot its own end."""
        scheduler = self.scheduler
        running = list(scheduler._running.values())
        owners = [sample.pages for sample in running]
        owners += [each.prefix.pages for each in scheduler._waiting if each.prefix]
        owned = {page for pages in owners for page in pages}
        assert scheduler.stats.pages_in_use == len(owned)
        assert len(scheduler._free) + len(running) == self.bench.settings.slots
        for sample in running:
            shared = len(sample.request.tokens) // self.bench.settings.page_size
            if sample.num_tokens:
                shared = len(sample.tokens()) // self.bench.settings.page_size
            last = set(sample.pages[shared:])
            for other in running:
                assert other is sample or not last & set(other.pages)

    def expected(self, each):
        """(tokens, logprobs, whether it fails) of a completion; None: not known."""
        request = self.requests[each.request_id]
        versions = set(each.versions.tolist())
        if len(versions) == 1:
            whole = sample_completion(
                self.params(versions.pop() % 3),
                self.bench.settings,
                request,
                each.sample,
            )
            tokens = whole.tokens.tolist()
            # A token is drawn after none that is no number; one that is forced may be.
            for count in range(len(tokens)):
                seen = [*request.tokens.tolist(), *tokens[:count]]
                assert not (BROKEN in seen and whole.mask[count])
            assert bool(whole.failure) <= (BROKEN in [*request.tokens, *tokens])
            return tokens, whole.logprobs, bool(whole.failure)
        if versions and self.recomputed:
            params = {version: self.params(version % 3) for version in versions}
            return *self.bench.replay(request, each, params), bool(each.failure)
        return None


@pytest.fixture
def by_number(poisoned_params, talkative_params):
    """Three params, in which one token is not a number."""

    def params(number):
        embedding = poisoned_params(number)["embedding"][BROKEN]
        talkative = talkative_params(number)
        return talkative | {
            "embedding": talkative["embedding"].at[BROKEN].set(embedding)
        }

    return [params(number) for number in range(3)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["tight_bench", "paged_bench", "ring_bench"])
def test_any_schedule_gives_the_completions_of_the_slow_sampler(
    name, by_number, seed, request
):
    bench = request.getfixturevalue(name)
    schedule = Schedule(bench, by_number.__getitem__, seed)
    schedule.run(80)
    assert bench.step(schedule.scheduler, by_number[0], version=10**6) == []
    bench.assert_idle(schedule.scheduler)
    check_completions(schedule)


@pytest.mark.parametrize("seed", SEEDS[1:])
@pytest.mark.parametrize("name", ["tight_bench", "ring_bench"])
def test_schedulers_of_one_pool_sample_what_each_would_alone(
    name, by_number, seed, request
):
    """Each has versions of its own; at times, and at the end, only one makes steps."""
    bench = request.getfixturevalue(name)
    pool = PagePool(bench.engine)
    rng = np.random.default_rng(seed)
    schedules = [
        Schedule(bench, by_number.__getitem__, 10 * seed + each, pool)
        for each in range(3)
    ]
    for _ in range(24):
        schedule = schedules[rng.integers(3)]
        for _ in range(rng.integers(1, 9)):
            schedule.do_something()
        for each in schedules:
            each.check_pages()
    for schedule in schedules:
        schedule.finish()
        check_completions(schedule)
        assert schedule.scheduler.stats.pages_in_use == 0
    bench.assert_idle(schedule.scheduler)
    assert sum(each.scheduler.stats.suspended for each in schedules)


def check_completions(schedule):
    """Each is that of the slow sampler, and all that was not cancelled is there."""
    wanted = {
        (number, sample)
        for number, each in schedule.requests.items()
        for sample in range(each.num_samples)
    }
    missing = wanted - schedule.found.keys()
    assert {number for number, _ in missing} <= schedule.cancelled
    assert schedule.found.keys() <= wanted

    known = 0
    for place, each in schedule.found.items():
        versions = each.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) <= set(schedule.versions)
        assert schedule.heard.get(place, []) == each.tokens.tolist()
        limit = schedule.requests[place[0]].samples.max_tokens
        assert len(each.tokens) <= (18 if limit is None else limit[place[1]])
        prompt = schedule.requests[place[0]].tokens.tolist()
        if each.failure:
            assert BROKEN in [*prompt, *each.tokens.tolist()]
        elif each.mask.all():
            assert BROKEN not in [*prompt, *each.tokens.tolist()[:-1]]
        if (theirs := schedule.expected(each)) is None:
            continue
        tokens, logprobs, fails = theirs
        assert each.tokens.tolist() == tokens, place
        assert bool(each.failure) == fails, place
        np.testing.assert_allclose(each.logprobs, logprobs, atol=5e-5)
        known += 1
    assert known > len(schedule.found) / 3
    stats = schedule.scheduler.stats
    kept = sum(len(each.tokens) for each in schedule.found.values())
    assert stats.generated_tokens == kept + stats.wasted_tokens
    assert stats.failed == sum(bool(each.failure) for each in schedule.found.values())
