"""What tokens spell, beside what the library decodes."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import SMALL, tokenizer_of
from tokenizers import Regex, Tokenizer, decoders, models

from scalerl_jax.data import tokenizer as tokenizer_lib

BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module", params=SMALL)
def tokenizer(request):
    return tokenizer_of(request.param)


def fallen_back(tokenizer):
    return tokenizer.backend.token_to_id("<0xFF>") is not None


@settings(max_examples=40)
@given(st.data())
def test_the_text_of_tokens_is_the_librarys(tokenizer, data):
    last = tokenizer.vocab_size + 2  # embeddings may be more than tokens
    ids = data.draw(st.lists(st.integers(0, last), max_size=12))
    text, decode = tokenizer.decode_all(ids), tokenizer.backend.decode
    # Where bytes are no character, the library breaks their neighbours with them.
    if not (fallen_back(tokenizer) and BROKEN in text):
        assert text == decode(ids, skip_special_tokens=False)
    texts = tokenizer.written.texts(ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {each for each, token in added.items() if token.special}
    tag = tokenizer.backend.token_to_id("[/THINK]")
    rest = [each for each in ids if each not in special or each == tag]
    assert tokenizer.decode(ids) == tokenizer.decode_all(rest)


@settings(max_examples=40)
@given(st.data())
@example(None)
def test_a_text_comes_back_out_of_its_tokens(tokenizer, data):
    text = "He said: so,</think>\n\n12 of 3." if data is None else data.draw(st.text())
    found = tokenizer.decode_all(tokenizer.encode(text))
    assert found == tokenizer.backend.decode(
        tokenizer.encode(text), skip_special_tokens=False
    )


def test_bytes_that_are_no_character_leave_their_neighbours_whole():
    tokenizer = tokenizer_of("byte fallback")
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in b"<\xff\xe2>"]
    assert tokenizer.decode(ids) == f"<{BROKEN * 2}>"


def test_a_text_begins_without_the_space_of_its_first_token():
    vocabulary = {"▁so": 0, "▁": 1, "x": 2, "<hid>": 3}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(["<hid>"])
    for decoder, one, two in (
        (decoders.Metaspace(), "so so", " so"),
        (decoders.Metaspace(prepend_scheme="never"), " so so", "  so"),
        (strip(" "), "so so", " so"),
        (None, "▁so ▁so", "▁ ▁so"),
    ):
        backend.decoder = decoder
        tokenizer = tokenizer_lib.Tokenizer(backend=backend, eos_ids=(3,))
        assert tokenizer.decode([0, 0]) == one
        assert tokenizer.decode([3, 0, 3, 0]) == one  # what is hidden begins nothing
        assert tokenizer.decode([1, 0]) == two  # a space that is dropped does
        assert "".join(tokenizer.shown.texts([3, 1, 3, 0])) == two


def strip(content, **options):
    space = decoders.Replace("▁", " ")
    options = {"left": 1, "right": 0} | options
    return decoders.Sequence(
        [space, decoders.Fuse(), decoders.Strip(content, *options.values())]
    )


@pytest.mark.parametrize(
    "decoder, names",
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Replace(Regex("▁+"), " "), "Replace"),
        (strip(" ", right=1), "Strip"),
        (strip(" ", left=2), "Strip"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Fuse"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
    ],
)
def test_a_decoder_that_looks_at_neighbours_is_refused(tmp_path, decoder, names):
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError,
        match=rf"data\.tokenizer: a decoder of .*{names}",
    ):
        tokenizer_lib.load_tokenizer(tmp_path)
