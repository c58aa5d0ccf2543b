"""Device meshes: who trains, who samples, and along which axes arrays are cut.

A mesh has the axes of `AXES`, of size 1 where they are not used, so that no caller
asks which of them exist.  What is cut along them is said in
`model.architecture`; nothing here knows a parameter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from scalerl_jax.parallel.compiling import tpu_options

Device = Any  # a jax.Device, a name that type checkers take for a variable
# Replicas of the state, its shards (two axes, the second of which has other experts
# in every place), shards of a row's tokens, and of heads.
AXES = ("data", "fsdp", "expert", "context", "tensor")
SHARDS = ("fsdp", "expert")
ROWS = ("data", *SHARDS)  # that cut the rows of a batch


def make_mesh(
    devices: Sequence[Device],
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
) -> Mesh:
    """A mesh of all `devices`, in their order, with the axes of `AXES`.

    There are `fsdp` shards of the state, on the mesh's axes "fsdp" and "expert"
    together: experts are divided among `expert` of them.  `tensor` varies fastest:
    neighbours in the list exchange the most.  The axes are Auto: `jax.make_mesh` makes
    Explicit ones, under which `jax.jit` refuses programs that leave the layout of
    intermediate values to the compiler.

    Raises:
        ValueError: the devices are not data * fsdp * context * tensor, or `expert`
            does not divide `fsdp`.
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
            f"{len(devices)}; change one of them (the most common way is mesh.fsdp), "
            f"or hand over {wanted}"
        )
    return Mesh(
        np.asarray(devices, dtype=object).reshape(
            data, fsdp // expert, expert, context, tensor
        ),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def num_shards(mesh: Mesh) -> int:
    """Return the number of shards that the mesh cuts the train state into."""
    return math.prod(mesh.shape[axis] for axis in SHARDS)


def compiler_options(
    role: Literal["learner", "sampler"], mesh: Mesh
) -> dict[str, bool | int]:
    """Return the options for `jax.jit` of a program on a mesh: none but on TPUs."""
    if mesh.devices.flat[0].platform != "tpu":
        return {}

    return tpu_options(role, mesh)


def over_mesh(
    mesh: Mesh | None, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` on every device's part of its arguments; without a mesh, itself.

    Collectives are the function's own affair; nothing checks `out_specs`.
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

    The learner has the first, replicas the last; `shared` replicas have some of the
    learner's, by turns.  Devices between the two shares stay idle.

    Raises:
        ValueError: there are not enough devices.
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
