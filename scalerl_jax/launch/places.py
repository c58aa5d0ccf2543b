"""The kinds of places by name."""

from collections.abc import Sequence

from scalerl_jax.launch.client import Client
from scalerl_jax.launch.gke import GkePlace
from scalerl_jax.launch.job import Job
from scalerl_jax.launch.local import LocalPlace
from scalerl_jax.launch.place import Place
from scalerl_jax.launch.ray_place import RayPlace
from scalerl_jax.launch.tpu import TpuPlace


def make_place(
    job: Job, more: Sequence[str], client: Client, *, poll_s: float
) -> Place:
    """Return the `Place` that creates and controls the machines of a job."""
    if job.place == "local":
        return LocalPlace(job, more)
    if job.place == "gke":
        return GkePlace(job, more, client)
    if job.place == "ray_tpu":
        return RayPlace(job, more, client, poll_s=poll_s)
    return TpuPlace(job, more, client, poll_s=poll_s)
