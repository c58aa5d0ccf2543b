"""Device meshes: who trains, who samples, and along which axes arrays are cut.

A mesh has the three axes of `AXES`, of size 1 where they are not used, so that no
caller asks which of them exist.  What is cut along them is said in
`model.shardings`; nothing here knows a parameter.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

Device = Any  # a jax.Device, a name that type checkers take for a variable
AXES = ("data", "fsdp", "tensor")


def make_learner_mesh(
    devices: Sequence[Device], data: int, fsdp: int, tensor: int
) -> Mesh:
    """A mesh of all `devices`, in their order, with the axes of `AXES`.

    `tensor` varies fastest: neighbours in the list exchange the most.  The axes are
    Auto: `jax.make_mesh` makes Explicit ones, under which `jax.jit` refuses
    programs that leave the layout of intermediate values to the compiler.

    Raises:
        ValueError: the devices are not data * fsdp * tensor.
    """
    shape = (data, fsdp, tensor)
    for axis, size in zip(AXES, shape, strict=True):
        if size < 1:
            raise ValueError(f"mesh.{axis} = {size} must be above 0")
    wanted = data * fsdp * tensor
    if len(devices) != wanted:
        raise ValueError(
            f"mesh.data * mesh.fsdp * mesh.tensor = {data} * {fsdp} * {tensor} = "
            f"{wanted} devices, but the learner has {len(devices)}; change one of "
            f"the three (the most common way is mesh.fsdp), or hand over {wanted}"
        )
    return Mesh(
        np.asarray(devices, dtype=object).reshape(shape),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def split_devices(
    devices: Sequence[Device], *, learner_count: int, sampler_count: int
) -> tuple[list[Device], list[Device]]:
    """The first devices for the learner, the last for the sampler.

    With `sampler_count` 0 both share the learner's.  Devices between the two shares
    stay idle.

    Raises:
        ValueError: there are not enough devices for both.
    """
    if learner_count < 1 or sampler_count < 0:
        raise ValueError(
            f"{learner_count} learner devices (mesh.data * mesh.fsdp * mesh.tensor) "
            f"and mesh.sampler_devices = {sampler_count}: the first must be above 0, "
            f"the second 0 or more"
        )
    if learner_count + sampler_count > len(devices):
        raise ValueError(
            f"mesh.data * mesh.fsdp * mesh.tensor = {learner_count} learner devices "
            f"and mesh.sampler_devices = {sampler_count} need "
            f"{learner_count + sampler_count}, but JAX sees {len(devices)}; lower "
            f"mesh.data, mesh.fsdp or mesh.tensor, or set mesh.sampler_devices = 0 "
            f"to share the learner's"
        )
    learner = list(devices[:learner_count])
    if sampler_count == 0:
        return learner, learner
    return learner, list(devices[len(devices) - sampler_count :])
