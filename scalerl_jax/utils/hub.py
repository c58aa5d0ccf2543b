"""Names on the Hugging Face hub as folders of this machine, in its library's cache.

What is in a bucket is copied to a folder, too.

HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE in the environment mean what they mean
to the hub's other tools.
"""

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scalerl_jax.utils.failures import first_line

if TYPE_CHECKING:
    from scalerl_jax.utils.gguf import GGUFModel

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# Whose sizes do not grow with the model's, by which a run is looked at.
_FILES_OF_RUN = ("config.json", "data.json", "ledger.json", "status.json")
_FILES_OF_RUN += ("metrics.jsonl", "evals.jsonl", "trainer_state.json")
_DESCRIPTION = ("*.json", "*.jinja", "merges.txt")  # of a model, its weights apart


def is_remote(path: object) -> bool:
    """Return whether a path is in a bucket, or looks like it."""
    return "://" in str(path)


def copies() -> Path:
    """Return the directory with the copies of what is in buckets."""
    return Path("~/.cache/scalerl_jax/buckets").expanduser().absolute()


def copy_of(url: str) -> Path:
    """Return where the copy of a path in a bucket lies, gs://BUCKET/PATH."""
    return copies() / url.partition("://")[2].strip("/")


def origin_of(path: Path) -> str:
    """Return where the copy of something in a bucket is from; of no copy, nothing."""
    if not path.is_relative_to(copies()) or path == copies():
        return ""
    return f"gs://{path.relative_to(copies()).as_posix()}"


def files_of_run(path: str | Path) -> Path:
    """Return a path of this machine; of a run in a bucket, a copy of its small files.

    The copy is fetched as far as it has changed, and lies apart from the one that a run
    of this machine writes (`copy_of`).  A path may also be a single file.

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
    """
    parted = re.match(r"([a-z][a-z0-9]+):/+", str(path))  # a Path has one slash only
    if parted is None:
        return Path(path)
    url = f"{parted[1]}://{str(path)[parted.end() :]}".rstrip("/")
    from scalerl_jax.utils import remote  # for buckets only

    copy = _looked_at() / url.partition("://")[2]
    remote.fetch(url, copy, setting="", suffixes=_FILES_OF_RUN)
    return copy


def send_back(file: Path) -> str:
    """Write a file beside what it was made of, if that is in a bucket.

    Returns:
        its place: in the bucket, or here if it is of this machine or the bucket takes
        no writing of ours.
    """
    if not file.is_relative_to(_looked_at()):
        return str(file)
    from scalerl_jax.utils import remote

    url = f"gs://{file.relative_to(_looked_at()).as_posix()}"
    try:
        remote.write(remote.open_path(url, setting=""), file.read_bytes())
    except (OSError, ValueError):  # who may only read has it here
        return str(file)
    return url


def _looked_at() -> Path:
    return copies().with_name("looked_at")


def local_file(name: str, *, suffixes: tuple[str, ...] | None = None) -> Path:
    """Return a local path, or of one in a bucket its copy, which is fetched.

    Of a directory in a bucket, files that end with one of the `suffixes` are fetched.

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
    """
    if not is_remote(name):
        return Path(name).expanduser()
    from scalerl_jax.utils import remote  # for buckets only

    remote.fetch(name, copy_of(name), setting="", suffixes=suffixes)
    return copy_of(name)


def is_hub_id(name: str | Path) -> bool:
    """Return whether a name is "OWNER/NAME[@REVISION]", and no file here."""
    return bool(_ID.fullmatch(str(name))) and not Path(name).exists()


def local_path(name: str | Path, *, weights: bool = False) -> "Path | GGUFModel":
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
        from scalerl_jax.utils.gguf import GGUFModel  # its parser is optional

        return GGUFModel(path)
    patterns = (*_DESCRIPTION, "*.safetensors") if weights else _DESCRIPTION
    return fetch(str(name), patterns, kind="model")


def local_directory(name: str | Path) -> "Path | GGUFModel":
    """The directory of `local_path`, which may name its tokenizer.json instead."""
    path = local_path(name)
    return path.parent if isinstance(path, Path) and not path.is_dir() else path


@functools.cache
def fetch(
    name: str, patterns: tuple[str, ...], *, kind: Literal["model", "dataset"]
) -> Path:
    """Return the folder of a repository's files that match; fetched, or cached.

    Raises:
        ValueError: the hub does not have it, or cannot be reached.
    """
    import huggingface_hub  # half a second
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            repository,
            repo_type=kind,
            revision=revision or None,
            allow_patterns=list(patterns),
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{name} is no file here, and the Hugging Face hub cannot be reached, nor "
            f"does its cache have it: hf download {repository} fetches it where there "
            f"is a network ({first_line(error)})"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no file here, and the Hugging Face hub does not give it: "
            f"{first_line(error)}; look at the name, and at the login of a gated one"
        ) from error
    return Path(found)
