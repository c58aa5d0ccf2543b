"""The shards of the learner where mesh.data = 0 or mesh.fsdp = 0 leaves them open."""

from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture


def most_shards(config: Config, arch: Architecture, left: int) -> tuple[int, int]:
    """Return mesh.data and mesh.fsdp that use most devices of those that are left.

    Of several, the one with the most shards of the state.

    Raises:
        ValueError: there are too few, or they cannot be shared out evenly.
    """
    mesh, rows = config.mesh, config.batch.rows_per_microbatch
    others = (mesh.data or 1) * mesh.context * mesh.tensor
    if mesh.data and rows % mesh.data:
        raise ValueError(
            f"batch.rows_per_microbatch = {rows} cannot be cut into mesh.data = "
            f"{mesh.data} shards; make it a multiple, or 0"
        )
    most = left // (mesh.context * mesh.tensor)
    fits = [
        (data * shards, shards, data)
        for shards in ([mesh.fsdp] if mesh.fsdp else range(1, most + 1))
        for data in ([mesh.data] if mesh.data else range(1, most // shards + 1))
        if data * shards <= most
        and arch.hidden_size % shards == 0
        and shards % mesh.expert == 0
        and rows % (data * shards) == 0
    ]
    if not fits:
        generators = config.generators
        raise ValueError(
            f"mesh.fsdp = 0 finds no shards: the {left} devices that "
            f"generators.count = {generators.count} x generators.devices = "
            f"{generators.devices} leave must be at least mesh.data * mesh.context * "
            f"mesh.tensor = {others}; lower one of them, or set generators.placement "
            f"= 'shared'"
        )
    _, shards, data = max(fits)
    return data, shards
