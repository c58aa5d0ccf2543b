"""The data sets that can be prepared: where they come from, and how they are read."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scalerl_jax.data import rows
from scalerl_jax.data.drafts import Reader
from scalerl_jax.data.files import Row, delimiter_of
from scalerl_jax.data.own import PARTS, read_own
from scalerl_jax.data.sources import (
    OWN_FILES,
    OWN_FORMS,
    SPLIT_NAME,
    SPLITS,
    Hub,
    HubSplit,
    Local,
    Source,
    Web,
    saved_splits,
)
from scalerl_jax.formats.reading import is_hub_id, is_remote, local_file

VERSION = "1.4.0"  # of the prepared form and of what is dropped; part of its path

# Columns after a name: "jsonl:FILE?prompt=text&reference=gold".
_COLUMNS = re.compile(r"\?((?:[a-z]+=[^?&=/@]*)(?:&[a-z]+=[^?&=/@]*)*)(?=@|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set: what it is, where it is from, and how its rows are read.

    By default its rows are in one of the forms that `own` reads.
    """

    name: str
    title: str
    sources: Mapping[str, Source]  # by split; the first is the default
    homepage: str = ""
    citation: str = ""
    license: str = "not stated"  # as its publisher states it
    read: Reader = read_own
    # Returns the split of a row, if one file holds all splits.
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
    known = base in DATA_SETS or is_on_hub(base)
    if base.startswith("arrow:") and re.fullmatch(SPLIT_NAME, split):
        known = not Path(name.removeprefix("arrow:")).exists()
    return (base, split) if base and known else (name, "")


def is_on_hub(name: str) -> bool:
    """Return whether a name is "OWNER/NAME" or "OWNER/NAME/SUBSET"."""
    name, _ = columns_of(name)
    owner, _, rest = name.partition("/")
    return "@" not in name and is_hub_id(f"{owner}/{rest.replace('/', '.')}")


def columns_of(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a name without its columns, and the columns: (part, column), ...

    Raises:
        ValueError: a part of a question is unknown, or has two columns.
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
        if [named for named, _ in columns].count(part) > 1:
            raise ValueError(f"{name!r}: several columns are named for {part!r}")
        if not column and part in ("prompt", "reference"):
            raise ValueError(f"{name!r}: no column is named for {part!r}")
        if column and part == "tools":
            raise ValueError(
                f"{name!r}: tools cannot be given to the policy; tools= without a "
                f"column asks the questions without them"
            )
    return name[: found.start()] + name[found.end() :], columns


def with_columns(name: str, columns: Sequence[str]) -> str:
    """Return the name of a data set with its columns added: "prompt=text", ...

    Raises:
        ValueError: a column is not written so, or the name has columns already.
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


def where_looked(file: str) -> str:
    """Return where a relative path that leads to nothing was looked for, else ""."""
    path = Path(file).expanduser()
    if is_remote(file) or path.is_absolute() or path.exists():
        return ""
    return (
        f"; it was looked for in {Path.cwd()}, where this command began; name it from "
        f"there, or begin where the run was begun"
    )


def find(name: str) -> DataSet:
    """Return a data set by its name, its id on the hub, or as a file "jsonl:FILE".

    Raises:
        ValueError: no data set has this name.
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
        kind, _, file = bare.partition(":")
        try:
            sources = _sources_of(kind, local_file(file))
        except ValueError as error:
            raise ValueError(
                f"data set {name!r} cannot be read: {error}{where_looked(file)}"
            ) from error
        return DataSet(
            name=name, title="questions of a file", sources=sources, read=read
        )
    if is_on_hub(name):
        return DataSet(
            name=name,
            title="a data set of the Hugging Face hub",
            sources={split: HubSplit(bare, split) for split in SPLITS},
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


def _sources_of(kind: str, path: Path) -> dict[str, Source]:
    """Return the splits of a file, or of a folder that `datasets` saved."""
    if kind == "csv" and path.is_file() and not delimiter_of(path):
        raise ValueError("a CSV is called .csv, or with tabs .tsv; rename it")
    return saved_splits(path) if path.is_dir() else {SPLITS[0]: Local(path)}
