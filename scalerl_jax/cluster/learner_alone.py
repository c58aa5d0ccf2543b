"""A learner over the processes of a cluster, without generators: of a warm start."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from scalerl_jax import wiring
from scalerl_jax.cluster.fit_slices import fit_learner_slices
from scalerl_jax.cluster.kept_batches import NumberedBatches
from scalerl_jax.cluster.learner_processes import LearnerProcesses
from scalerl_jax.cluster.placement import slices_of
from scalerl_jax.cluster.run import check_even, controlled, kept_up_to_date
from scalerl_jax.cluster.session import Cluster
from scalerl_jax.config import Config
from scalerl_jax.learner.checkpoint import Checkpointer
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.run.directory import RunDirectory
from scalerl_jax.types import PackedBatch

__all__ = ["Cluster", "controlled", "fit_learner", "learner_processes"]


def fit_learner(
    config: Config, arch: Architecture, cluster: Cluster
) -> tuple[Config, Cluster]:
    """Return the config with numbers for all that is left to the cluster's devices.

    Args:
        config: with generators.placement = "shared".
        arch: the policy's architecture.
        cluster: where a CPU stands for a device, it has as many as are asked for.  On
            TPUs the one that is returned also says which rank sits where.

    Raises:
        ValueError: the cluster has too few devices, or they do not fall evenly.
    """
    if cluster.kind == "tpu":
        slices = slices_of(cluster.hosts())
        config, seats = fit_learner_slices(config, arch, slices)
        return config, dataclasses.replace(cluster, seats=seats)
    mesh, have = config.mesh, cluster.devices()
    mesh = dataclasses.replace(mesh, tensor=mesh.tensor or 1)
    if have is None:
        data = mesh.data or mesh.slices
        fsdp = mesh.fsdp or max(mesh.processes // mesh.slices, 1)
        mesh = dataclasses.replace(mesh, data=data, fsdp=fsdp)
        have = mesh.num_devices
    config = dataclasses.replace(config, mesh=mesh)
    config = wiring.fit_devices(config, arch, have)
    check_even(config)
    if config.mesh.num_devices > have:
        raise ValueError(
            f"the learner's {config.mesh.num_devices} devices (mesh.data * mesh.fsdp * "
            f"mesh.context * mesh.tensor) are more than the {have} of the cluster at "
            f"{cluster.address}; lower one of them"
        )
    return config, cluster


@contextlib.contextmanager
def learner_processes(
    config: Config,
    directory: RunDirectory,
    cluster: Cluster,
    *,
    files: Checkpointer,
    packed: Callable[[int], PackedBatch],
    note: Callable[[str], None],
) -> Iterator[LearnerProcesses]:
    """Run a learner over processes during the block; `scalerl status` sees them.

    Args:
        config: of `fit_learner`.
        directory: of the run.
        cluster: of `fit_learner`.
        files: the checkpoints of the directory.
        packed: makes the batch of a number, for processes that start again.
        note: tells a person what has happened.
    """
    bucket = directory.bucket
    flush = bucket.flush if bucket else lambda: None
    flush()  # other processes look for the run's config.json
    learner = LearnerProcesses(
        config,
        directory.url,
        cluster=cluster,
        files=files,
        kept=NumberedBatches(packed),
        note=note,
        before_save=flush,
    )
    try:
        with kept_up_to_date(directory.path, learner.table):
            yield learner
    finally:
        learner.close()
