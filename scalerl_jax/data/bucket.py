"""Prepared data sets in a bucket: brought there once, and fetched by each machine."""

from pathlib import Path

from scalerl_jax.data.records import REPORT
from scalerl_jax.utils import remote
from scalerl_jax.utils.hub import copy_of


def check(url: str) -> None:
    """Refuse a bucket that cannot be used.

    Raises:
        ValueError: it cannot.
    """
    remote.open_path(url, setting="--upload=")


def upload(prepared: Path, directory: Path, url: str) -> str:
    """Copy a prepared data set of a directory to the same place below a URL.

    Its report comes last: without one there is no data set.  Return where it is.

    Raises:
        ValueError: the bucket cannot be used.
        OSError: a file cannot be written there.
    """
    inside = prepared.relative_to(directory.expanduser())
    target = remote.open_path(url, setting="--upload=") / inside.as_posix()
    files = [file for file in prepared.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.name == REPORT, file)):
        name = file.relative_to(prepared).as_posix()
        remote.write(target / name, file.read_bytes())
    return f"{url.rstrip('/')}/{inside.as_posix()}"


def upload_file(file: Path, url: str) -> str:
    """Copy one file below a URL; return where it is.

    Raises:
        ValueError: the bucket cannot be used.
        OSError: it cannot be read, or not be written there.
    """
    path = remote.open_path(url, setting="--upload=") / file.name
    remote.write(path, file.expanduser().read_bytes())
    return f"{url.rstrip('/')}/{file.name}"


def bring(prepared: Path, directory: str) -> Path:
    """Return the directory of this machine with the copy of a prepared data set.

    It is fetched from below a `directory` in a bucket, as far as it has changed.

    Args:
        prepared: where the data set lies, from the directory on.
        directory: gs://BUCKET/PATH.

    Raises:
        ValueError: the bucket cannot be used.
    """
    here, url = copy_of(directory), f"{directory.rstrip('/')}/{prepared.as_posix()}"
    path = remote.open_path(url, setting="data.directory=")
    if remote.read(path / REPORT) is not None:
        remote.fetch(url, here / prepared, setting="data.directory=")
    return here
