"""The `tensorflow-datasets` builder of prepared questions; TensorFlow is not needed.

Importing this takes about a second: the library is imported with it.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from scalerl_jax.data.catalog import VERSION, DataSet
from scalerl_jax.data.questions import Question

_SHARD = 2**17  # records in a file
_CHUNK = 64  # records between two notes of how many there are
FEATURES = ("id", "text", "system", "reference")  # texts; the reference as JSON


class QuestionBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes questions as records that can be read by their place, in their order.

    There is one class, and a subclass of it for each name: the library takes name and
    version from a class.
    """

    VERSION = tfds.core.Version(VERSION)

    def __init__(
        self,
        data_set: DataSet,
        *,
        split: str,
        questions: Iterable[Question],
        directory: Path,
    ) -> None:
        """Of one split; `questions` are drawn when the data set is prepared."""
        self._data_set, self._split, self._questions = data_set, split, questions
        super().__init__(data_dir=directory, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self._data_set.title,
            features=tfds.features.FeaturesDict(
                {name: tfds.features.Text() for name in FEATURES}
            ),
            homepage=self._data_set.homepage or None,
            citation=self._data_set.citation or None,
            license=self._data_set.license,
            disable_shuffling=True,  # runs draw their own order
        )

    def write(self) -> Path:
        """Write the questions one by one; the directory that they are in now.

        `download_and_prepare` would hold all of them in memory, to shuffle them, and
        beyond a gigabyte it needs TensorFlow.
        """
        made = Path(self.info.data_dir)
        made.mkdir(parents=True)
        writer = tfds.core.SequentialWriter(
            self.info, max_examples_per_shard=_SHARD, file_format="array_record"
        )
        writer.initialize_splits([self._split])
        examples = (example for _, example in self._generate_examples())
        while chunk := list(itertools.islice(examples, _CHUNK)):
            writer.add_examples({self._split: chunk})
        writer.close_all()
        return made

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {self._split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for place, question in enumerate(self._questions):
            yield (
                place,
                {
                    "id": question.reference["id"],
                    "text": question.text,
                    "system": question.system,
                    "reference": json.dumps(question.reference),
                },
            )


def make_builder(data_set: DataSet, **options: Any) -> QuestionBuilder:
    """The builder of a data set; `options` are those of `QuestionBuilder`."""
    name = data_set.name.partition(":")[0].replace("/", "__")
    kind = type(name, (QuestionBuilder,), {"name": name}, skip_registration=True)
    return kind(data_set, **options)
