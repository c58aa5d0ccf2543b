"""Locate the files of a checkpoint or tokenizer: local, in a bucket, or on the hub."""

from pathlib import Path

from scalerl_jax.formats.gguf import GGUFModel
from scalerl_jax.formats.reading import is_hub_id, is_remote, local_file
from scalerl_jax.formats.remote import fetch_repository

_DESCRIPTION = ("*.json", "*.jinja", "merges.txt")  # files of a model but its weights


def local_path(name: str | Path, *, weights: bool = False) -> Path | GGUFModel:
    """Return the local path of a checkpoint or tokenizer, perhaps in a cache.

    A GGUF file is presented as a Hugging Face directory.  From the hub and from buckets
    the weights are fetched only if `weights`.

    Raises:
        ValueError: the hub or the bucket does not have it, or the hub is not reached.
        TimeoutError: the bucket does not answer in time.
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
    """Return a tokenizer's directory; `name` may also be its tokenizer.json."""
    path = local_path(name)
    return path.parent if isinstance(path, Path) and not path.is_dir() else path
