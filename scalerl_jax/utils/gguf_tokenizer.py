"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, its "gpt2".

How a text is cut before the merges is kept as a name (`tokenizer.ggml.pre`) of a rule
that llama.cpp has in its code; these are the rules that the models' own tokenizer.json
files state.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

_CONTROL, _USER_DEFINED = 3, 4  # kinds in tokenizer.ggml.token_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?"
    r"[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(values: Mapping[str, Any], *, path: Path) -> Tokenizer:
    """The library's tokenizer from the fields of tokenizer.ggml, of the file `path`.

    Raises:
        ValueError: one is missing, or asks for another kind; names it.
    """
    if values.get("model") != "gpt2":
        raise ValueError(
            f"{path}: tokenizer.ggml.model = {values.get('model')!r} is not supported, "
            f"only 'gpt2', byte-level BPE; name a tokenizer.json as data.tokenizer"
        )
    if values.get("pre") not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre = {values.get('pre')!r} is not supported; "
            f"choose from {sorted(_PRE_TOKENIZERS)}, or name a tokenizer.json as "
            f"data.tokenizer"
        )
    for name in ("tokens", "token_type", "merges"):
        if name not in values:
            raise ValueError(f"{path} lacks tokenizer.ggml.{name}")
    tokens: list[str] = values["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["merges"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=values["pre"] == "llama-bpe",
        )
    )
    if values["pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[values["pre"]]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, values["token_type"], strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _cut(first: Any, *, use_regex: bool) -> Any:
    """Cuts a text by a rule, then into bytes, with GPT-2's words in between or not."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([first, last])


def _words(digits: str) -> Any:
    """Llama 3's and Qwen's words, numbers of as many `digits` (a quantifier)."""
    words = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return _cut(words, use_regex=False)


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: _cut(
        pre_tokenizers.Digits(individual_digits=True), use_regex=True
    ),
    "llama-bpe": lambda: _words("{1,3}"),
    "qwen2": lambda: _words(""),
}
