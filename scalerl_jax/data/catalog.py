"""The data sets that can be prepared: where they come from, and how they are read."""

import dataclasses
import fnmatch
import functools
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, Protocol

from scalerl_jax.data import rows
from scalerl_jax.data.drafts import Reader
from scalerl_jax.data.files import Row, sha256_of
from scalerl_jax.data.own import PARTS, read_own
from scalerl_jax.utils.reading import is_hub_id, local_file, read_json
from scalerl_jax.utils.remote import fetch_repository

VERSION = "1.1.0"  # of the prepared form and of what is dropped; part of its path
OWN_FORMS = ("jsonl", "parquet", "csv", "arrow")  # the kinds of FILE in "jsonl:FILE"
OWN_FILES = ", ".join(f"{kind}:FILE" for kind in OWN_FORMS)  # as messages name them

_TIMEOUT_S = 60.0  # without a byte
_SPLITS = ("train", "test", "validation")  # of a data set that is known by name alone
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.jsonl.gz", "*.json.gz")
_STATE, _DICT = "state.json", "dataset_dict.json"  # of save_to_disk()
_SPLIT = r"\w[\w.-]*"
_NO_DATA = ("dataset_infos.json", "dataset_info.json")
# Columns behind a name: "jsonl:FILE?prompt=text&reference=gold".
_COLUMNS = re.compile(r"\?((?:[a-z]+=[^?&=/@]*)(?:&[a-z]+=[^?&=/@]*)*)(?=@|$)")
_ELSEWHERE = "fetch the data set's files elsewhere and name them with --path"


class File(NamedTuple):
    """A file of a data set on this machine, where it is from, and its checksum."""

    path: Path
    origin: str
    sha256: str


def describe_file(path: Path, origin: str, known: str = "") -> File:
    """Return a file with its SHA-256, which must be the `known` one if there is one.

    Raises:
        ValueError: it is another.
    """
    found = sha256_of(path)
    if known and found != known:
        raise ValueError(
            f"{origin} has the SHA-256 {found}, and not {known}: it is damaged, or has "
            f"been changed since; look at it, and if it is what you want, name your "
            f"copy of it by --path"
        )
    return File(path, origin, found)


class Source(Protocol):
    """A place that the files of a split come from."""

    def fetch(self, folder: Path) -> list[File]:
        """Return the files in the order of their rows, perhaps put into `folder`.

        Raises:
            OSError: one cannot be fetched.
            ValueError: there are none, or they are not what they should be.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Local:
    """A file of this machine."""

    path: Path

    def fetch(self, folder: Path) -> list[File]:
        """See `Source`."""
        if not self.path.is_file():
            raise ValueError(f"--path={self.path}: there is no such file")
        return [describe_file(self.path, str(self.path))]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A split that `datasets` saved to disk: files of Arrow, named by a state.json."""

    folder: Path

    def fetch(self, folder: Path) -> list[File]:
        """See `Source`; in the order of their rows.

        Raises:
            ValueError: the folder is not whole, or says that its rows are chosen by
                another file.
        """
        state = read_json(self.folder / _STATE)
        if state.get("_indices_files"):
            raise ValueError(
                f"{self.folder} holds the rows of a larger data set by their places; "
                f"save it again behind flatten_indices()"
            )
        names = [each.get("filename") for each in state.get("_data_files") or [{}]]
        paths = [self.folder / str(name) for name in names]
        # A name that leaves the folder would read any file of this machine.
        if any(path.parent != self.folder or not path.is_file() for path in paths):
            raise ValueError(
                f"{self.folder / _STATE} names the files {names}, which are not all in "
                f"its folder; save the data set again"
            )
        return [describe_file(path, str(path)) for path in paths]


def saved_splits(folder: Path) -> dict[str, Source]:
    """Return the splits of a folder that `save_to_disk` made, "train" first.

    Raises:
        ValueError: it is no such folder.
    """
    if (folder / _STATE).is_file():
        return {_SPLITS[0]: Saved(folder)}
    if not (folder / _DICT).is_file():
        raise ValueError(
            f"{folder} has neither {_STATE} nor {_DICT}, and so is no folder of "
            f"save_to_disk(); name its files: {OWN_FILES}"
        )
    names = read_json(folder / _DICT).get("splits")
    if not isinstance(names, list) or not names:
        raise ValueError(f"{folder / _DICT} names no splits")
    if not all(isinstance(name, str) and re.fullmatch(_SPLIT, name) for name in names):
        raise ValueError(f"{folder / _DICT} has splits without a usual name: {names}")
    names.sort(key=lambda name: name != _SPLITS[0])
    return {name: Saved(folder / name) for name in names}


@dataclasses.dataclass(frozen=True)
class Web:
    """A small file at a known address, and its SHA-256 where that is known."""

    url: str
    sha256: str = ""

    def fetch(self, folder: Path) -> list[File]:
        """See `Source`."""
        request = urllib.request.Request(
            self.url, headers={"User-Agent": "scalerl_jax"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                content = response.read()
        except (OSError, HTTPException) as error:
            raise OSError(
                f"{self.url} cannot be fetched: {error!r}; {_ELSEWHERE}"
            ) from error
        path = folder / Path(urllib.parse.urlparse(self.url).path).name
        path.write_bytes(content)
        return [describe_file(path, self.url, self.sha256)]


@dataclasses.dataclass(frozen=True)
class Hub:
    """Files of a repository on the Hugging Face hub, by a pattern of their paths.

    They come through the hub's own library and its cache, and hence also offline.
    """

    repository: str
    pattern: str  # as the shell's; * also stands for /

    def fetch(self, folder: Path) -> list[File]:
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

    Those whose path has the split's name; where none has any split's, all are "train".
    """

    name: str
    split: str

    def fetch(self, folder: Path) -> list[File]:
        """See `Source`; sorted by path.

        Raises:
            ValueError: there are none, they are of several subsets, or the hub cannot
                be reached.
        """
        owner, name, *subset = self.name.split("/")
        splits: dict[Path, str] = {}  # of files, by their path; "" where none is named
        files = _files_of(f"{owner}/{name}", _DATA_FILES)
        for path in files:
            named = [each for each in _SPLITS if re.search(rf"\b{each}", str(path))]
            known = any(path.match(pattern) for pattern in _DATA_FILES)
            if known and path.name not in _NO_DATA and {*subset} <= {*path.parts}:
                splits[path] = named[0] if named else ""
        if not any(splits.values()):
            splits = dict.fromkeys(splits, _SPLITS[0])
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
        return [_of_cache(files[path], f"{owner}/{name}") for path in paths]


def _files_of(repository: str, patterns: tuple[str, ...]) -> dict[Path, Path]:
    """The files of a repository in the cache by their path there, sorted by it."""
    try:
        folder = fetch_repository(repository, patterns, kind="dataset")
    except ValueError as error:
        raise ValueError(f"{error}; or {_ELSEWHERE}") from error
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder): file for file in files}


def _of_cache(file: Path, repository: str) -> File:
    """A file of the hub's cache, in which a large one is called by its SHA-256."""
    blob = file.resolve().name
    known = blob if re.fullmatch("[0-9a-f]{64}", blob) else ""
    _, _, inside = str(file).rpartition("/snapshots/")
    commit, _, path = inside.partition("/")
    return describe_file(file, f"hf://datasets/{repository}@{commit}/{path}", known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set: what it is, where it is from, and how its rows are read.

    One of which nobody says more is in one of the forms that `own` reads.
    """

    name: str
    title: str
    sources: Mapping[str, Source]  # by split; the first is the one meant by default
    homepage: str = ""
    citation: str = ""
    license: str = "not stated"  # as its publisher states it
    read: Reader = read_own
    # The split that a row is of, where a file holds all splits.
    split_of: Callable[[Row], str] | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of its splits, "train" first where there is one."""
        return tuple(self.sources)


_HUB = "https://huggingface.co/datasets"
_GITHUB = "https://raw.githubusercontent.com"
_GSM8K = f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data"
_MBPP = Web(
    f"{_GITHUB}/google-research/google-research/master/mbpp/sanitized-mbpp.json"
)
_MATH_CITATION = "Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874"
_RLLM = "Luo et al. 2025, https://github.com/agentica-project/rllm"
_MAA = "Mathematical Association of America, https://maa.org"

_KNOWN = (
    DataSet(
        name="polaris_53k",
        title="Polaris-53K: competition mathematics, chosen by difficulty",
        homepage=f"{_HUB}/POLARIS-Project/Polaris-Dataset-53K",
        citation="An et al. 2025, https://hkunlp.github.io/blog/2025/Polaris",
        license="Apache-2.0",
        read=rows.read_maths,
        sources={"train": Hub("POLARIS-Project/Polaris-Dataset-53K", "*.parquet")},
    ),
    DataSet(
        name="deepscaler",
        title="DeepScaleR-Preview: AIME, AMC, Omni-MATH and STILL",
        homepage=f"{_HUB}/agentica-org/DeepScaleR-Preview-Dataset",
        citation=_RLLM,
        license="MIT",
        read=rows.read_maths,
        sources={"train": Hub("agentica-org/DeepScaleR-Preview-Dataset", "*.json")},
    ),
    DataSet(
        name="gsm8k",
        title="GSM8K: word problems of grade school",
        homepage="https://github.com/openai/grade-school-math",
        citation="Cobbe et al. 2021, https://arxiv.org/abs/2110.14168",
        license="MIT",
        read=rows.read_gsm8k,
        sources={
            "train": Web(
                f"{_GSM8K}/train.jsonl",
                "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
            ),
            "test": Web(
                f"{_GSM8K}/test.jsonl",
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            ),
        },
    ),
    DataSet(
        name="math",
        title="MATH: 12,500 problems of mathematics competitions",
        homepage=f"{_HUB}/EleutherAI/hendrycks_math",
        citation=_MATH_CITATION,
        license="MIT",
        read=rows.read_maths,
        sources={
            split: Hub("EleutherAI/hendrycks_math", f"*/{split}-*.parquet")
            for split in ("train", "test")
        },
    ),
    DataSet(
        name="math500",
        title="MATH-500: 500 of MATH's test problems",
        homepage=f"{_HUB}/HuggingFaceH4/MATH-500",
        citation=f"Lightman et al. 2023, https://arxiv.org/abs/2305.20050; "
        f"{_MATH_CITATION}",
        license="MIT",
        read=rows.read_maths,
        sources={"test": Hub("HuggingFaceH4/MATH-500", "test.jsonl")},
    ),
    DataSet(
        name="aime24",
        title="AIME 2024, both papers",
        homepage=f"{_HUB}/HuggingFaceH4/aime_2024",
        citation=_MAA,
        license="the texts are the MAA's",
        read=rows.read_maths,
        sources={"test": Hub("HuggingFaceH4/aime_2024", "data/train-*.parquet")},
    ),
    DataSet(
        name="aime25",
        title="AIME 2025, both papers",
        homepage=f"{_HUB}/math-ai/aime25",
        citation=_MAA,
        license="the texts are the MAA's",
        read=rows.read_maths,
        sources={"test": Hub("math-ai/aime25", "test.jsonl")},
    ),
    DataSet(
        name="deepcoder",
        title="DeepCoder-Preview: TACO, PrimeIntellect, LiveCodeBench, Codeforces",
        homepage=f"{_HUB}/agentica-org/DeepCoder-Preview-Dataset",
        citation=_RLLM,
        license="MIT",
        read=rows.read_deepcoder,
        sources={
            split: Hub("agentica-org/DeepCoder-Preview-Dataset", f"*/{split}-*.parquet")
            for split in ("train", "test")
        },
    ),
    DataSet(
        name="mbpp",
        title="MBPP, sanitized: short Python functions",
        homepage="https://github.com/google-research/google-research/tree/master/mbpp",
        citation="Austin et al. 2021, https://arxiv.org/abs/2108.07732",
        license="CC-BY-4.0",
        read=rows.read_mbpp,
        sources=dict.fromkeys(("train", "test", "validation", "prompt"), _MBPP),
        split_of=rows.mbpp_split,
    ),
    DataSet(
        name="humaneval",
        title="HumanEval: Python functions to complete",
        homepage="https://github.com/openai/human-eval",
        citation="Chen et al. 2021, https://arxiv.org/abs/2107.03374",
        license="MIT",
        read=rows.read_humaneval,
        sources={
            "test": Web(
                f"{_GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
                "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            )
        },
    ),
)
DATA_SETS: dict[str, DataSet] = {each.name: each for each in _KNOWN}


def split_of(name: str) -> tuple[str, str]:
    """Return data set and split of "gsm8k@test"; a file's name may hold an @."""
    base, _, split = name.rpartition("@")
    # The splits of a folder are known by its name alone.
    known = base in DATA_SETS or is_on_hub(base) or base.startswith("arrow:")
    return (base, split) if base and known else (name, "")


def is_on_hub(name: str) -> bool:
    """Return whether a name is "OWNER/NAME" or "OWNER/NAME/SUBSET"."""
    name, _ = columns_of(name)
    owner, _, rest = name.partition("/")
    return "@" not in name and is_hub_id(f"{owner}/{rest.replace('/', '.')}")


def columns_of(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a name without the columns behind it, and these: (part, column), ...

    Raises:
        ValueError: a part of a question is not called so.
    """
    found = _COLUMNS.search(name)
    if not found:
        return name, ()
    pairs = [tuple(each.split("=")) for each in found.group(1).split("&")]
    columns = tuple((part, column) for part, column in pairs)
    for part, column in columns:
        if part not in PARTS:
            raise ValueError(
                f"{name!r}: a column is named for {part!r}; choose from {list(PARTS)}"
            )
        if not column and part in ("prompt", "reference"):
            raise ValueError(f"{name!r}: no column is named for {part!r}")
        if column and part == "tools":
            raise ValueError(
                f"{name!r}: tools cannot be given to the policy; tools= without a "
                f"column asks the questions without them"
            )
    return name[: found.start()] + name[found.end() :], columns


def with_columns(name: str, columns: Sequence[str]) -> str:
    """Return the name of a data set whose parts are in columns: "prompt=text", ...

    Raises:
        ValueError: one is not written so, or the data set has a form of its own.
    """
    if not columns:
        return name
    named = f"{name}?{'&'.join(columns)}"
    base, pairs = columns_of(named)
    if base != name or not pairs:
        raise ValueError(
            f"--column={' --column='.join(columns)}: write PART=COLUMN, the part one "
            f"of {list(PARTS)}, and the column without any of ?&=/@"
        )
    return named


def is_own_file(name: str) -> bool:
    """Return whether a name is "jsonl:FILE" or of another of the `OWN_FORMS`."""
    kind, _, path = name.partition(":")
    return kind in OWN_FORMS and bool(path)


def find(name: str) -> DataSet:
    """Return a data set by its name, its id on the hub, or as a file "jsonl:FILE".

    Raises:
        ValueError: there is none of this name.
    """
    if name in DATA_SETS:
        return DATA_SETS[name]
    bare, columns = columns_of(name)
    if columns and bare in DATA_SETS:
        raise ValueError(
            f"{name!r}: {bare!r} is read by its own columns; name yours of a file "
            f"({OWN_FILES}) or of the hub (OWNER/NAME)"
        )
    read = functools.partial(read_own, columns=columns)
    if is_own_file(name):
        try:
            sources = _sources_of(local_file(bare.partition(":")[2]))
        except ValueError as error:
            raise ValueError(f"data set {name!r} cannot be read: {error}") from error
        return DataSet(
            name=name, title="questions of a file", sources=sources, read=read
        )
    if is_on_hub(name):
        return DataSet(
            name=name,
            title="a data set of the Hugging Face hub",
            sources={split: HubSplit(bare, split) for split in _SPLITS},
            homepage=f"{_HUB}/{bare}",
            read=read,
        )
    base, _, split = name.partition("@")
    if base in DATA_SETS or is_on_hub(base):
        raise ValueError(f"name the split of {base!r} apart: --split={split}")
    raise ValueError(
        f"no data set is called {name!r}; choose from {', '.join(DATA_SETS)}, or name "
        f"a file: {OWN_FILES}; or one of the Hugging Face hub: OWNER/NAME"
    )


def _sources_of(path: Path) -> dict[str, Source]:
    """The splits of a file, or of a folder that `datasets` saved."""
    return saved_splits(path) if path.is_dir() else {_SPLITS[0]: Local(path)}
