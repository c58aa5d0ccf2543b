"""The engine against the slow sampler, and slots that must not see each other."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.transformer import (
    decode_step,
    head_logits,
    head_weights,
    init_cache,
)
from scalerl_jax.sampler.engine import padded_length
from scalerl_jax.sampler.sampling import draw_token, token_logprobs

RNG = np.random.default_rng(3)
# One token, whole and broken buckets, and the limit of 20.
PROMPTS = [RNG.integers(0, 13, length) for length in (1, 5, 16, 17, 20)]


def requests_of(bench, **options):
    return [
        bench.request(number, prompt, **options)
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_engine_draws_the_tokens_of_the_slow_sampler(bench, random_params, seed):
    requests = requests_of(bench)  # 15 samples in 4 slots
    params = random_params(seed)
    found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))


def test_those_completions_end_in_every_way(bench, random_params):
    requests = requests_of(bench)
    found = [
        each
        for seed in range(3)
        for each in bench.complete(random_params(seed), *requests).values()
    ]
    assert any(len(each.tokens) == 1 and not each.cut_off for each in found)
    assert any(each.cut_off for each in found)
    assert any(each.interrupted and not each.cut_off for each in found)
    # A thinking that ends by itself is too rare here: see test_reference.


def test_other_distributions_and_no_interruption(make_bench, random_params):
    bench = make_bench(
        temperature=0.7, top_k=6, top_p=0.9, phrase=(), end_of_thinking=(), slots=2
    )
    requests = requests_of(bench, limits=None)
    params = random_params(0)
    found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))
    assert all(each.mask.all() for each in found.values())


def test_two_devices_draw_the_tokens_of_one(bench, make_bench, random_params):
    pair = make_bench(devices=jax.devices()[6:])
    requests = requests_of(bench)[:3]
    params = random_params(1)
    found = pair.complete(params, *requests)
    bench.assert_same(found, bench.complete(params, *requests))


@pytest.mark.parametrize(
    "length, expected", [(1, 16), (16, 16), (17, 32), (32, 32), (33, 48), (48, 48)]
)
def test_prompts_are_padded_to_powers_of_two_or_the_limit(length, expected):
    assert padded_length(length, longest=48) == expected


def inserted(bench, params, request, slots):
    """A state with a request in some slots of an engine that was empty."""
    engine = bench.engine
    padded = np.zeros(padded_length(len(request.tokens), longest=20), np.int32)
    padded[: len(request.tokens)] = request.tokens
    prefix = engine.prefill(
        params=params, padded_tokens=padded, true_length=len(request.tokens)
    )
    return engine.bulk_insert(
        prefix,
        engine.init_decode_state(),
        slots=np.array(slots),
        samples=request.samples,
    )


def of_slot(state, slot):
    """Everything that a state holds of one slot; a copy, for states are donated."""
    state = state.replace(keys=jax.random.key_data(state.keys))
    return jax.tree.map(lambda leaf: np.array(leaf[slot]), state)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_idle_slot_changes_nothing_and_is_not_changed(bench, random_params):
    params, request = random_params(0), bench.request(1, PROMPTS[1])
    state = inserted(bench, params, request, [0, 1, 3])
    state = bench.engine.free_resource(
        state, slots=np.array([False, True] + [False] * 2)
    )
    before = [of_slot(state, slot) for slot in range(4)]
    state, results = bench.engine.generate(params, state)
    assert_equal(of_slot(state, 1), before[1])  # stopped
    assert_equal(of_slot(state, 2), before[2])  # never used
    assert not results.valid[:, 1:3].any() and not results.cut_off[1:3].any()
    assert results.valid[0].tolist() == [True, False, False, True]
    expected = bench.expected(params, request)
    for sample, slot in ((0, 0), (2, 3)):
        count = int(results.valid[:, slot].sum())
        tokens = expected[1, sample].tokens[:count]
        assert results.tokens[:count, slot].tolist() == tokens.tolist()


def test_a_call_without_a_sequence_does_nothing(bench, random_params):
    state = bench.engine.init_decode_state()
    before = [of_slot(state, slot) for slot in range(4)]
    state, results = bench.engine.generate(random_params(0), state)
    for slot in range(4):
        assert_equal(of_slot(state, slot), before[slot])
    assert not results.valid.any() and not results.active.any()


def test_a_slot_past_the_last_one_inserts_nothing(bench, random_params):
    params, request = random_params(0), bench.request(1, PROMPTS[1])
    empty = bench.engine.init_decode_state()
    untouched = [of_slot(empty, slot) for slot in range(4)]
    state = inserted(bench, params, request, [4, 4, 2])
    assert state.active.tolist() == [False, False, True, False]
    for slot in (0, 1, 3):
        assert_equal(of_slot(state, slot), untouched[slot])
    _, results = bench.engine.generate(params, state)
    third = bench.expected(params, request)[1, 2].tokens
    count = int(results.valid[:, 2].sum())
    assert results.tokens[:count, 2].tolist() == third[:count].tolist()


def test_what_was_in_a_slot_before_is_not_seen(bench, random_params):
    params = random_params(1)
    long, short = bench.request(4, PROMPTS[4]), bench.request(0, PROMPTS[0])
    scheduler = bench.scheduler(long)
    bench.finish(scheduler, random_params(2))
    scheduler.submit(short)  # into slots with 20 foreign tokens and more
    bench.assert_same(bench.finish(scheduler, params), bench.expected(params, short))


@functools.partial(jax.jit, static_argnames="settings")
def decode_alone(params, settings, token, cache, position, key, place):
    hidden, cache = decode_step(
        params,
        settings.arch,
        token[None],
        cache,
        positions=position[None],
        active=jnp.array([True]),
        dtype=settings.dtype,
    )
    logits = head_logits(hidden[0], head_weights(params), float32_head=True)
    logprobs = token_logprobs(logits, temperature=settings.temperature)
    drawn = draw_token(logprobs, key, place)
    return drawn, logprobs[drawn], cache


def replay(settings, request, sample, params_of_token, *, warm_up):
    """Tokens and log-probabilities, one slot, one cache, params chosen per token.

    The prompt goes into the cache token by token with the params `warm_up`.
    """
    cache = init_cache(settings.arch, slots=1, length=40, dtype=settings.dtype)
    key = request.samples.keys[sample]
    for position, token in enumerate(request.tokens[:-1]):
        _, _, cache = decode_alone(warm_up, settings, token, cache, position, key, 0)
    token, tokens, logprobs = request.tokens[-1], [], []
    for place, params in enumerate(params_of_token):
        position = len(request.tokens) - 1 + place
        token, logprob, cache = decode_alone(
            params, settings, token, cache, np.int32(position), key, np.int32(place)
        )
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens, logprobs


def test_new_weights_in_flight_go_on_with_the_old_cache(bench, random_params):
    old, new = random_params(0), random_params(1)
    requests = [
        bench.request(number, PROMPTS[number % 5], limits=None)
        for number in range(20, 32)
    ]
    most_tokens, furthest = 0, 0.0
    for request in requests:
        scheduler = bench.scheduler(request)
        found = {}
        for version, params in enumerate([old, new, new, old, new]):
            for each in scheduler.step(params, version=version):
                found[each.request_id, each.sample] = each
        assert not scheduler.busy
        for (_, sample), each in found.items():
            count = len(each.tokens)
            # Four tokens per call.
            assert each.versions.tolist() == [place // 4 for place in range(count)]
            params_of_token = [(old, new, new, old, new)[v] for v in each.versions]
            tokens, logprobs = replay(
                bench.settings, request, sample, params_of_token, warm_up=old
            )
            assert each.tokens.tolist() == tokens
            np.testing.assert_allclose(each.logprobs, logprobs, atol=2e-5)
            most_tokens = max(most_tokens, count)
            _, others = replay(
                bench.settings, request, sample, params_of_token, warm_up=new
            )
            furthest = max(furthest, np.abs(np.subtract(logprobs, others)).max())
    # Long enough for all updates; and with other keys and values it would be seen.
    assert most_tokens > 12 and furthest > 0.1


def test_tokens_before_an_update_are_those_without_it(bench, random_params):
    old, new = random_params(0), random_params(1)
    request = bench.request(4, PROMPTS[4])
    without = bench.complete(old, request)
    scheduler = bench.scheduler(request)
    found = {each.sample: each for each in scheduler.step(old, version=0)}
    rest = bench.finish(scheduler, new, version=1)
    found |= {sample: each for (_, sample), each in rest.items()}
    changed = False
    for (_, sample), each in without.items():
        count = min(4, len(each.tokens))
        assert found[sample].tokens[:count].tolist() == each.tokens[:count].tolist()
        np.testing.assert_array_equal(
            found[sample].logprobs[:count], each.logprobs[:count]
        )
        changed |= found[sample].tokens.tolist() != each.tokens.tolist()
    assert changed


@contextlib.contextmanager
def compilations():
    """Names of what the compiler was called for; the list fills while it is open."""
    names, listening = [], [True]

    def listen(event, duration, **kwargs):
        if listening[0] and event.endswith("backend_compile_duration"):
            names.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    listening[0] = False  # a listener cannot be taken back


def test_nothing_is_compiled_after_the_warm_up(bench, random_params):
    warm_up = [bench.request(number, PROMPTS[number]) for number in (0, 4)]
    later = [bench.request(number, PROMPTS[number % 5]) for number in range(5, 12)]
    params = [random_params(seed) for seed in range(2)]

    def use(requests):
        scheduler = bench.scheduler(*requests)
        scheduler.step(params[0], version=0)
        scheduler.cancel(requests[0].request_id)
        bench.finish(scheduler, params[1], version=1)

    use(warm_up)
    with compilations() as compiled:
        use(later)
        use(later[::-1])
    assert compiled == []
    with compilations() as compiled:  # the counter does count
        jax.jit(lambda x: x + 12345)(1)
    assert len(compiled) > 0
