"""The token of a job's Ray cluster: an object of its bucket, and a file of each host.

Whoever may read the bucket has code and results of the run, too.
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
    """Make a token and bring it into the bucket, unless there is one."""
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
    """Fetch the cluster's token, for Ray of processes that are started in the block.

    It is in a file that this user alone can read; Ray is imported in the block.

    Raises:
        ValueError: there is none, or the bucket does not answer.
    """
    data = remote.read(remote.open_path(url, setting="--ray-token="))
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
