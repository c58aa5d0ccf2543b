"""The adapter by hand, beside the slow sampler."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from jetstream.engine import engine_api, token_utils
from small_jetstream import (
    SETTINGS,
    expected,
    key_of,
    make_engine,
    make_tokenizer,
    random_params,
)

from scalerl_jax.sampler.jetstream import JetStreamEngine, ResultTokens
from scalerl_jax.sampler.sampling import Sampling

PROMPTS = ([5, 1, 9, 2, 7], [4], [12, 0, 6, 6, 1, 2, 8, 9, 10, 5, 4, 7, 1, 0, 2, 6])


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def params():
    return random_params()


def pad(prompt):
    return np.pad(np.array(prompt, np.int32), (0, 16 - len(prompt)))


def prefill(engine, params, prompt, **options):
    return engine.prefill(
        params=params, padded_tokens=pad(prompt), true_length=len(prompt), **options
    )


class Slots:
    """A decode state, and what has come out of each slot."""

    def __init__(self, engine, params):
        self.engine, self.params = engine, params
        self.state = engine.init_decode_state()
        self.found = {}

    def insert(self, prefix, slot):
        self.state = self.engine.insert(prefix, self.state, slot)
        self.found[slot] = []

    def step(self):
        """One call; results on the host."""
        self.state, results = self.engine.generate(self.params, self.state)
        results = results.convert_to_numpy()
        for slot, found in self.found.items():
            data = results.get_result_at_slot(slot)
            if data.valid.item():
                found.append((data.tokens.item(), results.log_prob[slot].item()))
            assert data.lengths.item() == len(found)
        return results

    def run(self, steps=SETTINGS.max_completion_tokens):
        for _ in range(steps):
            self.step()

    def assert_same(self, slot, completion):
        tokens, logprobs = zip(*self.found[slot], strict=True)
        assert list(tokens) == completion.tokens.tolist()
        np.testing.assert_allclose(logprobs, completion.logprobs, atol=2e-5)


def test_it_is_an_engine_of_jetstream(engine):
    assert isinstance(engine, engine_api.Engine)
    assert not JetStreamEngine.__abstractmethods__
    assert (engine.max_concurrent_decodes, engine.samples_per_slot) == (3, 1)
    assert engine.max_prefill_length == 16
    assert engine.colocated_cpus is None


@pytest.mark.parametrize("name", ["prefill", "insert", "generate", "build_tokenizer"])
def test_it_takes_what_jetstream_passes(name):
    theirs = inspect.signature(getattr(engine_api.Engine, name)).parameters
    ours = inspect.signature(getattr(JetStreamEngine, name)).parameters
    for each in theirs.values():
        assert ours[each.name].kind == each.kind
        assert ours[each.name].default == each.default
    extra = [each for each in ours.values() if each.name not in theirs]
    assert all(each.default is None for each in extra)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_tokens_and_log_probs_are_those_of_the_slow_sampler(params, num_devices):
    engine = make_engine(jax.devices()[:num_devices])
    slots = Slots(engine, engine.load_params(params))
    for slot, prompt in enumerate(PROMPTS):
        slots.insert(prefill(engine, params, prompt), slot)
    slots.run()
    for number, prompt in enumerate(PROMPTS):
        slots.assert_same(number, expected(params, prompt, key_of(number)))


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=3)]
)
def test_a_prompt_has_its_own_key_and_distribution(engine, params, sampling):
    slots = Slots(engine, params)
    key = key_of(99)
    slots.insert(
        prefill(engine, params, PROMPTS[0], key=key, sampling=sampling), slot=1
    )
    slots.run()
    slots.assert_same(1, expected(params, PROMPTS[0], key, sampling=sampling))


def test_slots_are_taken_again_at_any_time(engine, params):
    slots, number = Slots(engine, params), 0
    wanted = {}
    for steps in (2, 3, 30, 1, 18):  # in the middle of sequences, and past their ends
        for slot in (0, 2):
            prompt, key = PROMPTS[number % 3], key_of(number)
            slots.insert(prefill(engine, params, prompt, key=key), slot)
            wanted[slot] = expected(params, prompt, key)
            number += 1
        slots.run(steps)
        for slot, completion in wanted.items():
            tokens = [token for token, _ in slots.found[slot]]
            assert tokens == completion.tokens.tolist()[:steps]


def test_a_slot_without_a_sequence_gives_nothing_valid(engine, params):
    slots = Slots(engine, params)
    results = slots.step()
    assert results.data.tolist() == [[0, 0, 0]] * 3
    slots.insert(prefill(engine, params, PROMPTS[0], key=key_of(0)), slot=1)
    slots.run()
    count = len(slots.found[1])
    results = slots.step()
    assert results.data.tolist() == [[0, 0, 0], [0, 0, count], [0, 0, 0]]
    assert results.log_prob.tolist() == [[0.0]] * 3


def test_a_prompt_may_go_on_from_a_cached_one(engine, params):
    prompt, slots = PROMPTS[2], Slots(engine, params)
    first = prefill(engine, params, prompt[:6], key=key_of(0))
    whole = prefill(engine, params, prompt[6:], key=key_of(1), existing_prefix=first)
    slots.insert(whole, 0)
    slots.insert(first, 1)
    slots.run()
    slots.assert_same(0, expected(params, prompt, key_of(1)))
    slots.assert_same(1, expected(params, prompt[:6], key_of(0)))


def test_results_are_jetstream_s_and_keep_their_log_probs(engine, params):
    state = engine.insert(
        prefill(engine, params, PROMPTS[0], key=key_of(0)),
        engine.init_decode_state(),
        0,
    )
    _, results = engine.generate(params, state)
    results.copy_to_host_async()
    assert isinstance(results, engine_api.ResultTokens)
    assert results.log_prob.dtype == np.float32
    on_host = results.convert_to_numpy()
    assert isinstance(on_host, ResultTokens)
    assert isinstance(on_host.data, np.ndarray)
    np.testing.assert_array_equal(on_host.log_prob, results.log_prob)
    samples, complete = token_utils.process_result_tokens(
        tokenizer=engine.build_tokenizer(engine.get_tokenizer()),
        slot=0,
        slot_max_length=4,
        result_tokens=on_host,
        complete=np.zeros(1, bool),
    )
    token = expected(params, PROMPTS[0], key_of(0)).tokens[0].item()
    assert (samples[0].token_ids, samples[0].text) == ([token], [f"t{token}"])
    assert not complete.any()


def test_prompts_that_do_not_fit_are_refused(engine, params):
    for length in (0, 17):
        with pytest.raises(ValueError, match=rf"prompt of {length} tokens"):
            engine.prefill(
                params=params,
                padded_tokens=np.ones(32, np.int32),
                true_length=length,
            )


def test_prompt_lengths_that_jetstream_cannot_pad_to_are_refused(engine):
    with pytest.raises(ValueError, match="max_prompt_tokens = 20; JetStream pads"):
        JetStreamEngine(
            dataclasses.replace(SETTINGS, max_prompt_tokens=20),
            mesh=engine.mesh,
            tokenizer=make_tokenizer(),
        )


def test_params_of_another_model_are_refused(engine, params):
    with pytest.raises(ValueError, match="parameter embedding is missing"):
        engine.load_params({k: v for k, v in params.items() if k != "embedding"})


def test_the_tokenizer_pads_texts_and_cuts_them_at_their_beginning(engine):
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    assert tokenizer.stop_tokens == {3, 11}
    tokens, length = tokenizer.encode(
        "t4 t2", is_bos=True, max_prefill_length=16, jax_padding=False
    )
    assert (tokens.tolist(), length) == ([4, 2] + 14 * [0], 2)
    tokens, length = tokenizer.encode(
        "t1 " * 4 + "t2 " * 16, max_prefill_length=16, jax_padding=False
    )
    assert tokens.tolist() == [2] * 16
