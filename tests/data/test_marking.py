"""The end of thinking in tokens, beside the text that the library makes of them."""

import functools

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_detokenizer import marker_of
from small_tokenizers import BACKENDS, tokenizer_of

from scalerl_jax.data.detokenizer import make_marker

END = "</think>"
# What stands around it in completions, and what begins it once more.
BESIDE = st.sampled_from(
    ["", " ", "\n", "\n\n", ".", ")", "1", "a", "So", "é", "😀", "<", "</", "</think"]
    + [">", "<|end|>", "\u0301", "\\boxed{7}", "think>", "/think>"]
)
AROUND = st.lists(BESIDE | st.text(max_size=3), max_size=4).map("".join)


FEW = settings(max_examples=40, deadline=None)  # of every tokenizer


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request):
    return tokenizer_of(request.param)


@functools.cache
def marker_in(tokenizer, text=END):
    return make_marker(text, tokenizer.shown, vocabulary=tokenizer.vocab_size + 3)


def ends_of(tokens, tokenizer, text=END):
    """By the library: the numbers of tokens whose text holds `text`."""
    special = tokenizer.backend.get_added_tokens_decoder()
    hidden = {
        each
        for each, token in special.items()
        if token.special and token.content != "[/THINK]"
    }
    shown = [[x for x in tokens[:n] if x not in hidden] for n in range(len(tokens) + 1)]
    decode = functools.partial(tokenizer.backend.decode, skip_special_tokens=False)
    return [count for count, ids in enumerate(shown) if text in decode(ids)]


def assert_seen(tokens, tokenizer, text=END):
    """The marker ends with the token whose text completes it, and for good."""
    marker = marker_in(tokenizer, text)
    counts = range(len(tokens) + 1)
    found = [n for n in counts if marker.state(tokens[:n]) == marker.ended]
    assert found == ends_of(tokens, tokenizer, text)


def pieces_of(text, cuts):
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@FEW
@given(before=AROUND, after=AROUND, cuts=st.none() | st.lists(st.integers(0, 99)))
@example(before="it is 12.", after="\n\nThe answer", cuts=None)
@example(before="so ", after="", cuts=None)
@example(before="", after=">1", cuts=list(range(10)))
def test_the_end_is_seen_in_every_writing(tokenizer, before, after, cuts):
    """As the tokenizer writes it, and with the text cut anywhere into tokens."""
    text = before + END + after
    pieces = [text] if cuts is None else pieces_of(text, cuts)
    tokens = [each for piece in pieces for each in tokenizer.encode(piece)]
    assert_seen(tokens, tokenizer)
    if cuts is None and tokenizer.decode(tokens) == text:
        assert marker_in(tokenizer).state(tokens) == marker_in(tokenizer).ended


@functools.cache
def near(tokenizer):
    """Ids that spell something of an end, with what is beside it, and some others."""
    shown = tokenizer.shown
    own = [at for at, piece in enumerate(shown.later) if set(piece) & set(b"</>")]
    return own[:400] + list(range(0, tokenizer.vocab_size + 3, 97))


@FEW
@given(st.data())
def test_it_is_not_seen_where_the_text_does_not_hold_it(tokenizer, data):
    tokens = data.draw(st.lists(st.sampled_from(near(tokenizer)), max_size=10))
    # Of bytes that are no character, the library breaks their neighbours, too.
    fallback = tokenizer.backend.token_to_id("<0xFF>") is not None
    assume(not (fallback and "\ufffd" in tokenizer.decode(tokens)))
    assert_seen(tokens, tokenizer)


@given(st.text("ab", min_size=1, max_size=6), st.lists(st.integers(0, 7), max_size=20))
def test_a_marker_that_begins_again_inside_of_itself_is_seen(text, tokens):
    pieces = ["a", "b", "ab", "ba", "aab", "bb", "", "abaab"]
    marker, spelled = marker_of(text, pieces), "".join(pieces[each] for each in tokens)
    assert (marker.state(tokens) == marker.ended) == (text in spelled)


@FEW
@given(
    st.sampled_from(["byte fallback", "metaspace", "spaces between tokens"]),
    st.sampled_from([" so", "so", " ", "é<"]),
    st.data(),
)
def test_a_marker_may_begin_with_the_space_that_a_text_begins_without(kind, text, data):
    tokenizer, letters = tokenizer_of(kind), set(text.encode())
    pieces = enumerate(tokenizer.shown.later)
    own = [at for at, piece in pieces if set(piece) & letters]
    tokens = data.draw(st.lists(st.sampled_from([*own, 0]), max_size=4))
    assume("\ufffd" not in tokenizer.decode(tokens))
    assert_seen(tokens, tokenizer, text)


def test_the_table_is_small():
    marker = marker_of(END, ["a"] * 1000)
    assert marker.next_states.dtype == np.uint8
    assert marker.next_states.shape == (9, 1000)
    assert marker_of("x" * 255, ["x"]).next_states.dtype == np.uint16
