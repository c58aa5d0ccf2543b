"""Public files over HTTPS: found, fetched and checked."""

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from scalerl_jax.utils.hub import fetch

TIMEOUT_S = 60.0  # without a byte
_CHUNK = 2**20  # bytes
SPLITS = ("train", "test", "validation")  # of a data set that is known by name alone
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.jsonl.gz", "*.json.gz")
_NO_DATA = ("dataset_infos.json", "dataset_info.json")


class Remote(NamedTuple):
    """A file of a data set, and its SHA-256 where that is known."""

    url: str
    sha256: str = ""


class Source(Protocol):
    """Where the files of a split are."""

    def locate(self) -> list[Remote]:
        """The files, in the order in which their rows count."""
        ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Files whose addresses are known."""

    files: tuple[Remote, ...]

    def locate(self) -> list[Remote]:
        """Those files."""
        return list(self.files)


@dataclasses.dataclass(frozen=True)
class Hub:
    """Files of a data set's repository on the Hugging Face hub.

    Their names are looked up there by a pattern, since the number of parts is in them,
    and so are the checksums of those that it stores as large files.  HF_ENDPOINT in
    the environment names a mirror, as for the hub's own tools.
    """

    repository: str
    pattern: str  # of paths, as the shell's; * also stands for /

    def locate(self) -> list[Remote]:
        """The files that match, sorted by path.

        Raises:
            OSError: the list cannot be fetched.
            ValueError: none matches.
        """
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        tree = f"{endpoint}/api/datasets/{self.repository}/tree/main?recursive=true"
        entries = [entry for page in _pages(tree) for entry in page]
        files = {
            entry["path"]: (entry.get("lfs") or {}).get("oid", "")
            for entry in entries
            if entry["type"] == "file" and fnmatch.fnmatch(entry["path"], self.pattern)
        }
        if not files:
            raise ValueError(
                f"no file of {endpoint}/datasets/{self.repository} matches "
                f"{self.pattern!r}; fetch its files yourself and name them by --path"
            )
        base = f"{endpoint}/datasets/{self.repository}/resolve/main/"
        return [
            Remote(base + urllib.parse.quote(path), files[path])
            for path in sorted(files)
        ]


@dataclasses.dataclass(frozen=True)
class HubSplit:
    """The files of one split of any data set of the hub: "OWNER/NAME[/SUBSET]".

    Those whose path has the split's name; where none has any split's, all are "train".
    They come through the hub's own library and its cache, and hence also offline.
    """

    name: str
    split: str

    def locate(self) -> list[Remote]:
        """The files, sorted by path.

        Raises:
            ValueError: there are none, they are of several subsets, or the hub cannot
                be reached.
        """
        owner, name, *subset = self.name.split("/")
        folder = fetch(f"{owner}/{name}", _DATA_FILES, kind="dataset")
        found: dict[Path, str] = {}
        for file in sorted(folder.rglob("*")):
            path = file.relative_to(folder)
            named = [each for each in SPLITS if re.search(rf"\b{each}", str(path))]
            wanted = not subset or subset[0] in path.parts
            known = any(path.match(pattern) for pattern in _DATA_FILES)
            if wanted and known and path.name not in _NO_DATA and file.is_file():
                found[file] = named[0] if named else ""
        files = [file for file, split in found.items() if split == self.split]
        if self.split == SPLITS[0] and not any(found.values()):
            files = list(found)
        subsets = sorted({str(file.parent.relative_to(folder)) for file in files})
        if len(subsets) > 1:
            raise ValueError(
                f"{self.name} has several subsets with a split {self.split!r}; name "
                f"one, as {owner}/{name}/{subsets[0]}: {', '.join(subsets)}"
            )
        if not files:
            raise ValueError(
                f"{self.name} has no file of a split {self.split!r} among its JSON and "
                f"Parquet files: {[str(each.relative_to(folder)) for each in found]}"
            )
        return [Remote(file.as_uri()) for file in files]


def _pages(url: str) -> Iterator[list[dict[str, Any]]]:
    """The parts of a list that the hub gives out page by page."""
    while url:
        with _open(url) as response:
            yield json.load(response)
            following = re.search(
                r'<([^>]+)>;\s*rel="next"', response.headers.get("Link", "")
            )
        url = following.group(1) if following else ""


def _open(url: str) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "scalerl_jax"})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except (OSError, HTTPException) as error:
        raise OSError(
            f"{url} cannot be fetched: {error}; fetch the data set's files elsewhere "
            f"and name them with --path"
        ) from error


def download(remote: Remote, path: Path) -> None:
    """Fetch a file; it gets its name when it is whole and as it should be.

    Raises:
        OSError: it cannot be fetched, or ends too early.
        ValueError: it is not the known one.
    """
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    try:
        with _open(remote.url) as response, partial.open("wb") as file:
            length = int(response.headers.get("Content-Length") or 0)
            with tqdm(
                total=length or None, unit="B", unit_scale=True, desc=path.name
            ) as bar:
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
            if file.tell() < length:
                raise OSError(f"it ended after {file.tell()} of {length} bytes")
    except (OSError, HTTPException) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{remote.url} was not fetched: {error}") from error
    if remote.sha256 and digest.hexdigest() != remote.sha256:
        partial.unlink()
        raise ValueError(
            f"{remote.url} has the SHA-256 {digest.hexdigest()}, and not "
            f"{remote.sha256}: it is damaged, or has been changed since; look at it, "
            f"and if it is what you want, name your copy of it by --path"
        )
    partial.replace(path)
