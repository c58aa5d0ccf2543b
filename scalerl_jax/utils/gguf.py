"""GGUF files: their metadata, and where their tensors lie.

Parsed by the `gguf` package, https://github.com/ggml-org/llama.cpp (gguf-py), an extra
of this one: pip install "scalerl_jax[gguf]".
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """A tensor's place in its file."""

    kind: str  # name in `gguf.GGMLQuantizationType`
    shape: tuple[int, ...]  # rows first
    start: int  # bytes from the beginning of the file


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A file's metadata, and the places of its tensors."""

    path: Path
    metadata: dict[str, Any]  # numbers, booleans, strings and lists of them
    tensors: dict[str, GGUFTensor]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint or a tokenizer is named as a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Return metadata and places of tensors; the last file is remembered.

    Raises:
        ValueError: there is no such file, it is no GGUF, cut short or part of a
            larger one, or the `gguf` package is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a GGUF file")
    state = path.stat()
    return _open(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: Path, modified: int, size: int) -> GGUFFile:
    """Open a file; `modified` and `size` tell it from one that replaces it."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{path} needs the gguf package to be read: pip install "scalerl_jax[gguf]"'
        ) from error
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: _plain(field) for name, field in reader.fields.items()}
    # What the parser meets in bytes that are missing or wrong.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is no GGUF file, or is cut short: {error}; copy it "
            f"again"
        ) from error
    if reader.byte_order != "I":
        raise ValueError(
            f"{path} has the byte order of other machines; convert it with "
            f"gguf-convert-endian"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path} is one of split.count = {metadata['split.count']} parts; join "
            f"them with llama-gguf-split --merge"
        )
    tensors = {
        tensor.name: GGUFTensor(
            kind=tensor.tensor_type.name,
            shape=tuple(map(int, reversed(tensor.shape))),
            start=int(tensor.data_offset),
        )
        for tensor in reader.tensors
    }
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _plain(field: Any) -> Any:
    """Return a field's value; float32 as its shortest decimal: 1e-05."""
    value = field.contents()
    if field.types and field.types[0].name == "FLOAT32":
        return float(str(np.float32(value)))
    return value
