"""The data sets that can be prepared: where they come from, and how they are read."""

import dataclasses
import fnmatch
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, Protocol

from scalerl_jax.data import rows
from scalerl_jax.data.files import Row, sha256_of
from scalerl_jax.utils.reading import is_hub_id, local_file
from scalerl_jax.utils.remote import fetch_repository

VERSION = "1.0.0"  # of the prepared form; part of its path
OWN_FORMS = ("jsonl", "parquet")  # the kinds of FILE in "jsonl:FILE"

_TIMEOUT_S = 60.0  # without a byte
_SPLITS = ("train", "test", "validation")  # of a data set that is known by name alone
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.jsonl.gz", "*.json.gz")
_NO_DATA = ("dataset_infos.json", "dataset_info.json")
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

    One of which nobody says more is in the project's own form, or verl's.
    """

    name: str
    title: str
    sources: Mapping[str, Source]  # by split; the first is the one meant by default
    homepage: str = ""
    citation: str = ""
    license: str = "not stated"  # as its publisher states it
    read: rows.Reader = rows.read_own
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
    base, _, split = name.partition("@")
    return (base, split) if base in DATA_SETS or is_on_hub(base) else (name, "")


def is_on_hub(name: str) -> bool:
    """Return whether a name is "OWNER/NAME" or "OWNER/NAME/SUBSET"."""
    owner, _, rest = name.partition("/")
    return "@" not in name and is_hub_id(f"{owner}/{rest.replace('/', '.')}")


def is_own_file(name: str) -> bool:
    """Return whether a name is "jsonl:FILE" or "parquet:FILE"."""
    kind, _, path = name.partition(":")
    return kind in OWN_FORMS and bool(path)


def find(name: str) -> DataSet:
    """Return a data set by its name, its id on the hub, or as a file "jsonl:FILE".

    Raises:
        ValueError: there is none of this name.
    """
    if name in DATA_SETS:
        return DATA_SETS[name]
    if is_own_file(name):
        try:
            file = Local(local_file(name.partition(":")[2]))
        except ValueError as error:
            raise ValueError(f"data set {name!r} cannot be read: {error}") from error
        return DataSet(name=name, title="questions of a file", sources={"train": file})
    if is_on_hub(name):
        return DataSet(
            name=name,
            title="a data set of the Hugging Face hub",
            sources={split: HubSplit(name, split) for split in _SPLITS},
            homepage=f"{_HUB}/{name}",
        )
    base, _, split = name.partition("@")
    if base in DATA_SETS or is_on_hub(base):
        raise ValueError(f"name the split of {base!r} apart: --split={split}")
    raise ValueError(
        f"no data set is called {name!r}; choose from {', '.join(DATA_SETS)}, or name "
        f"a file: jsonl:FILE or parquet:FILE; or one of the Hugging Face hub: "
        f"OWNER/NAME"
    )
