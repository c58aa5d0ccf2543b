"""Files in buckets and on the Hugging Face hub, and their local copies.

Paths in Google Cloud Storage are `gs://BUCKET/...`.  Without TensorFlow, etils' paths
(and so orbax) use gcsfs, of the extra [gcs]; it is imported with the first path in a
bucket, and finds credentials where Google's tools store them.

Files of the hub are copied to the cache of its library.  The environment variables
HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their usual meaning.
"""

import concurrent.futures
import contextlib
import datetime
import functools
import importlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scalerl_jax.formats.bucket_contact import Quiet, Retry, heard, in_time
from scalerl_jax.formats.paths import inside
from scalerl_jax.process.ending import first_line

if TYPE_CHECKING:
    from etils import epath

_SCHEME = "gs://"
URL = re.compile(r"([a-z][a-z0-9]+):/+")  # its beginning; a Path has one slash only
_ANSWER_S = 120.0  # timeout of one request, without retries
_FIRST_S = 10.0  # timeout of a bucket's first answer to a command, with retries
ACCESS_S = 180.0  # the same for a process of a run in progress
# A model's weights once more, in its publisher's format, as of Mistral 7B and gpt-oss.
_SECOND_COPIES = ["*/*", "consolidated*"]
# Files that readers of a run need; their sizes do not depend on the model's.
_FILES_OF_RUN = ("config.json", "data.json", "ledger.json", "status.json")
_FILES_OF_RUN += ("metrics.jsonl", "evals.jsonl", "trainer_state.json", "ended.json")


def open_path(url: str, *, setting: str, in_run: bool = False) -> "epath.Path":
    """Return a path in a bucket, after checking that the bucket answers.

    Without a network a command fails after `_FIRST_S` seconds.  A run in progress
    (`in_run`) waits longer, as does a process that the bucket has answered before.

    Raises:
        ValueError: the URL is not in a bucket, the extra is not installed, or the
            bucket does not exist or denies access.
        TimeoutError: the bucket does not answer in time, and may later.
    """
    bucket = _bucket_of(url, setting=setting)
    # Otherwise gcsfs reads the bucket's type, a right that writers of objects lack.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        importlib.import_module("gcsfs")  # used by `file_system`
    except ImportError as error:
        raise ValueError(
            f"{setting}{url} needs the extra [gcs]: pip install 'scalerl_jax[gcs]'"
        ) from error
    from etils import epath

    path = epath.Path(url.rstrip("/"))
    within_s = ACCESS_S if in_run or bucket in _answered else _FIRST_S
    retry = Retry()
    try:
        with heard(retry):
            in_time(lambda: entries(path / "config.json"), within_s)
    except FileNotFoundError as error:
        raise ValueError(
            f"{setting}{url}: there is no bucket {bucket!r}, or it is hidden from your "
            f"account; gcloud storage buckets create gs://{bucket} makes one"
        ) from error
    except Exception as error:
        # What gcsfs has tried several times may be otherwise later.
        if not isinstance(error, TimeoutError) and not retry.reason:
            raise ValueError(
                f"{setting}{url}: the bucket {bucket!r} cannot be used "
                f"({reason(error)}); gcloud auth application-default login gives "
                f"credentials, which need roles/storage.objectUser there"
            ) from error
        why = retry.reason or "it does not answer"
        raise TimeoutError(
            f"{setting}{url}: the bucket {bucket!r} has not been reached within "
            f"{within_s:g} s ({why}); see to the network, and to credentials: gcloud "
            f"auth application-default login gives them"
        ) from error
    _answered.add(bucket)
    return path


def _bucket_of(url: str, *, setting: str) -> str:
    """Return the name of the bucket in a URL.

    Raises:
        ValueError: the URL is not in a bucket.
    """
    bucket = url.removeprefix(_SCHEME).partition("/")[0]
    if not url.startswith(_SCHEME) or not bucket or "#" in url or "/../" in f"{url}/":
        raise ValueError(
            f"{setting}{url} is neither a local path nor one in a bucket of Google "
            f"Cloud Storage; write gs://BUCKET/PATH"
        )
    return bucket


_answered: set[str] = set()  # buckets that have answered this process


def reason(error: BaseException) -> str:
    """Return the last line of an error, which has the cause, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@functools.cache
def file_system() -> Any:
    """Return gcsfs's file system of all buckets, which etils' paths use too."""
    import fsspec
    from fsspec.config import conf

    # tensorstore writes objects without updating gcsfs's cache of listings.
    ours = {"use_listings_cache": False, "requests_timeout": _ANSWER_S}
    conf["gcs"] = {**conf.get("gcs", {}), **ours}
    logging.getLogger("gcsfs").addFilter(Quiet())
    return fsspec.filesystem("gcs", finalize_on_close=True)


def entries(path: "epath.Path") -> dict[str, dict[str, Any]]:
    """Return the metadata of every object below a path, by name.

    An object at the path itself has the name "".
    """
    root = os.fspath(path).removeprefix(_SCHEME)
    found = file_system().find(root, detail=True)
    inside = {name: each for name, each in found.items() if name.startswith(f"{root}/")}
    own = {"": found[root]} if root in found else {}
    return own | {name[len(root) + 1 :]: each for name, each in inside.items()}


def read(path: "epath.Path") -> bytes | None:
    """Return the bytes of an object; None if it does not exist."""
    try:
        return file_system().cat_file(os.fspath(path))
    except FileNotFoundError:
        return None


def write(path: "epath.Path", data: bytes, *, only_new: bool = False) -> None:
    """Write an object atomically: a reader sees the old or the new content.

    Raises:
        FileExistsError: `only_new`, and the object exists.
    """
    mode = "create" if only_new else "overwrite"
    file_system().pipe_file(os.fspath(path), data, mode=mode)


def send(path: "epath.Path", file: Path) -> None:
    """Write an object with a file's content as `write` does, from a disk in parts."""
    file_system().put_file(str(file), os.fspath(path))


def remove(path: "epath.Path") -> None:
    """Remove an object, or all objects below a path, if any exist."""
    objects = [
        f"{path}/{name}" if name else os.fspath(path) for name in sorted(entries(path))
    ]
    if objects:
        file_system().rm(objects)


def remove_generation(path: "epath.Path", generation: str) -> None:
    """Remove an object if it still has this generation (is unchanged)."""
    try:
        file_system().call(
            "DELETE", "b/{}/o/{}", *_parts(path), ifGenerationMatch=generation
        )
    except (FileNotFoundError, FileExistsError):  # it is removed, or replaced
        return


def _parts(path: "epath.Path") -> tuple[str, str]:
    bucket, _, name = os.fspath(path).removeprefix(_SCHEME).partition("/")
    return bucket, name


def fetch(
    url: str, target: Path, *, setting: str, suffixes: Iterable[str] | None = None
) -> None:
    """Copy changed objects of a file or directory in a bucket to `target`.

    Of a directory only files that end with one of the `suffixes` are copied.

    Raises:
        ValueError, TimeoutError: see `open_path`.
        ValueError: no object exists, or one cannot be read from the bucket or written
            to `target`.
    """
    path = open_path(url, setting=setting)
    with _fetching(f"{setting}{url}", target):
        wanted = {
            name: each
            for name, each in entries(path).items()
            if suffixes is None or not name or name.endswith(tuple(suffixes))
        }
    if not wanted:
        raise ValueError(f"{setting}{url}: there is nothing of this name")
    files = places(path, wanted, target)
    with _fetching(f"{setting}{url}", target):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda name: _fetch(path, name, files[name], wanted[name]), files
                )
            )


@contextlib.contextmanager
def _fetching(what: str, target: Path) -> Iterator[None]:
    """Turn an error in the block into one of ours that names source and target."""
    try:
        yield
    except Exception as error:
        silent = isinstance(error, TimeoutError | ConnectionError)
        kind = TimeoutError if silent else ValueError
        raise kind(
            f"{what} cannot be fetched to {target} ({reason(error)}); see to the "
            f"network, the bucket, and free space and rights here"
        ) from error


def places(path: "epath.Path", names: Iterable[str], target: Path) -> dict[str, Path]:
    """Return the file in the copy `target` for each object below a path.

    Objects that end with "/", with which some tools mark folders, are left out.

    Raises:
        ValueError: the name of an object leads out of the copy.
    """
    return {
        name: inside(target, name, called=os.fspath(path)) if name else target
        for name in names
        if not name.endswith("/")
    }


def _fetch(path: "epath.Path", name: str, file: Path, entry: dict[str, Any]) -> None:
    """Fetch one object, unless its copy has the same size and time."""
    written: datetime.datetime = entry["mtime"]
    if file.is_file():
        known = file.stat()
        if (known.st_size, known.st_mtime) == (entry["size"], written.timestamp()):
            return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
        part = Path(folder) / "part"
        file_system().get_file(f"{path}/{name}" if name else os.fspath(path), str(part))
        os.utime(part, (written.timestamp(), written.timestamp()))
        os.replace(part, file)


# Copies.


def copies() -> Path:
    """Return the directory of local copies of paths in buckets."""
    return Path("~/.cache/scalerl_jax/buckets").expanduser().absolute()


def copy_of(url: str) -> Path:
    """Return the path of the local copy of gs://BUCKET/PATH.

    Raises:
        ValueError: the URL is not in a bucket, or has an invalid part.
    """
    return _below(copies(), url)


def _below(folder: Path, url: str) -> Path:
    _bucket_of(url, setting="")
    return inside(folder, url.removeprefix(_SCHEME).rstrip("/"), called=_SCHEME)


def origin_of(path: Path) -> str:
    """Return the URL of which a path is the local copy; "" if it is no copy."""
    for folder in (copies(), _fetched()):
        if path.is_relative_to(folder) and path != folder:
            return f"gs://{path.relative_to(folder).as_posix()}"
    return ""


def files_of_run(path: str | Path) -> Path:
    """Return a local path, or a local copy of the small files of a run in a bucket.

    Changed files are fetched.  The copy is separate from the one that a run on this
    machine writes (`copy_of`).  A path may also be a single file.

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
        TimeoutError: the bucket does not answer in time.
    """
    parted = URL.match(str(path))
    if parted is None:
        return Path(path)
    url = f"{parted[1]}://{str(path)[parted.end() :]}".rstrip("/")
    copy = _below(_looked_at(), url)
    fetch(url, copy, setting="", suffixes=_FILES_OF_RUN)
    return copy


def send_back(file: Path) -> str:
    """Upload a file in a copy of `files_of_run` to the bucket of that run.

    Returns:
        The URL in the bucket; or the local path, if the file is in no such copy or
        the bucket denies the write.
    """
    if not file.is_relative_to(_looked_at()):
        return str(file)
    url = f"gs://{file.relative_to(_looked_at()).as_posix()}"
    try:
        write(open_path(url, setting=""), file.read_bytes())
    except (OSError, ValueError):  # with read access only, the file stays local
        return str(file)
    return url


def fetch_copy(url: str, *, suffixes: tuple[str, ...] | None) -> Path:
    """Fetch changed files of a path in a bucket; return the path of the local copy.

    The copy is separate from the one that a run on this machine writes (`copy_of`).

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
        TimeoutError: the bucket does not answer in time.
    """
    copy = _below(_fetched(), url)
    fetch(url, copy, setting="", suffixes=suffixes)
    return copy


def _fetched() -> Path:
    return copies().with_name("fetched")


def _looked_at() -> Path:
    return copies().with_name("looked_at")


# The hub.


@functools.cache
def fetch_repository(
    name: str, patterns: tuple[str, ...], *, kind: Literal["model", "dataset"]
) -> Path:
    """Return the folder with a repository's matching files, fetched or cached.

    Raises:
        ValueError: the hub does not have it, or cannot be reached.
    """
    import huggingface_hub  # takes half a second
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            repository,
            repo_type=kind,
            revision=revision or None,
            allow_patterns=list(patterns),
            ignore_patterns=_SECOND_COPIES if kind == "model" else None,
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
            f"{first_line(error)}; check the name, and the login for a gated one"
        ) from error
    return Path(found)
