"""Files from outside: their places by the names that users give, and what they hold.

A file that a user names or that lies in the directory of a run is read by functions of
this module: it is a regular one, and no more memory is taken than its kind may need.
Whatever is wrong with it is a ValueError with a short reason.
"""

import dataclasses
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from scalerl_jax.utils.remote import fetch_copy

MAX_DEPTH = 100  # objects and lists inside of each other
# Bytes of a file that is read whole, at most.  JSON takes 20 times as much memory.
MOST_JSON = 2**26
MOST_WHOLE = 2**28  # of tokenizers, which another library parses, and of tables
MOST_LINE = 2**26  # of a line, where a file is read line by line
_TAIL = 2**16  # read first of the end of a file
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_remote(path: object) -> bool:
    """Return whether a path is in a bucket, or looks like it."""
    return "://" in str(path)


def local_file(name: str, *, suffixes: tuple[str, ...] | None = None) -> Path:
    """Return a local path, or of one in a bucket its copy, which is fetched.

    From a directory in a bucket, files that end with one of `suffixes` are fetched.

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
    """
    if not is_remote(name):
        return Path(name).expanduser()
    return fetch_copy(name, suffixes=suffixes)


def is_hub_id(name: str | Path) -> bool:
    """Return whether a name is "OWNER/NAME[@REVISION]", and no file here."""
    return bool(_ID.fullmatch(str(name))) and not Path(name).exists()


class _File(Protocol):
    def exists(self) -> bool: ...
    def is_file(self) -> bool: ...
    def read_bytes(self) -> bytes: ...
    def read_text(self, encoding: str) -> str: ...


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


class Directory(Protocol):
    """A `Path` to its readers; `utils.gguf` makes the files on demand."""

    def __truediv__(self, name: str, /) -> _File:
        """A file in it, which may be missing."""
        ...


def check_regular(path: _File) -> None:
    """Refuse what may never end when it is read: devices, pipes, directories.

    Raises:
        ValueError: with what to name instead.
    """
    try:
        there, regular = path.exists(), path.is_file()
    except OSError as error:  # a name that is too long, a directory that is closed
        raise _unreadable(path, error) from error
    if not there:
        raise ValueError(f"{path}: there is no such file")
    if not regular:
        raise ValueError(f"{path} is no regular file; write its content into one")


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file of any size, to be read in parts.

    Raises:
        ValueError: it is no regular file, or cannot be read.
    """
    check_regular(path)
    try:  # a file of the kernel's that waits is not waited for
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def read_bytes(path: _File, *, most: int = MOST_JSON) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: it is no regular file, cannot be read, or has more than `most`
            bytes.
    """
    if not isinstance(path, Path):  # made from a file that was read within its bounds
        return path.read_bytes()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:  # a file may grow, and those of the kernel do not say their size
            content = b"" if size > most else file.read(most + 1) or b""
        except OSError as error:
            raise _unreadable(path, error) from error
    if max(size, len(content)) > most:
        raise ValueError(
            f"{path} has {max(size, len(content)):,} bytes, and {most:,} are read of "
            f"such a file at most; put it right, or name another"
        )
    return content


def read_text(path: _File, *, most: int = MOST_JSON) -> str:
    """Return the text in a file.

    Raises:
        ValueError: as of `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8") from error


def read_lines(path: Path, *, most: int = MOST_LINE) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; it is not held whole.

    Raises:
        ValueError: it is no regular file, cannot be read, or has a line of more than
            `most` bytes.
    """
    with open_regular(path) as file:
        yield from lines_of(file, path, most=most)


def lines_of(file: _Lines, path: Path, *, most: int) -> Iterator[bytes]:
    """Yield the lines of an open file; see `read_lines`."""
    number = 0
    try:
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                raise ValueError(
                    f"{path} has a line of more than {most >> 20} MiB, line {number}; "
                    f"put it right, or name another file"
                )
            yield line
    except OSError as error:
        raise _unreadable(path, error) from error


def last_lines(path: Path, count: int = 1, *, most: int = MOST_LINE) -> list[bytes]:
    """Return the last lines that are whole, as a reader of a file under way wants them.

    Of the file no more is read than that.

    Raises:
        ValueError: it is no regular file, or they have more than `most` bytes.
    """
    with open_regular(path) as file:
        try:
            return _tail(file, path, count, most)
        except OSError as error:
            raise _unreadable(path, error) from error


def _tail(file: IO[bytes], path: Path, count: int, most: int) -> list[bytes]:
    size, end = _TAIL, file.seek(0, os.SEEK_END)
    while True:
        start = max(end - size, 0)
        file.seek(start)
        lines = file.read(end - start).splitlines(True)
        whole = [line for line in lines[start > 0 :] if line.endswith(b"\n")]
        if len(whole) >= count or not start:
            return whole[-count:]
        if size >= most:
            raise ValueError(
                f"{path} has a last line of more than {most >> 20} MiB; put it right"
            )
        size = min(4 * size, most)


def _unreadable(path: object, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read: {error.strerror or error}")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no UTF-8 or no JSON, nests too deep, or has a number that is
            too long.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError(f"it nests deeper than {MAX_DEPTH}") from error
    except ValueError as error:  # Python's limit
        raise ValueError("a number in it has thousands of digits") from error
    # A text with few brackets cannot be deep: most are not looked through.
    brackets = text.count("[") + text.count("{")
    if brackets > MAX_DEPTH and isinstance(value, dict | list) and _is_deep(value):
        raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    return value


def read_json(path: _File, *, most: int = MOST_JSON) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: names the file, which is missing or holds something else.
    """
    value = read_value(path, most=most)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def read_value(path: _File, *, most: int = MOST_JSON) -> Any:
    """The JSON value in a file.

    Raises:
        ValueError: names the file, which is missing or holds something else.
    """
    content = read_bytes(path, most=most)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


@dataclasses.dataclass(frozen=True)
class Fields:
    """Fields of a JSON object; errors name its file, the field and the value."""

    file: object  # as errors name it
    values: dict[str, Any]
    prefix: str = ""

    def refuse(self, name: str, supported: str) -> ValueError:
        """Return the error for a field; `supported` says what would do."""
        value = self.values.get(name)
        shown = "is missing" if value is None else f"= {value!r} is not supported"
        return ValueError(f"{self.file}: {self.prefix}{name} {shown}; {supported}")

    def integer(
        self, name: str, default: int | None = None, *, most: int = 2**28
    ) -> int:
        """Return an integer from 1 to `most`; a file that says more is broken."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(name, f"it must be an integer from 1 to {most}")
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return the fields, and defaults of those that are absent or null."""
        given = {name: each for name, each in self.values.items() if each is not None}
        return dataclasses.replace(self, values=dict(defaults) | given)

    def number(self, name: str) -> float:
        """Return a finite number above 0."""
        value: Any = self.values.get(name)
        if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
            raise self.refuse(name, "it must be a number above 0")
        return float(value)

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse a value that is there and not allowed."""
        if self.values.get(name) is not None and self.values[name] not in allowed:
            choice = f"only {list(allowed)} is" if allowed else "remove it, no value is"
            raise self.refuse(name, choice)


def _is_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether containers nest deeper than the limit, level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [
            child
            for children in inner
            for child in children
            if isinstance(child, dict | list)
        ]
    return bool(level)
