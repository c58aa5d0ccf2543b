"""Text to token ids and back, in the `tokenizers` format of Hugging Face."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from scalerl_jax.data.detokenizer import Detokenizer, read_decoder, read_detokenizer
from scalerl_jax.data.questions import THINKING_TAGS, find_answer
from scalerl_jax.formats import bounded, reading
from scalerl_jax.formats.model_files import local_path
from scalerl_jax.formats.reading import Directory

# Tokens that end a text if a model's files name none: Llama 2, 3 and chat models.
_USUAL_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<eos>",
)
_MOST_IDS = 1000  # ids without a token in a small vocabulary
_TAGS = tuple(tag for tags in THINKING_TAGS for tag in tags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A `tokenizer.json`, and the ids that end a completion."""

    backend: _Tokenizer
    eos_ids: tuple[int, ...]
    markers: tuple[str, ...] = ()  # searched in texts: their special tokens are shown

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, no special token added.

        A chat template writes the special tokens itself.  Those that a question
        happens to spell become special tokens too, as with `transformers`.
        """
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_aside(self, text: str) -> list[int]:
        """Return the ids of `encode` without holding the GIL, so other threads run."""
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the ids that `encode` gives for each text, with several threads."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [len(each) for each in encodings]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens except those of `markers`.

        Thinking tags, which some families make special, are shown too: the answer
        follows them.
        """
        return self.shown.text(ids)

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens written out."""
        return self.written.text(ids)

    def answer_start(self, ids: list[int], *, answer_after: str) -> int | None:
        """Return where the answer begins in the text of `decode_all`.

        The answer follows the last `answer_after` in the text of `decode`; None if that
        text does not contain it.
        """
        start = find_answer(self.decode(ids), answer_after=answer_after)
        if not start:
            return start
        texts = zip(self.shown.texts(ids), self.written.texts(ids), strict=True)
        shown = written = 0
        for own, whole in texts:
            shown, written = shown + len(own), written + len(whole)
            if shown >= start:
                break
        return written - (shown - start)

    @functools.cached_property
    def written(self) -> Detokenizer:
        """Make the detokenizer that writes special tokens out."""
        return read_detokenizer(self.backend)

    @functools.cached_property
    def shown(self) -> Detokenizer:
        """Make the detokenizer of `decode`, which leaves special tokens out.

        Tokens of thinking tags and of the `markers` are kept.
        """
        kept = (*_TAGS, *self.markers)
        return self.written.without(
            place
            for place, token in self.backend.get_added_tokens_decoder().items()
            if token.special and not any(token.content in text for text in kept)
        )


def load_tokenizer(path: str | Path, *, must_end: bool = True) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or id, `tokenizer.json`, or GGUF.

    A completion ends at the end-of-sequence ids of `generation_config.json`, else of
    `config.json`, and at the `eos_token` of `tokenizer_config.json`, else of
    `special_tokens_map.json`, if that is one token.  In a chat model this token ends a
    turn, and the other files do not always name it.  If no file names a token, a
    completion ends at those of `_USUAL_ENDS` in the vocabulary, added tokens alone if
    any of them is one.  Without `must_end`, no such token is needed, which is enough to
    inspect texts.

    Raises:
        ValueError: a file is missing or malformed, no id ends a sequence or one is of
            no token, or texts are not decoded token by token.
    """
    directory = local_path(path)
    file = directory / "tokenizer.json"
    if isinstance(directory, Path) and not directory.is_dir():
        file, directory = directory, directory.parent
    if not file.is_file():
        raise ValueError(
            f"data.tokenizer: no file {file}; name a tokenizer.json, or a Hugging Face "
            f"directory that holds one"
        )
    content = bounded.read_bytes(file, most=bounded.MOST_WHOLE)
    try:
        backend = _Tokenizer.from_buffer(content)
        backend.no_padding()  # to a length that the file chooses
        backend.no_truncation()
        backend.encode("a", add_special_tokens=False)  # some lack their unknown token
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"data.tokenizer: {file} is not a `tokenizers` file: {error}"
        ) from error
    _check_ids(backend, file)
    read_decoder(backend)
    eos_ids = _read_eos_ids(directory, backend)
    if must_end and not eos_ids:
        raise ValueError(
            f"data.tokenizer: no eos_token_id in generation_config.json or config.json "
            f"of {directory}, no eos_token in tokenizer_config.json that the "
            f"tokenizer has, and none of {', '.join(_USUAL_ENDS)} in it; a "
            f"completion could never end: write one of these files"
        )
    return Tokenizer(backend=backend, eos_ids=eos_ids)


def _check_ids(backend: _Tokenizer, file: object) -> None:
    """Raise for ids far beyond the number of tokens: tables have a row for each id."""
    ids = backend.get_vocab(with_added_tokens=True).values()
    if (last := max(ids, default=0)) > _MOST_IDS + 10 * len(ids):
        raise ValueError(
            f"data.tokenizer: {file} has the token id {last} and {len(ids)} tokens; "
            f"ids must follow each other: repair the file"
        )


def read_special_tokens(directory: Directory) -> dict[str, str]:
    """Return the tokens that a directory names, such as "eos_token", by these names.

    They are in `tokenizer_config.json`, in older directories in
    `special_tokens_map.json`.  The order is that of `transformers`.

    Raises:
        ValueError: a file is malformed.
    """
    values = read_json(directory, "tokenizer_config.json")
    if "added_tokens_decoder" not in values:
        values |= read_json(directory, "special_tokens_map.json")
    named = {name: values[name] for name in values if name.endswith("_token")}
    extra = values.get("extra_special_tokens")
    if isinstance(extra, dict):  # else a list of tokens without names
        named |= extra
    tokens = {}
    for name, token in named.items():
        if isinstance(token, dict):  # with how it is matched
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def read_json(directory: Directory, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a directory; {} if there is no file.

    Raises:
        ValueError: it holds something else.
    """
    file = directory / name
    if not file.exists():
        return {}
    try:
        return reading.read_json(file)
    except ValueError as error:
        raise ValueError(f"data.tokenizer: {error}") from error


def _read_eos_ids(directory: Directory, backend: _Tokenizer) -> tuple[int, ...]:
    ids = _configured_eos_ids(directory, backend)
    token = read_special_tokens(directory).get("eos_token")
    if token is not None:
        ids.append(backend.token_to_id(token))
    if not any(each is not None for each in ids):
        usual = [backend.token_to_id(token) for token in _USUAL_ENDS]
        # In Qwen's vocabulary "</s>" is a piece of HTML, and no added token.
        added = backend.get_added_tokens_decoder()
        ids = [each for each in usual if each in added] or usual
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _configured_eos_ids(directory: Directory, backend: _Tokenizer) -> list[int | None]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory, name).get("eos_token_id")
        if value is None or value == []:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in ids):
            raise ValueError(
                f"data.tokenizer: eos_token_id = {repr(value)[:100]} in "
                f"{directory / name} must be a token id or a list of them"
            )
        known = backend.get_vocab(with_added_tokens=True).values()
        if outside := set(ids) - set(known):
            raise ValueError(
                f"data.tokenizer: eos_token_id = {repr(value)[:100]} in "
                f"{directory / name}: the tokenizer has no token {min(outside)}; put "
                f"the file right"
            )
        return ids
    return []
