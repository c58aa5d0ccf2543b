"""A channel for published params in a bucket, where machines share no directory."""

import io
import logging
import os
import shutil
import time
import uuid
from collections.abc import Sequence

from scalerl_jax.formats import remote
from scalerl_jax.formats.reading import is_remote
from scalerl_jax.process.ending import first_line
from scalerl_jax.weights.channels import (
    Buffer,
    DirectoryChannel,
    FullChannelError,
    LostObjectError,
    Reference,
    checked_name,
    read_buffers,
    write_buffers,
)

_POLL_S = 0.5
_log = logging.getLogger(__name__)


def make_channel(
    directory: str, *, owner: str | None = None
) -> "DirectoryChannel | BucketChannel":
    """Return the channel of a local directory, or of a directory in a bucket.

    Raises:
        ValueError: the bucket cannot be used.
    """
    if is_remote(directory):
        return BucketChannel(directory, owner=owner)
    return DirectoryChannel(directory, owner=owner)


def remove_channel(directory: str) -> None:
    """Remove all objects of a channel that no process uses any more.

    A failure is logged: what is left takes space, and nothing else.
    """
    try:
        if is_remote(directory):
            remote.remove(remote.open_path(directory, setting="params in "))
        elif os.path.isdir(directory):
            shutil.rmtree(directory)
    except Exception as error:  # noqa: BLE001  from gcsfs, its transport, or the system
        _log.warning("%s is not removed: %s", directory, first_line(error))


class BucketChannel:
    """A channel of objects in a bucket, with the format of `DirectoryChannel`'s files.

    An object becomes visible in a bucket only when it is complete.
    """

    def __init__(
        self, directory: str, *, owner: str | None = None, patience_s: float = 30.0
    ) -> None:
        """Open the channel; the arguments are those of `DirectoryChannel`.

        Raises:
            ValueError: the bucket cannot be used.
        """
        self._directory = remote.open_path(directory, setting="params in ", in_run=True)
        self._owner = owner and checked_name(owner)
        self._patience_s = patience_s
        if owner:
            for name in remote.entries(self._directory):
                if name.startswith(f"{owner}-"):
                    remote.remove(self._directory / name)

    def put(self, name: str, buffers: Sequence[Buffer]) -> Reference:
        """Write an object."""
        assert self._owner, "a channel that puts has an owner"
        reference = f"{self._owner}-{checked_name(name)}-{uuid.uuid4().hex[:12]}"
        file = io.BytesIO()
        write_buffers(file, buffers)
        try:
            remote.write(self._directory / reference, file.getvalue())
        except Exception as error:  # from gcsfs, its transport, or the system
            raise FullChannelError(
                f"{len(file.getvalue())} bytes of {name} cannot be written to "
                f"{os.fspath(self._directory)}: {first_line(error)}"
            ) from error
        return reference

    def fetch(
        self, reference: Reference, *, num_bytes: int, timeout_s: float
    ) -> list[Buffer]:
        """Wait for an object, and read it."""
        patience_s = min(timeout_s, self._patience_s)
        deadline = time.monotonic() + patience_s
        path = self._directory / checked_name(reference)
        try:
            while (data := remote.read(path)) is None:
                if time.monotonic() >= deadline:
                    raise LostObjectError(f"{path} is not there after {patience_s:g} s")
                time.sleep(_POLL_S)
            return read_buffers(io.BytesIO(data), num_bytes=num_bytes)
        except LostObjectError:
            raise
        except Exception as error:
            raise LostObjectError(f"{path}: {first_line(error)}") from error

    def discard(self, reference: Reference) -> None:
        """Remove an object."""
        remote.remove(self._directory / checked_name(reference))
