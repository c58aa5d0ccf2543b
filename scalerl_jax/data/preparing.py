"""From public or local files to records on disk, and what became of each row.

A prepared data set lies in DIRECTORY/NAME/SPLIT/VERSION, that of a file "jsonl:FILE" in
DIRECTORY/jsonl/SHA-256/VERSION: records in the form of `tensorflow-datasets`, and a
report.json.  It is made beside, and moved there when it is whole.
"""

import dataclasses
import json
import tempfile
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from scalerl_jax.data import downloads, files
from scalerl_jax.data.catalog import OWN_FORMS, VERSION, DataSet, find
from scalerl_jax.data.doubts import doubts
from scalerl_jax.data.questions import Question
from scalerl_jax.data.rows import Draft, Malformed, Unusable

DEFAULT_DIRECTORY = Path("~/.cache/scalerl_jax/data")
_REPORT = "report.json"
_UNFINISHED = "unfinished-"  # begins the directory that is being filled
_LEAST_BAD_ROWS, _BAD_SHARE = 10, 0.01  # that are skipped where no limit is given


class AlreadyPrepared(ValueError):
    """The data set is there, and was not to be overwritten."""


class Tally(dict[str, dict[str, Any]]):
    """How many rows there were by reason, and where the first was."""

    def add(self, reason: str, place: str) -> None:
        """Count one more."""
        self.setdefault(reason, {"count": 0, "first": place})["count"] += 1

    @property
    def total(self) -> int:
        """Rows of all reasons."""
        return sum(each["count"] for each in self.values())


@dataclasses.dataclass(kw_only=True)
class Report:
    """What a preparation kept and dropped, and why."""

    name: str
    split: str
    rows: int = 0  # of this split, broken ones too
    kept: int = 0
    # Rows that are well formed and cannot be asked or judged, and broken ones: by
    # reason, {"count": ..., "first": where}.
    dropped: Tally = dataclasses.field(default_factory=Tally)
    bad: Tally = dataclasses.field(default_factory=Tally)
    # Rows that were kept and whose verdicts are to be doubted, each by every reason.
    doubtful: Tally = dataclasses.field(default_factory=Tally)
    files: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def _tallies(self) -> dict[str, Tally]:
        return {
            "dropped": self.dropped,
            "bad": self.bad,
            "kept, doubtful": self.doubtful,
        }

    def lines(self) -> list[str]:
        """As a table."""
        counts = [("rows", self.rows, ""), ("kept", self.kept, "")]
        counts += [
            (f"{kind}: {reason}", each["count"], f"first: {each['first']}")
            for kind, tally in self._tallies().items()
            for reason, each in tally.items()
        ]
        width = max(len(label) for label, _, _ in counts)
        return [f"{self.name}, {self.split}"] + [
            f"  {label:<{width}} {count:>9,}  {first}".rstrip()
            for label, count, first in counts
        ]


def read_report(prepared: Path) -> Report:
    """The report of a prepared data set.

    Raises:
        ValueError: it is not one.
    """
    try:
        values: dict[str, Any] = json.loads((prepared / _REPORT).read_bytes())
        for kind in ("dropped", "bad", "doubtful"):
            values[kind] = Tally(values.get(kind, {}))  # older ones lack some
        return Report(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{prepared} is no prepared data set: {error}") from error


def is_prepared(prepared: Path) -> bool:
    """Whether a whole data set lies there."""
    return (prepared / _REPORT).is_file()


def choose_split(data_set: DataSet, split: str | None) -> str:
    """A split of the data set; its first, "train" if it has that, where none is said.

    Raises:
        ValueError: it has no such split.
    """
    if split is None:
        return data_set.splits[0]
    if split not in data_set.splits:
        raise ValueError(
            f"data set {data_set.name!r} has no split {split!r}, but "
            f"{', '.join(data_set.splits)}"
        )
    return split


def prepared_path(name: str, split: str, directory: Path) -> Path:
    """Where a data set lies when it is prepared.

    Raises:
        ValueError: a file "jsonl:FILE" cannot be read.
    """
    kind, _, file = name.partition(":")
    if kind not in OWN_FORMS:
        return directory.expanduser() / name / split / VERSION
    try:
        digest = files.sha256_of(Path(file).expanduser())
    except (OSError, ValueError) as error:
        raise ValueError(f"data set {name!r} cannot be read: {error}") from error
    return directory.expanduser() / kind / digest / VERSION


def prepare(
    name: str,
    *,
    split: str | None,
    directory: Path,
    paths: Sequence[Path] = (),
    max_bad_rows: int | None = None,
    overwrite: bool = False,
    try_tests: bool = True,
) -> Report:
    """Prepare a split of a data set, from its public files where no `paths` are given.

    Rows that are broken or not in the data set's form are skipped up to
    `max_bad_rows`; None: 1 % of the rows, and 10 at least.  The tests of programs are
    tried without a solution, and dropped where they pass, unless `try_tests` is off.

    Raises:
        ValueError: it is there already and not to be overwritten, the files are not
            what they should be, too many rows are bad, or no question is left.
        OSError: a file cannot be fetched or written.
    """
    data_set = find(name)
    split = choose_split(data_set, split)
    target = prepared_path(name, split, directory)
    if is_prepared(target) and not overwrite:
        raise AlreadyPrepared(f"{name}, split {split!r}, is there already: {target}")
    directory = directory.expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=directory) as made:
        work = Path(made)
        report = Report(name=name, split=split)
        if not paths and name.partition(":")[0] in OWN_FORMS:
            paths = [Path(name.partition(":")[2])]
        paths = [path.expanduser() for path in paths]
        paths = _known(paths, report) or _fetched(data_set, split, work, report)
        filled = _fill(data_set, paths, work, report, max_bad_rows, try_tests)
        (filled / _REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=1))
        _move(filled, target, aside=work / "replaced" if overwrite else None)
    return report


def _known(paths: Sequence[Path], report: Report) -> Sequence[Path]:
    """Local files, with their checksums in the report."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--path={path}: there is no such file")
        report.files.append(_described(path, origin=str(path)))
    return paths


def _described(path: Path, *, origin: str) -> dict[str, Any]:
    return {
        "origin": origin,
        "sha256": files.sha256_of(path),
        "bytes": path.stat().st_size,
    }


def _fetched(
    data_set: DataSet, split: str, work: Path, report: Report
) -> Sequence[Path]:
    """The public files of a split, downloaded, with their checksums in the report."""
    paths = []
    for remote in data_set.sources[split].locate():
        # The path in the URL tells files of one name in several folders apart.
        place = work / "downloads" / str(len(paths))
        place.mkdir(parents=True)
        name = urllib.parse.unquote(urllib.parse.urlparse(remote.url).path)
        paths.append(place / Path(name).name)
        downloads.download(remote, paths[-1])
        report.files.append(_described(paths[-1], origin=remote.url))
    return paths


def _fill(
    data_set: DataSet,
    paths: Sequence[Path],
    work: Path,
    report: Report,
    max_bad_rows: int | None,
    try_tests: bool,
) -> Path:
    """Write the questions of files as records; where they lie."""
    from scalerl_jax.data import builders  # a second to import
    from scalerl_jax.data.screening import Screen

    with Screen(try_tests=try_tests) as screen:
        drafts = screen.sift(_drafts(data_set, paths, report, max_bad_rows))
        builder = builders.make_builder(
            data_set,
            split=report.split,
            questions=_questions(data_set.name, drafts, report),
            directory=work,
        )
        return builder.write()


def _drafts(
    data_set: DataSet,
    paths: Sequence[Path],
    report: Report,
    max_bad_rows: int | None,
) -> Iterator[tuple[str, Draft]]:
    """The drafts of files with their places; counts rows that give none.

    Raises:
        ValueError: too many of them are bad.
    """
    found = (each for path in paths for each in files.read_rows(path))
    for each in tqdm(found, desc=data_set.name, unit=" rows", disable=None):
        reason = each.reason
        try:
            if each.row is not None:
                if data_set.split_of and data_set.split_of(each.row) != report.split:
                    continue
                yield each.place, data_set.read(each.row)
        except Unusable as why:
            report.dropped.add(str(why), each.place)
        except Malformed as why:
            reason = str(why)
        report.rows += 1
        if reason:
            report.bad.add(reason, each.place)
            if max_bad_rows is not None:
                _refuse_over(max_bad_rows, report)
    if max_bad_rows is None:
        _refuse_over(usual_limit(report), report)


def usual_limit(report: Report) -> int:
    """How many bad rows are skipped where nothing else is said."""
    return max(_LEAST_BAD_ROWS, int(_BAD_SHARE * report.rows))


def _refuse_over(limit: int, report: Report) -> None:
    if report.bad.total <= limit:
        return
    reason, first = next(iter(report.bad.items()))
    raise ValueError(
        f"{report.bad.total} of the first {report.rows} rows are broken or not in the "
        f"form of {report.name!r}, more than --max-bad-rows={limit}; the first is "
        f"{first['first']}: {reason}"
    )


def _questions(
    name: str, drafts: Iterable[tuple[str, Draft, str]], report: Report
) -> Iterator[Question]:
    """The questions that can be judged, each with an id of its own."""
    identities: set[str] = set()
    seen: dict[int, int] = {}  # hashes: of a text, of its reference
    for number, (place, draft, reason) in enumerate(drafts):
        identity = draft.identity or f"{report.split}/{number}"
        if not reason and identity in identities:
            reason = "its id was there before"
        if not reason and not _is_text(draft):
            reason = "it holds half a character of UTF-16"
        if reason:
            report.dropped.add(reason, place)
            continue
        identities.add(identity)
        report.kept += 1
        for doubt in (*doubts(draft), *_again(draft, seen)):
            report.doubtful.add(doubt, place)
        yield Question(
            task=name,
            text=draft.text,
            reference={**draft.reference, "id": identity},
            system=draft.system,
        )
    if not report.kept:
        said = "; ".join(" ".join(line.split()) for line in report.lines())
        raise ValueError(f"no question is left: {said}")


def _again(draft: Draft, seen: dict[int, int]) -> Iterator[str]:
    """Whether a question came before, which is kept: duplicates may be meant."""
    text = hash((draft.system, draft.text))
    reference = hash(json.dumps(draft.reference, sort_keys=True))
    if text in seen:
        same = seen[text] == reference
        yield "an exact duplicate" if same else "asked before, with another answer"
    seen.setdefault(text, reference)


def _is_text(draft: Draft) -> bool:
    """Whether a draft can be written; JSON's escapes make texts that cannot."""
    try:
        f"{draft.text}{draft.system}{draft.identity}".encode()
    except UnicodeEncodeError:
        return False
    return True


def _move(filled: Path, target: Path, *, aside: Path | None) -> None:
    """Put a filled directory in its place, and what was there `aside`, if that is said.

    Another process may have been faster with the same: then its own stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if aside and target.exists():
        target.rename(aside)
    try:
        filled.rename(target)
    except OSError:
        if not is_prepared(target):
            raise
