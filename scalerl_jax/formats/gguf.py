"""Present GGUF files as the Hugging Face directories from which they were made.

`GGUFModel` makes the files of such a directory on demand and gives the tensors their
Hugging Face names, so that readers of checkpoints and tokenizers need not support the
format.  The `gguf` package, https://github.com/ggml-org/llama.cpp (gguf-py), decodes
blocks of numbers; it is an extra: pip install "scalerl_jax[gguf]".
The file is above 400 lines because it includes the tokenizer of the metadata.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from scalerl_jax.formats.gguf_head import check_extent, read_head

# Supported values of general.architecture; others use other names of tensors.
_KNOWN = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, a factor per frequency

# Field of config.json -> field of the metadata, without the prefix of the family.
_CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
# GGUF tensor -> Hugging Face tensor, without the layer and ".weight" or ".bias".
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Special token in tokenizer_config.json -> its name in GGUF, in GGUF's spelling.
_SPECIAL = {name: name for name in ("bos", "eos", "cls", "mask")} | {
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
}

_CONTROL, _USER_DEFINED = 3, 4  # values in tokenizer.ggml.token_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?"
    r"[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """A tensor of quantised blocks, each within a row."""

    file: Path
    name: str  # in the file
    kind: str  # name in `gguf.GGMLQuantizationType`
    shape: tuple[int, ...]  # rows first
    start: int  # bytes from the beginning of the file
    interleaved: int = 0  # head dimension, if rows of heads are interleaved; else 0

    def read(self, region: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Return a region (from, to per dimension) in float32, in Hugging Face's order.

        Whole blocks of each row are read.
        """
        import gguf

        kind = gguf.GGMLQuantizationType[self.kind]
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        *outer, columns = self.shape
        blocks = np.memmap(
            self.file,
            np.uint8,
            mode="r",
            offset=self.start,
            shape=(*outer, columns // length * num_bytes),
        )
        first, end = region[-1]
        start, stop = first // length, -(-end // length)
        part = blocks[..., start * num_bytes : stop * num_bytes]
        if outer:
            part = part[self._rows(*region[0])]
        values = gguf.dequantize(np.ascontiguousarray(part), kind)
        return values[..., first - start * length : end - start * length]

    def _rows(self, start: int, stop: int) -> np.ndarray | slice:
        """Return the indices in the file of Hugging Face's rows `start` to `stop`.

        llama.cpp rotates neighbouring pairs of a head's dimensions, Hugging Face pairs
        between two halves: Hugging Face's row j * dim / 2 + i of a head is row 2 i + j
        in the file, for Llama's queries and keys.
        """
        if not self.interleaved:
            return slice(start, stop)
        head, row = np.divmod(np.arange(start, stop), self.interleaved)
        half, pair = np.divmod(row, self.interleaved // 2)
        return head * self.interleaved + 2 * pair + half


@dataclasses.dataclass(frozen=True)
class GGUFModel:
    """A GGUF file, which replaces the `Path` of a Hugging Face directory."""

    path: Path

    def __str__(self) -> str:
        """The file's own path."""
        return str(self.path)

    def absolute(self) -> "GGUFModel":
        """Return this model with an absolute path."""
        return GGUFModel(self.path.absolute())

    def __truediv__(self, name: str) -> "_Part":
        """Return a file of the directory, whose content is made on demand."""
        return _Part(self, name)

    @property
    def _file(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """The metadata and the tensors.

        Raises:
            ValueError: the file is missing, no GGUF, incomplete or one of several
                parts, or the `gguf` package is not installed.
        """
        if not self.path.is_file():
            raise ValueError(f"{self.path} does not exist; name a GGUF file")
        state = self.path.stat()
        return _open(self.path, state.st_mtime_ns, state.st_size)

    def tensors(self) -> dict[str, GGUFTensor]:
        """Return every tensor by its Hugging Face name, or its own if that has none.

        Raises:
            ValueError: the quantisation of a tensor is not supported.
        """
        values, (_, tensors) = self.config(), self._file
        _check_kinds(tensors)
        dim = values.get("head_dim", 0) if values["model_type"] == "llama" else 0
        in_pairs = ("attn_q.weight", "attn_k.weight")
        return {
            _hugging_face_name(name): dataclasses.replace(
                tensor, interleaved=dim if name.endswith(in_pairs) else 0
            )
            for name, tensor in tensors.items()
            if name != _ROPE_FACTORS
        }

    def config(self) -> dict[str, Any]:
        """Return the values of config.json; their reader has to check them.

        Raises:
            ValueError: a metadata field has no equivalent in config.json.
        """
        metadata, tensors = self._file
        family = metadata.get("general.architecture")
        if family not in _KNOWN:
            raise ValueError(
                f"{self}: general.architecture = {family!r} is not supported; choose "
                f"from {list(_KNOWN)}, or the Hugging Face directory of the model"
            )
        fields = {
            name.removeprefix(f"{family}."): value for name, value in metadata.items()
        }
        values = {
            name: fields[theirs] for name, theirs in _CONFIG.items() if theirs in fields
        }
        width, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if type(width) is int and type(heads) is int and heads > 0:
            values.setdefault("head_dim", width // heads)
            values.setdefault("num_key_value_heads", heads)
        for name, allowed in {
            "attention.value_length": values.get("head_dim"),
            "rope.dimension_count": values.get("head_dim"),
            "rope.scaling.type": "none",
            # Without a type they are those of a linear scaling in llama.cpp.
            "rope.scaling.factor": 1.0,
            "rope.scale_linear": 1.0,
            "attention.sliding_window": 0,
            "expert_count": 0,
        }.items():
            if name in fields and fields[name] != allowed:
                raise ValueError(
                    f"{self}: {family}.{name} = {fields[name]!r} is not supported; "
                    f"only {allowed!r} is"
                )
        if "token_embd.weight" not in tensors:
            raise ValueError(f"{self} lacks tensor token_embd.weight")
        if len(tensors["token_embd.weight"].shape) != 2:
            raise ValueError(f"{self}: tensor token_embd.weight is no matrix")
        return values | {
            "model_type": family,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "rope_scaling": _llama3_scaling(values, tensors.get(_ROPE_FACTORS)),
        }

    def tokenizer(self) -> str:
        """Return the text of tokenizer.json.

        Raises:
            ValueError: the tokenizer is missing or not supported; names the field.
        """
        values = {
            name.removeprefix("tokenizer.ggml."): value
            for name, value in self._file[0].items()
        }
        return _make_tokenizer(values, path=self.path).to_str(pretty=True)

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the values of tokenizer_config.json, without the chat template."""
        metadata, _ = self._file
        tokens = _texts(metadata.get("tokenizer.ggml.tokens", []), self, "tokens")
        special: dict[str, str] = {}
        for name, theirs in _SPECIAL.items():
            field = f"tokenizer.ggml.{theirs}_token_id"
            place = metadata.get(field)
            if type(place) is int and 0 <= place < len(tokens):
                special[f"{name}_token"] = tokens[place]
            elif place is not None:
                raise ValueError(f"{self}: {field} = {place!r} is no token's place")
        return {
            # Without it transformers would use the class of the model's family.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        } | special

    def generation_config(self) -> dict[str, Any] | None:
        """Return the values of generation_config.json; None without an end token."""
        metadata, _ = self._file
        names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [metadata[name] for name in names if name in metadata]
        if any(isinstance(each, list) for each in found):
            raise ValueError(f"{self}: {' or '.join(names)} is a list, and no token id")
        return {"eos_token_id": list(dict.fromkeys(found))} if found else None

    def chat_template(self) -> str | None:
        """Return the text of chat_template.jinja; None if there is no template."""
        found = self._file[0].get("tokenizer.chat_template")
        if found is not None and not isinstance(found, str):
            raise ValueError(f"{self}: tokenizer.chat_template is no text")
        return found


# File of the directory -> method that makes its text or values; None: no such file.
_FILES: dict[str, Callable[[GGUFModel], Any]] = {
    "config.json": GGUFModel.config,
    "tokenizer.json": GGUFModel.tokenizer,
    "tokenizer_config.json": GGUFModel.tokenizer_config,
    "generation_config.json": GGUFModel.generation_config,
    "chat_template.jinja": GGUFModel.chat_template,
}


@dataclasses.dataclass(frozen=True)
class _Part:
    """A file of the directory, with the part of `Path` that readers use."""

    model: GGUFModel
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.model}"

    @functools.cached_property
    def _content(self) -> bytes | None:
        make = _FILES.get(self.name)
        content = make(self.model) if make else None
        if isinstance(content, dict):
            content = json.dumps(content, indent=2) + "\n"
        return None if content is None else content.encode()

    def is_file(self) -> bool:
        return self._content is not None

    exists = is_file

    def read_bytes(self) -> bytes:
        if self._content is None:
            raise FileNotFoundError(f"{self.model} makes no {self.name}")
        return self._content

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)


@functools.lru_cache(maxsize=1)
def _open(
    path: Path, modified: int, size: int
) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return metadata and tensors of a file.

    Metadata are numbers, booleans, strings, and lists of them.  The last file is
    cached; `modified` and `size` are part of the cache's key.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{path} needs the gguf package to be read: pip install "scalerl_jax[gguf]"'
        ) from error
    metadata, stored = read_head(path)
    parts = metadata.get("split.count", 1)
    if parts != 1 and parts != 0:
        raise ValueError(
            f"{path} is one of split.count = {parts!r} parts; join them with "
            f"llama-gguf-split --merge"
        )
    tensors: dict[str, GGUFTensor] = {}
    kinds = {int(kind): kind for kind in gguf.GGMLQuantizationType}
    for each in stored:
        if each.kind not in kinds or each.name in tensors:
            raise ValueError(
                f"{path}: tensor {each.name} occurs twice, or is of a kind that the "
                f"gguf package does not support ({each.kind})"
            )
        kind = kinds[each.kind]
        check_extent(path, each, gguf.GGML_QUANT_SIZES[kind])
        tensors[each.name] = GGUFTensor(
            file=path,
            name=each.name,
            kind=kind.name,
            shape=each.shape,
            start=each.start,
        )
    return metadata, tensors


def _check_kinds(tensors: dict[str, GGUFTensor]) -> None:
    """Raise ValueError for blocks that the gguf package cannot dequantise."""
    import gguf

    for tensor in {each.kind: each for each in reversed(tensors.values())}.values():
        kind = gguf.GGMLQuantizationType[tensor.kind]
        try:
            gguf.dequantize(
                np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind
            )
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is of kind {tensor.kind}, which "
                f"the gguf package cannot dequantise; take a file in another "
                f"quantisation, Q8_0 say"
            ) from error


def _hugging_face_name(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    if not found or found[2] not in _TENSORS:
        return name
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{_TENSORS[found[2]]}.{found[3]}"


def _llama3_scaling(
    values: dict[str, Any], stored: GGUFTensor | None
) -> dict[str, Any] | None:
    """Return Llama 3's rope scaling; its `factor` is the largest of the file's factors.

    The other three parameters are equal for every Llama 3.  ValueError is raised unless
    all four reproduce the factors of the file.
    """
    head_dim, theta = values.get("head_dim"), values.get("rope_theta")
    # The reader of the config checks the types of these two.
    if stored is None or type(head_dim) is not int or type(theta) is not float:
        return None
    factors = np.zeros(0)
    if head_dim > 1 and stored.shape == (head_dim // 2,):
        factors = stored.read(((0, head_dim // 2),))
    if factors.size and np.isfinite(factors).all() and factors.max() >= 1.0:
        factor = float(factors.max())
        frequencies = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        turns = 8192 * frequencies / (2.0 * np.pi)
        kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1.0 / (kept + (1.0 - kept) / factor), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise ValueError(
        f"{stored.file}: tensor {_ROPE_FACTORS} of shape {stored.shape} is not Llama "
        f"3's scaling of {head_dim // 2} rotary frequencies; no other is supported"
    )


# The tokenizer: byte-level BPE, GGUF's "gpt2".  The metadata name the rule that splits
# a text before the merges (`tokenizer.ggml.pre`).  llama.cpp has these rules in its
# code; here they are taken from the models' own tokenizer.json files.


def _make_tokenizer(values: Mapping[str, Any], *, path: Path) -> Tokenizer:
    """Return a tokenizer from the fields of tokenizer.ggml in the file `path`.

    Raises:
        ValueError: a field is missing or not supported; names it.
    """
    if values.get("model") != "gpt2":
        raise ValueError(
            f"{path}: tokenizer.ggml.model = {values.get('model')!r} is not supported, "
            f"only 'gpt2', byte-level BPE; name a tokenizer.json as data.tokenizer"
        )
    if values.get("pre") not in list(_PRE_TOKENIZERS):
        raise ValueError(
            f"{path}: tokenizer.ggml.pre = {values.get('pre')!r} is not supported; "
            f"choose from {sorted(_PRE_TOKENIZERS)}, or name a tokenizer.json as "
            f"data.tokenizer"
        )
    for name in ("tokens", "token_type", "merges"):
        if name not in values:
            raise ValueError(f"{path} lacks tokenizer.ggml.{name}")
    tokens = _texts(values["tokens"], path, "tokens")
    kinds = values["token_type"]
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(
            f"{path}: tokenizer.ggml.token_type is no list with an entry for each of "
            f"{len(tokens)} tokens"
        )
    merges = [m.split(" ", 1) for m in _texts(values["merges"], path, "merges")]
    try:
        backend = Tokenizer(
            models.BPE(
                vocab={token: place for place, token in enumerate(tokens)},
                merges=[(first, second) for first, second in merges],
                ignore_merges=values["pre"] == "llama-bpe",
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"{path}: tokenizer.ggml.merges are not of two tokens each: {error}"
        ) from error
    if values["pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[values["pre"]]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _texts(found: Any, file: object, name: str) -> list[str]:
    """Return `found`; raise ValueError unless it is a list of texts."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{file}: tokenizer.ggml.{name} is no list of texts")
    return found


def _cut(first: Any, *, use_regex: bool) -> Any:
    """Return a splitter: by `first`, by GPT-2's words if `use_regex`, into bytes."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([first, last])


def _words(digits: str) -> Any:
    """Return Llama 3's and Qwen's splitter; `digits` is the quantifier of a number."""
    words = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return _cut(words, use_regex=False)


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: _cut(
        pre_tokenizers.Digits(individual_digits=True), use_regex=True
    ),
    "llama-bpe": lambda: _words("{1,3}"),
    "qwen2": lambda: _words(""),
}
