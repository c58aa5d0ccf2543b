"""Write files into directories to which other users may write too.

If another user put a link at a file's path, we must not write to the link's target.  A
whole file is written under another name and renamed, which replaces a link; a file to
append to is opened without following links.  A plain `open` does neither.
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
    """Yield a file that replaces `path` atomically at the end of the block.

    The file is synced to disk first.  After an error it is removed, and `path` stays
    unchanged.

    Raises:
        OSError: `path` cannot be written.
    """
    # The random name is unpredictable, so that a link cannot be put there.
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(partial, _NEW | os.O_WRONLY, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)  # gcsfuse renames no file that is open for writing
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace a file atomically by a JSON object."""
    replace_file(path, (json.dumps(values, indent=2) + "\n").encode())


def open_to_append(path: Path, *, new: bool = False) -> io.FileIO:
    """Open or create a file to read it and append to it, unbuffered.

    With `new`, the file must not exist yet.

    Raises:
        OSError: the path cannot be opened, or is a link or no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    flags |= os.O_NONBLOCK  # opening a pipe without a reader would block
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
