"""What every sampler does that speaks the protocol: the fast one and the slow one.

Completions are compared with those of the slow sampler that has nothing else to do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_detokenizer import LETTERS

from scalerl_jax.sampler.requests import Request, Samples

PROMPT = [4, 1, 9, 2]
LONG = np.random.default_rng(7).integers(0, 13, 20)


@pytest.fixture(params=["fast", "slow"])
def bench(request, wide_bench, reference_bench):
    """Either sampler."""
    return {"fast": wide_bench, "slow": reference_bench}[request.param]


def step(sampler, params, *, version=0, times=1):
    """What some steps return, by (request, sample)."""
    found = {}
    for _ in range(times):
        sampler.load(params, version)
        found |= {(each.request_id, each.sample): each for each in sampler.step()}
    return found


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 21])
def test_a_prompt_that_does_not_fit_is_refused(bench, length):
    request = bench.request(0, [1] * length)
    with pytest.raises(
        ValueError,
        match=rf"{length} .*sampler.max_prompt_tokens = 20",
    ):
        bench.scheduler(request)


@pytest.mark.parametrize("limits", [[0, 5, 5], [5, 5, 19], [-1, 5, 5]])
def test_a_limit_that_the_engine_does_not_keep_is_refused(bench, limits):
    scheduler = bench.scheduler()
    with pytest.raises(ValueError, match="max_tokens = .*max_completion_tokens = 18"):
        scheduler.submit(bench.request(0, PROMPT, max_tokens=limits))
    assert not scheduler.busy and scheduler.free_slots == 4


def test_a_stop_needs_letters_and_a_tokenizer(bench):
    with pytest.raises(ValueError, match=r"stop = \['x', ''\]; .* must not be empty"):
        bench.scheduler(bench.request(0, PROMPT, stop=("x", "")), detokenizer=LETTERS)
    with pytest.raises(ValueError, match=r"stop = \['x'\]; "):
        bench.scheduler(bench.request(0, PROMPT, stop=("x",)))


@pytest.mark.parametrize("tokens", [[1, 13], [-1, 2]])
def test_a_prompt_with_ids_that_the_model_lacks_is_refused(bench, tokens):
    message = rf"ids from {min(tokens)} to {max(tokens)}; "
    with pytest.raises(ValueError, match=message):
        bench.scheduler(bench.request(0, tokens))


@pytest.mark.parametrize(
    "keys, limits, most",
    [
        pytest.param(0, 0, None, id="none at all"),
        pytest.param(3, 2, None, id="a thinking limit too few"),
        pytest.param(2, 2, 3, id="a limit of tokens too many"),
    ],
)
def test_samples_without_a_value_each_are_refused(bench, keys, limits, most):
    samples = Samples(
        keys=np.zeros((keys, 2), np.uint32),
        thinking_limits=np.zeros(limits, np.int32),
        max_tokens=None if most is None else np.ones(most, np.int32),
    )
    request = Request(request_id=0, tokens=np.array([1], np.int32), samples=samples)
    with pytest.raises(ValueError, match="each needs a key, a thinking limit"):
        bench.scheduler(request)


def renamed(params):
    rest = {name: leaf for name, leaf in params.items() if name != "head"}
    return rest | {"heads": params["head"]}


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(
            lambda params: params | {"head": params["head"][:12]},
            r"parameter head is \(\(12, 16\), ",
            id="shape",
        ),
        pytest.param(
            lambda params: params | {"embedding": params["embedding"].astype("int32")},
            r"parameter embedding is .*'int32'",
            id="dtype",
        ),
        pytest.param(renamed, "parameter head is missing;", id="missing"),
        pytest.param(
            lambda params: params | {"bias": params["head"]},
            "parameter bias is ",
            id="too many",
        ),
        pytest.param(
            lambda params: (
                params
                | {"layers": params["layers"] | {"query": params["layers"]["key"]}}
            ),
            "parameter layers/query is",
            id="in a layer",
        ),
    ],
)
def test_params_of_another_model_are_refused_and_nothing_is_lost(
    bench, random_params, change, message
):
    params, request = random_params(0), bench.request(3, LONG, num_samples=6)
    scheduler = bench.scheduler(request)
    with pytest.raises(ValueError, match=message):
        bench.step(scheduler, change(params))
    found = step(scheduler, params)
    with pytest.raises(ValueError, match=message):
        bench.step(scheduler, change(params), version=1)
    found |= bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, request))
    assert all((each.versions == 0).all() for each in found.values())


def test_a_version_that_goes_back_is_refused_and_nothing_is_lost(bench, random_params):
    params, request = random_params(0), bench.request(3, LONG, num_samples=6)
    scheduler = bench.scheduler(request)
    found = step(scheduler, params, version=5)
    with pytest.raises(ValueError, match="of version 4 after those of version 5"):
        bench.step(scheduler, random_params(1), version=4)
    found |= bench.finish(scheduler, params, version=5)
    bench.assert_same(found, bench.expected(params, request))


# -- what is completed -----------------------------------------------------------------


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


def test_a_group_larger_than_the_engine_is_completed_in_parts(
    any_bench,
    random_params,
):
    bench, params = any_bench, random_params(1)
    group = bench.request(3, PROMPT, num_samples=11)  # four slots
    found = bench.complete(params, group)
    assert sorted(sample for _, sample in found) == list(range(11))
    bench.assert_same(found, bench.expected(params, group))


def test_slots_are_counted_as_they_are_taken_and_freed(bench, random_params):
    scheduler = bench.scheduler()
    assert scheduler.free_slots == 4 and not scheduler.busy
    scheduler.submit(bench.request(0, PROMPT, num_samples=3))
    assert scheduler.free_slots == 1 and scheduler.busy
    scheduler.submit(bench.request(1, PROMPT, num_samples=3))
    assert scheduler.free_slots == -2  # two more than there are
    assert scheduler.cancel(1) == 0
    done = len(step(scheduler, random_params(0), times=2))
    assert scheduler.free_slots == 1 + done
    bench.finish(scheduler, random_params(0))
    bench.assert_idle(scheduler)


def test_a_step_without_a_request_returns_nothing(bench, random_params):
    assert bench.step(bench.scheduler(), random_params(0)) == []


def test_eos_as_the_first_token_is_the_whole_completion(bench, counting_params):
    params = counting_params | {"head": counting_params["head"] / 40.0}
    # Logits of 1 for the next token and 0 for the others: seek a sample that draws it.
    request = bench.request(0, [10], num_samples=40, limits=None)
    found = bench.complete(params, request)
    first = [each for each in found.values() if each.tokens[0] == 11]
    assert len(first) > 2
    for each in first:
        assert each.tokens.tolist() == [11]
        assert not each.cut_off and each.mask.tolist() == [True]
        logprob = 1.0 - np.log(np.e + 12.0)
        np.testing.assert_allclose(each.logprobs, [logprob], atol=1e-4)
        np.testing.assert_allclose(each.full_logprobs, [logprob], atol=1e-4)


def test_completions_own_their_arrays(bench, random_params):
    request = bench.request(7, PROMPT)
    found = bench.complete(random_params(0), request)
    copies = {place: each.tokens.copy() for place, each in found.items()}
    bench.complete(random_params(1), bench.request(8, [5, 5]))
    for place, each in found.items():
        np.testing.assert_array_equal(each.tokens, copies[place])
        assert each.logprobs.dtype == np.float32 and each.versions.dtype == np.int32
        assert len(each.tokens) == len(each.mask) == len(each.logprobs)


def test_a_listener_hears_the_tokens_of_its_completions_in_order(
    any_bench,
    talkative_params,
):
    bench, params, heard = any_bench, talkative_params(0), {}

    def listener(sample, tokens, logprobs):
        assert len(tokens) == len(logprobs) > 0
        heard.setdefault(sample, []).append((tokens.copy(), logprobs.copy()))

    stop = ("a", "gg")
    spoken = bench.request(
        2, LONG[:16], num_samples=9, limits=None, listener=listener, stop=stop
    )
    silent = bench.request(4, PROMPT, num_samples=4)
    scheduler = bench.scheduler(spoken, silent, detokenizer=LETTERS)
    found = bench.finish(scheduler, params)
    bench.assert_idle(scheduler)
    for sample in range(9):
        each = found[2, sample]
        tokens, logprobs = zip(*heard.pop(sample), strict=True)
        assert np.concatenate(tokens).tolist() == each.tokens.tolist()
        assert np.concatenate(logprobs).tolist() == each.logprobs.tolist()
        text = LETTERS.text(each.tokens)
        assert each.stopped == text.endswith(stop)
        assert not any(stop in text[:-1] for stop in stop)
    assert heard == {}
    assert sum(found[2, sample].stopped for sample in range(9)) > 2
    assert max(len(each.tokens) for each in found.values()) > 8


# -- what is cancelled -----------------------------------------------------------------


def test_cancelling_everything_leaves_an_idle_scheduler(bench, random_params):
    scheduler = bench.scheduler(bench.request(1, PROMPT), bench.request(2, PROMPT))
    step(scheduler, random_params(0))
    scheduler.cancel(1)
    scheduler.cancel(2)
    bench.assert_idle(scheduler)
    assert bench.step(scheduler, random_params(0)) == []
    assert scheduler.cancel(99) == 0  # unknown: nothing to do


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_number_used_again_brings_its_own_prompt(any_bench, random_params, steps):
    bench, params = any_bench, random_params(0)
    scheduler = bench.scheduler(bench.request(1, PROMPT, num_samples=6))
    step(scheduler, params, times=steps)  # four of six placed, the prompt kept
    scheduler.cancel(1)
    # A call of the first may be under way; none of its tokens is taken for these.
    again = bench.request(1, [12, 3, 3], num_samples=6)
    scheduler.submit(again)
    found = bench.finish(scheduler, params)
    bench.assert_same(found, bench.expected(params, again))
    bench.assert_idle(scheduler)


# -- updates and failures --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_the_same_weights_under_new_versions_change_nothing(
    any_bench,
    talkative_params,
    mode,
):
    bench, params = any_bench, talkative_params(0)
    requests = [
        bench.request(2, LONG[:16], num_samples=5),
        bench.request(3, LONG, num_samples=3),
    ]
    scheduler = bench.scheduler(*requests, kv_on_update=mode)
    found, version = {}, 0
    while scheduler.busy:
        # Equal numbers in other arrays.
        found |= step(scheduler, jax.tree.map(jnp.copy, params), version=version)
        version += 1
    bench.assert_same(found, bench.expected(params, *requests))
    assert version > 6


def test_recomputed_keys_and_values_are_those_of_the_newest_weights(
    any_bench,
    talkative_params,
):
    bench, params = any_bench, [talkative_params(n) for n in range(3)]
    requests = [
        bench.request(2, LONG[:16], num_samples=5, temperature=0.8),
        bench.request(3, LONG[3:], num_samples=3),
        bench.request(4, [7], num_samples=3, top_p=0.9),
    ]
    scheduler = bench.scheduler(*requests, kv_on_update="recompute")
    found, version = {}, 0
    while scheduler.busy:
        found |= step(scheduler, params[version % 3], version=version)
        version += 1
    of_version = [params[number % 3] for number in range(version)]
    mixed, by_number = 0, {each.request_id: each for each in requests}
    for (number, _), each in found.items():
        tokens, logprobs = bench.replay(by_number[number], each, of_version)
        assert each.tokens.tolist() == tokens
        np.testing.assert_allclose(each.logprobs, logprobs, atol=3e-5)
        mixed += len(set(each.versions.tolist())) > 2
    assert len(found) == 11 and mixed >= 3
    bench.assert_idle(scheduler)


def test_a_token_that_is_not_a_number_ends_its_sample_after_it(
    bench, poisoned_params, random_params
):
    request = bench.request(2, LONG[:5] % 12, num_samples=24, limits=None)
    found = bench.complete(poisoned_params(2), request)
    whole = bench.expected(random_params(2), request)
    failures = 0
    for place, each in found.items():
        theirs = whole[place]
        before = theirs.tokens.tolist()[:-1]
        if 12 not in before:
            assert each.failure == "" and each.tokens.tolist() == theirs.tokens.tolist()
            continue
        failures += 1
        count = before.index(12) + 1
        assert each.tokens.tolist() == theirs.tokens[:count].tolist()
        assert f"after token {count} of" in each.failure and not each.cut_off
        np.testing.assert_allclose(each.logprobs, theirs.logprobs[:count], atol=2e-5)
    assert 3 < failures < 24
