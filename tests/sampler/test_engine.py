"""The engine against the slow sampler, and slots that must not see each other."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_detokenizer import PIECES, detokenizer_of

from scalerl_jax.generation.evaluation import Completing
from scalerl_jax.model.quantized import MATRICES, quantize
from scalerl_jax.model.transformer import unstack_layers
from scalerl_jax.sampler.decoding import NEVER, empty_rows
from scalerl_jax.sampler.lowering import page_bytes
from scalerl_jax.sampler.pages import Prefix
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.reference import next_token_logits
from scalerl_jax.sampler.requests import Samples
from scalerl_jax.sampler.scheduler import fill_chunk
from scalerl_jax.sampler.warming import warm_up
from scalerl_jax.types import Prompt

RNG = np.random.default_rng(3)
# One token, whole and broken pages, more than a chunk, and the limit of 20.
PROMPTS = [RNG.integers(0, 13, length) for length in (1, 5, 16, 17, 20)]
# Each filter alone, all of them, and none; temperatures above and below 1.
MIXED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.6, "min_p": 0.05},
    {"top_k": 2},
    {"top_p": 0.6},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.3, "top_p": 0.95},
]


def requests_of(bench, **options):
    return [
        bench.request(number, prompt, **options)
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["bench", "paged_bench", "tight_bench"])
def test_the_engine_draws_the_tokens_of_the_slow_sampler(
    name, random_params, seed, request
):
    bench = request.getfixturevalue(name)
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


@pytest.mark.parametrize("name", ["bench", "paged_bench", "tight_bench"])
def test_a_thinking_is_interrupted_where_its_text_has_no_end(
    name, talkative_params, request
):
    bench, spelled = request.getfixturevalue(name), detokenizer_of(PIECES)
    requests = requests_of(bench, num_samples=9, limits=(6, 12))
    scheduler = bench.scheduler(*requests)
    found = bench.finish(scheduler, talkative_params(0))
    suspended = scheduler.stats.suspended
    assert (suspended > 0) == (name != "bench")
    ended = 0
    for (number, sample), each in found.items():
        limit = int(requests[number].samples.thinking_limits[sample])
        if len(each.tokens) > limit:
            own = "</t>" in spelled.text(each.tokens[:limit])
            assert each.interrupted == (not own)
            ended += own
    assert ended > 4
    assert sum(each.interrupted for each in found.values()) > 4


def test_an_engine_without_a_phrase_interrupts_nothing(make_bench, random_params):
    bench = make_bench(phrase=(), end_of_thinking=None, slots=2)
    requests = requests_of(
        bench, limits=(0, 3), temperature=0.7, top_k=6, top_p=0.9, min_p=0.01
    )
    params = random_params(0)
    found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))
    assert all(each.mask.all() for each in found.values())


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_every_request_has_its_own_distribution(name, random_params, request):
    bench, params = request.getfixturevalue(name), random_params(0)
    # One sample each: four distributions in every call.
    requests = [
        bench.request(number, PROMPTS[number % 5], num_samples=1, limits=None, **each)
        for number, each in enumerate(MIXED)
    ]
    found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))
    alone = [bench.complete(params, each) for each in requests]
    for each in alone:
        bench.assert_same(found, found | each)
    plain = {
        (number, 0): bench.complete(
            params,
            bench.request(number, PROMPTS[number % 5], num_samples=1, limits=None),
        )[number, 0]
        for number in range(len(MIXED))
    }
    differ = [
        found[place].tokens.tolist() != each.tokens.tolist()
        for place, each in plain.items()
    ]
    assert sum(differ) >= 4  # the filters do something here


def float64_logprobs(bench, params, request, each, *, temperature):
    """Of the completion's tokens, all logits over a temperature."""
    found = []
    for place, token in enumerate(each.tokens):
        seen = [*request.tokens.tolist(), *each.tokens[:place].tolist()]
        logits = np.asarray(next_token_logits(params, bench.settings, seen), float)
        logits /= temperature
        found.append(logits[token] - np.log(np.exp(logits).sum()))
    return np.array(found)


def test_the_likeliest_token_has_logprob_0_and_its_probability_beside(
    bench, random_params
):
    params = random_params(0)
    request = bench.request(1, PROMPTS[1], limits=None, temperature=0.0)
    found = bench.complete(params, request)
    tokens = [each.tokens.tolist() for each in found.values()]
    assert tokens[0] == tokens[1] == tokens[2]  # whatever the keys
    each = found[1, 0]
    for place, token in enumerate(each.tokens):
        seen = [*request.tokens.tolist(), *each.tokens[:place].tolist()]
        logits = np.asarray(next_token_logits(params, bench.settings, seen))
        assert token == logits.argmax()
    assert (each.logprobs == 0.0).all()
    expected = float64_logprobs(bench, params, request, each, temperature=1.0)
    np.testing.assert_allclose(each.full_logprobs, expected, atol=2e-5)
    assert expected.min() < -0.1


def test_the_temperature_counts_in_both_logprobs(bench, random_params):
    params = random_params(0)
    plain = bench.request(1, PROMPTS[1], limits=None, temperature=0.6)
    each = bench.complete(params, plain)[1, 0]
    expected = float64_logprobs(bench, params, plain, each, temperature=0.6)
    np.testing.assert_allclose(each.logprobs, expected, atol=2e-5)
    np.testing.assert_allclose(each.full_logprobs, expected, atol=2e-5)
    filtered = bench.request(1, PROMPTS[1], limits=None, temperature=0.6, top_k=3)
    each = bench.complete(params, filtered)[1, 0]
    expected = float64_logprobs(bench, params, filtered, each, temperature=0.6)
    np.testing.assert_allclose(each.full_logprobs, expected, atol=2e-5)
    assert (each.logprobs > expected + 1e-3).any()  # three share the probability


def test_the_likeliest_tokens_are_reported_without_the_filters(
    tight_bench, random_params
):
    bench, params = tight_bench, random_params(0)
    request = bench.request(
        1, PROMPTS[1], num_samples=1, limits=(2, 2), temperature=0.5, top_k=1
    )
    each = bench.complete(params, request)[1, 0]
    for place in range(len(each.tokens)):
        seen = [*request.tokens.tolist(), *each.tokens[:place].tolist()]
        logits = np.asarray(next_token_logits(params, bench.settings, seen), float)
        logprobs = logits / 0.5 - np.log(np.exp(logits / 0.5).sum())
        best = np.argsort(-logprobs)[:2]
        assert each.top_tokens[place].tolist() == best.tolist()
        np.testing.assert_allclose(each.top_logprobs[place], logprobs[best], atol=5e-5)
    assert len(each.tokens) > 5 and each.interrupted


def test_every_sample_has_its_own_limit(bench, random_params):
    params = random_params(0)
    limits = [1, 18, 5, 4, 8]
    request = bench.request(2, PROMPTS[2], num_samples=5, max_tokens=limits)
    found = bench.complete(params, request)
    bench.assert_same(found, bench.expected(params, request))
    longer = bench.complete(params, bench.request(2, PROMPTS[2], num_samples=5))
    for (_, sample), each in found.items():
        whole = longer[2, sample]
        assert each.tokens.tolist() == whole.tokens[: limits[sample]].tolist()
        ended = len(whole.tokens) <= limits[sample] and not whole.cut_off
        assert each.cut_off == (not ended)
    assert sum(each.cut_off for each in found.values()) >= 3


@pytest.mark.slow
def test_two_devices_draw_the_tokens_of_one(bench, make_bench, random_params):
    pair = make_bench(devices=jax.devices()[6:])
    requests = requests_of(bench)[:3]
    params = random_params(1)
    found = pair.complete(params, *requests)
    bench.assert_same(found, bench.complete(params, *requests))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_integers_for_weights_draw_the_tokens_of_the_rounded_weights(
    devices, bench, make_bench, random_params
):
    integers = make_bench(weights_dtype="int8", devices=jax.devices()[:devices])
    params, requests = random_params(1), requests_of(bench)[:3]

    @jax.vmap
    def rounded(weights):
        found = quantize(weights, dtype=jnp.float32)
        return found.values.astype(jnp.float32) * found.scale

    layers = {
        name: rounded(stack) if name in MATRICES else stack
        for name, stack in params["layers"].items()
    }
    found = integers.complete(params, *requests)
    integers.assert_same(found, bench.expected(params | {"layers": layers}, *requests))
    near = bench.expected(params, *requests)
    off = [
        abs(each.full_logprobs[0] - near[place].full_logprobs[0])
        for place, each in found.items()
    ]
    assert 1e-4 < np.median(off) < 0.2


def test_the_padding_of_a_chunk_is_not_seen(bench, ladder_bench, random_params):
    params, requests = random_params(1), requests_of(bench, max_tokens=18)
    # Chunks of 16 tokens and of 64: other padding, the same completions.
    bench.assert_same(
        ladder_bench.complete(params, *requests), bench.complete(params, *requests)
    )


def test_long_prompts_pass_through_many_chunks(make_bench, random_params):
    bench = make_bench(
        max_prompt_tokens=50,
        max_completion_tokens=6,
        prefill_tokens=7,
        page_size=5,
        slots=3,
        attention="paged",
    )
    rng = np.random.default_rng(0)
    requests = [
        bench.request(number, rng.integers(0, 13, length), num_samples=2)
        for number, length in enumerate((50, 8, 9, 49, 36, 3, 2))
    ]
    params = random_params(2)
    scheduler = bench.scheduler(*requests)
    found = bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, *requests))
    tokens = sum(len(each.tokens) - 1 for each in requests)
    assert scheduler.stats.prefilled_tokens == tokens == 150
    assert scheduler.stats.chunks >= 150 / 7


# -- the verbs by themselves ----------------------------------------------------------

PAGES = 3  # of each slot below: slot s has those from 3 s


def pages_of(slot):
    return np.arange(PAGES * slot, PAGES * (slot + 1), dtype=np.int32)


def rows_of(bench, request):
    """A row for each sample of a request."""
    count = request.num_samples
    rows = jax.tree.map(np.copy, empty_rows(bench.settings, count))
    rows.tokens[:] = request.tokens[-1]
    rows.positions[:] = len(request.tokens) - 1
    rows.prompt_lengths[:] = len(request.tokens)
    rows.max_tokens[:] = bench.settings.max_completion_tokens
    rows.active[:] = True
    rows.keys[:] = request.samples.keys
    rows.thinking_limits[:] = request.samples.thinking_limits
    return rows


def inserted(bench, params, request, slots, state=None):
    """A state with the samples of a request in some slots, each with its own pages."""
    engine = bench.engine
    state = engine.init_decode_state() if state is None else state
    prefixes = [
        Prefix(tokens=request.tokens[:-1], pages=pages_of(slot).tolist(), version=0)
        for slot in slots
        if slot < bench.settings.slots
    ]
    while (chunk := fill_chunk(engine, prefixes)) is not None:
        state, _ = engine.prefill(params, state, chunk)
    nowhere = np.full(len(slots), bench.settings.num_pages, np.int32)
    return engine.insert(
        state,
        slots=np.array(slots, np.int32),
        rows=rows_of(bench, request),
        copy_from=nowhere,
        copy_to=nowhere,
    )


def generate(bench, params, state, slots):
    table = np.zeros((4, bench.settings.pages_per_slot), np.int32)
    for row, slot in enumerate(slots):
        if slot < 4:
            table[row, :PAGES] = pages_of(slot)
    return bench.engine.generate(
        params, state, slots=np.array(slots, np.int32), table=table
    )


def of_slot(state, slot):
    """Everything that a state holds of one slot; a copy, for states are donated."""
    return jax.tree.map(
        np.array,
        (
            jax.tree.map(lambda leaf: leaf[slot], state.rows),
            jax.tree.map(lambda leaf: leaf[pages_of(slot)], state.pages),
        ),
    )


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_an_idle_slot_changes_nothing_and_is_not_changed(name, random_params, request):
    bench, params = request.getfixturevalue(name), random_params(0)
    prompt = bench.request(1, PROMPTS[1])
    state = inserted(bench, params, prompt, [0, 1, 3])
    state = bench.engine.free_resource(
        state, slots=np.array([False, True, False, False])
    )
    before = [of_slot(state, slot) for slot in range(4)]
    state, results = generate(bench, params, state, [0, 1, 2, 3])
    assert_equal(of_slot(state, 1), before[1])  # stopped
    assert_equal(of_slot(state, 2), before[2])  # never used
    assert not results.valid[:, 1:3].any() and not results.cut_off[1:3].any()
    assert results.valid[0].tolist() == [True, False, False, True]
    expected = bench.expected(params, prompt)
    for sample, slot in ((0, 0), (2, 3)):
        count = int(results.valid[:, slot].sum())
        tokens = expected[1, sample].tokens[:count]
        assert count > 0 and results.tokens[:count, slot].tolist() == tokens.tolist()


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_a_slot_that_a_call_leaves_out_waits_unchanged(name, random_params, request):
    bench, params = request.getfixturevalue(name), random_params(0)
    prompt = bench.request(1, PROMPTS[1])
    expected = bench.expected(params, prompt)
    state = inserted(bench, params, prompt, [0, 1, 3])
    before = [of_slot(state, slot) for slot in range(4)]
    # Row 0 is slot 3; a number past the last slot, 3, must not run slot 3 again.
    state, results = generate(bench, params, state, [3, 4, 0, 4])
    for slot in (1, 2):
        assert_equal(of_slot(state, slot), before[slot])
    assert results.valid[0].tolist() == [True, False, True, False]
    for column, sample in ((0, 2), (2, 0)):
        count = int(results.valid[:, column].sum())
        assert (
            results.tokens[:count, column].tolist()
            == expected[1, sample].tokens[:count].tolist()
        )
    _, results = generate(bench, params, state, [4, 4, 4, 1])
    count = int(results.valid[:, 3].sum())
    assert results.tokens[:count, 3].tolist() == expected[1, 1].tokens[:count].tolist()
    assert count > 0 and not results.valid[:, :3].any()


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_a_call_without_a_sequence_does_nothing(name, random_params, request):
    bench = request.getfixturevalue(name)
    state = bench.engine.init_decode_state()
    before = [of_slot(state, slot) for slot in range(4)]
    state, results = generate(bench, random_params(0), state, [0, 1, 2, 3])
    for slot in range(4):
        assert_equal(of_slot(state, slot), before[slot])
    assert not results.valid.any() and not results.active.any()


def test_a_slot_past_the_last_one_inserts_nothing(bench, random_params):
    params, request = random_params(0), bench.request(1, PROMPTS[1])
    empty = bench.engine.init_decode_state()
    untouched = [of_slot(empty, slot) for slot in range(4)]
    state = inserted(bench, params, request, [4, 4, 2])
    assert state.rows.active.tolist() == [False, False, True, False]
    for slot in (0, 1, 3):
        assert_equal(of_slot(state, slot), untouched[slot])
    _, results = generate(bench, params, state, [0, 1, 2, 3])
    third = bench.expected(params, request)[1, 2].tokens
    count = int(results.valid[:, 2].sum())
    assert results.tokens[:count, 2].tolist() == third[:count].tolist()


def test_pages_are_copied_as_they_were_before_the_insert(bench, random_params):
    params, request = random_params(0), bench.request(1, PROMPTS[1])
    state = inserted(bench, params, request, [0, 1, 3])
    first, second = of_slot(state, 0)[1], of_slot(state, 1)[1]
    # Page 3 (slot 1) goes to page 6 while page 0 takes its place.
    state = bench.engine.insert(
        state,
        slots=np.array([4, 4], np.int32),
        rows=jax.tree.map(lambda leaf: leaf[:2], rows_of(bench, request)),
        copy_from=np.array([3, 0], np.int32),
        copy_to=np.array([6, 3], np.int32),
    )
    take = lambda pages: jax.tree.map(lambda leaf: leaf[0], pages)  # noqa: E731
    assert_equal(take(of_slot(state, 2)[1]), take(second))
    assert_equal(take(of_slot(state, 1)[1]), take(first))
    assert_equal(take(of_slot(state, 0)[1]), take(first))


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
@pytest.mark.parametrize("foreign", [1e4, -1e30, np.nan])
def test_what_was_in_a_page_before_is_not_seen(name, random_params, foreign, request):
    bench, params = request.getfixturevalue(name), random_params(0)
    prompt = bench.request(1, PROMPTS[1])
    state = bench.engine.init_decode_state()

    def fill(layer):
        # A value is always a number, see `Pages.write`; a key need not be.
        values = np.nan_to_num(foreign, nan=-1e30)
        return layer.replace(
            keys=jnp.full_like(layer.keys, foreign),
            values=jnp.full_like(layer.values, values),
        )

    state = state.replace(pages=tuple(map(fill, state.pages)))
    state = inserted(bench, params, prompt, [3, 0, 2], state)
    state, first = generate(bench, params, state, [0, 1, 2, 3])
    _, second = generate(bench, params, state, [0, 1, 2, 3])
    tokens, valid, logprobs = (
        np.concatenate([getattr(first, name), getattr(second, name)])
        for name in ("tokens", "valid", "logprobs")
    )
    expected = bench.expected(params, prompt)
    for sample, slot in ((0, 3), (1, 0), (2, 2)):
        each, count = expected[1, sample], int(valid[:, slot].sum())
        assert count == min(8, len(each.tokens))
        assert tokens[:count, slot].tolist() == each.tokens[:count].tolist()
        np.testing.assert_allclose(
            logprobs[:count, slot], each.logprobs[:count], atol=2e-5
        )


@pytest.mark.parametrize("name", ["bench", "paged_bench", "tight_bench"])
def test_what_was_in_a_slot_before_is_not_seen(name, random_params, request):
    bench, params = request.getfixturevalue(name), random_params(1)
    long, short = bench.request(4, PROMPTS[4]), bench.request(0, PROMPTS[0])
    scheduler = bench.scheduler(long)
    bench.finish(scheduler, random_params(2))
    scheduler.submit(short)  # into slots and pages with 20 foreign tokens and more
    found = bench.finish(scheduler, params, version=1)
    bench.assert_same(found, bench.expected(params, short))


# -- weights that change on the way ---------------------------------------------------


@pytest.mark.parametrize("name", ["bench", "paged_bench"])
def test_new_weights_in_flight_go_on_with_the_old_cache(name, random_params, request):
    bench = request.getfixturevalue(name)
    old, new = random_params(0), random_params(1)
    updates = (old, new, new, old, new)
    requests = [
        bench.request(number, PROMPTS[number % 5], limits=None)
        for number in range(20, 32)
    ]
    most_tokens, furthest = 0, 0.0
    for one in requests:
        scheduler = bench.scheduler(one)
        found = {}
        for version, params in enumerate(updates):
            for each in bench.step(scheduler, params, version=version):
                found[each.request_id, each.sample] = each
        found |= bench.finish(scheduler, new, version=4)
        assert len(found) == 3 and scheduler.stats.suspended == 0
        for (_, sample), each in found.items():
            count = len(each.tokens)
            # Four tokens per call.
            assert each.versions.tolist() == [place // 4 for place in range(count)]
            params_of_token = [updates[version] for version in each.versions]
            tokens, logprobs = bench.dense_replay(
                one, sample, params_of_token, warm_up=old
            )
            assert each.tokens.tolist() == tokens
            np.testing.assert_allclose(each.logprobs, logprobs, atol=2e-5)
            most_tokens = max(most_tokens, count)
            _, others = bench.dense_replay(one, sample, params_of_token, warm_up=new)
            furthest = max(furthest, np.abs(np.subtract(logprobs, others)).max())
    # Long enough for all updates; and with other keys and values it would be seen.
    assert most_tokens > 12 and furthest > 0.1


def test_tokens_before_an_update_are_those_without_it(bench, random_params):
    old, new = random_params(0), random_params(1)
    request = bench.request(2, PROMPTS[2])
    without = bench.complete(old, request)
    scheduler = bench.scheduler(request)
    found = {each.sample: each for each in bench.step(scheduler, old)}
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


# -- programs -------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.usefixtures("no_program_cache")
def test_nothing_is_compiled_after_the_warm_up(ladder_bench, random_params):
    bench = ladder_bench
    rng = np.random.default_rng(1)
    params = [random_params(seed) for seed in range(2)]
    warm_up(PagePool(bench.engine), params[0])
    traces = bench.engine.traces
    assert traces == bench.engine.num_programs
    # Keys are made by another program, whose shape is the group's.
    requests = [
        bench.request(
            number,
            rng.integers(0, 13, rng.integers(1, 61)),
            num_samples=1 + number % 5,
            limits=(4, 30),
            **MIXED[number % len(MIXED)],
        )
        for number in range(24)
    ]
    with compilations() as compiled:
        for mode in ("keep", "recompute"):
            scheduler, seen = bench.scheduler(kv_on_update=mode), 0
            for number, request in enumerate(requests):
                scheduler.submit(request)
                version = number // 4
                seen += len(bench.step(scheduler, params[version % 2], version=version))
                if number % 6 == 5:
                    scheduler.cancel(number - 2)
            seen += len(bench.finish(scheduler, params[0], version=9))
            assert seen > 50 and scheduler.stats.suspended > 3
            bench.assert_idle(scheduler)
    assert bench.engine.traces == traces
    assert compiled == []
    with compilations() as compiled:  # the counter does count
        jax.jit(lambda x: x + 12345)(1)
    assert len(compiled) > 0


def test_params_of_a_layer_each_are_taken_as_they_are(bench, random_params):
    params, request = random_params(0), bench.request(2, PROMPTS[2])
    layered = unstack_layers(params, bench.settings.arch)
    assert bench.engine.load_params(layered) is layered
    bench.assert_same(bench.complete(layered, request), bench.expected(params, request))
    wrong = dict(layered["layers"][1]) | {"query": layered["layers"][1]["key"]}
    with pytest.raises(ValueError, match="parameter layers/1/query is"):
        bench.engine.load_params(layered | {"layers": (layered["layers"][0], wrong)})
    with pytest.raises(ValueError, match="parameter layers/1/.* is missing"):
        bench.engine.load_params(layered | {"layers": layered["layers"][:1]})


def test_a_cache_too_small_for_one_sequence_is_refused(make_bench):
    with pytest.raises(
        ValueError,
        match=r"cache_tokens = 43 .*page_size = 4; .* 44",
    ):
        make_bench(cache_tokens=43)
    with pytest.raises(ValueError, match="choose from .*'gathered', 'paged'"):
        make_bench(attention="page")


def test_a_page_holds_the_keys_and_values_of_its_tokens(bench):
    # 2 layers, k and v, 2 heads of 8 numbers of 4 bytes, 4 tokens.
    assert page_bytes(bench.engine) == 2 * 2 * 2 * 8 * 4 * 4
    state = bench.engine.init_decode_state()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.pages))
    assert held == page_bytes(bench.engine) * bench.settings.num_pages


def test_a_loop_over_prompts_names_the_one_that_failed(
    bench, counting_params, random_params
):
    # From 1 it says 2 and 3, which is EOS; 12 is no number.
    broken = counting_params["embedding"].at[12].set(jnp.nan)
    prompts = [
        Prompt(
            prompt_id=number,
            epoch=0,
            task="",
            text=f"prompt {number}",
            tokens=np.array(tokens, np.int32),
            reference={},
        )
        for number, tokens in enumerate([[1, 4], [2, 12]])
    ]

    def run(params):
        completing = Completing(
            make_sampler=bench.scheduler,
            prompts=prompts,
            make_samples=lambda prompt: Samples(
                keys=bench.request(prompt.prompt_id, [1]).samples.keys,
                thinking_limits=np.full(3, NEVER, np.int32),
            ),
            sampling=bench.request(0, [1], temperature=0.5).sampling,
        )
        steps = completing.completed(params, version=3)
        return [each for ended in steps for each in ended]

    with pytest.raises(FloatingPointError, match="of prompt 'prompt 1' failed: .*3;"):
        run(counting_params | {"embedding": broken})
    found = {(each.request_id, each.sample): each for each in run(random_params(0))}
    assert all((each.versions == 3).all() for each in found.values())
    requests = [
        bench.request(number, prompt.tokens, limits=None, temperature=0.5)
        for number, prompt in enumerate(prompts)
    ]
    bench.assert_same(found, bench.expected(random_params(0), *requests))
