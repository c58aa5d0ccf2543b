"""Text to token ids and back, in the `tokenizers` format of Hugging Face."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A `tokenizer.json`, and the ids that end a completion."""

    backend: _Tokenizer
    eos_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special token added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: list[int]) -> str:
        """The text of ids, special tokens written out."""
        return self.backend.decode(ids, skip_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, or a `tokenizer.json` in one.

    The end-of-sequence ids come from `generation_config.json`, else `config.json`.

    Raises:
        ValueError: a file is missing or malformed, or no id ends a sequence.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"data.tokenizer: no file {file}; name a tokenizer.json, or a Hugging Face "
            f"directory that holds one"
        )
    try:
        backend = _Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"data.tokenizer: {file} is not a `tokenizers` file: {error}"
        ) from error
    return Tokenizer(backend=backend, eos_ids=_read_eos_ids(file.parent))


def _read_eos_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if not file.is_file():
            continue
        value = _read_json(file).get("eos_token_id")
        if value is None or value == []:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in ids):
            raise ValueError(
                f"data.tokenizer: eos_token_id = {value!r} in {file} must be a token "
                f"id or a list of them"
            )
        return tuple(ids)
    raise ValueError(
        f"data.tokenizer: no eos_token_id in generation_config.json or config.json of "
        f"{directory}; a completion could never end"
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"data.tokenizer: {file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"data.tokenizer: {file} must hold a JSON object")
    return values
