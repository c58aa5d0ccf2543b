"""Preparation of data sets: from public or local files to records on disk.

A prepared data set is in DIRECTORY/NAME/SPLIT/VERSION, that of a file "jsonl:FILE" in
DIRECTORY/jsonl/SHA-256/VERSION: records in the form of `tensorflow-datasets`, and a
report.json.  It is made in a temporary directory beside that, and moved there when it
is complete.  Columns in a name add a directory above the version's.
"""

import contextlib
import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from scalerl_jax.data import files
from scalerl_jax.data.catalog import (
    VERSION,
    DataSet,
    columns_of,
    find,
    is_own_file,
    where_looked,
)
from scalerl_jax.data.drafts import Draft, Malformed, Refused, Unusable, check_text
from scalerl_jax.data.questions import Question
from scalerl_jax.data.records import (
    PreparationReport,
    QuestionSource,
    bring,
    is_prepared,
    write_records,
)
from scalerl_jax.data.screening import Screen, doubts
from scalerl_jax.data.sources import Local, saved_splits
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import MAX_DEPTH, is_deep, is_remote, local_file
from scalerl_jax.process.full_disk import naming
from scalerl_jax.process.printing import shown

DEFAULT_DIRECTORY = Path("~/.cache/scalerl_jax/data")
_MOST_NAMES, _LONGEST_NAME = 30, 60  # of columns in a message
_UNFINISHED = "unfinished-"  # begins the directory that is being filled


class AlreadyPrepared(ValueError):
    """The data set is already prepared, and `overwrite` is off."""


def choose_split(data_set: DataSet, split: str | None) -> str:
    """Return a split of the data set; by default its first, usually "train".

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
    """Return the directory of a prepared data set.

    Raises:
        ValueError: a file "jsonl:FILE" cannot be read.
    """
    bare, columns = columns_of(name)
    asked = ["&".join(map("=".join, columns))] if columns else []

    def place(*parts: str) -> Path:
        name = "/".join([*parts, *asked, VERSION])
        return inside(directory.expanduser(), name, follow_links=True)

    if not is_own_file(name):
        return place(bare, split)
    kind, _, file = bare.partition(":")
    try:
        digest = _digest(local_file(file), split)
    except TimeoutError as error:
        raise TimeoutError(f"data set {name!r} cannot be read: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data set {name!r} cannot be read: {error}{where_looked(file)}"
        ) from error
    return place(kind, digest)


def _digest(path: Path, split: str) -> str:
    """Return the SHA-256 of a file, or of a split's name and the files in a folder."""
    if not path.is_dir():
        return files.sha256_of(path)
    found = saved_splits(path)[split].fetch(path)
    texts = [split, *(each.sha256 for each in found)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def open_dataset(
    name: str, *, split: str | None, directory: Path | str
) -> QuestionSource:
    """Return the questions of a data set that was prepared in `directory`.

    The default split is the first one.  A file, "jsonl:FILE" or of another kind, is
    prepared here when it is opened for the first time, and again when its content has
    changed.  From a directory in a bucket (str, gs://BUCKET/PATH) a data set is copied
    to this machine; files are prepared here.

    Raises:
        ValueError: there is no such data set or split, or it is not prepared, or it is
            damaged.
    """
    split = choose_split(find(name), split)
    asked, directory = directory, _local_directory(name, split, directory)
    prepared = prepared_path(name, split, directory)
    if not is_prepared(prepared):
        if not is_own_file(name):
            raise ValueError(
                f"data set {name!r}, split {split!r}, is not prepared in {asked}; "
                f"run scalerl data prepare --dataset={shlex.quote(name)} "
                f"--split={split} --{_flag(asked)}={asked}"
            )
        with contextlib.suppress(AlreadyPrepared):  # by another process, just now
            prepare(name, split=split, directory=directory)
    return QuestionSource(name, prepared)


def _local_directory(name: str, split: str, directory: Path | str) -> Path:
    """Return the local directory that holds a data set, if it is prepared.

    Raises:
        ValueError: the directory is in a bucket that cannot be used.
    """
    if not is_remote(directory):
        return Path(directory)
    if is_own_file(name):
        return DEFAULT_DIRECTORY
    return bring(prepared_path(name, split, Path()), str(directory))


def _flag(directory: Path | str) -> str:
    """Return the flag of `prepare` that puts data sets into a directory."""
    return "upload" if is_remote(directory) else "directory"


def prepare(
    name: str,
    *,
    split: str | None,
    directory: Path,
    paths: Sequence[Path] = (),
    max_bad_rows: int | None = None,
    overwrite: bool = False,
    try_tests: bool = True,
) -> PreparationReport:
    """Prepare a split of a data set, from its public files where no `paths` are given.

    Rows that are broken or not in the data set's form are skipped up to
    `max_bad_rows`; None: 1 % of the rows, and 10 at least.  The tests of programs are
    tried without a solution, and dropped if they pass, unless `try_tests` is off.

    Raises:
        ValueError: it is already prepared and `overwrite` is off, `paths` are given
            for a file, the files are damaged or changed, too many rows are bad, or no
            question is left.
        OSError: a file cannot be fetched or written.
    """
    data_set = find(name)
    split = choose_split(data_set, split)
    if paths and is_own_file(name):  # its records are found by its own content
        raise ValueError(
            f"--path={paths[0]}: {name} is a file already; leave one of the two out"
        )
    target = prepared_path(name, split, directory)
    if is_prepared(target) and not overwrite:
        raise AlreadyPrepared(f"{name}, split {split!r}, is already prepared: {target}")
    directory = directory.expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--directory={directory}, which is data.directory of a run, cannot be a "
            f"directory ({error.strerror}); name another"
        ) from error
    report = PreparationReport(name=name, split=split)
    local = [Local(path.expanduser()) for path in paths]
    sources = local or [data_set.sources[split]]
    with (
        naming(f"--directory={directory}"),
        tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=directory) as made,
    ):
        work, filled = Path(made), Path(made) / "records"
        found = [file for each in sources for file in each.fetch(work)]
        report.files = [each.described() for each in found]
        rows = (row for each in found for row in files.read_rows(each.path))
        with contextlib.closing(Screen(try_tests=try_tests)) as screen:
            drafts = screen.sift(_drafts(data_set, rows, report, max_bad_rows))
            write_records(data_set, split, _questions(drafts, report), filled)
        report.write(filled)
        _move(filled, target, aside=work / "replaced", overwrite=overwrite)
    return report


def _drafts(
    data_set: DataSet,
    rows: Iterable[files.FoundRow],
    report: PreparationReport,
    max_bad_rows: int | None,
) -> Iterator[tuple[str, Draft]]:
    """Yield the drafts of rows with their locations; count rows without a draft.

    Raises:
        ValueError: too many of them are bad.
    """
    for each in tqdm(rows, desc=shown(data_set.name), unit=" rows", disable=None):
        reason = each.reason
        try:
            if each.row is not None:
                report.columns = report.columns or _names(each.row)
                if data_set.split_of and data_set.split_of(each.row) != report.split:
                    continue
                yield each.place, data_set.read(each.row)
        except Unusable as why:
            report.dropped.add(str(why), each.place)
        except Malformed as why:
            reason = str(why)
        except Refused as why:
            raise ValueError(f"{data_set.name}, {each.place}: {why}") from why
        report.rows += 1
        if reason:
            report.bad.add(reason, each.place)
            if max_bad_rows is not None:
                report.refuse_over(max_bad_rows)
    if max_bad_rows is None:
        report.refuse_over(report.usual_limit)


def _names(row: files.Row) -> list[str]:
    """Return the columns of a row and fields in them, as many as a message can hold."""
    names: list[str] = []
    for name, value in [*row.items()][:_MOST_NAMES]:
        fields = value if isinstance(value, dict) else ()
        names += [f"{name}.{field}" for field in fields] or [str(name)]
    return [name[:_LONGEST_NAME] for name in names[:_MOST_NAMES]]


def _questions(
    drafts: Iterable[tuple[str, Draft, str]], report: PreparationReport
) -> Iterator[Question]:
    """Yield the questions that can be judged, each with a unique id."""
    identities: set[str] = set()
    seen: dict[int, int] = {}  # hashes: of a text, of its reference
    for number, (place, draft, reason) in enumerate(drafts):
        identity = draft.identity or f"{report.split}/{number}"
        if not reason and identity in identities:
            reason = "its id is repeated"
        reference, unwritable = _as_json(draft)
        reason = reason or unwritable
        if reason:
            report.dropped.add(reason, place)
            continue
        identities.add(identity)
        report.kept += 1
        for doubt in (*doubts(draft), *_again(draft, reference, seen)):
            report.doubtful.add(doubt, place)
        yield Question(
            task=report.name,
            text=draft.text,
            reference={**draft.reference, "id": identity},
            system=draft.system,
        )
    if not report.kept:
        raise ValueError(
            f"no question of {report.name}, {report.split}, is left: "
            f"{report.summary()}{report.way_out}"
        )


def _again(draft: Draft, reference: str, seen: dict[int, int]) -> Iterator[str]:
    """Yield a doubt if a question is repeated; it is kept, as that may be intended."""
    text, by = hash((draft.system, draft.text)), hash(reference)
    if text in seen:
        same = seen[text] == by
        yield "an exact duplicate" if same else "asked before, with another answer"
    seen.setdefault(text, by)


def _as_json(draft: Draft) -> tuple[str, str]:
    """Return the reference of a draft as JSON, and why the draft cannot be written."""
    try:
        check_text(draft.text, draft.system, draft.identity)
        text = json.dumps(draft.reference, sort_keys=True)
        deep = is_deep(draft.reference, text)
        return text, f"its reference nests deeper than {MAX_DEPTH}" if deep else ""
    except Unusable as why:
        return "", str(why)
    except TypeError:  # Parquet has more types
        return "", "its reference holds a value that JSON lacks, as bytes or a time"


def _move(filled: Path, target: Path, *, aside: Path, overwrite: bool) -> None:
    """Move a filled directory to its target, and a replaced or incomplete one `aside`.

    If another process has filled the same target meanwhile, that one stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and (overwrite or not is_prepared(target)):
        target.rename(aside)
    try:
        filled.rename(target)
    except OSError:
        if not is_prepared(target):
            raise
