"""Files that lie elsewhere, in buckets and on the hub, and their copies here.

Paths in Google Cloud Storage are `gs://BUCKET/...`.  gcsfs, of the extra [gcs], is what
etils' paths, and so orbax, go through where there is no TensorFlow; it is loaded with
the first path in a bucket.  It finds credentials where Google's tools put them.

What the Hugging Face hub has is copied to the cache of its library.  HF_HOME,
HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE in the environment mean what they mean to the
hub's other tools.
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
_ANSWER_S = 120.0  # for one request, retries apart
_FIRST_S = 10.0  # for the first answer of a bucket to a command, retries included
ACCESS_S = 180.0  # for the first answer to a process of a run that has begun
# Files by which a run is looked at; their sizes do not grow with the model's.
_FILES_OF_RUN = ("config.json", "data.json", "ledger.json", "status.json")
_FILES_OF_RUN += ("metrics.jsonl", "evals.jsonl", "trainer_state.json")


def open_path(url: str, *, setting: str, in_run: bool = False) -> "epath.Path":
    """Return a path in a bucket that answers.

    A command that finds no network says so after a few seconds.  A run that has begun
    (`in_run`) waits longer, as does a command that the bucket has answered before.

    Raises:
        ValueError: it is in no bucket, the extra is not installed, the bucket does not
            exist or does not answer, or it lets us see nothing.
    """
    bucket = _bucket_of(url, setting=setting)
    # Its look at a bucket's kind asks for a right that writers of objects lack.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        importlib.import_module("gcsfs")  # what `file_system` gives
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
    except TimeoutError as error:
        why = retry.reason or "it does not answer"
        raise ValueError(
            f"{setting}{url}: the bucket {bucket!r} has not been reached within "
            f"{within_s:g} s ({why}); see to the network, and to credentials: gcloud "
            f"auth application-default login gives them"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{setting}{url}: the bucket {bucket!r} cannot be used ({reason(error)}); "
            f"gcloud auth application-default login gives credentials, which need "
            f"roles/storage.objectUser there"
        ) from error
    _answered.add(bucket)
    return path


def _bucket_of(url: str, *, setting: str) -> str:
    """Return the name of the bucket in a path.

    Raises:
        ValueError: it is in no bucket.
    """
    bucket = url.removeprefix(_SCHEME).partition("/")[0]
    if not url.startswith(_SCHEME) or not bucket or "#" in url or "/../" in f"{url}/":
        raise ValueError(
            f"{setting}{url} is neither a local path nor one in a bucket of Google "
            f"Cloud Storage; write gs://BUCKET/PATH"
        )
    return bucket


_answered: set[str] = set()  # buckets that have, in this process


def reason(error: BaseException) -> str:
    """Return the last line of an error, which has its cause; or its name."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@functools.cache
def file_system() -> Any:
    """Return the buckets as one file system; the same that etils' paths use."""
    import fsspec
    from fsspec.config import conf

    # tensorstore writes past its cache of listings.
    ours = {"use_listings_cache": False, "requests_timeout": _ANSWER_S}
    conf["gcs"] = {**conf.get("gcs", {}), **ours}
    logging.getLogger("gcsfs").addFilter(Quiet())
    return fsspec.filesystem("gcs", finalize_on_close=True)


def entries(path: "epath.Path") -> dict[str, dict[str, Any]]:
    """Return every object below a path, by name, with what the bucket says of it.

    The path's own object, if it is one, has the name "".
    """
    root = os.fspath(path).removeprefix(_SCHEME)
    found = file_system().find(root, detail=True)
    inside = {name: each for name, each in found.items() if name.startswith(f"{root}/")}
    own = {"": found[root]} if root in found else {}
    return own | {name[len(root) + 1 :]: each for name, each in inside.items()}


def read(path: "epath.Path") -> bytes | None:
    """Return the bytes of an object; None if there is none."""
    try:
        return file_system().cat_file(os.fspath(path))
    except FileNotFoundError:
        return None


def write(path: "epath.Path", data: bytes, *, only_new: bool = False) -> None:
    """Write an object in one go: a reader sees all of it, or what was there.

    Raises:
        FileExistsError: `only_new`, and there is one.
    """
    mode = "create" if only_new else "overwrite"
    file_system().pipe_file(os.fspath(path), data, mode=mode)


def remove(path: "epath.Path") -> None:
    """Remove an object, or all below a path, if there is any."""
    objects = [
        f"{path}/{name}" if name else os.fspath(path) for name in sorted(entries(path))
    ]
    if objects:
        file_system().rm(objects)


def remove_generation(path: "epath.Path", generation: str) -> None:
    """Remove an object if it is still as it was when this was its generation."""
    try:
        file_system().call(
            "DELETE", "b/{}/o/{}", *_parts(path), ifGenerationMatch=generation
        )
    except (FileNotFoundError, FileExistsError):  # it is gone, or another
        return


def _parts(path: "epath.Path") -> tuple[str, str]:
    bucket, _, name = os.fspath(path).removeprefix(_SCHEME).partition("/")
    return bucket, name


def fetch(
    url: str, target: Path, *, setting: str, suffixes: Iterable[str] | None = None
) -> None:
    """Copy a file or directory to `target`, as far as it has changed.

    Of a directory only files that end with one of the `suffixes` are copied.

    Raises:
        ValueError: as `open_path`; or there is nothing there, or the bucket does not
            give it, or it cannot be written here.
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
    """Name, in the error of a failed fetch, the thing to fetch and its target."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{what} cannot be fetched to {target} ({reason(error)}); see to the "
            f"network, the bucket, and free space and rights here"
        ) from error


def places(path: "epath.Path", names: Iterable[str], target: Path) -> dict[str, Path]:
    """Return where in a copy of a path its objects belong.

    Objects that end with "/", by which some tools mark folders, belong nowhere.

    Raises:
        ValueError: an object has a name that leads out of the copy.
    """
    return {
        name: inside(target, name, called=os.fspath(path)) if name else target
        for name in names
        if not name.endswith("/")
    }


def _fetch(path: "epath.Path", name: str, file: Path, entry: dict[str, Any]) -> None:
    """Fetch one object, unless its copy is as large and as old."""
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
    """Return the directory with the copies of what is in buckets."""
    return Path("~/.cache/scalerl_jax/buckets").expanduser().absolute()


def copy_of(url: str) -> Path:
    """Return where the copy of a path in a bucket lies, gs://BUCKET/PATH.

    Raises:
        ValueError: it is in no bucket, or has a part that names no object.
    """
    return _below(copies(), url)


def _below(folder: Path, url: str) -> Path:
    _bucket_of(url, setting="")
    return inside(folder, url.removeprefix(_SCHEME).rstrip("/"), called=_SCHEME)


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
    copy = _below(_looked_at(), url)
    fetch(url, copy, setting="", suffixes=_FILES_OF_RUN)
    return copy


def send_back(file: Path) -> str:
    """Write a file beside what it was made of, if that is in a bucket.

    Returns:
        its place: in the bucket, or here if it is of this machine or the bucket takes
        no writing of ours.
    """
    if not file.is_relative_to(_looked_at()):
        return str(file)
    url = f"gs://{file.relative_to(_looked_at()).as_posix()}"
    try:
        write(open_path(url, setting=""), file.read_bytes())
    except (OSError, ValueError):  # who may only read has it here
        return str(file)
    return url


def fetch_copy(url: str, *, suffixes: tuple[str, ...] | None) -> Path:
    """Fetch what is in a bucket, as far as it has changed; return where its copy lies.

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
    """
    fetch(url, copy_of(url), setting="", suffixes=suffixes)
    return copy_of(url)


def _looked_at() -> Path:
    return copies().with_name("looked_at")


# The hub.


@functools.cache
def fetch_repository(
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
