"""Recognise errors of a full disk, by the system or a library, and name the file."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator

# No space, no quota, a read-only file system, a limit of file sizes.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# tensorstore's os_error_code='28', and Rust's (os error 28).
_CODE = re.compile(r"os[ _]error(?:_code='| )(\d+)")


def why_full(error: BaseException) -> str:
    """Return the system's reason why a disk takes no more data; "": another error."""
    if isinstance(error, OSError) and error.errno is not None:
        number = error.errno
    else:
        found = _CODE.search(str(error))
        number = int(found[1]) if found else 0
    return os.strerror(number) if number in _FULL else ""


def lacks_space(error: BaseException) -> bool:
    """Return True if the disk or quota is full, rather than read-only or limited."""
    full = map(os.strerror, (errno.ENOSPC, errno.EDQUOT))
    return why_full(error) in full


def sentence(error: BaseException, *, path: object = None) -> str:
    """Return the message for a file that cannot be written: the cause, the way out."""
    name = path or getattr(error, "filename", None) or "a file or the output"
    return (
        f"cannot write {name} ({why_full(error)}); free space there, or name another "
        f"place"
    )


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Add `path` to the error of a full disk in the block; the system omits it.

    Raises:
        RuntimeError: the disk takes no more data.
    """
    try:
        yield
    except Exception as error:
        if not why_full(error):
            raise
        raise RuntimeError(sentence(error, path=path)) from error
