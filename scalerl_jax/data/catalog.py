"""The data sets that can be prepared: where they come from, and how they are read."""

import dataclasses
from collections.abc import Callable, Mapping

from scalerl_jax.data import rows
from scalerl_jax.data.downloads import SPLITS, Fixed, Hub, HubSplit, Remote, Source
from scalerl_jax.data.files import Row
from scalerl_jax.utils.hub import is_hub_id

VERSION = "1.0.0"  # of the prepared form; part of its path

_GITHUB = "https://raw.githubusercontent.com"
_GSM8K = f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data"
_MBPP = Fixed(
    (
        Remote(
            f"{_GITHUB}/google-research/google-research/master/mbpp/sanitized-mbpp.json"
        ),
    )
)
_MATH_CITATION = "Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """What is known of a data set."""

    name: str
    title: str
    homepage: str
    citation: str
    license: str  # as its publisher states it
    read: rows.Reader
    sources: Mapping[str, Source]  # by split; the first is the one meant by default
    # Of files that hold all splits: which one a row is of.
    split_of: Callable[[Row], str] | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of its splits, "train" first where there is one."""
        return tuple(self.sources)


_KNOWN = (
    DataSet(
        name="polaris_53k",
        title="Polaris-53K: competition mathematics, chosen by difficulty",
        homepage="https://huggingface.co/datasets/POLARIS-Project/Polaris-Dataset-53K",
        citation="An et al. 2025, https://hkunlp.github.io/blog/2025/Polaris",
        license="Apache-2.0",
        read=rows.read_maths,
        sources={"train": Hub("POLARIS-Project/Polaris-Dataset-53K", "*.parquet")},
    ),
    DataSet(
        name="deepscaler",
        title="DeepScaleR-Preview: AIME, AMC, Omni-MATH and STILL",
        homepage=(
            "https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset"
        ),
        citation="Luo et al. 2025, https://github.com/agentica-project/rllm",
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
            split: Fixed((Remote(f"{_GSM8K}/{split}.jsonl", sha256),))
            for split, sha256 in {
                "train": (
                    "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
                ),
                "test": (
                    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
                ),
            }.items()
        },
    ),
    DataSet(
        name="math",
        title="MATH: 12,500 problems of mathematics competitions",
        homepage="https://huggingface.co/datasets/EleutherAI/hendrycks_math",
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
        homepage="https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
        citation=f"Lightman et al. 2023, https://arxiv.org/abs/2305.20050; "
        f"{_MATH_CITATION}",
        license="MIT",
        read=rows.read_maths,
        sources={"test": Hub("HuggingFaceH4/MATH-500", "test.jsonl")},
    ),
    DataSet(
        name="aime24",
        title="AIME 2024, both papers",
        homepage="https://huggingface.co/datasets/HuggingFaceH4/aime_2024",
        citation="Mathematical Association of America, https://maa.org",
        license="the texts are the MAA's",
        read=rows.read_maths,
        sources={"test": Hub("HuggingFaceH4/aime_2024", "data/train-*.parquet")},
    ),
    DataSet(
        name="aime25",
        title="AIME 2025, both papers",
        homepage="https://huggingface.co/datasets/math-ai/aime25",
        citation="Mathematical Association of America, https://maa.org",
        license="the texts are the MAA's",
        read=rows.read_maths,
        sources={"test": Hub("math-ai/aime25", "test.jsonl")},
    ),
    DataSet(
        name="deepcoder",
        title="DeepCoder-Preview: TACO, PrimeIntellect, LiveCodeBench, Codeforces",
        homepage=(
            "https://huggingface.co/datasets/agentica-org/DeepCoder-Preview-Dataset"
        ),
        citation="Luo et al. 2025, https://github.com/agentica-project/rllm",
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
            "test": Fixed(
                (
                    Remote(
                        f"{_GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
                        "b796127e635a67f93fb35c04f4cb03cf"
                        "06f38c8072ee7cee8833d7bee06979ef",
                    ),
                )
            )
        },
    ),
)
DATA_SETS: dict[str, DataSet] = {each.name: each for each in _KNOWN}

OWN_FORMS = ("jsonl", "parquet")  # the kinds of FILE in "jsonl:FILE"


def own_file(name: str) -> DataSet:
    """The data set that a file in the project's own form, or verl's, is."""
    return DataSet(
        name=name,
        title="questions of a file",
        homepage="",
        citation="",
        license="not stated",
        read=rows.read_own,
        sources={"train": Fixed(())},
    )


def is_on_hub(name: str) -> bool:
    """Whether a name is "OWNER/NAME" or "OWNER/NAME/SUBSET"."""
    owner, _, rest = name.partition("/")
    return "@" not in name and is_hub_id(f"{owner}/{rest.replace('/', '.')}")


def _hub_set(name: str) -> DataSet:
    """A data set of the hub that is known by its name alone."""
    return dataclasses.replace(
        own_file(name),
        title="a data set of the Hugging Face hub",
        homepage=f"https://huggingface.co/datasets/{name}",
        sources={split: HubSplit(name, split) for split in SPLITS},
    )


def find(name: str) -> DataSet:
    """A data set by its name, a file by "jsonl:FILE", or a set of the hub by its id.

    Raises:
        ValueError: there is none of this name.
    """
    kind, colon, path = name.partition(":")
    if kind in OWN_FORMS and colon and path:
        return own_file(name)
    if is_on_hub(name):
        return _hub_set(name)
    if name not in DATA_SETS:
        base, _, split = name.partition("@")
        if base in DATA_SETS or is_on_hub(base):
            raise ValueError(f"name the split of {base!r} apart: --split={split}")
        raise ValueError(
            f"no data set is called {name!r}; choose from {', '.join(DATA_SETS)}, or "
            f"name a file: jsonl:FILE or parquet:FILE; or one of the Hugging Face hub: "
            f"OWNER/NAME"
        )
    return DATA_SETS[name]
