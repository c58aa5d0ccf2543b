"""Rows of local files: JSON lines, JSON arrays, CSV, Parquet and Arrow.

The content decides the form, except for CSV, which is known by the name: FILE.csv or,
with tabs, FILE.tsv.  Text files may be gzipped.  Rows are read one by one; only an
array is read whole.
"""

import csv
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from scalerl_jax.formats.bounded import lines_of, open_regular
from scalerl_jax.formats.reading import parse_json

Row = dict[str, Any]

# The first bytes of such files; Arrow has a file format and a stream format.
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
_ARROW_FILE, _ARROW_STREAM = b"ARRO", b"\xff\xff\xff\xff"
# Other first bytes, and what has them.
_UNREAD = {
    b"(\xb5/\xfd": "compressed by zstd",
    b"\xfd7zX": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"PK\x03\x04": "a ZIP archive",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_CELL = 2**27  # characters of a cell of CSV, at most
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BATCH = 64  # rows of Parquet held at a time
_ROW, _ARRAY = 2**28, 2**32  # bytes of a row, and of an array of them, at most


class FoundRow(NamedTuple):
    """A row, or the reason why it cannot be read."""

    place: str  # "train.jsonl, line 12"
    row: Row | None
    reason: str = ""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal, without reading it whole."""
    with open_regular(path) as file:
        # Files of the kernel have no size, and may have no end.
        if not os.fstat(file.fileno()).st_size and file.peek(1):
            raise ValueError(f"{path} is no file of a disk; write its content into one")
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_rows(path: Path) -> Iterator[FoundRow]:
    """Yield the rows of a file in their order, broken ones with the reason.

    Raises:
        ValueError: the file as a whole cannot be read.
    """
    try:
        with open_regular(path) as file:
            start = file.read(4) or b""
        if start == _PARQUET:
            yield from _read_parquet(path)
        elif start in (_ARROW_FILE, _ARROW_STREAM):
            yield from _read_arrow(path, stream=start == _ARROW_STREAM)
        else:
            _check_start(path, start)
            delimiter = delimiter_of(path)
            plain = open_regular(path)
            packed = start[:2] == _GZIP
            with plain, gzip.GzipFile(fileobj=plain) if packed else plain as opened:
                if delimiter:
                    yield from _read_csv(path, opened, delimiter)
                else:
                    yield from _read_json(path, opened)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def delimiter_of(path: Path) -> str:
    """Return what is between the cells of a CSV, known by its name; "": no CSV."""
    kind = path.with_suffix("") if path.suffix == ".gz" else path
    return _DELIMITERS.get(kind.suffix.lower(), "")


def _check_start(path: Path, start: bytes) -> None:
    """Raise ValueError for a file of a known kind that is not read."""
    for first, kind in _UNREAD.items():
        if start.startswith(first):
            raise ValueError(
                f"{path} is {kind}, which is not read; write it as UTF-8, plain or "
                f"gzipped"
            )


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError for two columns of one name, of which a row would keep one."""
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"{path} has several columns {name!r}; rename them")


def _read_json(path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[FoundRow]:
    before = True  # no row was read yet
    for number, line in enumerate(lines_of(file, path, most=_ROW), start=1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        # Rows are objects: a bracket before any of them opens an array of them.
        if before and line.lstrip().startswith(b"["):
            yield from _read_array(path, line + file.read(_ARRAY + 1))
            return
        before = False
        yield _parse(f"{path.name}, line {number}", line)


def _parse(place: str, line: bytes) -> FoundRow:
    try:
        return _as_row(place, parse_json(line))
    except ValueError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            return FoundRow(place, None, "invalid UTF-8")
        return FoundRow(place, None, "broken JSON")


def _as_row(place: str, row: Any) -> FoundRow:
    if isinstance(row, dict):
        return FoundRow(place, row)
    return FoundRow(place, None, "not a JSON object")


def _read_array(path: Path, content: bytes) -> Iterator[FoundRow]:
    if len(content) > _ARRAY:
        raise ValueError(
            f"{path} is a JSON array of more than {_ARRAY >> 30} GiB, which is read "
            f"whole; write it as JSON lines"
        )
    try:
        rows = parse_json(content)
    except ValueError as error:
        raise ValueError(
            f"{path} begins as a JSON array and is not one: {error}"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield _as_row(f"{path.name}, row {number}", row)


def _read_csv(
    path: Path, file: IO[bytes] | gzip.GzipFile, delimiter: str
) -> Iterator[FoundRow]:
    """Yield the rows below a header of names; an empty cell is a missing field."""
    csv.field_size_limit(_CELL)
    lines = (line.decode("utf-8-sig") for line in lines_of(file, path, most=_ROW))
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        _check_names(path, rows.fieldnames or ())
        for row in rows:
            place = f"{path.name}, line {rows.line_num}"
            if None in row or None in row.values():
                yield FoundRow(place, None, "not as many cells as the header")
            else:
                yield FoundRow(
                    place, {name: each or None for name, each in row.items()}
                )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no CSV: line {rows.reader.line_num + 1} is not UTF-8"
        ) from error
    except csv.Error as error:
        raise ValueError(
            f"{path} is no CSV: {error}, line {rows.reader.line_num}; quotes in a "
            f"quoted cell are doubled"
        ) from error


def _read_parquet(path: Path) -> Iterator[FoundRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _rows_of(path, file.iter_batches(batch_size=_BATCH))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def _read_arrow(path: Path, *, stream: bool) -> Iterator[FoundRow]:
    """Yield the rows of a file of `datasets`, which is mapped, not read whole."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            if stream:
                batches = pyarrow.ipc.open_stream(source)
            else:
                file = pyarrow.ipc.open_file(source)
                batches = map(file.get_batch, range(file.num_record_batches))
            yield from _rows_of(path, map(_checked, batches))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not an Arrow file: {error}") from error


def _checked(batch: Any) -> Any:
    """Return a batch after checking its offsets: it is mapped, and may be damaged."""
    batch.validate(full=True)
    return batch


def _rows_of(path: Path, batches: Iterable[Any]) -> Iterator[FoundRow]:
    """Yield the rows of record batches of pyarrow."""
    number = 0
    for batch in batches:
        _check_names(path, batch.schema.names)
        classes = _class_names(batch.schema)
        for place in range(batch.num_rows):
            number += 1
            where = f"{path.name}, row {number}"
            try:
                row = _row_of(batch.slice(place, 1))
            except UnicodeDecodeError:
                yield FoundRow(where, None, "invalid UTF-8")
            else:
                named = {
                    name: _named(row[name], each) for name, each in classes.items()
                }
                yield FoundRow(where, row | named)


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the names of classes that `datasets` has stored as numbers, by column."""
    try:
        said = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        return {
            name: [str(each) for each in feature["names"]]
            for name, feature in said["info"]["features"].items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
            if name in schema.names
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _named(value: Any, names: list[str]) -> Any:
    """Return the name of a class; None for a number that is no class's, such as -1."""
    if type(value) is not int:
        return value
    return names[value] if 0 <= value < len(names) else None


def _row_of(single: Any) -> Row:
    """Return the row of a batch of one, without the times that Python cannot hold.

    No reader asks for a time, and without pandas Python has no nanoseconds.
    """
    import pyarrow

    row: Row = {}
    for name, column in zip(single.schema.names, single.columns, strict=True):
        try:
            (row[name],) = column.to_pylist()
        except (UnicodeDecodeError, pyarrow.ArrowException):
            raise
        except (ValueError, OverflowError, LookupError):
            row[name] = None
    return row
