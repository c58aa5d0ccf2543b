"""Where the files of a checkpoint or a tokenizer are: here, in a bucket, on the hub."""

from pathlib import Path

from scalerl_jax.formats.gguf import GGUFModel
from scalerl_jax.formats.reading import is_hub_id, is_remote, local_file
from scalerl_jax.formats.remote import fetch_repository

_DESCRIPTION = ("*.json", "*.jinja", "merges.txt")  # of a model, its weights apart


def local_path(name: str | Path, *, weights: bool = False) -> Path | GGUFModel:
    """Return the path of a checkpoint or a tokenizer, here or in a cache.

    A GGUF file is read as the directory that it was made from.  From the hub and from
    buckets, weights are fetched only when they are asked for.

    Raises:
        ValueError: the hub or the bucket does not have it, or cannot be reached.
    """
    if is_remote(name):
        suffixes = tuple(pattern.lstrip("*") for pattern in _DESCRIPTION)
        kinds = (*suffixes, ".gguf", ".safetensors") if weights else suffixes
        name = local_file(str(name), suffixes=kinds)
    if not is_hub_id(name):
        path = Path(name).expanduser()
        if path.suffix.lower() != ".gguf":
            return path
        return GGUFModel(path)
    patterns = (*_DESCRIPTION, "*.safetensors") if weights else _DESCRIPTION
    return fetch_repository(str(name), patterns, kind="model")


def local_directory(name: str | Path) -> Path | GGUFModel:
    """The directory of `local_path`, which may name its tokenizer.json instead."""
    path = local_path(name)
    return path.parent if isinstance(path, Path) and not path.is_dir() else path
