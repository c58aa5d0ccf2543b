"""Files from outside, read within bounds.

A file that a user names or that lies in the directory of a run is read by functions of
this module: it is a regular one, and no more memory is taken than its kind may need.
Whatever is wrong with it is a ValueError with a short reason.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

# Bytes of a file that is read whole, at most.  JSON takes 20 times as much memory.
MOST_JSON = 2**26
MOST_WHOLE = 2**28  # of tokenizers, which another library parses, and of tables
MOST_LINE = 2**26  # of a line, where a file is read line by line
_TAIL = 2**16  # read first of the end of a file


class File(Protocol):
    """A `Path` to its readers; `formats.gguf` makes files on demand."""

    def exists(self) -> bool:
        """Return whether the file exists."""
        ...

    def is_file(self) -> bool:
        """Return whether the file is a regular one."""
        ...

    def read_bytes(self) -> bytes:
        """Return its content."""
        ...


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


def check_regular(path: File) -> None:
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


def read_bytes(path: File, *, most: int = MOST_JSON) -> bytes:
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


def read_text(path: File, *, most: int = MOST_JSON) -> str:
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
