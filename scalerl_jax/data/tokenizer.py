"""Text to token ids and back, in the `tokenizers` format of Hugging Face."""

import dataclasses
import json
from pathlib import Path

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
        try:
            value = json.loads(file.read_text()).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise ValueError(f"data.tokenizer: {file} is not JSON: {error}") from error
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    raise ValueError(
        f"data.tokenizer: no eos_token_id in generation_config.json or config.json of "
        f"{directory}; a completion could never end"
    )
