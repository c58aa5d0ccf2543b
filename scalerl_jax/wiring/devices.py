"""The devices of the learner and of each generator replica, and their ledger."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import Mesh

from scalerl_jax.config import Config
from scalerl_jax.config.sections import HEAD_CHUNK_VOCAB
from scalerl_jax.machines.chips import CHIPS, chip_of
from scalerl_jax.model.architecture import (
    Architecture,
    check_replica,
    is_divisible,
    sampler_mesh,
)
from scalerl_jax.parallel.mesh import AXES, Device, make_mesh, split_devices
from scalerl_jax.planning.chooser import balanced
from scalerl_jax.run.ledger import Ledger

_log = logging.getLogger(__name__)


def fit_devices(
    config: Config, arch: Architecture, num_devices: int, *, kind: str = ""
) -> Config:
    """Return the config with all automatic settings replaced by values.

    They are mesh.data and mesh.fsdp, batch.rows_per_microbatch, the numbers, placement
    and versions of generators, slots, model.remat, model.head_chunk_vocab, and
    eval.concurrent.

    Args:
        config: as the user wrote it.
        arch: architecture of the policy.
        num_devices: number of devices of this process.
        kind: JAX's name of the devices.  For those in `machines.chips`, a table of
            memory and speed, `planning.chooser` chooses.

    Raises:
        ValueError: there are too few devices.
    """
    if chip_of(kind):
        config = balanced(config, arch, num_devices, kind)
    config = _without_chooser(config, kind)
    mesh, generators = config.mesh, config.generators
    least = (mesh.data or mesh.slices) * (mesh.fsdp or 1) * mesh.context * mesh.tensor
    each, count, placement = generators.devices, generators.count, generators.placement
    if placement == "auto":
        enough = least + (count or 1) * each <= num_devices
        placement = "apart" if each and enough else "shared"
    each = each or mesh.tensor
    left = num_devices
    if placement == "apart":
        count = count or max((num_devices - least) // each, 1)
        left -= count * each
    if not mesh.fsdp or not mesh.data:
        data, fsdp = _most_shards(config, arch, left)
        mesh = dataclasses.replace(mesh, data=data, fsdp=fsdp)
    rows = config.batch.rows_per_microbatch or mesh.data * mesh.fsdp
    if placement == "shared":
        learner = mesh.num_devices
        each = _fitting(each, learner, arch)
        count = count or learner // each
    check_replica(arch, each)
    return dataclasses.replace(
        config,
        mesh=mesh,
        batch=dataclasses.replace(config.batch, rows_per_microbatch=rows),
        generators=dataclasses.replace(
            generators, count=count, devices=each, placement=placement
        ),
    )


def _without_chooser(config: Config, kind: str) -> Config:
    """Return the config with safe values for settings that only the chooser sets."""
    if not config.sampler.slots:
        raise ValueError(
            f"sampler.slots = 0 is chosen only on devices whose memory and speed are "
            f"known, {', '.join(CHIPS)}; these are {kind or 'others'}: set "
            f"sampler.slots = 64 and sampler.cache_tokens = 300_000, or what fits"
        )
    model, generators = config.model, config.generators
    mesh = dataclasses.replace(config.mesh, tensor=config.mesh.tensor or 1)
    if model.remat == "auto":
        model = dataclasses.replace(model, remat="full")
    if not model.head_chunk_vocab:
        model = dataclasses.replace(model, head_chunk_vocab=HEAD_CHUNK_VOCAB)
    if not generators.versions:
        generators = dataclasses.replace(generators, versions=2)
    evaluations = config.eval
    if evaluations.concurrent == "auto":
        evaluations = dataclasses.replace(evaluations, concurrent="off")
    return dataclasses.replace(
        config, model=model, mesh=mesh, generators=generators, eval=evaluations
    )


def why_not_one_process(config: Config) -> str:
    """Return the reason why the run needs several processes; "": it needs only one."""
    if config.mesh.processes != 1:
        return (
            f"mesh.processes = {config.mesh.processes} needs learner processes besides "
            f"this one; start with --ray, or set it to 1"
        )
    if config.generators.processes != 1:
        return (
            f"generators.processes = {config.generators.processes} needs processes "
            f"besides this one; start with --ray, or set it to 1"
        )
    if config.generators.versions == 1:
        return (
            "generators.versions = 1 needs replicas in separate processes, which keep "
            "the next version in host memory; start with --ray, or set it to 2"
        )
    return ""


def _fitting(each: int, learner: int, arch: Architecture) -> int:
    """Return how many of the learner's devices one replica uses, `each` at most."""
    most = max(
        count for count in range(1, min(each, learner) + 1) if is_divisible(arch, count)
    )
    if most < each and is_divisible(arch, each):
        _log.info(
            "there are too few devices for generators.devices = %d beside the learner: "
            "each replica runs on %d of the learner's %d devices, between its programs",
            *(each, most, learner),
        )
        return most
    return each


def make_meshes(
    config: Config, arch: Architecture, devices: Sequence[Device]
) -> tuple[Mesh, tuple[Mesh, ...]]:
    """Return the learner's mesh and the mesh of each generator replica.

    Raises:
        ValueError: there are too few devices, or too few kv heads for a replica's.
    """
    generators = fit_devices(config, arch, len(devices)).generators
    learner, replicas = split_devices(
        devices,
        learner_count=config.mesh.num_devices,
        replicas=generators.count,
        each=generators.devices,
        shared=generators.placement == "shared",
    )
    axes = {name: getattr(config.mesh, name) for name in AXES}
    return make_mesh(learner, **axes), tuple(
        sampler_mesh(arch, own) for own in replicas
    )


def is_shared(config: Config) -> bool:
    """Return whether a fitted config's generators run on the learner's devices."""
    assert config.generators.placement != "auto", "`fit_devices` has not been called"
    return config.generators.placement == "shared"


def learner_pool(config: Config) -> str:
    """Return the name of the learner's pool in the ledger."""
    return "all" if is_shared(config) else "learner"


def generator_pools(config: Config) -> tuple[str, ...]:
    """Return the name of each replica's pool in the ledger."""
    count = config.generators.count
    if is_shared(config):
        return ("all",) * count
    if count == 1:
        return ("sampler",)
    return tuple(f"replica{number}" for number in range(count))


def ledger_pools(config: Config, kind: str) -> dict[str, float]:
    """Return the chips in each pool of the ledger; `kind` is JAX's of the devices."""
    devices = dict.fromkeys(generator_pools(config), config.generators.devices)
    devices[learner_pool(config)] = config.mesh.num_devices
    chip = chip_of(kind)
    each = 1 if chip is None else chip.devices_per_chip
    return {pool: number / each for pool, number in devices.items()}


def make_ledger(config: Config, *, chip: str = "") -> Ledger:
    """Return the ledger of this process's chips, or of others of the kind `chip`."""
    kind = chip or jax.devices()[0].device_kind
    return Ledger(pools=ledger_pools(config, kind), chip=config.mesh.chip or kind)


def _most_shards(config: Config, arch: Architecture, left: int) -> tuple[int, int]:
    """Return mesh.data and mesh.fsdp, of which one is 0, to use most remaining devices.

    Between equal ones, the split with the most shards of the state is chosen.

    Raises:
        ValueError: there are too few devices, or they cannot be divided evenly.
    """
    mesh, rows = config.mesh, config.batch.rows_per_microbatch
    slices = mesh.slices
    others = (mesh.data or slices) * mesh.context * mesh.tensor
    if mesh.data and rows % mesh.data:
        raise ValueError(
            f"batch.rows_per_microbatch = {rows} cannot be cut into mesh.data = "
            f"{mesh.data} shards; make it a multiple, or 0"
        )
    most = left // (mesh.context * mesh.tensor)

    def replicas(shards: int) -> Iterable[int]:
        return [mesh.data] if mesh.data else range(slices, most // shards + 1, slices)

    fits = [
        (data * shards, shards, data)
        for shards in ([mesh.fsdp] if mesh.fsdp else range(1, most + 1))
        for data in replicas(shards)
        if data * shards <= most
        and arch.hidden_size % shards == 0
        and shards % mesh.expert == 0
        and rows % (data * shards) == 0
    ]
    if not fits:
        generators = config.generators
        raise ValueError(
            f"mesh.fsdp = 0 finds no shards: generators.count = {generators.count} x "
            f"generators.devices = {generators.devices} leave {left} devices, which "
            f"must be at least mesh.data * mesh.context * mesh.tensor = {others}; "
            f"lower one of them, or set generators.placement = 'shared'"
        )
    _, shards, data = max(fits)
    return data, shards
