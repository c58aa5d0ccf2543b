"""Sources of a data set's files: local, saved by `datasets`, a URL, the hub."""

import dataclasses
import fnmatch
import re
import urllib.parse
import urllib.request
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from scalerl_jax.data.files import sha256_of
from scalerl_jax.formats.bounded import MOST_WHOLE
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import read_json
from scalerl_jax.formats.remote import fetch_repository

OWN_FORMS = ("jsonl", "parquet", "csv", "arrow")  # the kinds of FILE in "jsonl:FILE"
OWN_FILES = ", ".join(f"{kind}:FILE" for kind in OWN_FORMS)  # as messages name them

_TIMEOUT_S = 60.0  # without a byte
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.jsonl.gz", "*.json.gz")
_STATE, _DICT = "state.json", "dataset_dict.json"  # of save_to_disk()
SPLIT_NAME = r"\w[\w.-]*"
SPLITS = ("train", "test", "validation")  # of a data set that is known by name alone
_NAMED = re.compile(rf"(?<![a-z])(?:{'|'.join(SPLITS)})(?![a-z])", re.IGNORECASE)
_NO_DATA = ("dataset_infos.json", "dataset_info.json")
_ELSEWHERE = "fetch the data set's files elsewhere and name them with --path"


class SourceFile(NamedTuple):
    """A file of a data set on this machine, where it is from, and its checksum."""

    path: Path
    origin: str
    sha256: str

    def described(self) -> dict[str, Any]:
        """Return origin, checksum and size for a report, as JSON values."""
        size = self.path.stat().st_size
        return {"origin": self.origin, "sha256": self.sha256, "bytes": size}


def describe_file(path: Path, origin: str, known: str = "") -> SourceFile:
    """Return a file with its SHA-256, which must be `known` if that is given.

    Raises:
        ValueError: the SHA-256 differs.
    """
    found = sha256_of(path)
    if known and found != known:
        raise ValueError(
            f"{origin} has the SHA-256 {found}, and not {known}: it is damaged, or has "
            f"been changed since; look at it, and if it is what you want, name your "
            f"copy of it by --path"
        )
    return SourceFile(path, origin, found)


class Source(Protocol):
    """A source of the files of a split."""

    def fetch(self, folder: Path) -> list[SourceFile]:
        """Return the files in the order of their rows; `folder` is for downloads.

        Raises:
            OSError: a file cannot be fetched.
            ValueError: there are no files, or they are damaged or changed.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Local:
    """A file of this machine."""

    path: Path

    def fetch(self, folder: Path) -> list[SourceFile]:
        """See `Source`."""
        if not self.path.is_file():
            raise ValueError(f"--path={self.path}: there is no such file")
        return [describe_file(self.path, str(self.path))]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A split that `datasets` saved to disk: files of Arrow, named by a state.json."""

    folder: Path

    def fetch(self, folder: Path) -> list[SourceFile]:
        """See `Source`; in the order of their rows.

        Raises:
            ValueError: the folder is incomplete, or its rows are chosen by another
                file.
        """
        state = read_json(self.folder / _STATE)
        if state.get("_indices_files"):
            raise ValueError(
                f"{self.folder} holds the rows of a larger data set by their places; "
                f"save it again behind flatten_indices()"
            )
        names = [each.get("filename") for each in state.get("_data_files") or [{}]]
        paths = [inside(self.folder, str(name)) for name in names]
        if not all(path.is_file() for path in paths):
            raise ValueError(
                f"{self.folder / _STATE} names the files {names}, which are not all in "
                f"its folder; save the data set again"
            )
        return [describe_file(path, str(path)) for path in paths]


def saved_splits(folder: Path) -> dict[str, Source]:
    """Return the splits of a folder that `save_to_disk` made, "train" first.

    Raises:
        ValueError: the folder is not of this kind.
    """
    if (folder / _STATE).is_file():
        return {SPLITS[0]: Saved(folder)}
    if not (folder / _DICT).is_file():
        raise ValueError(
            f"{folder} has neither {_STATE} nor {_DICT}, and so is no folder of "
            f"save_to_disk(); name its files: {OWN_FILES}"
        )
    names = read_json(folder / _DICT).get("splits")
    if not isinstance(names, list) or not names:
        raise ValueError(f"{folder / _DICT} names no splits")
    if not all(
        isinstance(name, str) and re.fullmatch(SPLIT_NAME, name) for name in names
    ):
        raise ValueError(f"{folder / _DICT} has splits without a usual name: {names}")
    names.sort(key=lambda name: name != SPLITS[0])
    return {name: Saved(inside(folder, name)) for name in names}


@dataclasses.dataclass(frozen=True)
class Web:
    """A small file at a known address, and its SHA-256 where that is known."""

    url: str
    sha256: str = ""

    def fetch(self, folder: Path) -> list[SourceFile]:
        """See `Source`."""
        request = urllib.request.Request(
            self.url, headers={"User-Agent": "scalerl_jax"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                content = response.read(MOST_WHOLE + 1)
                if response.length and len(content) <= MOST_WHOLE:
                    raise IncompleteRead(content, response.length)  # read() does not
        except (OSError, HTTPException) as error:
            raise OSError(
                f"{self.url} cannot be fetched: {error!r}; {_ELSEWHERE}"
            ) from error
        if len(content) > MOST_WHOLE:
            raise OSError(f"{self.url} has more than {MOST_WHOLE:,} bytes")
        path = inside(folder, Path(urllib.parse.urlparse(self.url).path).name)
        path.write_bytes(content)
        return [describe_file(path, self.url, self.sha256)]


@dataclasses.dataclass(frozen=True)
class Hub:
    """Files of a repository on the Hugging Face hub, by a pattern of their paths.

    The hub's own library fetches them into its cache, so they also work offline.
    """

    repository: str
    pattern: str  # as in a shell, but * also matches /

    def fetch(self, folder: Path) -> list[SourceFile]:
        """See `Source`; sorted by path."""
        files = [
            file
            for path, file in _files_of(self.repository, (self.pattern,)).items()
            if fnmatch.fnmatch(str(path), self.pattern)
        ]
        if not files:
            raise ValueError(
                f"no file of {self.repository} matches {self.pattern!r}; {_ELSEWHERE}"
            )
        return [_of_cache(file, self.repository) for file in files]


@dataclasses.dataclass(frozen=True)
class HubSplit:
    """The files of one split of any data set of the hub: "OWNER/NAME[/SUBSET]".

    They are the files whose name has the split's, or else the nearest folder that has
    one; if no path has the name of any split, all files are "train", which may differ
    in their numbers only.
    """

    name: str
    split: str

    def fetch(self, folder: Path) -> list[SourceFile]:
        """See `Source`; sorted by path.

        Raises:
            ValueError: there are no files, files of several subsets or of unknown
                splits, or the hub cannot be reached.
        """
        owner, name, *subset = self.name.split("/")
        splits: dict[Path, str] = {}  # of files by path; "": the path names no split
        files = _files_of(f"{owner}/{name}", _DATA_FILES)
        for path in files:
            known = any(path.match(pattern) for pattern in _DATA_FILES)
            if known and path.name not in _NO_DATA and {*subset} <= {*path.parts}:
                splits[path] = _split_of(path)
        unnamed = not any(splits.values())
        if unnamed:
            splits = dict.fromkeys(splits, SPLITS[0])
        paths = [path for path, split in splits.items() if split == self.split]
        subsets = sorted({str(path.parent) for path in paths})
        if len(subsets) > 1:
            raise ValueError(
                f"{self.name} has several subsets with a split {self.split!r}; name "
                f"one, as {owner}/{name}/{subsets[0]}: {', '.join(subsets)}"
            )
        if not paths:
            raise ValueError(
                f"{self.name} has no file of a split {self.split!r} among its JSON and "
                f"Parquet files: {list(map(str, splits))}"
            )
        if unnamed and len({re.sub(r"\d+", "0", path.name) for path in paths}) > 1:
            raise ValueError(
                f"{self.name} has several files, and none is named by its split: "
                f"{', '.join(map(str, paths))}; {_ELSEWHERE}"
            )
        return [_of_cache(files[path], f"{owner}/{name}") for path in paths]


def _split_of(path: Path) -> str:
    """Return the split that a path names, in the file's name first, or ""."""
    for part in reversed(path.parts):
        named = {each.lower() for each in _NAMED.findall(part)}
        if named:
            return named.pop() if len(named) == 1 else ""
    return ""


def _files_of(repository: str, patterns: tuple[str, ...]) -> dict[Path, Path]:
    """Return a repository's cached files by their path in it, sorted by that."""
    try:
        folder = fetch_repository(repository, patterns, kind="dataset")
    except ValueError as error:
        raise ValueError(f"{error}; or {_ELSEWHERE}") from error
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder): file for file in files}


def _of_cache(file: Path, repository: str) -> SourceFile:
    """Return a file of the hub's cache, where a large file is named by its SHA-256."""
    blob = file.resolve().name
    known = blob if re.fullmatch("[0-9a-f]{64}", blob) else ""
    _, _, inside = str(file).rpartition("/snapshots/")
    commit, _, path = inside.partition("/")
    return describe_file(file, f"hf://datasets/{repository}@{commit}/{path}", known)
