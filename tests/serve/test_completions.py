"""What OpenAI's own client gets from a server, beside the sampler's own answer."""

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from small_server import BASE, FLAGS, POISON

from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.decoding import NEVER, EngineSettings
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.requests import Request, Samples
from scalerl_jax.sampler.sampling import Sampling, sample_keys
from scalerl_jax.sampler.scheduler import Scheduler

SPELL = "Spell this word backward (example: sun -> nus): hello<think>"
KINDS = ("prompt", "completion")
TOKENIZER = load_tokenizer(BASE)
SUM = "State the final answer to the following arithmetic problem: 3 + 4 =<think>"


def connect(server):
    url = f"{server.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def completing(client, server):
    def complete(prompt=SPELL, **options):
        options = {"max_tokens": 64, "seed": 5} | options
        return client.completions.create(
            model=server.model.name, prompt=prompt, **options
        )

    return complete


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def complete(client, server):
    return completing(client, server)


@pytest.fixture(scope="module")
def sample(server):
    """Completions of a scheduler in this process, by sample."""
    arch = read_architecture(server.model)
    params = load_params(server.model, arch, dtype=jnp.float32)
    tokenizer = load_tokenizer(BASE)
    engine = Engine(
        EngineSettings(
            arch=arch,
            **{name: FLAGS[name] for name in ("slots", "tokens_per_call")},
            **{f"max_{name}_tokens": FLAGS[f"max_{name}_tokens"] for name in KINDS},
            dtype=jnp.float32,
            eos_ids=tokenizer.eos_ids,
            top_logprobs=5,
        ),
        mesh=make_mesh(jax.devices()[:1]),
    )

    def sample(prompt, *, seed, count, **options):
        scheduler = Scheduler(PagePool(engine), detokenizer=tokenizer.shown)
        keys = sample_keys(seed, "serve", prompt_id=0, epoch=0, num_samples=count)
        scheduler.submit(
            Request(
                request_id=0,
                tokens=np.array(tokenizer.encode(prompt), np.int32),
                samples=Samples(
                    keys=keys, thinking_limits=np.full(count, NEVER, np.int32)
                ),
                sampling=Sampling(**options),
            )
        )
        found = []
        scheduler.load(params, 0)
        while scheduler.busy:
            found += scheduler.step()
        return sorted(found, key=lambda each: each.sample)

    return sample


def texts(completion):
    return [choice.text for choice in completion.choices]


def test_a_completion_is_the_samplers_own(complete, sample):
    options = {"temperature": 0.7, "top_p": 0.95}
    mine = sample(SPELL, seed=5, count=3, top_k=20, min_p=0.01, **options)
    found = complete(
        n=3, logprobs=5, extra_body={"top_k": 20, "min_p": 0.01}, **options
    )
    assert texts(found) == [TOKENIZER.decode(each.tokens.tolist()) for each in mine]
    assert found.object == "text_completion"
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    tokens = sum(len(each.tokens) for each in mine)
    prompt = len(TOKENIZER.encode(SPELL))
    assert found.usage.prompt_tokens == prompt
    assert found.usage.completion_tokens == tokens
    assert found.usage.total_tokens == prompt + tokens
    for choice, own in zip(found.choices, mine, strict=True):
        logprobs = choice.logprobs
        names = [TOKENIZER.decode_all([token]) for token in own.tokens.tolist()]
        assert logprobs.tokens == names
        np.testing.assert_allclose(
            logprobs.token_logprobs, own.full_logprobs, atol=1e-4
        )
        for row, name, top in zip(
            logprobs.top_logprobs, names, own.top_tokens.tolist(), strict=True
        ):
            assert set(row) == {name, *(TOKENIZER.decode_all([token]) for token in top)}
        likeliest = [max(row.values()) for row in logprobs.top_logprobs]
        np.testing.assert_allclose(likeliest, own.top_logprobs[:, 0], atol=1e-4)
        for place, (offset, name) in enumerate(
            zip(logprobs.text_offset, names, strict=True)
        ):
            last = name == "<eos>"
            assert choice.text[offset:].startswith("" if last else name), place


@pytest.mark.parametrize("count", [0, 2])
def test_as_many_likeliest_tokens_come_as_are_asked_for(complete, count):
    rows = complete(logprobs=count, temperature=0).choices[0].logprobs.top_logprobs
    assert rows and all(len(row) == max(count, 1) for row in rows)


def test_without_asking_there_are_no_logprobs(complete):
    assert complete().choices[0].logprobs is None


def test_the_same_seed_and_prompt_give_the_same_completion(complete):
    alone = texts(complete(n=4))
    assert texts(complete(n=4)) == alone
    assert texts(complete(n=2)) == alone[:2]
    assert texts(complete([SUM, SPELL], n=4))[4:] == alone
    assert texts(complete(n=4, seed=6)) != alone
    assert len(set(texts(complete(n=8, seed=None)))) > 1


def test_top_p_of_0_is_the_likeliest_token(complete):
    greedy = texts(complete(temperature=0))
    assert texts(complete(n=4, top_p=0)) == greedy * 4
    assert texts(complete(n=4)) != greedy * 4


def test_a_seed_has_64_bits_of_which_the_last_32_count(complete):
    for seed, same in [(-1, 2**32 - 1), (2**32 + 7, 7), (-(2**63), 0), (2**63 - 1, -1)]:
        assert texts(complete(n=4, seed=seed)) == texts(complete(n=4, seed=same))


def test_a_prompt_has_four_forms(complete):
    ids = [TOKENIZER.encode(prompt) for prompt in (SPELL, SUM)]
    both = texts(complete([SPELL, SUM], n=2))
    assert len(both) == 4
    assert texts(complete(ids, n=2)) == both
    assert texts(complete(ids[0], n=2)) == both[:2]
    assert texts(complete(SUM, n=2)) == both[2:]


def test_a_completion_ends_with_its_end_or_its_limit(complete):
    whole = complete(temperature=0).choices[0]
    assert whole.finish_reason == "stop"
    cut = complete(temperature=0, max_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 5
    assert whole.text.startswith(cut.choices[0].text)
    assert complete(temperature=0, max_tokens=None).usage.completion_tokens <= 16


@pytest.mark.parametrize("several", [False, True])
def test_a_stop_string_ends_the_text_and_is_not_in_it(complete, several):
    whole = complete(temperature=0).choices[0].text
    stop = whole[3:6]
    found = complete(temperature=0, stop=["@", stop] if several else stop)
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens < len(whole)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"stop": ["l", "th"]}, id="with stop strings"),
        pytest.param({"logprobs": 2}, id="with logprobs"),
        pytest.param({"max_tokens": 6}, id="cut"),
    ],
)
def test_a_stream_adds_up_to_the_whole(complete, options):
    prompts = [SPELL, SUM]
    whole = complete(prompts, n=3, **options)
    stream = complete(
        prompts, n=3, stream=True, stream_options={"include_usage": True}, **options
    )
    *chunks, last = list(stream)
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    for expected in whole.choices:
        parts = [
            chunk.choices[0]
            for chunk in chunks
            if chunk.choices[0].index == expected.index
        ]
        assert "".join(part.text for part in parts) == expected.text
        ends = [part.finish_reason for part in parts]
        assert ends == [None] * (len(parts) - 1) + [expected.finish_reason]
        if "logprobs" in options:
            (part,) = parts
            assert part.logprobs.tokens == expected.logprobs.tokens
        elif not options:
            assert len(parts) > 1


def test_the_model_is_listed(client, server):
    (listed,) = client.models.list().data
    assert listed.id == server.model.name
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="model = 'other'") as error:
        client.completions.create(model="other", prompt="a")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


@pytest.mark.slow
def test_a_failed_sequence_fails_its_request_alone(start_server):
    with start_server(model="poisoned") as server, connect(server) as client:
        complete = completing(client, server)
        before = texts(complete(temperature=0))
        for stream in (False, True):
            going_on = complete(n=200, stream=True, temperature=0, logprobs=0)
            with pytest.raises(openai.APIError, match="not finite") as error:
                # A stream may have begun when it fails.
                list(complete([[5, 6], [2, POISON]], stream=stream, temperature=0))
            assert error.value.code == "sampling_failed"
            chunks = [chunk.choices[0].text for chunk in going_on]
            assert chunks == before * 200
        server.wait_for(lambda load: load["running"] == load["pages_in_use"] == 0)


def test_a_client_that_leaves_frees_its_slots(client, complete, server):
    stream = complete(n=900, stream=True, max_tokens=64)
    next(iter(stream))
    server.wait_for(lambda load: load["running"] == 4 and load["waiting"] > 500)
    stream.close()
    server.wait_for(lambda load: load["running"] == load["waiting"] == 0, timeout_s=3)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model=server.model.name, prompt=SPELL, n=1000, max_tokens=64
        )
    server.wait_for(lambda load: load["running"] == load["waiting"] == 0, timeout_s=3)
    assert server.health()["pages_in_use"] == 0


def test_more_than_may_wait_is_refused_for_now(complete, server):
    stream = complete(n=900, stream=True, max_tokens=64)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="--max_waiting = 1000"):
        complete(n=600)
    stream.close()
    server.wait_for(lambda load: load["running"] == 0)
    assert len(complete(n=600, max_tokens=1).choices) == 600
