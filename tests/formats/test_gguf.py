"""What a GGUF file says of texts: the tokenizer, its ends, the chat template."""

import numpy as np
import pytest
import tokenizers
from small_model import small_architecture
from tokenizers import decoders, models, pre_tokenizers, trainers

from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.tokenizer import load_tokenizer

pytest.importorskip("gguf")
from small_gguf import tokenizer_fields, write_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{{ messages[0]['content'] }}"
TEXTS = [
    "The cat sat on the mat, and then 1234 cats sat on 56 mats.\n\n  They're here!",
    "naïve café — “quotes”\t\ttabs and 日本語",
    "<|im_start|>user\nthe cat<|im_end|>\n",
]


@pytest.fixture(scope="module")
def trained():
    """A tokenizer of SmolLM's kind, made by the library itself."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


@pytest.fixture
def write(tmp_path, trained):
    """Writes that tokenizer into a file without layers; None drops a field."""

    def write(**changes):
        metadata = tokenizer_fields(trained, SPECIAL, **changes)
        metadata["tokenizer.chat_template"] = TEMPLATE
        path = tmp_path / "model.gguf"
        tensors = {"token_embd.weight": np.zeros((320, 16), np.float32)}
        write_gguf(path, small_architecture(), tensors, metadata=metadata)
        return path

    return write


def test_a_rebuilt_tokenizer_gives_the_ids_of_the_one_before(write, trained):
    tokenizer = load_tokenizer(write())
    assert tokenizer.vocab_size == 320
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == trained.encode(text).ids
        assert tokenizer.decode_all(ids) == text
    assert 1 in tokenizer.encode(TEXTS[2])
    assert tokenizer.eos_ids == (2, 0)


def test_special_tokens_and_the_chat_template_are_found(write):
    found = read_chat_template(write())
    assert found.source == TEMPLATE
    assert found.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }


@pytest.mark.parametrize(
    "rule, pieces",
    [
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"]),
        ("llama-bpe", ["I", "'m", " ", "123", "45", " x", "\n\n", " y"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"]),
    ],
)
def test_each_rule_cuts_a_text_by_hand(write, rule, pieces):
    cut = load_tokenizer(write(pre=rule)).backend.pre_tokenizer
    found = [piece for piece, _ in cut.pre_tokenize_str("I'm 12345 x\n\n y")]
    assert found == [piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in pieces]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model = 'llama'"),
        ({"pre": "gpt-9"}, r"tokenizer\.ggml\.pre = 'gpt-9'"),
        ({"merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"eos_token_id": 320}, r"the tokenizer has no token 320"),
        (
            {"bos_token_id": 320},
            r"tokenizer\.ggml\.bos_token_id = 320",
        ),
        (
            {"eos_token_id": None, "eot_token_id": None, "bos_token_id": None}
            | {"tokens": ["a", "b", "ab"], "token_type": [1] * 3, "merges": ["a b"]},
            r".*a completion could never end",
        ),
    ],
)
def test_what_no_tokenizer_can_be_made_of_is_refused(write, changes, message):
    with pytest.raises(ValueError, match=rf"model\.gguf.* {message}"):
        load_tokenizer(write(**changes))
