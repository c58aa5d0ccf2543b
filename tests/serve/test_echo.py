"""Prompts in an answer, with log-probabilities of their own: what evaluations ask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from openai import OpenAI
from small_server import BASE, POISON

from scalerl_jax.data.tokenizer import load_tokenizer
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.transformer import head_logits, head_weights, hidden_states
from scalerl_jax.model.weights import load_params

TOKENIZER = load_tokenizer(BASE)
SPELL = "Spell this word backward (example: sun -> nus): hello<think>"
SUM = "State the final answer to the following arithmetic problem: 3 + 4 =<think>"
# Longer than a prompt may be that something is sampled after.
LONG = TOKENIZER.encode("hm " * 10 + SUM + "hm " * 50)


@pytest.fixture(scope="module")
def logprobs_of(server):
    """All log-probabilities behind each token of a sequence, without a cache."""
    arch = read_architecture(server.model)
    params = load_params(server.model, arch, dtype=jnp.float32)

    def logprobs(tokens, temperature=1.0):
        tokens = jnp.array([tokens])
        hidden, _ = hidden_states(
            params,
            arch,
            tokens,
            positions=jnp.arange(tokens.size)[None],
            segment_ids=jnp.ones_like(tokens),
            dtype=jnp.float32,
        )
        logits = head_logits(hidden[0], head_weights(params), float32_head=True)
        return np.asarray(jax.nn.log_softmax(logits / temperature))

    return logprobs


@pytest.fixture(scope="module")
def complete(server):
    """The body of the answer to a request for completions, as a dictionary."""

    def complete(**body):
        code, answer = server.ask("/v1/completions", body)
        assert code == 200, answer
        return answer

    return complete


def names(tokens):
    return [TOKENIZER.decode_all([token]) for token in tokens]


def check_prompt(logprobs, tokens, rows, *, top):
    """An answer's log-probabilities begin with those of these tokens."""
    count = len(tokens)
    assert logprobs["tokens"][:count] == names(tokens)
    own, likeliest = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert own[0] is None and likeliest[0] is None
    expected = rows[np.arange(count - 1), tokens[1:]]
    np.testing.assert_allclose(own[1:count], expected, atol=1e-4)
    for place in range(1, count):
        best = np.argsort(-rows[place - 1])[:top].tolist()
        assert likeliest[place].keys() == {*names(best), names(tokens)[place]}
        value = likeliest[place][names(best)[0]] if top else own[place]
        assert abs(value - rows[place - 1].max()) < 1e-4 or not top
    offsets = np.cumsum([0, *map(len, names(tokens))])[:-1]
    assert logprobs["text_offset"][:count] == offsets.tolist()


@pytest.mark.parametrize("form", ["text", "ids"])
def test_a_prompt_alone_is_given_the_models_log_probabilities(
    complete, logprobs_of, form
):
    tokens = TOKENIZER.encode(SPELL)
    answer = complete(
        prompt=SPELL if form == "text" else tokens, max_tokens=0, echo=True, logprobs=2
    )
    (choice,) = answer["choices"]
    assert choice["text"] == SPELL and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(tokens)
    check_prompt(choice["logprobs"], tokens, logprobs_of(tokens), top=2)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 0)


def test_a_prompt_alone_may_be_as_long_as_the_model_allows(complete, logprobs_of):
    assert 64 < len(LONG) <= 96
    (choice,) = complete(prompt=LONG, max_tokens=0, echo=True, logprobs=0)["choices"]
    check_prompt(choice["logprobs"], LONG, logprobs_of(LONG), top=0)


def test_completions_follow_their_prompt(complete, logprobs_of):
    options = {"prompt": [SPELL, SUM], "n": 2, "seed": 5, "temperature": 0.7}
    plain = complete(**options, logprobs=1)["choices"]
    echoed = complete(**options, logprobs=1, echo=True)["choices"]
    assert [each["index"] for each in echoed] == [0, 1, 2, 3]
    for one, both in zip(plain, echoed, strict=True):
        prompt = options["prompt"][both["index"] // 2]
        tokens = TOKENIZER.encode(prompt)
        assert both["text"] == prompt + one["text"]
        rows = logprobs_of(tokens, temperature=0.7)
        check_prompt(both["logprobs"], tokens, rows, top=1)
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert both["logprobs"][name][len(tokens) :] == one["logprobs"][name]
        shifted = [len(prompt) + place for place in one["logprobs"]["text_offset"]]
        assert both["logprobs"]["text_offset"][len(tokens) :] == shifted


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}])
def test_a_stream_begins_with_the_prompt(server, complete, options):
    options |= {"prompt": [SPELL, SUM], "echo": True, "seed": 3}
    whole = complete(**options)["choices"]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        stream = client.completions.create(model="", stream=True, **options)
        chunks = [chunk.choices[0] for chunk in stream]
    for expected in whole:
        texts = [each.text for each in chunks if each.index == expected["index"]]
        assert "".join(texts) == expected["text"]


def test_without_logprobs_a_prompt_is_echoed_as_text(complete):
    (choice,) = complete(prompt=SUM, max_tokens=0, echo=True)["choices"]
    assert choice["text"] == SUM and choice["logprobs"] is None


# What lm-eval 0.4.13 (local-completions) sends for two answers to choose from, for a
# completion, and to count tokens; recorded.
CHOOSE = {
    "model": "",
    "prompt": [TOKENIZER.encode(SUM) + TOKENIZER.encode(" 7")],
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
GENERATE = {
    "prompt": [TOKENIZER.encode(SPELL)],
    "model": "",
    "max_tokens": 40,
    "temperature": 0,
    "stop": ["\n\n", "Question:", "</s>", "<|im_end|>", "<eos>"],
    "seed": 1234,
}


def test_lm_eval_gets_a_likelihood_and_whether_it_is_the_greatest(
    complete, logprobs_of
):
    context = TOKENIZER.encode(SUM)
    likeliest = int(logprobs_of(context)[-1].argmax())
    for last in (likeliest, (likeliest + 1) % 60):
        tokens = [*context, last]
        (choice,) = complete(**CHOOSE | {"prompt": [tokens]})["choices"]
        # As it reads them: the last token is the one that was sampled.
        own = choice["logprobs"]["token_logprobs"][len(context) : -1]
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(own) == len(top) == 1
        np.testing.assert_allclose(sum(own), logprobs_of(context)[-1, last], atol=1e-4)
        greedy = all(
            mine == max(row.values()) for mine, row in zip(own, top, strict=True)
        )
        assert greedy == (last == likeliest)


def test_lm_eval_gets_completions_and_counts_tokens(server, complete):
    (choice,) = complete(**GENERATE)["choices"]
    assert choice["text"] and not choice["text"].startswith("Spell")
    code, body = server.ask("/tokenizer_info")
    assert code == 200 and body["eos_token"] == "<eos>"
    for text in (SUM, body["eos_token"]):
        asked = {"prompt": text, "add_special_tokens": False}
        code, body = server.ask("/tokenize", asked)
        assert code == 200 and body["tokens"] == TOKENIZER.encode(text)


@pytest.mark.slow
def test_a_prompt_whose_numbers_are_not_finite_fails_alone(start_server):
    body = {"max_tokens": 0, "echo": True, "logprobs": 0}
    with start_server(model="poisoned") as server:
        code, answer = server.ask(
            "/v1/completions", body | {"prompt": [[2, POISON, 5]]}
        )
        assert code == 500 and answer["error"]["code"] == "sampling_failed", answer
        code, answer = server.ask("/v1/completions", body | {"prompt": [[2, 5, 6]]})
        assert code == 200, answer
        server.wait_for(lambda load: load["running"] == load["waiting"] == 0)
