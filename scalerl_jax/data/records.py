"""Prepared questions on disk: records, and a report of kept and dropped rows.

The records have the form of `tensorflow-datasets`, without TensorFlow.  They are
written in order and read by index.  They are uploaded to a bucket once, and each
machine fetches them.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scalerl_jax.data.catalog import VERSION, DataSet
from scalerl_jax.data.questions import LazySequence, Question
from scalerl_jax.formats import remote
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import parse_json, read_json
from scalerl_jax.process.ending import first_line

_SHARD = 2**17  # records in a file
_FEATURES = ("id", "text", "system", "reference")  # texts; the reference as JSON
# Keys of features.json with the names of classes, and the classes that we write.
_CLASS_KEYS = ("type", "pythonClassName", "python_class_name")
_CLASSES = {
    "tensorflow_datasets.core.features.features_dict.FeaturesDict",
    "tensorflow_datasets.core.features.text_feature.Text",
}
REPORT = "report.json"
_LEAST_BAD_ROWS, _BAD_SHARE = 10, 0.01  # bad rows that are skipped by default


class Tally(dict[str, dict[str, Any]]):
    """Counts of rows by reason, with the location of the first."""

    def add(self, reason: str, place: str) -> None:
        """Count one more."""
        self.setdefault(reason, {"count": 0, "first": place})["count"] += 1

    @property
    def total(self) -> int:
        """Number of rows, over all reasons."""
        return sum(each["count"] for each in self.values())


@dataclasses.dataclass(kw_only=True)
class PreparationReport:
    """Account of what a preparation kept and dropped, and why."""

    name: str
    split: str
    rows: int = 0  # of this split, broken ones too
    kept: int = 0
    # By reason, {"count": ..., "first": where}: well-formed rows that cannot be asked
    # or judged; broken rows; kept rows whose verdicts may be wrong.
    dropped: Tally = dataclasses.field(default_factory=Tally)
    bad: Tally = dataclasses.field(default_factory=Tally)
    doubtful: Tally = dataclasses.field(default_factory=Tally)
    files: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    columns: list[str] = dataclasses.field(default_factory=list)  # of the first row

    def lines(self) -> list[str]:
        """Return the report as a table."""
        counts = [("rows", self.rows, ""), ("kept", self.kept, "")]
        for kind, tally in self._tallies():
            for reason, each in tally.items():
                first = f"first: {each['first']}"
                counts.append((f"{kind}: {reason}", each["count"], first))
        width = max(len(label) for label, _, _ in counts)
        return [f"{self.name}, {self.split}"] + [
            f"  {label:<{width}} {count:>9,}  {first}".rstrip()
            for label, count, first in counts
        ]

    def write(self, prepared: Path) -> None:
        """Write the report beside the records, which marks them as complete."""
        (prepared / REPORT).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @property
    def usual_limit(self) -> int:
        """Number of bad rows that are skipped by default."""
        return max(_LEAST_BAD_ROWS, int(_BAD_SHARE * self.rows))

    @property
    def way_out(self) -> str:
        """Advice for a message if a field is missing, else ""."""
        if not any("is missing" in reason for reason in self.bad):
            return ""
        named = ", ".join(map(repr, self.columns))
        return (
            f"; the first row has the columns {named}: say which has what by "
            f"--column=prompt=COLUMN --column=reference=COLUMN (in a run: "
            f"NAME?prompt=COLUMN&reference=COLUMN in data.tasks)"
        )

    def summary(self) -> str:
        """Return the counts as one line."""
        said = [f"{self.rows:,} rows, {self.kept:,} kept"]
        for kind, tally in self._tallies():
            said += [
                f"{kind} {each['count']:,}: {reason} (first: {each['first']})"
                for reason, each in tally.items()
            ]
        return "; ".join(said)

    def _tallies(self) -> tuple[tuple[str, Tally], ...]:
        return (
            ("dropped", self.dropped),
            ("bad", self.bad),
            ("kept, doubtful", self.doubtful),
        )

    def refuse_over(self, limit: int) -> None:
        """Raise ValueError for more bad rows than the limit.

        Raises:
            ValueError: names the first bad row.
        """
        if self.bad.total <= limit:
            return
        reason, first = next(iter(self.bad.items()))
        raise ValueError(
            f"{self.bad.total} of the first {self.rows} rows are broken or not in the "
            f"form of {self.name!r}, more than {limit}, the limit that scalerl data "
            f"prepare --max-bad-rows=N changes; the first is {first['first']}: {reason}"
            f"{self.way_out}"
        )


def read_report(prepared: Path) -> PreparationReport:
    """Return the report of a prepared data set.

    Raises:
        ValueError: the directory holds none.
    """
    try:
        values: dict[str, Any] = read_json(prepared / REPORT)
        for kind in ("dropped", "bad", "doubtful"):
            values[kind] = Tally(values.get(kind, {}))  # older ones lack some
        return PreparationReport(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{prepared} is no prepared data set: {error}") from error


def is_prepared(prepared: Path) -> bool:
    """Return whether a directory holds a whole prepared data set."""
    return (prepared / REPORT).is_file()


def write_records(
    data_set: DataSet, split: str, questions: Iterable[Question], directory: Path
) -> None:
    """Write the questions of a split one by one into a directory, which is made.

    A builder's `download_and_prepare` would hold all of them in memory, to shuffle
    them, and beyond a gigabyte it needs TensorFlow.
    """
    import tensorflow_datasets as tfds  # a second to import
    from tensorflow_datasets.core.dataset_info import DatasetIdentity

    directory.mkdir(parents=True)
    identity = DatasetIdentity(
        name=data_set.name.partition(":")[0].replace("/", "__"),
        version=tfds.core.Version(VERSION),
        data_dir=str(directory),
        module_name=__name__,
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        description=data_set.title,
        features=tfds.features.FeaturesDict(
            {name: tfds.features.Text() for name in _FEATURES}
        ),
        homepage=data_set.homepage or None,
        citation=data_set.citation or None,
        license=data_set.license,
        disable_shuffling=True,  # runs draw their own order
    )
    writer = tfds.core.SequentialWriter(
        info, max_examples_per_shard=_SHARD, file_format="array_record"
    )
    writer.initialize_splits([split])
    # One by one, in one call: each call writes the files of metadata again.
    examples: Any = map(_as_record, questions)
    writer.add_examples({split: examples})
    writer.close_all()


def _as_record(question: Question) -> dict[str, str]:
    return {
        "id": question.reference["id"],
        "text": question.text,
        "system": question.system,
        "reference": json.dumps(question.reference),
    }


class QuestionSource(LazySequence[Question]):
    """The questions of a prepared data set; only requested ones are read."""

    def __init__(self, name: str, prepared: Path) -> None:
        """Open the records that were written in a directory.

        Raises:
            ValueError: there are no records, or they are damaged.
        """
        import tensorflow_datasets as tfds  # a second to import

        self.report = read_report(prepared)
        self.name = name
        self._prepared = prepared
        _check_features(prepared)
        try:
            builder: Any = tfds.builder_from_directory(prepared)
            for path in builder.info.splits[self.report.split].filepaths:
                inside(prepared, os.path.relpath(path, prepared))
            self._records = builder.as_data_source(split=self.report.split)
        except Exception as error:
            raise self._damaged(error) from error
        if len(self._records) != self.report.kept:
            raise ValueError(
                f"{prepared} holds {len(self._records)} records, and its report says "
                f"{self.report.kept}; prepare it again with --overwrite"
            )

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self._records)

    def read(self, places: list[int]) -> list[Question]:
        """Return the questions at these indices.

        Raises:
            ValueError: they are damaged.
        """
        try:
            found = self._records.__getitems__(places)
        except RuntimeError as error:
            raise self._damaged(error) from error
        return [self._question(each) for each in found]

    def _damaged(self, error: Exception) -> ValueError:
        """Return the error for one of the libraries', which have many kinds."""
        return ValueError(
            f"{self._prepared} is damaged ({first_line(error)}); remove it and prepare "
            f"it again"
        )

    def _question(self, record: dict[str, Any]) -> Question:
        text, system, reference = (
            record[name].decode() for name in ("text", "system", "reference")
        )
        return Question(
            task=self.name, text=text, reference=parse_json(reference), system=system
        )


def _check_features(prepared: Path) -> None:
    """Raise for classes that we do not write: TFDS would import any such module.

    Raises:
        ValueError: names the file and the class.
    """
    file = prepared / "features.json"
    left: list[Any] = [read_json(file)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            found = {value.get(key) for key in _CLASS_KEYS if key in value}
            if foreign := found - _CLASSES:
                raise ValueError(
                    f"{file} names the class {foreign.pop()!r}, and prepared data sets "
                    f"have {sorted(_CLASSES)} alone; prepare it again"
                )
            left += value.values()
        elif isinstance(value, list):
            left += value


# In a bucket.


def upload(prepared: Path, directory: Path, url: str) -> str:
    """Copy a prepared data set to the same path below a URL, and return its URL.

    Its report is copied last: a data set without one is incomplete.

    Raises:
        ValueError: the bucket cannot be used.
        OSError: a file cannot be written there.
    """
    place = prepared.relative_to(directory.expanduser()).as_posix()
    target = remote.open_path(url, setting="--upload=") / place
    files = [file for file in prepared.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.name == REPORT, file)):
        name = file.relative_to(prepared).as_posix()
        remote.send(target / name, inside(prepared, name))
    return f"{url.rstrip('/')}/{place}"


def upload_file(file: Path, url: str) -> str:
    """Copy one file below a URL; return its URL.

    Raises:
        ValueError: the bucket cannot be used.
        OSError: it cannot be read, or not be written there.
    """
    path = remote.open_path(url, setting="--upload=") / file.name
    remote.send(path, file.expanduser())
    return f"{url.rstrip('/')}/{file.name}"


def bring(prepared: Path, directory: str) -> Path:
    """Return the local directory with the copy of a prepared data set.

    Changed files are fetched from the `directory` in a bucket.

    Args:
        prepared: path of the data set in the directory.
        directory: gs://BUCKET/PATH.

    Raises:
        ValueError: the bucket cannot be used.
    """
    url = f"{directory.rstrip('/')}/{prepared.as_posix()}"
    path = remote.open_path(url, setting="data.directory=")
    here = remote.copy_of(directory)
    if remote.read(path / REPORT) is not None:
        remote.fetch(url, here / prepared, setting="data.directory=")
    return here
