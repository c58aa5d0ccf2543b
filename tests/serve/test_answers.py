"""Pieces of text: whole characters, nothing of a stop string."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import SMALL, tokenizer_of
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.requests import StopWatch
from scalerl_jax.serve.answers import CompletionText, text_offsets, token_name

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
    names = [token_name(tokenizer, token) for token in completion]
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
    found = [token_name(BYTES, token) for token in [*tokens, EOS, EOS + 1]]
    assert found == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "<eos>", ""]
