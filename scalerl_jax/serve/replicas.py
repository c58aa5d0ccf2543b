"""The model on every device of the machine: replicas, each cut over a few of them."""

import concurrent.futures
import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from scalerl_jax.data.spelling import Spelling
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.shardings import sampler_shardings
from scalerl_jax.parallel.mesh import Device, make_mesh
from scalerl_jax.sampler.engine import Engine, EngineSettings
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import PyTree

Replica = tuple[Scheduler, PyTree]  # and the params that it samples from


def make_meshes(
    arch: Architecture, devices: Sequence[Device], tensor: int
) -> list[Mesh]:
    """A mesh per replica, of `tensor` devices; 0: as many as can share the model.

    Raises:
        ValueError: so many cannot, or do not divide the devices.
    """
    pieces = (arch.num_kv_heads, arch.num_heads, arch.ffn_size, arch.vocab_size)
    most = math.gcd(len(devices), *pieces)
    size = tensor or most
    if most % size:
        raise ValueError(
            f"--tensor={tensor} must divide the {len(devices)} devices and, in the "
            f"model, {arch.num_kv_heads} kv heads, {arch.num_heads} heads, "
            f"{arch.ffn_size} of a layer and {arch.vocab_size} tokens; choose a "
            f"divisor of {most}"
        )
    return [
        make_mesh(devices[start : start + size], tensor=size)
        for start in range(0, len(devices), size)
    ]


def make_replicas(
    settings: EngineSettings,
    params: PyTree,
    meshes: Sequence[Mesh],
    spelling: Spelling,
) -> list[Replica]:
    """A compiled scheduler on each mesh; `params` are those of `layered_table`."""

    def make(mesh: Mesh) -> Replica:
        own = jax.device_put(params, sampler_shardings(settings.arch, mesh))
        engine = Engine(settings, mesh=mesh)
        engine.warm_up(own)
        return Scheduler(engine, spelling=spelling), own

    # A program is compiled for its devices: one after another would take long.
    with concurrent.futures.ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(make, meshes))
