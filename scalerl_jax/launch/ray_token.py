"""The token of a job's Ray cluster: an object in its bucket, and a file on each host.

Readers of the bucket can read the token, as well as the run's code and results.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scalerl_jax.formats import remote
from scalerl_jax.launch import gcloud
from scalerl_jax.launch.client import Client, NotFound
from scalerl_jax.machines import ray_access


def upload(url: str, client: Client) -> None:
    """Create a token and upload it, unless the bucket has one."""
    try:
        there = client.run(gcloud.storage("ls", url))
    except NotFound:
        there = ""
    if there:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = ray_access.write_token(Path(folder), ray_access.make_token())
        shown = file.name if client.dry_run else str(file)
        client.run(gcloud.storage("cp", shown, url))


@contextlib.contextmanager
def fetched(url: str) -> Iterator[None]:
    """Fetch the cluster's token, for Ray in processes that are started in the block.

    Only this user can read the token's file.  Import Ray inside the block.

    Raises:
        ValueError: the object is missing, or the bucket cannot be used.
        TimeoutError: the bucket does not answer in time.
    """
    data = remote.read(remote.open_path(url, setting="--ray-token=", in_run=True))
    if data is None:
        raise ValueError(
            f"--ray-token={url}: there is no such object; `launch start` makes it"
        )
    before = dict(os.environ)
    with ray_access.own_directory() as place:
        path = ray_access.write_token(place, data.decode(errors="replace").strip())
        ray_access.read_token(path)
        ray_access.use_token(os.environ, path)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
