"""Device meshes: their axes, and the split of devices into learner and generators.

A mesh always has the axes of `AXES`; unused axes have size 1, so that callers need not
check which exist.  `model.architecture` defines how parameters are sharded.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from scalerl_jax.parallel.compiling import tpu_options

Device = Any  # a jax.Device, a name that type checkers take for a variable
# Replicas of the state; its shards, on two axes, the second of which also divides
# experts; shards of a row's tokens; shards of heads.
AXES = ("data", "fsdp", "expert", "context", "tensor")
SHARDS = ("fsdp", "expert")
ROWS = ("data", *SHARDS)  # axes that divide the rows of a batch


def make_mesh(
    devices: Sequence[Device],
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
) -> Mesh:
    """Return a mesh of all `devices`, in their order, with the axes of `AXES`.

    The state has `fsdp` shards, on the mesh's axes "fsdp" and "expert" together;
    experts are divided among `expert` of them.  `tensor` varies fastest, since
    neighbours in the list exchange the most.  The axes are Auto: `jax.make_mesh` makes
    Explicit axes, with which `jax.jit` refuses programs that leave the layout of
    intermediate values to the compiler.

    Raises:
        ValueError: the number of devices is not data * fsdp * context * tensor, or
            `expert` does not divide `fsdp`.
    """
    if fsdp % expert:
        raise ValueError(
            f"mesh.expert = {expert} does not divide mesh.fsdp = {fsdp}, the shards "
            f"among which experts are divided; set it to a divisor"
        )
    wanted = data * fsdp * context * tensor
    if len(devices) != wanted:
        raise ValueError(
            f"mesh.data * mesh.fsdp * mesh.context * mesh.tensor = {data} * {fsdp} * "
            f"{context} * {tensor} = {wanted} devices, but the learner has "
            f"{len(devices)}; change one of them (most often mesh.fsdp), "
            f"or provide {wanted}"
        )
    return Mesh(
        np.asarray(devices, dtype=object).reshape(
            data, fsdp // expert, expert, context, tensor
        ),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def num_shards(mesh: Mesh) -> int:
    """Return the number of shards of the train state on a mesh."""
    return math.prod(mesh.shape[axis] for axis in SHARDS)


def compiler_options(
    role: Literal["learner", "sampler"], mesh: Mesh
) -> dict[str, bool | int]:
    """Return the compiler options of a program on a mesh; {} unless it has TPUs."""
    if mesh.devices.flat[0].platform != "tpu":
        return {}

    return tpu_options(role, mesh)


def over_mesh(
    mesh: Mesh | None, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `function` applied to each device's shards; without a mesh, unchanged.

    The function does its own collectives; `out_specs` is not checked.
    """
    if mesh is None:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def split_devices(
    devices: Sequence[Device],
    *,
    learner_count: int,
    replicas: int,
    each: int,
    shared: bool,
) -> tuple[list[Device], list[list[Device]]]:
    """Return the learner's devices, and those of every generator replica.

    The learner gets the first devices and the replicas the last; `shared` replicas use
    parts of the learner's devices, assigned in turn.  Devices in between stay idle.

    Raises:
        ValueError: the devices do not suffice.
    """
    own = 0 if shared else replicas * each
    if learner_count + own > len(devices):
        raise ValueError(
            f"mesh.data * mesh.fsdp * mesh.context * mesh.tensor = {learner_count} "
            f"learner devices and generators.count = {replicas} x generators.devices "
            f"= {each} need {learner_count + own}, but there are {len(devices)}; lower "
            f"one of the axes, or set generators.placement = 'shared'"
        )
    learner = list(devices[:learner_count])
    rest = list(devices[len(devices) - own :]) if own else learner
    if each > len(rest):
        raise ValueError(
            f"generators.devices = {each} is more than the {len(rest)} devices of the "
            f"learner, which generators.placement = 'shared' gives them; lower it"
        )
    places = [number % (len(rest) // each) * each for number in range(replicas)]
    return learner, [rest[first : first + each] for first in places]


def largest_divisor(length: int, most: int) -> int:
    """Return the largest divisor of `length` that is at most `most`."""
    return next(n for n in range(min(length, most), 0, -1) if length % n == 0)
