"""Read files from outside within bounds.

Files that a user names, or that are in the directory of a run, are read by functions of
this module: they must be regular files, and memory is limited by the kind of file.
Every problem with a file is a ValueError with a short reason.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

# Most bytes of a file that is read whole.  Parsed JSON takes 20 times as much memory.
MOST_JSON = 2**26
MOST_WHOLE = 2**28  # for tables, and tokenizers, which another library parses
MOST_LINE = 2**26  # bytes of a line, if a file is read by lines
_TAIL = 2**16  # bytes at the end of a file that are read first


class File(Protocol):
    """The part of `Path` that readers use; `formats.gguf` makes files on demand."""

    def exists(self) -> bool:
        """Return True if the file exists."""
        ...

    def is_file(self) -> bool:
        """Return True if it is a regular file."""
        ...

    def read_bytes(self) -> bytes:
        """Return the content."""
        ...


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


def check_regular(path: File) -> None:
    """Check that a file is regular: reading devices or pipes may never end.

    Raises:
        ValueError: the file is missing, or not regular.
    """
    try:
        there, regular = path.exists(), path.is_file()
    except OSError as error:  # too long a name, or no right to enter the directory
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
    try:  # O_NONBLOCK: files of the kernel may block
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def read_bytes(path: File, *, most: int = MOST_JSON) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: it is no regular file, cannot be read, or has more than `most`
            bytes.
    """
    if not isinstance(path, Path):  # made from a file that was read within bounds
        return path.read_bytes()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:  # a file may grow, and files of the kernel have no size
            content = b"" if size > most else file.read(most + 1) or b""
        except OSError as error:
            raise _unreadable(path, error) from error
    if max(size, len(content)) > most:
        raise ValueError(
            f"{path} has {max(size, len(content)):,} bytes, and {most:,} are read of "
            f"such a file at most; put it right, or name another"
        )
    return content


def read_text(path: File, *, most: int = MOST_JSON) -> str:
    """Return the text in a file.

    Raises:
        ValueError: see `read_bytes`; or the content is not UTF-8.
    """
    try:
        return read_bytes(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8") from error


def read_lines(path: Path, *, most: int = MOST_LINE) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, one at a time.

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
    """Return the last `count` complete lines of a file that may still grow.

    Only the end of the file is read.

    Raises:
        ValueError: it is no regular file, or the lines have more than `most` bytes.
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
