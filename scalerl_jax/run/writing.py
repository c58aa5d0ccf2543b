"""The writing of files into directories that others may write into, too.

A link that somebody has put where a file is to be must not have us write to what it
points at.  A file that is written whole is written beside and renamed, which replaces a
link; one that is added to is opened without following a link.  Neither is done with a
plain `open`.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file that replaces `path` at the end: a reader sees the old or the new.

    The file is on the disk then.  After an error it is gone, and `path` as it was.

    Raises:
        OSError: names `path`, which cannot be written.
    """
    # Nobody can foresee the name and put a link there.
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(partial, _NEW | os.O_WRONLY, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with os.fdopen(descriptor, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file in one go: a reader sees the old one or the new one."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace the file by a JSON object, in one go."""
    replace_file(path, (json.dumps(values, indent=2) + "\n").encode())


def open_to_append(path: Path, *, new: bool = False) -> io.FileIO:
    """Open a file to read it and to add to it, without a buffer; make it if need be.

    With `new`, a file that is there already is an error.

    Raises:
        OSError: names the path; also where it is a link or no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    flags |= os.O_NONBLOCK  # a pipe without a reader would hold us
    try:
        descriptor = os.open(path, flags | (os.O_EXCL if new else 0), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = "it is a symbolic link, which is not written through; remove it"
        raise OSError(error.errno, why, str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file; remove it", str(path))
    return io.FileIO(descriptor, "ab+")
