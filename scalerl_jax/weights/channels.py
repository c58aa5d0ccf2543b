"""Channels, which store published bytes until they are fetched; here: files.

A channel stores objects: lists of buffers that are put, fetched and discarded as one.
It does not guarantee that an object arrives, or arrives complete: the receiver compares
sizes and checksums.  Another transport is another class with the methods of `Channel`.
"""

import contextlib
import io
import os
import re
import struct
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]  # one dimension
Reference = str

_POLL_S = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")


class LostObjectError(RuntimeError):
    """An object cannot be fetched, or does not have the published size."""


class FullChannelError(RuntimeError):
    """An object cannot be stored, for example on a full disk."""


class Channel(Protocol):
    """Transport of objects from one process to others."""

    def put(self, name: str, buffers: Sequence[Buffer]) -> Reference:
        """Store a copy of the buffers, and return the reference that fetches them.

        Two objects of one name have different references.

        Raises:
            FullChannelError: the object cannot be stored; nothing is kept.
        """
        ...

    def fetch(
        self, reference: Reference, *, num_bytes: int, timeout_s: float
    ) -> list[Buffer]:
        """Return the buffers of an object, which the caller may keep.

        Args:
            reference: the result of `put`; it may come from an untrusted process.
            num_bytes: size of all buffers together; another size is refused unread.
            timeout_s: how long to wait for an object that does not exist yet.

        Raises:
            LostObjectError: the object is missing or incomplete.
        """
        ...

    def discard(self, reference: Reference) -> None:
        """Remove an object; a missing one is no error."""
        ...


class DirectoryChannel:
    """A channel of files in a directory that all processes can access.

    A file contains `_MAGIC`, the number of buffers, the size of each, and the buffers,
    each aligned to 64 bytes.  It is renamed when complete, and not synced: it is not
    needed after a crash of the machine, and checksums detect an incomplete one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        owner: str | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """Open the channel; remove objects that an earlier process of `owner` left.

        Args:
            directory: created if it is missing.
            owner: name of a process that puts objects, such as "rank0"; unique among
                running processes.  None: the process only fetches.
            patience_s: seconds to wait for a file.  References are published after the
                file is written, so a file that is still missing then was discarded.
        """
        self._directory = Path(directory)
        self._owner = owner and checked_name(owner)
        self._patience_s = patience_s
        self._directory.mkdir(parents=True, exist_ok=True)
        if owner:
            for path in self._directory.glob(f"*{owner}-*"):
                if path.name.removeprefix(".").startswith(f"{owner}-"):
                    path.unlink(missing_ok=True)

    def put(self, name: str, buffers: Sequence[Buffer]) -> Reference:
        """Write a file, and rename it."""
        assert self._owner, "a channel that puts has an owner"
        reference = f"{self._owner}-{checked_name(name)}-{uuid.uuid4().hex[:12]}"
        partial = self._directory / f".{reference}"
        try:
            with partial.open("xb") as file:
                write_buffers(file, buffers)
            partial.rename(self._directory / reference)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            size = sum(buffer.nbytes for buffer in buffers)
            raise FullChannelError(
                f"{size} bytes of {name} cannot be written to {self._directory}: "
                f"{error}; give the directory more space, or name another"
            ) from error
        return reference

    def fetch(
        self, reference: Reference, *, num_bytes: int, timeout_s: float
    ) -> list[Buffer]:
        """Wait for a file, and read it."""
        patience_s = min(timeout_s, self._patience_s)
        deadline = time.monotonic() + patience_s
        path = self._directory / checked_name(reference)
        while True:
            try:
                with path.open("rb") as file:
                    return read_buffers(file, num_bytes=num_bytes)
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise LostObjectError(
                        f"{path} is not there after {patience_s:g} s"
                    ) from None
            except (OSError, ValueError) as error:
                raise LostObjectError(f"{path}: {error}") from error
            time.sleep(_POLL_S)

    def discard(self, reference: Reference) -> None:
        """Remove a file."""
        (self._directory / checked_name(reference)).unlink(missing_ok=True)


_MAGIC = b"weights1"
_COUNT = struct.Struct("<Q")
_ALIGNMENT = 64  # so that the values of a buffer can be viewed at their width
_MAX_BUFFERS = 1 << 20


def checked_name(name: str) -> str:
    """Return `name`; raise LostObjectError unless it is a plain, visible file name."""
    if not _NAME.fullmatch(name):
        raise LostObjectError(f"{name[:200]!r} is no name of an object")
    return name


def write_buffers(file: BinaryIO, buffers: Sequence[Buffer]) -> None:
    """Write buffers in the format of `DirectoryChannel`."""
    sizes = np.array([buffer.nbytes for buffer in buffers], "<u8")
    _write_aligned(file, _MAGIC + _COUNT.pack(len(buffers)) + sizes.tobytes())
    for buffer in buffers:
        _write_aligned(file, np.ascontiguousarray(buffer).data)


def _write_aligned(file: BinaryIO, content: bytes | memoryview) -> None:
    file.write(content)
    file.write(bytes(-len(content) % _ALIGNMENT))


def read_buffers(file: io.BufferedIOBase, *, num_bytes: int) -> list[Buffer]:
    """Return the buffers of a file, which the caller may keep.

    Raises:
        ValueError: the file has another format or size.
    """
    head = file.read(len(_MAGIC) + _COUNT.size)
    if len(head) < len(_MAGIC) + _COUNT.size or not head.startswith(_MAGIC):
        raise ValueError("it does not begin with the header of an object")
    (count,) = _COUNT.unpack(head[len(_MAGIC) :])
    if count > _MAX_BUFFERS:
        raise ValueError(f"it announces {count} buffers; {_MAX_BUFFERS} at most")
    listed = file.read(8 * count)
    if len(listed) < 8 * count:
        raise ValueError("it ends within its list of buffers")
    sizes = np.frombuffer(listed, "<u8").tolist()
    if sum(sizes) != num_bytes:
        raise ValueError(f"it has {sum(sizes)} bytes and not {num_bytes}")
    skipped = -(len(head) + len(listed)) % _ALIGNMENT
    padded = [size + -size % _ALIGNMENT for size in sizes]
    # Check the size before that much memory is allocated.
    rest = file.seek(0, os.SEEK_END) - len(head) - len(listed)
    if rest != skipped + sum(padded):
        raise ValueError(f"{rest} bytes follow its list and not {sum(padded)}")
    file.seek(len(head) + len(listed) + skipped)
    whole = np.empty(sum(padded), np.uint8)
    if file.readinto(whole.data) != whole.nbytes:
        raise ValueError("it ends too early")
    starts = np.cumsum([0, *padded]).tolist()
    return [
        whole[start : start + size]
        for start, size in zip(starts[:-1], sizes, strict=True)
    ]
