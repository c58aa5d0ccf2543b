"""Meshes of the first devices, by the sizes of their axes."""

import math

import jax

from scalerl_jax.parallel.mesh import make_mesh


def mesh_of(shape, devices=None):
    """A mesh (data, fsdp, context, tensor), then parts of experts, and slices."""
    data, fsdp, context, tensor, expert, slices = (*shape, 1, 1)[:6]
    devices = devices or jax.devices()[: math.prod(shape[:4])]
    return make_mesh(
        devices,
        slices=slices,
        data=data,
        fsdp=fsdp,
        expert=expert,
        context=context,
        tensor=tensor,
    )
