"""Answers: pieces of text, in whole characters and without stop strings, and bytes."""

import asyncio
import json

import httpx
import numpy as np
import openai.types.chat
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import SMALL, tokenizer_of
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.requests import Completion, StopWatch
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.serve.answers import (
    ChatAnswer,
    CompletionText,
    name_of,
    text_offsets,
    token_bytes,
)
from scalerl_jax.serve.fields import ChatFields, read_fields
from scalerl_jax.serve.orders import CompletionOrder, Served
from scalerl_jax.serve.service import Placed

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = len(ALPHABET)


def byte_tokenizer():
    """One token per byte, and an EOS that is a token like others."""
    vocabulary = {name: place for place, name in enumerate([*ALPHABET, "<eos>"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend=backend, eos_ids=(EOS,))


BYTES = byte_tokenizer()


def pieces(tokens, stop=(), chunk=1):
    text = CompletionText(BYTES, stop)
    found = [
        text.add(tokens[place : place + chunk])
        for place in range(0, len(tokens), chunk)
    ]
    return [*found, text.finish()]


@given(st.text())
@example("\ufffd\u0800")
@example("\ufffd" * 3)
def test_pieces_are_whole_characters_and_make_up_the_text(text):
    tokens = BYTES.encode(text)
    found = pieces(tokens)
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, EOS - 1)), st.integers(1, 9))
def test_the_text_does_not_depend_on_how_tokens_come(tokens, chunk):
    found = "".join(pieces(tokens, chunk=chunk))
    assert found == "".join(pieces(tokens))
    assert found == BYTES.backend.decode(tokens, skip_special_tokens=False)


def test_a_character_comes_with_its_last_byte():
    tokens = BYTES.encode("a\N{EURO SIGN}\N{GRINNING FACE}")
    assert pieces(tokens) == ["a", "", "", "€", "", "", "", "😀", ""]


def test_a_character_that_is_never_completed_is_shown_as_broken():
    text = CompletionText(BYTES)
    assert text.add(BYTES.encode("a\N{EURO SIGN}")[:-1]) == "a"
    assert text.finish() == "\ufffd"


def test_the_end_of_a_completion_is_not_text():
    assert pieces([*BYTES.encode("ab"), EOS]) == ["a", "b", "", ""]


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        pytest.param("abcd", ("bc",), ["a", "", "", "", ""], id="in the middle"),
        pytest.param("abd", ("bc",), ["a", "", "bd", ""], id="begun, not meant"),
        pytest.param("ab", ("bc",), ["a", "", "b"], id="begun at the end"),
        pytest.param("aab", ("aab", "ab"), ["", "", "", ""], id="the first to begin"),
        pytest.param(
            "xaab", ("aac", "ab"), ["x", "", "", "a", ""], id="inside another"
        ),
        pytest.param("abab", ("abac",), ["", "", "", "ab", "ab"], id="begun twice"),
        pytest.param("a€b", ("€",), ["a", "", "", "", "", ""], id="of several bytes"),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(text, stop, expected):
    assert pieces(BYTES.encode(text), stop) == expected


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1), max_size=3))
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text, stops):
    ends = [
        length
        for length in range(1, len(text) + 1)
        if any(text[:length].endswith(stop) for stop in stops)
    ]
    if ends:
        seen = text[: ends[0]]
        text = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
        assert "".join(pieces(BYTES.encode(seen + "ab"), stops)) == text
    else:
        assert "".join(pieces(BYTES.encode(text), stops)) == text


def llama_2():
    """Decodes as Llama 2's and Mistral's: without the space that begins a text."""
    names = ["<s>", "▁The", "▁capital", "▁is", "▁Paris", ".", "</s>"]
    backend = Backend(models.BPE({name: at for at, name in enumerate(names)}, []))
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return Tokenizer(backend=backend, eos_ids=(6,))


def test_a_completion_keeps_the_space_after_its_prompt():
    tokenizer, prompt, completion = llama_2(), [1, 2, 3], [4, 5, 6]
    assert tokenizer.backend.decode(prompt) == "The capital is"
    text = CompletionText(tokenizer).finish(completion)
    assert text == " Paris."
    names = [name_of(token_bytes(tokenizer, token)) for token in completion]
    assert names == [" Paris", ".", "</s>"]
    offsets = text_offsets(tokenizer, completion)
    assert offsets == [0, 6, 7]
    assert text[offsets[1] :] == names[1]
    stopped = CompletionText(tokenizer, [" Paris"])
    assert stopped.finish(completion) == "" and stopped.stopped
    assert StopWatch([" Paris"], tokenizer.shown).end(np.array(completion)) == 1


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_completion_is_what_it_adds_to_the_text_of_its_prompt(kind, cut):
    tokenizer = tokenizer_of(kind)
    # No id of the end is among them: all of the text is shown.
    tokens = tokenizer.encode("The answer so it is 12 </think> so.")
    assert len(tokens) > cut and not set(tokens) & set(tokenizer.eos_ids)
    prompt, completion = tokens[:cut], tokens[cut:]
    decode, text = tokenizer.backend.decode, CompletionText(tokenizer)
    streamed = [text.add([token]) for token in completion] + [text.finish()]
    assert decode(tokens) == decode(prompt) + "".join(streamed)
    assert CompletionText(tokenizer).finish(completion) == "".join(streamed)


def test_offsets_are_where_each_token_adds_to_the_text():
    tokens = [*BYTES.encode("a\N{EURO SIGN}b"), EOS]
    assert text_offsets(BYTES, tokens) == [0, 1, 1, 1, 2, 3]
    assert text_offsets(BYTES, []) == []


def test_names_of_parts_of_characters_differ():
    tokens = BYTES.encode("a\N{EURO SIGN}")
    found = [name_of(token_bytes(BYTES, token)) for token in [*tokens, EOS, EOS + 1]]
    assert found == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "<eos>", ""]


NOT_A_BYTE = r"bytes:\xe2"  # the text of a token, which looks like a byte's name


def with_such_a_text():
    """The tokenizer of bytes, and a token whose text is `NOT_A_BYTE`."""
    backend = byte_tokenizer().backend
    vocabulary = backend.get_vocab() | {NOT_A_BYTE: EOS + 1}
    backend.model = models.BPE(vocab=vocabulary, merges=[])
    return Tokenizer(backend=backend, eos_ids=(EOS,))


def completion_of(tokens, top_tokens):
    """A completion whose tokens all have log-probability -1."""
    tokens, top_tokens = np.array(tokens, np.int32), np.array(top_tokens, np.int32)
    ones = np.ones(len(tokens), np.float32)
    return Completion(
        request_id=0,
        sample=0,
        tokens=tokens,
        mask=np.ones(len(tokens), bool),
        logprobs=-ones,
        full_logprobs=-ones,
        top_tokens=top_tokens,
        top_logprobs=-np.ones(top_tokens.shape, np.float32),
        versions=np.zeros(len(tokens), np.int32),
        cut_off=False,
        interrupted=False,
    )


def chat_answer(tokenizer, completion, **body):
    """The answer to a chat with this one completion."""
    served = Served(
        name="m",
        policy_version=0,
        tokenizer=tokenizer,
        template=None,
        enable_thinking=True,
        vocab_size=tokenizer.vocab_size,
        max_prompt_tokens=32,
        max_completion_tokens=64,
        max_samples=4,
        max_body_bytes=1000,
        slots=4,
        max_waiting=9,
    )
    fields = read_fields(ChatFields, json.dumps(body).encode(), served)
    order = CompletionOrder(
        prompts=(np.array([0], np.int32),),
        fields=fields,
        sampling=Sampling(),
        max_tokens=64,
        logprobs=fields.top_logprobs if fields.logprobs else None,
    )
    placed = Placed(order)
    placed.events.put_nowait((0, completion))
    return ChatAnswer(served, placed)


def test_a_chat_tells_the_bytes_of_every_token():
    tokenizer = with_such_a_text()
    euro = BYTES.encode("\N{EURO SIGN}")
    tokens = [*euro, EOS + 1, EOS]

    async def whole():
        completion = completion_of(tokens, [[euro[1]]] * len(tokens))
        options = {"logprobs": True, "top_logprobs": 1}
        return await chat_answer(tokenizer, completion, **options).whole()

    found = openai.types.chat.ChatCompletion.model_validate(asyncio.run(whole()))
    (choice,) = found.choices
    rows = choice.logprobs.content
    assert [row.bytes for row in rows[:3]] == [[0xE2], [0x82], [0xAC]]
    assert [row.token for row in rows[:2]] == [r"bytes:\xe2", r"bytes:\x82"]
    assert (rows[3].token, rows[3].bytes) == (NOT_A_BYTE, list(NOT_A_BYTE.encode()))
    # As OpenAI's reference says: the bytes laid end to end are the text.
    joined = b"".join(bytes(row.bytes) for row in rows[:-1])
    assert joined.decode() == choice.message.content == "\N{EURO SIGN}" + NOT_A_BYTE
    assert {tuple(row.top_logprobs[0].bytes) for row in rows} == {(0x82,)}


def test_a_stream_is_read_by_those_who_split_lines_at_any_separator():
    text = "a\u2028b\x85c\u2029\x0bd\N{EURO SIGN}"
    tokens = [*BYTES.encode(text), EOS]

    async def events():
        answer = chat_answer(
            BYTES, completion_of(tokens, [[]] * len(tokens)), stream=True
        )
        return [event async for event in answer.chunks()]

    body = "".join(asyncio.run(events())).encode()
    lines = [line for line in httpx.Response(200, content=body).iter_lines() if line]
    *chunks, last = [line.removeprefix("data: ") for line in lines]
    assert last == "[DONE]"
    contents = [json.loads(each)["choices"][0]["delta"]["content"] for each in chunks]
    assert "".join(contents) == text
